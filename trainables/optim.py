"""AdamW and its schedule."""

from __future__ import annotations

from typing import Any, cast

import torch

from trainables.knobs import Knobs
from trainables.workload import WorkloadError


def adamw(groups: list[dict[str, Any]], knobs: Knobs) -> torch.optim.Optimizer:
    """Returns AdamW (Loshchilov and Hutter, arXiv 1711.05101) over the groups, at learning rate 0 until scheduled.

    A group's `lr_scale` multiplies the knob's rate for its parameters and `weight_decay` replaces the knob's. Unfused,
    the CPU steps through the parameters one by one and CUDA takes the foreach kernels, as torch chooses. Raises
    WorkloadError where optimizer=adamw8bit is asked for and bitsandbytes is not installed.
    """
    ready = [{"lr_scale": 1.0, "weight_decay": knobs.weight_decay, **group} for group in groups]
    if knobs.optimizer == "adamw8bit":
        try:
            import bitsandbytes  # an extra of 125 MB, for this one knob
        except ImportError:
            raise WorkloadError(
                "knobs.optimizer=adamw8bit needs the package bitsandbytes: pip install 'cardtune[quant]'"
            ) from None
        return cast(torch.optim.Optimizer, bitsandbytes.optim.AdamW8bit(ready, lr=0.0))
    return torch.optim.AdamW(ready, lr=0.0, fused=True if knobs.fused_optimizer else None)


def schedule(progress: float, warmup_frac: float) -> float:
    """Returns the share of the peak learning rate at `progress` (0 to 1) of the run: linear up, then linear down.

    It is a function of the share of samples seen, so a run keeps its schedule when its batch size changes.
    """
    if progress < warmup_frac:
        return progress / warmup_frac
    return max(0.0, (1.0 - progress) / (1.0 - warmup_frac)) if warmup_frac < 1.0 else 1.0


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets every group's learning rate to `rate` times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * float(group["lr_scale"])
