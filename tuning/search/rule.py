"""What is asked of the pick: how much quality the fastest configuration may give up, and what it has to be better than.

Qualities are compared as costs, the smaller the better: the objective itself, or its negative where it is maximised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tuning.config.lenient import finite, mapping

COLLAPSE_TOLERANCES = 5.0
"""The best of twelve with one seed is about one tolerance too good (docs/log/confirming.md)."""
ROUNDING = 1e-9
"""0.91 - 0.90 is 0.010000000000000009: a difference this much over the tolerance is still within it."""


@dataclass(frozen=True)
class Baseline:
    """What a plain rule reaches without the model, such as the majority class: its name and its quality."""

    name: str
    value: float

    def __str__(self) -> str:
        return f"{self.name} ({self.value:.4g})"


def best_baseline(baselines: Mapping[str, Any], objective: str, mode: str) -> Baseline | None:
    """Returns the best of baselines, by name and objectives as records have them; None where none is a number."""
    values = {name: finite(mapping(own).get(objective)) for name, own in mapping(baselines).items()}
    found = [Baseline(name, value) for name, value in values.items() if value is not None]
    return (min if mode == "min" else max)(found, key=lambda one: one.value, default=None)


def absolute(asked: float | str, qualities: Iterable[float], mode: str) -> float:
    """Returns a tolerance in the objective's own unit: a number as it is, "2%" as that share of the best quality seen.

    0 where a share is asked for and none of `qualities` is finite.
    """
    if not isinstance(asked, str):
        return asked
    known = [quality for quality in qualities if math.isfinite(quality)]
    best = (min if mode == "min" else max)(known, default=0.0)
    return float(asked.rstrip("%")) / 100 * abs(best)


@dataclass(frozen=True)
class Rule:
    """The fastest whose `objective` is within `tolerance` of the best, and better than the `baseline`.

    `mode` is min or max; the tolerance is at least 0, in the objective's own unit.
    While nothing is better than the baseline it rules nothing out.
    """

    objective: str
    mode: str
    tolerance: float
    baseline: Baseline | None = None

    @property
    def sign(self) -> float:
        """Returns what makes a cost of a quality, and a quality of a cost."""
        return 1.0 if self.mode == "min" else -1.0

    @property
    def baseline_cost(self) -> float:
        """Returns the baseline's cost, infinity where there is none."""
        return math.inf if self.baseline is None else self.sign * self.baseline.value

    def over(self, least: float, margin: float = 0.0) -> float:
        """Returns how much more than the least cost is allowed; `margin` is how far below the baseline it has to stay,
        where the least is.
        """
        below = self.baseline_cost - least - 2 * ROUNDING  # strictly: the majority class's own accuracy is not allowed
        below -= margin if margin < below else 0.0
        return min(self.tolerance, below) if below > 0 else self.tolerance

    def near(self, cost: float, least: float) -> bool:
        """Returns whether a cost is within the tolerance of the least."""
        return cost - least <= self.tolerance + ROUNDING

    def admits(self, cost: float, least: float, margin: float = 0.0) -> bool:
        """Returns whether a cost is allowed where the least is this, and it has to be so far below the baseline."""
        return cost - least <= self.over(least, margin) + ROUNDING

    def repeats(self, searched: float, again: float) -> bool:
        """Returns whether a cost on fresh seeds bears out the one of the search: it is at most
        `COLLAPSE_TOLERANCES` tolerances above it, and still below the baseline's where that one was.
        """
        collapses = 0 < self.tolerance < (again - searched - ROUNDING) / COLLAPSE_TOLERANCES
        return not (searched < self.baseline_cost <= again or collapses)

    def words(self, picked: float, costs: Iterable[float], least: float, best: str) -> str:
        """Returns "within 0.01 of the best", and the baseline where the one picked is better and it ruled out others.

        `picked` is the cost of the one picked, `best` whom the least cost is said to be of.
        """
        held = self.admits(picked, least) and any(self.near(c, least) and not self.admits(c, least) for c in costs)
        return f"within {self.tolerance:g} of {best}" + f" and better than {self.baseline}" * held
