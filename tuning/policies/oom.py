"""How a trial ended, and what an exception says about memory.

Types first: `torch.OutOfMemoryError` is one. Text only where torch raises a plain RuntimeError. Torch is not imported.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from enum import StrEnum


class Outcome(StrEnum):
    """How a trial, a probe or a proposal ended; the word in the records."""

    OK = "ok"
    STOPPED = "stopped"  # by a rung
    OOM = "oom"  # of the device
    HOST_OOM = "host_oom"
    SHM = "shm"  # /dev/shm, which DataLoader workers pass batches through
    DIVERGED = "diverged"  # a loss or a metric that is not finite
    DATA = "data"  # a sample, or a loader process
    TIMEOUT = "timeout"
    KILLED = "killed"  # its process was lost
    NO_RESULT = "no_result"
    REFUSED = "refused"  # predicted not to fit, never run
    CRASH = "crash"


# First match wins. Bus error before DataLoader: a worker that dies of one lacks shared memory, not data.
_TEXTS: tuple[tuple[re.Pattern[str], Outcome], ...] = (
    (re.compile(r"unable to (?:allocate|resize|write to|mmap).*(?:shared memory|\(shm\)|/torch_)", re.I), Outcome.SHM),
    (re.compile(r"\bBus error\b", re.I), Outcome.SHM),
    (re.compile(r"(?:\bshm\b|shared memory|/torch_).*No space left on device", re.I | re.S), Outcome.SHM),
    (re.compile(r"No space left on device.*(?:\bshm\b|shared memory|/torch_)", re.I | re.S), Outcome.SHM),
    (re.compile(r"DefaultCPUAllocator: (?:can't|not enough) .*memory", re.I), Outcome.HOST_OOM),
    (re.compile(r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), Outcome.HOST_OOM),
    (re.compile(r"(?:CUDA|HIP)(?: error:)? out of memory"), Outcome.OOM),
    (re.compile(r"CUBLAS_STATUS_ALLOC_FAILED"), Outcome.OOM),
    (re.compile(r"CUDNN_STATUS_(?:ALLOC|INTERNAL_ERROR_DEVICE_ALLOCATION)_FAILED"), Outcome.OOM),
    (re.compile(r"cuDNN.*\bALLOC_FAILED\b", re.I), Outcome.OOM),
    (re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed|exited)"), Outcome.DATA),
    (re.compile(r"DataLoader timed out after"), Outcome.TIMEOUT),
)
_POISON = re.compile(
    r"illegal memory access|device-side assert|CUBLAS_STATUS_EXECUTION_FAILED|unspecified launch failure|"
    r"misaligned address|illegal instruction was encountered"
)
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]i?B)\b", re.I)
_BYTES = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def classify(error: BaseException) -> Outcome:
    """Returns what the exception, or the first of its causes that says anything, means; CRASH where none does."""
    return next((o for link in _chain(error) if (o := _of_one(link)) is not None), Outcome.CRASH)


def poisoned(error: BaseException) -> bool:
    """Returns whether the device context is lost, so that only a new process can use the device again."""
    return any(isinstance(link, RuntimeError) and _POISON.search(str(link)) for link in _chain(error))


def requested_bytes(text: str) -> int | None:
    """Returns the size of the allocation that failed, as in "Tried to allocate 2.00 GiB", or None."""
    found = _REQUESTED.search(text)
    if not found:
        return None
    try:
        return round(float(found[1]) * _BYTES[found[2][0].lower()])
    except ValueError:
        return None


def halve(micro_batch: int) -> int | None:
    """Returns half the micro-batch, rounded down, or None where one sample is the least already."""
    return micro_batch // 2 if micro_batch > 1 else None


def _of_one(error: BaseException) -> Outcome | None:
    if isinstance(error, MemoryError):  # NumPy's own is one
        return Outcome.HOST_OOM
    types = type(error).__mro__
    if any(t.__name__ == "OutOfMemoryError" and t.__module__.split(".")[0] == "torch" for t in types):
        return Outcome.OOM
    text = str(error)
    if any(t.__name__ == "AcceleratorError" for t in types):
        return Outcome.OOM if "out of memory" in text else None
    if any(t.__name__ == "DataError" for t in types):
        return Outcome.DATA
    if type(error) is not RuntimeError and not isinstance(error, OSError):
        return None
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:  # no memory to fork a loader process
        return Outcome.HOST_OOM
    return next((outcome for pattern, outcome in _TEXTS if pattern.search(text)), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and its `__cause__`s, each once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__
