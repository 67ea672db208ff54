"""What `run` costs a loop of one's own: the bare script against the same script under `run`, in pairs, by step size.

    python -m benchmarks.own_loop_cost --pairs 20 --out benchmarks/results/own_loop_cost.jsonl

One perceptron for each width, one thread, the same seed, samples and batches; each pair runs both ways, the first in
turns. A run's figure is the seconds of its steps behind the tenth, waiting for data included, so that the step that is
watched, and starting a thread, are in none. The cost is the ratio of a pair less one, with the 95 % interval of its
mean over the pairs. Each width has a process of its own: what malloc keeps of one made the next, of 36 MB tensors, 45 %
faster in the thread that had run the last. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.document import provenance, publish
from trainables import own_loop
from trainables.knobs import Knobs
from trainables.own_run import Run
from trainables.plan import Plan
from trainables.workload import Config, OwnLoop, table_of
from tuning.stats.uncertainty import t_975

WIDTHS = (16, 128, 512, 1024, 2048)
"""Of the hidden layers: steps of about a third of a millisecond up to a tenth of a second on one core."""
BATCH, INPUTS, WARM_STEPS = 32, 64, 10


def bare(width: int, steps: int) -> float:
    """Returns the seconds of the steps behind the first, as a plain script takes them."""
    own_loop.seed_everything(0)
    loader = DataLoader(_data(), batch_size=BATCH, shuffle=True)
    net, optimizer = _made(width)
    begun, done = 0.0, 0
    while True:
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(net(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == WARM_STEPS:
                begun = time.perf_counter()
            if done == steps:
                return time.perf_counter() - begun


def under_run(width: int, steps: int) -> float:
    """Returns the same of the same script under `run`, its windows and hand-overs included."""
    marks = [0.0, 0.0]

    def train(run: Run) -> None:
        loader = DataLoader(_data(), shuffle=True, **run.loader())
        net, optimizer = run.prepare(*_made(width))
        for done, (inputs, targets) in enumerate(run.batches(loader), start=1):
            run.backward(nn.functional.mse_loss(net(inputs), targets), optimizer)
            if done in (WARM_STEPS, steps):
                marks[done == steps] = time.perf_counter()

    workload = OwnLoop(train, {"loss": "min"}, {"batch_size": BATCH}, {}, {}, {}, __file__)
    knobs = Knobs.of({"batch_size": BATCH, "micro_batch_size": BATCH}, table_of(workload))
    plan = Plan(samples=steps * BATCH, window_s=0.4)
    state = own_loop.prepare(own_loop.OwnResident(workload), Config(knobs), plan)
    for _ in own_loop.train(state):
        pass
    return marks[1] - marks[0]


def pairs(width: int, steps: int, count: int) -> Iterator[tuple[float, float]]:
    """Yields the seconds of each pair, bare and under `run`; which goes first takes turns."""
    for number in range(count):
        first, second = (bare, under_run) if number % 2 else (under_run, bare)
        found = {first: first(width, steps), second: second(width, steps)}
        yield found[bare], found[under_run]


def measured(width: int, seconds: float, count: int) -> dict[str, Any]:
    """Returns the row of a width, measured on one thread of this process."""
    torch.set_num_threads(1)
    steps = WARM_STEPS + max(20, round(40 * seconds / bare(width, WARM_STEPS + 40)))
    return {"width": width, "steps": steps, **summed_up(list(pairs(width, steps, count)), steps)}


def summed_up(found: list[tuple[float, float]], steps: int) -> dict[str, Any]:
    """Returns what the pairs of one width come to; from two pairs on."""
    costs = [own / plain - 1.0 for plain, own in found]
    half = t_975(len(costs) - 1) * statistics.stdev(costs) / math.sqrt(len(costs))
    return {
        "step_s": statistics.median(plain for plain, _ in found) / (steps - WARM_STEPS),
        "cost_frac": statistics.fmean(costs),
        "half_width_frac": half,
        "median_cost_frac": statistics.median(costs),
    }


def _data() -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    inputs: Tensor = torch.randn(1024, INPUTS, generator=random)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def _made(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise((INPUTS, width, width, 1))]
    net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    return net, torch.optim.SGD(net.parameters(), lr=1e-3)


def main() -> None:
    """Measures every width and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, metavar="N", help="pairs of each width, 2 or more  [20]")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="about the length of a run  [3]")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS), metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the document to it")
    asked = parser.parse_args()
    if asked.pairs < 2:
        parser.error(f"--pairs {asked.pairs}: 2 or more are needed for an interval")
    rows = []
    for width in asked.widths:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            row = process.submit(measured, width, asked.seconds, asked.pairs).result()
        rows.append(row)
        step_ms, cost, half = 1e3 * row["step_s"], 100 * row["cost_frac"], 100 * row["half_width_frac"]
        print(f"width {width:5d}  {step_ms:8.3f} ms a step  {cost:+6.2f} % +- {half:.2f}")
    publish({**provenance("own_loop_cost"), "pairs": asked.pairs, "rows": rows}, asked.out)


if __name__ == "__main__":
    main()
