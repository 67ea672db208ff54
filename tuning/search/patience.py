"""How long the front has stayed as it is: a search that changes nothing any more can end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tuning.stats.pareto import Floats, Mode, non_dominated_ranks, signed


class Patience:
    """Counts the trials since the front last changed; `tolerances` as `pareto.non_dominated_ranks` takes them."""

    def __init__(self, objectives: Mapping[str, Mode], tolerances: Sequence[float]) -> None:
        self._objectives, self._tolerances = dict(objectives), list(tolerances)
        self._front: list[Floats] = []
        self.idle = 0

    def take(self, values: Mapping[str, float | None], *, whole: bool) -> None:
        """Takes a trial that ended; only a `whole` one, which ran to its end, can change the front."""
        self.idle += 1
        row = signed({name: values.get(name) for name in self._objectives}, self._objectives)
        if not whole or not np.isfinite(row).all():
            return
        ranks = non_dominated_ranks(np.array([*self._front, row]), self._tolerances)
        if ranks[-1] == 0:
            self.idle = 0
        self._front = [p for p, rank in zip([*self._front, row], ranks, strict=True) if rank == 0]
