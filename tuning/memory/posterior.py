"""How far predictions of memory are off, learned from what ran: a grid posterior, and from it P(out of memory).

A prediction has two parts: `base`, what the smallest micro-batch takes, and `batch`, what more samples add to it. What
a configuration really needs is

    need = exp(mu) * (base + (1 + kappa) * batch) * exp(sigma * e),    e standard normal

so that mu is an error of everything, kappa one of what grows with the batch (workspaces that no operator shows), and
the residual need - predicted is affine in the micro-batch. mu, kappa and sigma live on a grid; every observation
multiplies its weights by a likelihood, and P(OOM) is an average over them. Groups (couplings of knobs) that are
predicted in the same way are off in similar ways: they share a population, as in any hierarchical model.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Predicted:
    """Predicted bytes: `base_bytes` at the smallest micro-batch and `batch_bytes` on top of it, both at least 0."""

    base_bytes: float
    batch_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Returns the prediction as it stands, before anything was learned."""
        return self.base_bytes + self.batch_bytes

    def reaching(self, floor_bytes: float) -> Predicted:
        """Returns the prediction with its first part raised so far that the whole is at least `floor_bytes`."""
        return Predicted(self.base_bytes + max(0.0, floor_bytes - self.total_bytes), self.batch_bytes)


@dataclass(frozen=True)
class Prior:
    """What is believed of a way of predicting before any trial: centre and scale of mu and kappa, typical sigma.

    The tails are those of Student's t with 3 degrees of freedom: a prediction that is off by ten scales is learned from
    two observations and not explained away.
    """

    mu: float
    mu_scale: float
    kappa: float
    kappa_scale: float
    sigma: float


PRIORS = {
    # Every kernel visible: 0.42 % mean, 2.8 % max over 22 cases with nothing measured.
    "traced": Prior(0.004, 0.010, 0.004, 0.010, 0.010),
    # Recurrent and convolutional kernels keep workspaces that are not seen: 6 to 50 % too low, more with the batch.
    "workspaces unseen": Prior(0.010, 0.030, 0.200, 0.300, 0.015),
    # Kernels of another device: -30 to +86 %.
    "fallback": Prior(0.000, 0.200, 0.050, 0.200, 0.030),
    # Through measured peaks; beyond the largest the slope can only grow, as the peak is the largest of several lines:
    # of nli by 3 to 9 % from 2 and 8 samples to 32.
    "measured": Prior(0.000, 0.010, 0.010, 0.020, 0.010),
    "extrapolated": Prior(0.000, 0.010, 0.060, 0.100, 0.015),
    # A power law between two footprints of other widths.
    "interpolated": Prior(0.000, 0.030, 0.000, 0.040, 0.015),
    # With checkpointing, what is needed without: no less than its own need.
    "bound": Prior(0.000, 0.010, 0.060, 0.100, 0.015),
    # Nothing is predicted: a line through zero and one peak that a trial reported.
    "none": Prior(0.000, 0.020, -0.100, 0.200, 0.020),
}
"""By how the prediction was made; figures from predictions compared with profiled steps."""

_TAIL = 3.0
_TINY = 1e-12
_Z = np.sinh(np.linspace(-4.8, 4.8, 61))  # in scales: steps of 0.16 at the centre, +-60 at the ends
_KAPPA_Z = np.sinh(np.linspace(-3.2, 3.2, 29))
_SIGMAS = np.exp(np.linspace(math.log(0.002), math.log(0.30), 13))
_SIGMA_LOG_SD = 0.7
_ALIKE = 0.7
"""How far one group lies from its population, as a share of the prior's scale."""
_LEAST_KAPPA, _LARGEST_MU = -0.9, 1.5
_KEPT_TAILS = 64
"""Of 180 KiB each."""


class Posterior:
    """What was learned of the groups of one prior. Nothing observed makes an observation before it undone."""

    def __init__(self, prior: Prior) -> None:
        self.prior = prior
        self._mu = np.clip(prior.mu + prior.mu_scale * _Z, -_LARGEST_MU, _LARGEST_MU)
        self._kappa = np.maximum(prior.kappa + prior.kappa_scale * _KAPPA_Z, _LEAST_KAPPA)
        self._sigma = _SIGMAS
        log_sigma = (np.log(self._sigma) - math.log(prior.sigma)) / _SIGMA_LOG_SD
        self._log_prior_sigma = -0.5 * log_sigma**2
        self._mu_mass = _mass(self._mu, prior.mu, prior.mu_scale)
        self._kappa_mass = _mass(self._kappa, prior.kappa, prior.kappa_scale)
        self._mu_kernel = _kernel(self._mu, _ALIKE * prior.mu_scale)
        self._kappa_kernel = _kernel(self._kappa, _ALIKE * prior.kappa_scale)
        self._above: dict[tuple[Hashable, Predicted], float] = {}
        self._log_likelihood: dict[Hashable, Array] = {}
        self._told: dict[Hashable, Array] = {}  # what a group says of the population, logarithms, shape (mu, kappa)
        self._weights: dict[Hashable, tuple[Array, Array]] = {}  # and without the last axis
        self._tails: dict[tuple[Predicted, float], Array] = {}
        self._p_oom: dict[tuple[Hashable, Predicted, float], float] = {}

    def observe_peak(self, group: Hashable, predicted: Predicted, peak_bytes: float) -> None:
        """Learns the exact need of a configuration; sizes of 0 teach nothing."""
        if peak_bytes > 0 and predicted.total_bytes > 0:
            z = self._z(predicted, peak_bytes)
            self._add(group, -0.5 * np.minimum(z * z, 1e6) - np.log(self._sigma))

    def observe_above(self, group: Hashable, predicted: Predicted, lower_bytes: float) -> None:
        """Learns that the need is more than `lower_bytes`: of an OOM the cap, of a short run its peak.

        Of several bounds of one prediction the largest counts, once: ten probes of it say no more than one.
        """
        if lower_bytes <= 0 or predicted.total_bytes <= 0:
            return
        before = self._above.get((group, predicted))
        if before is None or lower_bytes > before:
            more = self._log_above(predicted, lower_bytes)
            self._add(group, more if before is None else more - self._log_above(predicted, before))
            self._above[group, predicted] = lower_bytes

    def observe_below(self, group: Hashable, predicted: Predicted, upper_bytes: float) -> None:
        """Learns that the need is at most `upper_bytes`: it fitted, and nobody measured its peak."""
        if upper_bytes > 0 and predicted.total_bytes > 0:
            self._add(group, np.log(_upper_tail(-self._z(predicted, upper_bytes)) + _TINY))

    def p_oom(self, group: Hashable, predicted: Predicted, cap_bytes: float) -> float:
        """Returns the probability, 0 to 1, that the need is above the cap.

        For one state of knowledge it never falls with either part of the prediction and never rises with the cap.
        """
        if cap_bytes <= 0 or predicted.total_bytes <= 0:
            return float(cap_bytes < predicted.total_bytes)
        asked = group, predicted, cap_bytes
        if asked not in self._p_oom:
            tail = self._tail(predicted, cap_bytes)
            self._p_oom[asked] = float(min(1.0, max(0.0, float(np.sum(self._posterior(group)[0] * tail)))))
        return self._p_oom[asked]

    def expected_bytes(self, group: Hashable, predicted: Predicted) -> float:
        """Returns the need in the middle: the mean of its logarithm."""
        if predicted.total_bytes <= 0:
            return 0.0
        return math.exp(float(np.sum(self._posterior(group)[1] * self._location(predicted))))

    # -- the grid ------------------------------------------------------------------------------------------------------

    def _location(self, predicted: Predicted) -> Array:
        """Returns the logarithm of the need by cell, shape (mu, kappa)."""
        grown = np.log(predicted.base_bytes + (1.0 + self._kappa) * predicted.batch_bytes)
        return np.asarray(self._mu[:, None] + grown[None, :])

    def _z(self, predicted: Predicted, size_bytes: float) -> Array:
        """Returns where a size lies in the distribution of the need, in sigmas, shape (mu, kappa, sigma)."""
        return np.asarray((math.log(size_bytes) - self._location(predicted))[:, :, None] / self._sigma)

    def _log_above(self, predicted: Predicted, lower_bytes: float) -> Array:
        """Returns the logarithm of P(need > lower_bytes) by cell, shape (mu, kappa, sigma)."""
        return np.asarray(np.log(_upper_tail(self._z(predicted, lower_bytes)) + _TINY))

    def _add(self, group: Hashable, log_likelihood: Array) -> None:
        held = self._log_likelihood.get(group)
        total = log_likelihood if held is None else held + log_likelihood
        self._log_likelihood[group] = total
        own = _marginal(total + self._log_prior_sigma)
        self._told[group] = np.log(self._mu_kernel @ own @ self._kappa_kernel.T + 1e-300)
        self._weights.clear()  # of every group: they share a population
        self._p_oom.clear()

    def _tail(self, predicted: Predicted, cap_bytes: float) -> Array:
        """Returns P(need > cap) by cell; kept, since a search asks the same of the same cap thousands of times."""
        asked = predicted, cap_bytes
        if asked not in self._tails:
            if len(self._tails) >= _KEPT_TAILS:
                del self._tails[next(iter(self._tails))]
            self._tails[asked] = _upper_tail(self._z(predicted, cap_bytes))
        return self._tails[asked]

    def _posterior(self, group: Hashable) -> tuple[Array, Array]:
        """Returns the weight of every cell, shape (mu, kappa, sigma), summing to 1, and without the last axis."""
        if group not in self._weights:
            log_prior = np.log(self._prior_of(group) + 1e-300)[:, :, None] + self._log_prior_sigma
            weights = _normalised(log_prior + self._log_likelihood.get(group, 0.0))
            self._weights[group] = weights, weights.sum(axis=2)
        return self._weights[group]

    def _prior_of(self, group: Hashable) -> Array:
        """Returns what the other groups leave to believe of this one, shape (mu, kappa)."""
        log_population = np.log(self._mu_mass[:, None] * self._kappa_mass[None, :] + 1e-300)
        for other, told in self._told.items():
            if other != group:
                log_population = log_population + told
        population = _normalised(log_population)
        return np.asarray(self._mu_kernel.T @ population @ self._kappa_kernel)


def _mass(values: Array, centre: float, scale: float) -> Array:
    """Returns the prior's mass by cell: density of Student's t times the width of the cell, summing to 1."""
    mass = np.gradient(values) * (1.0 + ((values - centre) / scale) ** 2 / _TAIL) ** (-(_TAIL + 1.0) / 2.0)
    return np.asarray(mass / mass.sum())


def _kernel(values: Array, scale: float) -> Array:
    """Returns P(group's value | population's value), shape (population, group); rows sum to 1."""
    near = (1.0 + ((values[None, :] - values[:, None]) / scale) ** 2 / _TAIL) ** (-(_TAIL + 1.0) / 2.0)
    near = near * np.gradient(values)[None, :]
    return np.asarray(near / near.sum(axis=1, keepdims=True))


def _marginal(log_weights: Array) -> Array:
    """Returns weights without the last axis, their largest 1."""
    summed = np.exp(log_weights - log_weights.max()).sum(axis=2)
    return np.asarray(summed / summed.max())


def _normalised(log_weights: Array) -> Array:
    weights = np.exp(log_weights - log_weights.max())
    return np.asarray(weights / weights.sum())


def _upper_tail(z: Any) -> Array:
    """Returns P(e > z) of a standard normal, never rising with z (Abramowitz and Stegun 26.2.17, error < 7.5e-8)."""
    x = np.minimum(np.abs(z), 8.0)
    t = 1.0 / (1.0 + 0.2316419 * x)
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail = np.exp(-0.5 * x * x) * series * 0.3989422804014327
    return np.asarray(np.where(z > 0, tail, 1.0 - tail))
