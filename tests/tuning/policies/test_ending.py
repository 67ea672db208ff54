"""When a search ends, and what it says of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.policies.ending import LITTLE, Ending
from tuning.policies.patience import Patience


def ending(trials: int = 100, deadline: float | None = None, slots: int = 1, patience: int | None = 3) -> Ending:
    """A search of samples/s alone whose first trial is the front, and two behind it changed nothing."""
    own = Ending(trials, deadline, slots, Patience({"samples_per_s": "max"}, [0.0]), patience)
    for rate in (9.0, 8.0, 8.0):
        own.ended({"samples_per_s": rate}, whole=True)
    return own


def test_trials_and_time_are_spent_and_stay_so() -> None:
    own = ending(trials=10)
    assert not own.is_spent(8, 1, 0.0)
    assert own.is_spent(8, 2, 0.0)
    assert own.reason == "all 10 trials were proposed"
    assert own.is_spent(0, 0, 0.0)


def test_a_trial_that_would_end_after_the_deadline_does_not_begin_but_every_slot_has_had_one() -> None:
    own = ending(deadline=100.0, slots=2)
    for seconds in (10.0, 30.0, 20.0):
        own.took(seconds)
    assert not own.is_spent(2, 0, 90.0)
    assert not own.is_spent(1, 0, 91.0)
    assert own.is_spent(2, 0, 91.0)
    assert own.reason == "the search's share of search.max_time was spent"


def test_an_idle_search_goes_on_while_something_is_expected_of_what_is_left() -> None:
    own = ending()
    assert not own.is_idle(None, 10, 0.0), "two in a row"
    own.ended({"samples_per_s": 8.0}, whole=True)
    assert not own.is_idle((0.001, 5e-5), 10, 0.0)
    assert own.reason == ""
    assert own.is_idle((0.0001, 5e-5), 10, 0.0)
    assert own.reason == (
        "the last 3 trials left the front as it was (search.patience=3), and the rest of the search is expected to add "
        "0.9% to it at most"
    )
    assert own.is_spent(10, 0, 0.0)


def test_where_no_gain_is_known_the_patience_decides_and_without_it_nothing_does() -> None:
    own = ending(patience=2)
    assert own.is_idle(None, 10, 0.0)
    assert own.reason == "the last 2 trials left the front as it was (search.patience=2)"
    assert not ending(patience=None).is_idle((0.0, 0.0), 10, 0.0)


@given(st.integers(0, 99), st.floats(0, 300), st.integers(1, 4), st.floats(0, 0.01), st.floats(0, 0.001))
def test_what_is_left_is_bounded_by_the_trials_and_by_the_time(
    proposed: int, now: float, slots: int, gain_frac: float, gain_frac_per_s: float
) -> None:
    rest = min((100 - proposed) * gain_frac, slots * max(0.0, 200.0 - now) * gain_frac_per_s)
    if rest == pytest.approx(LITTLE):
        return
    own = ending(deadline=200.0, slots=slots, patience=2)
    assert own.is_idle((gain_frac, gain_frac_per_s), proposed, now) is (rest < LITTLE)
    assert bool(own.reason) is (rest < LITTLE)
