"""Instances: drawn from maps, solved exactly, and split without overlap."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainables.data import tsp_maps
from trainables.data.errors import DataError
from trainables.data.tsp_instances import Instance, euclidean, scaled, solved
from trainables.data.tsp_maps import Chart, Cities, drawn
from trainables.data.tsp_sources import read_splits
from trainables.data.tsplib import read_problem


@pytest.fixture(scope="module")
def cities() -> Cities:
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


def problem_file(path: Path, count: int, seed: int = 0) -> Path:
    """Returns the path of a TSPLIB problem of so many points."""
    rows = np.random.default_rng(seed).integers(0, 1000, (count, 2))
    path.write_text(
        f"NAME: {path.stem}\nTYPE: TSP\nDIMENSION: {count}\nEDGE_WEIGHT_TYPE: ATT\nNODE_COORD_SECTION\n"
        + "".join(f"{i} {x} {y}\n" for i, (x, y) in enumerate(rows, 1))
    )
    return path


@settings(max_examples=15, deadline=None)
@given(nodes=st.integers(3, 7), seed=st.integers(0, 999), whole=st.booleans())
def test_a_solved_tour_is_the_shortest_of_all(nodes: int, seed: int, whole: bool) -> None:
    points = np.random.default_rng(seed).random((nodes, 2)) * 100
    distances = euclidean(points)
    distances = np.rint(distances) if whole else distances
    found = solved(points, distances)
    assert sorted(found.order) == list(range(nodes))
    assert found.order[0] == 0
    assert length(found) == pytest.approx(brute_force(distances), rel=0 if whole else 1e-4)


def test_coincident_points_are_no_trouble() -> None:
    instance = solved(np.ones((5, 2)), np.zeros((5, 5)))
    assert sorted(instance.order) == list(range(5))
    assert np.isfinite(scaled(instance).points).all()
    assert np.isfinite(scaled(instance).distances).all()


def test_scaling_fills_the_square_and_keeps_the_tour_and_its_gaps() -> None:
    points = np.random.default_rng(0).random((9, 2)) * [400, 100] + 7
    instance = solved(points, euclidean(points))
    small = scaled(instance)
    assert small.points.min(axis=0).tolist() == pytest.approx([-0.5, -np.ptp(small.points[:, 1]) / 2])
    assert np.ptp(small.points[:, 0]) == pytest.approx(1.0)
    assert np.allclose(small.distances, euclidean(small.points))
    metric = scaled(instance._replace(distances=instance.distances * 3.7))  # another unit, the same problem
    assert np.allclose(metric.distances, small.distances)


def test_the_sample_holds_the_cities_stated(cities: Cities) -> None:
    assert len(cities) == 45_065
    centre = 1000
    near = cities.remoteness(np.array([centre]))[0].argsort()[:50]
    points, distances = cities.cut(centre, near)
    assert near[0] == centre
    assert distances[0].max() < 2.0  # degrees: its 50 nearest cities are around it, projected or not
    assert np.allclose(distances, euclidean(points))


def test_cities_on_both_sides_of_the_date_line_are_near(cities: Cities) -> None:
    longitude = cities._degrees[:, 1]
    east, west = int(longitude.argmax()), int(longitude.argmin())
    points, _ = cities.cut(east, np.array([east, west]))
    assert np.ptp(points[:, 0]) < 3.0


def test_draws_depend_on_the_seed_alone_and_prefixes_agree(cities: Cities) -> None:
    first, again, other = (drawn([cities], 6, (70, 5), seed) for seed in (0, 0, 1))
    assert same(first.train, again.train)
    assert same(first.val, again.val)
    assert not same(first.train, other.train)
    assert [len(first.train), len(first.val)] == [70, 5]
    assert all(len(instance.order) == 6 for instance in first.train)


def test_no_centre_serves_both_splits(tmp_path: Path) -> None:
    seen: list[int] = []

    class Recording(Chart):
        def remoteness(self, centres: NDArray[np.int64]) -> NDArray[np.float64]:
            seen.extend(centres.tolist())
            return super().remoteness(centres)

    place = Recording(read_problem(problem_file(tmp_path / "a.tsp", 40)))
    drawn([place], 5, (300, 300), 0)  # far more than there are centres: they are used again and again
    train, val = set(seen[:300]), set(seen[300:])
    assert train | val == set(range(40))
    assert not train & val
    assert len(val) == 8


def test_instances_are_drawn_from_around_their_centre(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tsp_maps, "AROUND", 12)
    place = Chart(read_problem(problem_file(tmp_path / "a.tsp", 300)))
    widths = [instance.distances.max() for instance in drawn([place], 8, (20, 4), 0).train]
    everywhere = read_problem(tmp_path / "a.tsp").distances(np.arange(300), np.arange(300)).max()
    assert max(widths) < 0.4 * everywhere


def test_uniform_instances_are_on_the_unit_square() -> None:
    splits = read_splits("uniform", 5, (50, 50), 0)
    points = np.concatenate([instance.points for part in splits for instance in part])
    assert points.shape == (500, 2)
    assert 0.0 <= points.min() < 0.05 < 0.95 < points.max() <= 1.0


def test_a_folder_of_problems_is_drawn_from_in_its_own_metric(tmp_path: Path) -> None:
    for seed in range(3):
        problem_file(tmp_path / f"p{seed}.tsp", 30, seed)
    splits = read_splits(str(tmp_path), 7, (10, 4), 0)
    assert [len(part) for part in splits] == [10, 4]
    for instance in splits.train:
        expected = np.ceil(euclidean(instance.points) / np.sqrt(10))  # ATT
        assert np.array_equal(instance.distances, expected)
    one = read_splits(str(tmp_path / "p1.tsp"), 7, (10, 4), 0)
    assert [len(part) for part in one] == [10, 4]


def test_whole_problems_come_with_their_tours(tmp_path: Path) -> None:
    for number, count in enumerate((25, 30, 9, 12, 8, 10)):
        path = problem_file(tmp_path / f"p{number}.tsp", count, number)
        if count > 20:
            tour = " ".join(str(i) for i in range(count, 0, -1))
            path.with_name(f"p{number}.opt.tour").write_text(f"TYPE: TOUR\nTOUR_SECTION\n{tour} -1\nEOF\n")
    splits = read_splits(str(tmp_path), None, (100, 100), 0)
    found = {len(instance.order): instance for part in splits for instance in part}
    assert sorted(found) == [8, 9, 10, 12, 25, 30]
    assert found[25].order.tolist() == list(range(24, -1, -1))
    assert length(found[8]) == brute_force(found[8].distances)
    assert [len(part) for part in splits] == [5, 1]
    assert [len(part) for part in read_splits(str(tmp_path), None, (2, 9), 0)] == [2, 1]


@pytest.mark.parametrize("copies", [1, 2])
def test_no_instance_of_a_small_problem_is_in_both_splits(tmp_path: Path, copies: int) -> None:
    for number in range(copies):
        problem_file(tmp_path / f"p{number}.tsp", 8)
    splits = read_splits(str(tmp_path), 5, (30, 20), 0)  # of 56 that there are
    train, val = ({frozenset(map(tuple, i.points.tolist())) for i in part} for part in splits)
    assert not train & val
    assert len(splits.train) == 30
    assert 0 < len(splits.val) <= 20


def test_a_problem_too_small_for_two_splits_is_refused(tmp_path: Path) -> None:
    path = str(problem_file(tmp_path / "six.tsp", 6))
    with pytest.raises(DataError, match=r"six: found too few nodes to draw 5 .* a smaller workload\.nodes"):
        read_splits(path, 5, (100, 5), 0)
    with pytest.raises(DataError, match=r"six\.tsp: DIMENSION: found 6 nodes; allowed: 7 or more to draw from"):
        read_splits(path, 6, (100, 5), 0)
    problem_file(tmp_path / "copy.tsp", 6)
    with pytest.raises(DataError, match=r"found too few instances, 1; allowed: 2 or more, some to train on"):
        read_splits(str(tmp_path), None, (100, 5), 0)


def test_says_what_a_source_lacks(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: found nothing; allowed: \.tsp, \.tsp\.gz, a folder of them"):
        read_splits(str(tmp_path / "nowhere"), 15, (1, 1), 0)
    (tmp_path / "tsp20_test_seed1234.pkl").write_bytes(b"")
    with pytest.raises(DataError, match=r"found tsp20_test_seed1234\.pkl; allowed: \.tsp"):
        read_splits(str(tmp_path), 15, (1, 1), 0)
    with pytest.raises(DataError, match=r"data=uniform: found nodes=null; allowed with it: a path of problems"):
        read_splits("uniform", None, (1, 1), 0)
    with pytest.raises(DataError, match=r"a\.tsp: found 25 nodes and no tour; allowed: a\.opt\.tour beside it"):
        read_splits(str(problem_file(tmp_path / "a.tsp", 25)), None, (1, 1), 0)
