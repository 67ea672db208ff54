"""Spread, prediction interval and gain, against closed forms and SciPy."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.stats import uncertainty
from tuning.stats.uncertainty import Pair

rates = st.floats(min_value=0.1, max_value=1e5)


def test_throughput_of_three_windows_by_hand():
    found = uncertainty.throughput([10.0, 11.0, 15.0])
    assert found.mean == 12.0, "the interval is the mean's, so the mean stands before it"
    assert found.half_width == pytest.approx(4.3027 * math.sqrt(7 / 3), rel=1e-4)


def test_one_window_has_no_spread_and_none_has_no_throughput():
    found = uncertainty.throughput([10.0])
    assert found.half_width is None
    assert uncertainty.throughput([]) is None


REACH = 12.7062 * math.sqrt(2) * math.sqrt(1.5)


@pytest.mark.parametrize(
    ("values", "more", "mean", "ends", "method"),
    [
        ({1: 1.0, 2: 3.0}, {}, 2.0, (2 - REACH, 2 + REACH), "from 2 seeds"),
        ({7: 0.9}, {"proportion_of": 100}, 0.9, (0.8256, 0.9448), "100 validation samples"),  # Wilson's
        ({0: 78.05}, {"proportion_of": 256}, 78.05, None, ""),  # in percent it is no share
        ({7: 4.2}, {}, 4.2, None, ""),
        ({1: 0.99, 2: 0.90}, {"most": 1.0}, 0.945, (0.0, 1.0), ""),
        ({1: 99.0, 2: 90.0}, {"most": 1.0}, 94.5, (94.5 - 4.5 * REACH, 94.5 + 4.5 * REACH), ""),
    ],
)
def test_interval_of_a_quality(values, more, mean, ends, method):
    found = uncertainty.quality(values, **more)
    assert found.mean == pytest.approx(mean)
    assert (found.low, found.high) == ((None, None) if ends is None else pytest.approx(ends, rel=1e-4))
    assert method in found.method


@settings(max_examples=30)
@given(st.lists(st.tuples(rates, rates), min_size=1, max_size=8))
def test_a_gain_turned_round_is_its_inverse(pairs):
    there = uncertainty.gain("a", "b", [Pair(*pair) for pair in pairs])
    back = uncertainty.gain("b", "a", [Pair(y, x) for x, y in pairs])
    assert there.ratio * back.ratio == pytest.approx(1.0)


def test_drift_of_the_machine_does_not_touch_a_paired_gain():
    found = uncertainty.gain("best", "before", [Pair(20.0, 10.0), Pair(10.0, 5.0), Pair(4.0, 2.0)])
    assert (found.ratio, found.low, found.high, found.rounds) == (*[pytest.approx(2.0)] * 3, 3)


def test_a_gain_needs_a_pair_of_rates_above_0():
    assert uncertainty.gain("a", "b", []) is None
    assert uncertainty.gain("a", "b", [Pair(0.0, 5.0)]) is None


@settings(max_examples=30)
@given(st.lists(st.tuples(rates, rates), min_size=2, max_size=8), st.floats(0.1, 100.0))
def test_pairs_count_by_their_seconds(pairs, weight_s):
    alike = uncertainty.gain("a", "b", [Pair(*pair) for pair in pairs])
    weighted = uncertainty.gain("a", "b", [Pair(*pair, weight_s) for pair in pairs])
    assert (weighted.ratio, weighted.low) == pytest.approx((alike.ratio, alike.low))
    logs = [math.log(x / y) for x, y in pairs]
    assert math.log(alike.high / alike.ratio) == pytest.approx(min(50.0, uncertainty.mean_half_width(logs)), abs=1e-9)


def test_three_short_windows_do_not_overrule_minutes_of_training():
    rounds = [Pair(41.8, 44.9), Pair(37.4, 32.5), Pair(44.7, 45.0)]  # samples/s of nli, of a second each
    trainings = [Pair(52.0, 43.4, 15.0), Pair(52.1, 45.3, 15.0), Pair(53.3, 43.9, 15.0)]
    found = uncertainty.gain("system knobs", "plain defaults", rounds, trainings)
    assert (found.rounds, found.trainings) == (3, 3)
    assert 1.1 < found.low < found.ratio < 1.2 < found.high


def test_interval_by_a_spread_narrows_with_the_root_of_pairs():
    spread = uncertainty.Spread(0.02, 9)
    assert spread.half_width(1) == pytest.approx(2.262 * 0.02, rel=1e-3)
    assert spread.half_width(4) == pytest.approx(spread.half_width(1) / 2)
