"""Pareto geometry against closed forms and plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.stats.pareto import Floats, front

small = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=14)


def array(rows: list[tuple[int, int]]) -> Floats:
    return np.array(rows, dtype=float).reshape(-1, 2)


def dominates(a: Floats, b: Floats) -> bool:
    return bool((a <= b).all() and (a < b).any())


@settings(max_examples=60, deadline=None)
@given(small)
def test_front_is_what_nothing_dominates(rows: list[tuple[int, int]]) -> None:
    points = array(rows)
    plain = [i for i, p in enumerate(points) if not any(dominates(q, p) for q in points)]
    assert front(points).tolist() == plain


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_never_on_the_front_and_equal_rows_are_all(bad: float) -> None:
    assert front(np.array([[0.0, bad], [1, 1], [2, 2], [1, 1]])).tolist() == [1, 3]
    assert front(np.array([[bad, 0.0]])).tolist() == []


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 3)])
def test_a_row_has_two_objectives(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected shape \(points, 2\), got \(3,"):
        front(np.zeros(shape))
