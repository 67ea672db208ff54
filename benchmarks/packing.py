"""The wall time of a search stage with trials one at a time, and with trials that share one virtual card.

    python -m benchmarks.packing --trials 16 --out benchmarks/results/packing.jsonl

The same trials of a workload, `pointer` unless another is named, on a virtual card of two CPU cores, in turns:
  alone    one slot with the whole card and both cores, as a study does with concurrency=1: what a user gives up
  single   one slot with the whole card and one core: what a trial gets in `shared`, without a neighbour
  shared   two slots with half of the card and one core each, as a study does by itself; a trial that needs more than
           half takes both, with both cores
Every fourth trial has a micro-batch that needs more than half of the card. The wall time runs from the first step of
the first trial to the end of the last, the starts of processes in between included, those of the first ones not. The
last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.document import KeepingScheduler, provenance, publish
from trainables import loop
from trainables.knobs import Scalar
from tuning.search.protocols import TrialPlan, TrialRequest
from tuning.workers.ray_tune import RayCluster, RayExecutor
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

OPTIONS: dict[str, dict[str, Any]] = {"nli": {"max_train_samples": 256, "max_val_samples": 32}}
NARROW, WIDE = 8, 32
"""Micro-batches; batches are of 32 samples either way."""
WAYS = {"alone": (1, 2), "single": (1, 1), "shared": (2, 1)}
"""Slots, and torch's threads in each."""


def knobs(micro_batch: int) -> dict[str, Scalar]:
    """Returns a configuration of that micro-batch."""
    return {"learning_rate": 5e-4, "batch_size": 32, "micro_batch_size": micro_batch, "ram_cache": True}


class Scheduler(KeepingScheduler):
    """Hands out the trials with what they are predicted to need."""

    def __init__(self, count: int, needs: Mapping[int, int]) -> None:
        super().__init__()
        self._left = [WIDE if n % 4 == 2 else NARROW for n in range(count)]
        self._needs = needs

    def next_trial(self) -> TrialRequest | None:
        """Returns the next trial."""
        if not self._left:
            return None
        micro_batch = self._left.pop(0)
        return TrialRequest(f"t{len(self._left):03d}", knobs(micro_batch), 0, self._needs[micro_batch])


def search(setting: WorkerConfig, scheduler: Scheduler, samples: int, way: str) -> dict[str, Any]:
    """Returns what the trials did in one of `WAYS`."""
    slots, threads = WAYS[way]
    card_bytes = setting.cap_bytes or 0
    orders = TrialPlan(samples, (samples,), False, slots, threads, slot_bytes=card_bytes // slots)
    RayExecutor(setting, way).run(scheduler, orders)
    found = [f for f in scheduler.found if f["first_step_at"]]
    begin, end = min(f["first_step_at"] for f in found), max(f["returned_at"] for f in found)
    moments = sorted({f["first_step_at"] for f in found})
    running = [[f for f in found if f["first_step_at"] <= m < f["returned_at"]] for m in moments]
    return {
        "way": way,
        "wall_s": end - begin,
        "outcomes": {
            o: sum(f["outcome"] == o for f in scheduler.found) for o in sorted({f["outcome"] for f in scheduler.found})
        },
        "most_at_once": max(len(r) for r in running),
        "most_cap_bytes": max(sum(f["cap_bytes"] for f in r) for r in running),
        "most_peak_bytes": max(sum(f["peak_allocated_bytes"] for f in r) for r in running),
        "trial_s": [round(f["returned_at"] - f["first_step_at"], 2) for f in found],
        "processes": len({f["pid"] for f in found}),
        "decisions": scheduler.decisions,
    }


def faster(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Returns how much less wall time `shared` took than each other way, by round."""
    walls = {way: [r["wall_s"] for r in rows if r["way"] == way] for way in WAYS}
    return {way: [a / b for a, b in zip(walls[way], walls["shared"], strict=True)] for way in WAYS if way != "shared"}


def main() -> None:
    """Runs all ways in turns; prints a table, then JSON."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--workload", default="pointer")
    asked.add_argument("--samples", type=int, default=1024, help="of training, a trial")
    asked.add_argument("--trials", type=int, default=16)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--out", type=Path)
    arguments = asked.parse_args()
    name, options = arguments.workload, OPTIONS.get(arguments.workload, {})
    session = Session(WorkerConfig(name, options, threads=2))
    needs = {m: loop.peak_bytes(session.resident, session.config(knobs(m)), m) for m in (NARROW, WIDE)}
    card_bytes = max(2 * round(needs[NARROW] * 1.1), round(needs[WIDE] * 1.1))
    rows: list[dict[str, Any]] = []
    with RayCluster(cores=2, gpus=0, dashboard=False):
        for _, way in itertools.product(range(arguments.rounds), WAYS):
            setting = WorkerConfig(name, options, threads=2, cap_bytes=card_bytes)
            rows.append(search(setting, Scheduler(arguments.trials, needs), arguments.samples, way))
    document = {
        **provenance("packing"),
        "workload": name,
        "trials": arguments.trials,
        "samples": arguments.samples,
        "needs_bytes": needs,
        "card_bytes": card_bytes,
        "rows": rows,
        "faster": faster(rows),
    }
    mib = 2**20
    print(f"card {card_bytes / mib:.0f} MiB; needs {', '.join(f'{m}: {b / mib:.0f} MiB' for m, b in needs.items())}")
    print(f"{'way':>6}{'wall s':>9}{'at once':>9}{'caps MiB':>10}{'peaks MiB':>11}{'processes':>11}  outcomes")
    for row in rows:
        caps, peaks = row["most_cap_bytes"] / mib, row["most_peak_bytes"] / mib
        figures = f"{row['way']:>6}{row['wall_s']:>9.1f}{row['most_at_once']:>9}{caps:>10.0f}{peaks:>11.0f}"
        print(f"{figures}{row['processes']:>11}  {row['outcomes']} {row['decisions'] or ''}")
    for way, ratios in document["faster"].items():
        print(f"shared against {way}: {', '.join(f'{r:.2f}' for r in ratios)} times as fast, a round each")
    publish(document, arguments.out)


if __name__ == "__main__":
    main()
