"""What quality to expect of a configuration that nobody has trained, and how sure that is.

A Gaussian process with a Matern 5/2 kernel and a length for each dimension (Rasmussen and Williams 2006, equations
2.25, 2.26 and 4.17). Its lengths and noise are not fitted: 48 draws of a prior are weighted by how likely they make
what was seen (equation 2.30), which with ten trials is steadier than one fitted set, and the same for the same trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tuning.search.coordinates import Floats

DRAWS, KEPT = 48, 8
LENGTH, LENGTH_SPREAD = 0.7, 0.8
"""The prior of a length along an edge of the cube: its median, and the deviation of its logarithm."""
NOISE, NOISE_SPREAD = 0.15, 0.8
"""The same of the noise of one training, in deviations of what was seen."""
WIDER = 1.25
"""What nobody trained is less sure than a few draws of the lengths say: they do not know of other lengths.

Simulated, mean final hypervolume with 1 and 1.25: pointer 0.917 and 0.932 (30 seeds; one of them stayed at 0.685), the
same in headpose (0.961, 0.959).
"""
LEAST_SHARE = 0.02
"""Draws of the lengths that are less likely than this are left out of what is drawn of the process."""
_JITTER, _KNOWN_JITTER = 1e-8, 1e-6


class Drawn(NamedTuple):
    """One way in which the process may run: values at known points (n,), and what they leave of others.

    That is means and standard deviations of shape (m,). `share` is how likely this draw of the lengths is.
    """

    share: float
    known: Floats
    means: Floats
    stds: Floats


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

    def drawn(self, known: Floats, points: Floats, normals: Floats) -> Iterator[Drawn]:
        """Yields ways in which the process may run, without its noise, at `known` (n, d) points and others (m, d).

        There is one for each likely draw of the lengths and row of `normals` (k, n), which are standard normal.
        """
        for share, (length, seen, inverse, weights) in zip(self._shares, self._models, strict=True):
            if share < LEAST_SHARE:
                continue
            to_known, to_points = _matern(known / length, seen), _matern(points / length, seen)
            told_known, told_points = inverse @ to_known.T, inverse @ to_points.T
            left = _matern(known / length, known / length) - told_known.T @ told_known
            left[np.diag_indices_from(left)] += _KNOWN_JITTER
            lower = np.linalg.cholesky(left)
            shared = _matern(known / length, points / length) - told_known.T @ told_points
            cross = np.linalg.solve(lower, shared)
            variances = 1.0 - (told_points**2).sum(axis=0) - (cross**2).sum(axis=0)
            stds = WIDER * self._scale * np.sqrt(np.maximum(variances, _JITTER))
            for normal in normals:
                values = self._mean + self._scale * (to_known @ weights + lower @ normal)
                means = self._mean + self._scale * (to_points @ weights + cross.T @ normal)
                yield Drawn(float(share), values, means, stds)

    def alike(self, one: Floats, other: Floats) -> Floats:
        """Returns how alike points are, 0 to 1, shape (len(one), len(other)), by the likeliest draw."""
        length = self._models[0][0]
        return _matern(one / length, other / length)


def _matern(one: Floats, other: Floats) -> Floats:
    squares = (one**2).sum(axis=1)[:, None] + (other**2).sum(axis=1)[None, :] - 2.0 * one @ other.T
    distance = math.sqrt(5.0) * np.sqrt(np.maximum(squares, 0.0))
    found: Floats = (1.0 + distance + distance**2 / 3.0) * np.exp(-distance)
    return found
