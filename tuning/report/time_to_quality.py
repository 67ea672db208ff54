"""How soon a training is as good as what is trained today: seconds until it has the reference's final quality."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tuning.journal.events import ConfirmedRecord

Curve = tuple[tuple[float, float], ...]
"""A training: (seconds of training, quality) at each evaluation, in the order of time."""


@dataclass(frozen=True)
class Reached:
    """By seed, the seconds of training after which a quality was reached, at least 0; None if it was not."""

    by_seed: Mapping[int, float | None]

    @property
    def known_s(self) -> tuple[float, ...]:
        """Returns the seconds of the seeds that reached it, the least first."""
        return tuple(sorted(seconds for seconds in self.by_seed.values() if seconds is not None))

    @property
    def missed(self) -> int:
        """Returns on how many seeds it was not reached."""
        return len(self.by_seed) - len(self.known_s)

    @property
    def median_s(self) -> float | None:
        """Returns the median over all seeds, None if half of them or more did not reach it."""
        middle = statistics.median([*self.known_s, *[math.inf] * self.missed]) if self.by_seed else math.inf
        return middle if math.isfinite(middle) else None


@dataclass(frozen=True)
class TimeToQuality:
    """How soon a configuration, and the reference, reach the reference's final quality, on the seeds that both have."""

    own: Reached
    reference: Reached


def seconds_to(curve: Curve, target: float, mode: str) -> float | None:
    """Returns the seconds of training until a quality is first reached, None if it is not; `mode` is min or max.

    Between two evaluations the quality is taken to change evenly; before the first nothing is known of it.
    """
    sign = -1.0 if mode == "min" else 1.0
    reached = next((n for n, (_, value) in enumerate(curve) if sign * value >= sign * target), None)
    if reached is None or reached == 0:
        return None if reached is None else curve[0][0]
    (start_s, start), (end_s, end) = curve[reached - 1 : reached + 1]
    return start_s + (end_s - start_s) * ((target - start) / (end - start))


def time_to_quality(own: Mapping[int, Curve], reference: Mapping[int, Curve], mode: str) -> TimeToQuality | None:
    """Returns how soon each reaches the reference's final quality of the same seed; None without a common seed."""
    seeds = sorted(seed for seed in own.keys() & reference.keys() if own[seed] and reference[seed])
    if not seeds:
        return None
    targets = {seed: reference[seed][-1][1] for seed in seeds}
    both = ({seed: seconds_to(of[seed], targets[seed], mode) for seed in seeds} for of in (own, reference))
    return TimeToQuality(*(Reached(by_seed) for by_seed in both))


def curves(trainings: Iterable[ConfirmedRecord], objective: str, per_s: float | None = None) -> dict[int, Curve]:
    """Returns by seed the curves of trainings that came to their end, as `confirmed` records have them.

    Their seconds are those at `per_s` samples a second, the speed that was measured in turns, if it is given: the pace
    of a machine changes between two trainings.
    """
    found = {}
    for record in trainings:
        slower = record.samples_per_s / per_s if record.samples_per_s and per_s else 1.0
        seen = [(at_s * slower, values.get(objective)) for at_s, values in record.curve]
        found[record.seed] = tuple(sorted((at_s, value) for at_s, value in seen if value is not None))
    return {seed: curve for seed, curve in found.items() if curve}


def mean_curve(found: Iterable[Curve]) -> Curve:
    """Returns the mean of trainings over their evaluations, as far as all of them have them."""
    return tuple(
        (statistics.fmean(s for s, _ in points), statistics.fmean(value for _, value in points))
        for points in zip(*found, strict=False)
    )
