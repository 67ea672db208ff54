"""Who goes on: multi-objective asynchronous successive halving (Schmucker et al. 2021, arXiv 2106.12639).

At each rung a trial is ranked among those seen there so far: by non-dominated rank, inside a rank by the epsilon-net
order of `pareto.spread_order`. The best 1/eta go on. Unlike the paper's rule, a member of the rung's front always does,
and later a quarter of the others too: what comes of a place at a rung is learned only from those that reach the end.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuning.stats.pareto import Floats, Mode, Pairs, non_dominated_ranks, signed, spread_order

SPARED, SPARED_FROM = 0.25, 10
"""Share of the trials that are not stopped for their place, at a rung that has seen so many.

Simulated, 20 seeds each, mean final hypervolume without and with: signals 1.092 and 1.170, where high learning rates
are worse at a rung and better at the end; pointer 0.892, 0.913; headpose 0.835, 0.838; nli 0.983, 0.984. Sparing from
the beginning cost nli and pointer 2 to 3 % at a quarter of the time.
"""


def milestones(first: int, last: int, eta: int) -> tuple[int, ...]:
    """Returns first, first * eta, first * eta^2 and so on, all below `last`, in samples seen.

    By multiplication: a logarithm loses a rung at exact powers, as log(243) / log(3) is 4.999...
    """
    if not 1 <= first <= last or eta < 2:
        raise ValueError(f"rungs need 1 <= first <= last and eta >= 2, got first={first}, last={last}, eta={eta}")
    found = []
    milestone = first
    while milestone < last:
        found.append(milestone)
        milestone *= eta
    return tuple(found)


@dataclass(frozen=True)
class Decision:
    """Whether a trial goes on, and why in words."""

    go_on: bool
    reason: str
    on_front: bool = False
    spared: bool = False
    """It goes on whatever its place is, so that it is known what comes of such."""


class Pruner:
    """The rungs of one search. The same calls give the same decisions: ties are broken by seed and trial id alone.

    `objectives` may hold the throughput, known before training; `tolerances` gives the relative difference below which
    two values of an objective are equal (one objective at most). Before `min_at_rung` trials (default eta) have been
    seen at a rung, everyone with finite values goes on.
    """

    def __init__(
        self,
        milestones: Sequence[int],
        eta: int,
        objectives: Mapping[str, Mode],
        seed: int,
        *,
        min_at_rung: int | None = None,
        tolerances: Mapping[str, float] | None = None,
    ) -> None:
        if eta < 2:
            raise ValueError(f"eta must be at least 2, got {eta}")
        unknown = [name for name in tolerances or {} if name not in objectives]
        if unknown:
            raise ValueError(
                f"tolerance for {unknown[0]}, which is no objective; objectives are {', '.join(objectives)}"
            )
        self._eta, self._objectives, self._seed = eta, dict(objectives), seed
        self._min_at_rung = eta if min_at_rung is None else min_at_rung
        self._tolerances = [float((tolerances or {}).get(name, 0.0)) for name in objectives]
        self._seen: dict[int, dict[str, Floats]] = {m: {} for m in milestones}
        self._priorities: dict[str, tuple[float, str]] = {}
        self._luck: dict[str, float] = {}
        # Two objectives, nearly always: a rung keeps them in order, and a decision among 10,000 takes milliseconds.
        tolerant = int(np.argmax(self._tolerances))
        self._columns = (tolerant, 1 - tolerant)
        pairs = len(self._objectives) == 2 and self._tolerances[tolerant] < 1
        self._pairs = {m: Pairs(self._tolerances[tolerant]) for m in milestones if pairs}

    def decide(self, trial_id: str, milestone: int, values: Mapping[str, float | None]) -> Decision:
        """Returns whether the trial goes on from this milestone.

        A trial that comes again, as after a resume, replaces its older values. Raises ValueError for a milestone that
        is none of ours, and for a missing objective, naming it and the values there are; it is then not remembered.
        """
        unfit = self.remember(trial_id, milestone, values)
        if unfit:
            return Decision(False, unfit)
        rung = self._seen[milestone]
        seen = len(rung)
        if seen < self._min_at_rung:
            return Decision(True, f"{seen} of the {self._min_at_rung} that are compared at {milestone} samples")
        ranks = self._ranks(milestone)
        mine = ranks[trial_id]
        if mine == 0:
            return Decision(True, f"on the front of {seen} at {milestone} samples", on_front=True)
        places = math.ceil(seen / self._eta)
        place = self._place(rung, ranks, trial_id)
        spared = seen >= SPARED_FROM and self._luck[trial_id] < SPARED
        going = "1 goes on" if places == 1 else f"{places} go on"
        said = f"place {place} of {seen} at {milestone} samples (front {mine + 1}); {going}"
        return Decision(spared or place <= places, said, spared=spared)

    def remember(self, trial_id: str, milestone: int, values: Mapping[str, float | None]) -> str:
        """Returns why the values cannot be compared, "" where they are kept; decides nothing, as when records are read.

        Raises what `decide` raises.
        """
        if milestone not in self._seen:
            raise ValueError(
                f"{milestone} samples is no rung; rungs are at {', '.join(map(str, self._seen)) or 'none'}"
            )
        row = signed(values, self._objectives)
        if not np.isfinite(row).all():
            bad = next(n for n, x in zip(self._objectives, row, strict=True) if not math.isfinite(x))
            return f"{bad} is {values[bad]} at {milestone} samples"
        self._seen[milestone][trial_id] = row
        if milestone in self._pairs:
            first, second = self._columns
            self._pairs[milestone].put(trial_id, float(row[first]), float(row[second]))
        # Of the id, not of the order of arrival, so that a resumed search decides as the first one did.
        draw = np.random.default_rng([self._seed, zlib.crc32(trial_id.encode())])
        self._priorities[trial_id] = (float(draw.random()), trial_id)
        self._luck[trial_id] = float(draw.random())
        return ""

    def _ranks(self, milestone: int) -> Mapping[Any, int]:
        if milestone in self._pairs:
            return self._pairs[milestone].ranks()
        rung = self._seen[milestone]
        ranks = non_dominated_ranks(np.array(list(rung.values())), self._tolerances)
        return dict(zip(rung, ranks.tolist(), strict=True))

    def _place(self, rung: Mapping[str, Floats], ranks: Mapping[str, int], trial_id: str) -> int:
        """Returns the place from 1 of a trial: after all of lower rank, then in the spread order of its own."""
        mine = ranks[trial_id]
        better = sum(map(mine.__gt__, ranks.values()))
        peers = sorted((i for i, rank in ranks.items() if rank == mine), key=self._priorities.__getitem__)
        return better + len(spread_order(np.array([rung[i] for i in peers]), until=peers.index(trial_id)))
