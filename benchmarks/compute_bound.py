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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.document import provenance, publish
from benchmarks.fed import pairs
from benchmarks.telemetry_cost import median_interval
from tuning.journal.records import Record, read
from tuning.report.export import read_best
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig


def data_wait(records: Sequence[Record]) -> dict[str, float]:
    """Returns the median share of data-wait over the windows of each named configuration of a run."""
    windows = [r for r in records if r.event == "window" and r.get("data_wait_frac") is not None]
    names = dict.fromkeys(r["name"] for r in windows if r["name"] in ("before", "after", "best"))
    return {name: statistics.median(r["data_wait_frac"] for r in windows if r["name"] == name) for name in names}


def compare(folder: Path, rounds: int, seconds: float, device: str) -> dict[str, Any]:
    """Returns the ratio of both trainings of a run's best, with its pairs."""
    best = read_best(folder / "best.yaml")
    session = Session(WorkerConfig(best.ref, best.options, device, threads=torch.get_num_threads()))
    rate = best.measured["samples_per_s"]["median"]
    samples = max(4 * int(best.knobs["batch_size"]), round(rate * seconds))
    found = []
    for number, pair in enumerate(pairs(session, best.knobs, samples, rounds), start=1):
        found.append(pair)
        print(f"{best.ref} {number}/{rounds} " + " ".join(f"{k} {v:.1f}" for k, v in pair.items()), file=sys.stderr)
    ratios = [p["loader"] / p["memory"] for p in found]
    low, high = median_interval(ratios)
    return {
        "workload": best.ref,
        "run": folder.name,
        "samples": samples,
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "data_wait_frac": data_wait(read(folder / "trials.jsonl")[0]),
        "pairs": found,
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
