"""Freed memory: kept where glibc is as it comes, left alone where the user has set it up."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tuning.backends.host_memory import keep_freed

COUNT = """
import resource, sys, torch
from tuning.backends.host_memory import keep_freed
if sys.argv[1] == "keep":
    assert keep_freed({})
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(32):
    torch.empty(9 * 2**20).fill_(1.0)  # 36 MiB, above the size to which glibc's own threshold adapts
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_the_users_own_settings_stay(name: str) -> None:
    assert not keep_freed({name: "1"})


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_what_was_freed_is_not_faulted_in_again() -> None:
    """32 times 36 MiB are 294,912 pages of 4 KiB; kept, a few times 9,216 serve all."""
    faults = {
        side: int(subprocess.check_output([sys.executable, "-c", COUNT, side], text=True, timeout=60))
        for side in ("keep", "default")
    }
    assert faults["default"] > 2 * faults["keep"]
