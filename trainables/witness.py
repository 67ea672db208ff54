"""Reads back from torch what a training step really ran: types, kernels, layouts, copies, recomputation.

Setting a knob does not guarantee its effect: torch may fall back to another attention kernel, a custom loop may not
apply the knob. A `Witness` observes only the first optimiser step, which every measurement drops, so watching costs
nothing afterwards. `facts` are plain values; a missing name means that the fact was not observed.

Operators are observed at the dispatcher, below autocast and autograd, also in the threads of the backward pass.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainables import optim, precision
from trainables.knob_columns import Seen

StepPart = Literal["transfer", "forward_backward", "sync", "optimizer", "average"]

_MULTIPLIES = {f"aten.{n}" for n in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "mkldnn_rnn_layer", "_cudnn_rnn")}
_FUSED_ATTENTION = re.compile(r"aten\._scaled_dot_product_(flash|efficient|cudnn)_attention(_for_cpu)?$")
_MATH_ATTENTION = "aten._safe_softmax"
"""Only torch's unfused attention calls this operator; attention itself is no operator at the dispatcher."""
_OPTIMIZER_OP = re.compile(r"aten\.(_fused_adamw?_|_foreach_addcdiv_|addcdiv_)$|bitsandbytes\.optimizer_update")
_NORM_OP = re.compile(r"aten\.(_foreach_norm|linalg_vector_norm|norm)$")


class Witness:
    """Observes the parts of one optimiser step; `facts` returns the observations."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._operators = _Operators(self)
        self._part: StepPart = "forward_backward"
        self._counts: dict[str, Counter[str]] = {}
        self._around: Seen | None = None
        self._micro_batches: list[int] = []
        self._pinned: bool | None = None
        self._augmented: Seen = {}

    @contextmanager
    def watching(self, part: StepPart) -> Iterator[None]:
        """Observes the operators inside the block as part `part` of the step."""
        self._part = part
        with self._operators:
            yield

    def goes_on(self, part: StepPart) -> None:
        """Switches to another part of the step within a watched block."""
        self._part = part

    def micro_batch(self, samples: int, host: Sequence[Tensor]) -> None:
        """Records the size of a micro-batch, and whether its tensors, as the loader delivered them, are pinned."""
        self._micro_batches.append(samples)
        if self._device.type == "cuda" and host:
            self._pinned = self._pinned is not False and all(t.is_pinned() for t in host)

    def augmented(self) -> None:
        """Records that a batch was augmented on the device."""
        self._augmented = {"augmented_on": self._device.type}

    def facts(self) -> Seen:
        """Returns the observations as plain values by name; call it after the step, when gradients are dropped.

        `trainables.knob_readers` compare them with the values of knobs.
        """
        operators = self._of("operator")
        facts: dict[str, Any] = {
            "device": self._device.type,
            "batch_size": sum(self._micro_batches),
            "micro_batch_size": max(self._micro_batches, default=0),
            "matmul_dtypes": _names(self._of("product")),
            "attention": dict(self._of("attention")),
            "recomputed_frac": round(operators["recomputed"] / max(1, operators["forward"]), 3),
            "loss_reads": self._of("read")["loss"],
            "gradient_norms": _names(self._of("norm")),
            "averaged": bool(self._of("average")),
            **self._augmented,
            **(self._around or {}),
            **_model_facts(self._model),
            **optim.facts(self._optimizer),
        }
        if self._of("convolution"):
            facts["conv_dtypes"] = _names(self._of("convolution"))
            facts["conv_weights"] = _names(self._of("conv_weight"))
        if self._of("update"):  # empty if the GradScaler skipped the step because gradients overflowed
            facts["optimizer_ops"] = _names(self._of("update"))
        if self._device.type == "cuda":
            facts["pinned"] = self._pinned
            facts.update({name: self._of("copy")[name] > 0 for name in ("non_blocking", "side_stream")})
        return facts

    def operator(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Records an operator that has run in the current part of the step."""
        if _NORM_OP.match(name) and (self._part == "optimizer" or self._are_gradients(args)):
            self._count("norm", name)  # a custom loop may clip before its optimiser's step begins
        elif self._part == "optimizer":
            if _OPTIMIZER_OP.match(name):
                self._count("update", name)
        elif self._part == "average":
            self._count("average", name)
        elif self._part == "transfer":
            if name == "aten._to_copy":
                self._copy(kwargs)
        elif self._part == "sync":
            if name == "aten._local_scalar_dense":
                self._count("read", "loss")
        else:
            self._forward_backward(name, args)

    def _forward_backward(self, name: str, args: Sequence[Any]) -> None:
        if self._around is None:
            self._around = precision.kernel_facts(self._device)
        if not _in_backward():
            self._count("operator", "forward")
        elif torch.is_grad_enabled():  # in a backward pass this is so only while a checkpointed block runs again
            self._count("operator", "recomputed")
        if name in _MULTIPLIES:
            self._count("product", _dtype(args))
        elif name == "aten.convolution":
            self._count("convolution", _dtype(args))
            self._count("conv_weight", _layout(args[1]))
        elif match := _FUSED_ATTENTION.match(name):
            self._count("product", _dtype(args))
            self._count("attention", match[1])
        elif name == _MATH_ATTENTION:
            self._count("attention", "math")

    def _are_gradients(self, args: Sequence[Any]) -> bool:
        gradients = {p.grad.data_ptr() for p in self._model.parameters() if p.grad is not None}
        tensors = args[0] if isinstance(args[0], list | tuple) else args[:1]
        return any(isinstance(t, Tensor) and t.data_ptr() in gradients for t in tensors)

    def _copy(self, kwargs: Mapping[str, Any]) -> None:
        if kwargs.get("non_blocking"):
            self._count("copy", "non_blocking")
        if self._device.type == "cuda":
            current, usual = torch.cuda.current_stream(self._device), torch.cuda.default_stream(self._device)
            if current != usual:
                self._count("copy", "side_stream")

    def _of(self, what: str) -> Counter[str]:
        return self._counts.get(what, Counter())

    def _count(self, what: str, name: str) -> None:
        self._counts.setdefault(what, Counter())[name] += 1


class _Operators(TorchDispatchMode):
    """Reports every operator to the witness."""

    supports_higher_order_operators = True  # otherwise torch refuses them, FlexAttention for example

    def __init__(self, witness: Witness) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._witness = witness

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator, then reports it."""
        result = func(*args, **(kwargs or {}))
        self._witness.operator(str(getattr(func, "overloadpacket", func)), args, kwargs or {})
        return result


def _model_facts(model: nn.Module) -> Seen:
    frozen = Counter[str]()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            frozen[_short(parameter.dtype)] += parameter.numel()
    return {
        "frozen_dtypes": _names(frozen),
        # A gradient that is still there after zero_grad was filled with zeros.
        "grads_after_step": "none" if all(p.grad is None for p in model.parameters() if p.requires_grad) else "zero",
    }


def _in_backward() -> bool:
    return cast(int, cast(Any, torch._C)._current_graph_task_id()) != -1


def _dtype(args: Sequence[Any]) -> str:
    return next((_short(a.dtype) for a in args if isinstance(a, Tensor)), "")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layout(tensor: Tensor) -> str:
    """Returns the memory layout of an image; "either" if one channel or one pixel makes the two layouts equal."""
    if tensor.dim() != 4:
        return "not an image"
    last, first = tensor.is_contiguous(memory_format=torch.channels_last), tensor.is_contiguous()
    return "either" if last and first else "channels_last" if last else "contiguous" if first else "strided"


def _names(counts: Counter[str]) -> list[str]:
    """Returns the names, the most frequent first."""
    return [name for name, _ in counts.most_common()]
