"""What is said of an exported speed, from repeats and a run whose answers are known; nothing is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.exported import compared, figures, measured_at, said
from tuning.journal.records import read
from tuning.report import summary

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


def test_the_figures_of_a_run_add_up_and_are_those_of_its_summary() -> None:
    records, _ = read(RUN)
    found = summary.from_records(records)
    own = figures(found)
    assert sum(own["shares"].values()) == pytest.approx(1.0)
    assert own["wall_s"] == found.times.wall_s
    assert own["samples_per_s"]["best"] == found.best.samples_per_s if found.best else None
    assert [g["over"] for g in own["gains"] if g["of"] == "best"] == ["before", "after"]


def test_the_time_since_the_study_counts_from_its_last_confirm_training() -> None:
    records, _ = read(RUN)
    last = [r for r in records if r.event == "confirmed"][-1]
    assert measured_at(records) == pytest.approx(measured_at([last]))
    with pytest.raises(ValueError, match="confirmed nothing"):
        measured_at([])


def test_a_line_says_all_three_ratios() -> None:
    one = {"workload": "nli", **compared(100.0, [{"trained": 90.0, "confirmed": 120.0}])}
    assert said(one).endswith(
        "trainings 0.900 of it (0.900 to 0.900), the confirm measurement beside them 1.200; a training over it 0.750"
    )
