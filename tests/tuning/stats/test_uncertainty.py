"""Spread, prediction interval and gain, against closed forms and SciPy."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.stats import uncertainty

rates = st.floats(min_value=0.1, max_value=1e5)


def test_throughput_of_three_windows_by_hand():
    found = uncertainty.throughput([10.0, 11.0, 15.0])
    assert found is not None
    assert found.mean == 12.0, "the interval is the mean's, so the mean stands before it"
    assert found.half_width == pytest.approx(4.3027 * math.sqrt(7 / 3), rel=1e-4)


def test_one_window_has_no_spread_and_none_has_no_throughput():
    found = uncertainty.throughput([10.0])
    assert found is not None
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
    there = uncertainty.gain("a", "b", pairs)
    back = uncertainty.gain("b", "a", [(y, x) for x, y in pairs])
    assert there is not None
    assert back is not None
    assert there.ratio * back.ratio == pytest.approx(1.0)


def test_drift_of_the_machine_does_not_touch_a_paired_gain():
    found = uncertainty.gain("best", "before", [(20.0, 10.0), (10.0, 5.0), (4.0, 2.0)])
    assert found is not None
    assert (found.ratio, found.low, found.high, found.rounds) == (*[pytest.approx(2.0)] * 3, 3)


def test_a_gain_needs_a_pair_of_rates_above_0():
    assert uncertainty.gain("a", "b", []) is None
    assert uncertainty.gain("a", "b", [(0.0, 5.0)]) is None


def test_interval_by_a_spread_narrows_with_the_root_of_pairs():
    spread = uncertainty.Spread(0.02, 9)
    assert spread.half_width(1) == pytest.approx(2.262 * 0.02, rel=1e-3)
    assert spread.half_width(4) == pytest.approx(spread.half_width(1) / 2)
