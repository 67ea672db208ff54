"""Ray Tune for the search trials of several slots: one actor a slot, each with a worker of its own.

Public API only. A Tune searcher and a Tune scheduler that only ask the dispatcher; a Stopper is not needed, since the
study's scheduler ends the search by having no next trial.
"""

from __future__ import annotations

import logging
import math
import tempfile
from typing import Any, cast

import ray
from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from tuning.config.errors import StoppedEarly, TuningError
from tuning.search.protocols import Scheduler, TrialPlan
from tuning.workers.dispatch import Dispatcher, Placed
from tuning.workers.ray_cluster import RayCluster
from tuning.workers.ray_worker import REPORT, TrialActor
from tuning.workers.worker_config import WorkerConfig

__all__ = ["RayCluster", "RayExecutor"]
NO_LIMIT = 1_000_000_000


class RayExecutor:
    """Runs the search trials with Ray Tune: one actor a slot, reused from trial to trial."""

    def __init__(self, config: WorkerConfig, name: str) -> None:
        self._config, self._name = config, name

    def run(self, scheduler: Scheduler, plan: TrialPlan) -> None:
        """Returns when the scheduler has no next trial and every trial has ended."""
        asking = _Asking(Dispatcher(scheduler, plan, self._config.cap_bytes), self._config)
        with tempfile.TemporaryDirectory(prefix="ct-", ignore_cleanup_errors=True) as folder:
            tuner = tune.Tuner(
                _named(self._name, self._resources(plan)),
                tune_config=tune.TuneConfig(
                    search_alg=asking,
                    scheduler=_Deciding(asking),
                    num_samples=NO_LIMIT,
                    max_concurrent_trials=plan.concurrency,
                    reuse_actors=True,
                    trial_name_creator=_trial_name,
                    trial_dirname_creator=_trial_folder,
                ),
                run_config=tune.RunConfig(
                    name=self._name,
                    storage_path=folder,
                    verbose=0,
                    failure_config=tune.FailureConfig(max_failures=0),  # only a lost actor fails; see Dispatcher.ended
                    checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
                ),
            )
            # Tune would warn once a trial that its own log files, which we switch off, are not there.
            logging.getLogger("ray.tune").setLevel(logging.ERROR)
            try:
                tuner.fit()
            except (ray.exceptions.RayError, RuntimeError) as error:
                if asking.failed is not None:
                    raise asking.failed from None
                raise StoppedEarly(f"Ray ended the search: {error}"[:400], remedy="go on with resume=") from error
        if asking.failed is not None:
            raise asking.failed

    def _resources(self, plan: TrialPlan) -> dict[str, float]:
        """Returns what every actor asks of Ray, whatever its trials are given, so that any can take the next one."""
        resources = {"CPU": float(max(1, int(ray.cluster_resources().get("CPU", 1)) // plan.concurrency))}
        if self._config.device == "cuda":
            a_device = math.ceil(plan.concurrency / plan.devices)
            resources["GPU"] = math.floor(1000 / a_device) / 1000
        return resources


class _Asking(Searcher):
    """A Tune searcher that passes on the scheduler's trials where there is room, and tells it how they ended."""

    def __init__(self, dispatcher: Dispatcher, config: WorkerConfig) -> None:
        super().__init__(metric="samples", mode="max")
        self._dispatcher: Dispatcher | None = dispatcher
        self._config = config
        self._placed: dict[str, Placed] = {}
        self.failed: TuningError | None = None
        """What the scheduler raised, such as a full disk; Tune would wrap it in a traceback of its own."""

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        placed = None
        if self.failed is None and self._dispatcher is not None:
            try:
                placed = self._dispatcher.take()
                if placed is not None:
                    self._placed[trial_id] = placed
                    order = self._dispatcher.order(placed)
                    return {"worker": self._config, "order": order, "placed": (placed.attempt, placed.alone)}
            except TuningError as error:
                self.failed = error
        # Not the end while trials run: one of them may have to begin again.
        return None if self._placed else Searcher.FINISHED

    def goes_on(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Returns what the dispatcher says of a trial's state."""
        placed = self._placed.get(trial_id)
        if self.failed is not None or self._dispatcher is None or placed is None:
            return False
        try:
            return self._dispatcher.goes_on(placed, result[REPORT][0])
        except TuningError as error:
            self.failed = error
            return False

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        placed = self._placed.pop(trial_id, None)
        if placed is None or self.failed is not None or self._dispatcher is None:
            return
        try:
            self._dispatcher.ended(placed, None if error or not result or REPORT not in result else result[REPORT][0])
        except TuningError as failure:
            self.failed = failure

    def save(self, checkpoint_path: str) -> None:
        """Writes nothing: a study is resumed from its own records, never from Tune's."""

    def restore(self, checkpoint_path: str) -> None:
        """Reads nothing, for the same reason."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dispatcher": None, "_placed": {}}


class _Deciding(FIFOScheduler):
    """A Tune scheduler that asks the dispatcher at every rung, and at every beat between them."""

    _supports_buffered_results = False

    def __init__(self, asking: _Asking) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._asking: _Asking | None = asking

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
        if result.get("done") or self._asking is None or self._asking.goes_on(trial.trial_id, result):
            return str(TrialScheduler.CONTINUE)
        return str(TrialScheduler.STOP)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_asking": None}


def _named(name: str, resources: dict[str, float]) -> type[TrialActor]:
    """Returns the trainable under a name that says in Ray's dashboard what its actors do, and what each is given.

    `tune.with_resources` would do the second, and call every actor ResourceTrainable.
    """

    def request(cls: type[TrialActor], config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([resources])

    members = {"default_resource_request": classmethod(request)}
    return cast(type[TrialActor], type(name, (TrialActor,), members))


def _trial_folder(trial: TuneTrial) -> str:
    """Returns a folder of its own for each time that a trial is run."""
    attempt, alone = trial.config.get("placed", (1, False))
    return _trial_name(trial) + "-again" * (int(attempt) - 1) + "-alone" * bool(alone)


def _trial_name(trial: TuneTrial) -> str:
    """Returns the study's own name of the trial with the knobs most looked for."""
    order = trial.config.get("order")
    if order is None:
        return str(trial.trial_id)
    knobs = order.knobs
    parts = [f"bs{knobs['batch_size']}"] if "batch_size" in knobs else []
    parts += [f"lr{knobs['learning_rate']:.1e}"] if "learning_rate" in knobs else []
    return "-".join([str(order.trial), *parts])
