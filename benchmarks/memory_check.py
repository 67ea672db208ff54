"""How far the predicted peak of a training step is from the real one, and from what PyTorch's own tracker says.

    make memory-check
    python -m benchmarks.memory_check --out benchmarks/results/memory_check.jsonl

Part "cpu": the peak that two traces on fake tensors predict for the CPU's kernels, against the peak of a real run of
the same step, from the allocations that torch.profiler sees. Kinds of model x fp32 and bf16 x checkpointing off and on
x micro-batches. Part "tracker": a step on fake CUDA tensors, traced by us and by torch.distributed._tools' MemTracker.
Each row is a line of JSON, a table at the end; the exit code is 1 where a bar is not met.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuning.memory.tracing import shim

MICRO_BATCHES = (4, 12, 32)
RECURRENT = ("LSTM", "GRU")
UNTRACKED = ("DoRA LM",)
"""MemTracker raises where a parameter is frozen: it wants to hook its gradient."""
NO_KERNEL = "could not create a primitive"
"""What oneDNN says of a bf16 LSTM on a processor without AVX-512."""
MEAN_BAR, MOST_BAR, RECURRENT_BAR, TRACKER_BAR = 0.01, 0.03, 0.05, 0.001
"""Of the errors where the dispatcher sees the kernels; the most of recurrent networks; the most against MemTracker."""


def main() -> int:
    """Returns 0 where every bar is met."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, help="a .jsonl to write")
    made.add_argument("--only", choices=("cpu", "tracker"))
    made.add_argument("--kind", action="append", help="one kind of model alone, such as 'encoder'")
    asked = made.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    if asked.only != "tracker":
        rows += _shown(cpu_rows(asked.kind))
    if asked.only == "tracker":
        rows += _shown(tracker_rows(asked.kind))
    elif asked.only is None:  # the library for fake CUDA tensors is loaded before torch, hence in a process of its own
        command = [sys.executable, "-m", "benchmarks.memory_check", "--only", "tracker"]
        command += [part for kind in asked.kind or () for part in ("--kind", kind)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        rows += _shown(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    if asked.out is not None:
        from benchmarks.document import provenance  # imports torch, which the part "tracker" loads its own way

        head = provenance("memory_check")
        asked.out.write_text("".join(json.dumps(row) + "\n" for row in [head, *rows]), encoding="utf-8")
    return _verdict(rows)


def _shown(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def cpu_rows(kinds: list[str] | None) -> Iterator[dict[str, Any]]:
    """Yields a row for each kind, type, checkpointing and micro-batch: predicted and real peak bytes of the CPU."""
    import torch

    from benchmarks.memory_models import CONVOLUTIONAL, KINDS
    from trainables.knobs import Knobs
    from trainables.workload import Config
    from tuning.memory.tracing.step import Job, predict

    torch.set_num_threads(1)
    for name, kind in KINDS.items():
        if kinds and name not in kinds:
            continue
        for dtype in ("fp32", "bf16"):
            for checkpointing in (False, True):
                config = Config(Knobs(amp_dtype=dtype, activation_checkpointing=checkpointing))
                start = time.perf_counter()
                job = Job(kind, config, insides=True)
                prediction = predict(job)
                traced_s = time.perf_counter() - start
                if any(NO_KERNEL in note for note in prediction.notes):
                    print(f"{name} in {dtype} is left out: this processor has no kernel for it", file=sys.stderr)
                    continue
                for micro_batch in MICRO_BATCHES:
                    if name in CONVOLUTIONAL:  # oneDNN chooses its formats by the batch size, so they follow no line
                        prediction = predict(job, (micro_batch,))
                    trace = prediction.trace(micro_batch)
                    if trace is None:
                        raise SystemExit(f"{name}: no trace at micro-batch {micro_batch}: {prediction.notes}")
                    predicted, seen = live_bytes(trace, 1), live_bytes(trace, 1, without="workspace")
                    real = real_bytes(kind, config.with_knobs(micro_batch_size=micro_batch), micro_batch)
                    yield {
                        "part": "cpu",
                        "kind": name,
                        "dtype": dtype,
                        "checkpointing": checkpointing,
                        "micro_batch": micro_batch,
                        "predicted_bytes": predicted,
                        "dispatcher_bytes": seen,
                        "real_bytes": real,
                        "error_frac": predicted / real - 1,
                        "traced_s": round(traced_s, 2),
                    }


def live_bytes(trace: Any, unit: int, without: str = "") -> int:
    """Returns the most live bytes of a trace, each storage rounded up to `unit`, less those of a category."""
    sizes: dict[int, int] = {}
    live = most = 0
    for ident, size in trace.events:
        if size < 0:
            live -= sizes.pop(ident, 0)
        elif trace.categories[ident] != without:
            sizes[ident] = -(-size // unit) * unit
            live += sizes[ident]
            most = max(most, live)
    return most


def real_bytes(kind: Any, config: Any, micro_batch: int) -> int:
    """Returns the peak of a real run of the step: parameters and buffers, and what the profiler saw allocated."""
    from torch.profiler import ProfilerActivity, profile

    from trainables import loop
    from trainables.plan import Plan
    from trainables.resident import Resident
    from tuning.memory.tracing.onednn import allocations

    resident = Resident(kind)
    resident.dataset(config, "train")  # the samples themselves are the host's
    state = loop.prepare(resident, config, Plan(samples=1_000_000))
    state.meter = None
    fixed = {t.untyped_storage().data_ptr(): t.nbytes for t in [*state.model.parameters(), *state.model.buffers()]}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loop.rehearse(state, micro_batch)
    live = most = 0
    for size in allocations(seen):
        live += size
        most = max(most, live)
    return sum(fixed.values()) + most


def tracker_rows(kinds: list[str] | None) -> Iterator[dict[str, Any]]:
    """Yields a row for each kind, type and checkpointing: a fake CUDA step's peak by our trace and by MemTracker."""
    shim.load(shim.library(), (8, 6))
    from benchmarks.memory_models import KINDS
    from benchmarks.memory_tracker import ours, theirs
    from trainables.knobs import Knobs
    from trainables.workload import Config

    for name, kind in KINDS.items():
        if name in UNTRACKED or (kinds and name not in kinds):
            continue
        for dtype in ("fp32", "bf16"):
            for checkpointing in (False, True):
                config = Config(Knobs(amp_dtype=dtype, activation_checkpointing=checkpointing), device="cuda")
                start = time.perf_counter()
                traced = live_bytes(ours(kind, config), 512)
                middle = time.perf_counter()
                tracked = theirs(kind, config)
                yield {
                    "part": "tracker",
                    "kind": name,
                    "dtype": dtype,
                    "checkpointing": checkpointing,
                    "predicted_bytes": traced,
                    "tracker_bytes": tracked,
                    "error_frac": traced / tracked - 1,
                    "ours_s": round(middle - start, 2),
                    "theirs_s": round(time.perf_counter() - middle, 2),
                }


def _verdict(rows: list[dict[str, Any]]) -> int:
    """Prints the table and what missed its bar; returns 1 where something did."""
    parts = {
        "visible kernels": [r for r in rows if r["part"] == "cpu" and r["kind"] not in RECURRENT],
        "recurrent": [r for r in rows if r["part"] == "cpu" and r["kind"] in RECURRENT],
        "against MemTracker": [r for r in rows if r["part"] == "tracker"],
    }
    bars = {"visible kernels": MOST_BAR, "recurrent": RECURRENT_BAR, "against MemTracker": TRACKER_BAR}
    print(f"\n{'kind':18}{'rows':>5}{'mean error':>12}{'most':>9}")
    kinds = dict.fromkeys((r["part"], r["kind"]) for r in rows)
    for part, name in kinds:
        errors = [abs(r["error_frac"]) for r in rows if (r["part"], r["kind"]) == (part, name)]
        print(f"{name:18}{len(errors):5}{statistics.mean(errors):12.3%}{max(errors):9.3%}  {part}")
    missed = 0
    for title, some in parts.items():
        if not some:
            continue
        errors = [abs(r["error_frac"]) for r in some]
        mean, most = statistics.mean(errors), max(errors)
        met = most <= bars[title] and (title != "visible kernels" or mean <= MEAN_BAR)
        missed += not met
        print(f"{title}: {len(errors)} rows, mean {mean:.3%}, most {most:.3%}, {'met' if met else 'NOT MET'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
