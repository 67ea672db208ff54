"""The pick if nothing is trained: the best probes measured in turns, and of the fastest the least changed.

The fastest of many noisy probes flatters. Simulated with eight knobs and 24 probes, the fastest probe has 0.978, 0.927
and 0.852 of the best speed where a probe is off by 5, 13 and 25 %; the pick of seven probes and today's settings after
five rounds of windows 0.988, 0.961 and 0.917 (docs/log/probes.md).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping

from trainables.knobs import Scalar
from tuning.config.space import Space
from tuning.journal.run import History
from tuning.memory.groups import fits
from tuning.memory.guard import MemoryGuard
from tuning.search.throughput import PROBES_DIFFER, Probed, Speeds, inside, learned, place_of, probed

CANDIDATE = "best "
"""What the names of the other candidates begin with."""
MOST_OTHERS = 6
"""Probes beside the fastest that are measured in turns, as far as the time lasts."""
SAME_FRAC = 0.03
"""A configuration that is behind by more is slower, however noisy the rounds: real gains were given up otherwise."""
Configs = Mapping[str, Mapping[str, Scalar]]


def last_candidates(
    run: History, space: Space, guard: MemoryGuard, config: Mapping[str, Scalar], named: Configs, most: int
) -> dict[str, Mapping[str, Scalar]]:
    """Returns who takes turns, by name: `best`, which is the configuration; the `named`; at most `most` of the others.

    The others are the configuration with other system knobs that fit, fastest first, as far as a probe may be off.
    """
    found: dict[str, Mapping[str, Scalar]] = {"best": config, **{n: own for n, own in named.items() if n != "best"}}
    table = space.table
    ranked = Speeds([p for p in probed(run.probes, table) if inside(space, p)], table).ranked(config)
    for choice in ranked:
        own, number = space.complete({**config, **choice.system}), 1 + len(found) - len(named)
        is_near = choice.samples_per_s * PROBES_DIFFER >= ranked[0].samples_per_s
        places = [(place_of(one, table), learned(one, table)) for one in (own, *found.values())]
        if most > 0 and is_near and places[0] not in places[1:] and fits(guard, own):
            found[f"{CANDIDATE}{number}"], most = own, most - 1
    return found


def alike(space: Space, config: Mapping[str, Scalar], others: Configs) -> list[str]:
    """Returns the names of those that differ from the configuration in system knobs alone, which the space has."""
    table, ours = space.table, learned(config, space.table)
    return [n for n, own in others.items() if learned(own, table) == ours and inside(space, Probed(own, 0, 0, 0))]


def least_changed(
    run: History, turns: Configs, names: Collection[str], today: Mapping[str, Scalar]
) -> tuple[str, float]:
    """Returns which of the `names` differs in the fewest system knobs from `today` among those that are behind the
    fastest by a standard error at most, and by `SAME_FRAC`, and how many times as fast as `best` it was.

    So a knob whose effect is within the noise is as it is today. Without rounds it is `best`.
    """
    rates: dict[str, dict[int, float]] = {}
    for window in run.windows:
        if window.name in names and window.config == dict(turns[window.name]) and window.samples_per_s:
            rates.setdefault(window.name, {})[window.round] = math.log(window.samples_per_s)
    if not rates:
        return "best", 1.0
    fastest = max(rates, key=lambda name: statistics.median(rates[name].values()))

    def is_slower(name: str) -> bool:
        behind = [rates[fastest][n] - rates[name][n] for n in rates[fastest].keys() & rates[name].keys()]
        if len(behind) < 2:
            return True
        return statistics.fmean(behind) > min(SAME_FRAC, statistics.stdev(behind) / math.sqrt(len(behind)))

    def changes(name: str) -> tuple[int, float]:
        pairs = zip(place_of(turns[name], run.table), place_of(today, run.table), strict=True)
        return sum(own != other for own, other in pairs), -statistics.median(rates[name].values())

    picked = min((n for n in rates if n == fastest or not is_slower(n)), key=changes)
    times = [math.exp(rates[picked][n] - own) for n, own in rates.get("best", {}).items() if n in rates[picked]]
    return picked, statistics.median(times or [1.0])
