"""The executor of trials: the worker that probed if one runs at a time, else Ray Tune over a worker a slot."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from tuning.config.errors import ConfigError
from tuning.config.schema import StudyConfig
from tuning.search.protocols import TrialPlan
from tuning.workers import UNREAD_BY_RAY, join_another, machine, nvml
from tuning.workers.dispatch import LocalExecutor
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

if TYPE_CHECKING:
    from tuning.workers.nodes import ToldNode
    from tuning.workers.ray_board import RayBoard
    from tuning.workers.ray_cluster import RayCluster
    from tuning.workers.ray_join import JoinedCluster
    from tuning.workers.ray_tune import RayExecutor


_chosen: list[str] = []


def as_ray_allows(config: StudyConfig, warn: Callable[[str], None]) -> StudyConfig:
    """Returns the configuration; with one trial at a time, and a warning, where Ray cannot start in this process.

    Raises ConfigError where the study needs Ray: a cluster, the dashboard, several trials or devices.
    """
    in_ray = bool(config.cluster) or config.dashboard
    why = _bars_ray(config)
    if why is None or (not in_ray and (config.search.trials == 0 or one_at_a_time(config))):
        return config
    if in_ray or isinstance(config.concurrency, int) or devices(config) > 1:
        remedy = "a Python process (in a notebook a new kernel) that has `from tuning import tune` before `import ray`"
        raise ConfigError(why, remedy=remedy)
    warn(f"{why}: trials run one at a time")
    return config.model_copy(update={"concurrency": 1})


def _bars_ray(config: StudyConfig) -> str | None:
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return "a Ray runs in this process, which takes one at a time"
    unread = set[str]() if config.insecure_cluster else UNREAD_BY_RAY
    if "RAY_AUTH_MODE" in unread or (unread and not config.cluster):
        return "ray was imported before tuning.tune, and reads at its import how it listens and authenticates"
    return None


def prepare(config: StudyConfig) -> None:
    """Imports Ray where it may be needed: 2 s, while the profiler's process has imports of its own."""
    if config.cluster:
        _choose("a user's cluster")
        join_another(insecure=config.insecure_cluster)
    elif config.dashboard or (config.search.trials and config.card.device != "cuda" and not one_at_a_time(config)):
        _choose("a Ray of its own")
    if config.cluster or config.dashboard or not one_at_a_time(config):
        _ray()


def one_at_a_time(config: StudyConfig) -> bool:
    """Returns whether it is sure, before anything is measured, that one trial runs at a time."""
    if isinstance(config.concurrency, int):
        return config.concurrency == 1
    return config.card.device != "cuda"


def devices(config: StudyConfig) -> int:
    """Returns how many devices the trials of a study are spread over: every visible card, or one CPU.

    Cards that train a trial together count as one.
    """
    return max(1, len(nvml.gpus()) // config.devices_per_trial) if config.card.device == "cuda" else 1


def cluster(config: StudyConfig) -> RayCluster:
    """Returns a Ray that is not started, of all cores and cards."""
    _choose("a Ray of its own")
    gpus = devices(config) * config.devices_per_trial if config.card.device == "cuda" else 0
    found: RayCluster = _ray().RayCluster(cores=machine.cores(), gpus=gpus, dashboard=config.dashboard)
    return found


def joined(config: StudyConfig) -> JoinedCluster:
    """Returns the user's cluster, not joined yet; `prepare` comes first."""
    ref, runs = config.workload.ref, Path(config.runs_dir)
    found: JoinedCluster = _ray().JoinedCluster(str(config.cluster), ref, runs, insecure=config.insecure_cluster)
    return found


def board(config: StudyConfig, run: str) -> RayBoard | None:
    """Returns who shows the study in Ray's dashboard, where Ray runs for the whole of it; else None."""
    if not config.dashboard and not config.cluster:
        return None
    found: RayBoard = _ray().RayBoard(f"{config.workload.name} {run}")
    return found


@contextmanager
def executor(
    config: StudyConfig,
    plan: TrialPlan,
    profiler: Worker,
    worker: WorkerConfig,
    users: JoinedCluster | None = None,
    told: ToldNode | None = None,
) -> Iterator[LocalExecutor | RayExecutor]:
    """Yields the executor of a plan: Ray Tune if there are several slots or its dashboard is on.

    If not, the worker that probed continues: all is loaded, and nothing else need start. Under Ray Tune it is
    ended, for its memory is theirs. With the dashboard Ray runs already; with a cluster of the user's it is theirs, and
    `told` hears of each node that joins it.
    """
    worker = replace(worker, slots=plan.concurrency)  # on a card known by now alone
    if users is not None:
        profiler.end()
        yield _ray().RayExecutor(replace(worker, workload=users.ref), f"{config.workload.name}_trials", users, told)
        return
    if plan.concurrency == 1 and not config.dashboard:
        yield LocalExecutor(profiler)
        return
    profiler.end()
    with nullcontext() if config.dashboard else cluster(config):
        yield _ray().RayExecutor(worker, f"{config.workload.name}_trials")


def _choose(which: str) -> None:
    """Raises ConfigError where this process has had the other: Ray reads once how it listens and authenticates."""
    if not _chosen:
        _chosen.append(which)
    if _chosen != [which]:
        what = f"this process has had {_chosen[0]}, and is asked for {which}: Ray takes one of them in a process"
        raise ConfigError(what, remedy="begin it in another Python process")


def _ray() -> ModuleType:
    from tuning.workers import ray_tune  # only here: a study of one slot has no use for it

    return ray_tune
