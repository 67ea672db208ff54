"""Which configuration is the answer: the fastest that gives up no more quality than allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuning.pareto import front, knee

_ROUNDING = 1e-9
"""0.91 - 0.90 is 0.010000000000000009: a difference this much over the tolerance is still within it."""


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


def pick(candidates: Sequence[Candidate], objective: str, mode: str, tolerance: float) -> Pick:
    """Returns the pick over quality (`objective`, min or max) and speed; `tolerance` is in the objective's own unit.

    Of equally fast ones the better, then the earlier is taken. Candidates whose quality or speed is not finite are left
    out; raises ValueError where none remain, or for an objective that a candidate lacks.
    """
    if mode not in ("min", "max"):
        raise ValueError(f"mode must be min or max, got {mode!r}")
    if tolerance < 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    for candidate in candidates:
        if objective not in candidate.values:
            there = ", ".join(candidate.values) or "no values"
            raise ValueError(f"{candidate.id} has no {objective}; it has {there}")
    sign = 1.0 if mode == "min" else -1.0
    usable = [c for c in candidates if math.isfinite(c.values[objective]) and math.isfinite(c.samples_per_s)]
    if not usable:
        raise ValueError(f"nothing to pick from: none of {len(candidates)} candidates has finite {objective} and speed")
    cost = {c.id: sign * c.values[objective] for c in usable}
    least = min(cost.values())
    within = [c for c in usable if cost[c.id] - least <= tolerance + _ROUNDING]
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
            f"of {len(usable)} the fastest whose {objective} is within {tolerance:g} of the best seen: "
            f"{best.values[objective]:.4g} against {accurate.values[objective]:.4g}, "
            f"at {best.samples_per_s:.4g} samples/s"
        ),
    )
