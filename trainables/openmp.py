"""Releases the threads that OpenMP keeps for a thread of this process."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

_HARD = 2
"""`omp_pause_hard` of OpenMP 5.0: the threads end; the next parallel operator starts them anew."""


def release_threads() -> None:
    """Ends the threads that OpenMP keeps for the calling thread; takes a microsecond if there are none.

    GNU's library counts the threads kept for all threads of a process. If they outnumber the cores, idle ones sleep at
    once, and each parallel operator of any thread takes longer: a small linear layer by 37 us, a step of 1.1 ms becomes
    1.5 ms (two cores, docs/log/newcomer.md).
    """
    for library in _libraries():
        library.omp_pause_resource_all(_HARD)


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    """Returns the copies of GNU's OpenMP in this process, including torch's own; empty on other systems."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    paths = {line.split(maxsplit=5)[5] for line in lines if "libgomp" in line}
    return tuple(lib for path in sorted(paths) if hasattr(lib := ctypes.CDLL(path), "omp_pause_resource_all"))
