"""Which configuration is the answer: the fastest that gives up no more quality than allowed, and has learned some."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuning.pareto import front, knee

ROUNDING = 1e-9
"""0.91 - 0.90 is 0.010000000000000009: a difference this much over the tolerance is still within it."""


@dataclass(frozen=True)
class Baseline:
    """What is reached without training, such as the majority class: its name and its quality."""

    name: str
    value: float

    def __str__(self) -> str:
        return f"{self.name}'s {self.value:.4g}"


def best_baseline(baselines: Mapping[str, Mapping[str, float]], objective: str, mode: str) -> Baseline | None:
    """Returns the best of what is reached without training, by name and objectives; None where nothing is known."""
    values = {name: float(own.get(objective, math.nan)) for name, own in baselines.items()}
    found = [Baseline(name, value) for name, value in values.items() if math.isfinite(value)]
    return (min if mode == "min" else max)(found, key=lambda one: one.value, default=None)


@dataclass(frozen=True)
class Rule:
    """What is asked of the pick: the fastest whose `objective` (min or max) is within `tolerance` of the best.

    It is better than the `baseline`, too, once anything is: speed at what takes no training is worth nothing. Qualities
    are compared as costs here, the smaller the better.
    """

    objective: str
    mode: str
    tolerance: float
    baseline: Baseline | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode must be min or max, got {self.mode!r}")
        if self.tolerance < 0:
            raise ValueError(f"tolerance must be at least 0, got {self.tolerance}")

    @property
    def sign(self) -> float:
        """Returns what makes a cost of a quality, and a quality of a cost."""
        return 1.0 if self.mode == "min" else -1.0

    @property
    def untrained(self) -> float:
        """Returns the cost of what takes no training, infinity where none is known."""
        return math.inf if self.baseline is None else self.sign * self.baseline.value

    def over(self, least: float) -> float:
        """Returns how much more than the least cost is allowed."""
        below = self.untrained - least - 2 * ROUNDING  # strictly: the majority class's own accuracy is not allowed
        return min(self.tolerance, below) if below > 0 else self.tolerance

    def admits(self, cost: float, least: float) -> bool:
        """Returns whether a cost is allowed where the least is this."""
        return cost - least <= self.over(least) + ROUNDING

    def words(self, costs: Iterable[float], least: float, best: str = "the best") -> str:
        """Returns "within 0.01 of the best", and what else rules out any of the costs where something does."""
        held = any(cost - least <= self.tolerance + ROUNDING and not self.admits(cost, least) for cost in costs)
        return f"within {self.tolerance:g} of {best}" + f" and better than {self.baseline}" * held


@dataclass(frozen=True)
class Candidate:
    """A trial that ran to its end: its id, its qualities by objective, its samples a second."""

    id: str
    values: Mapping[str, float]
    samples_per_s: float


@dataclass(frozen=True)
class Pick:
    """Trials by id: the best by `rule`, the knee of the front, the most accurate, and the front, fastest first."""

    best: str
    knee: str
    most_accurate: str
    front: tuple[str, ...]
    rule: str


def absolute(asked: float | str, qualities: Iterable[float], mode: str) -> float:
    """Returns a tolerance in the objective's own unit: a number as it is, "2%" as that share of the best quality seen.

    0 where a share is asked for and none of `qualities` is finite. Raises ValueError for other text.
    """
    if not isinstance(asked, str):
        return asked
    number, sign, rest = asked.partition("%")
    if not sign or rest:
        raise ValueError(f"tolerance must be a number or a percentage such as 2%, got {asked!r}")
    finite = [quality for quality in qualities if math.isfinite(quality)]
    best = (min if mode == "min" else max)(finite, default=0.0)
    return float(number) / 100 * abs(best)


def pick(candidates: Sequence[Candidate], rule: Rule) -> Pick:
    """Returns the pick over quality and speed by the rule, whose tolerance is in the objective's own unit.

    Of equally fast ones the better, then the earlier is taken. Candidates whose quality or speed is not finite are left
    out; raises ValueError where none remain, or for an objective that a candidate lacks.
    """
    objective = rule.objective
    for candidate in candidates:
        if objective not in candidate.values:
            there = ", ".join(candidate.values) or "no values"
            raise ValueError(f"{candidate.id} has no {objective}; it has {there}")
    usable = [c for c in candidates if math.isfinite(c.values[objective]) and math.isfinite(c.samples_per_s)]
    if not usable:
        raise ValueError(f"nothing to pick from: none of {len(candidates)} candidates has finite {objective} and speed")
    cost = {c.id: rule.sign * c.values[objective] for c in usable}
    least = min(cost.values())
    within = [c for c in usable if rule.admits(cost[c.id], least)]
    best = min(within, key=lambda c: (-c.samples_per_s, cost[c.id]))
    accurate = min(usable, key=lambda c: (cost[c.id], -c.samples_per_s))
    points = np.array([[-c.samples_per_s, cost[c.id]] for c in usable])
    on_front = sorted((usable[i] for i in front(points)), key=lambda c: -c.samples_per_s)
    return Pick(
        best=best.id,
        knee=usable[knee(points)].id,
        most_accurate=accurate.id,
        front=tuple(c.id for c in on_front),
        rule=(
            f"of {len(usable)} the fastest whose {objective} is {rule.words(cost.values(), least, 'the best seen')}: "
            f"{best.values[objective]:.4g} against {accurate.values[objective]:.4g}, "
            f"at {best.samples_per_s:.4g} samples/s"
        ),
    )
