"""What each knob buys on this device, one at a time: a receipt for every line of docs/knobs.md.

    python -m benchmarks.knob_receipts --rounds 5 --window 1 --out benchmarks/results/knob_receipts.jsonl

`python -m tuning ablate` measures the knobs that a run's best and `before` differ in. This measures the others too,
each where it has something to do (`knob_cases.CASES`): the configuration with the knob and without it, as pairs in
turns. Knobs that need a CUDA device are left out without one; learning rate, warm-up, weight decay and dropout change
no speed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.document import provenance, publish
from benchmarks.knob_cases import BASES, CASES, pairs
from tuning.journal.records import Journal
from tuning.report import text
from tuning.report.ablation_results import ablation_results
from tuning.search import ablate
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig


def main() -> None:
    """Measures, and prints a table and one JSON document a workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(CASES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=float, default=1.0, help="seconds of each measurement")
    parser.add_argument("--out", type=Path, help="a file to append to")
    asked = parser.parse_args()
    for workload in asked.workloads:
        session = Session(WorkerConfig(workload, {}, asked.device, threads=torch.get_num_threads()))
        with tempfile.TemporaryDirectory() as folder, Journal.open(Path(folder) / "r.jsonl", create=True) as journal:
            mine = pairs(workload, cuda=asked.device == "cuda")
            ablate.measure(
                session,
                journal,
                mine,
                asked.rounds,
                asked.window,
                lambda r: print(text.ablation_round(r), file=sys.stderr),
            )
            found = ablation_results(journal.records, {})
        print(workload)
        for part in text.ablation(found):
            Console(width=100).print(part)
        document = {
            **provenance("knob_receipts", asked.device),
            "workload": workload,
            "base": BASES[workload],
            "rounds": asked.rounds,
            "window_s": asked.window,
            "receipts": [asdict(r) for r in found],
        }
        publish(document, asked.out, append=True)


if __name__ == "__main__":
    main()
