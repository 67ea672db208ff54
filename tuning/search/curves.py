"""From a rung to the end: what the trainings that got there tell of those that have not.

Everything is in one sense, larger is better. How far a rung tells the end differs from workload to workload, so the
end is read off a line through (rung, end), whose slope is that of least squares, less by what so few trainings can
say. With the middle gain added to every rung instead, ends were missed by 3.3 times as much in signals, 3.0 in
temporal, 1.2 in headpose (at the first rung, 12 trainings of the recorded tables known; at the second 4.5, 1.7 and
0.8) and 1.4 in nli (6 known). The optimist expects the largest gain yet.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuning.search.coordinates import Floats

Stage = tuple[int, bool]
"""Samples seen, and whether the training has a phase for the encoder, after which all is yet to be learned."""
ENOUGH = 4
"""Trainings that have to have gone from a rung to their end before their gains say anything."""
NEWEST = 64
"""Of more trainings than these the newest say what to expect; the optimist looks at all."""
_ROUNDING = 1e-9
"""Pruner that differ by no more of their mean are the same."""
DOUBT = 2.0
"""Trainings that say that a rung tells nothing of the end, believed before any was seen."""
MARGIN = 1.25
"""The optimist expects so many times the largest gain yet."""


@dataclass(frozen=True)
class Line:
    """The end to expect by the value at a rung: a line through `count` trainings, and the deviation of what is left.

    `squares` are those of the rungs' distances to their mean, 0 where they are all the same; `end_std` is the deviation
    of the ends.
    """

    rung_mean: float
    end_mean: float
    slope: float
    std: float
    squares: float
    count: int
    end_std: float

    @classmethod
    def through(cls, pairs: Sequence[tuple[float, float]]) -> Line:
        """Returns the line through (rung, end) pairs, at least two."""
        count = len(pairs)
        rung_mean, end_mean = (statistics.fmean(values) for values in zip(*pairs, strict=True))
        squares = sum((rung - rung_mean) ** 2 for rung, _ in pairs)
        if squares <= count * (_ROUNDING * rung_mean) ** 2:
            squares = 0.0
        products = sum((rung - rung_mean) * (end - end_mean) for rung, end in pairs)
        slope = max(0.0, products / (squares * (1 + DOUBT / count))) if squares else 0.0
        left = sum((end - end_mean - slope * (rung - rung_mean)) ** 2 for rung, end in pairs)
        end_std = statistics.stdev(end for _, end in pairs)
        return cls(rung_mean, end_mean, slope, math.sqrt(left / (count - 1)), squares, count, end_std)

    def end(self, rung: float) -> tuple[float, float]:
        """Returns the end to expect and its deviation, the larger the farther the rung is from those known."""
        away = rung - self.rung_mean
        lever = away**2 / self.squares if self.squares and self.slope else 0.0
        return self.end_mean + self.slope * away, self.std * math.sqrt(1 + 1 / self.count + lever)

    def refined(self, rung: float, means: Floats, stds: Floats) -> tuple[Floats, Floats]:
        """Returns ends to expect and their deviations where both were expected without the rung, which is known now.

        A rung tells what its line says beyond what is known of all ends: the density of the end by the line, over that
        of any end, times that expected. A rung that tells nothing leaves what was expected. How far the rung is from
        those known does not count here: the worst rung of all would else be believed the least.
        """
        end, _ = self.end(rung)
        std, spread = (value * math.sqrt(1 + 1 / self.count) for value in (self.std, self.end_std))
        if not 0 < std < spread:
            return means, stds
        known = 1 / stds**2
        precision = known + 1 / std**2 - 1 / spread**2
        return (known * means + end / std**2 - self.end_mean / spread**2) / precision, 1 / np.sqrt(precision)


class Curves:
    """What whole trainings had at their rungs, and at their ends."""

    def __init__(self) -> None:
        self._pairs: dict[Stage, list[tuple[float, float]]] = defaultdict(list)

    def take(self, at_rungs: Mapping[Stage, float], at_end: float) -> None:
        """Takes a training that came to its end."""
        for stage, value in at_rungs.items():
            self._pairs[stage].append((value, at_end))

    def lines(self) -> dict[Stage, Line]:
        """Returns what each rung that enough trainings passed says of the end."""
        return {stage: line for stage in self._pairs if (line := self.line(stage)) is not None}

    def line(self, stage: Stage) -> Line | None:
        """Returns what a rung says of the end, None where too few trainings passed it."""
        pairs = self._pairs.get(stage, [])
        return Line.through(pairs[-NEWEST:]) if len(pairs) >= ENOUGH else None

    def optimistic(self, stage: Stage, value: float) -> float | None:
        """Returns more than any training yet would have come to from here; None: too few yet."""
        pairs = self._pairs.get(stage, [])
        if len(pairs) < ENOUGH:
            return None
        return value + MARGIN * max(0.0, *(end - rung for rung, end in pairs))
