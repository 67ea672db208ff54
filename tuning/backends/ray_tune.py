"""Ray: one cluster a search, and Tune for its trials.

Public API only. A searcher and a scheduler that do nothing but ask the study's desk; a Stopper is not needed, since the
desk ends the search by having no next trial.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import secrets
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import ray
from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from trainables.loop import Plan
from tuning.backends.ray_worker import REPORT, TrialRunner
from tuning.backends.session import Setting
from tuning.errors import PreflightError, StoppedEarly, TuningError
from tuning.stages.bench import Desk, Orders

NO_LIMIT = 1_000_000_000


class RayCluster:
    """A Ray of this run alone: started with `with`, ended with it. Loopback only, token on, dashboard if asked."""

    def __init__(self, *, cores: int, gpus: int, dashboard: bool) -> None:
        self._cores, self._gpus, self._dashboard = cores, gpus, dashboard
        self._folder = tempfile.TemporaryDirectory(prefix="ct-", ignore_cleanup_errors=True)
        self.dashboard_url = ""
        self.token_path = Path(self._folder.name) / "token"

    def __enter__(self) -> RayCluster:
        self.token_path.touch(mode=0o600)
        self.token_path.write_text(secrets.token_hex(32), encoding="utf-8")
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(self.token_path)
        os.environ.pop("RAY_ADDRESS", None)  # a foreign cluster is joined only on request
        terminated = signal.getsignal(signal.SIGTERM)
        try:
            context = ray.init(
                address="local",
                num_cpus=self._cores,
                num_gpus=self._gpus,
                include_dashboard=self._dashboard,
                dashboard_host="127.0.0.1",
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
                _temp_dir=self._folder.name,
                object_store_memory=256 * 2**20,
            )
        except (OSError, RuntimeError, TimeoutError, ValueError) as error:
            self._folder.cleanup()
            first = str(error).strip().splitlines()[0]
            raise PreflightError(
                f"Ray did not start: {first}", remedy="free 1 GB of memory; -v shows all of it"
            ) from error
        signal.signal(signal.SIGTERM, terminated)  # ray.init puts its own in place, which exits with code 15
        url = context.dashboard_url or ""
        self.dashboard_url = f"http://{url}" if url and "://" not in url else url
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ray.shutdown()
        self._folder.cleanup()


class RayCrew:
    """Runs the search trials with Ray Tune: one actor a slot, reused from trial to trial."""

    def __init__(self, setting: Setting, name: str) -> None:
        self._setting, self._name = setting, name

    def run(self, desk: Desk, orders: Orders) -> None:
        """Returns when the desk has no next trial and every trial has ended."""
        slots = orders.concurrency
        resources = {"CPU": float(max(1, int(ray.cluster_resources().get("CPU", 1)) // slots))}
        if self._setting.device == "cuda":
            resources["GPU"] = math.floor(1000 / slots) / 1000
        shared = {
            "setting": dataclasses.replace(self._setting, threads=orders.threads),
            "plan": Plan(orders.samples, orders.milestones, window_s=1.0, cap_bytes=self._setting.cap_bytes),
            "shrink": orders.shrink,
        }
        asking = _Asking(desk, shared)
        with tempfile.TemporaryDirectory(prefix="ct-", ignore_cleanup_errors=True) as folder:
            tuner = tune.Tuner(
                _named_runner(self._name, resources),
                tune_config=tune.TuneConfig(
                    search_alg=asking,
                    scheduler=_Deciding(desk, asking),
                    num_samples=NO_LIMIT,
                    max_concurrent_trials=slots,
                    reuse_actors=True,
                    trial_name_creator=_trial_name,
                    trial_dirname_creator=_trial_name,
                ),
                run_config=tune.RunConfig(
                    name=self._name,
                    storage_path=folder,
                    verbose=0,
                    failure_config=tune.FailureConfig(max_failures=1),  # only lost processes fail; all else is a result
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


class _Asking(Searcher):
    """A Tune searcher that passes on the desk's trials, and tells the desk how they ended."""

    def __init__(self, desk: Desk, shared: Mapping[str, Any]) -> None:
        super().__init__(metric="samples", mode="max")
        self._desk, self._shared = desk, dict(shared)
        self._trials: dict[str, str] = {}
        self.failed: TuningError | None = None
        """What the desk raised, such as a full disk; Tune would wrap it in a traceback of its own."""

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        assignment = None
        try:
            assignment = self._desk.next_trial() if self.failed is None else None
        except TuningError as error:
            self.failed = error
        if assignment is None:
            return Searcher.FINISHED
        self._trials[trial_id] = assignment.trial
        return {
            **self._shared,
            "trial": assignment.trial,
            "knobs": dict(assignment.knobs),
            "seed": assignment.seed,
        }

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        trial = self._trials.pop(trial_id, None)
        if trial is None or self.failed is not None:
            return
        try:
            self._desk.ended(trial, None if error or not result or REPORT not in result else result[REPORT][0])
        except TuningError as failure:
            self.failed = failure

    def save(self, checkpoint_path: str) -> None:
        """Writes nothing: a study is resumed from its own records, never from Tune's."""

    def restore(self, checkpoint_path: str) -> None:
        """Reads nothing, for the same reason."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_desk": None, "_shared": {}}


class _Deciding(FIFOScheduler):
    """A Tune scheduler that asks the desk at every rung."""

    _supports_buffered_results = False

    def __init__(self, desk: Desk, asking: _Asking) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._desk: Desk | None = desk
        self._asking: _Asking | None = asking

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
        if result.get("done") or self._desk is None or self._asking is None:
            return str(TrialScheduler.CONTINUE)
        try:
            goes_on = self._asking.failed is None and self._desk.at_rung(trial.config["trial"], result[REPORT][0])
        except TuningError as error:
            self._asking.failed, goes_on = error, False
        return str(TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_desk": None, "_asking": None}


def _named_runner(name: str, resources: dict[str, float]) -> type[TrialRunner]:
    """Returns the trainable under a name that says in Ray's dashboard what its actors do, and what each is given.

    `tune.with_resources` would do the second, and call every actor ResourceTrainable.
    """

    def request(cls: type[TrialRunner], config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([resources])

    members = {"default_resource_request": classmethod(request)}
    return cast(type[TrialRunner], type(name, (TrialRunner,), members))


def _trial_name(trial: TuneTrial) -> str:
    """Returns the study's own name of the trial with the knobs most looked for."""
    knobs = trial.config.get("knobs", {})
    parts = [f"bs{knobs['batch_size']}"] if "batch_size" in knobs else []
    parts += [f"lr{knobs['learning_rate']:.1e}"] if "learning_rate" in knobs else []
    return "-".join([str(trial.config.get("trial", trial.trial_id)), *parts])
