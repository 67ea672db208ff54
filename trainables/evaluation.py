"""Quality on the validation split, in batches as large as the memory that training needs anyway has room for.

Evaluating holds no activations, so that a sample needs less than in training, and how much less is the workload's: a
decoder that goes step by step takes 16 times the micro-batch, a wide convolution not even twice. So it is measured
before a run's first evaluation, on small batches of the longest samples. All batches but the last are of one size, so
that a workload which takes the plain mean of theirs is not far off.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainables import batches, garbage, precision
from trainables.ranks import part_size
from trainables.state import State, check_objectives, watched

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


class Enough(Exception):
    """An evaluation was seen for long enough."""


def evaluate(state: State, model: nn.Module) -> Evaluation:
    """Returns what `evaluate` does on the validation split; raises Diverged where an objective is not finite."""
    start = time.perf_counter()
    model.eval()
    if not state.evaluation_batch:
        state.evaluation_batch = _fitting(state)
    state.counts = state.capped and state.sparse.evaluation()
    # As in training: what is compiled under a counter of operators stays uncompiled for good.
    called = state.model if state.counting else model
    found = _judged(state, called, state.evaluation_batch)
    values = {name: float(v) for name, v in found.items()}
    missing = [name for name in state.resident.workload.objectives if name not in values]
    if missing:
        raise KeyError(f"evaluate() returned {sorted(values)}, without {', '.join(missing)} of `objectives`")
    check_objectives(state.resident.workload.objectives, values, state.samples)
    return Evaluation(state.samples, values, time.perf_counter() - start)


def _judged(state: State, model: nn.Module, sizes: Iterable[int] | int) -> Mapping[str, Any]:
    # Timing cuDNN's kernels pays where a shape comes again: the last batch of a split does not, nor padded ones.
    knobs, device = state.config.knobs.with_(cudnn_benchmark=False), state.device
    with torch.no_grad(), watched(state), precision.kernels(knobs, device), precision.autocast(knobs, device):
        return state.resident.workload.evaluate(model, _on_device(state, sizes))


def _on_device(state: State, sizes: Iterable[int] | int) -> Iterator[Any]:
    """Yields the validation batches on the device; what the host makes on the way to one is not the device's."""
    collated: Iterator[Any] | None = None
    while True:
        with state.meter.uncounted() if state.meter is not None else nullcontext():
            collated = collated or iter(state.resident.validation(state.config, sizes))
            batch = next(collated, None)
        if batch is None:
            return
        batch = batches.to_device(batch, state.device, non_blocking=state.config.knobs.non_blocking)
        if state.meter is not None:
            state.meter.adopt(batches.tensors_of(batch))
        yield batch


def _fitting(state: State) -> int:
    """Returns how many samples a validation batch may hold, so that evaluating needs no more than training has needed.

    Half a micro-batch of the longest samples is evaluated, and another, which meets what the workload still holds of
    the first; there the evaluation is broken off. What it keeps of each sample it will keep of all. One micro-batch
    where this tells nothing: nothing was trained yet, the split ends before, or batches are asked for before the model
    has seen the last. Under compile, too, as every other shape would be compiled once more.
    """
    knobs = state.config.knobs
    micro = part_size(min(knobs.micro_batch_size, knobs.batch_size), state.ranks.count)
    small = max(1, micro // 2)
    room = state.peak_allocated_bytes - state.live_bytes
    if knobs.compile != "off" or room <= 0:
        return micro
    garbage.collect()  # what is freed in between would be taken for room
    held = state.live_bytes
    calls: list[None] = []
    live: list[int] = []

    def sizes() -> Iterator[int]:
        for _ in range(2):
            yield small
            live.append(state.live_bytes)
        raise Enough

    state.counts = True
    hook = state.model.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        with state.own_peak() as peak:
            with suppress(Enough):
                _judged(state, state.model, sizes())
            needed = peak() - held
    finally:
        hook.remove()
    if len(live) < 2 or len(calls) < 2:
        return micro
    kept = max(0, live[1] - live[0]) / small * batches.size_of(state.resident.dataset(state.config, "val"))
    fitting = int(small * (room - kept) * USED_FRAC / max(1, needed))
    # On a CPU without a cap the room is that of the first step alone, too small, and there is nothing to keep to.
    least = 1 if state.capped or state.meter is None else micro
    return max(least, min(fitting, MOST_MICRO_BATCHES * micro))
