"""Which of several configurations is worth training next: the hypervolume that it is expected to add, a second.

The speed of each is known from probes, so its cost is known too, and only its quality has to be guessed: by a process
over the qualities seen (`surrogate`), those of stopped trials included, at what they would have come to (`curves`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tuning.pareto import Mode
from tuning.policies.acquisition import expected_gains
from tuning.policies.coordinates import Coordinates, Floats
from tuning.policies.curves import Curves, Stage
from tuning.policies.surrogate import Surrogate
from tuning.policies.throughput import PHASE_KNOB
from tuning.space import Space

ENOUGH = 4
"""Trainings that came to their end before any choice is made."""
MODELLED = 96
"""Of more trials than these, half are the best and half the newest: the process is cubic in them."""
REFITS = 64
"""The process is made anew once there are 1/64 more trials than it knows: at each up to 128, at every 15th of 1,000."""
OVERHEAD_S = 0.5
"""What a training costs beside its samples: evaluations, and the start of the next."""


class _Seen(NamedTuple):
    """A trial that ended: `at_end` is None of a stopped one, -inf of one that failed."""

    point: Floats
    at_end: float | None
    at_rungs: Mapping[Stage, float]


class Outlook:
    """Takes what trials came to, chooses among configurations. The same calls give the same choices."""

    def __init__(self, space: Space, names: Sequence[str], mode: Mode, samples: int, seed: int) -> None:
        self._coordinates = Coordinates(space, names)
        self._sign, self._samples, self._seed = (1.0 if mode == "max" else -1.0), samples, seed
        self._curves = Curves()
        self._live: dict[str, Floats] = {}
        self._at_rungs: dict[str, dict[int, float]] = {}
        self._seen: list[_Seen] = []
        self._whole = 0
        self._front: list[tuple[float, float]] = []  # speed, quality
        self._fitted: tuple[int, Surrogate, float] | None = None

    def begun(self, trial: str, knobs: Mapping[str, Any]) -> None:
        """Takes a trial that is under way: its like is worth less until it ends."""
        self._live[trial] = self._coordinates.at(knobs)

    def rung(self, trial: str, samples: int, value: float | None) -> None:
        """Takes a quality on the way."""
        if value is not None and math.isfinite(value):
            self._at_rungs.setdefault(trial, {})[samples] = self._sign * value

    def ended(self, trial: str, knobs: Mapping[str, Any], speed: float | None, value: float | None) -> None:
        """Takes the end of a training; one without a finite value counts as `failed`."""
        if value is None or not math.isfinite(value) or not speed:
            self.failed(trial, knobs)
            return
        quality, at_rungs = self._sign * value, self._rungs_of(trial, knobs)
        self._curves.take(at_rungs, quality)
        self._seen.append(_Seen(self._coordinates.at(knobs), quality, at_rungs))
        self._whole += 1
        self._put_on_front(float(speed), quality)
        self.dropped(trial)

    def stopped(self, trial: str, knobs: Mapping[str, Any]) -> None:
        """Takes a trial that a rung ended, which counts by that rung."""
        at_rungs = self._rungs_of(trial, knobs)
        if at_rungs:
            self._seen.append(_Seen(self._coordinates.at(knobs), None, at_rungs))
        self.dropped(trial)

    def failed(self, trial: str, knobs: Mapping[str, Any]) -> None:
        """Takes a trial that diverged or crashed: there is nothing as bad as its place."""
        self._seen.append(_Seen(self._coordinates.at(knobs), -math.inf, {}))
        self.dropped(trial)

    def dropped(self, trial: str) -> None:
        """Forgets a trial whose ending says nothing of its quality, such as an OOM."""
        self._live.pop(trial, None)
        self._at_rungs.pop(trial, None)

    def hopeless(self, knobs: Mapping[str, Any], samples: int, value: float | None, speed: float) -> str:
        """Returns why a training cannot come to the front from here any more, "" where it can.

        It cannot where another came to its end that is as fast, and better than an optimist expects of this one.
        """
        most = None if value is None else self._curves.optimistic(_stage(knobs, samples), self._sign * value)
        if most is None:
            return ""
        better = [quality for other, quality in self._front if other >= speed and quality > most]
        if not better:
            return ""
        said, best = self._sign * most, self._sign * max(better)
        return f"cannot reach the front: {said:.4g} at most from here, where one as fast came to {best:.4g}"

    def is_beaten(self, speed: float, quality: float) -> bool:
        """Returns whether a training came to its end that is faster and better; `quality` the larger the better."""
        front = (point for point in self._front if point != (speed, quality))
        return any(other >= speed and best >= quality for other, best in front)

    def rated(self, front: Sequence[tuple[float, float]]) -> None:
        """Takes the front anew, as (speed, quality), the larger the better: other speeds are known of its trials."""
        self._front = list(front)

    def choose(self, candidates: Sequence[Mapping[str, Any]], speeds: Sequence[float | None]) -> int:
        """Returns the index of the candidate with the largest expected gain a second; 0 where too little is known.

        One without a speed, because nobody probed it or because it does not fit, is not chosen for its gain.
        """
        known = [i for i, speed in enumerate(speeds) if speed]
        if self._whole < ENOUGH or not known:
            return 0
        surrogate, floor = self._process()
        points = np.array([self._coordinates.at(candidates[i]) for i in known])
        means, deviations = surrogate.at(points)
        rates = np.array([float(speeds[i] or 0.0) for i in known])
        seconds = self._samples / rates + OVERHEAD_S
        found = expected_gains(np.array(self._front), floor, rates, means, deviations) / seconds
        if self._live:
            found *= 1.0 - surrogate.alike(points, np.array(list(self._live.values()))).max(axis=1)
        return known[int(np.argmax(found))]  # of equals the first: the model's own, if it fits

    def _rungs_of(self, trial: str, knobs: Mapping[str, Any]) -> dict[Stage, float]:
        own = self._at_rungs.get(trial, {}).items()
        return {_stage(knobs, samples): value for samples, value in own if samples < self._samples}

    def _put_on_front(self, speed: float, quality: float) -> None:
        if any(other >= speed and best >= quality for other, best in self._front):
            return
        self._front = [(s, q) for s, q in self._front if s > speed or q > quality]
        self._front.append((speed, quality))

    def _process(self) -> tuple[Surrogate, float]:
        """Returns the process over the trials up to the last time that it was due anew, and its floor."""
        step = max(1, len(self._seen) // REFITS)
        due = len(self._seen) - len(self._seen) % step
        if self._fitted is not None and self._fitted[0] == due:
            return self._fitted[1], self._fitted[2]
        if len(_whole(self._seen[:due])) < ENOUGH:
            due = len(self._seen)
        if self._fitted is None or self._fitted[0] != due:
            seen = self._seen[:due]
            floor = _floor(np.array(_whole(seen)))
            points, values, stds = _guessed(seen)
            self._fitted = due, Surrogate(points, np.maximum(values, floor), stds, self._seed + due), floor
        return self._fitted[1], self._fitted[2]


def _stage(knobs: Mapping[str, Any], samples: int) -> Stage:
    """Returns what trainings have to share so that their gains are alike: the rung, and whether there is a phase."""
    return samples, float(knobs.get(PHASE_KNOB, 0.0)) > 0


def _whole(seen: Sequence[_Seen]) -> list[float]:
    return [one.at_end for one in seen if one.at_end is not None and math.isfinite(one.at_end)]


def _guessed(seen: Sequence[_Seen]) -> tuple[Floats, Floats, Floats]:
    """Returns points, qualities at the end and their deviations, of stopped trials where they can be guessed."""
    curves = Curves()
    for one in seen:
        if one.at_end is not None:
            curves.take(one.at_rungs, one.at_end)
    lines = curves.lines()
    rows: list[tuple[Floats, float, float]] = []
    for one in seen:
        last = max(one.at_rungs, default=(0, False))
        if one.at_end is not None:
            rows.append((one.point, one.at_end, 0.0))
        elif last in lines:
            rows.append((one.point, *lines[last].end(one.at_rungs[last])))
    best = sorted(range(len(rows)), key=lambda i: -rows[i][1])[: MODELLED // 2]
    kept = {*best, *[i for i in reversed(range(len(rows))) if i not in set(best)][: MODELLED - len(best)]}
    points, values, stds = zip(*(rows[i] for i in sorted(kept)), strict=True)
    return np.array(points), np.array(values), np.array(stds)


def _floor(qualities: Floats) -> float:
    """Returns the quality below which it does not matter how bad: twice as far under the middle as the best is over it.

    Trainings that diverged or learned nothing would otherwise be most of what the process tries to explain.
    """
    middle, best = float(np.median(qualities)), float(qualities.max())
    return max(float(qualities.min()), middle - 2.0 * (best - middle) - 1e-12)
