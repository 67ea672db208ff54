"""Who runs a study's trials: the process that probed where one runs at a time, else Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING

from tuning.config.schema import StudyConfig
from tuning.search import packing
from tuning.search.protocols import Executor
from tuning.workers import doctor
from tuning.workers.local_executor import LocalExecutor
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

if TYPE_CHECKING:
    from tuning.workers.ray_tune import RayCluster


def prepare(config: StudyConfig) -> None:
    """Imports Ray where it may be needed: 2 s, while the profiler's process has imports of its own."""
    if config.dashboard or not one_at_a_time(config):
        _ray()


def one_at_a_time(config: StudyConfig) -> bool:
    """Returns whether it is sure, before anything is measured, that trials run one at a time on one device."""
    asked = config.concurrency if isinstance(config.concurrency, int) else None
    if config.card.device == "cuda":
        is_alone = asked == 1 or (asked is None and config.search.strategy == "joint")  # see `Limits.slots`
        return is_alone and _devices(config) == 1
    return packing.on_cpu(doctor.cores(), asked) == 1


def cluster(config: StudyConfig) -> RayCluster:
    """Returns a Ray that is not started, of all cores and cards."""
    gpus = _devices(config) if config.card.device == "cuda" else 0
    found: RayCluster = _ray().RayCluster(cores=doctor.cores(), gpus=gpus, dashboard=config.dashboard)
    return found


@contextmanager
def executor(config: StudyConfig, slots: int, profiler: Worker, setting: WorkerConfig) -> Iterator[Executor]:
    """Yields who runs trials in so many slots: Ray where it has something to share, or its dashboard is to show them.

    Else the process that probed goes on: it has loaded everything, and nothing else need start. Ray's first actor
    borrows it; with several cards each actor has its own, and the dashboard shows Ray's own processes, so that it is
    ended there, for its memory is theirs. With the dashboard Ray runs already.
    """
    is_one_device = _devices(config) == 1
    if is_one_device and slots == 1 and not config.dashboard:
        yield LocalExecutor(profiler)
        return
    door = profiler.lend() if is_one_device and not config.dashboard else None
    if door is None:
        profiler.end()
    with nullcontext() if config.dashboard else cluster(config):
        yield _ray().RayExecutor(setting, f"{config.workload.name}_trials", door)


def _devices(config: StudyConfig) -> int:
    return max(1, len(doctor.gpus())) if config.card.device == "cuda" else 1


def _ray() -> ModuleType:
    from tuning.workers import ray_tune  # only here: a study of one slot has no use for it

    return ray_tune
