"""The model behind `search.sampler=model`: which configuration is worth training next, its speed being known.

What is maximised is what the user gets: the speed of the pick. The process of the qualities is drawn jointly over the
trained configurations and the candidates. In each draw the bar is the best quality anywhere less the tolerance, and the
baseline; what there is already is the fastest trained configuration at the bar. A candidate gains the speed that it is
faster by, where the draw has it at the bar. The mean over the draws, a second of training, is the score: a knowledge
gradient on the constrained best, with speed as the known objective and quality as the constraint (Gardner et al. 2014,
"Bayesian optimization with inequality constraints"). Trials under way count as trained with the quality of the draw, so
that two proposals made beside each other differ.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tuning.config.space import Space
from tuning.search.coordinates import Coordinates, Floats
from tuning.search.rule import Baseline, absolute
from tuning.search.surrogate import Surrogate
from tuning.stats.pareto import Mode

ENOUGH, ENOUGH_WHOLE = 5, 1
"""Trials whose quality is known or guessed before any choice is made, and how many of them came to their end."""
MODELLED = 48
"""Of more trials than these, half are the best and half the newest. The process is cubic in them.

From 64 on LAPACK splits a matrix over threads, which wait for each other beside trials: 171 ms a choice against 50.
"""
JOINT_DRAWS = 64
"""Joint draws of the process."""
OVERHEAD_S = 0.5
"""What a training costs beside its samples: evaluations, and the start of the next."""


class Qualities:
    """What trials came to in the first quality, the larger the better, as far as it is known or can be guessed."""

    def __init__(self, mode: Mode) -> None:
        self._sign = 1.0 if mode == "max" else -1.0
        self._at_rungs: dict[str, dict[int, float]] = {}
        self._ends: dict[str, Literal["whole", "stopped", "failed"]] = {}
        self.whole: dict[str, float] = {}
        """Of trials that came to their end."""

    def rung(self, trial: str, samples: int, value: float | None) -> None:
        """Takes a quality on the way."""
        if value is not None and math.isfinite(value):
            self._at_rungs.setdefault(trial, {})[samples] = self._sign * value

    def ended(self, trial: str, value: float | None) -> None:
        """Takes the end of a whole training; one without a finite value has failed."""
        if value is None or not math.isfinite(value):
            self.failed(trial)
        else:
            self._ends[trial], self.whole[trial] = "whole", self._sign * value

    def stopped(self, trial: str) -> None:
        """Takes that a trial was stopped: its last rung counts."""
        self._ends[trial] = "stopped"

    def failed(self, trial: str) -> None:
        """Takes that a trial diverged or crashed: it is as bad as the worst seen."""
        self._ends[trial] = "failed"

    def known(self) -> dict[str, float]:
        """Returns the quality of each trial that ended, in that order.

        A stopped one is expected to gain as much after its last rung as the whole ones did in the median; where none
        passed that rung it is left out.
        """
        gain = functools.cache(self._gain)  # else 22 ms a call of 1,000 trials
        guessed = {t: self.whole[t] if end == "whole" else self._guess(t, gain) for t, end in self._ends.items()}
        worst = min((quality for quality in guessed.values() if quality is not None), default=None)
        found = {t: worst if self._ends[t] == "failed" else quality for t, quality in guessed.items()}
        return {trial: quality for trial, quality in found.items() if quality is not None}

    def guess(self, trial: str) -> float | None:
        """Returns what a stopped trial would have come to, None where nothing says."""
        return self._guess(trial, self._gain)

    def _guess(self, trial: str, gain: Callable[[int], float | None]) -> float | None:
        own = self._at_rungs.get(trial)
        if not own or self._ends.get(trial) == "failed":
            return None
        gained = gain(max(own))
        return None if gained is None else own[max(own)] + gained

    def _gain(self, samples: int) -> float | None:
        """Returns what the whole ones gained after a rung, in the median; None where none passed it."""
        rungs = self._at_rungs
        gains = [end - rungs[t][samples] for t, end in self.whole.items() if samples in rungs.get(t, {})]
        return statistics.median(gains) if gains else None

    def value(self, quality: float) -> float:
        """Returns the objective of a quality."""
        return self._sign * quality


class Model:
    """Chooses among configurations by the speed that the pick is expected to gain. The same calls choose the same."""

    def __init__(
        self,
        space: Space,
        names: Sequence[str],
        qualities: Qualities,
        speed: Callable[[Mapping[str, Any]], float | None],
        samples: int,
        seed: int,
        tolerance: float | str = 0.0,
        baseline: Baseline | None = None,
    ) -> None:
        """`speed` says how fast a configuration of the searched `names` will train, None where it does not fit.

        `samples` is the horizon of a training; `tolerance` and `baseline` are those of the pick.
        """
        self._coordinates = Coordinates(space, names)
        self._qualities, self._speed, self._samples, self._seed = qualities, speed, samples, seed
        self._tolerance = tolerance
        self._baseline = None if baseline is None else qualities.value(baseline.value)
        self._points: dict[str, Floats] = {}
        self._speeds: dict[str, float] = {}
        self._live: set[str] = set()

    def begun(self, trial: str, knobs: Mapping[str, Any], samples_per_s: float | None) -> None:
        """Takes a trial that is under way, and its speed as far as it is known."""
        self._points[trial] = self._coordinates.at(knobs)
        self._live.add(trial)
        self._speeds[trial] = samples_per_s or 0.0

    def ended(self, trial: str, knobs: Mapping[str, Any], samples_per_s: float | None) -> None:
        """Takes that a trial is no longer under way; `qualities` have what it came to."""
        self.begun(trial, knobs, samples_per_s)
        self._live.discard(trial)

    def choose(self, candidates: Sequence[Mapping[str, Any]]) -> int:
        """Returns the index of the candidate with the largest expected gain a second; 0 where too little is known."""
        known = self._qualities.known()
        speeds = np.array([self._speed(c) or 0.0 for c in candidates])
        usable = [i for i, speed in enumerate(speeds.tolist()) if speed > 0]
        if len(known) < ENOUGH or len(self._qualities.whole) < ENOUGH_WHOLE or not usable:
            return 0
        modelled = _best_and_newest(list(known), known)
        values = np.array([known[t] for t in modelled])
        surrogate = Surrogate(
            np.array([self._points[t] for t in modelled]), np.maximum(values, _floor(values)), self._seed + len(known)
        )
        trained = [t for t in (*modelled, *sorted(self._live)) if t in self._live or t in self._qualities.whole]
        points = [*(self._points[t] for t in trained), *(self._coordinates.at(candidates[i]) for i in usable)]
        drawn = surrogate.samples(np.array(points), JOINT_DRAWS)
        own = np.array([self._speeds[t] for t in trained])
        ends = [self._qualities.value(quality) for quality in self._qualities.whole.values()]
        tolerance = absolute(self._tolerance, ends, "max" if self._qualities.value(1.0) > 0 else "min")
        gains = expected_gains(drawn, own, speeds[usable], tolerance, self._baseline)
        scores = gains / (self._samples / speeds[usable] + OVERHEAD_S)
        return usable[int(np.argmax(scores))]


def expected_gains(
    drawn: Floats, trained_per_s: Floats, speeds: Floats, tolerance: float, baseline: float | None
) -> Floats:
    """Returns by how many samples a second each candidate is expected to be faster than the pick there is, shape (m,).

    `drawn` has qualities of shape (draws, n + m), the larger the better: those of n trained configurations, whose
    speeds are `trained_per_s`, and of m candidates. The baseline holds in the draws in which anything is above it.
    """
    best = drawn.max(axis=1)
    bar = best - tolerance
    if baseline is not None:
        bar = np.where(best > baseline, np.maximum(bar, np.nextafter(baseline, math.inf)), bar)
    admitted = drawn >= bar[:, None]
    count = len(trained_per_s)
    have = np.where(admitted[:, :count], trained_per_s, 0.0).max(axis=1, initial=0.0)
    gains = np.maximum(speeds[None, :] - have[:, None], 0.0) * admitted[:, count:]
    found: Floats = gains.mean(axis=0)
    return found


def _best_and_newest(trials: Sequence[str], known: Mapping[str, float]) -> list[str]:
    kept = set(sorted(trials, key=lambda t: -known[t])[: MODELLED // 2])
    kept |= set([t for t in reversed(trials) if t not in kept][: MODELLED - len(kept)])
    return [t for t in trials if t in kept]


def _floor(qualities: Floats) -> float:
    """Returns the quality below which it does not matter how bad: twice as far under the median as the best is over it.

    Trainings that diverged or learned nothing would otherwise be most of what the process tries to explain.
    """
    median, best = float(np.median(qualities)), float(qualities.max())
    return max(float(qualities.min()), median - 2.0 * (best - median) - 1e-12)
