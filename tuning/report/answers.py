"""The configurations to choose from, each beside what is trained today: speed, quality on the same seeds, and time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tuning.report.named import PICKS, Named
from tuning.report.time_to_quality import TimeToQuality, time_to_quality
from tuning.search.rule import ROUNDING
from tuning.stats.uncertainty import Gain, Spread, mean_half_width


@dataclass(frozen=True)
class BesideToday:
    """A quality and that of the reference: means over the same `seeds`, in the objective's own unit.

    `half_width` is that of the 95 % interval of the mean difference, None if too few seeds tell it. Without a common
    seed `seeds` is 0, and the means are of other ones. `is_fresh`: the seeds are not the search's, by which the
    configuration was chosen. `verdict` is unknown if nothing tells how much seeds differ.
    """

    own: float
    reference: float
    half_width: float | None
    seeds: int
    is_fresh: bool
    verdict: Literal["same", "better", "worse", "unknown"]

    @property
    def difference(self) -> float:
        """Returns by how much the quality is larger than the reference's, the better or not."""
        return self.own - self.reference


@dataclass(frozen=True)
class AnswerView:
    """A configuration to choose: its name among those of `PICKS`, and what it has over the reference.

    None of speed, quality or time if it was not measured of both.
    """

    name: str
    gain: Gain | None
    quality: BesideToday | None
    time: TimeToQuality | None


def answers(
    named: Mapping[str, Named],
    reference: Named | None,
    gains: Sequence[Gain],
    objective: tuple[str, str],
    spread: Spread | None,
) -> dict[str, AnswerView]:
    """Returns the pick, the best quality at no less than today's speed, and the best quality, by name.

    An answer no better than the reference or an earlier one is left out. `objective` is its name and mode; `spread` is
    what two trainings differ by from seed to seed, None if not known.
    """
    found, sign = dict[str, AnswerView](), -1.0 if objective[1] == "min" else 1.0
    for name in PICKS:
        one, earlier = named.get(name), [named[other] for other in found]
        if one is None or one.trial in [other.trial for other in earlier]:
            continue
        quality = None if reference is None else beside(one, reference, objective, spread)
        over = [quality, *(beside(one, other, objective, None) for other in earlier)]
        if found and any(own is not None and sign * own.difference <= ROUNDING for own in over):
            continue
        gain = next((g for g in gains if reference and (g.of, g.over) == (name, reference.name)), None)
        time = None if reference is None else time_to_quality(one.curves, reference.curves, objective[1])
        found[name] = AnswerView(name, gain, quality, time)
    return found


def beside(one: Named, reference: Named, objective: tuple[str, str], spread: Spread | None) -> BesideToday | None:
    """Returns the quality of a configuration beside the reference's, None if one of them is not known.

    It is better or worse if the 95 % interval of the difference has no 0. The interval is made of what all pairs of the
    run vary by, else of these pairs if there are three: two may agree by chance.
    """
    mine, theirs = (of.quality.get(objective[0]) for of in (one, reference))
    if mine is None or theirs is None:
        return None
    is_fresh = mine.confirmed and theirs.confirmed
    seeds = sorted(mine.by_seed.keys() & theirs.by_seed.keys()) if mine.confirmed == theirs.confirmed else []
    if not seeds:
        return BesideToday(mine.mean, theirs.mean, None, 0, is_fresh, "unknown")
    pairs = [(mine.by_seed[seed], theirs.by_seed[seed]) for seed in seeds]
    own, today = (statistics.fmean(values) for values in zip(*pairs, strict=True))
    reach = mean_half_width([a - b for a, b in pairs]) if len(pairs) > 2 else None
    reach = spread.half_width(len(pairs)) if spread is not None and spread.degrees > 1 else reach
    larger = own - today
    verdict: Literal["same", "better", "worse", "unknown"]
    if abs(larger) <= max(reach or 0.0, ROUNDING):
        verdict = "same"
    elif reach is None:
        verdict = "unknown"
    else:
        verdict = "better" if (larger > 0) == (objective[1] == "max") else "worse"
    return BesideToday(own, today, reach, len(seeds), is_fresh, verdict)
