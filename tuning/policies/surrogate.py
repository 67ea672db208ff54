"""What quality to expect of a configuration that nobody has trained, and how sure that is.

A Gaussian process with a Matern 5/2 kernel and a length for each dimension (Rasmussen and Williams 2006, equations
2.25, 2.26 and 4.17). Its lengths and noise are not fitted: 48 draws of a prior are weighted by how likely they make
what was seen (equation 2.30), which with ten trials is steadier than one fitted set, and the same for the same trials.
"""

from __future__ import annotations

import math

import numpy as np

from tuning.policies.coordinates import Floats

DRAWS, KEPT = 48, 8
LENGTH, LENGTH_SPREAD = 0.7, 0.8
"""The prior of a length along an edge of the cube: its median, and the deviation of its logarithm."""
NOISE, NOISE_SPREAD = 0.15, 0.8
"""The same of the noise of one training, in deviations of what was seen."""
_JITTER = 1e-8


class Surrogate:
    """The process, given what was seen: `points` of shape (n, d), `values` (n,), `stds` (n,) known errors of each."""

    def __init__(self, points: Floats, values: Floats, stds: Floats, seed: int) -> None:
        if not len(points) == len(values) == len(stds) > 0:
            raise ValueError(f"{len(points)} points, {len(values)} values, {len(stds)} deviations: as many, and one")
        self._mean, self._scale = float(np.mean(values)), float(np.std(values)) or 1.0
        seen, known = (values - self._mean) / self._scale, (stds / self._scale) ** 2
        draw = np.random.default_rng(seed)
        lengths = LENGTH * np.exp(LENGTH_SPREAD * draw.standard_normal((DRAWS, points.shape[1])))
        noises = NOISE * np.exp(NOISE_SPREAD * draw.standard_normal(DRAWS))
        models = []
        for length, noise in zip(lengths, noises, strict=True):
            covariance = _matern(points / length, points / length)
            covariance[np.diag_indices_from(covariance)] += noise**2 + known + _JITTER
            lower = np.linalg.cholesky(covariance)
            weights = np.linalg.solve(lower.T, np.linalg.solve(lower, seen))
            likelihood = -0.5 * float(seen @ weights) - float(np.log(np.diag(lower)).sum())
            models.append((likelihood, length, lower, weights))
        models.sort(key=lambda model: -model[0])
        del models[KEPT:]
        self._models = [(length, points / length, np.linalg.inv(lower), w) for _, length, lower, w in models]
        shares = np.exp([model[0] - models[0][0] for model in models])
        self._shares = shares / shares.sum()

    def at(self, points: Floats) -> tuple[Floats, Floats]:
        """Returns mean and standard deviation of the quality itself, without its noise, at points of shape (m, d)."""
        means, variances = [], []
        for length, seen, inverse, weights in self._models:
            between = _matern(points / length, seen)
            means.append(between @ weights)
            variances.append(np.maximum(1.0 - ((inverse @ between.T) ** 2).sum(axis=0), _JITTER))
        mean = self._shares @ np.array(means)
        square = self._shares @ (np.array(variances) + np.array(means) ** 2)
        return self._mean + self._scale * mean, self._scale * np.sqrt(np.maximum(square - mean**2, _JITTER))

    def alike(self, one: Floats, other: Floats) -> Floats:
        """Returns how alike points are, 0 to 1, shape (len(one), len(other)), by the likeliest draw."""
        length = self._models[0][0]
        return _matern(one / length, other / length)


def _matern(one: Floats, other: Floats) -> Floats:
    squares = (one**2).sum(axis=1)[:, None] + (other**2).sum(axis=1)[None, :] - 2.0 * one @ other.T
    distance = math.sqrt(5.0) * np.sqrt(np.maximum(squares, 0.0))
    found: Floats = (1.0 + distance + distance**2 / 3.0) * np.exp(-distance)
    return found
