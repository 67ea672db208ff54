"""What a virtual card of a CPU costs: samples a second without it, with it, and where every operator is counted.

    python -m benchmarks.virtual_card --out benchmarks/results/virtual_card.jsonl

Windows of each workload, in turns within a round, under a cap that nothing reaches: `off` counts the first optimiser
step only, `sparse` what a trial on a virtual card counts (`trainables.live_bytes.Sparse`), `dense` everything. Beside
it the peaks that `sparse` and `dense` saw over the same batches, and what rounding each tensor up to 512 bytes, as a
CUDA device does, adds to the peak of a step. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from pathlib import Path
from typing import Any

from benchmarks.document import provenance, publish
from trainables import live_bytes, loop
from trainables.knobs import Scalar
from trainables.live_bytes import CUDA_GRANULE_BYTES, Sparse
from trainables.plan import Plan
from trainables.stopwatch import Window
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

NO_CAP = 1 << 60
WORKLOADS: dict[str, dict[str, Any]] = {
    "pointer": {},
    "headpose": {},
    "temporal": {},
    "signals": {},
    "nli": {"max_train_samples": 256, "max_val_samples": 32},
}
KNOBS: dict[str, Scalar] = {"learning_rate": 1e-3, "batch_size": 16, "micro_batch_size": 16}


class Dense(Sparse):
    """Counts everything."""

    def whole(self, steps: int) -> bool:
        """Returns True."""
        return True


def window(session: Session, mode: str, window_s: float) -> tuple[float, int]:
    """Returns samples a second after the first two windows, and the peak so far."""
    gc.collect()
    cap = None if mode == "off" else NO_CAP
    plan = Plan(1_000_000_000, window_s=window_s / 4, cap_bytes=cap, mixed_phases=True)
    state = loop.prepare(session.resident, session.config(KNOBS), plan)
    if mode == "dense":
        state.sparse = Dense()
    windows: list[Window] = []
    for event in loop.train(state):
        if isinstance(event, Window):
            windows.append(event)
        if sum(w.wall_s for w in windows[2:]) >= window_s:
            break
    kept = windows[2:]
    return sum(w.samples for w in kept) / sum(w.wall_s for w in kept), state.peak_allocated_bytes


def measure(name: str, rounds: int, window_s: float) -> dict[str, Any]:
    """Returns rates and peaks of a workload in each mode, and its peak in tensors rounded up."""
    session = Session(WorkerConfig(name, WORKLOADS[name], threads=1))
    session.warm(KNOBS)
    rates: dict[str, list[float]] = {"off": [], "sparse": [], "dense": []}
    peaks: dict[str, int] = {}
    for _ in range(rounds):
        for mode, found in rates.items():
            rate, peak = window(session, mode, window_s)
            found.append(rate)
            peaks[mode] = max(peak, peaks.get(mode, 0))
    gc.collect()
    plain = loop.peak_bytes(session.resident, session.config(KNOBS), 16)
    session.resident.drop_model()
    session.resident.meter = live_bytes.LiveBytes(granule_bytes=CUDA_GRANULE_BYTES)
    rounded = loop.peak_bytes(session.resident, session.config(KNOBS), 16)
    return {"workload": name, "rates": rates, "peaks": peaks, "step_bytes": plain, "step_bytes_rounded": rounded}


def main() -> None:
    """Prints a table, then JSON."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--window", type=float, default=2.0, help="seconds")
    asked.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    asked.add_argument("--out", type=Path)
    arguments = asked.parse_args()
    columns = ("off /s", "sparse", "dense", "MiB off", "sparse", "dense")
    print(f"{'workload':<10}" + "".join(f"{name:>9}" for name in columns) + f"{'512 adds':>10}")
    rows = []
    for name in arguments.workloads:
        row = measure(name, arguments.rounds, arguments.window)
        rows.append(row)
        cost = {
            mode: statistics.median(b / a for a, b in zip(row["rates"]["off"], row["rates"][mode], strict=True)) - 1
            for mode in ("sparse", "dense")
        }
        peaks = {mode: bytes_ / 2**20 for mode, bytes_ in row["peaks"].items()}
        adds = row["step_bytes_rounded"] / row["step_bytes"] - 1
        print(
            f"{name:<10}{statistics.median(row['rates']['off']):>9.1f}{cost['sparse']:>9.1%}{cost['dense']:>9.1%}"
            f"{peaks['off']:>9.2f}{peaks['sparse']:>9.2f}{peaks['dense']:>9.2f}{adds:>10.3%}",
            flush=True,
        )
    document = {
        **provenance("virtual_card"),
        "rows": rows,
    }
    publish(document, arguments.out)


if __name__ == "__main__":
    main()
