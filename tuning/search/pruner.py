"""Who goes on at a rung: asynchronous successive halving on the quality (Li et al. 2020), sparing whoever is fastest.

A trial stops where its quality is outside the best 1/eta of those seen at the rung, and a trial at least as fast was
better there. What is on the front of speed and quality therefore always goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SAME_SPEED = 0.03
"""Two speeds closer than this are equal: one probe tells them apart no better."""


@dataclass(frozen=True)
class Decision:
    """Whether a trial goes on, and why in words."""

    go_on: bool
    reason: str


def milestones(first: int, last: int, eta: int) -> tuple[int, ...]:
    """Returns first, first * eta, first * eta^2 and so on, all below `last`, in samples seen.

    By multiplication: a logarithm loses a rung at exact powers, as log(243) / log(3) is 4.999...
    """
    if not 1 <= first <= last or eta < 2:
        raise ValueError(f"rungs need 1 <= first <= last and eta >= 2, got first={first}, last={last}, eta={eta}")
    found = []
    milestone = first
    while milestone < last:
        found.append(milestone)
        milestone *= eta
    return tuple(found)


class Pruner:
    """The rungs of one search, by samples seen; `milestones` may be none, and then nobody is stopped."""

    def __init__(self, milestones: Sequence[int], eta: int) -> None:
        self._eta = eta
        self._seen: dict[int, dict[str, tuple[float, float]]] = {m: {} for m in milestones}

    def remember(self, trial: str, milestone: int, samples_per_s: float, quality: float) -> None:
        """Takes a trial's speed and quality (the larger the better) at a rung; decides nothing."""
        if milestone in self._seen and math.isfinite(quality):
            self._seen[milestone][trial] = samples_per_s, quality

    def decide(self, trial: str, milestone: int, samples_per_s: float, quality: float) -> Decision:
        """Returns whether the trial goes on from this rung; among fewer than eta trials everyone does."""
        if not math.isfinite(quality):
            return Decision(False, f"its quality is {quality} at {milestone} samples")
        self.remember(trial, milestone, samples_per_s, quality)
        rung = self._seen.get(milestone, {})
        if len(rung) < self._eta:
            return Decision(True, f"{len(rung)} of the {self._eta} that are compared at {milestone} samples")
        place = 1 + sum(other > quality for _, other in rung.values())
        places = math.ceil(len(rung) / self._eta)
        said = f"place {place} of {len(rung)} at {milestone} samples, {places} go on"
        as_fast = samples_per_s * (1 - SAME_SPEED)
        is_beaten = any(speed >= as_fast and other > quality for speed, other in rung.values())
        if place <= places or not is_beaten:
            return Decision(True, said if place <= places else f"{said}; nothing as fast is better")
        return Decision(False, said)
