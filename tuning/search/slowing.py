"""Trainings that slow down on their way, as where later samples are longer: probes and windows time their beginning."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from tuning.journal.run import History, Trial

SLOWER, LEAST_S = 3.0, 1.0
"""A training slows down if what follows its first rung takes so many times as long a sample, and so many seconds."""


@dataclass(frozen=True)
class Slowing:
    """A training that has `before_per_s` samples a second up to its first rung, after `samples`, and then fewer."""

    trial: str
    samples: int
    before_per_s: float
    after_per_s: float

    @property
    def times(self) -> float:
        """Returns how many times as long a later sample takes."""
        return self.before_per_s / self.after_per_s


def slowing(run: History) -> Slowing | None:
    """Returns the median training if it slows down, None if it does not or nothing is known."""
    found = sorted((one for trial in run.trials.values() if (one := _of(trial))), key=lambda one: one.times)
    middle = statistics.median_low([one.times for one in found]) if found else 0.0
    return next((one for one in found if one.times == middle and middle >= SLOWER), None)


def _of(trial: Trial) -> Slowing | None:
    """Returns the speeds of a training before and after the first rung of its last attempt; None if one is missing."""
    since, end = trial.starts[-1].seq if trial.starts else 0, trial.end
    first = next((rung for rung in trial.rungs if rung.seq > since), None)
    if (
        first is None
        or end is None
        or not (first.measured_samples_per_s and end.measured_samples_per_s and end.samples)
    ):
        return None
    samples, before_per_s = first.samples, first.measured_samples_per_s
    later_s = end.samples / end.measured_samples_per_s - samples / before_per_s
    if end.samples <= samples or later_s < LEAST_S:
        return None
    return Slowing(trial.id, samples, before_per_s, (end.samples - samples) / later_s)
