"""What the sampler is told of how a trial ended."""

from __future__ import annotations

import math

import pytest

from trainables.our_knobs import EVERY
from tuning.journal.events import TrialRecord
from tuning.journal.records import Record
from tuning.memory.guard import MemoryGuard
from tuning.search.endings import Qualities, observation
from tuning.search.pruner import Rung
from tuning.search.rule import Rule


@pytest.mark.parametrize(
    ("outcome", "failed", "value"),
    [("ok", False, 0.5), ("stopped", False, 0.3), ("cut", False, 0.3), ("crash", True, 0.5), ("diverged", True, 0.5)],
)
def test_stopped_trial_counts_by_its_last_rung(outcome: str, failed: bool, value: float) -> None:
    qualities = Qualities()
    for trial, rung in (("t0", 0.6), ("t1", 0.5)):
        qualities.rung(trial, 200, rung)
    qualities.ended("t0", 0.4)  # 0.2 better than at its rung
    record = Record(0, "", "trial", {"trial": "t1", "config": {}, "outcome": outcome, "values": {"error": 0.5}})
    told = observation(TrialRecord.read(record), "error", qualities, MemoryGuard(None, {}, EVERY))
    assert told.failed is failed
    assert told.values["error"] == pytest.approx(value)


def test_stopped_trial_is_guessed_to_gain_what_whole_ones_did() -> None:
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


def test_trial_stands_beside_the_reference_at_its_rung() -> None:
    found, rule = Qualities(), Rule("error", "min", 0.01)
    assert found.beside("a", 100, "", rule) == Rung(100, None, [], 0.01)
    for trial, rung, end in (("ref", 0.9, 0.5), ("a", 0.8, 0.5), ("b", 1.0, 0.4)):
        found.rung(trial, 100, rung)
        found.ended(trial, end)
    found.rung("c", 100, 0.7)
    at_rung = found.beside("c", 100, "ref", rule)
    assert (at_rung.gain, at_rung.may_lose) == (pytest.approx(0.2), 0.01)
    assert at_rung.ended == [pytest.approx(pair) for pair in ((0.1, 0.0), (-0.1, 0.1))], "there, and at the end"
    assert found.beside("c", 50, "ref", rule).gain is None
    assert found.beside("c", 100, "ref", Rule("error", "min", at_least=0.5)).gain == pytest.approx(-0.2)
