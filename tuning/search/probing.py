"""How well a probe knows its configuration's speed by now, and whether it goes on.

A batch takes the time of its micro-steps and of one optimiser step. Micro-steps differ by the work in them, such as the
positions of a padded batch, which is known for the whole epoch before anything runs: in nli it is 15 to 20 % of a
micro-step's time, and 3 to 6 % are left once a line through (work, seconds) is taken out. So the mean is read off that
line at the epoch's mean work (regression estimator: Cochran, "Sampling techniques", chapter 7), which also takes out
that the first batches of an epoch may be longer than the rest.

What the machine does comes in runs, so the interval is that of batch means: neighbours are joined to at most `GROUPS`
groups, Student's t has their degrees of freedom, and the interval is widened where neighbouring groups are still alike.
Of what changes more slowly than a probe lasts no probe knows.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tuning.stats.uncertainty import t_975

GROUPS = 10
"""Groups of neighbours at most: t is then 2.26, not far from the 1.96 of many, and a group is a tenth of a probe."""
LEAST_LAG, MOST_LAG = 0.2, 0.8
"""Correlations of neighbouring groups that count: of ten independent ones every seventh comes out above the first."""
LEAST_DEGREES = 3
"""Degrees of freedom below which there is no interval: with 1 or 2 it is too wide to end anything."""
LEAST_FITTED = 8
"""Micro-steps below which no line is fitted: its slope would be that of the machine's noise."""
LEAST_S = 0.8
"""Seconds measured before the interval may end a probe: a slow moment of the machine lasts about as long."""
HOPELESS_FRAC = 0.75
"""A probe whose first window is below this share of the best so far is not measured further."""
BEHIND_FRAC = 0.5
"""Share of its time that a probe has while it is behind the best: only who leads needs a narrow interval."""
End = Literal["", "interval", "cannot win", "time"]


@dataclass(frozen=True)
class MicroStep:
    """One micro-step: its work in any unit, its seconds, and those of the optimiser step that ended its batch."""

    work: float
    seconds: float
    optimizer_s: float | None = None
    """None where the batch went on."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a micro-step of mean work and of an optimiser step.

    `spread_frac` is the half-width of the 95 % interval of a batch's time over that time, 1 where there is none yet.
    """

    micro_step_s: float
    optimizer_step_s: float
    spread_frac: float

    def samples_per_s(self, batch_size: int, micro_batch_size: int) -> float:
        """Returns training samples a second at this batch size; `Probed.at_batch_size` gives the same."""
        seconds = math.ceil(batch_size / micro_batch_size) * self.micro_step_s + self.optimizer_step_s
        return batch_size / seconds if seconds > 0 else 0.0


def estimate(steps: Sequence[MicroStep], mean_work: float) -> Estimate:
    """Returns what the micro-steps tell of a batch of micro-steps of `mean_work`; raises ValueError for none."""
    if not steps:
        raise ValueError("an estimate needs one micro-step at least, got 0")
    count, work = len(steps), [s.work for s in steps]
    taken = [s.seconds for s in steps]
    optimizer = [s.optimizer_s for s in steps if s.optimizer_s is not None]
    optimizer_step_s = statistics.fmean(optimizer) if optimizer else 0.0
    middle, mean_s = statistics.fmean(work), statistics.fmean(taken)
    squares = sum((w - middle) ** 2 for w in work)
    fitted = count >= LEAST_FITTED and squares > 0
    slope = sum((w - middle) * s for w, s in zip(work, taken, strict=True)) / squares if fitted else 0.0
    slope = max(0.0, slope)  # more work takes no less time: else it is noise that would be extrapolated
    micro_step_s = max(mean_s + slope * (mean_work - middle), 0.1 * mean_s)
    residuals = [
        s.seconds
        - mean_s
        - slope * (s.work - middle)
        + (0.0 if s.optimizer_s is None else s.optimizer_s - optimizer_step_s)
        for s in steps
    ]
    groups = min(GROUPS, count)
    degrees = groups - 1 - int(fitted)
    batch_s = micro_step_s + optimizer_step_s * len(optimizer) / count
    if degrees < LEAST_DEGREES or batch_s <= 0:
        return Estimate(micro_step_s, optimizer_step_s, 1.0)
    cuts = [number * count // groups for number in range(groups + 1)]
    sums = [(sum(residuals[a:b]), b - a) for a, b in itertools.pairwise(cuts)]
    variance = sum(total**2 / size for total, size in sums) / degrees
    variance *= _inflation([total / size for total, size in sums])
    lever = (mean_work - middle) ** 2 / squares if fitted else 0.0
    half_s = t_975(degrees) * math.sqrt(variance * (1 / count + lever))
    return Estimate(micro_step_s, optimizer_step_s, min(1.0, half_s / batch_s))


def _inflation(means: Sequence[float]) -> float:
    """Returns how many times the variance of their mean is that of independent ones, by their correlation at lag 1."""
    squares = sum(m * m for m in means)
    lag = sum(a * b for a, b in itertools.pairwise(means)) / squares if squares > 0 else 0.0
    lag = 0.0 if lag < LEAST_LAG else min(lag, MOST_LAG)
    return (1 + lag) / (1 - lag)


@dataclass(frozen=True)
class Progress:
    """A probe under way: samples a second, their interval, seconds since it began, of all windows, of the longest."""

    samples_per_s: float
    spread_frac: float
    spent_s: float
    measured_s: float
    longest_s: float


def ends(progress: Progress, time_s: float, spread_frac: float, best_samples_per_s: float) -> End:
    """Returns why a probe ends here, or "" where another window is worth its time.

    That window has to end within `time_s`, or within `BEHIND_FRAC` of it while the probe is behind the best.
    """
    own = progress
    if own.samples_per_s < HOPELESS_FRAC * best_samples_per_s:
        return "cannot win"
    if own.measured_s >= LEAST_S:
        if own.samples_per_s * (1 + own.spread_frac) < best_samples_per_s:
            return "cannot win"
        if own.spread_frac <= spread_frac:
            return "interval"
    limit_s = time_s if own.samples_per_s >= best_samples_per_s else BEHIND_FRAC * time_s
    return "time" if own.spent_s + own.longest_s > limit_s else ""
