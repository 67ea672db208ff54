"""Small instances of the travelling salesman problem with their shortest tours: of real cities, or of random points.

A few cities are drawn from around one of them, the centre, so that they are as clustered as their part of the world
(GeoNames, CC BY 3.0). Training and validation have centres of their own, though not cities of their own: neighbourhoods
overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import fast_tsp
import numpy as np
import torch
from numpy.typing import NDArray

from trainables.data.errors import OTHER_LAYOUTS, wrong

CITIES_FILE = Path(__file__).parent / "samples" / "world_cities_latlng.npz"
UNIFORM = "uniform"
MOST_EXACT = 20
"""Nodes up to which fast-tsp is exact (Held and Karp 1962): 0.7 ms for 15 nodes, 3.5 ms for 17, 57 ms for 20."""
MOST_WEIGHT = 65_535
"""Largest distance that fast-tsp takes, as a whole number."""
AROUND = 150
"""Cities around the centre from which an instance is drawn."""
VAL_SHARE = 0.2
"""The spread of the centres."""

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


class Instance(NamedTuple):
    """Points on a plane, (nodes, 2), distances, (nodes, nodes), and the shortest tour: nodes in their order, (nodes,).

    Distances are symmetric, 0 on the diagonal, and need not be those of the points: a road is longer than a line.
    """

    points: Floats
    distances: Floats
    order: Indices


class Splits(NamedTuple):
    """Instances for training and for validation."""

    train: list[Instance]
    val: list[Instance]


class Cities:
    """45,065 cities of the world; around a centre the earth is taken for flat."""

    def __init__(self) -> None:
        with np.load(CITIES_FILE, allow_pickle=False) as file:
            self._degrees: Floats = file["ll"].astype(np.float64)
        latitude, longitude = np.radians(self._degrees).T
        flat = np.cos(latitude)
        self._unit: Floats = np.stack([flat * np.cos(longitude), flat * np.sin(longitude), np.sin(latitude)], axis=1)

    def __len__(self) -> int:
        return len(self._degrees)

    def remoteness(self, centres: Indices) -> Floats:
        """Returns minus the cosine of the angle between centre and city, seen from the middle of the earth."""
        found: Floats = -self._unit[centres] @ self._unit.T
        return found

    def cut(self, centre: int, cities: Indices) -> Floats:
        """Returns the cities as points in degrees of latitude, x to the east, (cities, 2)."""
        latitude, longitude = self._degrees[centre]
        east = (self._degrees[cities, 1] - longitude + 180.0) % 360.0 - 180.0  # across the date line, too
        return np.stack([east * math.cos(math.radians(latitude)), self._degrees[cities, 0]], axis=1)


def splits(data: str | None, nodes: int, sizes: tuple[int, int], seed: int) -> Splits:
    """Returns `sizes` instances of `nodes` nodes for training and for validation, the same for the same arguments.

    `data` is None for cities, or "uniform" for points spread evenly on a square. Raises DataError for anything else.
    """
    if data is None:
        return of_cities(nodes, sizes, seed)
    if data == UNIFORM:  # the unit square, on which most papers report
        generator = np.random.default_rng(seed)
        parts = [[generator.random((nodes, 2)) for _ in range(size)] for size in sizes]
        return Splits(*([solved(points, euclidean(points)) for points in part] for part in parts))
    allowed = f"null (real cities) or {UNIFORM} (points on a square)"
    raise wrong(f"workload.data={data}", "no set of tours", allowed, remedy=OTHER_LAYOUTS)


def of_cities(nodes: int, sizes: tuple[int, int], seed: int) -> Splits:
    """Returns `sizes` instances of `nodes` cities each; they depend on the arguments alone."""
    generator = np.random.default_rng(seed)
    cities = Cities()
    centres = np.split(generator.permutation(len(cities)), [len(cities) - int(VAL_SHARE * len(cities))])
    parts = zip(centres, sizes, strict=True)
    return Splits(*(list(_around(cities, np.resize(part, size), nodes, generator)) for part, size in parts))


def solved(points: Floats, distances: Floats) -> Instance:
    """Returns the instance with its shortest tour, from node 0; at most `MOST_EXACT` nodes.

    Distances are rounded to 1 part in 65,535 of the largest.
    """
    weights = np.rint(distances * (MOST_WEIGHT / max(float(distances.max()), 1e-9)))
    order = fast_tsp.find_tour(weights.astype(np.int64).tolist())
    return Instance(points, distances, np.roll(np.array(order, dtype=np.int64), -order.index(0)))


def scaled(instance: Instance) -> Instance:
    """Returns the instance in a square of side 1 around 0.

    Distances may have another unit than the points: they are scaled so that the longest is as long as that of the
    points. Euclidean ones are then those of the scaled points.
    """
    low, high = instance.points.min(axis=0), instance.points.max(axis=0)
    points = (instance.points - (low + high) / 2.0) / max((high - low).max(), 1e-9)
    longest = euclidean(points).max() / max(instance.distances.max(), 1e-9)
    return Instance(points, instance.distances * longest, instance.order)


def euclidean(points: Floats) -> Floats:
    """Returns the distances between points (nodes, 2), (nodes, nodes)."""
    found: Floats = np.hypot(*(points[:, None] - points[None]).transpose(2, 0, 1))
    return found


def _around(cities: Cities, centres: Indices, nodes: int, generator: np.random.Generator) -> Iterator[Instance]:
    """Yields an instance around each centre."""
    for start in range(0, len(centres), 64):
        some = centres[start : start + 64]
        remote = torch.from_numpy(cities.remoteness(some))
        # torch's is six times as fast as numpy's argpartition here; sorted, since ties may come in any order.
        near = remote.topk(AROUND, dim=1, largest=False).indices.sort(dim=1).values.numpy()
        for centre, row in zip(some, near, strict=True):
            points = cities.cut(int(centre), generator.choice(row, nodes, replace=False))
            yield solved(points, euclidean(points))
