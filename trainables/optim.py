"""The optimiser of a run and its learning rate schedule: the workload's own, or those of the knobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from trainables.knob_columns import Seen
from trainables.knobs import Knobs
from trainables.offline import without_hub_kernels
from trainables.workload import Config, ParameterGroup, Workload, WorkloadError, parameter_groups

LEAST_NUMBERS, BLOCK_NUMBERS, MAP_NUMBERS = 4096, 256, 256
"""AdamW of 8 bits: tensors below LEAST_NUMBERS have 32-bit moments; each block has a scale; tensors share a map."""


def prepared(workload: Workload, model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Returns the optimiser of a run: that of the workload's hook, or one by the knobs over its parameter groups.

    Each group's learning rate becomes its `peak_lr`, which the schedule scales. Raises WorkloadError if the hook does
    not return an optimiser.
    """
    hook = getattr(workload, "optimizer", None)
    if hook is not None:
        optimizer = hook(model, config)
    else:
        optimizer = built_in(parameter_groups(workload, model, config), config.knobs)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(f"optimizer() returned {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    for group in optimizer.param_groups:
        group["peak_lr"] = float(group["lr"])
    return optimizer


def built_in(groups: list[ParameterGroup], knobs: Knobs) -> torch.optim.Optimizer:
    """Returns AdamW (Loshchilov and Hutter, arXiv 1711.05101) or SGD over the groups, at the knob's learning rate.

    A group's `lr_scale` multiplies the knob's rate, and its `weight_decay` replaces the knob's. Without
    fused_optimizer, torch steps through parameters one by one on a CPU, and by foreach kernels on CUDA. Raises
    WorkloadError if the knob is adamw8bit and bitsandbytes is not installed.
    """
    ready = [
        {"weight_decay": knobs.weight_decay, **group, "lr": knobs.learning_rate * group.get("lr_scale", 1.0)}
        for group in groups
    ]
    if knobs.optimizer == "sgd":
        nesterov = knobs.nesterov and knobs.momentum > 0  # torch refuses it without momentum
        return torch.optim.SGD(ready, momentum=knobs.momentum, nesterov=nesterov)
    if knobs.optimizer == "adamw8bit":
        return adamw_8bit()(ready)
    return torch.optim.AdamW(ready, fused=True if knobs.fused_optimizer else None)


def adamw_8bit() -> Callable[[list[ParameterGroup]], torch.optim.Optimizer]:
    """Returns bitsandbytes' AdamW of 8 bits; raises WorkloadError. A trace of memory puts its own in this place."""
    try:
        with without_hub_kernels():
            import bitsandbytes  # an optional package of 125 MB, for this knob alone
    except ImportError:
        what = "knobs.optimizer=adamw8bit needs the package bitsandbytes: pip install 'cardtune[quant]'"
        raise WorkloadError(what) from None
    return cast(Callable[[list[ParameterGroup]], torch.optim.Optimizer], bitsandbytes.optim.AdamW8bit)


def facts(optimizer: torch.optim.Optimizer) -> Seen:
    """Returns facts of a first step about an optimiser that has stepped: its class, state dtypes and settings."""
    groups = optimizer.param_groups
    moments = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim()]
    return {
        "optimizer": type(optimizer).__name__,
        "optimizer_state_dtypes": sorted({str(t.dtype).removeprefix("torch.") for t in moments}),
        "weight_decays": sorted({float(g["weight_decay"]) for g in groups if "weight_decay" in g}),
        "momenta": sorted({float(g["momentum"]) for g in groups if "momentum" in g}),
        "nesterov": any(g.get("nesterov") for g in groups),
    }


class Average:
    """A running mean of trained weights, at least in fp32 (Tarvainen and Valpola, arXiv 1703.01780); none if empty.

    It is the plain mean of the weights behind each step as long as that forgets sooner than `decay`; without buffers.
    """

    def __init__(self, parameters: Iterable[nn.Parameter] = (), decay: float = 0.0) -> None:
        self._decay, self._weights = decay, [p.detach() for p in parameters if p.requires_grad]
        self.means = [w.to(torch.promote_types(w.dtype, torch.float32), copy=True) for w in self._weights]

    @torch.no_grad()
    def follow(self, steps: int) -> None:
        """Takes in the weights behind the optimiser step that is number `steps`, counted from 1."""
        weights = [w.to(mean.dtype) for w, mean in zip(self._weights, self.means, strict=True)]
        torch._foreach_lerp_(self.means, weights, max(1.0 - self._decay, 1.0 / steps))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Puts the means into the model inside the block, and its own weights back after it, bit for bit."""
        own = [w.clone() for w in self._weights]
        try:
            for weight, mean in zip(self._weights, self.means, strict=True):
                weight.copy_(mean)
            yield
        finally:
            for weight, before in zip(self._weights, own, strict=True):
                weight.copy_(before)


def state_bytes(model: nn.Module, knobs: Knobs) -> int:
    """Returns the bytes of the optimiser's state after its first step: for AdamW two moments of each trained number.

    Moments of `adamw8bit` have 8 bits and a scale of 4 bytes for each block, but 32 bits in tensors below 4,096
    numbers; all tensors share a map of 256 numbers for each moment. SGD has one moment, or none without momentum. For
    the workload's own optimiser they are 0: they are not known before its step. The average of `ema_decay` counts, too.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    sizes = [p.numel() for p in trained]
    average = 4 * sum(sizes) if knobs.ema_decay > 0 else 0
    if "optimizer" not in knobs.table:
        return average
    if knobs.optimizer == "sgd":
        return average + (sum(p.nbytes for p in trained) if knobs.momentum > 0 else 0)
    if knobs.optimizer != "adamw8bit":
        return average + 2 * sum(p.nbytes for p in trained)
    blocks = sum(-(-n // BLOCK_NUMBERS) for n in sizes if n >= LEAST_NUMBERS)
    maps = 2 * 4 * MAP_NUMBERS if blocks else 0
    return average + maps + 2 * 4 * blocks + 2 * sum(n if n >= LEAST_NUMBERS else 4 * n for n in sizes)


def schedule(workload: Workload, progress: float, config: Config) -> float:
    """Returns the learning rate as a share of its peak at `progress` (0 to 1): by the workload's hook, or the knobs.

    It depends on the share of samples seen, so it stays the same if the batch size changes.
    """
    hook = getattr(workload, "schedule", None)
    if hook is not None:
        return float(hook(progress, config))
    knobs = config.knobs
    return warmed_up(progress, knobs.warmup_frac, knobs.schedule)


def warmed_up(progress: float, warmup_frac: float, then: str) -> float:
    """Returns the share of the peak rate: it rises linearly, then falls to 0 linearly or by a half cosine, or stays."""
    if progress < warmup_frac:
        return progress / warmup_frac
    if then == "constant" or warmup_frac >= 1.0:
        return 1.0
    left = max(0.0, (1.0 - progress) / (1.0 - warmup_frac))
    return left if then == "linear" else (1.0 - math.cos(math.pi * left)) / 2.0


def hold_gradients(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, knobs: Knobs, max_norm: float | None = None
) -> None:
    """Clips the gradients of a whole batch to `max_norm`, by default the knob's; 0 clips nothing.

    Gradients are unscaled first, if a GradScaler scaled them. A norm that is not finite is no error here: the scaler
    skips such a step, or the next loss shows it.
    """
    max_norm = knobs.max_grad_norm if max_norm is None else max_norm
    if max_norm <= 0:
        return
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    nn.utils.clip_grad_norm_(parameters, max_norm)
