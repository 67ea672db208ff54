"""What the sampler is told of how a trial ended."""

from __future__ import annotations

import pytest

from tuning.journal.records import Record
from tuning.memory.guard import MemoryGuard
from tuning.search.acquisition import Qualities
from tuning.search.endings import observation


@pytest.mark.parametrize(
    ("outcome", "failed", "value"),
    [("ok", False, 0.5), ("stopped", False, 0.3), ("cut", False, 0.3), ("crash", True, 0.5), ("diverged", True, 0.5)],
)
def test_a_trial_that_time_or_a_rung_ended_has_not_failed_and_counts_by_its_last_rung(
    outcome: str, failed: bool, value: float
) -> None:
    qualities = Qualities("min")
    for trial, rung in (("t0", 0.6), ("t1", 0.5)):
        qualities.rung(trial, 200, rung)
    qualities.ended("t0", 0.4)  # 0.2 better than at its rung
    record = Record(0, "", "trial", {"trial": "t1", "config": {}, "outcome": outcome, "values": {"error": 0.5}})
    told = observation(record, "error", qualities, MemoryGuard(None, {}))
    assert told.failed is failed
    assert told.values["error"] == pytest.approx(value)
