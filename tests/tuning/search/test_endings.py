"""What the sampler is told of how a trial ended."""

from __future__ import annotations

import math

import pytest

from tuning.journal.records import Record
from tuning.memory.guard import MemoryGuard
from tuning.search.endings import Qualities, observation


@pytest.mark.parametrize(
    ("outcome", "failed", "value"),
    [("ok", False, 0.5), ("stopped", False, 0.3), ("cut", False, 0.3), ("crash", True, 0.5), ("diverged", True, 0.5)],
)
def test_a_trial_that_time_or_a_rung_ended_has_not_failed_and_counts_by_its_last_rung(
    outcome: str, failed: bool, value: float
) -> None:
    qualities = Qualities()
    for trial, rung in (("t0", 0.6), ("t1", 0.5)):
        qualities.rung(trial, 200, rung)
    qualities.ended("t0", 0.4)  # 0.2 better than at its rung
    record = Record(0, "", "trial", {"trial": "t1", "config": {}, "outcome": outcome, "values": {"error": 0.5}})
    told = observation(record, "error", qualities, MemoryGuard(None, {}))
    assert told.failed is failed
    assert told.values["error"] == pytest.approx(value)


def test_a_stopped_trial_is_expected_to_gain_what_whole_ones_did_in_the_median() -> None:
    found = Qualities()
    for trial, rung, end in (("a", 0.9, 0.5), ("b", 0.8, 0.7), ("c", 0.7, 0.4)):
        found.rung(trial, 100, rung)
        found.ended(trial, end)
    found.rung("d", 100, 0.6)
    found.rung("e", 50, 0.6)
    found.rung("f", 100, math.nan)
    found.ended("g", math.nan)
    assert found.guess("d") == pytest.approx(0.3)
    assert [found.guess(trial) for trial in "efg"] == [None] * 3, "no whole one passed e's rung; f and g have none"
    assert found.whole == {"a": 0.5, "b": 0.7, "c": 0.4}
