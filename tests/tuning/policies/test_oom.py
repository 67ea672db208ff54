"""Endings told apart: by type first, by text only where torch raises a plain RuntimeError."""

from __future__ import annotations

import errno

import pytest
import torch

from tuning.policies.oom import Outcome, classify, halve, poisoned, requested_bytes

CUDA_OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.68 GiB of which 1.1 GiB is free."
)
HOST = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)"
)
SHM = "unable to allocate shared memory(shm) for file </torch_71_2>: No space left on device (28)"
BUS = "DataLoader worker (pid 71) is killed by signal: Bus error. Its workers may be out of shared memory"
RAY_KILL = "The actor died. It was killed by SIGKILL, for example by the OOM killer: the node was out of memory."


class DataError(Exception):
    """Stands for a workload's own."""


class AcceleratorError(RuntimeError):
    """Stands for torch.AcceleratorError, which cannot be made without a device."""


class OutOfMemoryError(Exception):
    """A class of that name that is not torch's, such as Ray's."""


ENDINGS = [
    (torch.OutOfMemoryError(CUDA_OOM), Outcome.OOM),
    (torch.OutOfMemoryError(""), Outcome.OOM),
    (AcceleratorError("CUDA error: out of memory"), Outcome.OOM),
    (RuntimeError(CUDA_OOM), Outcome.OOM),
    (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), Outcome.OOM),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), Outcome.OOM),
    (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), Outcome.OOM),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), Outcome.OOM),
    (RuntimeError("cuDNN Frontend error: ALLOC_FAILED"), Outcome.OOM),
    (MemoryError(), Outcome.HOST_OOM),
    (RuntimeError(HOST), Outcome.HOST_OOM),
    (RuntimeError(f"Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: {HOST}"), Outcome.HOST_OOM),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), Outcome.HOST_OOM),
    (RuntimeError(SHM), Outcome.SHM),
    (RuntimeError(BUS), Outcome.SHM),
    (OSError(errno.ENOSPC, "No space left on device", "/dev/shm/torch_71_2"), Outcome.SHM),  # noqa: S108
    (RuntimeError("DataLoader worker (pid 71) is killed by signal: Killed. "), Outcome.DATA),
    (RuntimeError("DataLoader worker (pid(s) 71, 72) exited unexpectedly"), Outcome.DATA),
    (RuntimeError("DataLoader timed out after 30 seconds"), Outcome.TIMEOUT),
    (DataError("sample 7 has no label"), Outcome.DATA),
    # what must not match
    (ValueError("out of memory"), Outcome.CRASH),
    (ValueError(CUDA_OOM), Outcome.CRASH),
    (KeyError("CUBLAS_STATUS_ALLOC_FAILED"), Outcome.CRASH),
    (NotImplementedError("CUDA error: out of memory"), Outcome.CRASH),
    (OutOfMemoryError("Task was killed due to the node running low on memory"), Outcome.CRASH),
    (RuntimeError(RAY_KILL), Outcome.CRASH),
    (RuntimeError("the vocabulary is out of memory bounds"), Outcome.CRASH),
    (AcceleratorError("CUDA error: an illegal memory access was encountered"), Outcome.CRASH),
    (OSError(errno.ENOSPC, "No space left on device", "runs/trials.jsonl"), Outcome.CRASH),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), Outcome.CRASH),
    (RuntimeError("shape mismatch in shared memory block"), Outcome.CRASH),
]


@pytest.mark.parametrize(("error", "outcome"), ENDINGS, ids=lambda v: repr(v)[:60])
def test_classify(error: BaseException, outcome: Outcome) -> None:
    assert classify(error) is outcome


@pytest.mark.parametrize(("cause", "outcome"), ENDINGS[:20:5], ids=lambda v: repr(v)[:60])
def test_a_cause_is_looked_through(cause: BaseException, outcome: Outcome) -> None:
    middle = ValueError("the step failed")
    middle.__cause__ = cause
    outer = RuntimeError("trial t003 failed")
    outer.__cause__ = middle
    assert classify(outer) is outcome


def test_what_was_only_being_handled_is_no_cause() -> None:
    error = ValueError("a second mistake")
    error.__context__ = MemoryError()
    assert classify(error) is Outcome.CRASH


def test_causes_in_a_circle_end() -> None:
    error = ValueError("a")
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
        (AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
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
        (HOST, 4_000_000_000),
        ("Tried to allocate 1.2.3 GiB", None),
        ("out of memory", None),
    ],
)
def test_requested_bytes(text: str, size: int | None) -> None:
    assert requested_bytes(text) == size


def test_halving_ends_at_one() -> None:
    assert [halve(n) for n in (96, 7, 2, 1)] == [48, 3, 1, None]


def test_outcomes_are_the_words_of_the_records() -> None:
    words = "ok stopped oom host_oom shm diverged data timeout killed no_result refused crash"
    assert [str(outcome) for outcome in Outcome] == words.split()
