"""How far the predicted peak of a training step is from the real one, with the CPU's kernels.

    make memory-check
    python -m benchmarks.memory_check --out benchmarks/results/memory_check.jsonl

The peak that two traces on fake tensors predict, against the peak of a real run of the same step, from the allocations
that torch.profiler sees. Kinds of model x fp32 and bf16 x checkpointing off and on x micro-batches. Each row is a line
of JSON, a table at the end; the exit code is 1 where a bar is not met.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.document import provenance
from benchmarks.memory_models import CONVOLUTIONAL, KINDS
from trainables import loop
from trainables.knobs import Knobs
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.workload import Config
from tuning.memory.trace import Trace
from tuning.memory.tracing.onednn import allocations
from tuning.memory.tracing.step import Job, predict

MICRO_BATCHES = (4, 12, 32)
RECURRENT = ("LSTM", "GRU")
NO_KERNEL = "could not create a primitive"
"""What oneDNN says of a bf16 LSTM on a processor without AVX-512."""
MEAN_BAR, MOST_BAR, RECURRENT_BAR = 0.01, 0.03, 0.05
"""Of the errors where the dispatcher sees the kernels; the most of recurrent networks."""


def main() -> int:
    """Returns 0 where every bar is met."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, help="a .jsonl to write")
    made.add_argument("--kind", action="append", help="one kind of model alone, such as 'encoder'")
    asked = made.parse_args()
    warnings.simplefilter("ignore")
    rows = _shown(cpu_rows(asked.kind))
    if asked.out is not None:
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
                    predicted, seen = live_bytes(trace), live_bytes(trace, without="workspace")
                    real = real_bytes(kind, config.with_knobs(micro_batch_size=micro_batch), micro_batch)
                    yield {
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


def live_bytes(trace: Trace, without: str = "") -> int:
    """Returns the most live bytes of a trace, less those of a category."""
    sizes: dict[int, int] = {}
    live = most = 0
    for ident, size in trace.events:
        if size < 0:
            live -= sizes.pop(ident, 0)
        elif trace.categories[ident] != without:
            sizes[ident] = size
            live += size
            most = max(most, live)
    return most


def real_bytes(kind: Any, config: Any, micro_batch: int) -> int:
    """Returns the peak of a real run of the step: parameters and buffers, and what the profiler saw allocated."""
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


def _verdict(rows: list[dict[str, Any]]) -> int:
    """Prints the table and what missed its bar; returns 1 where something did."""
    parts = {
        "visible kernels": [r for r in rows if r["kind"] not in RECURRENT],
        "recurrent": [r for r in rows if r["kind"] in RECURRENT],
    }
    bars = {"visible kernels": MOST_BAR, "recurrent": RECURRENT_BAR}
    print(f"\n{'kind':18}{'rows':>5}{'mean error':>12}{'most':>9}")
    for name in dict.fromkeys(r["kind"] for r in rows):
        errors = [abs(r["error_frac"]) for r in rows if r["kind"] == name]
        print(f"{name:18}{len(errors):5}{statistics.mean(errors):12.3%}{max(errors):9.3%}")
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
