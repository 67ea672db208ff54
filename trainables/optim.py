"""AdamW and its schedule."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from trainables.knobs import Knobs
from trainables.workload import WorkloadError

LEAST_NUMBERS, BLOCK_NUMBERS, MAP_NUMBERS = 4096, 256, 256
"""Of AdamW of 8 bits: smaller tensors keep moments of 32 bits; each block has a scale; a map is shared."""


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


def state_bytes(model: nn.Module, optimizer: str) -> int:
    """Returns the bytes of the optimiser's state once it has stepped: of AdamW two moments of each trained number.

    Those of `adamw8bit` have 8 bits and a scale of 4 bytes for each block, but in tensors below 4,096 numbers 32 bits;
    a map of 256 numbers for each moment is shared.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if optimizer != "adamw8bit":
        return 2 * sum(p.nbytes for p in trained)
    sizes = [p.numel() for p in trained]
    blocks = sum(-(-n // BLOCK_NUMBERS) for n in sizes if n >= LEAST_NUMBERS)
    maps = 2 * 4 * MAP_NUMBERS if blocks else 0
    return maps + 2 * 4 * blocks + 2 * sum(n if n >= LEAST_NUMBERS else 4 * n for n in sizes)


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
