"""Which trials are pruned at a rung, by the rule that `search.pruner` names."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tuning.config.choices import PrunerName

LEAST_CURVES = 3
"""Trials that came from a rung to their end, below which nobody knows what a distance at that rung is worth."""
ERRORS = 2.0
"""A trial is pruned if it would be behind the reference even with this many standard deviations of luck."""


@dataclass(frozen=True)
class Decision:
    """Whether a trial goes on, and why in words."""

    go_on: bool
    reason: str


def milestones(first: int, last: int, eta: int) -> tuple[int, ...]:
    """Returns first, first * eta, first * eta^2 and so on, all below `last`, in samples seen; `eta` is at least 2.

    By multiplication: a logarithm loses a rung at exact powers, as log(243) / log(3) is 4.999...
    """
    found = []
    milestone = first
    while milestone < last:
        found.append(milestone)
        milestone *= eta
    return tuple(found)


@dataclass(frozen=True)
class Rung:
    """What a rule is given: how a trial stands beside the reference at the same number of samples.

    `gain` is its quality less the reference's here, the larger the better, None if the reference has none here.
    `later` says of each trial that passed here and came to its end by how much its gain changed from here to there.
    `may_lose` is the quality that the pick may give up.
    """

    milestone: int
    gain: float | None
    later: Sequence[float]
    may_lose: float = 0.0


PruningRule = Callable[[Rung], Decision]
"""Decides whether a trial goes on from a rung."""


def by_reference(rung: Rung) -> Decision:
    """A trial is pruned if it is behind the reference's own curve by more than trials make up for after this rung."""
    if rung.gain is None:
        return Decision(True, f"the reference was not measured at {rung.milestone} samples")
    if len(rung.later) < LEAST_CURVES:
        return Decision(True, f"{len(rung.later)} of the {LEAST_CURVES} whole trials that are compared with")
    expected = rung.gain + statistics.fmean(rung.later)
    error = statistics.stdev(rung.later) * math.sqrt(1 + 1 / len(rung.later))
    said = f"{rung.gain:+.3g} beside the reference at {rung.milestone} samples, {expected:+.3g} expected at the end"
    return Decision(expected + ERRORS * error >= -rung.may_lose, f"{said} (± {ERRORS * error:.2g})")


def by_none(rung: Rung) -> Decision:
    """No trial is pruned."""
    return Decision(True, "search.pruner=none")


RULES: Mapping[PrunerName, PruningRule] = {"reference": by_reference, "none": by_none}
