"""Which trials are pruned at a rung, by the rule that `search.pruner` names."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tuning.config.choices import PrunerName
from tuning.search.rule import Expected
from tuning.stats.uncertainty import t_975

LEAST_CURVES = 4
"""Trials that came from a rung to their end, below which nobody knows what a distance at that rung is worth."""


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
    """The facts that a pruning rule is given: how a trial stands beside the reference at the same number of samples.

    `gain` is its quality less the reference's here, the larger the better, None if the reference has none here.
    `ended` are the gains here and at the end of each trial that passed here and came to its end. `may_lose` is the
    quality that the pick may give up.
    """

    milestone: int
    gain: float | None
    ended: Sequence[tuple[float, float]]
    may_lose: float = 0.0

    @property
    def end(self) -> Expected | None:
        """Returns the gain that is expected at the end, by a line through those that ended; None if they are too few.

        A line, as a rung may say little: with a one-cycle schedule trials that were 0.1 apart half way ended alike. Its
        error grows with the distance from what was seen (the prediction interval of a linear regression).
        """
        if self.gain is None or len(self.ended) < LEAST_CURVES:
            return None
        here, later = zip(*self.ended, strict=True)
        middle, count = statistics.fmean(here), len(here)
        squares = sum((x - middle) ** 2 for x in here)
        slope = statistics.linear_regression(here, later).slope if squares > 0 else 0.0
        slope = min(1.0, max(0.0, slope))
        start = statistics.fmean(later) - slope * middle
        rest = sum((y - start - slope * x) ** 2 for x, y in self.ended) / (count - 2)
        far = (self.gain - middle) ** 2 / squares if squares > 0 else 0.0
        return Expected(start + slope * self.gain, math.sqrt(rest * (1 + 1 / count + far)))


PruningRule = Callable[[Rung], Decision]
"""Decides whether a trial goes on from a rung."""


def by_reference(rung: Rung) -> Decision:
    """A trial is pruned if it is behind the reference's own curve by more than trials make up for after this rung."""
    if rung.gain is None:
        return Decision(True, f"the reference was not measured at {rung.milestone} samples")
    if (end := rung.end) is None:
        return Decision(True, f"{len(rung.ended)} of the {LEAST_CURVES} whole trials that are compared with")
    reach = t_975(len(rung.ended) - 2) * end.error
    said = f"{rung.gain:+.3g} beside the reference at {rung.milestone} samples, {end.gain:+.3g} expected at the end"
    return Decision(end.gain + reach >= -rung.may_lose, f"{said} (± {reach:.2g})")


RULES: Mapping[PrunerName, PruningRule] = {
    "reference": by_reference,
    "none": lambda rung: Decision(True, "search.pruner=none"),
}
