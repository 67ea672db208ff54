"""What a training can add to the front of speed and quality, its speed being known before it is trained.

Both are in the sense that larger is better. With the speed known, what is uncertain has one dimension: the expected
gain in hypervolume (Emmerich et al. 2006) is an integral over the quality alone.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from tuning.policies.coordinates import Floats

_NORMAL = NormalDist()
_POINTS = 16
_QUANTILES = np.array([_NORMAL.inv_cdf((n + 0.5) / _POINTS) for n in range(_POINTS)])


def gains(front: Floats, worst: float, speeds: Floats, qualities: Floats) -> Floats:
    """Returns what points add to the area over `worst` and speed 0; `front` has shape (n, 2), the rest (m,).

    `front` holds any points, speed first; the rest broadcast against each other.
    """
    order = np.argsort(-front[:, 0], kind="stable")
    bounds = np.append(front[order, 0], 0.0)  # falling speeds; above the first nobody has been
    best = np.maximum.accumulate(np.append(worst, np.maximum(front[order, 1], worst)))
    highs = np.append(np.inf, bounds[:-1])  # between bounds[i] and highs[i] the best quality is best[i]
    speeds, qualities = speeds[..., None], qualities[..., None]
    width = np.clip(np.minimum(speeds, highs) - bounds, 0.0, None)
    found: Floats = (width * np.clip(qualities - best, 0.0, None)).sum(axis=-1)
    return found


def expected_gains(front: Floats, worst: float, speeds: Floats, means: Floats, stds: Floats) -> Floats:
    """Returns the mean gain of each point, shape (m,), its quality being normal with `means` and `stds`."""
    qualities = means[:, None] + stds[:, None] * _QUANTILES
    found: Floats = gains(front, worst, speeds[:, None], qualities).mean(axis=1)
    return found


def expected_improvement(over: Floats, stds: Floats) -> Floats:
    """Returns the mean of what is over 0 of normal values, shape (m,) (Jones et al. 1998, equation 15).

    `over` are their means less what is to be improved on.
    """
    z = (over / stds).tolist()
    found: Floats = over * np.array([_NORMAL.cdf(x) for x in z]) + stds * np.array([_NORMAL.pdf(x) for x in z])
    return found
