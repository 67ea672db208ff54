"""How long a batch takes, from the micro-steps of one probe.

A batch takes the time of its micro-steps, of one optimiser step, and its share of what the beginning of a pass takes,
such as loader processes that start anew in each: 0.04 s on two idle cores, 0.25 s and more where each opens files.
Micro-steps differ by the work in them, such as the positions of a padded batch, which is known for the whole epoch
before anything runs: in nli it is 15 to 20 % of a micro-step's time, and 3 to 6 % are left once a line through (work,
seconds) is taken out. So the mean is read off that line at the epoch's mean work (regression estimator: Cochran,
"Sampling techniques", chapter 7), which also takes out that the first batches of an epoch may be longer than the rest.

A probe has no interval: two probes of one configuration differ by more than its own steps show, as a machine's pace
changes from minute to minute. Whoever compares configurations closely measures them in turns (`search.confirm`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SETTLE_S = 0.5
"""The beginning of a window that is not measured (`workers.session`)."""
LEAST_FITTED = 8
"""Micro-steps below which no line is fitted: its slope would be that of the machine's noise."""
HOPELESS_FRAC = 0.75
"""A probe that is below this share of the fastest so far is not measured further."""
End = Literal["", "cannot win", "time"]


@dataclass(frozen=True)
class MicroStep:
    """A micro-step: its work in any unit, its seconds, and those of the optimiser step that ended its batch."""

    work: float
    seconds: float
    optimizer_s: float | None = None
    """None where the batch went on."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a micro-step of mean work, of an optimiser step, and of a pass of so many samples beside its steps."""

    micro_step_s: float
    optimizer_step_s: float
    pass_s: float = 0.0
    pass_samples: int = 0

    def samples_per_s(self, batch_size: int, micro_batch_size: int) -> float:
        """Returns training samples a second at this batch size."""
        seconds = math.ceil(batch_size / micro_batch_size) * self.micro_step_s + self.optimizer_step_s
        seconds += self.pass_s * batch_size / self.pass_samples if self.pass_samples else 0.0
        return batch_size / seconds if seconds > 0 else 0.0


def estimate(steps: Sequence[MicroStep], mean_work: float) -> Estimate:
    """Returns what the micro-steps tell of a batch of micro-steps of `mean_work`; raises ValueError for none."""
    work = [s.work for s in steps]
    optimizer = [s.optimizer_s for s in steps if s.optimizer_s is not None]
    # Beside other work a tenth of pairs of probes had means 1.39 and 1.45 times apart (headpose, temporal), medians
    # 1.14 and 1.26. What some steps took more stays in the batch: what an optimiser does every so often is part of it.
    optimizer_step_s = statistics.median(optimizer) if optimizer else 0.0
    more_s = sum(seconds - optimizer_step_s for seconds in optimizer) / len(steps)
    middle, mean_s = statistics.fmean(work), statistics.fmean(s.seconds for s in steps) + more_s
    squares = sum((w - middle) ** 2 for w in work)
    is_fitted = len(steps) >= LEAST_FITTED and squares > 0
    slope = sum((s.work - middle) * s.seconds for s in steps) / squares if is_fitted else 0.0
    slope = max(0.0, slope)  # more work takes no less time: else it is noise that would be extrapolated
    return Estimate(max(mean_s + slope * (mean_work - middle), 0.1 * mean_s), optimizer_step_s)


def at_rate(samples_per_s: float, batch_size: int, micro_batch_size: int) -> Estimate:
    """Returns what has so many samples a second at this batch size, all its time being that of micro-steps."""
    return Estimate(batch_size / samples_per_s / math.ceil(batch_size / micro_batch_size), 0.0)


def once_a_batch(steps: Sequence[MicroStep]) -> list[MicroStep]:
    """Returns the micro-steps, what those that end a batch take more than others of their work moved to the optimiser.

    Several devices that train together average gradients then. Unchanged if none or all of the steps end a batch.
    """
    others, last = ([s for s in steps if (s.optimizer_s is None) == goes_on] for goes_on in (True, False))
    if not (others and last):
        return list(steps)
    pace = sum(s.seconds for s in others) / sum(s.work for s in others)
    more_s = max(0.0, statistics.fmean(s.seconds for s in last) - pace * statistics.fmean(s.work for s in last))
    return [
        s if s.optimizer_s is None else MicroStep(s.work, s.seconds - more_s, s.optimizer_s + more_s) for s in steps
    ]


def ends(samples_per_s: float, fastest_samples_per_s: float, *, spent_s: float, window_s: float, time_s: float) -> End:
    """Returns why a probe ends here, or "" where another window of `window_s` seconds fits in its `time_s`."""
    if samples_per_s < HOPELESS_FRAC * fastest_samples_per_s:
        return "cannot win"
    return "time" if spent_s + window_s > time_s else ""
