"""What is said of an exported speed, from repeats and a run whose answers are known; nothing is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import frameworks
from benchmarks.exported import compared, measured_at
from tuning.journal.records import read

RUN = Path(__file__).parents[1] / "data" / "sample_run" / "trials.jsonl"


def test_drift_of_the_machine_is_told_from_a_difference_of_measuring() -> None:
    drifted = compared(100.0, [{"trained": 80.0, "confirmed": 80.0}, {"trained": 90.0, "confirmed": 90.0}])
    assert drifted["over_exported"]["median"] == drifted["drift"]["median"] == pytest.approx(0.85)
    assert not drifted["within_bound"]
    assert drifted["beside"]["ratio"] == pytest.approx(1.0)
    slower = compared(100.0, [{"trained": 90.0, "confirmed": 100.0}, {"trained": 99.0, "confirmed": 110.0}])
    assert slower["drift"]["median"] == pytest.approx(1.05)
    assert (slower["beside"]["ratio"], slower["beside"]["high"]) == (pytest.approx(0.9), pytest.approx(0.9))


def test_the_median_of_the_trainings_is_held_to_the_bound() -> None:
    rows = [{"trained": rate, "confirmed": 100.0} for rate in (50.0, 97.5, 103.0)]
    found = compared(100.0, rows)
    assert found["within_bound"]
    assert (found["over_exported"]["least"], found["over_exported"]["largest"]) == (0.5, 1.03)
    assert not compared(100.0, [{"trained": 96.0, "confirmed": 100.0}])["within_bound"]


def test_the_time_since_the_study_counts_from_its_last_confirm_training() -> None:
    records, _ = read(RUN)
    last = [r for r in records if r.event == "confirmed"][-1]
    assert measured_at(records) == pytest.approx(measured_at([last]))
    with pytest.raises(ValueError, match="confirmed nothing"):
        measured_at([])


def test_the_bound_of_a_framework_is_on_the_pairs_and_drift_stands_beside_it() -> None:
    rows = [{"there": 98.0, "trained": 100.0}, {"there": 51.0, "trained": 50.0}, {"there": 99.0, "trained": 100.0}]
    found = frameworks.compared(200.0, rows)
    assert found["within_bound"]
    assert found["over_trained"] == {"median": 0.99, "least": 0.98, "largest": 1.02}
    assert found["over_said"] == pytest.approx(0.49)
    assert not frameworks.compared(100.0, [{"there": 90.0, "trained": 100.0}] * 2)["within_bound"]
