"""Measures what the predictor guesses of CUDA's libraries, in some seconds.

Each constant is read where it shows: a cuBLAS workspace as what a first product leaves allocated, a reserve of cuDNN's
as the tensor that its operator returns, a convolution's workspace as what its call takes beside its results.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pynvml
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tuning.memory.tracing import recurrent, workspaces

RECURRENT = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}
STEPS, BATCH, HIDDEN, LAYERS = 64, 32, 192, 2
CONVOLUTIONS = (  # batch, channels in, channels, side, kernel, groups: what the kinds and headpose have
    (32, 3, 32, 64, 3, 1),
    (32, 32, 64, 32, 3, 1),
    (32, 64, 128, 16, 3, 1),
    (32, 64, 64, 32, 1, 1),
    (32, 48, 48, 32, 7, 48),
)
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def constants() -> dict[str, list[float]]:
    """Returns what is guessed and what was measured of each constant, on a CUDA device that the process has not used.

    By name, [guess, measured]: bytes of a context and of a cuBLAS handle, and what `reserve` and `convolution_fracs`
    return. Without the reserve of a recurrent network that cuDNN did not run.
    """
    hopper = torch.cuda.get_device_capability(0) >= (9, 0)
    found: dict[str, list[float]] = {
        "context_bytes": [0, context_bytes()],
        "cublas_bytes": [workspaces.CUBLAS_HOPPER_BYTES if hopper else workspaces.CUBLAS_BYTES, cublas_bytes()],
    }
    for kind in RECURRENT:
        if (measured := reserve(kind)) is not None:
            found[f"{kind}_reserve"] = [recurrent.RESERVE[kind], measured]
    forward, backward = convolution_fracs()
    return {**found, "convolution_frac": [0, forward], "convolution_backward_frac": [0, backward]}


def context_bytes() -> int:
    """Returns what the process takes of the card beside the allocator, its libraries loaded; other processes idle."""
    a = torch.randn(64, 64, device="cuda", requires_grad=True)
    F.conv2d(a[None, None] @ a, a[None, None, :3, :3]).sum().backward()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(0)
    own = _used_by_this_process()
    taken = total - free if own is None else own
    return max(0, taken - torch.cuda.memory_reserved())


def _used_by_this_process() -> int | None:
    """Returns what NVML counts as this process's, None where it cannot tell (in a container it seldom can)."""
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        own = [p for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()]
        return int(own[0].usedGpuMemory) if own and own[0].usedGpuMemory else None
    except Exception:  # whatever a driver says
        return None


def cublas_bytes() -> int:
    """Returns what a first product of matrices leaves allocated beside its result."""
    a = torch.randn(256, 256, device="cuda")
    out = torch.empty(256, 256, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    torch.mm(a, a, out=out)
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


class _Reserves(TorchDispatchMode):
    """Keeps the bytes of the reserves that cuDNN's recurrent operator returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._cudnn_rnn.default:
            self.found.append(result[3].nbytes)
        return result


def reserve(kind: str) -> float | None:
    """Returns the numbers that cuDNN keeps for each step, sample, layer and unit; None where cuDNN was not used."""
    net = RECURRENT[kind](HIDDEN, HIDDEN, LAYERS, batch_first=True).cuda()
    with _Reserves() as seen:
        net(torch.randn(BATCH, STEPS, HIDDEN, device="cuda"))
    return seen.found[0] / 4 / (STEPS * BATCH * LAYERS * HIDDEN) if seen.found else None


def convolution_fracs() -> tuple[float, float]:
    """Returns a convolution's workspace over its result's bytes, and its backward pass's over its gradients', medians.

    Over shapes and types as they are met; the spread is wide, so a prediction with convolutions stays less sure.
    """
    forward, backward = [], []
    old = torch.cuda.get_device_capability(0) < (8, 0)
    for shape in CONVOLUTIONS:
        for dtype in TYPES:
            if old and dtype is torch.bfloat16:
                continue
            first, second = _of_convolution(shape, dtype)
            forward.append(first)
            backward.append(second)
    return statistics.median(forward), statistics.median(backward)


def _of_convolution(shape: Sequence[int], dtype: torch.dtype) -> tuple[float, float]:
    batch, channels_in, channels, side, kernel, groups = shape
    x = torch.randn(batch, channels_in, side, side, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(
        channels, channels_in // groups, kernel, kernel, device="cuda", dtype=dtype, requires_grad=True
    )
    padding = kernel // 2
    for _ in range(2):  # the first use of a shape loads kernels
        F.conv2d(x, weight, padding=padding, groups=groups)
    y, beside = _beside(lambda: [F.conv2d(x, weight, padding=padding, groups=groups)])
    out = torch.ones_like(y[0])
    _, back = _beside(lambda: list(torch.autograd.grad(y[0], (x, weight), out, retain_graph=True)))
    return beside / y[0].nbytes, back / (x.nbytes + weight.nbytes)


def _beside(call: Callable[[], list[Tensor]]) -> tuple[list[Tensor], int]:
    """Returns the results of a call, and the most bytes it held at once beside them."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    torch.cuda.synchronize()
    peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    return results, max(0, peak - max(after, before))
