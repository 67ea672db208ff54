"""How soon a training is as good as today's: read from curves, and never made up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.journal.events import ConfirmedRecord
from tuning.journal.records import Record
from tuning.report.time_to_quality import Reached, curves, seconds_to, time_to_quality

STEPS = st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 1)), min_size=1, max_size=8)


def climbing(steps):
    """Returns a curve that only gets better, from its steps in time and quality."""
    found, at_s, value = [], 0.0, 0.0
    for seconds, more in steps:
        at_s, value = at_s + seconds, value + more
        found.append((at_s, value))
    return tuple(found)


def mirrored(curve):
    return tuple((at_s, -value) for at_s, value in curve)


@given(STEPS, st.floats(0, 8), st.floats(0, 8))
def test_a_better_quality_is_reached_no_sooner(steps, one, other):
    curve = climbing(steps)
    sooner, later = (seconds_to(curve, target, "max") for target in sorted((one, other)))
    assert (sooner is None) == (min(one, other) > curve[-1][1])
    if later is not None:
        assert curve[0][0] <= sooner <= later + 1e-9
        assert later <= curve[-1][0] + 1e-9


@given(STEPS, st.floats(0, 8))
def test_less_is_better_mirrors_more_is_better(steps, target):
    curve = climbing(steps)
    assert seconds_to(curve, target, "max") == seconds_to(mirrored(curve), -target, "min")


@given(STEPS, st.floats(1.0, 5))
def test_what_learns_faster_reaches_it_in_as_much_less(steps, faster):
    curve = climbing(steps)
    quick = tuple((at_s / faster, value) for at_s, value in curve)
    found = time_to_quality({1: quick, 2: quick}, {2: curve, 3: curve}, "max")
    assert list(found.own.by_seed) == [2], "only seeds that both have"
    assert found.reference.median_s == pytest.approx(faster * found.own.median_s)
    assert (found.own.missed, found.reference.missed) == (0, 0)


def test_between_two_evaluations_the_quality_changes_evenly():
    curve = ((1.0, 0.2), (3.0, 0.6), (4.0, 0.5))
    assert seconds_to(curve, 0.4, "max") == pytest.approx(2.0)
    assert seconds_to(curve, 0.1, "max") == 1.0, "nothing is known of what was before"
    assert seconds_to(curve, 0.61, "max") is None


@pytest.mark.parametrize(
    ("by_seed", "median", "missed"),
    [
        ({1: 2.0, 2: 4.0, 3: 3.0}, 3.0, 0),
        ({1: 2.0, 2: None, 3: 3.0}, 3.0, 1),
        ({1: 2.0, 2: None}, None, 1),
        ({1: None}, None, 1),
    ],
)
def test_a_seed_that_did_not_reach_it_counts_as_later_than_any(by_seed, median, missed):
    assert (Reached(by_seed).median_s, Reached(by_seed).missed) == (median, missed)


@pytest.mark.parametrize(
    "junk", [None, "text", 3, [], [None], [[]], [[1.0]], [["a", 1, {"accuracy": 0.5}]], [[1.0, 1, {}]]]
)
def test_a_curve_that_is_damaged_or_lacking_is_none(junk):
    own = ConfirmedRecord.read(Record(0, "", "confirmed", {"seed": 1, "curve": junk}))
    assert curves([own], "accuracy") == {}
    assert time_to_quality(curves([own], "accuracy"), {1: ((1.0, 0.5),)}, "max") is None
