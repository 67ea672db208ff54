"""Pareto geometry on small arrays: front and knee.

Arrays are of shape (points, objectives), every objective to be minimised. A row with a value that is not finite is
never on the front.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Mode = Literal["min", "max"]
Floats = NDArray[np.float64]


def front(points: Floats) -> NDArray[np.intp]:
    """Returns the indices of the rows that no row dominates, ascending; equal rows are all in. O(points^2)."""
    points = _checked(points)
    finite = np.asarray(np.isfinite(points).all(axis=1))
    rows = np.where(finite[:, None], points, np.inf)
    no_worse: NDArray[np.bool_] = np.all(rows[None, :, :] <= rows[:, None, :], axis=2)
    better: NDArray[np.bool_] = np.any(rows[None, :, :] < rows[:, None, :], axis=2)
    return np.flatnonzero(finite & ~(no_worse & better).any(axis=1))


def knee(points: Floats) -> int:
    """Returns the index of the front's knee: the point farthest below the line that joins the front's extremes.

    Both objectives are scaled to 0..1 over the front. Of fewer than three front points it is the first; so is the
    first of equals, and an extreme where the front bulges away from the ideal point throughout.
    """
    points = _checked(points, objectives=2)
    indices = front(points)
    if not len(indices):
        raise ValueError(f"knee needs a point whose values are all finite, got {len(points)} points without one")
    if len(indices) < 3:
        return int(indices[0])
    on_front = points[indices]
    low, span = on_front.min(axis=0), np.ptp(on_front, axis=0)
    # Scaled, the extremes are (0, 1) and (1, 0), so the distance below their line is (1 - x - y) / sqrt(2).
    below = 1.0 - ((on_front - low) / np.where(span > 0, span, 1.0)).sum(axis=1)
    return int(indices[int(np.argmax(np.round(below, 12)))])


def _checked(points: Floats, objectives: int | None = None) -> Floats:
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2 or (objectives is not None and points.shape[1] != objectives):
        raise ValueError(f"expected shape (points, {objectives or 'objectives'}), got {points.shape}")
    return points
