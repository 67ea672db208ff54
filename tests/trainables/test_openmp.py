"""What OpenMP keeps for a thread, and that it can be had back."""

import threading
from pathlib import Path

import pytest
import torch

from trainables.openmp import release_threads

TASKS = Path("/proc/self/task")


def threads_of_the_process() -> int:
    """Returns how many threads this process has."""
    return len(list(TASKS.iterdir()))


@pytest.mark.skipif(not TASKS.is_dir(), reason="Linux counts them in /proc")
def test_the_threads_that_openmp_keeps_end_and_come_back_with_the_next_operator() -> None:
    counts: list[int] = []

    def work() -> None:
        torch.set_num_threads(2)
        counts.append(threads_of_the_process())
        large = torch.ones(1 << 20)
        for _ in range(2):
            large.exp()
            counts.append(threads_of_the_process())
            release_threads()
            release_threads()
            counts.append(threads_of_the_process())

    before = torch.get_num_threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    first = counts[0]
    assert counts == [first, first + 1, first, first + 1, first]
