"""What each knob buys on this device, one at a time: a receipt for every line of docs/knobs.md.

    python -m benchmarks.knob_receipts --rounds 5 --window 1 --out benchmarks/results/knob_receipts.jsonl

`python -m tuning ablate` measures the knobs that a run's best and `before` differ in. This measures the others too,
each where it has something to do (`CASES`): the configuration with the knob and without it, as pairs in turns. Knobs
that need a CUDA device are left out without one; learning rate, warm-up, weight decay and dropout change no speed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.document import provenance, publish
from trainables.knobs import Scalar
from tuning import lines
from tuning.backends.session import Session, Setting
from tuning.policies.ablation import Pair, settled
from tuning.receipts import receipts
from tuning.records import Journal
from tuning.stages import ablate

Knobs = Mapping[str, Scalar]
BASES: Mapping[str, Knobs] = {
    "nli": {"batch_size": 32, "micro_batch_size": 16, "adapter": "dora", "adapter_rank": 16},
    "headpose": {"batch_size": 64, "micro_batch_size": 64},
    "signals": {"batch_size": 64, "micro_batch_size": 64, "hidden_size": 64},
    "temporal": {"batch_size": 64, "micro_batch_size": 64, "hidden_size": 64},
}
LOADING: Knobs = {"num_workers": 2}
CASES: Mapping[str, list[tuple[str, Scalar, Scalar, Knobs]]] = {
    # knob, with, without, what it needs beside it
    "nli": [
        ("micro_batch_size", 16, 4, {}),
        ("batch_size", 64, 16, {}),
        ("length_bucketing", True, False, {}),
        ("sequence_packing", True, False, {}),
        ("amp_dtype", "bf16", "fp32", {}),
        ("sdpa_backend", "auto", "math", {}),
        ("activation_checkpointing", True, False, {}),
        ("fused_optimizer", True, False, {}),
        ("optimizer", "adamw8bit", "adamw", {}),
        ("set_to_none", True, False, {}),
        ("sync_every_step", False, True, {}),
        ("adapter", "lora", "dora", {}),
        ("adapter_rank", 4, 16, {}),
    ],
    "headpose": [
        ("channels_last", True, False, {}),
        ("ram_cache", True, False, {}),
        ("num_workers", 2, 0, {}),
        ("prefetch_factor", 4, 2, LOADING),
        ("persistent_workers", True, False, LOADING),
        ("device_augmentation", True, False, {"ram_cache": True}),
        ("inplace_augmentation", True, False, {"ram_cache": True}),
        ("augmentation", 0.0, 1.0, {"ram_cache": True}),
        ("fused_optimizer", True, False, {"ram_cache": True}),
    ],
    "signals": [
        ("hidden_size", 64, 128, {"ram_cache": True}),
        ("sequence_packing", True, False, {"ram_cache": True}),
        ("encoder_frac", 0.0, 0.5, {"ram_cache": True}),
    ],
    "temporal": [("architecture", "lstm", "transformer", {"ram_cache": True})],
}
ON_CUDA: Mapping[str, list[tuple[str, Scalar, Scalar, Knobs]]] = {
    "headpose": [
        ("pin_memory", True, False, {"ram_cache": True}),
        ("non_blocking", True, False, {"ram_cache": True, "pin_memory": True}),
        ("device_prefetch", True, False, {"ram_cache": True, "pin_memory": True}),
        ("cudnn_benchmark", True, False, {"ram_cache": True}),
        ("tf32", True, False, {"ram_cache": True}),
    ],
}


def pairs(workload: str, *, cuda: bool) -> list[Pair]:
    """Returns a workload's pairs."""
    cases = [*CASES.get(workload, []), *(ON_CUDA.get(workload, []) if cuda else [])]
    made = []
    for knob, on, off, beside in cases:
        common = {**BASES[workload], **beside}
        made.append(Pair("best", (knob,), settled({**common, knob: on}), settled({**common, knob: off})))
    return made


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
        session = Session(Setting(workload, {}, asked.device, threads=torch.get_num_threads()))
        with tempfile.TemporaryDirectory() as folder, Journal.open(Path(folder) / "r.jsonl", create=True) as journal:
            mine = pairs(workload, cuda=asked.device == "cuda")
            ablate.measure(
                session, journal, mine, asked.rounds, asked.window, lambda r: print(lines.receipt(r), file=sys.stderr)
            )
            found = receipts(journal.records, {})
        print(workload)
        for line in lines.receipts(found)[1:]:
            print(line)
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
