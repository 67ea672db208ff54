"""When a search ends, and what it says of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.search.ending import LITTLE, Ending
from tuning.search.patience import Patience


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
    assert own.reason == "its share of search.max_time was spent after 2 of 100 trials; confirming takes the rest"


def test_an_idle_search_goes_on_while_something_is_expected_of_as_many_trials_again() -> None:
    own = ending()
    assert own.idle(None, 10, 0.0) == "", "two in a row"
    own.ended({"samples_per_s": 8.0}, whole=True)
    assert own.idle((0.004, 1.0), 10, 0.0) == ""
    assert own.idle((0.003, 1.0), 10, 0.0) == (
        "the last 3 trials left the front as it was (search.patience=3), and the next 3 are expected to add "
        "less than 1% of the area under it"
    )
    assert "the next 2 are" in own.idle((0.004, 1.0), 98, 0.0), "of 100 trials"
    timed = ending(deadline=100.0, patience=2)
    assert timed.idle((0.01, 0.001), 10, 89.0) == ""
    assert "and what the time left allows is expected to" in timed.idle((0.01, 0.001), 10, 91.0)
    assert not own.is_spent(10, 0, 0.0), "whether it ends is for the search to say"


def test_where_no_gain_is_known_the_patience_decides_and_without_it_nothing_does() -> None:
    own = ending(patience=2)
    assert own.idle(None, 10, 0.0) == "the last 2 trials left the front as it was (search.patience=2)"
    assert ending(patience=None).idle((0.0, 0.0), 10, 0.0) == ""


@given(st.integers(0, 99), st.floats(0, 300), st.integers(1, 4), st.floats(0, 0.01), st.floats(0, 0.001))
def test_what_is_ahead_is_bounded_by_the_trials_and_by_the_time(
    proposed: int, now: float, slots: int, gain_frac: float, gain_frac_per_s: float
) -> None:
    added = min(min(2, 100 - proposed) * gain_frac, slots * max(0.0, 200.0 - now) * gain_frac_per_s)
    if added == pytest.approx(LITTLE):
        return
    own = ending(deadline=200.0, slots=slots, patience=2)
    assert bool(own.idle((gain_frac, gain_frac_per_s), proposed, now)) is (added < LITTLE)
