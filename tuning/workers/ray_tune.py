"""Ray: one cluster a search, and Tune for its trials.

Public API only. A Tune searcher and a Tune scheduler that only ask the study's scheduler; a Stopper is not needed,
since the study's ends the search by having no next trial.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import secrets
import signal
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import ray
from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from trainables.plan import Plan
from tuning.config.errors import PreflightError, StoppedEarly, TuningError
from tuning.memory import oom
from tuning.search.protocols import Scheduler, TrialPlan
from tuning.workers.lending import Door
from tuning.workers.placement import BEAT_S, Placed, Placing, given_up
from tuning.workers.ray_worker import REPORT, Retired, TrialRunner
from tuning.workers.worker_config import WorkerConfig

NO_LIMIT = 1_000_000_000
ATTEMPTS = 4
"""A trial whose process had to be given up before it began is not offered to more new ones than this."""


_TOKEN = secrets.token_hex(32)
"""Of every cluster this process starts: Ray reads its token once a process, and a second cluster's would be refused."""


class RayCluster:
    """A Ray of this run alone: started with `with`, ended with it. Loopback only, token on, dashboard if asked."""

    def __init__(self, *, cores: int, gpus: int, dashboard: bool) -> None:
        self._cores, self._gpus, self._dashboard = cores, gpus, dashboard
        self._folder = tempfile.TemporaryDirectory(prefix="ct-", ignore_cleanup_errors=True)
        self.dashboard_url = ""
        self.token_path = Path(self._folder.name) / "token"

    def __enter__(self) -> RayCluster:
        self.token_path.touch(mode=0o600)
        self.token_path.write_text(_TOKEN, encoding="utf-8")
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


class RayExecutor:
    """Runs the search trials with Ray Tune: one actor a slot, reused from trial to trial.

    The first of them trains in the process behind `door`, if any, which has loaded everything already.
    """

    def __init__(self, setting: WorkerConfig, name: str, door: Door | None = None) -> None:
        self._setting, self._name, self._door = setting, name, door

    def run(self, scheduler: Scheduler, orders: TrialPlan) -> None:
        """Returns when the scheduler has no next trial and every trial has ended."""
        slots = orders.concurrency
        # Every actor asks Ray for the same, whatever share its trials are given, so that any can take the next one.
        resources = {"CPU": float(max(1, int(ray.cluster_resources().get("CPU", 1)) // slots))}
        if self._setting.device == "cuda":
            resources["GPU"] = math.floor(1000 / slots) / 1000
        asking = _Asking(scheduler, orders, self._setting, self._door)
        with tempfile.TemporaryDirectory(prefix="ct-", ignore_cleanup_errors=True) as folder:
            tuner = tune.Tuner(
                _named_runner(self._name, resources),
                tune_config=tune.TuneConfig(
                    search_alg=asking,
                    scheduler=_Deciding(scheduler, asking),
                    num_samples=NO_LIMIT,
                    max_concurrent_trials=slots,
                    reuse_actors=True,
                    trial_name_creator=_trial_name,
                    trial_dirname_creator=_trial_folder,
                ),
                run_config=tune.RunConfig(
                    name=self._name,
                    storage_path=folder,
                    verbose=0,
                    callbacks=[_Lost(asking)],
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
    """A Tune searcher that passes on the scheduler's trials where there is room, and tells it how they ended."""

    def __init__(self, scheduler: Scheduler, orders: TrialPlan, setting: WorkerConfig, door: Door | None) -> None:
        super().__init__(metric="samples", mode="max")
        self._scheduler, self._orders, self._setting, self._door = scheduler, orders, setting, door
        self._placing = Placing(scheduler, orders, setting.cap_bytes)
        self._placed: dict[str, Placed] = {}
        self._errors: dict[str, BaseException | None] = {}
        self._unbegun: set[str] = set()
        self.failed: TuningError | None = None
        """What the scheduler raised, such as a full disk; Tune would wrap it in a traceback of its own."""

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        placed = None
        if self.failed is None:
            try:
                placed = self._placing.take()
            except TuningError as error:
                self.failed = error
        if placed is None:
            # Not the end while trials run: one of them may have to begin again.
            return None if self._placed else Searcher.FINISHED
        self._placed[trial_id] = placed
        return self._config(placed)

    def _config(self, placed: Placed) -> dict[str, Any]:
        orders, share = self._orders, self._placing.share(placed)
        return {
            "setting": dataclasses.replace(self._setting, threads=orders.threads),
            "door": self._door,
            "plan": Plan(orders.samples, orders.milestones, window_s=1.0, cap_bytes=share.cap_bytes),
            "threads": share.threads,
            "shrink": share.shrink,
            "beat_s": BEAT_S,
            "trial": placed.request.trial,
            "attempt": placed.attempt,
            "knobs": dict(placed.request.knobs),
            "seed": placed.request.seed,
        }

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        placed, fault = self._placed.pop(trial_id, None), self._errors.pop(trial_id, None)
        unbegun = trial_id in self._unbegun
        if placed is None:
            return
        self._placing.leave(placed)
        if self.failed is not None:
            return
        found = None if error or not result or REPORT not in result else dict(result[REPORT][0])
        try:
            if unbegun and placed.attempt < ATTEMPTS:
                self._begin_again(placed, fault)
            elif not self._placing.widened(placed, found):
                self._scheduler.ended(placed.request.trial, found or _lost(fault))
        except TuningError as failure:
            self.failed = failure

    def _begin_again(self, placed: Placed, fault: BaseException | None) -> None:
        """Says why a trial's process was given up before it began, and keeps the trial."""
        cause = getattr(fault, "cause", None)
        event, why = ("retired", str(cause)) if isinstance(cause, Retired) else ("lost", _lost(fault)["message"])
        self._scheduler.decided(event, placed.request.trial, f"{why}; the trial runs in a new process")
        self._placing.again(placed)

    def errored(self, trial: TuneTrial, *, recovers: bool) -> None:
        """Keeps what a trial's process died of, as Tune wrote it down, and says so where Tune starts it again."""
        found = self._errors[trial.trial_id] = _pickled(trial)
        if trial.status == TuneTrial.PENDING:  # the process failed before the trial's first step
            self._unbegun.add(trial.trial_id)
        placed = self._placed.get(trial.trial_id)
        if recovers and placed is not None and self.failed is None:
            try:
                self._scheduler.decided("lost", placed.request.trial, f"{_lost(found)['message']}; it is run once more")
            except TuningError as failure:
                self.failed = failure

    def save(self, checkpoint_path: str) -> None:
        """Writes nothing: a study is resumed from its own records, never from Tune's."""

    def restore(self, checkpoint_path: str) -> None:
        """Reads nothing, for the same reason."""

    def __getstate__(self) -> dict[str, Any]:
        dropped: dict[str, Any] = {"_scheduler": None, "_orders": None, "_setting": None, "_placing": None}
        return {**self.__dict__, **dropped, "_placed": {}, "_errors": {}}


class _Deciding(FIFOScheduler):
    """A Tune scheduler that asks the scheduler at every rung, and at every beat between them."""

    _supports_buffered_results = False

    def __init__(self, scheduler: Scheduler, asking: _Asking) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scheduler: Scheduler | None = scheduler
        self._asking: _Asking | None = asking

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
        if result.get("done") or self._scheduler is None or self._asking is None:
            return str(TrialScheduler.CONTINUE)
        try:
            found = result[REPORT][0]
            judge = self._scheduler.goes_on if found.get("paused") else self._scheduler.at_rung
            goes_on = self._asking.failed is None and judge(trial.config["trial"], found)
        except TuningError as error:
            self._asking.failed, goes_on = error, False
        return str(TrialScheduler.CONTINUE if goes_on else TrialScheduler.STOP)

    def on_trial_error(self, tune_controller: Any, trial: TuneTrial) -> None:
        """Hears of an error that ends the trial, before the sampler does."""
        if self._asking is not None:
            self._asking.errored(trial, recovers=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_scheduler": None, "_asking": None}


class _Lost(tune.Callback):
    """Hears of a process that was lost where Tune starts its trial again."""

    def __init__(self, asking: _Asking) -> None:
        self._asking: _Asking | None = asking

    def on_trial_recover(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """Passes it on."""
        if self._asking is not None:
            self._asking.errored(trial, recovers=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"_asking": None}


def _pickled(trial: TuneTrial) -> BaseException | None:
    """Returns the exception of a trial; Tune's own getters look where the file is not yet."""
    path = trial.pickled_error_file
    if path is None:
        return None
    try:
        found = ray.cloudpickle.loads(Path(path).read_bytes())  # written by Tune a moment ago, in our own folder
    except (OSError, EOFError, AttributeError, ImportError, TypeError, ValueError):
        return None
    return found if isinstance(found, BaseException) else None


def _lost(error: BaseException | None) -> dict[str, Any]:
    """Returns the result of a trial that Tune gave up, from the error its process ended with."""
    fault = oom.PROCESS_LOST if error is None else oom.fault(error)
    if fault is oom.UNKNOWN and isinstance(error, ray.exceptions.RayError) and getattr(error, "cause", None) is None:
        fault = oom.PROCESS_LOST
    said = "" if fault is oom.PROCESS_LOST else str(getattr(error, "cause", None) or error or "")
    return given_up(fault, said)  # what Ray says of a lost process is a page of what may have happened


def _named_runner(name: str, resources: dict[str, float]) -> type[TrialRunner]:
    """Returns the trainable under a name that says in Ray's dashboard what its actors do, and what each is given.

    `tune.with_resources` would do the second, and call every actor ResourceTrainable.
    """

    def request(cls: type[TrialRunner], config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([resources])

    members = {"default_resource_request": classmethod(request)}
    return cast(type[TrialRunner], type(name, (TrialRunner,), members))


def _trial_folder(trial: TuneTrial) -> str:
    """Returns a folder of its own for each time that a trial is run."""
    attempt = int(trial.config.get("attempt", 1))
    return _trial_name(trial) + (f"-again{attempt - 1}" if attempt > 1 else "")


def _trial_name(trial: TuneTrial) -> str:
    """Returns the study's own name of the trial with the knobs most looked for."""
    knobs = trial.config.get("knobs", {})
    parts = [f"bs{knobs['batch_size']}"] if "batch_size" in knobs else []
    parts += [f"lr{knobs['learning_rate']:.1e}"] if "learning_rate" in knobs else []
    return "-".join([str(trial.config.get("trial", trial.trial_id)), *parts])
