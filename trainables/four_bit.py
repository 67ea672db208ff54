"""Frozen linear layers of four bits a weight: the NF4 of QLoRA (Dettmers et al., arXiv 2305.14314).

Kernels and format are bitsandbytes'. Its own layer is not used: its weight is a kind of tensor that cannot be traced
without a card, and in eval mode, which frozen weights stay in, it repacks itself on a CPU for inference alone.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainables.offline import without_hub_kernels
from trainables.workload import WorkloadError

BLOCK_NUMBERS = 64
"""Weights that share a scale of 32 bits, as the library has it by default."""


class FrozenLinear(nn.Linear):
    """A linear layer whose weight is held in four bits, and made anew in its own type whenever it is asked for.

    It is trained through, never itself; nothing keeps the whole weight between forward and backward pass.
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight = layer.weight.detach()
        self._shape, self._dtype = tuple(weight.shape), weight.dtype
        packed, scales = _kernels().quantize_4bit.default(weight, BLOCK_NUMBERS, "nf4", torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The whole weight, (out, in), in the type that it had."""
        shape, dtype = self._shape, self._dtype
        found = _kernels().dequantize_4bit.default(self.packed, self.scales, BLOCK_NUMBERS, "nf4", shape, dtype)
        return cast(Tensor, found)

    def forward(self, input: Tensor) -> Tensor:
        """Returns the product in the type of `input`, or of autocast."""
        return cast(Tensor, _Product.apply(input, self))  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """The product of an input with a weight that is made for it, and made again for the input's gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, input.dtype
        bias = None if layer.bias is None else layer.bias.to(input.dtype)
        return F.linear(input, layer.weight.to(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return (gradient @ ctx.layer.weight.to(gradient.dtype)).to(ctx.dtype), None


def in_four_bits(model: nn.Module) -> nn.Module:
    """Returns the model with each linear layer frozen in four bits; raises WorkloadError without bitsandbytes."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, FrozenLinear(child))
    return model


def _kernels() -> Any:
    try:
        with without_hub_kernels():
            import bitsandbytes.functional  # noqa: F401  (registers them)
    except ImportError:
        what = "knobs.base_dtype=nf4 needs the package bitsandbytes: pip install 'cardtune[quant]'"
        raise WorkloadError(what) from None
    return torch.ops.bitsandbytes
