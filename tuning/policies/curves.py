"""From a rung to the end: what the trainings that got there tell of those that have not.

Everything is in one sense, larger is better. What a training gains from a rung to its end is taken to be alike for all
of a search: the middle gain is what to expect, the largest gain yet is the optimist's.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping

Stage = tuple[int, bool]
"""Samples seen, and whether the training has a phase for the encoder, after which all is yet to be learned."""
ENOUGH = 4
"""Trainings that have to have gone from a rung to their end before their gains say anything."""
NEWEST = 64
"""Of more gains than these the newest say what to expect; the optimist looks at all."""
MARGIN = 1.25
"""The optimist expects so many times the largest gain yet."""


class Curves:
    """The gains of whole trainings, by rung."""

    def __init__(self) -> None:
        self._gains: dict[Stage, list[float]] = defaultdict(list)

    def take(self, at_rungs: Mapping[Stage, float], at_end: float) -> None:
        """Takes a training that came to its end."""
        for stage, value in at_rungs.items():
            self._gains[stage].append(at_end - value)

    def gains(self) -> dict[Stage, tuple[float, float]]:
        """Returns, of each rung that enough trainings passed, the gain to expect from there and its deviation."""
        newest = {stage: found[-NEWEST:] for stage, found in self._gains.items() if len(found) >= ENOUGH}
        return {stage: (statistics.median(found), statistics.stdev(found)) for stage, found in newest.items()}

    def optimistic(self, stage: Stage, value: float) -> float | None:
        """Returns more than any training yet would have come to from here; None: too few yet."""
        gains = self._gains.get(stage, [])
        if len(gains) < ENOUGH:
            return None
        return value + MARGIN * max(0.0, *gains)
