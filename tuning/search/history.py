"""Which of very many trials a model of them is made of. Nothing of Optuna: a trial is whatever it is given."""

from __future__ import annotations

import itertools
import zlib
from bisect import insort
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from tuning.stats.pareto import non_dominated_ranks, spread_order

T = TypeVar("T")

MODELLED = 256
"""What TPE is told of, at most: its time grows with that, and a study is built for each proposal."""
BEST, RUNNING = 64, 64
"""Of those: the best that ran to their end, and those under way. The newest and a sample of all share the rest."""


class History(Generic[T]):
    """Which of very many observations the model is made of: the best, the newest, and an even sample of the others.

    Up to `MODELLED` trials, finished and under way, it is all of them. Beyond, TPE's good ones (a tenth of what it is
    told) come from the `BEST` by non-dominated rank; how often a place was tried in vain is what the sample says, the
    trials whose numbers have the least hash, so that each had the same chance; and the newest say where the search is.
    """

    def __init__(self, maximised: Sequence[bool], seed: int) -> None:
        self._signs = [-1.0 if largest else 1.0 for largest in maximised]
        self._seed = seed
        self._best: dict[int, list[float]] = {}
        self._sample: list[tuple[int, int]] = []  # (hash, number), the least hashes
        self._others = MODELLED - BEST - RUNNING

    def add(self, number: int, values: Sequence[float] | None) -> None:
        """Takes the observation of that number; `values` are its objectives where it ran to its end."""
        if values is not None:
            self._best[number] = [sign * value for sign, value in zip(self._signs, values, strict=True)]
            if len(self._best) >= BEST + BEST // 4:
                self._cut()
        insort(self._sample, (zlib.crc32(f"{self._seed} {number}".encode()), number))
        del self._sample[self._others // 2 :]

    def _cut(self) -> None:
        """Keeps the best: by rank, in the last rank those that cover it."""
        numbers, points = list(self._best), np.array(list(self._best.values()))
        ranks = non_dominated_ranks(points)
        kept: list[int] = []
        for rank in range(int(ranks.max()) + 1):
            peers = np.flatnonzero(ranks == rank)
            kept += [int(peers[i]) for i in spread_order(points[peers])][: BEST - len(kept)]
        self._best = {numbers[i]: self._best[numbers[i]] for i in sorted(kept)}

    def modelled(self, finished: Sequence[T], live: Sequence[T]) -> list[T]:
        """Returns what the model is told of, in the order in which it was observed; what is under way comes last."""
        if len(finished) + len(live) <= MODELLED:
            return [*finished, *live]
        chosen = {*self._best, *(number for _, number in self._sample)}
        running = live[-RUNNING:]
        newest = (n for n in reversed(range(len(finished))) if n not in chosen)
        chosen.update(itertools.islice(newest, max(0, MODELLED - len(running) - len(chosen))))
        return [*(finished[number] for number in sorted(chosen)), *running]
