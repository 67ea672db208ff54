"""A table of recorded trials: what was measured is answered as it was, what was not lies between its neighbours."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.sim.recorded import Table
from tuning.journal.records import Record, read
from tuning.memory.groups import micro_batch_of

RECORDED = Path(__file__).parents[2] / "data" / "recorded_search" / "trials.jsonl"


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """A real run."""
    return read(RECORDED)[0]


def test_a_recorded_probe_is_answered_with_its_step_times(records: list[Record]) -> None:
    table = Table(records)
    probes = [r for r in records if r.event == "probe" and not r["name"]]  # a named one need not be in the space
    assert len(probes) == 13
    for record in probes:
        assert table.step_s(record["config"])[0] == pytest.approx(record["micro_step_s"])
    assert set(table.answers) == {"speed, recorded"}


def test_a_recorded_trial_is_answered_with_its_curve(records: list[Record]) -> None:
    table = Table(records)
    ended = [r for r in records if r.event == "trial" and r["outcome"] == "ok"]
    for trial in ended:
        assert table.values(trial["config"], table.horizon, 0) == pytest.approx(
            {"accuracy": trial["values"]["accuracy"]}
        )
        rung = next(r for r in records if r.event == "rung" and r["trial"] == trial["trial"])
        assert table.values(trial["config"], rung["samples"], 0) == pytest.approx(rung["values"])
    assert set(table.answers) == {"quality, recorded"}


@pytest.mark.parametrize("seed", range(5))
def test_a_guess_lies_between_what_was_recorded_and_says_that_it_is_one(records: list[Record], seed: int) -> None:
    table = Table(records)
    draw = np.random.default_rng(seed)
    recorded = [r["values"]["accuracy"] for r in records if r.event in ("rung", "trial")]
    trial = next(r for r in records if r.event == "trial")
    knobs = {
        **trial["config"],
        "learning_rate": float(draw.uniform(5e-4, 1e-2)),
        "dropout": float(draw.uniform(0, 0.5)),
    }
    guess = table.values(knobs, table.horizon, 0)["accuracy"]
    assert min(recorded) <= guess <= max(recorded)
    assert table.values(knobs, table.horizon, 0)["accuracy"] == guess
    assert set(table.answers) == {"quality, interpolated"}


def test_quality_does_not_know_system_knobs_nor_speed_learning_ones(records: list[Record]) -> None:
    table = Table(records)
    trial = next(r for r in records if r.event == "trial")["config"]
    other = {**trial, "num_workers": 2, "ram_cache": not trial["ram_cache"]}
    assert table.values(trial, 9600, 0) == table.values(other, 9600, 0)
    assert table.step_s(trial) == table.step_s({**trial, "learning_rate": 0.0051, "dropout": 0.44})


def test_peaks_rise_with_the_micro_batch(records: list[Record]) -> None:
    table = Table(records)
    trial = next(r for r in records if r.event == "trial")["config"]
    peaks = [table.peak_bytes(trial, m) for m in (1, 2, 8, 16, 64, 256)]
    assert peaks == sorted(peaks)
    assert peaks[0] >= table.sizes(trial).parameter_bytes > 0
    assert micro_batch_of(trial) > 0


@pytest.mark.parametrize(
    ("without", "text"),
    [
        ("study", "no study record"),
        ("probe", "no probe that"),
        ("trial", "no trial with"),
        ("footprint", "no footprint"),
    ],
)
def test_records_that_cannot_answer_say_what_they_lack(records: list[Record], without: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Table([r for r in records if r.event != without])
