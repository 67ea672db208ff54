"""How a trial ended, and what an exception says about memory: one table of the faults and the words they come with.

Types first: `torch.OutOfMemoryError` is one. Text only where torch raises a plain RuntimeError. Neither torch nor Ray
is imported; their types are known by name and module.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal


class Outcome(StrEnum):
    """How a trial, a probe or a proposal ended; the word in the records."""

    OK = "ok"
    STOPPED = "stopped"  # by the pruner at a rung, or because the search's share of the time was spent
    CUT = "cut"  # at the last moment, so that confirming fits search.max_time
    OOM = "oom"  # of the device
    HOST_OOM = "host_oom"
    SHM = "shm"  # /dev/shm, which DataLoader workers pass batches through
    FD = "fd"  # file descriptors
    DIVERGED = "diverged"  # a loss or a metric that is not finite
    DATA = "data"  # a sample, or a loader process
    TIMEOUT = "timeout"  # it hung
    KILLED = "killed"  # its process was lost
    NO_RESULT = "no_result"
    REFUSED = "refused"  # predicted not to fit: never run, or ended once others had shown it
    CRASH = "crash"


CRASHED = (Outcome.CRASH, Outcome.DATA)
MOST_CRASHES = 3
DEPENDENT = "NotIndependent"
"""How the message begins of a training that went on from an earlier one (`workload.NotIndependent`)."""


def others_would_crash(messages: Sequence[str]) -> bool:
    """Returns whether trials that have only crashed so far, with these messages, will all crash.

    It takes `MOST_CRASHES` of them, or one whose message says that `run` is used wrongly.
    """
    wrong = ("LoopError", DEPENDENT)
    return len(messages) >= MOST_CRASHES or any(text.startswith(wrong) for text in messages)


Retreat = Literal["", "micro_batch", "fewer_workers", "no_workers", "no_cache"]
"""The change with which a trial begins again: a smaller micro-batch, half the loader's processes or none, samples that
are not kept in RAM; "" for none."""


@dataclass(frozen=True)
class Fault:
    """A way to fail: its name in the records, the outcome of a trial that meets it, and what may help."""

    name: str
    outcome: Outcome
    retreat: Retreat = ""


DEVICE = Fault("device allocator", Outcome.OOM, "micro_batch")
DRIVER = Fault("driver", Outcome.OOM, "micro_batch")
LIBRARY = Fault("CUDA library", Outcome.OOM, "micro_batch")
HOST = Fault("host allocator", Outcome.HOST_OOM, "micro_batch")
HOST_IN_LOADER = Fault("host allocator in a loader process", Outcome.HOST_OOM, "fewer_workers")
ENGINE = Fault("convolution without an engine", Outcome.OOM, "micro_batch")
"""Each workspace that cuDNN tried was too large; with few samples, that no kernel computes such a convolution."""
PINNED = Fault("page-locked memory", Outcome.HOST_OOM)
CACHE = Fault("RAM cache", Outcome.HOST_OOM, "no_cache")
RAY_MONITOR = Fault("Ray's memory monitor", Outcome.HOST_OOM)
PROCESS_LOST = Fault("process lost", Outcome.KILLED)
LOADER_LOST = Fault("loader process lost", Outcome.DATA, "fewer_workers")
LOADER_HUNG = Fault("loader process hung", Outcome.TIMEOUT, "fewer_workers")
SHARED_MEMORY = Fault("shared memory", Outcome.SHM, "no_workers")
DESCRIPTORS = Fault("file descriptors", Outcome.FD, "fewer_workers")
DATA = Fault("data", Outcome.DATA)
DIVERGED = Fault("not finite", Outcome.DIVERGED)
UNDEFINED = Fault("metric is NaN", Outcome.DIVERGED)
UNKNOWN = Fault("", Outcome.CRASH)
_NAMED = {own.name: own for own in tuple(globals().values()) if isinstance(own, Fault)}

# First match wins; tests/tuning/memory/test_oom.py has a message as it was seen for each. Descriptors before shared
# memory, whose text is the same but for its end. Bus error before DataLoader: a worker that dies of one lacks shared
# memory, not data. What a loader process says before what the training process says.
# torch names its shared memory /torch_<pid>_<random>; a folder of the user's may begin with torch_, too.
_TEXTS: tuple[tuple[str, Fault], ...] = (
    (r"Too many open files|received 0 items of ancdata", DESCRIPTORS),
    (r"unable to (?:allocate|resize|write to|open|mmap).*(?:shared memory|\(shm\)|/torch_\d+_)", SHARED_MEMORY),
    (r"\bBus error\b", SHARED_MEMORY),
    (r"(?:\bshm\b|shared memory|/torch_\d+_|in DataLoader worker process).*No space left on device", SHARED_MEMORY),
    (r"No space left on device.*(?:\bshm\b|shared memory|/torch_\d+_)", SHARED_MEMORY),
    (r"in DataLoader worker process.*DefaultCPUAllocator: (?:can't|not enough) .*memory", HOST_IN_LOADER),
    (r"in DataLoader worker process.*(?:std::bad_alloc|Cannot allocate memory)", HOST_IN_LOADER),
    (r"DefaultCPUAllocator: (?:can't|not enough) .*memory|\bstd::bad_alloc\b|can't start new thread", HOST),
    (r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED", HOST),
    (r"in pin memory thread.*out of memory", PINNED),
    (r"(?:CUDA|HIP|XPU) out of memory|MPS backend out of memory", DEVICE),
    (r"(?:(?:CUDA|HIP)(?: driver)? error:|Triton Error \[(?:CUDA|HIP)\]:) out of memory", DRIVER),
    (r"(?:CU|HIP)(?:BLAS|SOLVER|SPARSE)_STATUS_ALLOC_FAILED|CUFFT_ALLOC_FAILED|miopenStatusAllocFailed", LIBRARY),
    (r"CUBLAS_STATUS_NOT_INITIALIZED.*cublasCreate|CUDNN_STATUS_NOT_INITIALIZED", LIBRARY),  # no room for the handle
    (r"CUDNN_STATUS_(?:ALLOC|INTERNAL_ERROR_DEVICE_ALLOCATION)_FAILED|cuDNN.*\bALLOC_FAILED\b", LIBRARY),
    (r"unable to find an engine to execute this computation", ENGINE),
    (r"Cuda failure \d+ 'out of memory'|hipErrorOutOfMemory", DRIVER),  # the first is NCCL's
    (r"Error while creating shared memory segment /dev/shm/", SHARED_MEMORY),  # NCCL's
    (r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed|exited)", LOADER_LOST),
    (r"DataLoader timed out after", LOADER_HUNG),
)
_PATTERNS = tuple((re.compile(text, re.DOTALL), fault) for text, fault in _TEXTS)

# Every CUDA error ends in advice about "device-side assertions"; only "triggered" is one.
# Only a new process can use the device after these: CUDA calls them sticky, and says so by number since torch 2.9.
_POISON = re.compile(
    r"illegal memory access|device-side assert triggered|CU(?:BLAS|DNN)_STATUS_EXECUTION_FAILED|"
    r"unspecified launch failure|misaligned address|illegal instruction was encountered|invalid program counter|"
    r"hardware stack error|uncorrectable (?:ECC|NVLink) error|launch timed out and was terminated|context is destroyed|"
    r"CUDA error: unknown error|operation not supported on global/shared address space|GPU is lost|"
    r"hipErrorIllegalAddress|unhandled cuda error|NCCL communicator was aborted"
)
_STICKY_CODES = {214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719}

_REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]i?B)\b", re.I)
_BYTES = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_RAY_LOST = {"RayActorError", "WorkerCrashedError", "NodeDiedError", "LocalRayletDiedError"}


def classify(error: BaseException) -> Outcome:
    """Returns what the exception, or the first of its causes that says anything, means; CRASH where none does."""
    return fault(error).outcome


def fault(error: BaseException) -> Fault:
    """Returns the fault behind the exception, or the first behind it that says anything; else UNKNOWN.

    An error that was raised while another was handled has that other behind it, with `from` or without.
    """
    return next((found for link in chain(error, contexts=True) if (found := _of_one(link)) is not None), UNKNOWN)


def poisoned(error: BaseException) -> bool:
    """Returns whether the device context is lost, so that only a new process can use the device again."""
    return any(
        isinstance(link, RuntimeError)
        and (_POISON.search(str(link)) or getattr(link, "error_code", 0) in _STICKY_CODES)
        for link in chain(error, contexts=True)
    )


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


def retreat(found: Fault, micro_batch: int, workers: int) -> Mapping[str, int] | None:
    """Returns the knobs to change before the trial begins again, or None where no system knob can help any more.

    The trial means the same: the samples of an optimiser step and their order do not depend on these knobs.
    """
    if found.retreat == "micro_batch":
        smaller = halve(micro_batch)
        return None if smaller is None else {"micro_batch_size": smaller}
    if found.retreat == "no_cache":
        return {"ram_cache": False}
    if not found.retreat or workers < 1:
        return None
    return {"num_workers": workers // 2 if found.retreat == "fewer_workers" else 0}


def _of_one(error: BaseException) -> Fault | None:
    text = str(error)
    types = {(t.__module__.split(".")[0], t.__name__) for t in type(error).__mro__}
    names = {name for _, name in types}
    if "RankFailed" in names:  # of another process of the trial, which says what it was
        return _NAMED.get(str(getattr(getattr(error, "found", None), "fault", "")))
    if "CacheTooLarge" in names:  # no smaller micro-batch makes it smaller
        return CACHE
    if isinstance(error, MemoryError):  # NumPy's own is one
        return HOST_IN_LOADER if "in DataLoader worker process" in text else HOST
    if ("torch", "OutOfMemoryError") in types:
        return DEVICE
    if ("ray", "OutOfMemoryError") in types:
        return RAY_MONITOR
    if any(("ray", name) in types for name in _RAY_LOST):
        return PROCESS_LOST  # its text names the OOM killer among what may have happened, whatever did
    if "DataError" in names:
        return DATA
    if ("ray", "RayTaskError") in types or not (
        type(error) is RuntimeError or names & {"AcceleratorError", "DistBackendError", "OSError"}
    ):
        return None
    if isinstance(error, OSError) and (by_number := _of_number(error)) is not None:
        return by_number
    return next((found for pattern, found in _PATTERNS if pattern.search(text)), None)


def _of_number(error: OSError) -> Fault | None:
    if error.errno == errno.ENOMEM:  # no memory to fork a loader process
        return HOST
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return DESCRIPTORS
    if error.errno == errno.ENOSPC and error.filename is None and _raised_in(error, "multiprocessing"):
        return SHARED_MEMORY  # a semaphore of a loader's queue, whose error names no file
    return None


def _raised_in(error: BaseException, package: str) -> bool:
    """Returns whether the innermost frame of the traceback is of a package of that name."""
    trace: Any = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0] == package


def chain(error: BaseException, *, contexts: bool = False) -> Iterator[BaseException]:
    """Yields the error and its causes, each once; that of an error that came through Ray is in `cause`.

    With `contexts` also what was raised before while another was handled.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        cause = getattr(link, "cause", None)
        cause = link.__cause__ or (cause if isinstance(cause, BaseException) else None)
        link = cause or (link.__context__ if contexts and not link.__suppress_context__ else None)
