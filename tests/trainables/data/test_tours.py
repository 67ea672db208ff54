"""Instances: drawn from the cities or a square, solved exactly, and split without overlap of centres."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainables.data import tours
from trainables.data.errors import DataError
from trainables.data.tours import Cities, Instance, euclidean, of_cities, scaled, solved, splits


@pytest.fixture(scope="module")
def cities():
    return Cities()


def length(instance: Instance) -> float:
    order = instance.order
    return float(instance.distances[order, np.roll(order, -1)].sum())


def brute_force(distances: NDArray[np.float64]) -> float:
    """Returns the length of the shortest tour by trying all."""
    rest = range(1, len(distances))
    return min(float(distances[[0, *p], [*p, 0]].sum()) for p in itertools.permutations(rest) if p[0] <= p[-1])


def same(one: list[Instance], two: list[Instance]) -> bool:
    return len(one) == len(two) and all(
        np.array_equal(a, b) for x, y in zip(one, two, strict=True) for a, b in zip(x, y, strict=True)
    )


@settings(max_examples=15)
@given(nodes=st.integers(3, 7), seed=st.integers(0, 999))
def test_a_solved_tour_is_the_shortest_of_all(nodes, seed):
    points = np.random.default_rng(seed).random((nodes, 2)) * 100
    found = solved(points, euclidean(points))
    assert sorted(found.order) == list(range(nodes))
    assert found.order[0] == 0
    assert length(found) == pytest.approx(brute_force(found.distances), rel=1e-4)


def test_coincident_points_are_no_trouble():
    instance = solved(np.ones((5, 2)), np.zeros((5, 5)))
    assert sorted(instance.order) == list(range(5))
    assert np.isfinite(scaled(instance).points).all()
    assert np.isfinite(scaled(instance).distances).all()


def test_scaling_fills_the_square_and_keeps_the_tour():
    points = np.random.default_rng(0).random((9, 2)) * [400, 100] + 7
    instance = solved(points, euclidean(points))
    small = scaled(instance)
    assert small.points.min(axis=0).tolist() == pytest.approx([-0.5, -np.ptp(small.points[:, 1]) / 2])
    assert np.ptp(small.points[:, 0]) == pytest.approx(1.0)
    assert np.allclose(small.distances, euclidean(small.points))
    metric = scaled(instance._replace(distances=instance.distances * 3.7))  # another unit, the same problem
    assert np.allclose(metric.distances, small.distances)


def test_the_sample_holds_the_cities_stated(cities):
    assert len(cities) == 45_065
    centre = 1000
    near = cities.remoteness(np.array([centre]))[0].argsort()[:50]
    points = cities.cut(centre, near)
    assert near[0] == centre
    assert euclidean(points)[0].max() < 2.0  # degrees: its 50 nearest cities are around it, projected or not


def test_cities_on_both_sides_of_the_date_line_are_near(cities):
    longitude = cities._degrees[:, 1]
    points = cities.cut(int(longitude.argmax()), np.array([longitude.argmax(), longitude.argmin()]))
    assert np.ptp(points[:, 0]) < 3.0


def test_draws_depend_on_the_seed_alone():
    first, again, other = (of_cities(6, (70, 5), seed) for seed in (0, 0, 1))
    assert same(first.train, again.train)
    assert same(first.val, again.val)
    assert not same(first.train, other.train)
    assert [len(first.train), len(first.val)] == [70, 5]
    assert all(len(instance.order) == 6 for instance in first.train)


def test_no_centre_serves_both_splits(monkeypatch):
    seen: list[int] = []

    class Few(Cities):
        """The first 40 cities."""

        def __init__(self) -> None:
            super().__init__()
            self._degrees, self._unit = self._degrees[:40], self._unit[:40]

        def remoteness(self, centres: NDArray[np.int64]) -> NDArray[np.float64]:
            seen.extend(centres.tolist())
            return super().remoteness(centres)

    monkeypatch.setattr(tours, "Cities", Few)
    monkeypatch.setattr(tours, "AROUND", 8)
    found = of_cities(5, (300, 300), 0)  # far more than there are centres: they are used again and again
    train, val = set(seen[:300]), set(seen[300:])
    assert train | val == set(range(40))
    assert not train & val
    assert len(val) == 8
    everywhere = euclidean(Few().cut(0, np.arange(40))).max()
    assert np.median([instance.distances.max() for instance in found.train]) < everywhere / 2


def test_uniform_instances_are_on_the_unit_square():
    points = np.concatenate([instance.points for part in splits("uniform", 5, (50, 50), 0) for instance in part])
    assert points.shape == (500, 2)
    assert 0.0 <= points.min() < 0.05 < 0.95 < points.max() <= 1.0


def test_files_are_refused_by_name_with_the_page_that_reads_them():
    with pytest.raises(DataError, match=r"workload\.data=a280\.tsp: .*allowed: null .*uniform.*; try: docs/data\.md"):
        splits("a280.tsp", 15, (1, 1), 0)
