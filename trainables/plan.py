"""The length of a training. Torch is not imported here: code that only plans trainings has no use for it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """The length of a training, and when quality and speed are measured.

    `samples` is the horizon, at which the learning rate reaches 0. Quality is measured after each of the `milestones`,
    in samples. A window closes at the first optimiser step after `window_s`. `cap_bytes` makes a CPU a virtual card.
    """

    samples: int
    milestones: tuple[int, ...] = ()
    window_s: float = 1.0
    cap_bytes: int | None = None
    mixed_phases: bool = False
    """Batches of all phases alternate by their shares, so that a few seconds show the speed of a whole run."""
    each_step: bool = False
    """Windows hold the seconds of every step."""


def evenly(batch_size: int, micro_batch_size: int) -> tuple[int, int]:
    """Returns the number of equal micro-batches of a batch, and their size, which is at most `micro_batch_size`.

    A size that divides the batch is preferred, if there is one of at least half of `micro_batch_size`; else the
    micro-batches have a few samples more than the batch.
    """
    for size in range(min(batch_size, micro_batch_size), (micro_batch_size - 1) // 2, -1):
        if batch_size % size == 0:
            return batch_size // size, size
    count = math.ceil(batch_size / micro_batch_size)
    return count, math.ceil(batch_size / count)


def steps_to(samples: int, pass_samples: int, micro: int, accumulation: int) -> int:
    """Returns the optimiser steps up to `samples`, for a loop that always steps at the end of an epoch.

    So the last step of an epoch may have fewer micro-batches than `accumulation`, and the last micro-batch fewer
    samples than `micro`.
    """
    epochs, left = divmod(samples, pass_samples)
    epoch_steps = math.ceil(math.ceil(pass_samples / micro) / accumulation)
    return epochs * epoch_steps + math.ceil(math.ceil(left / micro) / accumulation)
