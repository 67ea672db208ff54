"""Seconds between two trials: from the end of one (its evaluation done) to the first step of the next, one slot.

    python -m benchmarks.warm_gap --trials 21 --out benchmarks/results/warm_gap.jsonl

Four ways in one run, on the same trials of `nli` (64 training samples, DoRA on two layers of MiniLM):
  fresh     Ray Tune's default: a class Trainable, a new actor for every trial
  reuse     Ray Tune with reuse_actors=True and a reset_config that loads data and model again, as its docs show
  ours      reuse_actors=True, data and model resident, outcomes returned
  ours-oom  as ours, and every other trial runs out of memory; the gap is taken from the failed allocation
The last line of stdout is one JSON document. Tune's own loggers are off and its other settings equal in all four.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any

from ray import tune

from benchmarks.document import KeepingScheduler, provenance, publish
from trainables.plan import Plan
from tuning.search.protocols import TrialPlan, TrialRequest
from tuning.workers.ray_tune import RayCluster, RayExecutor
from tuning.workers.ray_worker import REPORT
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

OPTIONS = {"max_train_samples": 64, "max_val_samples": 16}
KNOBS = {"learning_rate": 5e-4, "batch_size": 16, "micro_batch_size": 8, "ram_cache": True}
TOO_LARGE = {**KNOBS, "batch_size": 64, "micro_batch_size": 64}
CAP_BYTES = 400 * 2**20
"""Holds a micro-batch of 8 and not one of 64."""
SETTING = WorkerConfig("nli", OPTIONS, "cpu", threads=1)
PLAN = Plan(samples=64, milestones=(64,))


class Plain(tune.Trainable):
    """A Trainable as people write one: everything is loaded in setup, and again in reset_config."""

    def setup(self, config: dict[str, Any]) -> None:
        """Loads workload, data and model."""
        self._session = Session(SETTING)
        self._trial = self._session.trial(KNOBS, PLAN, seed=0)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Loads them again."""
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Trains to the end."""
        found = self._trial.advance()
        return {"done": True, "samples": found["samples"], REPORT: [found]}


class Keep(tune.Callback):
    """Keeps every trial's last report."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Takes one result."""
        self.found.append(result[REPORT][0])


class Scheduler(KeepingScheduler):
    """Hands out `count` equal trials; with `ooms`, every other one is too large."""

    def __init__(self, count: int, ooms: bool) -> None:
        super().__init__()
        self._left, self._ooms = count, ooms

    def requeue(self, trial: str) -> None:
        """Takes nothing back: no node is lost."""

    def next_trial(self, kind: str = "") -> TrialRequest | None:
        """Returns the next trial."""
        if self._left == 0:
            return None
        self._left -= 1
        large = self._ooms and self._left % 2 == 1
        return TrialRequest(f"t{self._left:03d}", TOO_LARGE if large else KNOBS, 0)


def plain(count: int, *, reuse: bool) -> list[dict[str, Any]]:
    """Returns the reports of `count` trials by Tune alone, in order."""
    keep = Keep()
    with tempfile.TemporaryDirectory() as folder:
        tune.Tuner(
            tune.with_resources(Plain, {"CPU": 1.0}),
            param_space={"number": tune.grid_search(list(range(count)))},
            tune_config=tune.TuneConfig(max_concurrent_trials=1, reuse_actors=reuse),
            run_config=tune.RunConfig(
                storage_path=folder,
                verbose=0,
                callbacks=[keep],
                checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            ),
        ).fit()
    return keep.found


def ours(count: int, *, ooms: bool) -> list[dict[str, Any]]:
    """Returns the reports of `count` trials by our executor, in order."""
    scheduler = Scheduler(count, ooms)
    setting = WorkerConfig("nli", OPTIONS, "cpu", 1, CAP_BYTES) if ooms else SETTING
    orders = TrialPlan(64, (64,), shrink=False, concurrency=1, threads=1)
    RayExecutor(setting, "gap").run(scheduler, orders)
    return scheduler.found


def gaps(found: list[dict[str, Any]], *, after: str) -> list[float]:
    """Returns seconds from the end of each trial of that outcome to the first step of the next."""
    pairs = [(a, b) for a, b in itertools.pairwise(found) if a["outcome"] == after and b["first_step_at"]]
    return [b["first_step_at"] - (a["failed_at"] if after == "oom" else a["returned_at"]) for a, b in pairs]


def main() -> None:
    """Runs the four ways and prints a table, then JSON."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--trials", type=int, default=21)
    asked.add_argument("--out", type=Path)
    arguments = asked.parse_args()
    count = arguments.trials
    logging.getLogger("ray.tune").setLevel(logging.ERROR)  # it misses the log files that are switched off
    with RayCluster(cores=2, gpus=0, dashboard=False):
        rows = {
            "fresh": gaps(plain(count, reuse=False), after="ok"),
            "reuse": gaps(plain(count, reuse=True), after="ok"),
            "ours": gaps(ours(count, ooms=False), after="ok"),
            "ours-oom": gaps(ours(2 * count, ooms=True), after="oom"),
        }
    fresh = statistics.median(rows["fresh"])
    document = {
        **provenance("warm_gap"),
        "trials": count,
        "gaps_s": {name: [round(g, 4) for g in found] for name, found in rows.items()},
    }
    print(f"{'way':<10}{'median s':>10}{'min':>9}{'max':>9}{'n':>5}{'of fresh':>10}")
    for name, found in rows.items():
        median = statistics.median(found)
        print(f"{name:<10}{median:>10.3f}{min(found):>9.3f}{max(found):>9.3f}{len(found):>5}{median / fresh:>10.3f}")
    publish(document, arguments.out)


if __name__ == "__main__":
    main()
