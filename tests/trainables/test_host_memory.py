"""Trainings on a CPU keep what they free, unless the user has set malloc up."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from trainables.host_memory import keep_freed

STEPS = """
import ctypes, resource, sys
from trainables.host_memory import keep_freed
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.memset.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
libc.free.argtypes = (ctypes.c_void_p,)
kept = sys.argv[1] == "keep" and keep_freed()
def step():  # of 20 activations; tensors would have small parts, one of which at the heap's end keeps it all by chance
    held = [libc.malloc(6_000_000) for _ in range(20)]
    for one in held:
        libc.memset(one, 1, 6_000_000)
    for one in held:
        libc.free(one)
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def steps(way: str) -> tuple[bool, int]:
    """Returns whether freed memory was kept, and the page faults of three steps, in a fresh process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    command = [sys.executable, "-c", STEPS, way]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=clean)
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs GNU's C library")
def test_a_step_takes_the_memory_that_the_last_one_freed() -> None:
    kept, few = steps("keep")
    _, many = steps("leave")
    assert kept
    assert few < many / 4


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert not keep_freed.__wrapped__()  # not what an earlier call found
