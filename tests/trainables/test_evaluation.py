"""Evaluation: in how large batches it goes through the validation split, and what memory that takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fakes import Sums
from trainables.batches import size_of
from trainables.evaluation import MOST_MICRO_BATCHES
from trainables.knobs import Knobs
from trainables.loop import State, prepare, train
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.workload import Config

MICRO_BATCH = 4
NO_CAP = 1 << 62


class Seen(Sums):
    """Keeps the sizes of the validation batches; a sample takes 1,000 numbers to train on and `floats` to judge."""

    def __init__(self, floats: int) -> None:
        self.floats = floats
        self.evaluations: list[list[int]] = []

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        held = torch.zeros(len(batch["target"]), 1_000)
        return super().loss(model, batch) + held.sum()

    def evaluate(self, model: nn.Module, batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        self.evaluations.append([])
        return super().evaluate(model, self._seen(batches))

    def _seen(self, batches: Iterable[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        for batch in batches:
            self.evaluations[-1].append(len(batch["target"]))
            held = torch.zeros(len(batch["target"]), self.floats)
            yield batch
            del held


def run(workload: Seen, cap_bytes: int | None = NO_CAP, **knobs: Any) -> tuple[State, int]:
    """Returns the state after two evaluations, and the peak of training before the first."""
    own = Knobs.of({"batch_size": 16, "micro_batch_size": MICRO_BATCH, "learning_rate": 0.05, **knobs})
    state = prepare(Resident(workload), Config(own), Plan(samples=64, milestones=(32, 64), cap_bytes=cap_bytes))
    trained = [state.peak_allocated_bytes for _ in train(state) if not workload.evaluations]
    return state, max(trained)


@pytest.mark.parametrize("cap_bytes", [NO_CAP, None])
def test_light_evaluations_take_many_micro_batches_and_heavy_ones_what_fits(cap_bytes: int | None) -> None:
    light, heavy = Seen(1), Seen(20_000)
    sizes = [run(w, cap_bytes)[0].evaluation_batch for w in (light, heavy)]
    assert MICRO_BATCH == sizes[1] < sizes[0] <= MOST_MICRO_BATCHES * MICRO_BATCH


def test_all_evaluations_of_a_run_take_the_same_batches_small_ones_first() -> None:
    workload = Seen(150)
    state, _ = run(workload)
    first, second = workload.evaluations
    assert first == second
    assert sum(first) == size_of(state.resident.dataset(state.config, "val"))
    assert first[:3] == [MICRO_BATCH // 2, MICRO_BATCH // 2, state.evaluation_batch]


@pytest.mark.parametrize("floats", [1, 100, 300])
def test_what_it_measured_fits_into_what_training_needed(floats: int) -> None:
    state, trained = run(Seen(floats))
    assert state.evaluation_batch > MICRO_BATCH
    assert state.peak_allocated_bytes == trained


def test_a_peak_above_trainings_own_is_told() -> None:
    state, trained = run(Seen(20_000))
    assert state.peak_allocated_bytes > trained
    assert state.meter is not None
    assert state.meter.peak_bytes == state.peak_allocated_bytes


def test_under_compile_there_is_one_shape() -> None:
    workload = Seen(1)
    run(workload, compile="default")
    assert set(workload.evaluations[0][:-1]) == {MICRO_BATCH}
