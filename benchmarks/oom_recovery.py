"""Seconds from an OOM to the first step of the next trial, and what an OOM leaves behind.

    python -m benchmarks.oom_recovery --rounds 5 --out benchmarks/results/oom_recovery.jsonl

Trials of `tests/data/greedy.py` on a virtual card of 3.5 MiB, one slot of Ray Tune: each fails in forward, in backward,
in the optimiser, in evaluation or in a loader's process, and is followed by one that fits. Then, in a process without
Ray, 50 OOMs in a row: live bytes, tensors and resident set before and after. The last line of stdout is one JSON
document.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.document import KeepingScheduler, provenance, publish
from trainables.knobs import Scalar
from trainables.plan import Plan
from tuning.search.protocols import TrialPlan, TrialRequest
from tuning.workers.ray_tune import RayCluster, RayExecutor
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

GREEDY = Path(__file__).parents[1] / "tests" / "data" / "greedy.py"
CAP_BYTES = 7 * 2**19
PLACES = {"forward": 0.1, "backward": 0.2, "optimizer": 0.3, "evaluation": 0.4, "loader": 0.5}
"""Where a trial fails, by the value of the knob that tells the workload so."""


def knobs(place: str) -> dict[str, Scalar]:
    """Returns a configuration that fails there; one that fits for a place that is none."""
    base: dict[str, Scalar] = {"learning_rate": 0.01, "batch_size": 16, "micro_batch_size": 8}
    return {**base, "augmentation": PLACES.get(place, 1.0), "num_workers": int(place == "loader")}


class Scheduler(KeepingScheduler):
    """Hands out trials that fail and trials that fit, in turns."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.places = ["", *(p for _ in range(rounds) for place in PLACES for p in (place, ""))]
        self._next = 0

    def requeue(self, trial: str) -> None:
        """Takes nothing back: no node is lost."""

    def next_trial(self, kind: str = "") -> TrialRequest | None:
        """Returns the next trial."""
        if self._next == len(self.places):
            return None
        self._next += 1
        return TrialRequest(f"t{self._next - 1:03d}", knobs(self.places[self._next - 1]), 0)


def recover(rounds: int) -> dict[str, Any]:
    """Returns, by place, the seconds from the failure to the next trial's first step, and the bytes left behind."""
    scheduler = Scheduler(rounds)
    with RayCluster(cores=2, gpus=0, dashboard=False):
        orders = TrialPlan(64, (64,), shrink=False, concurrency=1, threads=1)
        RayExecutor(WorkerConfig(str(GREEDY), cap_bytes=CAP_BYTES), "greedy").run(scheduler, orders)
    rows: dict[str, Any] = {place: {"seconds": [], "left_bytes": [], "outcomes": []} for place in PLACES}
    for place, failed, then in zip(scheduler.places[1::2], scheduler.found[1::2], scheduler.found[2::2], strict=True):
        rows[place]["seconds"].append(then["first_step_at"] - failed["failed_at"])
        rows[place]["left_bytes"].append(failed["held_bytes"] - failed["own_bytes"])
        rows[place]["outcomes"].append(f"{failed['outcome']}, then {then['outcome']}")
    return {"places": rows, "processes": len({f["pid"] for f in scheduler.found}), "decisions": scheduler.decisions}


def leak(count: int) -> dict[str, Any]:
    """Returns live bytes, tensors and resident set of a process before and after so many OOMs."""
    session = Session(WorkerConfig(str(GREEDY), cap_bytes=CAP_BYTES))
    session.warm(knobs(""))
    plan = Plan(64, (64,), cap_bytes=CAP_BYTES)
    places = [p for p in PLACES if p != "loader"]

    def fail(times: int) -> None:
        for number in range(times):
            session.trial(knobs(places[number % len(places)]), plan, 0, shrink="").advance()

    def state() -> dict[str, int]:
        gc.collect()
        tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
        rss = psutil.Process().memory_info().rss
        return {"live_bytes": session.resident.meter.live_bytes, "tensors": tensors, "rss_bytes": rss}

    fail(8)
    before = state()
    fail(count)
    return {"ooms": count, "before": before, "after": state()}


def main() -> None:
    """Prints a table, then JSON."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--out", type=Path)
    arguments = asked.parse_args()
    found = {**recover(arguments.rounds), "leak": leak(50)}
    document = {
        **provenance("oom_recovery"),
        **found,
    }
    print(f"{'OOM in':<12}{'median s':>10}{'max s':>8}{'n':>4}{'left bytes':>12}  outcomes")
    for place, row in found["places"].items():
        seconds = row["seconds"]
        middle, most = statistics.median(seconds), max(seconds)
        outcomes = "; ".join(sorted(set(row["outcomes"])))
        print(f"{place:<12}{middle:>10.3f}{most:>8.3f}{len(seconds):>4}{max(row['left_bytes']):>12}  {outcomes}")
    print(f"processes: {found['processes']}; 50 OOMs: {found['leak']['before']} -> {found['leak']['after']}")
    publish(document, arguments.out)


if __name__ == "__main__":
    main()
