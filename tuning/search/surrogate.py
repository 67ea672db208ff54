"""What quality to expect of configurations that nobody has trained, and how sure that is.

A Gaussian process with a Matern 5/2 kernel and a length for each dimension (Rasmussen and Williams 2006, equations
2.25, 2.26 and 4.17). Its lengths and noise are not fitted: 48 draws of a prior are weighted by how likely they make
what was seen (equation 2.30), which with ten trials is steadier than one fitted set, and the same for the same trials.
"""

from __future__ import annotations

import math

import numpy as np

from tuning.search.coordinates import Floats

DRAWS, KEPT = 48, 8
"""Lengths and noises that are drawn, and how many of the likeliest are kept."""
LENGTH, LENGTH_SPREAD = 0.7, 0.8
"""The prior of a length along an edge of the cube: its median, and the deviation of its logarithm."""
NOISE, NOISE_SPREAD = 0.15, 0.8
"""The same of the noise of one training, in deviations of what was seen."""
_JITTER = 1e-6


class Surrogate:
    """The process, given what was seen: `points` of shape (n, d) in the unit cube, `values` of shape (n,)."""

    def __init__(self, points: Floats, values: Floats, seed: int) -> None:
        if not len(points) == len(values) > 0:
            raise ValueError(f"{len(points)} points and {len(values)} values: expected as many, and one at least")
        self._mean, self._scale = float(np.mean(values)), float(np.std(values)) or 1.0
        self._draw = np.random.default_rng(seed)
        seen = (values - self._mean) / self._scale
        lengths = LENGTH * np.exp(LENGTH_SPREAD * self._draw.standard_normal((DRAWS, points.shape[1])))
        noises = NOISE * np.exp(NOISE_SPREAD * self._draw.standard_normal(DRAWS))
        models = []
        for length, noise in zip(lengths, noises, strict=True):
            covariance = _matern(points / length, points / length)
            covariance[np.diag_indices_from(covariance)] += noise**2 + _JITTER
            lower = np.linalg.cholesky(covariance)
            told = np.linalg.solve(lower, seen)
            likelihood = -0.5 * float(told @ told) - float(np.log(np.diag(lower)).sum())
            models.append((likelihood, length, lower, told))
        models = sorted(models, key=lambda model: -model[0])[:KEPT]
        shares = np.exp([model[0] - models[0][0] for model in models])
        self._shares = shares / shares.sum()
        self._models = [(length, points / length, lower, told) for _, length, lower, told in models]

    def samples(self, points: Floats, count: int) -> Floats:
        """Returns joint draws of the quality itself, without the noise of a training, at points (m, d): (count, m).

        As many of each draw of the lengths as it is likely.
        """
        each = np.floor(self._shares * count).astype(int)
        each[0] += count - each.sum()
        found = []
        for (length, seen, lower, told), number in zip(self._models, each, strict=True):
            if not number:
                continue
            scaled = points / length
            between = np.linalg.solve(lower, _matern(seen, scaled))
            covariance = _matern(scaled, scaled) - between.T @ between
            covariance[np.diag_indices_from(covariance)] += _JITTER
            root = np.linalg.cholesky(covariance)
            normal = self._draw.standard_normal((number, len(points)))
            found.append(between.T @ told + normal @ root.T)
        return self._mean + self._scale * np.concatenate(found)


def _matern(one: Floats, other: Floats) -> Floats:
    squares = (one**2).sum(axis=1)[:, None] + (other**2).sum(axis=1)[None, :] - 2.0 * one @ other.T
    distance = math.sqrt(5.0) * np.sqrt(np.maximum(squares, 0.0))
    found: Floats = (1.0 + distance + distance**2 / 3.0) * np.exp(-distance)
    return found
