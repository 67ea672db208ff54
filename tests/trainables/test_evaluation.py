"""Evaluation: in what batches it goes through the validation split, and what it leaves behind."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fakes import Sums
from trainables import precision
from trainables.knobs import Knobs
from trainables.loop import State, prepare, train
from trainables.our_knobs import EVERY
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.workload import Config, WorkloadError

MICRO_BATCH = 4
NO_CAP = 1 << 62


class Seen(Sums):
    """Keeps the sizes of the validation batches, and the classes of the models that were judged."""

    def __init__(self) -> None:
        self.evaluations: list[list[int]] = []
        self.models: list[str] = []

    def evaluate(self, model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        self.evaluations.append([])
        self.models.append(type(model).__name__)
        return super().evaluate(model, self._seen(batches))

    def _seen(self, batches: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        for batch in batches:
            self.evaluations[-1].append(len(batch["target"]))
            yield batch


class Leaves(Seen):
    """Keeps the iterator of its batches, which it never ends; a sample takes 1,000 numbers to train on."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        held = torch.zeros(len(batch["target"]), 1_000)
        return super().loss(model, batch) + held.sum()

    def evaluate(self, model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        self.left = iter(batches)
        return super().evaluate(model, [next(self.left)])


def run(workload: Seen, cap_bytes: int | None = NO_CAP, resident: Resident | None = None, **knobs: Any) -> State:
    """Returns the state after two evaluations."""
    own = Knobs.of({"batch_size": 16, "micro_batch_size": MICRO_BATCH, "learning_rate": 0.05, **knobs}, EVERY)
    plan = Plan(samples=64, milestones=(32, 64), cap_bytes=cap_bytes)
    state = prepare(resident or Resident(workload), Config(own), plan)
    train(state)
    return state


def test_an_iterator_left_behind_changes_nothing_of_the_next_run() -> None:
    """All runs of a process have one meter, and the one left behind belongs to a larger run."""
    alone = run(Leaves())
    workload = Leaves()
    resident = Resident(workload)
    larger = run(workload, resident=resident, micro_batch_size=16)
    large_bytes = larger.peak_allocated_bytes
    del larger
    again = run(workload, resident=resident)
    more_bytes = again.peak_allocated_bytes - alone.peak_allocated_bytes  # the batch that the iterator keeps
    assert more_bytes < (large_bytes - alone.peak_allocated_bytes) / 10


class Judges(Seen):
    """Takes far more to judge a sample than to train on it."""

    def _seen(self, batches: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        for batch in super()._seen(batches):
            held = torch.zeros(len(batch["target"]), 25_000)
            yield batch
            del held


def test_a_batch_that_does_not_fit_is_halved_from_then_on() -> None:
    workload = Judges()
    run(workload, cap_bytes=3 * 25_000 * 4)
    whole = sum(workload.evaluations[-1])
    assert workload.evaluations == [[MICRO_BATCH], [2] * (whole // 2), [2] * (whole // 2)]
    workload = Judges()
    with pytest.raises(torch.OutOfMemoryError, match="batches of one sample"):
        run(workload, cap_bytes=25_000)
    assert workload.evaluations == [[MICRO_BATCH], [2], [1]], "training fits"


class Keeps(Seen):
    """Holds outputs of all batches until its end."""

    def _seen(self, batches: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        self.held = []
        for batch in super()._seen(batches):
            self.held.append(torch.zeros(len(batch["target"]), 1_000))
            yield batch


def test_evaluation_that_keeps_all_outputs_is_told_at_once() -> None:
    workload = Keeps()
    with pytest.raises(WorkloadError, match="keeps what it computes"):
        run(workload, cap_bytes=30 * 1_000 * 4)
    assert {size for sizes in workload.evaluations for size in sizes} == {MICRO_BATCH, 2}


def test_a_micro_batch_above_the_batch_is_the_batch() -> None:
    workload = Seen()
    run(workload, batch_size=8, micro_batch_size=64)
    assert workload.evaluations == [[8] * 4] * 2


@pytest.mark.parametrize(
    ("cap_bytes", "called"), [(None, ["OptimizedModule"] * 2), (NO_CAP, ["Adder", "OptimizedModule"])]
)
def test_under_compile_there_is_one_shape_and_no_counting(
    cap_bytes: int | None, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = functools.partial(torch.compile, backend="eager")  # inductor takes 14 s before its first kernel
    monkeypatch.setattr(torch, "compile", quick)
    workload = Seen()
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
    workload = Seen()
    run(workload, cudnn_benchmark=True)
    assert asked.count(False) >= len(workload.evaluations) > 0
    assert asked.count(True) == 64 / MICRO_BATCH
