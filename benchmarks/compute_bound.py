"""How near the loop is to its compute-only bound: best.yaml's training against the same one fed from batches in memory.

    python -m benchmarks.compute_bound runs/nli/ID [runs/signals/ID ...] --rounds 9 --seconds 2

A pair is two trainings on the same batches in turns, one through the loader as best.yaml has it, one from a list of the
same batches, made beforehand; which goes first changes from pair to pair. The bound is met where the median ratio is 1.
Beside it stands the share of data-wait that the run itself measured for `before`, `after` and best.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.document import provenance, publish
from benchmarks.telemetry_cost import median_interval
from trainables import batches, loop
from trainables.stopwatch import Window
from trainables.workload import Batch
from tuning.backends.session import WINDOW_S, Session, Setting
from tuning.export import Best, read_best
from tuning.records import Record, read


class Fed(batches.Loader):
    """Delivers the batches of an epoch from a list that its first use fills."""

    kept: ClassVar[dict[tuple[Any, ...], list[Batch]]] = {}

    def epoch(self, plan: Sequence[batches.MicroBatch]) -> Iterator[Batch]:
        """Yields what the loader delivered when the same plan was first asked for."""
        key = tuple(tuple(m.indices) for m in plan)
        if key not in self.kept:
            self.kept[key] = list(super().epoch(plan))
        return iter(self.kept[key])


@contextmanager
def fed() -> Iterator[None]:
    """Inside, the loop takes its batches from memory. It offers no such choice, as nobody but this program wants it."""
    module: Any = batches
    plain, module.Loader = module.Loader, Fed
    try:
        yield
    finally:
        module.Loader = plain


def samples_per_s(session: Session, best: Best, samples: int) -> float:
    """Returns samples over seconds of a training, its first optimiser step left out."""
    state = loop.prepare(session.resident, session.config(best.knobs), loop.Plan(samples=samples, window_s=WINDOW_S))
    start, before = 0.0, 0
    for event in loop.train(state):
        if isinstance(event, Window) and not before:
            start, before = time.perf_counter(), state.samples
    return (state.samples - before) / (time.perf_counter() - start)


def data_wait(records: Sequence[Record]) -> dict[str, float]:
    """Returns the median share of data-wait over the windows of each named configuration of a run."""
    windows = [r for r in records if r.event == "window" and r.get("data_wait_frac") is not None]
    names = dict.fromkeys(r["name"] for r in windows if r["name"] in ("before", "after", "best"))
    return {name: statistics.median(r["data_wait_frac"] for r in windows if r["name"] == name) for name in names}


def compare(folder: Path, rounds: int, seconds: float, device: str) -> dict[str, Any]:
    """Returns the ratio of both trainings of a run's best, with its pairs."""
    best = read_best(folder / "best.yaml")
    session = Session(Setting(best.ref, best.options, device, threads=torch.get_num_threads()))
    rate = best.measured["samples_per_s"]["median"]
    samples = max(4 * int(best.knobs["batch_size"]), round(rate * seconds))
    pairs = []
    for number in range(rounds + 1):
        found = {}
        for side in ("loader", "memory") if number % 2 else ("memory", "loader"):
            if side == "memory":
                with fed():
                    found[side] = samples_per_s(session, best, samples)
            else:
                found[side] = samples_per_s(session, best, samples)
        if number:  # the first pair fills the list, and is not counted
            pairs.append(found)
            print(
                f"{best.ref} {number}/{rounds} " + " ".join(f"{k} {v:.1f}" for k, v in found.items()), file=sys.stderr
            )
    Fed.kept.clear()
    ratios = [p["loader"] / p["memory"] for p in pairs]
    low, high = median_interval(ratios)
    return {
        "workload": best.ref,
        "run": folder.name,
        "samples": samples,
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "data_wait_frac": data_wait(read(folder / "trials.jsonl")[0]),
        "pairs": pairs,
    }


def main() -> None:
    """Measures every run, and prints one JSON document a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each training, by best.yaml's speed")
    parser.add_argument("--out", type=Path, help="a file to append to")
    asked = parser.parse_args()
    for folder in asked.runs:
        found = {
            **provenance("compute_bound", asked.device),
            **compare(folder, asked.rounds, asked.seconds, asked.device),
        }
        publish(found, asked.out, append=True)


if __name__ == "__main__":
    main()
