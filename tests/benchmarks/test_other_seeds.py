"""What fronts are worth on other seeds, from rows whose answers are known; nothing is trained."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from benchmarks.tuners.figures import Scale, key
from benchmarks.tuners.other_seeds import believed, learned, qualities_of, table, worth, worth_at

SLOW, FAST, BOTH = {"batch_size": 16}, {"batch_size": 64}, {"batch_size": 32}
SCALE = Scale("accuracy", "max", 0.5, 0.5, {key(SLOW): 50.0, key(FAST): 100.0, key(BOTH): 80.0})


def line(at: float, knobs: dict[str, Any], speed: float, quality: float) -> dict[str, Any]:
    values = {"accuracy": quality}
    return {"event": "trial", "at": at, "knobs": knobs, "samples_per_s": speed, "values": values, "outcome": "ok"}


def row(way: str, *lines: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    return {"way": way, "workload": "signals", "seed": seed, "budget_s": 100.0, "commit": "abc", "lines": list(lines)}


OURS = row("staged", line(20, SLOW, 50.0, 0.9), line(40, FAST, 100.0, 0.7), line(60, BOTH, 80.0, 1.0))
TPE = row("tpe", line(50, SLOW, 50.0, 0.95), line(70, FAST, 100.0, 0.6))
QUALITIES = {learned(SLOW): [0.8, 1.0], learned(FAST): [0.75, 0.75], learned(BOTH): [0.7, 0.8]}


def test_system_knobs_make_no_other_configuration() -> None:
    assert learned({**SLOW, "num_workers": 0}) == learned({**SLOW, "num_workers": 2})
    assert learned({**SLOW, "learning_rate": 0.1}) != learned({**SLOW, "learning_rate": 0.2})


def test_a_front_is_what_a_run_saw_at_speeds_measured_again() -> None:
    slower = [line(20, SLOW, 500.0, 0.9), line(40, FAST, 100.0, 0.7), line(60, BOTH, 80.0, 1.0)]
    assert [x["knobs"] for x in believed(slower, SCALE)] == [FAST, BOTH]
    assert [x["knobs"] for x in believed(slower, dataclasses.replace(SCALE, mode="min"))] == [FAST]


def test_a_front_is_worth_its_means_on_other_seeds_at_speeds_measured_again() -> None:
    assert worth(OURS["lines"][:1], SCALE, QUALITIES) == pytest.approx(0.5 * 0.8)
    assert worth([], SCALE, QUALITIES) == 0.0
    failed = {**QUALITIES, learned(SLOW): [math.nan, 1.0]}
    assert worth(OURS["lines"][:1], SCALE, failed) == pytest.approx(0.5 * 0.5), "a training that failed is the worst"


def test_a_belief_that_does_not_hold_makes_the_curve_fall() -> None:
    found = [worth_at(OURS, SCALE, QUALITIES, share) for share in (0.1, 0.2, 0.4, 0.6, 1.0)]
    assert found == pytest.approx([0.0, 0.4, 0.4 + 0.5 * 0.5, 0.5, 0.5])


def test_the_table_says_from_when_on_ours_is_worth_in_the_mean_what_another_ends_with() -> None:
    ours = row("staged", *OURS["lines"], seed=1)
    found = table("signals", [OURS, TPE, ours], SCALE, {"0": QUALITIES, "1": QUALITIES})
    assert found == [
        "| signals | staged | 0.880 | 0.000 | 0.000 | 0.400 | 0.400 | 0.650 | 0.500 (0.000): 0.500, 0.500 |  |",
        "| signals | tpe | 0.550 | 0.000 | 0.000 | 0.000 | 0.000 | 0.400 | 0.650 (nan): 0.650 | never |",
    ]


def test_what_is_known_is_not_trained_again() -> None:
    assert qualities_of([OURS, TPE], SCALE, {"0": QUALITIES}, 2, 1) == {"0": QUALITIES}
