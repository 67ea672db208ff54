"""What a best.yaml learns when it is trained for as long as budget=full trains, on several seeds.

    python -m benchmarks.quality runs/nli/ID/best.yaml [more.yaml ...] --seeds 3
    python -m benchmarks.quality best.yaml --epochs 60 --options val_frac=null

Seeds are counted from 1: none of them is the search's. One JSON document a file; nothing is written unless --out names
a file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.document import provenance, publish
from trainables import loop, workload
from trainables.batches import size_of
from trainables.plan import Plan
from tuning.config.load import load
from tuning.report.export import read_best
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig


def train(session: Session, knobs: dict[str, Any], epochs: float, seed: int) -> dict[str, Any]:
    """Returns the objectives after `epochs` passes over the training split, and what the training took."""
    config = session.config(knobs, seed)
    samples = round(epochs * size_of(session.resident.dataset(config, "train")))
    state = loop.prepare(session.resident, config, Plan(samples=samples, milestones=(samples,)))
    start, values = time.perf_counter(), {}
    for event in loop.train(state):
        if isinstance(event, loop.Evaluation):
            values = event.values
    return {"seed": seed, "values": values, "samples": samples, "wall_s": time.perf_counter() - start}


def main() -> None:
    """Trains, and prints what was learned."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="best.yaml files")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, help="[those of budget=full]")
    parser.add_argument("--options", nargs="*", default=[], metavar="NAME=VALUE", help="of the workload, in YAML")
    parser.add_argument("--out", type=Path, help="a file to append to")
    asked = parser.parse_args()
    changed = {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in asked.options)}
    for path in asked.files:
        best = read_best(path)
        epochs = asked.epochs or load([f"workload={best.ref}", "budget=full"]).budget.train_epochs
        options = {**best.options, **changed}
        session = Session(WorkerConfig(best.ref, options, asked.device, threads=torch.get_num_threads()))
        seeds = []
        for seed in range(1, asked.seeds + 1):
            seeds.append(train(session, dict(best.knobs), epochs, seed))
            print(f"{best.ref} seed {seed}: {seeds[-1]['values']} in {seeds[-1]['wall_s']:.0f} s", file=sys.stderr)
        found = {
            **provenance("quality", asked.device),
            "workload": best.ref,
            "options": options,
            "knobs": best.knobs,
            "epochs": epochs,
            "mean": {n: statistics.fmean(s["values"][n] for s in seeds) for n in seeds[0]["values"]},
            "baselines": workload.baselines(session.resident.workload, session.config(best.knobs)),
            "seeds": seeds,
        }
        publish(found, asked.out, append=True)


if __name__ == "__main__":
    main()
