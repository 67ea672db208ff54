"""How far a measured figure may be trusted: mean of a throughput, range of the next run's quality, gain with spread.

Student's t throughout: with 3 to 8 windows or 2 to 5 seeds a bootstrap of the sample is too narrow (it cannot draw
what it has not seen), and it would need a seed of its own. All intervals are 95 %.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_Z_975 = statistics.NormalDist().inv_cdf(0.975)


def t_975(degrees: int) -> float:
    """Returns the 97.5 % quantile of Student's t, of one degree of freedom or more."""
    from scipy.special import stdtrit  # only here: importing it takes longer than all that a run says first

    return float(stdtrit(degrees, 0.975))


def mean_half_width(values: Sequence[float]) -> float | None:
    """Returns half the width of Student's 95 % interval of the mean of independent values, None below two."""
    if len(values) < 2:
        return None
    return t_975(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Spread:
    """The spread of paired differences: their standard deviation, and how many degrees of freedom it has."""

    deviation: float
    degrees: int

    def half_width(self, count: int) -> float:
        """Returns half the width of the 95 % interval of the mean of so many differences."""
        return t_975(self.degrees) * self.deviation / math.sqrt(count)


@dataclass(frozen=True)
class Throughput:
    """Samples a second of one configuration, over short windows or over whole trainings.

    `half_width` is that of the 95 % interval of their mean, None below two.
    """

    median: float
    half_width: float | None
    windows: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Returns the mean, which the interval of `half_width` is of."""
        return statistics.fmean(self.windows)


@dataclass(frozen=True)
class Quality:
    """An objective of a configuration: its mean, and the range in which a new run is expected, with 95 %.

    `low` and `high` are None if there is no ground for them; `method` says in words what they rest on. `confirmed`
    is False for a value of the search itself, which was chosen for being good and so is likely to flatter.
    """

    mean: float
    low: float | None
    high: float | None
    by_seed: Mapping[int, float]
    method: str
    confirmed: bool = True


class Pair(NamedTuple):
    """The samples/s of two configurations that were measured side by side, and for how many seconds that counts."""

    ours: float
    theirs: float
    weight_s: float = 1.0


@dataclass(frozen=True)
class Gain:
    """How many times faster `of` is than `over`: the geometric mean over what was measured of both, side by side.

    These are `rounds` of windows in turns, and `trainings` on the same seeds. `low` and `high` are the ends of its 95 %
    interval, None below two of them. If both are 0, the ratio is of two separate figures; `grounds` says of what.
    """

    of: str
    over: str
    ratio: float
    low: float | None
    high: float | None
    rounds: int
    grounds: str = ""
    trainings: int = 0

    @property
    def is_told(self) -> bool:
        """Returns whether the two are told apart: False if the interval holds 1, or if there is none."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high


def throughput(windows: Sequence[float]) -> Throughput | None:
    """Returns median, mean and interval of the windows, or None where there are none."""
    if not windows:
        return None
    return Throughput(statistics.median(windows), mean_half_width(windows), tuple(windows))


def quality(
    by_seed: Mapping[int, float],
    *,
    proportion_of: int | None = None,
    most: float | None = None,
    confirmed: bool = True,
) -> Quality:
    """Returns the mean over the seeds and the interval of one new run.

    Two seeds and more: Student's prediction interval, mean +- t s sqrt(1 + 1/n), which holds the chance of training
    and not that of the validation set. With one seed: Wilson's interval of a share of `proportion_of` samples, which
    holds only the latter; none if the objective is not a share of samples. If all values are within 0 and `most`, so is
    the interval. Raises ValueError without a value.
    """
    values = list(by_seed.values())
    if not all(0.0 <= value <= 1.0 for value in values):
        proportion_of = None  # in percent, or no share at all
    mean, count = statistics.fmean(values), len(values)
    low: float | None = None
    high: float | None = None
    method = "one seed, no interval"
    if count > 1:
        reach = t_975(count - 1) * statistics.stdev(values) * math.sqrt(1 + 1 / count)
        low, high = mean - reach, mean + reach
        method = f"95 % prediction interval of one new run, from {count} seeds"
    elif proportion_of:
        low, high = _wilson(mean, proportion_of)
        method = f"95 % binomial interval of {proportion_of} validation samples, one seed"
    if most is not None and low is not None and high is not None and all(0.0 <= value <= most for value in values):
        low, high = max(low, 0.0), min(high, most)
    return Quality(mean, low, high, dict(by_seed), method, confirmed)


def gain(of: str, over: str, rounds: Sequence[Pair], trainings: Sequence[Pair] = ()) -> Gain | None:
    """Returns how many times faster `of` is by rounds of windows and by trainings; None without a pair.

    Each pair counts by its seconds. The interval is Student's, of the weighted mean of the logarithms.
    """
    rounds, trainings = ([p for p in own if min(p.ours, p.theirs, p.weight_s) > 0] for own in (rounds, trainings))
    pairs = [*rounds, *trainings]
    if not pairs:
        return None
    logs, weights = [math.log(p.ours / p.theirs) for p in pairs], [p.weight_s for p in pairs]
    mean, low, high = statistics.fmean(logs, weights), None, None
    if (degrees := len(pairs) - 1) > 0:
        squares = sum(w * (x - mean) ** 2 for x, w in zip(logs, weights, strict=True))
        reach = min(50.0, t_975(degrees) * math.sqrt(squares / degrees / sum(weights)))
        low, high = math.exp(mean - reach), math.exp(mean + reach)
    return Gain(of, over, math.exp(mean), low, high, len(rounds), trainings=len(trainings))


def _wilson(share: float, count: int) -> tuple[float, float]:
    z2 = _Z_975**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    reach = _Z_975 * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    return centre - reach, centre + reach
