"""Maps, and small instances of the travelling salesman problem drawn from them.

A map is a large set of places: the cities of the world (GeoNames, CC BY 3.0), or a problem of TSPLIB. An instance is a
few places from around one of them, the centre, so that it is as clustered as its part of the map. Training and
validation have centres and instances of their own, though not places of their own: neighbourhoods overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.data.errors import DataError
from trainables.data.tsp_instances import Instance, Splits, euclidean, places, solved
from trainables.data.tsplib import Problem

CITIES_FILE = Path(__file__).parent / "samples" / "world_cities_latlng.npz"
AROUND = 150
"""Places around the centre from which an instance is drawn; all of a map that has fewer."""
VAL_SHARE = 0.2
"""Of the centres of a map, or of the instances of files that do not tell training from test."""

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


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
        """Returns minus the cosine of the angle between centre and place, seen from the middle of the earth."""
        found: Floats = -self._unit[centres] @ self._unit.T
        return found

    def cut(self, centre: int, places: Indices) -> tuple[Floats, Floats]:
        """Returns points in degrees of latitude, x to the east, and their Euclidean distances."""
        latitude, longitude = self._degrees[centre]
        east = (self._degrees[places, 1] - longitude + 180.0) % 360.0 - 180.0  # across the date line, too
        points = np.stack([east * math.cos(math.radians(latitude)), self._degrees[places, 0]], axis=1)
        return points, euclidean(points)


class Chart:
    """A problem of TSPLIB as a map; distances are in the problem's own metric."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def __str__(self) -> str:
        return self._problem.name

    def __len__(self) -> int:
        return len(self._problem)

    def remoteness(self, centres: Indices) -> Floats:
        """Returns the distances."""
        return self._problem.distances(centres, np.arange(len(self)))

    def cut(self, centre: int, places: Indices) -> tuple[Floats, Floats]:
        """Returns the problem's points and distances."""
        return self._problem.points[places], self._problem.distances(places, places)


Map = Cities | Chart
"""Places of which some are to be visited."""


def drawn(maps: Sequence[Map], nodes: int, sizes: tuple[int, int], seed: int) -> Splits:
    """Returns `sizes` instances of `nodes` places each for training and for validation, as many from each map.

    They depend on the maps, the numbers given and `seed` alone. Each map has more than `nodes` places.
    No instance is in both: of maps so small that draws repeat, validation has fewer. Raises DataError where it has
    none.
    """
    generator = np.random.default_rng(seed)
    found = Splits([], [])
    for number, place in enumerate(maps):
        shuffled = generator.permutation(len(place))
        cut = len(place) - max(1, int(VAL_SHARE * len(place)))
        for part, centres in enumerate((shuffled[:cut], shuffled[cut:])):
            share = len(range(number, sizes[part], len(maps)))
            found[part].extend(_around(place, np.resize(centres, share), nodes, generator))
    known = {places(instance.points) for instance in found.train}
    val = [instance for instance in found.val if places(instance.points) not in known]
    if not val:
        raise DataError(
            f"{', '.join(map(str, maps))}: found too few nodes to draw {nodes} that are no instance of training; "
            "allowed: more nodes, or a smaller workload.nodes or workload.train_samples"
        )
    return Splits(found.train, val)


def uniform(nodes: int, sizes: tuple[int, int], seed: int) -> Splits:
    """Returns `sizes` instances of points spread evenly on the unit square, on which most papers report."""
    generator = np.random.default_rng(seed)
    parts = [[generator.random((nodes, 2)) for _ in range(size)] for size in sizes]
    return Splits(*([solved(points, euclidean(points)) for points in part] for part in parts))


def _around(place: Map, centres: Indices, nodes: int, generator: np.random.Generator) -> Iterator[Instance]:
    """Yields an instance around each centre."""
    for start in range(0, len(centres), 64):
        some = centres[start : start + 64]
        remote = torch.from_numpy(place.remoteness(some))
        # torch's is six times as fast as numpy's argpartition here; sorted, since ties may come in any order.
        near = remote.topk(min(AROUND, len(place)), dim=1, largest=False).indices.sort(dim=1).values.numpy()
        for centre, row in zip(some, near, strict=True):
            yield solved(*place.cut(int(centre), generator.choice(row, nodes, replace=False)))
