"""Evaluation: in how large batches it goes through the validation split, and what memory that takes."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fakes import Sums
from trainables import precision
from trainables.evaluation import MOST_MICRO_BATCHES
from trainables.knobs import Knobs
from trainables.loop import State, prepare, train
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.workload import Config

MICRO_BATCH = 4
NO_CAP = 1 << 62


class Seen(Sums):
    """Keeps the sizes of the validation batches; a sample takes 1,000 numbers to train on and `floats` to judge.

    `kept` numbers of each are held until all were judged.
    """

    def __init__(self, floats: int, kept: int = 0) -> None:
        self.floats, self.kept = floats, kept
        self.evaluations: list[list[int]] = []
        self.models: list[str] = []

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        held = torch.zeros(len(batch["target"]), 1_000)
        return super().loss(model, batch) + held.sum()

    def evaluate(self, model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        self.evaluations.append([])
        self.models.append(type(model).__name__)
        return super().evaluate(model, self._seen(batches))

    def _seen(self, batches: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        kept = []
        for batch in batches:
            self.evaluations[-1].append(len(batch["target"]))
            held = torch.zeros(len(batch["target"]), self.floats)
            yield batch
            del held
            kept.append(torch.zeros(len(batch["target"]), self.kept))


class AllAtOnce(Seen):
    """Asks for all batches before it looks at one."""

    def evaluate(self, model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        return super().evaluate(model, list(batches))


class First(Seen):
    """Looks at the first batch alone."""

    def evaluate(self, model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        return super().evaluate(model, itertools.islice(batches, 1))


class Leaves(Seen):
    """Keeps the iterator of its batches, which it never ends."""

    def evaluate(self, model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        self.left = iter(batches)
        return super().evaluate(model, [next(self.left)])


class LeavesCycles(Seen):
    """Leaves cyclic garbage in training, which is collected behind the first batch that is judged."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not self.evaluations:
            cycle: list[Any] = [torch.zeros(2_000)]
            cycle.append(cycle)
        return super().loss(model, batch)

    def _seen(self, batches: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        for batch in super()._seen(batches):
            yield batch
            gc.collect()


def run(
    workload: Seen, cap_bytes: int | None = NO_CAP, resident: Resident | None = None, **knobs: Any
) -> tuple[State, int]:
    """Returns the state after two evaluations, and the peak of training before the first."""
    own = Knobs.of({"batch_size": 16, "micro_batch_size": MICRO_BATCH, "learning_rate": 0.05, **knobs})
    plan = Plan(samples=64, milestones=(32, 64), cap_bytes=cap_bytes)
    state = prepare(resident or Resident(workload), Config(own), plan)
    trained = [state.peak_allocated_bytes for _ in train(state) if not workload.evaluations]
    return state, max(trained, default=0)


@pytest.mark.parametrize("cap_bytes", [NO_CAP, None])
def test_light_evaluations_take_many_micro_batches_and_heavy_ones_what_fits(cap_bytes: int | None) -> None:
    sizes = [run(Seen(floats), cap_bytes)[0].evaluation_batch for floats in (1, 200, 1_200)]
    assert sizes == sorted(sizes, reverse=True)
    assert MICRO_BATCH < sizes[1] < sizes[0] <= MOST_MICRO_BATCHES * MICRO_BATCH
    assert sizes[2] < MICRO_BATCH if cap_bytes else sizes[2] == MICRO_BATCH


@pytest.mark.parametrize("workload", [Seen(1), Seen(1_200), Seen(10, kept=40)])
def test_an_evaluation_needs_no_more_than_training_did(workload: Seen) -> None:
    state, trained = run(workload)
    assert state.peak_allocated_bytes == trained
    assert state.meter is not None
    assert state.meter.peak_bytes == trained


@pytest.mark.parametrize("workload", [AllAtOnce(1), First(1)])
def test_what_a_small_batch_tells_nothing_of_has_one_micro_batch(workload: Seen) -> None:
    state, _ = run(workload)
    assert state.evaluation_batch == MICRO_BATCH


def test_garbage_of_training_is_no_room_for_an_evaluation() -> None:
    gc.disable()
    try:
        state, trained = run(LeavesCycles(3_000))
    finally:
        gc.enable()
    assert state.peak_allocated_bytes == trained


def test_a_peak_above_trainings_own_is_told() -> None:
    state, trained = run(AllAtOnce(50_000))
    assert state.peak_allocated_bytes > trained
    assert state.meter is not None
    assert state.meter.peak_bytes == state.peak_allocated_bytes


def test_an_iterator_that_is_never_ended_changes_nothing_of_the_next_run() -> None:
    """All runs of a process have one meter, and the one left behind belongs to a larger run."""
    alone, _ = run(Leaves(1))
    workload = Leaves(1)
    resident = Resident(workload)
    larger, _ = run(workload, resident=resident, micro_batch_size=16)
    large_bytes = larger.peak_allocated_bytes
    del larger
    again, _ = run(workload, resident=resident)
    more_bytes = again.peak_allocated_bytes - alone.peak_allocated_bytes  # the batch that the iterator keeps
    assert more_bytes < (large_bytes - alone.peak_allocated_bytes) / 10


def test_a_micro_batch_above_the_batch_is_the_batch() -> None:
    workload = First(1)
    state, _ = run(workload, batch_size=8, micro_batch_size=64)
    assert state.evaluation_batch == 8


@pytest.mark.parametrize(
    ("cap_bytes", "called"), [(None, ["OptimizedModule"] * 2), (NO_CAP, ["Adder", "OptimizedModule"])]
)
def test_under_compile_there_is_one_shape_and_what_is_counted_is_not_compiled(
    cap_bytes: int | None, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = functools.partial(torch.compile, backend="eager")  # inductor takes 14 s before its first kernel
    monkeypatch.setattr(torch, "compile", quick)
    workload = Seen(1)
    run(workload, cap_bytes, compile="default")
    assert {size for sizes in workload.evaluations for size in sizes} == {MICRO_BATCH}
    assert workload.models == called


def test_cudnns_own_timing_is_for_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation batches are of many shapes, each of which would be timed anew."""
    asked, kernels = [], precision.kernels

    def noted(knobs: Knobs, device: torch.device) -> AbstractContextManager[None]:
        asked.append(knobs.cudnn_benchmark)
        return kernels(knobs, device)

    monkeypatch.setattr(precision, "kernels", noted)
    workload = Seen(floats=0)
    run(workload, cudnn_benchmark=True)
    assert asked.count(False) >= len(workload.evaluations) > 0
    assert asked.count(True) == 64 / MICRO_BATCH
