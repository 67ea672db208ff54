"""What a training can add to the front of speed and quality, its speed being known before it is trained.

Both are in the sense that larger is better. With the speed known, what is uncertain has one dimension: the expected
gain in hypervolume (Emmerich et al. 2006) is a sum of expected improvements of the quality, one over each step of the
front, as wide as the speeds at which that step is what is to be improved on.
"""

from __future__ import annotations

import math

import numpy as np

from tuning.search.coordinates import Floats


def _log_improvement(z: float) -> float:
    """Returns the logarithm of the mean of what is over 0 of a normal value of mean z and deviation 1."""
    return math.log(math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi) + 0.5 * z * math.erfc(-z / math.sqrt(2.0)))


_OVER = np.linspace(-37.0, 8.0, 45 * 128 + 1)
"""Means that the table has, in deviations: from the furthest below 0 whose improvement a double holds, 128 to each."""
_LOG_IMPROVEMENT = np.array([_log_improvement(z) for z in _OVER.tolist()])
_LEAST_STD = 1e-200


def gains(front: Floats, worst: float, speeds: Floats, qualities: Floats) -> Floats:
    """Returns what points add to the area over `worst` and speed 0; `front` has shape (n, 2), the rest (m,).

    `front` holds any points, speed first.
    """
    widths, best = _steps(front, worst, speeds)
    found: Floats = (widths * np.clip(qualities[:, None] - best, 0.0, None)).sum(axis=1)
    return found


def expected_gains(front: Floats, worst: float, speeds: Floats, means: Floats, stds: Floats) -> Floats:
    """Returns the mean gain of each point, shape (m,), its quality being normal with `means` and `stds`."""
    widths, best = _steps(front, worst, speeds)
    found: Floats = (widths * expected_improvement(means[:, None] - best, stds[:, None])).sum(axis=1)
    return found


def expected_improvement(over: Floats, stds: Floats) -> Floats:
    """Returns the mean of what is over 0 of normal values (Jones et al. 1998, equation 15).

    `over` are their means less what is to be improved on; `stds` may be 0. The two broadcast against each other. The
    improvement of deviation 1 is read from a table of its logarithm, right to 1e-5 of itself: a mean far below has
    less to hope for than one less far below, not 0 like it.
    """
    stds = np.maximum(stds, _LEAST_STD)
    z = over / stds
    found: Floats = stds * np.maximum(z, np.exp(np.interp(z, _OVER, _LOG_IMPROVEMENT)))
    return found


def _steps(front: Floats, worst: float, speeds: Floats) -> tuple[Floats, Floats]:
    """Returns how much of 0 to each speed lies in each step of the front, (m, n + 1), and the steps' best, (n + 1,)."""
    order = np.argsort(-front[:, 0], kind="stable")
    bounds = np.append(front[order, 0], 0.0)  # falling speeds; above the first nobody has been
    best = np.maximum.accumulate(np.append(worst, np.maximum(front[order, 1], worst)))
    highs = np.append(np.inf, bounds[:-1])  # between bounds[i] and highs[i] the best quality is best[i]
    return np.clip(np.minimum(speeds[:, None], highs) - bounds, 0.0, None), best
