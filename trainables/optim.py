"""AdamW and its schedule."""

from __future__ import annotations

from typing import Any

import torch

from trainables.knobs import Knobs


def adamw(groups: list[dict[str, Any]], knobs: Knobs) -> torch.optim.AdamW:
    """Returns AdamW (Loshchilov and Hutter, arXiv 1711.05101) over the groups, at learning rate 0 until scheduled.

    A group's `lr_scale` multiplies the knob's rate for its parameters and `weight_decay` replaces the knob's. Unfused,
    the CPU steps through the parameters one by one and CUDA takes the foreach kernels, as torch chooses.
    """
    ready = [{"lr_scale": 1.0, "weight_decay": knobs.weight_decay, **group} for group in groups]
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
