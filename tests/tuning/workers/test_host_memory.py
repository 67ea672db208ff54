"""Freed memory: kept where glibc is as it comes, left alone where the user has set it up."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tuning.workers.host_memory import keep_freed

COUNT = """
import resource, torch
from tuning.workers.host_memory import keep_freed

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(6):
        torch.empty(9 * 2**20).fill_(1.0)  # 36 MiB, above the size to which glibc's own threshold adapts
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
assert keep_freed({})
faults()  # the heap grows until it has room
print(before, faults())
"""


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_the_users_own_settings_stay(name: str) -> None:
    assert not keep_freed({name: "1"})


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_what_was_freed_is_not_faulted_in_again() -> None:
    """Six times 36 MiB are 55,296 pages of 4 KiB."""
    said = subprocess.check_output([sys.executable, "-c", COUNT], text=True, timeout=60)
    given_back, kept = map(int, said.split())
    assert given_back > 50_000
    assert kept < given_back / 2
