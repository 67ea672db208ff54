"""The choice of the next trial by known speeds: what would be faster than the pick of now, and may be as good as today.

Speed is known before a trial begins, so the problem is one-sided. Quality is modelled by a Gaussian process over the
searched knobs (scikit-learn's), and the next trial is the one of greatest worth: its chance of being as good as the
reference, times the logarithm of what it would make the pick faster.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainables.knobs import Scalar
from tuning.config.space import Choice, Parameter, Range, Space
from tuning.search.rule import Expected, Rule

STEPS = 4
"""Trials near the reference, each a step faster, before quality is modelled: a model of fewer says nothing."""
STEP = 1.6
"""How many times as fast as the pick of now such a trial is, or the nearest that there is."""
RATES = (2.0, 1.0, 4.0, 2.0)
"""Learning rates of these steps, in multiples of the reference's scaled by the square root of the batch."""
FAIRLY_SURE = 0.75
"""The chance of being as good as the reference from which a trial is the pick of now."""
FASTER = 1.02
"""Two speeds that are closer are equal: no probe tells them apart."""
ALIKE_FRAC = 0.03
"""Values closer than this share of their range are alike. Nine of ten trials had rates from 2.68e-3 to 2.84e-3."""
LEAST_WORTH = 0.02
"""A search ends when no proposal is expected to make the pick faster by two per cent: fresh seeds are worth more then.

With 0.005 a simulated search had two trials more and the same answer (docs/log/known_speeds.md).
"""
NOISE = (0.03, 0.5)
"""Bounds of the share of the variance of qualities that seeds make: with a dozen trials less is fitted noise."""
OTHER_VALUE = 0.3
"""How far a changed value of a list is from the reference, where a step in speed is log(1.6) = 0.5."""
MODELLED = 200
"""The most trials that a model is fitted to, the latest: fitting takes the third power of their number."""


@dataclass(frozen=True)
class Seen:
    """A trial: the searched values, and its quality less the one that the pick has to reach, the larger the better.

    `gain` is None if it failed: then it counts as the worst seen. `samples_per_s` is the speed that it is judged by.
    `is_running`: it has not ended, and its gain is a guess. `error` is the standard error of the gain of one that was
    stopped, as it is expected at the end. Neither is the pick of now.
    """

    values: Mapping[str, Scalar]
    samples_per_s: float
    gain: float | None
    is_running: bool = False
    error: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A configuration that could be trained next, and the speed that probes expect of it."""

    values: Mapping[str, Scalar]
    samples_per_s: float


@dataclass(frozen=True)
class Known:
    """The grounds of the next choice: the reference's values and speed, the rule, and what was seen so far.

    `reference_gains` are of its own trainings, each beside their mean, or beside the quality that the rule names. A
    configuration that was trained on several seeds is seen as often.
    """

    reference: Mapping[str, Scalar]
    reference_per_s: float
    seen: Sequence[Seen]
    rule: Rule
    reference_gains: Sequence[float] = (0.0,)


class Proposals:
    """Chooses among candidates of a space; the same arguments give the same answer."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def pick(self, known: Known) -> Seen:
        """Returns the pick of now: the fastest that is as good as the reference, else the reference.

        As good is what the model is fairly sure of: the best of several noisy trainings is lucky. Without a model
        it is what the training showed.
        """
        ended = [one for one in known.seen if one.gain is not None and not one.is_running and not one.error]
        if len(ended) < STEPS:
            good = [one for one in ended if known.rule.admits(one.gain or 0.0)]
        else:
            floor, found = -known.rule.tolerance, self.expected([one.values for one in ended], known)
            good = [o for o, e in zip(ended, found, strict=True) if e.chance(floor) >= FAIRLY_SURE]
        today = Seen(known.reference, known.reference_per_s, 0.0)
        return max([today, *good], key=lambda one: one.samples_per_s)

    def expected(self, values: Sequence[Mapping[str, Scalar]], known: Known) -> list[Expected]:
        """Returns what the gain of each configuration is expected to be, by the model of all trainings."""
        return _Model(self._space, known).expected(values)

    def noise(self, known: Known) -> float:
        """Returns the standard deviation of a quality between seeds that the model finds, in the objective's unit."""
        return _Model(self._space, known).noise

    def choose(self, candidates: Sequence[Candidate], known: Known) -> tuple[Candidate, float] | None:
        """Returns the candidate of greatest worth, and that worth; None if no new one is faster than the pick of now.

        Under `goal="quality"` candidates are no slower than the reference, and worth is the expected improvement of the
        best quality, as a multiple of what seeds differ by.
        """
        is_speed = known.rule.goal == "speed"
        now_per_s = self.pick(known).samples_per_s if is_speed else known.reference_per_s
        now_per_s = now_per_s or min((one.samples_per_s for one in candidates), default=0.0)  # the reference has failed
        able = [one for one in candidates if one.samples_per_s >= now_per_s * (FASTER if is_speed else 1 / FASTER)]
        if not able:
            return None
        if (begun := len(known.seen)) < STEPS:
            return min(able, key=lambda one: self._from_step(one, known, now_per_s, RATES[begun])), math.inf
        able = [one for one in able if not any(self._is_near(one.values, seen.values) for seen in known.seen)]
        if not able:
            return None
        model = _Model(self._space, known)
        found = model.expected([one.values for one in able])
        if is_speed:
            floor = -known.rule.tolerance
            worth = [e.chance(floor) * math.log(c.samples_per_s / now_per_s) for e, c in zip(found, able, strict=True)]
        else:
            known_gains = [one.gain for one in model.expected([one.values for one in known.seen])]
            worth = [_improvement(one, max([*known.reference_gains, *known_gains])) / model.noise for one in found]
        place = max(range(len(able)), key=worth.__getitem__)
        return able[place], worth[place]

    def _is_near(self, values: Mapping[str, Scalar], seen: Mapping[str, Scalar]) -> bool:
        """Returns whether a training of these values would tell nothing: one of the same seed has been."""
        for name, parameter in self._space.parameters.items():
            if name not in values or name not in seen:
                return False
            if isinstance(parameter, Range):
                if abs(parameter.place(float(values[name])) - parameter.place(float(seen[name]))) > ALIKE_FRAC:
                    return False
            elif values[name] != seen[name]:
                return False
        return True

    def _from_step(self, one: Candidate, known: Known, now_per_s: float, rate: float) -> float:
        """Returns how far a candidate is from the next step: in speed, in learning rate, in other knobs changed."""
        reference, values, parameters = known.reference, one.values, self._space.parameters
        far = abs(math.log(one.samples_per_s / (STEP * now_per_s)))
        within = parameters.get("learning_rate")
        if "learning_rate" in values and "learning_rate" in reference and isinstance(within, Range):
            sizes = [float(knobs.get("batch_size", reference.get("batch_size", 1))) for knobs in (values, reference)]
            scaled = float(reference["learning_rate"]) * rate * math.sqrt(sizes[0] / sizes[1])
            far += abs(math.log(float(values["learning_rate"]) / min(max(scaled, within.low), within.high)))
        for name in values.keys() & reference.keys() - {"learning_rate", "batch_size"}:
            parameter = parameters[name]
            if isinstance(parameter, Range):
                far += abs(parameter.place(float(values[name])) - parameter.place(float(reference[name])))
            else:
                far += OTHER_VALUE * (values[name] != reference[name])
        return far


class _Model:
    """A Gaussian process over what was seen. Its values are gains on a scale that is linear near the reference and
    logarithmic far from it, so that what failed badly does not bend the surface where it matters.
    """

    def __init__(self, space: Space, known: Known) -> None:
        self._space, self._start = space, known.reference
        seen = [*known.seen][-MODELLED:]
        today = [known.reference] * len(known.reference_gains)
        gains = [*known.reference_gains, *(one.gain for one in seen)]
        worst = min(gain for gain in gains if gain is not None)
        values = np.array([worst if gain is None else gain for gain in gains])
        near = np.sort(np.abs(values[len(today) :]))[: max(2, (1 + len(seen)) // 2)]
        self._scale = max(1e-12, known.rule.tolerance, float(np.median(near)) if near.size else 0.0)
        rows = np.array([self._row(one) for one in [*today, *(one.values for one in seen)]])
        scaled = np.arcsinh(values / self._scale)
        self._middle, self._spread = float(scaled.mean()), float(scaled.std()) or 1.0
        errors = np.array([0.0] * len(today) + [one.error for one in seen]) / (self._scale * np.cosh(scaled))
        self._process = _fitted(rows, (scaled - self._middle) / self._spread, errors / self._spread)
        self._zero = 0.0
        if known.rule.at_least is None:  # the reference is one noisy training, too: the model knows it better
            self._zero = self._predict([known.reference])[0][0]

    def _predict(self, values: Sequence[Mapping[str, Scalar]]) -> tuple[list[float], list[float]]:
        means, errors = self._process.predict(np.array([self._row(one) for one in values]), return_std=True)
        return list(self._middle + self._spread * means), list(self._spread * errors)

    def expected(self, values: Sequence[Mapping[str, Scalar]]) -> list[Expected]:
        """Returns the expected gain of each configuration, in the objective's unit."""
        if not values:
            return []
        floor = math.sinh(self._zero)
        return [
            Expected(self._scale * (math.sinh(mean) - floor), self._scale * math.cosh(mean) * max(error, 1e-6))
            for mean, error in zip(*self._predict(values), strict=True)
        ]

    @property
    def noise(self) -> float:
        """Returns the standard deviation between seeds near the reference, in the objective's unit."""
        return float(self._scale * self._spread * math.sqrt(self._process.kernel_.k2.noise_level))

    def _row(self, values: Mapping[str, Scalar]) -> list[float]:
        """Returns a configuration as numbers, 2 apart from end to end of each knob.

        The learning rate is taken relative to the square root of the batch: what suits one batch then suits others.
        """
        row: list[float] = []
        for name, parameter in self._space.parameters.items():
            value = values.get(name, self._start.get(name, _first(parameter)))
            if name == "learning_rate" and "batch_size" in self._space.parameters:
                size = float(values.get("batch_size", self._start.get("batch_size", 1)))
                value = float(value) / math.sqrt(size / float(self._start.get("batch_size", size)))
            row += _coded(parameter, value)
        return row or [0.0]  # of a space with nothing to search


def _fitted(rows: Any, values: Any, errors: Any) -> Any:
    """Returns a Gaussian process fitted to the rows, each with its own error; its noise is what trainings differ by."""
    from sklearn.gaussian_process import GaussianProcessRegressor  # only here: importing it takes a second
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    smooth = Matern(np.ones(rows.shape[1]), length_scale_bounds=(0.3, 5.0), nu=2.5)
    kernel = ConstantKernel(1.0, (0.1, 10.0)) * smooth + WhiteKernel(0.1, NOISE)
    process = GaussianProcessRegressor(kernel, alpha=1e-8 + errors**2, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a length scale at its bound is no fault
        process.fit(rows, values)
    return process


def _first(parameter: Parameter) -> Scalar:
    return parameter.values[0] if isinstance(parameter, Choice) else parameter.at(0.5)


def _coded(parameter: Parameter, value: Scalar) -> list[float]:
    """Returns a value as numbers: a range and a list of numbers as one, other lists as one for each value."""
    if isinstance(parameter, Range):
        return [2.0 * parameter.place(float(value))]
    numbers = [v for v in parameter.values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(parameter.values) or isinstance(value, bool | str):
        return [float(value == one) for one in parameter.values]
    low, high = min(map(float, numbers)), max(map(float, numbers))
    if low == high:  # of a list of one nothing is to be told
        return [0.0]
    return [2.0 * Range(low, high, log=low > 0).place(float(value))]


def _improvement(expected: Expected, best: float) -> float:
    """Returns by how much a normal variable is above `best` on average, what is below counted as nothing."""
    distance = (expected.gain - best) / expected.error
    density = math.exp(-0.5 * distance**2) / math.sqrt(2 * math.pi)
    return expected.error * (distance * 0.5 * math.erfc(-distance / math.sqrt(2)) + density)
