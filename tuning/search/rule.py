"""The requirements on the pick: as good as the reference, better than plain rules, and then the fastest.

The reference is what the user trains today: `before`, else the plain defaults. Qualities are compared on the same
seeds, as gains over the reference: positive if better, whether the objective is maximised or minimised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuning.config.choices import Goal

ROUNDING = 1e-9
"""0.91 - 0.90 is 0.010000000000000009: a difference this much over the tolerance is still within it."""


@dataclass(frozen=True)
class Baseline:
    """The quality of a plain rule without the model, such as the majority class: its name and its quality."""

    name: str
    value: float

    def __str__(self) -> str:
        return f"{self.name} ({self.value:.4g})"


def best_baseline(baselines: Mapping[str, Mapping[str, float]], objective: str, mode: str) -> Baseline | None:
    """Returns the best of baselines, by name and objectives as records have them; None if none is a number."""
    found = [Baseline(name, own[objective]) for name, own in baselines.items() if objective in own]
    return (min if mode == "min" else max)(found, key=lambda one: one.value, default=None)


def absolute(asked: float | str, reference: float | None) -> float:
    """Returns a tolerance in the objective's own unit: a number as it is, "2%" as a share of the reference's quality.

    0 if a share is asked for and that quality is not known.
    """
    if not isinstance(asked, str):
        return asked
    return float(asked.rstrip("%")) / 100 * abs(reference or 0.0)


@dataclass(frozen=True)
class Rule:
    """The fastest whose `objective` is as good as the reference's, less `tolerance`, and better than the `baseline`.

    `mode` is min or max; the tolerance is at least 0, in the objective's own unit. `at_least` names a quality in place
    of the reference's. `goal` is "speed", or "quality": the best quality that is no slower than the reference.
    """

    objective: str
    mode: str
    tolerance: float = 0.0
    baseline: Baseline | None = None
    at_least: float | None = None
    goal: Goal = "speed"

    def gain(self, value: float, reference: float) -> float:
        """Returns by how much a quality is better than the reference's on the same seed, or than `at_least`."""
        floor = reference if self.at_least is None else self.at_least
        return value - floor if self.mode == "max" else floor - value

    def is_better(self, value: float, other: float) -> bool:
        """Returns whether one quality is better than another."""
        return value > other + ROUNDING if self.mode == "max" else value < other - ROUNDING

    def beats_baseline(self, value: float) -> bool:
        """Returns whether a quality is better than the baseline; True without one."""
        return self.baseline is None or self.is_better(value, self.baseline.value)

    def admits(self, gain: float) -> bool:
        """Returns whether a gain over the reference is no loss beyond the tolerance."""
        return gain >= -self.tolerance - ROUNDING

    @property
    def words(self) -> str:
        """Returns what the quality of the pick has to be, such as "accuracy as good as the reference's"."""
        limit = "as good as the reference's" if self.at_least is None else f"of {self.at_least:g} or better"
        return f"{self.objective} {limit}" + f", less {self.tolerance:g}" * bool(self.tolerance)


@dataclass(frozen=True)
class Expected:
    """The expected gain of a configuration over the reference: mean and standard error, at least 0."""

    gain: float
    error: float

    def given(self, differences: Sequence[float], spread: float) -> Expected:
        """Returns what is expected after paired differences on fresh seeds, of this standard deviation each.

        Both are weighed by their precision, as for a normal mean with a normal prior.
        """
        if not differences:
            return self
        error2 = max(spread, 1e-12) ** 2 / len(differences)
        weight = self.error**2 / (self.error**2 + error2)
        mean = sum(differences) / len(differences)
        return Expected(self.gain + weight * (mean - self.gain), math.sqrt(weight * error2))

    def chance(self, least: float) -> float:
        """Returns the probability that the gain is at least this much."""
        if self.error <= 0:
            return float(self.gain >= least)
        return 0.5 * math.erfc((least - self.gain) / (self.error * math.sqrt(2)))
