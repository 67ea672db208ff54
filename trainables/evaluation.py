"""Measures quality on the validation split, in batches of the micro-batch size of training.

Evaluation keeps no activations, so a micro-batch that fits in training usually fits here, too; if not, it is halved.
All batches but the last have one size, so the error of a workload that takes the plain mean of batches is small.
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
from trainables.state import Evaluation as Evaluation
from trainables.state import State, check_objectives, watched
from trainables.workload import WorkloadError

SAME_PLACE = 1.1
"""Two evaluations that run out of memory after up to so many times as many samples do so at the same place."""
KEEPS = (
    "evaluate() ran out of memory, as it keeps what it computes for each batch on the device, whatever the batch size: "
    "move outputs to the CPU, or add up what is asked for"
)


def evaluate(state: State, model: nn.Module) -> Evaluation:
    """Evaluates the workload, of averaged weights if there are any, on the validation split.

    Raises Diverged if an objective is not finite.
    If a batch runs out of device memory, batches are halved for this and all later evaluations, down to one sample.
    """
    start = time.perf_counter()
    model.eval()
    state.counts = state.capped and state.sparse.evaluation()
    # As in training: a model compiled while operators are counted would stay uncompiled for good.
    called = state.model if state.counting else model
    before = 0
    while (result := _evaluate_once(state, called, seen := _Seen())) is None:
        if seen.keeps and seen.samples <= SAME_PLACE * before:
            raise WorkloadError(KEEPS)
        before, state.evaluation_batch = seen.samples, (_size(state) + 1) // 2
        state.counts = state.capped
        garbage.collect()
    values = {name: float(v) for name, v in result.items()}
    missing = [name for name in state.resident.workload.objectives if name not in values]
    if missing:
        raise KeyError(f"evaluate() returned {sorted(values)}, without {', '.join(missing)} of `objectives`")
    check_objectives(state.resident.workload.objectives, values, state.samples)
    return Evaluation(state.samples, values, time.perf_counter() - start)


@dataclass
class _Seen:
    """The samples of an evaluation so far, and the bytes that were held at its first and its last batch."""

    samples: int = 0
    first_bytes: int = 0
    last_bytes: int = 0

    @property
    def keeps(self) -> bool:
        """Returns whether most of what is held has come in the evaluation, and was not freed between batches."""
        return self.last_bytes > 2 * self.first_bytes


def _evaluate_once(state: State, model: nn.Module, seen: _Seen) -> Mapping[str, float] | None:
    """Returns the workload's objectives; None if memory ran out, and smaller batches may fit."""
    # Timing cuDNN's kernels pays only if a shape comes again; the last batch and padded batches have other shapes.
    knobs, device = state.config.knobs.with_(cudnn_benchmark=False), state.device
    try:
        kernels = precision.kernels(knobs, device)
        with torch.no_grad(), watched(state), state.average.shown(), kernels, precision.autocast(knobs, device):
            return state.resident.workload.evaluate(model, _on_device(state, seen))
    except torch.OutOfMemoryError as error:
        if _size(state) > 1 and state.ranks.count == 1:  # other ranks would wait during a second evaluation
            return None
        if _size(state) > 1:
            raise
        what = "evaluate() ran out of memory with batches of one sample: does it keep its outputs on the device?"
        raise torch.OutOfMemoryError(f"{what} ({error})") from error


def _size(state: State) -> int:
    knobs = state.config.knobs
    return state.evaluation_batch or part_size(min(knobs.micro_batch_size, knobs.batch_size), state.ranks.count)


def _held_bytes(state: State) -> int:
    if state.device.type == "cuda":
        return int(torch.cuda.memory_allocated(state.device))
    return state.meter.live_bytes if state.meter is not None else 0


def _on_device(state: State, seen: _Seen) -> Iterator[Any]:
    """Yields the validation batches on the device; tensors made on the host are not counted as device memory."""
    knobs, size = state.config.knobs, _size(state)
    collated: Iterator[Any] | None = None
    while True:
        seen.last_bytes = _held_bytes(state)
        seen.first_bytes = seen.first_bytes or seen.last_bytes
        with state.meter.uncounted() if state.meter is not None else nullcontext():
            collated = collated or iter(state.resident.validation(state.config, size))
            batch = next(collated, None)
        if batch is None:
            return
        seen.samples += size
        batch = batches.to_device(batch, state.device, non_blocking=knobs.non_blocking)
        if state.meter is not None:
            state.meter.adopt(batches.tensors_of(batch))
        yield batch
