"""Travelling salesman instances with their shortest tours, and how one is found."""

from __future__ import annotations

from typing import NamedTuple

import fast_tsp
import numpy as np
from numpy.typing import NDArray

MOST_EXACT = 20
"""Nodes up to which fast-tsp is exact (Held and Karp 1962): 0.7 ms for 15 nodes, 3.5 ms for 17, 57 ms for 20."""
MOST_WEIGHT = 65_535
"""Largest distance that fast-tsp takes, as a whole number."""


class Instance(NamedTuple):
    """Points on a plane, (nodes, 2), distances, (nodes, nodes), and the shortest tour: nodes in their order, (nodes,).

    Distances are symmetric, 0 on the diagonal, and need not be those of the points: a road is longer than a line.
    """

    points: NDArray[np.float64]
    distances: NDArray[np.float64]
    order: NDArray[np.int64]


class Splits(NamedTuple):
    """Instances for training and for validation."""

    train: list[Instance]
    val: list[Instance]


def places(points: NDArray[np.float64]) -> bytes:
    """Returns what sets of the same points (nodes, 2) have in common, whatever their order."""
    return points[np.lexsort(points.T)].tobytes()


def solved(points: NDArray[np.float64], distances: NDArray[np.float64]) -> Instance:
    """Returns the instance with its shortest tour, from node 0; at most `MOST_EXACT` nodes.

    Distances that are no whole numbers, or too large, are rounded to 1 part in 65,535 of the largest.
    """
    most = float(distances.max())
    as_they_are = most <= MOST_WEIGHT and bool((distances == np.floor(distances)).all())
    weights = distances if as_they_are else np.rint(distances * (MOST_WEIGHT / most))
    order = fast_tsp.find_tour(weights.astype(np.int64).tolist())
    return Instance(points, distances, np.roll(np.array(order, dtype=np.int64), -order.index(0)))


def scaled(instance: Instance) -> Instance:
    """Returns the instance in a square of side 1 around 0.

    A metric of its own (GEO, ATT) has another unit than its points have: distances are scaled so that the
    longest is as long as that of the points. Euclidean ones are then those of the scaled points.
    """
    low, high = instance.points.min(axis=0), instance.points.max(axis=0)
    points = (instance.points - (low + high) / 2.0) / max((high - low).max(), 1e-9)
    longest = euclidean(points).max() / max(instance.distances.max(), 1e-9)
    return Instance(points, instance.distances * longest, instance.order)


def euclidean(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the distances between points (nodes, 2), (nodes, nodes)."""
    found: NDArray[np.float64] = np.hypot(*(points[:, None] - points[None]).transpose(2, 0, 1))
    return found
