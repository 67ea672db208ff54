"""Frozen linear layers with eight or four bits a weight, for training adapters beside them (QLoRA, arXiv 2305.14314).

`int8` is plain PyTorch: integers of eight bits, one scale for each output. `nf4` uses bitsandbytes' format and kernels,
but not its layers: their memory cannot be traced without a card. On a CPU, its 4-bit layer also repacks itself in eval
mode, in which frozen weights stay, and its 8-bit layer does not train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainables.offline import without_hub_kernels
from trainables.workload import WorkloadError

BLOCK_NUMBERS = 64
"""Number of nf4 weights that share a scale of 32 bits; the library's default."""
LARGEST = 127
"""The largest absolute value used in int8."""


class FrozenLinear(nn.Linear):
    """A linear layer that stores its weight in fewer bits, and unpacks it whenever it is read.

    Gradients flow through it, but the layer itself is not trained. Nothing keeps the unpacked weight between forward
    and backward pass.
    """

    def __init__(self, layer: nn.Linear, packed: Tensor, scales: Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._shape, self._dtype = tuple(layer.weight.shape), layer.weight.dtype
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """Returns the product in the type of `input`, or of autocast."""
        return cast(Tensor, _Product.apply(input, self))  # type: ignore[no-untyped-call]


class Int8Linear(FrozenLinear):
    """Eight bits a weight and a scale for each output; rounding changes a weight by at most half a scale."""

    def __init__(self, layer: nn.Linear) -> None:
        weight = layer.weight.detach()
        scales = (weight.abs().amax(1, keepdim=True) / LARGEST).clamp(min=torch.finfo(weight.dtype).tiny)
        super().__init__(layer, (weight / scales).round().clamp(-LARGEST, LARGEST).to(torch.int8), scales)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The unpacked weight, (out, in), in its original type; bf16 represents the integers exactly."""
        return self.packed.to(self._dtype).mul_(self.scales)


class Nf4Linear(FrozenLinear):
    """Four bits a weight, by the quantiles of a normal distribution."""

    def __init__(self, layer: nn.Linear) -> None:
        weight = layer.weight.detach()
        super().__init__(layer, *_kernels().quantize_4bit.default(weight, BLOCK_NUMBERS, "nf4", torch.uint8))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The unpacked weight, (out, in), in its original type."""
        shape, dtype = self._shape, self._dtype
        weight = _kernels().dequantize_4bit.default(self.packed, self.scales, BLOCK_NUMBERS, "nf4", shape, dtype)
        return cast(Tensor, weight)


class _Product(torch.autograd.Function):
    """The product with an unpacked weight, which is unpacked again for the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, input.dtype
        bias = None if layer.bias is None else layer.bias.to(input.dtype)
        return F.linear(input, layer.weight.to(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return (gradient @ ctx.layer.weight.to(gradient.dtype)).to(ctx.dtype), None


LAYERS: Mapping[str, Callable[[nn.Linear], nn.Linear]] = {"int8": Int8Linear, "nf4": Nf4Linear}
"""By the value of knobs.base_dtype."""


def freeze_linears(model: nn.Module, kind: str) -> None:
    """Replaces each linear layer by a frozen one of type `kind`; raises WorkloadError if its package is missing."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, LAYERS[kind](child))


def merged(model: nn.Module) -> nn.Module:
    """Returns the model, changed: peft's adapters are merged into their layers, in the type of those.

    Frozen layers of few bits become plain ones. Nothing of peft is left, and outputs differ by rounding alone.
    """
    if hasattr(model, "merge_and_unload"):
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, FrozenLinear):
                    plain = nn.Linear(child.in_features, child.out_features, device="meta")
                    plain.weight, plain.bias = nn.Parameter(child.weight, requires_grad=False), child.bias
                    setattr(module, name, plain)
        return cast(nn.Module, cast(Any, model).merge_and_unload())
    for name, child in list(model.named_children()):
        setattr(model, name, merged(child))
    return model


def _kernels() -> Any:
    try:
        with without_hub_kernels():
            import bitsandbytes.functional  # noqa: F401  (registers them)
    except ImportError:
        what = "knobs.base_dtype=nf4 needs the package bitsandbytes: pip install 'cardtune[quant]'"
        raise WorkloadError(what) from None
    return torch.ops.bitsandbytes
