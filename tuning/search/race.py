"""The finalists that are trained again beside the reference, and the answer: pure decisions over paired gains.

The best of many values of one seed is too good on average. So the few configurations that may be the answer are trained
again, seed by seed, on the same fresh seeds as the reference; what the search's model expects of each is updated by the
differences. The pick is the fastest that is then fairly sure to be as good as the reference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tuning.search.proposals import FAIRLY_SURE
from tuning.search.rule import Expected, Rule

SYSTEM = "system knobs"
"""The finalist that is the reference with the fastest system knobs: the answer if no other is as good and faster."""
SURE = 0.9
"""A pick with a larger chance of being as good is settled, once it has `LEAST_SEEDS`: slower ones train no more."""
HOPELESS = 0.05
"""A configuration whose chance of being as good is smaller is trained no more."""
STAYS = 0.3
"""A configuration that has begun stays in the race as long as its chance is larger."""
LEAST_SEEDS = 3
"""Fresh seeds after which a pick may be settled: the spread of fewer says nothing."""
PRIOR_DEGREES = 4
"""Differences that the model's noise counts for in the spread between seeds."""
CONTRADICTED = 1.0
"""Standard errors of the mean difference below which fresh seeds rule a configuration out, whatever the model says."""


@dataclass(frozen=True)
class Finalist:
    """A configuration that may be an answer: its speed, what the model expects of it, and what fresh seeds showed.

    `gains` are those over the reference by seed, `qualities` its own by seed. `has_failed`: one of its trainings did
    not come to its end.
    """

    name: str
    samples_per_s: float
    expected: Expected
    gains: Mapping[int, float] = field(default_factory=dict)
    qualities: Mapping[int, float] = field(default_factory=dict)
    has_failed: bool = False


class Race:
    """The finalists, the reference's speed and the rule; `noise` is what one quality differs by between seeds.

    `reference` are the reference's qualities by seed.
    """

    def __init__(
        self,
        finalists: Sequence[Finalist],
        reference_per_s: float,
        rule: Rule,
        noise: float,
        reference: Mapping[int, float],
    ) -> None:
        self._finalists = {one.name: one for one in finalists if not one.has_failed}
        self.reference_per_s, self._rule = max(reference_per_s, 1e-9), rule
        known = [list(one.gains.values()) for one in finalists if len(one.gains) > 1]
        squares = PRIOR_DEGREES * 2 * noise**2 + sum(statistics.variance(own) * (len(own) - 1) for own in known)
        self.degrees = max(1, PRIOR_DEGREES * (noise > 0) + sum(len(own) - 1 for own in known))
        """The degrees of freedom of `spread`."""
        self.spread = math.sqrt(squares / self.degrees)
        """The standard deviation of a difference between two configurations on one seed."""
        self.knows_spread = self.degrees > 1 and bool(known)
        """Whether fresh seeds tell of the spread; else it is what the search's model makes of single trainings."""
        means = [statistics.fmean(one.qualities.values()) for one in finalists if one.qualities]
        means += [statistics.fmean(reference.values())] if reference else []
        self._is_baseline_beaten = any(map(rule.beats_baseline, means))

    @property
    def trained(self) -> dict[str, Finalist]:
        """Returns the finalists that were trained on a fresh seed, by name, the fastest first."""
        found = {name: one for name, one in self._finalists.items() if one.qualities}
        return dict(sorted(found.items(), key=lambda pair: -pair[1].samples_per_s))

    def has(self, name: str) -> bool:
        """Returns whether a finalist is in the race: none of its trainings has failed."""
        return name in self._finalists

    def per_s(self, name: str) -> float:
        """Returns a finalist's speed in samples/s, 0 for one that has failed."""
        return self._finalists[name].samples_per_s if name in self._finalists else 0.0

    def is_settled(self, name: str) -> bool:
        """Returns whether a finalist was trained on enough fresh seeds, or has failed."""
        return name not in self._finalists or len(self._finalists[name].qualities) >= LEAST_SEEDS

    def allows_system(self, name: str) -> bool:
        """Returns whether fresh seeds leave it possible that a configuration learns what the reference does, from which
        it differs in system knobs alone.
        """
        one = self._finalists.get(name)
        if one is None or not one.gains:
            return one is not None
        error = self.spread / math.sqrt(len(one.gains))
        return statistics.fmean(one.gains.values()) >= -self._rule.tolerance - 2 * CONTRADICTED * error

    def expected(self, name: str) -> Expected:
        """Returns what a finalist's gain is expected to be by all that is known."""
        one = self._finalists[name]
        # All trainings of the search have one seed: together they count for no more than one more seed.
        searched = Expected(one.expected.gain, math.hypot(one.expected.error, self.spread))
        return searched.given(list(one.gains.values()), self.spread)

    def chance(self, name: str) -> float:
        """Returns the probability that a finalist is as good as the reference."""
        return self.expected(name).chance(-self._rule.tolerance)

    def is_admitted(self, name: str) -> bool:
        """Returns whether the rule admits a finalist, by fresh seeds; by the search alone if nobody has any."""
        one = self._finalists.get(name)
        if one is None or not self._beats_baseline(one):
            return False
        if not any(other.gains for other in self._finalists.values()):
            return self._rule.admits(one.expected.gain)
        if not one.gains:
            return False
        mean, error = statistics.fmean(one.gains.values()), self.spread / math.sqrt(len(one.gains))
        is_contradicted = mean < -self._rule.tolerance - CONTRADICTED * error
        return self._rule.admits(self.expected(name).gain) and not is_contradicted

    def _beats_baseline(self, one: Finalist) -> bool:
        own = statistics.fmean(one.qualities.values()) if one.qualities else None
        return own is None or not self._is_baseline_beaten or self._rule.beats_baseline(own)

    @property
    def admitted(self) -> list[str]:
        """Returns the finalists that may be the pick, the first the pick; none is slower than the reference.

        They are fairly sure to be as good, the fastest first; if there is none, the one of the most
        worth: its chance of being as good times the log of its speed. Under `goal="quality"` it is the best.
        """
        able = [one for name, one in self._finalists.items() if name != SYSTEM and self.is_admitted(name)]
        able = [one for one in able if one.samples_per_s >= self.reference_per_s]
        if self._rule.goal == "quality":
            return sorted((one.name for one in able), key=lambda name: -self.expected(name).gain)
        sure = [one for one in able if self.chance(one.name) >= FAIRLY_SURE]
        if not sure:
            return [max(able, key=lambda one: self._promise([one.name])).name] if able else []
        return [one.name for one in sorted(sure, key=lambda one: (-one.samples_per_s, -self.expected(one.name).gain))]

    def best_quality(self, least_per_s: float = 0.0) -> str | None:
        """Returns the finalist expected to be best of those that are as fast; None if none was trained again."""
        able = [
            n for n, one in self._finalists.items() if n != SYSTEM and one.gains and one.samples_per_s >= least_per_s
        ]
        return max(able, key=lambda name: self.expected(name).gain, default=None)

    def next_round(self, top: int, most_seeds: int) -> list[str]:
        """Returns whom to train on their next seed, the most valuable first; none once the pick is settled.

        Together they promise the fastest pick, each with its chance of being good enough.
        """
        able = [n for n, one in self._finalists.items() if len(one.gains) < most_seeds and self.chance(n) > HOPELESS]
        able = [n for n in able if n != SYSTEM and self._finalists[n].samples_per_s >= self.reference_per_s]
        pick, least = next(iter(self.admitted), None), min(LEAST_SEEDS, most_seeds)
        is_sure = pick is not None and len(self._finalists[pick].gains) >= least
        if self._rule.goal == "quality":
            chosen = sorted(able, key=lambda name: -(self.expected(name).gain + self.expected(name).error))[:top]
            return [] if is_sure and all(len(self._finalists[n].gains) >= least for n in chosen) else chosen
        if pick is not None and is_sure and self.chance(pick) > SURE:
            able = [n for n in able if self._finalists[n].samples_per_s > self._finalists[pick].samples_per_s]
        # Who has begun goes on: of many that are alike each new one would else promise more than one that was tried.
        begun = [name for name in able if self._finalists[name].gains and self.chance(name) > STAYS]
        chosen = sorted(begun, key=lambda name: -self._promise([name]))[:top]
        while len(chosen) < top and (rest := [name for name in able if name not in chosen]):
            chosen.append(max(rest, key=lambda name: self._promise([*chosen, name])))
        return chosen

    def _promise(self, names: Sequence[str]) -> float:
        """Returns the expected log of the speed, over the reference's, of the fastest of these that is as good."""
        promise, nobody = 0.0, 1.0
        for name in sorted(names, key=lambda name: -self._finalists[name].samples_per_s):
            chance = self.chance(name)
            promise += nobody * chance * math.log(self._finalists[name].samples_per_s / self.reference_per_s)
            nobody *= 1 - chance
        return promise
