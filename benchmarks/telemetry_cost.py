"""What telemetry and the stopwatch cost: the throughput of one training loop with them and without, in turns.

    python -m benchmarks.telemetry_cost --rounds 20 --samples 160

A pair is two trainings of the same batches, one read as every measurement of a study is, one with neither spans nor
readings; which goes first changes from pair to pair. Their speeds are samples over all seconds of the loop, so what
happens between two windows counts as well. The cost is 1 minus the median ratio, with the 95 % interval of a
median. The last line of stdout is one JSON document; nothing is written unless --out names a file.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.document import provenance, publish
from trainables import loop
from trainables.knobs import Scalar
from trainables.stopwatch import Span, Stopwatch, Window
from tuning.backends.session import WINDOW_S, Session, Setting

BATCH = 32
SMALL = {"max_train_samples": 256, "max_val_samples": 32}


class Bare(Stopwatch):
    """Counts samples and reads one clock; no spans, hence no events on CUDA."""

    def lap(self, span: Span) -> None:
        """Measures nothing."""

    def window(self, loss: float) -> Window:
        """Returns the window with empty spans; waits for a CUDA device, as the samples of a window must be done."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        return Window(self.samples, self.steps, self.micro_steps, self.elapsed_s(), 0.0, 0.0, 0.0, 0.0, loss)


@dataclass(frozen=True)
class Pair:
    """Samples a second of the two sides, and which went first."""

    on: float
    off: float
    first: str


@contextmanager
def bare() -> Iterator[None]:
    """Inside, the loop runs without spans. It offers no such choice, as nobody but this program wants it."""
    module: Any = loop
    module.Stopwatch = Bare
    try:
        yield
    finally:
        module.Stopwatch = Stopwatch


def median_interval(values: list[float]) -> tuple[float, float]:
    """Returns the order statistics between which the median lies with at least 95 %, whatever the distribution.

    With fewer than six values no pair of them does; then the whole range.
    """
    ordered, count = sorted(values), len(values)
    below, rank = 0.0, 0  # P(fewer than `rank` + 1 of `count` are below the median), binomial
    while (below := below + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    return ordered[max(0, rank - 1)], ordered[count - max(1, rank)]


def samples_per_s(session: Session, knobs: dict[str, Scalar], samples: int, number: int, read: bool) -> float:
    """Returns samples over seconds of a training on `samples` samples, its first optimiser step left out."""
    plan = loop.Plan(samples=samples, window_s=WINDOW_S)
    state = loop.prepare(session.resident, session.config(knobs), plan)
    state.epoch = number
    if read:
        session.sampler.begin()
    start, before = 0.0, 0
    for event in loop.train(state):
        if not isinstance(event, Window):
            continue
        if read:
            session.sampler.read()
        if not before:
            start, before = time.perf_counter(), state.samples
    return (state.samples - before) / (time.perf_counter() - start)


def measure(session: Session, knobs: dict[str, Scalar], rounds: int, samples: int) -> list[Pair]:
    """Returns the pairs, after one that is not counted."""
    pairs = []
    for number in range(rounds + 1):
        order = ("on", "off") if number % 2 == 0 else ("off", "on")
        found = {}
        for side in order:
            if side == "on":
                found[side] = samples_per_s(session, knobs, samples, number, read=True)
            else:
                with bare():
                    found[side] = samples_per_s(session, knobs, samples, number, read=False)
        if number:
            pairs.append(Pair(found["on"], found["off"], order[0]))
            print(f"{number}/{rounds}  on {found['on']:.1f}  off {found['off']:.1f} samples/s", file=sys.stderr)
    return pairs


def main() -> None:
    """Measures, and prints the cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="nli")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--samples", type=int, default=160, help="of each training; 4 s of nli on one core")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.rounds < 1:
        parser.error(f"--rounds {asked.rounds}: 1 or more")
    if asked.samples < 2 * BATCH:
        parser.error(f"--samples {asked.samples}: {2 * BATCH} or more, two batches")
    options = SMALL if asked.workload == "nli" else {}
    session = Session(Setting(asked.workload, options, asked.device, threads=torch.get_num_threads()))
    knobs: dict[str, Scalar] = {"batch_size": BATCH, "micro_batch_size": asked.micro_batch, "ram_cache": True}
    pairs = measure(session, knobs, asked.rounds, asked.samples)
    session.sampler.begin()
    start = time.perf_counter()
    for _ in range(100):
        session.sampler.read()
    reading_s = (time.perf_counter() - start) / 100
    ratios = [p.on / p.off for p in pairs]
    low, high = median_interval(ratios)
    document = {
        **provenance("telemetry_cost", asked.device),
        "workload": asked.workload,
        "knobs": knobs,
        "samples": asked.samples,
        "cost_frac": 1 - statistics.median(ratios),
        "cost_low_frac": 1 - high,
        "cost_high_frac": 1 - low,
        "spread_frac": statistics.stdev(ratios) if len(ratios) > 1 else None,
        "reading_s": reading_s,
        "pairs": [asdict(p) for p in pairs],
    }
    publish(document, asked.out)


if __name__ == "__main__":
    main()
