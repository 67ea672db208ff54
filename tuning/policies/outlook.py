"""Which of several configurations is worth training next: the hypervolume that it is expected to add, a second.

The speed of each is known from probes, so its cost is known too, and only its quality has to be guessed: by a process
over the qualities seen (`surrogate`), those of stopped trials included, at what they would have come to (`curves`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tuning.pareto import Mode
from tuning.policies.acquisition import expected_gains
from tuning.policies.coordinates import Coordinates, Floats
from tuning.policies.curves import Curves
from tuning.policies.surrogate import Surrogate
from tuning.space import Space

ENOUGH = 4
"""Trainings that came to their end before any choice is made."""
MODELLED = 96
"""Of more trials than these the newest are left out that are far from the front: a choice takes 30 ms, at most."""
OVERHEAD_S = 0.5
"""What a training costs beside its samples: evaluations, and the start of the next."""


class Outlook:
    """Takes what trials came to, chooses among configurations. The same calls give the same choices."""

    def __init__(self, space: Space, names: Sequence[str], mode: Mode, samples: int, seed: int) -> None:
        self._coordinates = Coordinates(space, names)
        self._sign, self._samples, self._seed = (1.0 if mode == "max" else -1.0), samples, seed
        self._curves = Curves()
        self._at_rungs: dict[str, dict[int, float]] = {}
        self._ended: list[tuple[Floats, float]] = []  # point, quality
        self._front: list[tuple[float, float]] = []  # speed, quality
        self._stopped: list[tuple[Floats, int, float]] = []  # point, samples, quality there

    def rung(self, trial: str, samples: int, value: float | None) -> None:
        """Takes a quality on the way."""
        if value is not None and math.isfinite(value):
            self._at_rungs.setdefault(trial, {})[samples] = self._sign * value

    def ended(
        self, trial: str, knobs: Mapping[str, Any], speed: float | None, value: float | None, *, whole: bool
    ) -> None:
        """Takes the end of a trial; one that was not `whole` counts by its last rung."""
        at_rungs = self._at_rungs.pop(trial, {})
        point = self._coordinates.at(knobs)
        if whole and value is not None and math.isfinite(value) and speed:
            self._curves.take({s: v for s, v in at_rungs.items() if s < self._samples}, self._sign * value)
            self._ended.append((point, self._sign * value))
            self._on_front(float(speed), self._sign * value)
        elif at_rungs:
            last = max(at_rungs)
            self._stopped.append((point, last, at_rungs[last]))

    def hopeless(self, samples: int, value: float | None, speed: float) -> str:
        """Returns why a training cannot come to the front from here any more, "" where it can.

        It cannot where another came to its end that is as fast, and better than an optimist expects of this one.
        """
        most = None if value is None else self._curves.optimistic(samples, self._sign * value)
        if most is None:
            return ""
        better = [quality for other, quality in self._front if other >= speed and quality > most]
        if not better:
            return ""
        said, best = self._sign * most, self._sign * max(better)
        return f"cannot reach the front: {said:.4g} at most from here, where one as fast came to {best:.4g}"

    def choose(self, candidates: Sequence[Mapping[str, Any]], speeds: Sequence[float | None], number: int) -> int:
        """Returns the index of the candidate with the largest expected gain a second; 0 where too little is known."""
        known = [i for i, speed in enumerate(speeds) if speed]
        if len(self._ended) < ENOUGH or not known:
            return 0
        points, values, stds = self._seen()
        floor = _floor(np.array([quality for _, quality in self._ended]))
        surrogate = Surrogate(points, np.maximum(values, floor), stds, self._seed + number)
        means, deviations = surrogate.at(np.array([self._coordinates.at(candidates[i]) for i in known]))
        rates = np.array([float(speeds[i] or 0.0) for i in known])
        found = expected_gains(np.array(self._front), floor, rates, means, deviations) / (
            self._samples / rates + OVERHEAD_S
        )
        return known[int(np.argmax(found))] if found.max() > 0 else 0

    def _on_front(self, speed: float, quality: float) -> None:
        if any(other >= speed and best >= quality for other, best in self._front):
            return
        self._front = [(s, q) for s, q in self._front if s > speed or q > quality]
        self._front.append((speed, quality))

    def _seen(self) -> tuple[Floats, Floats, Floats]:
        """Returns points, qualities at the end and their deviations, of stopped trials where they can be guessed."""
        gains = self._curves.gains()
        rows = [(point, quality, 0.0) for point, quality in self._ended]
        for point, samples, value in self._stopped:
            if samples in gains:
                gain, std = gains[samples]
                rows.append((point, value + gain, std))
        best = sorted(range(len(rows)), key=lambda i: -rows[i][1])[: MODELLED // 2]
        newest = [i for i in reversed(range(len(rows))) if i not in set(best)][: MODELLED - len(best)]
        kept = [rows[i] for i in sorted([*best, *newest])]
        points, values, stds = zip(*kept, strict=True)
        return np.array(points), np.array(values), np.array(stds)


def _floor(qualities: Floats) -> float:
    """Returns the quality below which it does not matter how bad: twice as far under the middle as the best is over it.

    Trainings that diverged or learned nothing would otherwise be most of what the process tries to explain.
    """
    middle, best = float(np.median(qualities)), float(qualities.max())
    return max(float(qualities.min()), middle - 2.0 * (best - middle) - 1e-12)
