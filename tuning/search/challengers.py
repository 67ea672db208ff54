"""Who is trained again beside the pick, and who the rule admits of those in the end.

The best of many values with one seed is too good on average, so the pick by one seed is one of several that could be
it. The fastest of these are trained on the same fresh seeds, and the rule is put again to the means. Everything here is
a cost: the smaller, the better.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tuning.search.rule import Rule
from tuning.stats.uncertainty import mean_half_width

NEAR_TOLERANCES = 2.0
"""A trial is a challenger within so many tolerances of the best value seen: one seed flatters by about one of them."""


@dataclass(frozen=True)
class Entrant:
    """A trial that ran to its end: its speed and cost in the search, and its cost by each fresh seed it was trained on.

    `failed` is True where one of those trainings did not come to its end.
    """

    id: str
    samples_per_s: float
    searched: float
    by_seed: Mapping[int, float] = field(default_factory=dict)
    failed: bool = False

    def repeats(self, rule: Rule) -> bool:
        """Returns whether its fresh seeds, if it was trained on any, bear out what it came to in the search."""
        return not self.by_seed or rule.repeats(self.searched, statistics.fmean(self.by_seed.values()))


@dataclass(frozen=True)
class Selection:
    """Who the rule admits of those confirmed on the same `seeds`, the fastest first, and whose mean sets the bar.

    `means` are the mean costs of all confirmed, the fastest first. `best` is the fastest admitted until speeds were
    measured in turns. `difference` is how much it costs more than the bar over the same seeds, `half_width` that of its
    95 % interval, None below two seeds.
    """

    admitted: tuple[str, ...]
    best: str
    bar: float
    bar_of: str
    difference: float
    half_width: float | None
    means: Mapping[str, float]
    seeds: tuple[int, ...]

    def of(self, best: str, found: Sequence[Entrant]) -> Selection:
        """Returns the selection with another of those admitted as the best."""
        by_seed = {one.id: one.by_seed for one in found}
        differences = [by_seed[best][seed] - by_seed[self.bar_of][seed] for seed in self.seeds]
        difference, half_width = statistics.fmean(differences), mean_half_width(differences)
        return dataclasses.replace(self, best=best, difference=difference, half_width=half_width)

    def sentence(self, first: str, rule: Rule, *, is_fresh: bool = True) -> str:
        """Returns the rule in words; `first` is the pick by one seed.

        The seeds are not fresh where a loop of one's own sets one itself.
        """
        mean = {trial: f"{rule.sign * cost:.4g}" for trial, cost in self.means.items()}
        again = f"confirmed on {'a fresh seed' if len(self.seeds) == 1 else f'{len(self.seeds)} fresh seeds'}"
        again = again if is_fresh else "trained again on the seed that train(run) sets itself"
        if len(self.means) == 1:
            return f"{again}: {mean[self.best]}"
        within = rule.words(self.means[self.best], self.means.values(), self.bar, "the best")
        said = f"of {len(self.means)} {again} the fastest whose mean {rule.objective} is {within}"
        said += f": {mean[self.best]} against {rule.sign * self.bar:.4g}"
        if self.half_width is not None and self.best != self.bar_of:
            said += f" (a difference of {self.difference:.2g} ± {self.half_width:.2g})"
        if self.best == first or first not in mean:
            return said
        is_left = first not in self.admitted and rule.admits(self.means[first], self.bar)
        less = ", much less than in the search" * is_left
        return f"{said}; by one seed it was {first}, which confirmed has {mean[first]}{less}"


def challengers(found: Sequence[Entrant], first: str, rule: Rule, top: int) -> list[str]:
    """Returns whom to train again, at most `top`: the first pick, and who may take its place.

    Those are the fastest within `NEAR_TOLERANCES` of the best cost seen; the last place is the most accurate one's,
    which may set a bar that the pick does not reach.
    """
    usable = [one for one in found if not one.failed]
    least = min(one.searched for one in usable)
    near = [one for one in usable if one.searched - least <= NEAR_TOLERANCES * rule.tolerance or one.id == first]
    accurate = min(usable, key=lambda one: (one.searched, -one.samples_per_s)).id
    by_speed = [one.id for one in sorted(near, key=lambda one: (-one.samples_per_s, one.searched))]
    others = [trial for trial in by_speed if trial not in (first, accurate)]
    last = [] if accurate == first else [accurate]
    chosen = [first, *others[: max(0, top - 1 - len(last))], *last]
    return chosen[:top]


def settle(found: Sequence[Entrant], rule: Rule) -> Selection | None:
    """Returns the selection over those trained on the most seeds, None where nothing was confirmed.

    Where the best of them came to much less than in the search, or is no better than the baseline and another is, it is
    over those that hold, as long as the rule admits one of them beside it; these may have been trained later, on fewer
    seeds. Of those admitted only who holds stays, as long as one does.
    """
    whole = _settled(found, rule)
    if whole is None:
        return None
    steadily = [one for one in found if one.repeats(rule)]
    trained = [one for one in steadily if one.by_seed and not one.failed]
    better = [one for one in trained if statistics.fmean(one.by_seed.values()) < rule.baseline_cost]
    selection, steady_ids = whole, {one.id for one in steadily}
    if whole.best not in steady_ids or (better and whole.means[whole.best] >= rule.baseline_cost):
        steady = _settled(better or steadily, rule)
        if steady is not None and rule.admits(steady.means[steady.best], whole.bar):
            selection = steady
    admitted = tuple(trial for trial in selection.admitted if trial in steady_ids) or selection.admitted
    return dataclasses.replace(selection, admitted=admitted).of(admitted[0], found)


def _settled(found: Sequence[Entrant], rule: Rule) -> Selection | None:
    """Returns the selection; where the rule admits nobody, as no one beats the baseline, it is the most accurate.

    A mean has to be better than the baseline by its standard error, where the best mean is (docs/log/confirming.md).
    """
    done = [one for one in found if one.by_seed and not one.failed]
    if not done:
        return None
    seeds = max((tuple(sorted(one.by_seed)) for one in done), key=len)
    done = [one for one in done if set(seeds) <= set(one.by_seed)]
    done.sort(key=lambda one: -one.samples_per_s)
    means = {one.id: statistics.fmean(one.by_seed[seed] for seed in seeds) for one in done}
    accurate = min(done, key=lambda one: means[one.id])
    bar = means[accurate.id]
    spread = [one.by_seed[seed] - means[one.id] for one in done for seed in seeds]
    free = len(done) * (len(seeds) - 1)
    error = math.sqrt(sum(d * d for d in spread) / free / len(seeds)) if free else 0.0
    admitted = [one for one in done if rule.admits(means[one.id], bar, error)] or [accurate]
    selection = Selection(
        admitted=tuple(one.id for one in admitted),
        best=admitted[0].id,
        bar=bar,
        bar_of=accurate.id,
        difference=0.0,
        half_width=None,
        means=means,
        seeds=seeds,
    )
    return selection.of(admitted[0].id, done)
