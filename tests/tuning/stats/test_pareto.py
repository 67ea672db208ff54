"""Pareto geometry against closed forms and plain loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.stats import pareto
from tuning.stats.pareto import Floats, Pairs, front, hypervolume_2d, knee, non_dominated_ranks, signed, spread_order

small = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=14)


def array(rows: list[tuple[int, int]]) -> Floats:
    return np.array(rows, dtype=float).reshape(-1, 2)


def dominates(a: Floats, b: Floats) -> bool:
    return bool((a <= b).all() and (a < b).any())


def test_signed_negates_what_is_to_be_maximised() -> None:
    row = signed({"loss": 2.0, "accuracy": 0.5, "other": 9.0}, {"accuracy": "max", "loss": "min"})
    assert row.tolist() == [-0.5, 2.0]
    assert np.isnan(signed({"loss": None}, {"loss": "min"})).all()


def test_signed_names_what_is_missing_and_what_is_there() -> None:
    with pytest.raises(ValueError, match="objective accuracy is missing; there are loss, f1"):
        signed({"loss": 1.0, "f1": 2.0}, {"loss": "min", "accuracy": "max"})


@settings(max_examples=60, deadline=None)
@given(small)
def test_front_is_what_nothing_dominates(rows: list[tuple[int, int]]) -> None:
    points = array(rows)
    plain = [i for i, p in enumerate(points) if not any(dominates(q, p) for q in points)]
    assert front(points).tolist() == plain


@settings(max_examples=60, deadline=None)
@given(small)
def test_ranks_peel_front_after_front(rows: list[tuple[int, int]]) -> None:
    points = array(rows)
    ranks = non_dominated_ranks(points)
    for rank in range(1, int(ranks.max(initial=0)) + 1):
        rest = np.flatnonzero(ranks >= rank)
        assert set(np.flatnonzero(ranks == rank)) == set(rest[front(points[rest])])
    for a, b in itertools.product(range(len(points)), repeat=2):
        assert not dominates(points[a], points[b]) or ranks[a] < ranks[b]


def test_equal_rows_share_their_rank() -> None:
    assert non_dominated_ranks(np.array([[1.0, 1], [1, 1], [2, 2], [2, 2]])).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_last_and_never_on_the_front(bad: float) -> None:
    points = np.array([[0.0, bad], [1, 1], [2, 2]])
    assert non_dominated_ranks(points).tolist() == [2, 0, 1]
    assert front(np.array([[bad, 0.0]])).tolist() == []
    assert non_dominated_ranks(np.array([[bad, 0.0]])).tolist() == [1]


def test_within_the_tolerance_the_other_objective_decides() -> None:
    points = np.array([[-100.0, 0.1], [-102, 0.2], [-104, 0.3]])  # throughput (negated), error
    assert non_dominated_ranks(points).tolist() == [0, 0, 0]
    # 102 is within 3 % of both its neighbours: worse than the first, better than the last
    assert non_dominated_ranks(points, [0.03, 0.0]).tolist() == [0, 1, 2]
    assert non_dominated_ranks(points[[0, 2]], [0.03, 0.0]).tolist() == [0, 0]  # 4 % faster


def test_tolerances_are_checked() -> None:
    with pytest.raises(ValueError, match="at most one above"):
        non_dominated_ranks(np.zeros((2, 2)), [0.1, 0.1])
    with pytest.raises(ValueError, match="expected 2, none below 0"):
        non_dominated_ranks(np.zeros((2, 2)), [0.1])


@settings(max_examples=60, deadline=None)
@given(small)
def test_with_a_tolerance_there_is_still_a_front(rows: list[tuple[int, int]]) -> None:
    ranks = non_dominated_ranks(array(rows) + 10, [0.1, 0.0])
    assert not rows or (ranks == 0).any()


@pytest.mark.parametrize("n", [1, 2, 5, 40])
def test_hypervolume_of_a_staircase(n: int) -> None:
    stairs = np.array([[i, n - 1 - i] for i in range(n)], dtype=float)
    assert hypervolume_2d(stairs, (n, n)) == n * (n + 1) / 2


@settings(max_examples=60, deadline=None)
@given(small)
def test_hypervolume_counts_the_dominated_unit_cells(rows: list[tuple[int, int]]) -> None:
    cells = sum(any(x <= i and y <= j for x, y in rows) for i in range(5) for j in range(6))
    assert hypervolume_2d(array(rows), (5, 6)) == cells


def test_hypervolume_leaves_out_what_is_not_finite_or_beyond_the_reference() -> None:
    points = np.array([[np.nan, 0], [-np.inf, 0], [0, 3], [1, 1]])
    assert hypervolume_2d(points, (2, 3)) == 2.0
    assert hypervolume_2d(np.zeros((0, 2)), (1, 1)) == 0.0
    with pytest.raises(ValueError, match="takes 2 objectives, got 3"):
        hypervolume_2d(np.zeros((1, 3)), (1, 1))


def test_knee_is_farthest_below_the_line_between_the_extremes() -> None:
    points = np.array([[100.0, 0.0], [0, 9], [10, 2], [50, 1], [99, 99]])
    assert knee(points) == 2
    assert knee(points * [1e-6, 1e6] + 3) == 2  # whatever the units


def test_knee_of_few_points_is_the_first() -> None:
    assert knee(np.array([[5.0, 5], [1, 2], [2, 1]])) == 1
    assert knee(np.array([[0.0, 1], [0, 1]])) == 0
    assert knee(np.array([[3.0, 3], [3, 3], [3, 3]])) == 0
    with pytest.raises(ValueError, match="a point whose values are all finite, got 1 points without one"):
        knee(np.array([[np.nan, 1.0]]))


def test_knee_of_a_front_that_bulges_away_is_an_extreme() -> None:
    assert knee(np.array([[0.6, 0.9], [0.0, 1.0], [1.0, 0.0]])) == 1


@settings(max_examples=40, deadline=None)
@given(small)
def test_spread_order_is_a_permutation_that_takes_the_farthest_next(rows: list[tuple[int, int]]) -> None:
    points = array(rows)
    order = spread_order(points).tolist()
    assert sorted(order) == list(range(len(rows)))
    span = np.ptp(points, axis=0) if rows else np.ones(2)
    scaled = points / np.where(span > 0, span, 1)
    gaps = [min(np.linalg.norm(scaled[i] - scaled[j]) for j in order[:n]) for n, i in enumerate(order) if n]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(gaps))


def test_spread_order_begins_nearest_to_the_ideal() -> None:
    assert spread_order(np.array([[0.0, 10], [2, 2], [10, 0], [3, 3]])).tolist() == [1, 0, 2, 3]
    with pytest.raises(ValueError, match="finite rows only"):
        spread_order(np.array([[np.nan, 1.0]]))


def test_rows_have_two_dimensions() -> None:
    with pytest.raises(ValueError, match=r"expected shape \(points, objectives\), got \(3,\)"):
        front(np.zeros(3))


@pytest.mark.parametrize("tolerance", [0.0, 0.03, 0.25])
@pytest.mark.parametrize("seed", range(12))
def test_ranks_of_pairs_are_those_of_every_pair_compared(seed: int, tolerance: float) -> None:
    draw = np.random.default_rng(seed)
    points = draw.normal(scale=100, size=(int(draw.integers(1, 60)), 2))
    if seed % 3 == 1:  # ties in both, and values exactly a tolerance apart
        points = np.round(points / 25) * 25
    if seed % 3 == 2:
        points[:, 0] = -100.0 * (1 - tolerance) ** draw.integers(0, 6, size=len(points))
    plain = pareto._peeled_plainly(points, np.array([tolerance, 0.0]))
    assert non_dominated_ranks(points, (tolerance, 0.0)).tolist() == plain.tolist()
    turned = pareto._peeled_plainly(points[:, ::-1], np.array([0.0, tolerance]))
    assert non_dominated_ranks(points[:, ::-1], (0.0, tolerance)).tolist() == turned.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_pairs_that_come_one_at_a_time_and_come_again_rank_as_all_at_once(seed: int) -> None:
    draw, pairs, rows = np.random.default_rng(seed), Pairs(0.03), {}
    for _ in range(80):
        key = int(draw.integers(40))
        rows[key] = draw.integers(-20, 20, size=2).astype(float)
        pairs.put(key, *rows[key].tolist())
    ranks = non_dominated_ranks(np.array(list(rows.values())), (0.03, 0.0))
    assert pairs.ranks() == dict(zip(rows, ranks.tolist(), strict=True))
    assert len(pairs) == len(rows)


@pytest.mark.parametrize("seed", range(6))
def test_pairs_asked_after_each_row_rank_as_all_at_once(seed: int) -> None:
    draw, pairs, rows = np.random.default_rng(seed), Pairs(0.03 * (seed % 2)), {}
    for number in range(500):
        key = int(draw.integers(500)) if draw.random() < 0.01 else number
        rows[key] = np.array([-draw.random(), draw.integers(300) / 300 if seed % 3 else draw.random()])
        pairs.put(key, *rows[key].tolist())
        if number % 20 < 13:
            pairs.ranks()
        if number % 20 == 12:
            ranks = non_dominated_ranks(np.array(list(rows.values())), (0.03 * (seed % 2), 0.0))
            assert pairs.ranks() == dict(zip(rows, ranks.tolist(), strict=True))


def test_the_beginning_of_a_spread_order_is_that_of_the_whole() -> None:
    points = np.random.default_rng(0).random((30, 2))
    whole = spread_order(points)
    for place in (0, 1, 17, 29):
        assert spread_order(points, until=int(whole[place])).tolist() == whole[: place + 1].tolist()


def test_pairs_refuse_a_tolerance_under_which_all_is_equal() -> None:
    with pytest.raises(ValueError, match="at least 0 and below 1, got 1"):
        Pairs(1.0)
