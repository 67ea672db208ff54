"""Which of several configurations is worth training next: the hypervolume that it is expected to add, a second.

The speed of each is known from probes, so its cost is known too, and only its quality has to be guessed: by a process
over the qualities seen (`surrogate`), those of stopped trials included, at what they would have come to (`curves`).

What a training came to is partly luck, and the best of many the most. What is gained is therefore what is gained over a
front that is drawn of the process together with the candidates, without the luck: the noisy expected hypervolume
improvement (Daulton et al. 2021, arXiv 2105.08195). Over the front as it was seen, a good place nobody believes in
looked worthless beside the luckiest of its neighbours, and the search went where it had been unlucky.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainables.knobs import PHASE_KNOB
from tuning.config.space import Space
from tuning.search.acquisition import expected_gains
from tuning.search.coordinates import Coordinates, Floats
from tuning.search.curves import Curves, Line, Stage
from tuning.search.surrogate import Surrogate
from tuning.stats.pareto import Mode, hypervolume_2d

ENOUGH = 4
"""Trainings that came to their end before any choice is made."""
MODELLED = 96
"""Of more trials than these, half are the best and half the newest: the process is cubic in them."""
REFITS = 64
"""The process is made anew once there are 1/64 more trials than it knows: at each up to 128, at every 15th of 1,000."""
OVERHEAD_S = 0.5
"""What a training costs beside its samples: evaluations, and the start of the next."""
CONTENDERS, PAIRS = 24, 4
"""How many trainings the front is drawn of, and how often: each time once more with all signs turned."""


class _Seen(NamedTuple):
    """A trial that ended: `at_end` is None of a stopped one, -inf of one that failed."""

    trial: str
    point: Floats
    at_end: float | None
    at_rungs: Mapping[Stage, float]


class _Fit(NamedTuple):
    """The process over the first so many trials, its floor, and the trainings to the end that it is made of.

    `means` and `stds` are what it expects of those, shape (len(whole),).
    """

    trials: int
    surrogate: Surrogate
    floor: float
    whole: Sequence[_Seen]
    means: Floats
    stds: Floats


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
        self._speeds: dict[str, float] = {}  # of those that came to their end
        self._front: dict[str, tuple[float, float]] = {}  # speed, quality
        self._fitted: _Fit | None = None
        self.offer: float | None = None
        """The gain a second that was expected of what was chosen last; None before any choice."""
        self.expected: tuple[float, float] | None = None
        """The largest gain that was expected of a candidate, and the largest a second, over the area under the front.

        As of the last choice; None before any.
        """

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
        self._seen.append(_Seen(trial, self._coordinates.at(knobs), quality, at_rungs))
        self._whole += 1
        self._speeds[trial] = float(speed)
        self._put_on_front(trial, float(speed), quality)
        self.dropped(trial)

    def stopped(self, trial: str, knobs: Mapping[str, Any]) -> None:
        """Takes a trial that a rung ended, which counts by that rung."""
        at_rungs = self._rungs_of(trial, knobs)
        if at_rungs:
            self._seen.append(_Seen(trial, self._coordinates.at(knobs), None, at_rungs))
        self.dropped(trial)

    def failed(self, trial: str, knobs: Mapping[str, Any]) -> None:
        """Takes a trial that diverged or crashed: there is nothing as bad as its place."""
        self._seen.append(_Seen(trial, self._coordinates.at(knobs), -math.inf, {}))
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
        better = [quality for other, quality in self._front.values() if other >= speed and quality > most]
        if not better:
            return ""
        said, best = self._sign * most, self._sign * max(better)
        return f"cannot reach the front: {said:.4g} at most from here, where one as fast came to {best:.4g}"

    def is_worth_more(
        self, trial: str, knobs: Mapping[str, Any], samples: int, value: float | None, speed: float, own: float
    ) -> bool:
        """Returns whether a training that goes on is expected to gain more a second than what was chosen last.

        What is behind it is paid for, so that one in the middle of its peers is often worth more than the next. It may
        run at its `own` speed, slower than the `speed` that it is judged by.
        """
        if value is None or not math.isfinite(value) or self.offer is None or not speed or self._whole < ENOUGH:
            return False
        line = self._curves.line(_stage(knobs, samples))
        if line is None:
            return False
        point = self._coordinates.at(knobs)[None, :]
        gains = self._gains(point, np.array([speed]), told=(line, self._sign * value))
        gain = float((gains * self._unlike(point, trial))[0])
        return gain > self.offer * ((self._samples - samples) / own + OVERHEAD_S)

    def is_beaten(self, speed: float, quality: float) -> bool:
        """Returns whether a training came to its end that is faster and better; `quality` the larger the better."""
        front = (point for point in self._front.values() if point != (speed, quality))
        return any(other >= speed and best >= quality for other, best in front)

    def rated(self, speeds: Mapping[str, float], front: Mapping[str, tuple[float, float]]) -> None:
        """Takes other speeds of trials that came to their end, and the front anew, as trial -> (speed, quality).

        Qualities are the larger the better.
        """
        self._speeds.update(speeds)
        self._front = dict(front)

    def choose(self, candidates: Sequence[Mapping[str, Any]], speeds: Sequence[float | None]) -> int:
        """Returns the index of the candidate with the largest expected gain a second; 0 where too little is known.

        One without a speed, because nobody probed it or because it does not fit, is not chosen for its gain.
        """
        known = [i for i, speed in enumerate(speeds) if speed]
        if self._whole < ENOUGH or not known:
            return 0
        points = np.array([self._coordinates.at(candidates[i]) for i in known])
        rates = np.array([float(speeds[i] or 0.0) for i in known])
        gains = self._gains(points, rates) * self._unlike(points)
        found = gains / (self._samples / rates + OVERHEAD_S)
        best = int(np.argmax(found))  # of equals the first: the model's own, if it fits
        self.offer = float(found[best])
        floor = self._fit().floor
        area = hypervolume_2d(-np.array(list(self._front.values())), (0.0, -floor))
        if area > 0:
            self.expected = float(gains.max()) / area, self.offer / area
        return known[best]

    def _gains(self, points: Floats, speeds: Floats, told: tuple[Line, float] | None = None) -> Floats:
        """Returns the expected gain of each point, shape (m,), over a front that is drawn with it.

        `told` is what the line of a rung says of the points, and the quality that was seen there.
        """
        fit = self._fit()
        drawn_of, fixed = self._contenders(fit)
        known = np.array([one.point for one in drawn_of])
        rates = np.array([self._speeds[one.trial] for one in drawn_of])
        normals = np.random.default_rng([self._seed, fit.trials]).standard_normal((PAIRS, len(known)))
        total, shares = np.zeros(len(points)), 0.0
        for drawn in fit.surrogate.drawn(known, points, np.concatenate([normals, -normals])):
            means, stds = drawn.means, drawn.stds
            if told is not None:
                line, value = told
                means, stds = line.refined(value, means, stds)
            front = np.concatenate([np.stack([rates, drawn.known], axis=1), fixed])
            total += drawn.share * expected_gains(front, fit.floor, speeds, means, stds)
            shares += drawn.share
        return total / shares

    def _unlike(self, points: Floats, trial: str = "") -> Floats:
        """Returns how little the points are like what is under way, 0 to 1, shape (m,); `trial` itself left out."""
        others = [point for name, point in self._live.items() if name != trial]
        if not others:
            return np.ones(len(points))
        found: Floats = 1.0 - self._fit().surrogate.alike(points, np.array(others)).max(axis=1)
        return found

    def _rungs_of(self, trial: str, knobs: Mapping[str, Any]) -> dict[Stage, float]:
        own = self._at_rungs.get(trial, {}).items()
        return {_stage(knobs, samples): value for samples, value in own if samples < self._samples}

    def _put_on_front(self, trial: str, speed: float, quality: float) -> None:
        if any(other >= speed and best >= quality for other, best in self._front.values()):
            return
        self._front = {t: (s, q) for t, (s, q) in self._front.items() if s > speed or q > quality}
        self._front[trial] = speed, quality

    def _fit(self) -> _Fit:
        """Returns the process over the trials up to the last time that it was due anew."""
        step = max(1, len(self._seen) // REFITS)
        due = len(self._seen) - len(self._seen) % step
        if self._fitted is not None and self._fitted.trials == due:
            return self._fitted
        if len(_whole(self._seen[:due])) < ENOUGH:
            due = len(self._seen)
        if self._fitted is None or self._fitted.trials != due:
            seen = self._seen[:due]
            floor = _floor(np.array(_whole(seen)))
            rows = _guessed(seen)
            points, values, stds = (np.array(column) for column in zip(*(row[1:] for row in rows), strict=True))
            surrogate = Surrogate(points, np.maximum(values, floor), stds, self._seed + due)
            modelled = [one for one, *_ in rows if one.trial in self._speeds]
            # Of very many stopped trials the best and the newest may be all that is modelled.
            whole = modelled or [one for one in seen if one.trial in self._speeds][-MODELLED:]
            self._fitted = _Fit(due, surrogate, floor, whole, *surrogate.at(np.array([one.point for one in whole])))
        return self._fitted

    def _contenders(self, fit: _Fit) -> tuple[list[_Seen], Floats]:
        """Returns which trainings the front is drawn of, and further points of it, speed and quality, shape (n, 2).

        Drawn are those modelled that may be on the front, luck aside; of many, those on it and the best: by the best
        alone its fast end would go first, and its like look new. The others are points by what is expected of them,
        and what ended since the process was made by what it came to.
        """
        speeds = np.array([self._speeds[one.trial] for one in fit.whole])
        low, high = fit.means - fit.stds, fit.means + 2 * fit.stds
        beaten = (speeds[None, :] >= speeds[:, None]) & (low[None, :] > high[:, None])
        left = np.flatnonzero(~beaten.any(axis=1)).tolist()
        left.sort(key=lambda i: (fit.whole[i].trial not in self._front, -fit.means[i]))
        expected = [(speeds[i], fit.means[i]) for i in left[CONTENDERS:]]
        modelled = {one.trial for one in fit.whole}
        newer = [point for trial, point in self._front.items() if trial not in modelled]
        return [fit.whole[i] for i in left[:CONTENDERS]], np.array([*expected, *newer]).reshape(-1, 2)


def _stage(knobs: Mapping[str, Any], samples: int) -> Stage:
    """Returns what trainings have to share so that their gains are alike: the rung, and whether there is a phase."""
    return samples, float(knobs.get(PHASE_KNOB, 0.0)) > 0


def _whole(seen: Sequence[_Seen]) -> list[float]:
    return [one.at_end for one in seen if one.at_end is not None and math.isfinite(one.at_end)]


def _guessed(seen: Sequence[_Seen]) -> list[tuple[_Seen, Floats, float, float]]:
    """Returns trials, points, qualities at the end, their deviations; of stopped ones where they can be guessed."""
    curves = Curves()
    for one in seen:
        if one.at_end is not None:
            curves.take(one.at_rungs, one.at_end)
    lines = curves.lines()
    rows: list[tuple[_Seen, Floats, float, float]] = []
    for one in seen:
        last = max(one.at_rungs, default=(0, False))
        if one.at_end is not None:
            rows.append((one, one.point, one.at_end, 0.0))
        elif last in lines:
            rows.append((one, one.point, *lines[last].end(one.at_rungs[last])))
    best = sorted(range(len(rows)), key=lambda i: -rows[i][2])[: MODELLED // 2]
    kept = {*best, *[i for i in reversed(range(len(rows))) if i not in set(best)][: MODELLED - len(best)]}
    return [rows[i] for i in sorted(kept)]


def _floor(qualities: Floats) -> float:
    """Returns the quality below which it does not matter how bad: twice as far under the middle as the best is over it.

    Trainings that diverged or learned nothing would otherwise be most of what the process tries to explain.
    """
    middle, best = float(np.median(qualities)), float(qualities.max())
    return max(float(qualities.min()), middle - 2.0 * (best - middle) - 1e-12)
