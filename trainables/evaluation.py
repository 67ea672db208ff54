"""Quality on the validation split, in batches of training's micro-batch.

Evaluating holds no activations, so that mostly a micro-batch that fits in training fits here, too; where it does not,
half of it is taken. All batches but the last are of one size, so that a workload which takes the plain mean of theirs
is not far off.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainables import batches, garbage, precision
from trainables.ranks import part_size
from trainables.state import State, check_objectives, watched


@dataclass(frozen=True)
class Evaluation:
    """Quality after `samples` training samples; `wall_s` is what measuring it took."""

    samples: int
    values: dict[str, float]
    wall_s: float


def evaluate(state: State, model: nn.Module) -> Evaluation:
    """Returns what `evaluate` does on the validation split; raises Diverged where an objective is not finite.

    A batch that runs out of the device's memory is halved for this evaluation and those to come, down to one sample.
    """
    start = time.perf_counter()
    model.eval()
    state.counts = state.capped and state.sparse.evaluation()
    # As in training: what is compiled under a counter of operators stays uncompiled for good.
    called = state.model if state.counting else model
    while (found := _judged(state, called)) is None:
        state.evaluation_batch = (_size(state) + 1) // 2
        state.counts = state.capped
        garbage.collect()
    values = {name: float(v) for name, v in found.items()}
    missing = [name for name in state.resident.workload.objectives if name not in values]
    if missing:
        raise KeyError(f"evaluate() returned {sorted(values)}, without {', '.join(missing)} of `objectives`")
    check_objectives(state.resident.workload.objectives, values, state.samples)
    return Evaluation(state.samples, values, time.perf_counter() - start)


def _judged(state: State, model: nn.Module) -> Mapping[str, float] | None:
    """Returns what the workload makes of its validation batches, None where smaller ones may fit."""
    # Timing cuDNN's kernels pays where a shape comes again: the last batch of a split does not, nor padded ones.
    knobs, device = state.config.knobs.with_(cudnn_benchmark=False), state.device
    try:
        with torch.no_grad(), watched(state), precision.kernels(knobs, device), precision.autocast(knobs, device):
            return state.resident.workload.evaluate(model, _on_device(state))
    except torch.OutOfMemoryError:
        if _size(state) == 1 or state.ranks.count > 1:  # other ranks would wait for the one that begins again
            raise
        return None


def _size(state: State) -> int:
    knobs = state.config.knobs
    return state.evaluation_batch or part_size(min(knobs.micro_batch_size, knobs.batch_size), state.ranks.count)


def _on_device(state: State) -> Iterator[Any]:
    """Yields the validation batches on the device; what the host makes on the way to one is not the device's."""
    knobs, size = state.config.knobs, _size(state)
    collated: Iterator[Any] | None = None
    while True:
        with state.meter.uncounted() if state.meter is not None else nullcontext():
            collated = collated or iter(state.resident.validation(state.config, size))
            batch = next(collated, None)
        if batch is None:
            return
        batch = batches.to_device(batch, state.device, non_blocking=knobs.non_blocking)
        if state.meter is not None:
            state.meter.adopt(batches.tensors_of(batch))
        yield batch
