"""Pareto geometry on small arrays: ranks, fronts, hypervolume, knee, and an order that spreads.

Arrays are of shape (points, objectives), every objective to be minimised; `signed` makes such rows. A row with a value
that is not finite is worse than every finite row: it has the last rank and is never on the front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Mode = Literal["min", "max"]
Floats = NDArray[np.float64]


def signed(values: Mapping[str, float | None], objectives: Mapping[str, Mode]) -> Floats:
    """Returns the values in the order of `objectives`, those to maximise negated; None becomes NaN.

    Raises ValueError that names a missing objective and the values there are.
    """
    missing = [name for name in objectives if name not in values]
    if missing:
        raise ValueError(f"objective {missing[0]} is missing; there are {', '.join(values) or 'no values'}")
    row = [np.nan if (v := values[name]) is None else float(v) for name in objectives]
    return np.array(row) * [1.0 if mode == "min" else -1.0 for mode in objectives.values()]


def non_dominated_ranks(points: Floats, tolerances: Sequence[float] | None = None) -> NDArray[np.int64]:
    """Returns each row's rank, shape (points,): 0 for the front, 1 for the front of the others, and so on.

    `tolerances`, one an objective, makes two values equal whose difference is at most that share of the larger
    magnitude. At most one may be above 0: with two, points can dominate each other in a circle. O(points^2).
    """
    points = _checked(points)
    equal = np.zeros(points.shape[1]) if tolerances is None else np.asarray(tolerances, dtype=np.float64)
    if equal.shape != (points.shape[1],) or (equal < 0).any() or (equal > 0).sum() > 1:
        raise ValueError(f"tolerances {equal.tolist()}: expected {points.shape[1]}, none below 0, at most one above")
    ranks = np.full(len(points), -1, dtype=np.int64)
    finite = np.isfinite(points).all(axis=1)
    dominated_by = _dominance(points[finite], equal)
    above = dominated_by.sum(axis=1)  # how many of the rows without a rank dominate each
    found = np.full(len(above), -1, dtype=np.int64)
    rank = 0
    while (found < 0).any():
        peers = (found < 0) & (above == 0)
        found[peers] = rank
        above -= dominated_by[:, peers].sum(axis=1)
        rank += 1
    ranks[finite] = found
    ranks[~finite] = max(rank, 1)
    return ranks


def front(points: Floats) -> NDArray[np.intp]:
    """Returns the indices of the rows that no row dominates, ascending; equal rows are all in."""
    return np.flatnonzero(non_dominated_ranks(points) == 0)


def hypervolume_2d(points: Floats, reference: Sequence[float]) -> float:
    """Returns the area between two-objective points and a reference point that is worse than all of interest.

    Points not better than the reference in both objectives add nothing. O(n log n).
    """
    points = _checked(points)
    if points.shape[1] != 2:
        raise ValueError(f"hypervolume_2d takes 2 objectives, got {points.shape[1]}")
    worst_x, worst_y = (float(r) for r in reference)
    inside = points[np.isfinite(points).all(axis=1) & (points < np.array([worst_x, worst_y])).all(axis=1)]
    area, lowest_y = 0.0, worst_y
    for x, y in inside[np.lexsort((inside[:, 1], inside[:, 0]))]:
        if y < lowest_y:
            area += (worst_x - float(x)) * (lowest_y - float(y))
            lowest_y = float(y)
    return area


def knee(points: Floats) -> int:
    """Returns the index of the front's knee: the point farthest below the line that joins the front's extremes.

    Both objectives are scaled to 0..1 over the front. Of fewer than three front points it is the first; so is the
    first of equals, and an extreme where the front bulges away from the ideal point throughout.
    """
    points = _checked(points)
    if points.shape[1] != 2:
        raise ValueError(f"knee takes 2 objectives, got {points.shape[1]}")
    indices = front(points)
    if not len(indices):
        raise ValueError(f"knee needs a point whose values are all finite, got {len(points)} points without one")
    if len(indices) < 3:
        return int(indices[0])
    # Scaled, the extremes are (0, 1) and (1, 0), so the distance below their line is (1 - x - y) / sqrt(2).
    below = 1.0 - _scaled(points[indices]).sum(axis=1)
    return int(indices[int(np.argmax(np.round(below, 12)))])


def spread_order(points: Floats) -> NDArray[np.intp]:
    """Returns the indices in an order whose every beginning covers the points well; finite rows only.

    Begins with the point nearest to the ideal (least sum of scaled objectives), then always takes the one farthest from
    all taken: the epsilon-net of Schmucker et al. 2021, "Multi-objective Asynchronous Successive Halving", section 4.
    Ties go to the lower index. O(points^2).
    """
    points = _checked(points)
    if not np.isfinite(points).all():
        raise ValueError("spread_order takes finite rows only")
    if not len(points):
        return np.zeros(0, dtype=np.intp)
    scaled = _scaled(points)
    order = [int(np.argmin(np.round(scaled.sum(axis=1), 12)))]
    nearest = np.linalg.norm(scaled - scaled[order[0]], axis=1)
    for _ in range(len(points) - 1):
        nearest[order] = -1.0
        order.append(int(np.argmax(np.round(nearest, 12))))
        nearest = np.minimum(nearest, np.linalg.norm(scaled - scaled[order[-1]], axis=1))
    return np.array(order, dtype=np.intp)


def _dominance(points: Floats, equal: Floats) -> NDArray[np.bool_]:
    """Whether row i is dominated by row j: j is no worse in every objective and better in one; shape (rows, rows)."""
    ours, theirs = points[:, None, :], points[None, :, :]
    same = np.abs(ours - theirs) <= equal * np.maximum(np.abs(ours), np.abs(theirs))
    better = (theirs < ours) & ~same
    no_worse = (theirs <= ours) | same
    dominated_by: NDArray[np.bool_] = np.all(no_worse, axis=2) & np.any(better, axis=2)
    return dominated_by


def _scaled(points: Floats) -> Floats:
    low = points.min(axis=0)
    span = points.max(axis=0) - low
    scaled: Floats = (points - low) / np.where(span > 0, span, 1.0)
    return scaled


def _checked(points: Floats) -> Floats:
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2:
        raise ValueError(f"expected shape (points, objectives), got {points.shape}")
    return points
