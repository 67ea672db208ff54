"""The optimiser of a run and the schedule of its rate: the workload's own, or those of the knobs."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainables.knobs import Knobs
from trainables.offline import without_hub_kernels
from trainables.workload import Config, Workload, WorkloadError, parameter_groups

LEAST_NUMBERS, BLOCK_NUMBERS, MAP_NUMBERS = 4096, 256, 256
"""Of AdamW of 8 bits: smaller tensors keep moments of 32 bits; each block has a scale; a map is shared."""


def prepared(workload: Workload, model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Returns the optimiser of a run: the workload's own, or the one of the knobs over its parameter groups.

    Each group's rate is then its peak, which the schedule scales. Raises WorkloadError where the workload's hook
    returns something else.
    """
    own = getattr(workload, "optimizer", None)
    made = own(model, config) if own is not None else built_in(parameter_groups(workload, model, config), config.knobs)
    if not isinstance(made, torch.optim.Optimizer):
        raise WorkloadError(f"optimizer() returned {type(made).__name__}; expected a torch.optim.Optimizer")
    for group in made.param_groups:
        group["peak_lr"] = float(group["lr"])
    return made


def built_in(groups: list[dict[str, Any]], knobs: Knobs) -> torch.optim.Optimizer:
    """Returns AdamW (Loshchilov and Hutter, arXiv 1711.05101) or SGD over the groups, at the knob's learning rate.

    A group's `lr_scale` multiplies the knob's rate for its parameters and `weight_decay` replaces the knob's. Unfused,
    the CPU steps through the parameters one by one and CUDA takes the foreach kernels, as torch chooses. Raises
    WorkloadError where optimizer=adamw8bit is asked for and bitsandbytes is not installed.
    """
    ready = [
        {"weight_decay": knobs.weight_decay, **group, "lr": knobs.learning_rate * group.get("lr_scale", 1.0)}
        for group in groups
    ]
    if knobs.optimizer == "sgd":
        nesterov = knobs.nesterov and knobs.momentum > 0  # torch refuses it without
        return torch.optim.SGD(ready, momentum=knobs.momentum, nesterov=nesterov)
    if knobs.optimizer == "adamw8bit":
        try:
            with without_hub_kernels():
                import bitsandbytes  # an extra of 125 MB, for this one knob
        except ImportError:
            raise WorkloadError(
                "knobs.optimizer=adamw8bit needs the package bitsandbytes: pip install 'cardtune[quant]'"
            ) from None
        return cast(torch.optim.Optimizer, bitsandbytes.optim.AdamW8bit(ready))
    return torch.optim.AdamW(ready, fused=True if knobs.fused_optimizer else None)


def facts(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns what an optimiser that has stepped is, as a first step tells it."""
    groups = optimizer.param_groups
    moments = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim()]
    return {
        "optimizer": type(optimizer).__name__,
        "optimizer_state_dtypes": sorted({str(t.dtype).removeprefix("torch.") for t in moments}),
        "weight_decays": sorted({float(g["weight_decay"]) for g in groups if "weight_decay" in g}),
        "momenta": sorted({float(g["momentum"]) for g in groups if "momentum" in g}),
        "nesterov": any(g.get("nesterov") for g in groups),
    }


def state_bytes(model: nn.Module, knobs: Knobs) -> int:
    """Returns the bytes of the optimiser's state once it has stepped: of AdamW two moments of each trained number.

    Those of `adamw8bit` have 8 bits and a scale of 4 bytes for each block, but in tensors below 4,096 numbers 32 bits;
    a map of 256 numbers for each moment is shared. SGD has one moment, none without momentum. Of an optimiser of the
    workload's own it is not known before it has stepped, and 0.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if "optimizer" not in knobs.table:
        return 0
    if knobs.optimizer == "sgd":
        return sum(p.nbytes for p in trained) if knobs.momentum > 0 else 0
    if knobs.optimizer != "adamw8bit":
        return 2 * sum(p.nbytes for p in trained)
    sizes = [p.numel() for p in trained]
    blocks = sum(-(-n // BLOCK_NUMBERS) for n in sizes if n >= LEAST_NUMBERS)
    maps = 2 * 4 * MAP_NUMBERS if blocks else 0
    return maps + 2 * 4 * blocks + 2 * sum(n if n >= LEAST_NUMBERS else 4 * n for n in sizes)


def schedule(workload: Workload, progress: float, config: Config) -> float:
    """Returns the share of the peak learning rate at `progress` (0 to 1) of the run: the workload's, or the knobs'.

    It is a function of the share of samples seen, so a run keeps its schedule when its batch size changes.
    """
    own = getattr(workload, "schedule", None)
    if own is not None:
        return float(own(progress, config))
    knobs = config.knobs
    return warmed_up(progress, knobs.warmup_frac, knobs.schedule)


def warmed_up(progress: float, warmup_frac: float, then: str) -> float:
    """Returns the share of the peak rate: linear up, then in a line or a half cosine to 0, or constant."""
    if progress < warmup_frac:
        return progress / warmup_frac
    if then == "constant" or warmup_frac >= 1.0:
        return 1.0
    left = max(0.0, (1.0 - progress) / (1.0 - warmup_frac))
    return left if then == "linear" else (1.0 - math.cos(math.pi * left)) / 2.0


def hold_gradients(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, knobs: Knobs, max_norm: float | None = None
) -> None:
    """Scales the gradients of a whole batch down to a norm, the knob's or the one given, where theirs is larger.

    A GradScaler's own scale is taken out. A norm that is not finite is left to the scaler, which skips such a step, or
    to the loss that follows.
    """
    max_norm = knobs.max_grad_norm if max_norm is None else max_norm
    if max_norm <= 0:
        return
    scaler.unscale_(optimizer)
    own = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(own, max_norm)
