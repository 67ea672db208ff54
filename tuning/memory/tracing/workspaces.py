"""Bytes that CUDA's kernels take from the allocator inside themselves, where the dispatcher does not see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch

from tuning.memory.convolutions import ConvolutionKernel, workspaces_of
from tuning.memory.trace import Event
from tuning.memory.tracing.lifetimes import Insides

aten = torch.ops.aten

CUBLAS_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
CUBLAS_HOPPER_BYTES = 4096 * 8 * 1024
"""A cuBLAS handle's workspace (ATen/cuda/CUDABlas.cpp); each thread that computes has a handle: forward, backward."""
_PRODUCTS = frozenset(getattr(aten, n).default for n in ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation"))
OF_MODEL = "convolution"
"""Part of the names of operators whose workspaces follow a model of what cuDNN chooses (`memory.convolutions`)."""
UNSEEN = "cudnn"
"""Part of the names of those whose workspaces are not known."""


class Cuda(Insides):
    """Memory that CUDA's operators take inside themselves on a card of a compute capability.

    `times_convolutions`: cuDNN times its kernels at the first use of each shape (`knobs.cudnn_benchmark`).
    """

    def __init__(self, capability: tuple[int, int], *, times_convolutions: bool = False) -> None:
        self._handle_bytes = CUBLAS_HOPPER_BYTES if capability[0] >= 9 else CUBLAS_BYTES
        self._threads = set[bool]()
        self._timed = set[ConvolutionKernel]() if times_convolutions else None

    def transients(self, func: Any, args: Sequence[Any], result: Any) -> Iterable[int | Event]:
        """Yields the bytes of each workspace that the operator takes, one after the other, and marks between them."""
        formula = _CUDA.get(func)
        if formula is not None:
            yield formula(args)
        for each in convolutions(func, args, result):
            yield from workspaces_of(each, self._timed)

    def kept_bytes(self, func: Any, phase: str) -> int:
        """Returns a cuBLAS workspace at the first matrix product of each thread, 0 at all else."""
        backward = phase == "backward"
        if func not in _PRODUCTS or backward in self._threads:
            return 0
        self._threads.add(backward)
        return self._handle_bytes


def convolutions(func: Any, args: Sequence[Any], result: Any) -> list[ConvolutionKernel]:
    """Returns the operations of an operator that cuDNN does; none if it is another, or its tensors need no copy."""
    if func not in (aten.convolution.default, aten.convolution_backward.default):
        return []
    is_backward = func is aten.convolution_backward.default
    image, weight = args[1:3] if is_backward else args[:2]
    stride, groups = (args[4], args[9]) if is_backward else (args[3], args[8])
    if image.is_contiguous(memory_format=torch.channels_last) and not image.is_contiguous():
        return []
    output = args[0] if is_backward else result
    asked = (
        [n for n, wanted in zip(("input", "weight"), args[10], strict=False) if wanted] if is_backward else ["forward"]
    )
    shapes = [tuple(int(n) for n in shape) for shape in (image.shape, output.shape, weight.shape, stride)]
    rest = *shapes, int(groups), image.element_size()
    found = [ConvolutionKernel(cast(Any, name), *cast(Any, rest)) for name in asked]
    return [each for each in found if not each.is_within_channels]


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
