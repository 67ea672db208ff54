"""The threads that OpenMP keeps for a thread of ours."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

_HARD = 2
"""`omp_pause_hard` of OpenMP 5.0: the threads end; the next parallel operator starts them anew."""


def release_threads() -> None:
    """Ends what OpenMP keeps for the calling thread; a microsecond where that is nothing.

    GNU's library adds up what all threads of a process keep. Beyond the cores, what waits for work sleeps at once, and
    each parallel operator of any thread takes longer: a small linear layer 37 us, a step of 1.1 ms 1.5 (two cores,
    docs/log/newcomer.md).
    """
    for library in _libraries():
        library.omp_pause_resource_all(_HARD)


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    """Returns GNU's OpenMP as this process has it, torch's own among them; none on other systems."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    paths = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}
    return tuple(lib for path in sorted(paths) if hasattr(lib := ctypes.CDLL(path), "omp_pause_resource_all"))
