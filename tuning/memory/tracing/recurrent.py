"""LSTM, GRU and plain RNN as cuDNN runs them on CUDA: one call that keeps a reserve for its backward pass.

Torch has cuDNN's operator without its backward pass on fake tensors, and its reserve is empty there. So the call is
replaced by one that allocates what torch's binding does (aten/src/ATen/native/cudnn/RNN.cpp). The size of the reserve
is cuDNN's secret; `RESERVE` is what its description says has to be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
RESERVE = {"lstm": 6, "gru": 5, "rnn_tanh": 2, "rnn_relu": 2}
"""Numbers kept for each step, sample, layer, direction and unit: the gates, of LSTM also cell states and their tanh."""


@dataclass(frozen=True)
class _Call:
    """Shape of a call; `batch_sizes` are those of a packed sequence, empty for a padded one."""

    kind: str
    layers: int
    directions: int
    batch_first: bool
    hidden: int
    packed: bool


class _Cudnn(torch.autograd.Function):
    """Allocates what cuDNN's recurrent network would, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, x: Tensor, hx: Tensor, cx: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns output, last hidden states and last cell states; keeps what the backward pass needs."""
        if call.batch_first and not call.packed:
            x = x.transpose(0, 1)
        x = x.contiguous()
        steps = x.numel() // x.shape[-1]  # of all samples
        flat = x.new_empty(sum(w.numel() for w in weights)) if weights[0].dtype != x.dtype else None
        out_size = hx.shape[-1]  # the projected size, where there is a projection
        output = x.new_empty((*x.shape[:-1], call.directions * out_size))
        hy, cy = torch.empty_like(hx), None if cx is None else torch.empty_like(cx)
        cells = call.hidden * steps * call.layers * call.directions
        reserve = x.new_empty(RESERVE[call.kind] * cells)
        x.new_empty(GATES[call.kind] * call.hidden * steps)  # workspace: the gates of a layer, then given back
        kept = [x, hx, output, reserve, *weights]
        kept += [t for t in (cx, cy, flat) if t is not None]
        ctx.save_for_backward(*kept)
        ctx.call, ctx.count, ctx.has_cell = call, len(weights), cx is not None
        if call.batch_first and not call.packed:
            return output.transpose(0, 1), hy, cy
        return output, hy, cy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """Returns the gradients; those of the weights are views of one buffer, as cuDNN fills it."""
        x, hx, output, _, *rest = ctx.saved_tensors
        call, weights = ctx.call, rest[: ctx.count]
        grad = grads[0] if grads[0] is not None else torch.zeros_like(output)
        (grad.transpose(0, 1) if call.batch_first and not call.packed else grad).contiguous()
        steps = x.numel() // x.shape[-1]
        x.new_empty(GATES[call.kind] * call.hidden * steps)
        grad_x, grad_hx = torch.empty_like(x), torch.empty_like(hx)
        grad_cx = torch.empty_like(hx) if ctx.has_cell else None
        flat = x.new_empty(sum(w.numel() for w in weights))
        pieces = [
            p.view(w.shape).to(w.dtype) for p, w in zip(flat.split([w.numel() for w in weights]), weights, strict=True)
        ]
        if call.batch_first and not call.packed:
            grad_x = grad_x.transpose(0, 1)
        return None, grad_x, grad_hx, grad_cx, *pieces


def _call(kind: str, args: Sequence[Any]) -> Any:
    """Returns what `torch._VF.<kind>` would: args are a padded call's, or a packed one's (batch sizes second)."""
    x, packed = args[0], isinstance(args[3], list | tuple)
    if packed:
        _, _, state, weights, _, layers, _, _, bidirectional = args
        batch_first = False
    else:
        _, state, weights, _, layers, _, _, bidirectional, batch_first = args
    hx, cx = state if kind == "lstm" else (state, None)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, hx = x.to(dtype), hx.to(dtype)
        cx = cx.to(dtype) if cx is not None else None
    hidden = weights[0].shape[0] // GATES[kind]
    call = _Call(kind, layers, 2 if bidirectional else 1, batch_first, hidden, packed)
    output, hy, cy = cast(Any, _Cudnn).apply(call, x, hx, cx, *weights)
    return (output, hy, cy) if kind == "lstm" else (output, hy)


@contextmanager
def cudnn() -> Iterator[set[str]]:
    """Inside the block recurrent networks on fake CUDA tensors run as on cuDNN; yields the kinds that did."""
    functions = cast(Any, torch._VF)
    originals = {kind: getattr(functions, kind) for kind in GATES}

    used = set[str]()

    def routed(kind: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if not isinstance(args[0], FakeTensor) or args[0].device.type != "cuda":
                return originals[kind](*args)
            used.add(kind)
            return _call(kind, args)

        return call

    for kind in GATES:
        setattr(functions, kind, routed(kind))
    try:
        yield used
    finally:
        for kind, original in originals.items():
            setattr(functions, kind, original)
