"""The Pareto front of two objectives.

Both objectives are to be minimised. A row with a value that is not finite is never on the front.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Mode = Literal["min", "max"]
Floats = NDArray[np.float64]


def front(points: Floats) -> NDArray[np.intp]:
    """Returns the indices of the rows, shape (points, 2), that no row dominates, ascending; equal rows are all in."""
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2 or points.shape[1] != 2:
        raise ValueError(f"expected shape (points, 2), got {points.shape}")
    finite = np.flatnonzero(np.isfinite(points).all(axis=1))
    rows, which = np.unique(points[finite], axis=0, return_inverse=True)  # sorted by the first, then the second
    before = np.minimum.accumulate(np.concatenate([[np.inf], rows[:, 1]]))[:-1]
    return finite[(rows[:, 1] < before)[which.ravel()]]  # shape (rows, 1) in NumPy 2.0
