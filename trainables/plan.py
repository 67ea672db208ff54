"""How far a training goes. No torch: who only asks for one has no use for it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """How far to train and when to look.

    `samples` is the horizon, at which the learning rate reaches 0; `milestones` are the samples seen at which quality
    is measured; a window closes at the first optimiser step after `window_s`. `cap_bytes` makes a CPU a virtual card.
    """

    samples: int
    milestones: tuple[int, ...] = ()
    window_s: float = 1.0
    cap_bytes: int | None = None
    mixed_phases: bool = False
    """Batches of all phases in turns, each as often as its share, so that seconds show the speed of a whole run."""
    each_step: bool = False
    """Windows have the seconds of every step."""


def evenly(batch_size: int, micro_batch_size: int) -> tuple[int, int]:
    """Returns the micro-batches of a batch where a loader cuts it evenly, and the samples of one, at most as asked."""
    count = math.ceil(batch_size / micro_batch_size)
    return count, math.ceil(batch_size / count)


def steps_to(samples: int, pass_samples: int, micro: int, accumulation: int) -> int:
    """Returns the optimiser steps up to so many samples, of a loop that steps at the end of every pass.

    So the last step of a pass may be of fewer micro-batches than `accumulation`, and its last one of fewer than `micro`
    samples.
    """
    passes, left = divmod(samples, pass_samples)
    whole = math.ceil(math.ceil(pass_samples / micro) / accumulation)
    return passes * whole + math.ceil(math.ceil(left / micro) / accumulation)
