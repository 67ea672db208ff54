"""Trainings on a CPU keep what they free, unless the user has set malloc up."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, sys
import torch
from trainables.host_memory import keep_freed
kept = sys.argv[1] == "keep" and keep_freed()
def step():
    held = [torch.ones(1_500_000) for _ in range(20)]  # 6 MB each; free, they are 120 MB at the end of the heap
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def steps(way: str, **environment: str) -> tuple[bool, int]:
    """Returns whether freed memory was kept, and the page faults of ten steps, in a fresh process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    command = [sys.executable, "-c", STEPS, way]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**clean, **environment})
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs GNU's C library")
def test_a_step_takes_the_memory_that_the_last_one_freed() -> None:
    kept, few = steps("keep")
    _, many = steps("leave")
    assert kept
    assert few < many / 4


def test_what_the_user_has_set_stays() -> None:
    assert not steps("keep", MALLOC_ARENA_MAX="4")[0]
