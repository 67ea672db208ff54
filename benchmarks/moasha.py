"""Syne Tune's MOASHA as a judge of trainings: which go on at a rung, by a non-dominated sort of speed and quality.

It draws configurations at random, as the caller does; what it adds is the halving (Schmucker et al. 2021, "Multi-
objective asynchronous successive halving", arXiv 2106.12639). `pip install syne-tune` brings it; nothing of cardtune
needs it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from datetime import datetime
from typing import Any

WORST = float("inf")


def is_installed() -> bool:
    """Returns whether Syne Tune is there."""
    return importlib.util.find_spec("syne_tune") is not None


class Halving:
    """One MOASHA scheduler over `objectives`, name -> "min" or "max", with its rungs from `first` samples on."""

    def __init__(self, objectives: Mapping[str, Any], first: int, horizon: int, eta: int) -> None:
        from syne_tune.optimizer.schedulers.multiobjective.moasha import MOASHA

        self._signs = {name: 1.0 if mode == "min" else -1.0 for name, mode in objectives.items()}
        self._scheduler = MOASHA(
            {}, list(objectives), time_attr="samples", max_t=horizon, grace_period=first, reduction_factor=eta
        )
        self._trials: dict[str, Any] = {}

    def goes_on(self, trial: str, samples: int, values: Mapping[str, float | None]) -> bool:
        """Returns whether a training goes on after a rung."""
        from syne_tune.backend.trial_status import Trial
        from syne_tune.optimizer.scheduler import SchedulerDecision

        if trial not in self._trials:
            self._trials[trial] = Trial(trial_id=len(self._trials), config={}, creation_time=datetime.now())
            self._scheduler.on_trial_add(self._trials[trial])
        found = {name: sign * self._value(values.get(name), sign) for name, sign in self._signs.items()}
        decision = self._scheduler.on_trial_result(self._trials[trial], {"samples": samples, **found})
        return bool(decision == SchedulerDecision.CONTINUE)

    @staticmethod
    def _value(value: float | None, sign: float) -> float:
        return sign * WORST if value is None else float(value)
