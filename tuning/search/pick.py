"""Which configuration is the answer: the fastest that gives up no more quality than allowed (`rule`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuning.search.rule import Rule
from tuning.stats.pareto import front, knee


@dataclass(frozen=True)
class Candidate:
    """A trial that ran to its end: its id, its qualities by objective, its samples a second."""

    id: str
    values: Mapping[str, float]
    samples_per_s: float


@dataclass(frozen=True)
class Pick:
    """Trials by id: the best by `rule`, the knee of the front, the most accurate, and the front, fastest first.

    The knee, like the best, is better than the baseline once anything is.
    """

    best: str
    knee: str
    most_accurate: str
    front: tuple[str, ...]
    rule: str


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
    worth = [i for i, c in enumerate(usable) if cost[c.id] < rule.baseline_cost] or list(range(len(usable)))
    return Pick(
        best=best.id,
        knee=usable[worth[knee(points[worth])]].id,
        most_accurate=accurate.id,
        front=tuple(c.id for c in on_front),
        rule=(
            f"of {len(usable)} the fastest whose {objective} is "
            f"{rule.words(cost[best.id], cost.values(), least, 'the best seen')}: "
            f"{best.values[objective]:.4g} against {accurate.values[objective]:.4g}, "
            f"at {best.samples_per_s:.4g} samples/s"
        ),
    )
