"""The contest's figures, from rows whose answers are known; nothing is trained."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest

from benchmarks.tuners.contest import on_core
from benchmarks.tuners.figures import Scale, at_one_pace, facts, key, on_front_once, slim, speed_key, table, whole


def line(at: float, knobs: dict[str, Any], speed: float, quality: float | None, outcome: str = "ok") -> dict[str, Any]:
    values = {} if quality is None else {"accuracy": quality}
    moments = {"at": at, "began": at - 5, "first_step": at - 4}
    return {"event": "trial", **moments, "knobs": knobs, "samples_per_s": speed, "values": values, "outcome": outcome}


SLOW, FAST, BOTH = {"batch_size": 16}, {"batch_size": 64}, {"batch_size": 32}
SCALE = Scale("accuracy", "max", 0.5, 0.5, {key(SLOW): 50.0, key(FAST): 100.0, key(BOTH): 80.0})


def row(way: str, *lines: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    return {"way": way, "workload": "signals", "seed": seed, "budget_s": 100.0, "lines": list(lines)}


OURS = row("staged", line(20, SLOW, 55.0, 1.0), line(40, FAST, 90.0, 0.75), line(60, BOTH, 85.0, 0.9))
PEER = row(
    "ray",
    line(10, SLOW, 1.0, None, "oom"),
    line(30, SLOW, 60.0, 0.9),
    line(50, BOTH, 10.0, 0.8),
    line(120, FAST, 100.0, 1.0),
)


def test_a_curve_rises_by_what_each_training_adds_at_speeds_measured_again() -> None:
    assert SCALE.curve(OURS) == [
        (20.0, pytest.approx(0.5)),
        (40.0, pytest.approx(0.5 + 0.5 * 0.5)),
        (60.0, pytest.approx(0.5 + 0.5 * 0.5 + 0.3 * 0.3)),
    ]


def test_a_training_that_is_faster_with_other_system_knobs_counts_from_then_on_and_is_launched_once() -> None:
    faster = {"event": "faster", "at": 30.0, "knobs": BOTH, "samples_per_s": 80.0, "values": {"accuracy": 1.0}}
    both = row("staged", line(20, SLOW, 55.0, 1.0), {**faster, "outcome": "ok"}, line(40, FAST, 50.0, 1.0))
    assert SCALE.curve(both) == [(20.0, pytest.approx(0.5)), (30.0, pytest.approx(0.8))]
    assert (facts(both)["launched"], facts(both)["whole"]) == (2, 2)
    assert SCALE.curve(slim(both, "accuracy", "max")) == SCALE.curve(both)


def test_configurations_that_differ_in_what_no_speed_depends_on_are_measured_once() -> None:
    one, other = {**SLOW, "learning_rate": 1e-3, "dropout": 0.1}, {**SLOW, "learning_rate": 2e-3, "dropout": 0.3}
    assert speed_key(one) == speed_key(other)
    assert speed_key(one) != speed_key({**one, "dropout": 0.0})
    assert speed_key({**one, "augmentation": 0.2}) == speed_key({**one, "augmentation": 1.5})
    assert speed_key({**one, "augmentation": 0.2}) != speed_key({**one, "augmentation": 0.0})
    scale = Scale("accuracy", "max", 0.5, 0.5, {speed_key(one): 50.0, key({**one, "weight_decay": 0.1}): 60.0})
    assert [scale.speed(k) for k in (other, {**one, "weight_decay": 0.1}, FAST)] == [50.0, 60.0, None]


def test_what_ends_after_the_budget_or_was_never_on_the_front_counts_for_nothing() -> None:
    assert [x["at"] for x in whole(PEER)] == [30, 50]
    assert [x["at"] for x in on_front_once(PEER, "accuracy", "max")] == [30]
    assert SCALE.final(PEER) == pytest.approx(0.5 * 0.8)
    assert SCALE.final(row("ray")) == 0.0


def test_the_moment_at_which_one_has_what_the_other_came_to() -> None:
    assert SCALE.reached(OURS, SCALE.final(PEER)) == pytest.approx(0.2)
    assert SCALE.reached(OURS, 0.7) == pytest.approx(0.4)
    assert math.isinf(SCALE.reached(PEER, SCALE.final(OURS)))


def test_an_oom_costs_its_seconds_and_those_until_the_next_begins() -> None:
    found = facts(PEER)
    assert (found["launched"], found["whole"], found["ooms"]) == (4, 2, 1)
    assert found["lost_s"] == pytest.approx(25 - 5)
    assert found["first_s"] == pytest.approx(6)
    shrunk = row("staged", {**line(20, SLOW, 1.0, 1.0), "lost_s": 3.0}, {"event": "end", "at": 30, "probe_ooms": 2})
    assert (facts(shrunk)["lost_s"], facts(shrunk)["ooms"]) == (pytest.approx(3.0), 2)


def test_the_pick_is_the_studys_rule_at_the_speed_measured_again() -> None:
    assert SCALE.picked(OURS, 0.1) == (80.0, 0.9)
    assert SCALE.picked(OURS, 0.0) == (50.0, 1.0)
    assert SCALE.picked(row("ray"), 0.1) is None


def test_the_table_has_every_seed_and_says_never() -> None:
    again = row("staged", line(90, SLOW, 55.0, 0.6), seed=1)
    lines = table([OURS, PEER, again, {**PEER, "seed": 1}], {"signals": SCALE}, {"signals": 0.1})
    assert len({text.count("|") for text in lines}) == 1
    assert "| signals | ray | 2 | 0.400, 0.400 | 0.20, never | inf |" in lines[-1]


def test_what_is_started_on_a_core_stays_there_and_the_rest_is_as_before() -> None:
    before, threads = os.sched_getaffinity(0), os.environ.get("OMP_NUM_THREADS")
    with on_core(0):
        assert len(os.sched_getaffinity(0)) == 1
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert os.sched_getaffinity(0) == before
    assert os.environ.get("OMP_NUM_THREADS") == threads


def test_speeds_are_those_of_one_pace_however_the_machine_changed_its_own() -> None:
    true, paces = {"first": 100.0, "a": 50.0, "b": 200.0}, {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 0.7, 5: 0.4, 6: 0.4}
    names = ["first", "a", "b", "first", "b", "first", "first"]
    found = at_one_pace([(name, true[name] * paces[n]) for n, name in enumerate(names)], "first")
    mean = sum(paces[n] for n, name in enumerate(names) if name == "first") / 4
    assert found == pytest.approx({name: speed * mean for name, speed in true.items()})
    assert at_one_pace([("first", 80.0)], "first") == {"first": 80.0}


def test_a_workload_whose_speeds_are_not_measured_again_is_known_to_be_so() -> None:
    assert SCALE.knows(OURS)
    assert not Scale("accuracy", "max", 0.5, 0.5, {key(SLOW): 50.0}).knows(OURS)


def test_a_slim_row_has_the_figures_of_the_whole_one() -> None:
    short = slim(PEER, "accuracy", "max")
    assert SCALE.curve(short) == SCALE.curve(PEER)
    assert facts(short) == facts(PEER)
    assert [("knobs" in x) for x in short["lines"]] == [False, True, False, False]
