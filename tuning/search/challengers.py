"""The rule put again to what was confirmed: who could still take the pick's place, and who has it in the end.

The best of many values with one seed is too good on average, so the pick's own values on fresh seeds lower the bar, and
a faster configuration that the rule had left out may be admitted by it; or another sets a bar beside which the pick
itself is not. Whoever could change the pick is trained on the same seeds. Everything here is a cost: the smaller, the
better.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tuning.search.rule import ROUNDING, Rule
from tuning.stats.uncertainty import t_975

CHANCE = 0.1
"""A rival that is less likely than this to be admitted is not trained, or not on a further seed."""
FASTER = 1.03
"""How much faster than the pick a rival has to be: two probes tell no less apart."""


@dataclass(frozen=True)
class Standing:
    """A trial that ran to its end: its cost with the search's seed, and by each fresh seed that it was trained on.

    `samples_per_s` is the speed the search judged it by, `trained_per_s` the median of its confirming trainings;
    `failed` is True where one of those did not come to its end.
    """

    id: str
    samples_per_s: float
    searched: float
    by_seed: Mapping[int, float] = field(default_factory=dict)
    trained_per_s: float | None = None
    failed: bool = False

    def confirmed(self, seeds: Sequence[int]) -> bool:
        """Returns whether it was trained on every seed."""
        return not self.failed and all(seed in self.by_seed for seed in seeds)

    @property
    def mean(self) -> float:
        """Returns its mean cost over fresh seeds; raises StatisticsError without one."""
        return statistics.fmean(self.by_seed.values())


@dataclass(frozen=True)
class Selection:
    """Who the rule picks of those confirmed, the cost that sets the bar, and whose it is.

    `means` are the mean costs of those confirmed, the fastest first; `samples_per_s` is the picked one's. `difference`
    is how much the picked one costs more than the best confirmed, over the same seeds; `half_width` that of its 95 %
    interval, None below two seeds. The bar may be that of one that was not confirmed, made worse by `optimism`.
    """

    best: str
    most_accurate: str
    bar: float
    bar_of: str
    difference: float
    half_width: float | None
    optimism: float
    means: Mapping[str, float]
    samples_per_s: float

    def sentence(self, first: str, rule: Rule, seeds: int) -> str:
        """Returns the rule in words; `first` is the pick by one seed, `seeds` are how many fresh ones there were."""
        mean = {trial: f"{rule.sign * cost:.4g}" for trial, cost in self.means.items()}
        over = "a fresh seed" if seeds == 1 else f"{seeds} fresh seeds"
        if len(self.means) == 1:
            return f"confirmed on {over}: {mean[self.best]}"
        reach = f" ± {self.half_width:.2g}" if self.half_width is not None and self.best != self.bar_of else ""
        against = f"{mean[self.best]} against {rule.sign * self.bar:.4g}"
        within = rule.words(self.means[self.best], self.means.values(), self.bar, "the best")
        asked = f"mean {rule.objective} is {within}"
        said = f"of {len(self.means)} confirmed on {over} the fastest whose {asked}: {against}"
        said += f" (a difference of {self.difference:.2g}{reach})" if reach else ""
        if self.bar_of not in self.means:
            said += f", which is {self.bar_of}'s one value made worse by the {self.optimism:.2g} that the pick lost"
        return f"{said}, at {self.samples_per_s:.4g} samples/s" + (
            f"; by one seed it was {first}, which confirmed has {mean[first]}" if self.best != first else ""
        )


@dataclass(frozen=True)
class Challenger:
    """Who could take the pick's place: the probability, and about how long training it on the seeds left takes."""

    id: str
    chance: float
    seconds: float


def spread(standings: Sequence[Standing], tolerance: float) -> float:
    """Returns the standard deviation of one configuration's cost over seeds, pooled over those confirmed.

    Two or three seeds alone say little of it: the tolerance counts as the deviation of one seed more.
    """
    squares, degrees = tolerance**2, 1 if tolerance else 0
    for one in standings:
        if len(one.by_seed) > 1:
            squares += sum((cost - one.mean) ** 2 for cost in one.by_seed.values())
            degrees += len(one.by_seed) - 1
    return math.sqrt(squares / degrees) if degrees else 0.0


def settle(standings: Sequence[Standing], first: str, seeds: Sequence[int], rule: Rule) -> Selection | None:
    """Returns the fastest confirmed one that the rule admits beside the bar, or None where nothing was confirmed.

    The bar is the least mean of those confirmed; or the cost of one that was not, once it is made worse by as much as
    the `first` pick lost on fresh seeds. Where nobody is admitted beside what is only hoped for, the tolerance decides
    alone, and else it is the most accurate one of those confirmed.
    """
    done = [one for one in standings if one.confirmed(seeds)]
    if not done:
        return None
    optimism = max([0.0, *(one.mean - one.searched for one in done if one.id == first)])
    hoped = [(one.searched + optimism, one.id) for one in standings if not one.by_seed and not one.failed]
    accurate = min(done, key=lambda one: (one.mean, -_speed(one)))
    bar, bar_of = min([(accurate.mean, accurate.id), *hoped], key=lambda pair: pair[0])
    admitted = [one for one in done if rule.admits(one.mean, bar)]
    within = admitted or [one for one in done if rule.near(one.mean, bar)] or [accurate]
    best = min(within, key=lambda one: (-_speed(one), one.mean))
    differences = [best.by_seed[seed] - accurate.by_seed[seed] for seed in seeds]
    half_width = None
    if len(seeds) > 1:
        half_width = t_975(len(seeds) - 1) * statistics.stdev(differences) / math.sqrt(len(seeds))
    return Selection(
        best=best.id,
        most_accurate=bar_of,
        bar=bar,
        bar_of=bar_of,
        difference=statistics.fmean(differences),
        half_width=half_width,
        optimism=optimism,
        means={one.id: one.mean for one in sorted(done, key=lambda one: -_speed(one))},
        samples_per_s=_speed(best),
    )


def rivals(
    standings: Sequence[Standing], selection: Selection, seeds: Sequence[int], rule: Rule, seconds: Mapping[str, float]
) -> list[Challenger]:
    """Returns who could change the pick, with a probability of `CHANCE` at least, in the order to train them.

    First who was most accurate of those not trained again, where the pick may not be admitted beside it: with the bar
    too low, what follows would be let in wrongly. Then who is faster by more than probes err and may be admitted, the
    largest expected gain a second first: the logarithm of how many times faster, times the probability. `seconds` has
    about what one seed takes, by id.
    """
    current = next(one for one in standings if one.id == selection.best)
    reference = min((one for one in standings if one.confirmed(seeds)), key=lambda one: one.mean)
    deviation = spread(standings, rule.tolerance)
    guard = _guard(standings, selection, current, rule, deviation)
    found = []
    for one in standings:
        if one.failed or one.confirmed(seeds):
            continue
        left = [seed for seed in seeds if seed not in one.by_seed]
        needed_s = max(seconds[one.id] * len(left), 1e-9)
        if guard is not None and one.id == guard[0]:
            found.append((math.inf, Challenger(one.id, guard[1], needed_s)))
        elif one.samples_per_s > FASTER * current.samples_per_s:
            probability = chance(one, reference, selection.bar, rule, deviation)
            gain = probability * math.log(one.samples_per_s / current.samples_per_s)
            if probability >= CHANCE:
                found.append((gain / needed_s, Challenger(one.id, probability, needed_s)))
    return [rival for _, rival in sorted(found, key=lambda pair: (-pair[0], pair[1].id))]


def _guard(
    standings: Sequence[Standing], selection: Selection, current: Standing, rule: Rule, deviation: float
) -> tuple[str, float] | None:
    """Returns who may set a bar beside which the pick is not admitted, and how likely that is; None for nobody.

    A pick that is no better than the baseline is not, once anything is. What has some of its seeds goes on until it is
    unlikely.
    """
    open_ = [one for one in standings if not one.failed and one.id not in selection.means]
    if not open_:
        return None
    cost = {one.id: one.mean if one.by_seed else one.searched + selection.optimism for one in open_}
    one = min(open_, key=lambda o: (cost[o.id], o.id))
    own, picks = (deviation / math.sqrt(max(1, len(standing.by_seed))) for standing in (one, current))
    probability = _below(cost[one.id], current.mean - rule.tolerance, math.hypot(own, picks))
    if current.mean >= rule.baseline_cost:  # which is no mean of some seeds
        probability = max(probability, _below(cost[one.id], rule.baseline_cost, own))
    return (one.id, probability) if probability >= CHANCE else None


def chance(one: Standing, reference: Standing, bar: float, rule: Rule, deviation: float) -> float:
    """Returns the probability, 0 to 1, that a trial's true cost is admitted beside the bar.

    Trained on fresh seeds already, it is compared with the reference over those seeds; else its one value with the bar.
    """
    common = [seed for seed in one.by_seed if seed in reference.by_seed]
    if common:
        over = statistics.fmean(one.by_seed[seed] - reference.by_seed[seed] for seed in common) + reference.mean - bar
        error = deviation * math.sqrt(1 / len(common) + 1 / len(reference.by_seed))
    else:
        over = one.searched - bar
        error = deviation * math.sqrt(1 + 1 / len(reference.by_seed))
    if error <= 0:
        return float(over <= rule.over(bar) + ROUNDING)
    return statistics.NormalDist().cdf((rule.over(bar) - over) / error)


def _below(cost: float, bar: float, error: float) -> float:
    """Returns the probability that a cost known with such an error is below a bar."""
    return statistics.NormalDist().cdf((bar - cost) / error) if error > 0 else float(bar - cost > ROUNDING)


def _speed(one: Standing) -> float:
    return one.trained_per_s or one.samples_per_s
