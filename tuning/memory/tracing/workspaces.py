"""Bytes that CUDA's kernels take from the allocator inside themselves, where the dispatcher does not see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tuning.memory.tracing.lifetimes import Insides

aten = torch.ops.aten

CUBLAS_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
CUBLAS_HOPPER_BYTES = 4096 * 8 * 1024
"""A cuBLAS handle's workspace (ATen/cuda/CUDABlas.cpp); each thread that computes has a handle: forward, backward."""
_PRODUCTS = frozenset(getattr(aten, n).default for n in ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation"))
UNSEEN = ("convolution", "cudnn")
"""Parts of the names of operators whose workspaces are chosen by cuDNN or oneDNN as they run."""


class Cuda(Insides):
    """Memory that CUDA's operators take inside themselves on a card of a compute capability.

    cuDNN chooses a convolution's workspace as it runs, so it counts as nothing (`UNSEEN`).
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self._handle_bytes = CUBLAS_HOPPER_BYTES if capability[0] >= 9 else CUBLAS_BYTES
        self._threads = set[bool]()

    def transient_bytes(self, func: Any, args: Sequence[Any]) -> int:
        """Returns the bytes that the operator allocates beside its result, 0 where none are known."""
        formula = _CUDA.get(func)
        return formula(args) if formula is not None else 0

    def kept_bytes(self, func: Any, phase: str) -> int:
        """Returns a cuBLAS workspace at the first matrix product of each thread, 0 at all else."""
        backward = phase == "backward"
        if func not in _PRODUCTS or backward in self._threads:
            return 0
        self._threads.add(backward)
        return self._handle_bytes


def _flash_backward(args: Sequence[Any]) -> int:
    """FlashAttention 2 sums the queries' gradient in fp32, time padded to 128 and width to 32, and keeps a row sum."""
    batch, heads, time, width = args[1].shape
    rows = batch * heads * (-(-time // 128) * 128)
    expanded = 0
    kv_heads = args[2].shape[1]
    if kv_heads != heads:  # gradients of keys and values for each head of the queries, summed at the end
        expanded = 2 * batch * heads * args[2].shape[2] * width * args[2].element_size()
    return int(rows * (-(-width // 32) * 32) * 4 + rows * 4 + expanded)


def _efficient_backward(args: Sequence[Any]) -> int:
    """The row sum, and where the type is not fp32 the queries' gradient in fp32."""
    batch, heads, time, width = args[1].shape
    rows = batch * heads * time
    return int(rows * 4 + (rows * width * 4 if args[1].dtype != torch.float32 else 0))


def _embedding_backward(args: Sequence[Any]) -> int:
    """Sorted indices and their places, and as much again for the sort."""
    return int(4 * args[1].numel() * args[1].element_size())


_CUDA: dict[Any, Callable[[Sequence[Any]], int]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
}
