"""Endings told apart: by type first, by text only where torch raises a plain RuntimeError."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import ray
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainables.ram_cache import CacheTooLarge
from tuning.memory import oom
from tuning.memory.oom import Outcome, classify, fault, poisoned, requested_bytes, retreat

# Messages as they were seen: torch 2.11 to 2.13, Ray 2.60, Linux. Addresses, ids and paths are shortened.
CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.68 GiB of which 1.10 GiB is "
    "free. 8.00 GiB allowed; Including non-PyTorch memory, this process has 7.31 GiB memory in use. Of the allocated "
    "memory 6.74 GiB is allocated by PyTorch, and 461.21 MiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
PREEMPTED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. Allocation was preemptively rejected because it would exceed "
    "per_process_memory_fraction limit."
)
DRIVER_OOM = (
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda/ for more "
    "information.\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
HOST_OOM = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)"
)
LOADER = "in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n  File ...\n"
SHM = "unable to allocate shared memory(shm) for file </torch_71_2>: No space left on device (28)"
BUS = (
    "DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)
DESCRIPTORS_OUT = (
    "Too many open files. Communication with the workers is no longer possible. Please increase the limit using "
    "`ulimit -n` in the shell or change the sharing strategy by calling "
    "`torch.multiprocessing.set_sharing_strategy('file_system')` at the beginning of your code"
)
RAY_MONITOR_KILL = (
    "Task was killed due to the node running low on memory.\nMemory on the node (IP: 127.0.0.1, ID: 8c5a14) where the "
    "task (actor ID: 41617b, name=nli_trials.__init__, pid=548, memory used=12.18GB) was running was 31.91GB / 33.28GB "
    "(0.958834), which exceeds the memory usage threshold of 0.95. Ray killed this worker (ID: 0f7695) because it was "
    "the most recently scheduled task; to see more information about memory usage on this node, use `ray logs "
    "raylet.out`."
)
RAY_KILL = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: nli_trials\nThe actor is dead because its "
    "worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a "
    "connection error code 2. End of file. There are some potential root causes. (1) The process is killed by SIGKILL "
    "by OOM killer due to high memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly "
    "due to SIGSEGV or other unexpected errors."
)


class DataError(Exception):
    """Stands for a workload's own."""


class AcceleratorError(RuntimeError):
    """Stands for torch.AcceleratorError, which cannot be made without a device."""

    def __init__(self, text: str, error_code: int = 0) -> None:
        super().__init__(text)
        self.error_code = error_code


NCCL_OOM = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.3\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
)


class DistBackendError(RuntimeError):
    """Stands for torch.distributed.DistBackendError, which NCCL's errors come as."""


class OutOfMemoryError(Exception):
    """A class of that name that is neither torch's nor Ray's."""


def task_error(cause: Exception) -> BaseException:
    """Returns what `ray.get` raises for an exception of an actor's method."""
    error = ray.exceptions.RayTaskError("TrialRunner.train", f"ray::TrialRunner.train()\n{cause}", cause)
    return error.as_instanceof_cause()


def full_queue() -> OSError:
    """Returns what a loader's queue raises where /dev/shm has no room for a semaphore; it names no file."""
    names: dict[str, Any] = {"__name__": "multiprocessing.synchronize", "OSError": OSError}
    exec("def lock(): raise OSError(28, 'No space left on device')", names)  # noqa: S102
    try:
        names["lock"]()
    except OSError as error:
        return error
    raise AssertionError


FAULTS = [
    (torch.OutOfMemoryError(CUDA_OOM), oom.DEVICE),
    (torch.OutOfMemoryError(PREEMPTED), oom.DEVICE),
    (torch.OutOfMemoryError(""), oom.DEVICE),
    (torch.OutOfMemoryError(f"Caught OutOfMemoryError {LOADER}torch.OutOfMemoryError: {CUDA_OOM}"), oom.DEVICE),
    (RuntimeError(CUDA_OOM), oom.DEVICE),
    (task_error(torch.OutOfMemoryError(CUDA_OOM)), oom.DEVICE),
    (AcceleratorError(DRIVER_OOM, 2), oom.DRIVER),
    (RuntimeError(DRIVER_OOM), oom.DRIVER),
    (RuntimeError("CUDA driver error: out of memory"), oom.DRIVER),
    (RuntimeError("Triton Error [CUDA]: out of memory"), oom.DRIVER),
    (task_error(RuntimeError(DRIVER_OOM)), oom.DRIVER),
    (DistBackendError(NCCL_OOM), oom.DRIVER),
    (RuntimeError("FIND was unable to find an engine to execute this computation"), oom.ENGINE),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), oom.LIBRARY),
    (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), oom.LIBRARY),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), oom.LIBRARY),
    (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"), oom.LIBRARY),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), oom.LIBRARY),
    (RuntimeError("cuDNN Frontend error: ALLOC_FAILED"), oom.LIBRARY),
    (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"), oom.LIBRARY),
    (RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"), oom.LIBRARY),
    (MemoryError(), oom.HOST),
    (MemoryError("std::bad_alloc"), oom.HOST),
    (RuntimeError("std::bad_alloc"), oom.HOST),
    (RuntimeError("can't start new thread"), oom.HOST),
    (RuntimeError(HOST_OOM), oom.HOST),
    (task_error(MemoryError("Unable to allocate 3.64 TiB for an array with shape (1000000,)")), oom.HOST),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), oom.HOST),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), oom.HOST),
    (RuntimeError(f"Caught RuntimeError {LOADER}RuntimeError: {HOST_OOM}"), oom.HOST_IN_LOADER),
    (MemoryError(f"Caught _ArrayMemoryError {LOADER}numpy._core._exceptions._ArrayMemoryError"), oom.HOST_IN_LOADER),
    (RuntimeError(f"Caught AcceleratorError in pin memory thread for device 0.\n{DRIVER_OOM}"), oom.PINNED),
    (ray.exceptions.OutOfMemoryError(RAY_MONITOR_KILL), oom.RAY_MONITOR),
    (ray.exceptions.RayActorError(error_msg=RAY_KILL), oom.PROCESS_LOST),
    (ray.exceptions.ActorDiedError(), oom.PROCESS_LOST),
    (ray.exceptions.ActorUnavailableError("The actor is unavailable", None), oom.PROCESS_LOST),
    (ray.exceptions.WorkerCrashedError(), oom.PROCESS_LOST),
    (RuntimeError(SHM), oom.SHARED_MEMORY),
    (RuntimeError("unable to write to file </torch_2286_2857144775>"), oom.SHARED_MEMORY),
    (RuntimeError(f"Caught RuntimeError {LOADER}unable to mmap 8 bytes from file </torch_7_1>"), oom.SHARED_MEMORY),
    (RuntimeError(BUS), oom.SHARED_MEMORY),
    (OSError(errno.ENOSPC, "No space left on device", "/dev/shm/torch_71_2"), oom.SHARED_MEMORY),  # noqa: S108
    (OSError(f"Caught OSError {LOADER}OSError: [Errno 28] No space left on device"), oom.SHARED_MEMORY),
    (full_queue(), oom.SHARED_MEMORY),
    (RuntimeError(DESCRIPTORS_OUT), oom.DESCRIPTORS),
    (RuntimeError("unable to open shared memory object </torch_7_1>: Too many open files (24)"), oom.DESCRIPTORS),
    (RuntimeError("received 0 items of ancdata"), oom.DESCRIPTORS),
    (OSError(errno.EMFILE, "Too many open files"), oom.DESCRIPTORS),
    (RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed. "), oom.LOADER_LOST),
    (RuntimeError("DataLoader worker (pid 71) is killed by signal: Segmentation fault. "), oom.LOADER_LOST),
    (RuntimeError("DataLoader worker (pid(s) 71, 72) exited unexpectedly"), oom.LOADER_LOST),
    (RuntimeError("DataLoader worker (pid 71) exited unexpectedly with exit code 1. Details are"), oom.LOADER_LOST),
    (RuntimeError("DataLoader timed out after 30 seconds"), oom.LOADER_HUNG),
    (DataError("sample 7 has no label"), oom.DATA),
    (CacheTooLarge("ram_cache=true would keep 9 samples in RAM"), oom.CACHE),
    # what must not match
    (ValueError("out of memory"), oom.UNKNOWN),
    (ValueError(CUDA_OOM), oom.UNKNOWN),
    (KeyError("CUBLAS_STATUS_ALLOC_FAILED"), oom.UNKNOWN),
    (NotImplementedError("CUDA error: out of memory"), oom.UNKNOWN),
    (OutOfMemoryError(RAY_MONITOR_KILL), oom.UNKNOWN),
    (RuntimeError(RAY_KILL), oom.UNKNOWN),
    (task_error(ValueError(RAY_KILL)), oom.UNKNOWN),
    (RuntimeError("the vocabulary is out of memory bounds"), oom.UNKNOWN),
    (AcceleratorError("CUDA error: an illegal memory access was encountered", 700), oom.UNKNOWN),
    (OSError(errno.ENOSPC, "No space left on device", "runs/trials.jsonl"), oom.UNKNOWN),
    (OSError(errno.ENOSPC, "No space left on device"), oom.UNKNOWN),
    (OSError(errno.ENOSPC, "No space left on device", "/scratch/torch_cache/emb.npy"), oom.UNKNOWN),
    (RuntimeError("/scratch/torch_cache/emb.npy: No space left on device"), oom.UNKNOWN),
    (RuntimeError("unable to open file </data/torch_sets/x.bin> in read-only mode"), oom.UNKNOWN),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), oom.UNKNOWN),
    (RuntimeError("shape mismatch in shared memory block"), oom.UNKNOWN),
]


NAMES = [f"{number} {found.name or 'nothing'}" for number, (_, found) in enumerate(FAULTS)]


@pytest.mark.parametrize(("error", "expected"), FAULTS, ids=NAMES)
def test_every_fault_is_known_by_the_message_it_comes_with(error: BaseException, expected: oom.Fault) -> None:
    assert fault(error) is expected
    assert classify(error) is expected.outcome


@pytest.mark.parametrize(("cause", "expected"), FAULTS[:51:7], ids=NAMES[:51:7])
def test_a_cause_is_looked_through(cause: BaseException, expected: oom.Fault) -> None:
    middle = ValueError("the step failed")
    middle.__cause__ = cause
    outer = RuntimeError("trial t003 failed")
    outer.__cause__ = middle
    assert fault(outer) is expected


@pytest.mark.parametrize(
    ("found", "knobs", "expected"),
    [
        (oom.DEVICE, (8, 4), {"micro_batch_size": 4}),
        (oom.LIBRARY, (3, 0), {"micro_batch_size": 1}),
        (oom.HOST, (2, 4), {"micro_batch_size": 1}),
        (oom.DRIVER, (1, 4), None),
        (oom.LOADER_LOST, (8, 4), {"num_workers": 2}),
        (oom.HOST_IN_LOADER, (8, 1), {"num_workers": 0}),
        (oom.SHARED_MEMORY, (8, 4), {"num_workers": 0}),
        (oom.SHARED_MEMORY, (8, 0), None),
        (oom.CACHE, (8, 4), {"ram_cache": False}),
        (oom.DATA, (8, 4), None),
        (oom.UNKNOWN, (8, 4), None),
    ],
    ids=lambda v: v.name if isinstance(v, oom.Fault) else str(v),
)
def test_a_retreat_changes_system_knobs_until_none_is_left(
    found: oom.Fault, knobs: tuple[int, int], expected: dict[str, int] | None
) -> None:
    assert retreat(found, *knobs) == expected


@given(st.sampled_from([oom.DEVICE, oom.HOST, oom.LOADER_LOST, oom.SHARED_MEMORY, oom.UNKNOWN]), st.integers(1, 4096))
def test_retreating_ends(found: oom.Fault, start: int) -> None:
    micro, workers = start, start % 17
    for _ in range(13):
        change = retreat(found, micro, workers)
        if change is None:
            return
        micro, workers = change.get("micro_batch_size", micro), change.get("num_workers", workers)
    pytest.fail(f"{micro}, {workers} after 13 retreats")


def test_handled_errors_count_and_causes_in_a_circle_end() -> None:
    error = ValueError("a second mistake")
    error.__context__ = MemoryError()
    assert classify(error) is Outcome.HOST_OOM
    error.__cause__ = None  # `from None`
    assert classify(error) is Outcome.CRASH
    error.__cause__ = KeyError("b")
    error.__cause__.__cause__ = error
    assert classify(error) is Outcome.CRASH
    assert not poisoned(error)


def test_the_real_allocators_of_this_machine() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert classify(caught.value) is Outcome.HOST_OOM
    assert requested_bytes(str(caught.value)) == 2**60


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (AcceleratorError("CUDA error: an illegal memory access was encountered", 700), True),
        (AcceleratorError("a message nobody has seen", 718), True),
        (AcceleratorError(DRIVER_OOM, 2), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("CUDA error: the launch timed out and was terminated"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), True),
        (torch.OutOfMemoryError(CUDA_OOM), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), False),
        (ValueError("illegal memory access"), False),
    ],
    ids=lambda v: repr(v)[:60],
)
def test_poisoned(error: BaseException, lost: bool) -> None:
    assert poisoned(error) is lost
    outer = ValueError("outer")
    outer.__cause__ = error
    assert poisoned(outer) is lost


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (CUDA_OOM, 2 * 2**30),
        ("Tried to allocate 20.50 MiB (GPU 0; 8.00 GiB total capacity)", int(20.5 * 2**20)),
        ("Tried to allocate 512 bytes.", 512),
        ("Tried to allocate 1.00 TiB", 2**40),
        (HOST_OOM, 4_000_000_000),
        ("Tried to allocate 1.2.3 GiB", None),
        ("out of memory", None),
    ],
)
def test_requested_bytes(text: str, size: int | None) -> None:
    assert requested_bytes(text) == size


def test_outcomes_are_the_words_of_the_records() -> None:
    words = "ok stopped cut oom host_oom shm fd diverged data timeout killed no_result refused crash"
    assert [str(outcome) for outcome in Outcome] == words.split()
