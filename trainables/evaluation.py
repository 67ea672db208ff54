"""Quality on the validation split, in batches as large as the memory that training needs anyway has room for.

Evaluating holds no activations, so that a sample needs less than in training, and how much less is the workload's: a
decoder that goes step by step takes 16 times the micro-batch, a wide convolution not even twice. So it is measured: the
first batches are small, of the longest samples, and tell how many fit.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainables import batches, precision
from trainables.state import Diverged, State, watched

MOST_MICRO_BATCHES = 16
"""A validation batch holds at most so many: with 8 and 16 pointer, which gains most, takes 0.65 and 0.64 s."""
USED_FRAC = 0.9
"""Of the room beside what is held anyway: kernels may choose other algorithms, with other workspaces, for more."""


@dataclass(frozen=True)
class Evaluation:
    """Quality after `samples` training samples; `wall_s` is what measuring it took."""

    samples: int
    values: dict[str, float]
    wall_s: float


def evaluate(state: State, model: nn.Module) -> Evaluation:
    """Returns the workload's objectives on the validation split; raises Diverged where one is not finite."""
    start = time.perf_counter()
    model.eval()
    repeated = not state.sparse.evaluation()  # and so needs nothing that was not counted before
    state.counts = not state.evaluation_batch or (state.capped and not repeated)
    resident, config = state.resident, state.config
    knobs, device = config.knobs, state.device
    with torch.no_grad(), watched(state), precision.kernels(knobs, device), precision.autocast(knobs, device):
        found = resident.workload.evaluate(model, _on_device(state))
        values = {name: float(v) for name, v in found.items()}
    missing = [name for name in resident.workload.objectives if name not in values]
    if missing:
        raise KeyError(f"evaluate() returned {sorted(values)}, without {', '.join(missing)} of `objectives`")
    for name, value in values.items():
        if not math.isfinite(value):
            raise Diverged(f"{name} is {value} after {state.samples} samples")
    return Evaluation(state.samples, values, time.perf_counter() - start)


def _on_device(state: State) -> Iterator[Any]:
    """Yields the validation batches on the device; what the host makes on the way to one is not the device's."""
    collated: Iterator[Any] | None = None
    while True:
        with state.meter.uncounted() if state.meter is not None else nullcontext():
            collated = collated or iter(state.resident.validation(state.config, _sizes(state)))
            batch = next(collated, None)
        if batch is None:
            return
        batch = batches.to_device(batch, state.device)
        if state.meter is not None:
            state.meter.adopt(batches.tensors_of(batch))
        yield batch


def _sizes(state: State) -> Iterator[int]:
    """Yields how many samples the next validation batch takes; asked for one when all before it were evaluated.

    All evaluations of a run take the same. Half a micro-batch first, twice, since the second meets what the workload
    still holds of the first; never less than a micro-batch then, of which training holds the activations too.
    """
    knobs = state.config.knobs
    micro = knobs.micro_batch_size
    if knobs.compile != "off":  # every other shape would be compiled once more
        yield from itertools.repeat(micro)
    small = max(1, micro // 2)
    room = state.peak_allocated_bytes - state.live_bytes
    held = state.live_bytes
    with state.own_peak() as peak:
        yield small
        yield small
        needed = max(1, peak() - held)
    if not state.evaluation_batch:
        fitting = int(small * room * USED_FRAC / needed)
        state.evaluation_batch = min(max(micro, fitting), MOST_MICRO_BATCHES * micro)
    yield from itertools.repeat(state.evaluation_batch)
