"""The Pareto front of small arrays.

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
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2:
        raise ValueError(f"expected shape (points, objectives), got {points.shape}")
    finite = np.asarray(np.isfinite(points).all(axis=1))
    rows = np.where(finite[:, None], points, np.inf)
    no_worse: NDArray[np.bool_] = np.all(rows[None, :, :] <= rows[:, None, :], axis=2)
    better: NDArray[np.bool_] = np.any(rows[None, :, :] < rows[:, None, :], axis=2)
    return np.flatnonzero(finite & ~(no_worse & better).any(axis=1))
