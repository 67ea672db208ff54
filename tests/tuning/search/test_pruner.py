"""Pruner: where they are, and what is always true of who goes on."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.search.pruner import SPARED_FROM, Decision, Pruner, milestones
from tuning.stats.pareto import Mode, front

OBJECTIVES: dict[str, Mode] = {"samples_per_s": "max", "error": "min"}
Point = tuple[float, float]
points = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=25)


def values(point: Point) -> dict[str, float | None]:
    return {"samples_per_s": point[0], "error": point[1]}


def run(
    rows: Sequence[Point], order: Sequence[int] | None = None, *, seed: int = 0, eta: int = 3
) -> dict[int, Decision]:
    """Decides for each row in the order given, row number n being trial "tn"."""
    rungs = Pruner((100,), eta, OBJECTIVES, seed)
    return {n: rungs.decide(f"t{n}", 100, values(rows[n])) for n in (order or range(len(rows)))}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 243, 3), (1, 3, 9, 27, 81)),
        ((1, 1000, 10), (1, 10, 100)),
        ((1, 244, 3), (1, 3, 9, 27, 81, 243)),
        ((7, 7, 2), ()),
        ((300, 1200, 3), (300, 900)),
        ((1, 10**18, 10), tuple(10**n for n in range(18))),
    ],
)
def test_milestones(arguments: tuple[int, int, int], expected: tuple[int, ...]) -> None:
    assert milestones(*arguments) == expected


@pytest.mark.parametrize("arguments", [(0, 9, 3), (10, 9, 3), (1, 9, 1)])
def test_milestones_that_make_no_sense(arguments: tuple[int, int, int]) -> None:
    first, last, eta = arguments
    with pytest.raises(ValueError, match=rf"eta >= 2, got first={first}, last={last}, eta={eta}"):
        milestones(*arguments)


@settings(max_examples=60, deadline=None)
@given(points, st.randoms(use_true_random=False))
def test_the_final_front_goes_on_whatever_the_order(rows: list[Point], shuffle: random.Random) -> None:
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    decisions = run(rows, order)
    best = front(np.array([[-rate, error] for rate, error in rows]))
    assert all(decisions[int(n)].go_on for n in best)
    assert any(d.go_on for d in decisions.values())


@settings(max_examples=30, deadline=None)
@given(points, st.integers(0, 2**32 - 1))
def test_same_seed_same_decisions(rows: list[Point], seed: int) -> None:
    assert run(rows, seed=seed) == run(rows, seed=seed)


@settings(max_examples=30, deadline=None)
@given(points, st.integers(0, 24))
def test_a_rebuilt_search_goes_on_as_if_never_interrupted(rows: list[Point], cut: int) -> None:
    through = run(rows)
    rungs = Pruner((100,), 3, OBJECTIVES, 0)
    for n, row in [*enumerate(rows[:cut])] * 2:  # twice is once
        rungs.decide(f"t{n}", 100, values(row))
    assert all(rungs.decide(f"t{n}", 100, values(rows[n])) == through[n] for n in range(cut, len(rows)))


def test_about_one_in_eta_goes_on_where_quality_alone_differs() -> None:
    errors = np.random.default_rng(1).random(300)
    decisions = run([(50.0, float(error)) for error in errors]).values()
    placed = sum(d.go_on and not d.spared for d in decisions)
    spared = sum(d.spared for d in decisions)
    assert 0.75 * 100 <= placed <= 130  # asynchronous: early ones are judged by few; some of them count as spared
    assert 52 <= spared <= 98  # a quarter of 300, by a draw: within three deviations of 7.5


def test_whoever_is_spared_is_spared_whatever_the_others_do_and_nobody_is_at_first() -> None:
    rows = [(50.0, float(n)) for n in range(300)]  # each worse than all before
    first, last = run(rows), run(rows, [*range(150, 300), *range(150)])
    assert [first[n].spared for n in range(SPARED_FROM, 150)] == [last[n].spared for n in range(SPARED_FROM, 150)]
    assert not any(first[n].spared for n in range(SPARED_FROM - 1))
    assert any(first[n].spared for n in range(SPARED_FROM, 150))


def test_the_worst_of_four_is_stopped_with_a_reason() -> None:
    decision = run([(9.0, 1.0), (8.0, 2.0), (7.0, 3.0), (6.0, 4.0)])[3]
    assert decision == Decision(False, "place 4 of 4 at 100 samples (front 4); 2 go on")
    third = run([(9.0, 1.0), (8.0, 2.0), (7.0, 3.0)])[2]
    assert third.reason == "place 3 of 3 at 100 samples (front 3); 1 goes on"


def test_nobody_is_compared_before_enough_were_seen() -> None:
    rungs = Pruner((100,), 3, OBJECTIVES, 0, min_at_rung=4)
    going = [rungs.decide(f"t{n}", 100, values((9.0 - n, n))).go_on for n in range(4)]
    assert going == [True, True, True, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_values_that_are_not_finite_stop_and_are_not_compared_with(bad: float | None) -> None:
    rungs = Pruner((100,), 2, OBJECTIVES, 0)
    decision = rungs.decide("t0", 100, {"samples_per_s": 1.0, "error": bad})
    assert decision == Decision(False, f"error is {bad} at 100 samples")
    assert rungs.decide("t1", 100, values((1.0, 1.0))).reason.startswith("1 of the 2")


def test_a_missing_objective_is_named_and_nothing_is_remembered() -> None:
    rungs = Pruner((100,), 2, OBJECTIVES, 0)
    with pytest.raises(ValueError, match="objective error is missing; there are samples_per_s, accuracy"):
        rungs.decide("t0", 100, {"samples_per_s": 1.0, "accuracy": 0.5})
    assert rungs.decide("t1", 100, values((1.0, 1.0))).reason.startswith("1 of the 2")


def test_a_milestone_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="64 samples is no rung; rungs are at 100, 300"):
        Pruner((100, 300), 3, OBJECTIVES, 0).decide("t0", 64, values((1.0, 1.0)))


def test_rungs_are_judged_apart() -> None:
    rungs = Pruner((100, 300), 2, OBJECTIVES, 0)
    for n in range(6):
        rungs.decide(f"t{n}", 100, values((9.0, n)))
    assert rungs.decide("t5", 300, values((1.0, 9.0))).go_on


def test_a_throughput_within_its_tolerance_does_not_keep_a_trial_alive() -> None:
    rows = [(100.0, 1.0), (99.5, 2.0), (99.0, 3.0), (101.0, 4.0)]  # the last is 1 % faster and worst
    assert run(rows)[3].go_on
    rungs = Pruner((100,), 3, OBJECTIVES, 0, tolerances={"samples_per_s": 0.03})
    assert not [rungs.decide(f"t{n}", 100, values(row)) for n, row in enumerate(rows)][3].go_on


def test_a_tolerance_belongs_to_an_objective() -> None:
    with pytest.raises(
        ValueError, match="tolerance for speed, which is no objective; objectives are samples_per_s, error"
    ):
        Pruner((100,), 3, OBJECTIVES, 0, tolerances={"speed": 0.1})
    with pytest.raises(ValueError, match="eta must be at least 2, got 1"):
        Pruner((100,), 1, OBJECTIVES, 0)


@pytest.mark.parametrize("seed", range(5))
def test_what_was_only_remembered_counts_as_what_was_decided(seed: int) -> None:
    draw = np.random.default_rng(seed)
    values = [{"samples_per_s": float(s), "loss": float(v)} for s, v in draw.integers(1, 40, size=(60, 2))]
    objectives: dict[str, Mode] = {"samples_per_s": "max", "loss": "min"}
    tolerances = {"samples_per_s": 0.03}
    decided, remembered = (Pruner([100], 2, objectives, 0, tolerances=tolerances) for _ in range(2))
    for number, row in enumerate(values[:-1]):
        decided.decide(f"t{number}", 100, row)
        assert remembered.remember(f"t{number}", 100, row) == ""
    assert decided.decide("last", 100, values[-1]) == remembered.decide("last", 100, values[-1])


@pytest.mark.parametrize("seed", range(5))
def test_three_objectives_are_ranked_as_two_where_the_third_is_the_same(seed: int) -> None:
    draw = np.random.default_rng(seed)
    two = Pruner([100], 2, {"a": "min", "b": "max"}, 0)
    three = Pruner([100], 2, {"a": "min", "b": "max", "c": "min"}, 0)
    for number in range(40):
        row = {"a": float(draw.random()), "b": float(draw.random())}
        assert two.decide(f"t{number}", 100, row) == three.decide(f"t{number}", 100, {**row, "c": 1.0})
