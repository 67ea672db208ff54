"""How this process's C library treats the memory that tensors on the CPU free."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # mallopt(3), glibc's malloc.h
KEPT_BYTES = 2**31 - 1
"""What one allocation may hold to be kept, and what may lie free in a heap: the largest that mallopt takes."""
PAD_BYTES = 64 * 2**20
"""By how much the heap grows at a time; what is not touched of it is address space alone."""
_USERS_OWN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed(environment: Mapping[str, str] = os.environ) -> bool:
    """Has glibc keep what is freed for the next allocation; returns whether it does.

    By default each large tensor is taken from the system and goes back to it when it is freed, so that every step
    faults its activations in anew, page by page; the threshold adapts, but to 32 MiB at most. Kept, a training of nli
    takes 0.39 million page faults in place of 0.71 million, and 1,607 MiB at most in place of 1,604. What that buys:
    `python -m benchmarks.environment`.

    Nothing is done where the user has set glibc's malloc up or loaded another one, and where there is no glibc.
    """
    if any(name.startswith(_USERS_OWN) for name in environment):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # Windows; a C library without it
        return False
    # musl has the function's name and refuses; macOS lacks it.
    return all(
        mallopt(parameter, value) == 1
        for parameter, value in (
            (_M_MMAP_THRESHOLD, KEPT_BYTES),
            (_M_TRIM_THRESHOLD, KEPT_BYTES),
            (_M_TOP_PAD, PAD_BYTES),
        )
    )
