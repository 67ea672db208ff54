"""The rule: gains over the reference, what it admits, and what fresh seeds make of an expectation."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.search.rule import Baseline, Expected, Rule, absolute, best_baseline

qualities = st.floats(-50, 50)
modes = st.sampled_from(["min", "max"])


@given(qualities, qualities, modes, st.none() | qualities)
def test_gain_is_positive_for_the_better_quality(
    value: float, reference: float, mode: str, least: float | None
) -> None:
    rule, floor = Rule("error", mode, at_least=least), reference if least is None else least
    assert abs(rule.gain(value, reference)) == abs(value - floor)
    assert (rule.gain(value, reference) > 0) == (value > floor if mode == "max" else value < floor)


@given(qualities, qualities, modes, st.floats(0, 5))
def test_rule_admits_losses_up_to_the_tolerance(value: float, reference: float, mode: str, tolerance: float) -> None:
    rule = Rule("error", mode, tolerance)
    loss = reference - value if mode == "max" else value - reference
    if abs(loss - tolerance) > 1e-8:
        assert rule.admits(rule.gain(value, reference)) == (loss < tolerance)
    assert rule.admits(-tolerance)


@pytest.mark.parametrize(("mode", "better", "worse"), [("max", 0.7, 0.5), ("min", 0.5, 0.7)])
def test_rule_beats_only_baselines_that_are_worse(mode: str, better: float, worse: float) -> None:
    rule = Rule("accuracy", mode, baseline=Baseline("mean", 0.6))
    assert [rule.beats_baseline(value) for value in (better, 0.6, worse)] == [True, False, False]
    assert Rule("accuracy", mode).beats_baseline(worse)


def test_baseline_is_the_best_known_of_the_objective() -> None:
    known = {"mean": {"mae": 9.0}, "last": {"mae": 7.0, "rmse": 1.0}, "other": {"rmse": 0.5}}
    assert best_baseline(known, "mae", "min") == Baseline("last", 7.0)
    assert best_baseline(known, "mae", "max") == Baseline("mean", 9.0)
    assert best_baseline(known, "accuracy", "max") is best_baseline({}, "mae", "min") is None


@given(qualities, st.floats(0, 100))
def test_percentage_is_a_share_of_the_reference(reference: float, share: float) -> None:
    assert absolute(f"{share}%", reference) == pytest.approx(abs(reference) * share / 100)
    assert absolute(share, reference) == share
    assert absolute("2%", None) == 0.0


expectations = st.builds(Expected, st.floats(-5, 5), st.floats(0.01, 5))
differences = st.lists(st.floats(-5, 5), min_size=1, max_size=9)


@given(expectations, differences, st.floats(0.01, 5))
def test_expected_is_the_precision_weighted_mean(before: Expected, fresh: list[float], spread: float) -> None:
    prior, own = before.error**-2, len(fresh) / spread**2
    after = before.given(fresh, spread)
    mean = (prior * before.gain + own * statistics.fmean(fresh)) / (prior + own)
    assert after.gain == pytest.approx(mean, abs=1e-6)
    assert after.error == pytest.approx((prior + own) ** -0.5, rel=1e-6)
    assert before.given([], spread) is before


@given(st.floats(-5, 5), st.floats(0, 5), st.lists(st.floats(-5, 5), min_size=2))
def test_chance_falls_as_more_is_asked(gain: float, error: float, asked: list[float]) -> None:
    one = Expected(gain, error)
    chances = [one.chance(least) for least in sorted(asked)]
    assert all(0 <= chance <= 1 for chance in chances)
    assert all(a >= b for a, b in pairwise(chances))
    assert one.chance(gain) == (1.0 if error == 0 else 0.5)
    assert Expected(gain + 1, error).chance(0.0) >= one.chance(0.0)
