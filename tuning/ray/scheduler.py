"""A scheduler of Ray Tune that stops at rungs by speed, quality and memory."""

from __future__ import annotations

from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from tuning.config.errors import ConfigError
from tuning.ray.searcher import KnownSpeedSearcher
from tuning.search.pruner import milestones


class OomAwareScheduler(FIFOScheduler):
    """Ends a trial at `max_t`, or at a rung where it is behind; what ran out of memory is left to the searcher.

    Rungs are at `grace_period`, and at multiples of it by `reduction_factor`, all in the unit of `time_attr`, as ASHA
    has them. A trial is stopped if it is behind the reference's own curve by more than others made up for, if it is
    clearly slower than the best, or if it is judged not to fit by what other trials have shown since.
    """

    _supports_buffered_results = False

    def __init__(
        self,
        searcher: KnownSpeedSearcher,
        *,
        max_t: int,
        grace_period: int = 1,
        reduction_factor: int = 3,
        time_attr: str = "training_iteration",
    ) -> None:
        """Takes the searcher that is the `search_alg`; raises ConfigError for rungs that there cannot be."""
        super().__init__()  # type: ignore[no-untyped-call]
        if not isinstance(searcher, KnownSpeedSearcher):
            what = (
                f"OomAwareScheduler({type(searcher).__name__}): it asks the searcher what it knows of speed and memory"
            )
            raise ConfigError(what, allowed="a KnownSpeedSearcher", remedy="the searcher that is the search_alg")
        if not (isinstance(max_t, int) and 1 <= grace_period <= max_t and reduction_factor >= 2):
            what = f"max_t={max_t!r}, grace_period={grace_period!r}, reduction_factor={reduction_factor!r}"
            raise ConfigError(what, allowed="1 <= grace_period <= max_t, reduction_factor >= 2", remedy="max_t=10")
        self._searcher = searcher
        searcher.rungs(time_attr, max_t, milestones(grace_period, max_t, reduction_factor))

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        """Returns whether the trial goes on after this result."""
        goes_on = self._searcher.goes_on(trial.trial_id, result)
        return str(TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP)
