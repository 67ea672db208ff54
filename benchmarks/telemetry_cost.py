"""What telemetry and the stopwatch cost: one training, read as every measurement of a study is and not, in turns.

    python -m benchmarks.telemetry_cost --minutes 5

The loop of one warm process goes on and on. Its windows are in turns read as a study reads them and left with neither
spans nor readings: on, off, off, on. Two neighbours make a pair, a second of which shares what the machine does at
the time. The cost is 1 minus the median ratio of samples a second, with the 95 % interval of a median: once over
wall seconds, once over the processor seconds of the process, which others on the machine disturb less. Beside it
stands what the calls themselves take, timed alone, over a window. The default workload is the one with most steps a
second, since laps are paid a step. The last line of stdout is one JSON document; nothing is written unless --out
names a file.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.document import provenance, publish
from trainables import loop
from trainables.knobs import Scalar
from trainables.plan import Plan
from trainables.stopwatch import SPANS, Span, Stopwatch, Window
from tuning.workers.session import WINDOW_S, Session
from tuning.workers.worker_config import WorkerConfig

KNOBS: dict[str, dict[str, Scalar]] = {
    "temporal": {"batch_size": 32, "micro_batch_size": 32, "hidden_size": 32},
    "nli": {"batch_size": 8, "micro_batch_size": 8, "ram_cache": True},
}
SMALL = {"max_train_samples": 256, "max_val_samples": 32}
WARM = 4
"""Windows that are not counted."""


class Switched(Stopwatch):
    """A stopwatch that counts samples and reads one clock a window while it is off: no spans, no events on CUDA."""

    on: ClassVar[bool] = True

    def lap(self, span: Span) -> None:
        """Measures while it is on."""
        if self.on:
            super().lap(span)

    def window(self, loss: float) -> Window:
        """Returns the window, while off with empty spans; waits for a CUDA device, as its samples must be done."""
        if self.on:
            return super().window(loss)
        if self._cuda:
            torch.cuda.synchronize(self._device)
        return Window(self.samples, self.steps, self.micro_steps, self.elapsed_s(), 0.0, 0.0, 0.0, 0.0, loss)


@contextmanager
def switched() -> Iterator[None]:
    """Inside, the loop's stopwatch can be switched off. It offers no such choice, as only this program wants it."""
    module: Any = loop
    module.Stopwatch = Switched
    try:
        yield
    finally:
        module.Stopwatch, Switched.on = Stopwatch, True


def median_interval(values: list[float]) -> tuple[float, float]:
    """Returns the order statistics between which the median lies with at least 95 %, whatever the distribution.

    With fewer than six values no pair of them does; then the whole range.
    """
    ordered, count = sorted(values), len(values)
    below, rank = 0.0, 0  # P(fewer than `rank` + 1 of `count` are below the median), binomial
    while (below := below + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    return ordered[max(0, rank - 1)], ordered[count - max(1, rank)]


def measure(session: Session, knobs: dict[str, Scalar], seconds: float, window_s: float) -> list[dict[str, Any]]:
    """Returns the blocks in their order: whether read, samples, wall and processor seconds."""
    state = loop.prepare(session.resident, session.config(knobs), Plan(samples=10**9, window_s=window_s))
    blocks: list[dict[str, Any]] = []
    session.sampler.begin()
    with switched():
        until = 0.0
        samples, wall, cpu = 0, time.perf_counter(), time.process_time()
        for _ in loop.train(state):
            if Switched.on:
                session.sampler.read()
            now = state.samples, time.perf_counter(), time.process_time()
            blocks.append(
                {"on": Switched.on, "samples": now[0] - samples, "wall_s": now[1] - wall, "cpu_s": now[2] - cpu}
            )
            until = until or (now[1] + seconds if len(blocks) == WARM else 0.0)
            if until and now[1] > until and len(blocks) % 4 == 0:
                break
            if len(blocks) % 1000 == 0:  # the sampler keeps its readings, a study's are few
                session.sampler.begin()
            Switched.on = len(blocks) % 4 in (0, 3)
            samples, wall, cpu = state.samples, time.perf_counter(), time.process_time()
    return blocks[WARM:]


def cost(blocks: Sequence[dict[str, Any]], clock: str) -> dict[str, float]:
    """Returns 1 minus the median ratio of speeds of neighbouring blocks, its interval, the deviation of one ratio."""
    ratios = []
    for one, other in zip(blocks[::2], blocks[1::2], strict=True):
        on, off = (one, other) if one["on"] else (other, one)
        ratios.append(on["samples"] / on[clock] / (off["samples"] / off[clock]))
    low, high = median_interval(ratios)
    spread = statistics.stdev(ratios) if len(ratios) > 1 else math.nan
    return {"frac": 1 - statistics.median(ratios), "low_frac": 1 - high, "high_frac": 1 - low, "spread_frac": spread}


def calls(session: Session) -> tuple[float, float]:
    """Returns the seconds of a lap and of a reading, each timed alone."""
    watch = Stopwatch(torch.device(session.setting.device))
    start = time.perf_counter()
    for _ in range(1000):
        watch.lap("data_wait")
    lap_s = (time.perf_counter() - start) / 1000
    session.sampler.begin()
    start = time.perf_counter()
    for _ in range(100):
        session.sampler.read()
    return lap_s, (time.perf_counter() - start) / 100


def main() -> None:
    """Measures, and prints the cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="temporal")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--window", type=float, default=WINDOW_S, help="seconds of a block; a study's windows")
    parser.add_argument("--out", type=Path, help="a file for the document")
    asked = parser.parse_args()
    if asked.minutes <= 0 or asked.window <= 0:
        parser.error(f"--minutes {asked.minutes} --window {asked.window}: more than 0")
    options = SMALL if asked.workload == "nli" else {}
    session = Session(WorkerConfig(asked.workload, options, asked.device, threads=torch.get_num_threads()))
    knobs = KNOBS.get(asked.workload, {})
    blocks = measure(session, knobs, 60 * asked.minutes, asked.window)
    wall, cpu = cost(blocks, "wall_s"), cost(blocks, "cpu_s")
    lap_s, reading_s = calls(session)
    steps = statistics.median(b["samples"] for b in blocks) / int(session.config(knobs).knobs.micro_batch_size)
    document = {
        **provenance("telemetry_cost", asked.device),
        "workload": asked.workload,
        "knobs": knobs,
        "window_s": asked.window,
        "pairs": len(blocks) // 2,
        "cost_wall": wall,
        "cost_cpu": cpu,
        "lap_s": lap_s,
        "reading_s": reading_s,
        "calls_frac": (steps * len(SPANS) * lap_s + reading_s) / statistics.median(b["wall_s"] for b in blocks),
        "blocks": [[int(b["on"]), b["samples"], round(b["wall_s"], 5), round(b["cpu_s"], 5)] for b in blocks],
    }
    for name, one in (("wall", wall), ("processor", cpu)):
        said = f"{one['frac']:+.2%} ({one['low_frac']:+.2%} to {one['high_frac']:+.2%})"
        print(f"cost over {name} seconds {said}, {len(blocks) // 2} pairs", file=sys.stderr)
    publish(document, asked.out)


if __name__ == "__main__":
    main()
