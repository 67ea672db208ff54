"""Which trials are pruned at a rung, by the rule that `search.pruner` names; all qualities are finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tuning.config.choices import PrunerName

SAME_SPEED = 0.03
"""Two speeds closer than this are equal: one probe tells them apart no better."""


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
    """What a rule is given: samples/s and quality (the larger the better) of each trial so far, that in question too.

    `eta` is `budget.rungs.eta`. A speed of 0 is unknown.
    """

    milestone: int
    eta: int
    seen: Sequence[tuple[float, float]]


PruningRule = Callable[[Rung, float, float], Decision]
"""Decides whether a trial goes on from a rung; the numbers are its samples/s and its quality."""


def by_rungs(rung: Rung, samples_per_s: float, quality: float) -> Decision:
    """Asynchronous successive halving on the quality (Li et al. 2020) among trials as fast.

    A trial is pruned where its quality is outside the best 1/eta of those seen and a better one was as fast, to within
    `SAME_SPEED`, or faster; none is among fewer than eta trials.
    """
    if len(rung.seen) < rung.eta:
        return Decision(True, f"{len(rung.seen)} of the {rung.eta} that are compared at {rung.milestone} samples")
    place = 1 + sum(other > quality for _, other in rung.seen)
    places = math.ceil(len(rung.seen) / rung.eta)
    said = f"place {place} of {len(rung.seen)} at {rung.milestone} samples, {places} go on"
    as_fast = samples_per_s * (1 - SAME_SPEED)
    is_beaten = any(speed >= as_fast and other > quality for speed, other in rung.seen)
    if place <= places or not is_beaten:
        return Decision(True, said if place <= places else f"{said}; nothing as fast is better")
    return Decision(False, said)


def by_none(rung: Rung, samples_per_s: float, quality: float) -> Decision:
    """No trial is pruned."""
    return Decision(True, "search.pruner=none")


RULES: Mapping[PrunerName, PruningRule] = {"rungs": by_rungs, "none": by_none}


class Pruner:
    """The rungs of one search, by samples seen, and the rule that prunes there; there may be no rungs."""

    def __init__(self, milestones: Sequence[int], eta: int, name: PrunerName = "rungs") -> None:
        self._eta, self._rule = eta, RULES[name]
        self._seen: dict[int, dict[str, tuple[float, float]]] = {m: {} for m in milestones}

    def remember(self, trial: str, milestone: int, samples_per_s: float, quality: float) -> None:
        """Takes a trial's speed and quality (the larger the better) at a rung; decides nothing."""
        if milestone in self._seen:
            self._seen[milestone][trial] = samples_per_s, quality

    def decide(
        self, trial: str, milestone: int, samples_per_s: float, quality: float, *, is_early: bool = False
    ) -> Decision:
        """Returns whether the trial goes on from this rung, which is remembered first.

        One that `is_early`, as its quality is of a phase that has not begun, goes on and is compared with nobody.
        """
        if is_early:
            return Decision(True, f"its last phase has not begun at {milestone} samples")
        self.remember(trial, milestone, samples_per_s, quality)
        rung = Rung(milestone, self._eta, list(self._seen.get(milestone, {}).values()))
        return self._rule(rung, samples_per_s, quality)
