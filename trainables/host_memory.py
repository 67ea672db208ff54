"""Makes GNU's C library keep the memory that CPU tensors free, instead of returning it to the system."""

from __future__ import annotations

import ctypes
import functools
import os
import resource
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3), glibc's malloc.h
TRIM_BYTES = 1_000_000_000
"""Free bytes at the end of the heap above which they are returned to the system."""
MMAP_BYTES = 32 * 2**20
"""The largest allocation from the heap: the maximum that glibc's own adaptive threshold reaches."""
AT_START: Mapping[str, str] = {
    "MALLOC_TRIM_THRESHOLD_": str(TRIM_BYTES),
    "MALLOC_MMAP_THRESHOLD_": str(MMAP_BYTES),
}
"""The same settings for another process: environment variables that glibc reads when it starts."""
MOST_FAULTS_PER_S = 50_000
"""Freed memory is kept if a training has more page faults. headpose has about 125,000 a second, the others at most
6,000. Keeping has a price: it makes nli train at 0.96 of its speed, for an unknown reason."""
_USERS_OWN = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")


def is_kept() -> bool:
    """Returns whether `keep_freed` was called; later steps may be faster than earlier ones."""
    return keep_freed.cache_info().currsize > 0


def page_faults() -> int:
    """Returns the minor page faults of this process so far: pages taken from the system."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@functools.cache
def keep_freed() -> bool:
    """Makes glibc keep freed memory for the next allocation; returns whether it does.

    By default glibc returns free memory at the end of the heap beyond at most 64 MiB. A step that frees its activations
    then takes them from the system again, page by page: 990,000 page faults in a training of headpose instead of
    87,000. Without these faults headpose trains 1.31 times as fast; 1.21 times if they must be noticed first. The
    process's peak memory stays the same (docs/log/two_cores.md).
    Call it after data is loaded: data loaded later also comes from the heap, which made temporal 6 % slower.

    Does nothing if the user has configured or replaced glibc's malloc, or if there is no glibc.
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
