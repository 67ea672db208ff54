"""How long the front has stayed as it is."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.search.patience import Patience


def counted(*trials: tuple[float | None, float | None, bool]) -> list[int]:
    """What is counted after each trial of (samples a second, error, whether it ran to its end)."""
    patience = Patience({"samples_per_s": "max", "error": "min"}, [0.03, 0.0])
    found = []
    for rate, error, whole in trials:
        patience.take({"samples_per_s": rate, "error": error}, whole=whole)
        found.append(patience.idle)
    return found


def test_a_new_member_of_the_front_begins_the_count_again() -> None:
    assert counted((10, 0.5, True), (9, 0.6, True), (20, 0.6, True), (5, 0.1, True)) == [0, 1, 0, 0]


def test_what_was_stopped_or_is_not_finite_or_no_faster_than_probes_tell_changes_nothing() -> None:
    assert counted((10, 0.5, True), (99, 0.1, False), (99, None, True), (10.2, 0.51, True)) == [0, 1, 2, 3]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 100), st.floats(0, 1), st.booleans()), max_size=20))
def test_the_count_grows_by_one_or_begins_again(trials: list[tuple[float, float, bool]]) -> None:
    found = [0, *counted(*trials)]
    assert all(b in (0, a + 1) for a, b in itertools.pairwise(found))
