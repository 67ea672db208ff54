"""What GNU's C library does with the memory that tensors on the CPU free."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3), glibc's malloc.h
TRIM_BYTES = 1_000_000_000
"""What may lie free at the end of the heap before it is given back to the system."""
MMAP_BYTES = 32 * 2**20
"""What one allocation may hold to come from the heap: the most that glibc's own, which adapts, comes to."""
AT_START: Mapping[str, str] = {
    "MALLOC_TRIM_THRESHOLD_": str(TRIM_BYTES),
    "MALLOC_MMAP_THRESHOLD_": str(MMAP_BYTES),
}
"""The same for a process that is not ours, as variables that glibc reads when the process starts."""
MOST_FAULTS_PER_S = 50_000
"""Freed memory is kept where a training has more page faults. headpose has about 125,000 a second, the others 6,000 at
most. Keeping is not free: with it nli trains at 0.96 of its speed, for a reason that is not known."""
_USERS_OWN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def is_kept() -> bool:
    """Returns whether `keep_freed` was called, so that steps after that may be faster."""
    return keep_freed.cache_info().currsize > 0


def page_faults() -> int:
    """Returns how many pages this process has taken from the system so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@functools.cache
def keep_freed() -> bool:
    """Has glibc keep what is freed for the next allocation; returns whether it does.

    By default it gives back what is free at the end of the heap beyond 64 MiB at most. A step that frees its
    activations at its end then takes them from the system anew, page by page: 990,000 page faults in a training of
    headpose in place of 87,000, which trains 1.31 times as fast without them, and 1.21 times where they are seen
    first; the most that the process holds stays the same (docs/log/two_cores.md).
    To be called when data is loaded: data that is loaded later comes from the heap too, and temporal lost 6 % where
    it had.

    Nothing is done where the user has set glibc's malloc up or loaded another one, and where there is no glibc.
    """
    if any(name.startswith(_USERS_OWN) for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # Windows; a C library without it
        return False
    # musl has the function's name and refuses; macOS lacks it.
    return all(
        mallopt(parameter, value) == 1
        for parameter, value in ((_M_MMAP_THRESHOLD, MMAP_BYTES), (_M_TRIM_THRESHOLD, TRIM_BYTES))
    )
