"""What is looked at before a study: the untrained model, and only as long as that is cheap."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.fakes import Sums, knobs_of
from trainables import sanity
from trainables.resident import Resident
from trainables.workload import Config


class Counted(Sums):
    """Counts the batches that it validates on."""

    batches = 0

    def evaluate(self, model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
        taken = list(batches)
        self.batches = len(taken)
        return super().evaluate(model, taken)


@pytest.mark.parametrize(("seconds_a_batch", "measured"), [(1.0, True), (4.0, False)])
def test_an_untrained_model_is_evaluated_only_if_that_is_quick(
    seconds_a_batch: float, measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(sanity, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * seconds_a_batch))
    workload = Counted()
    config = Config(knobs_of(batch_size=4, micro_batch_size=4), {})
    assert bool(sanity.untrained(Resident(workload), config)) is measured
    assert (workload.batches == 8) is measured
    assert next(ticks) <= (9 if measured else 3)
