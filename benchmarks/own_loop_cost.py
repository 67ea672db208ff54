"""What `run` costs a loop of one's own: the bare script against the same script under `run`, by step size.

    python -m benchmarks.own_loop_cost --processes 12 --out benchmarks/results/own_loop_cost.jsonl

One perceptron for each width, one thread, the same samples, each in an order of its own. The two scripts of a process
take turns of some 30 ms, so that a machine that drifts slows both alike: the bare one in the main thread, the other in
the thread that `run` gives it, its windows and hand-overs included, the first steps of both left out. What a process
tells is the median over the turns of what a step takes longer under `run`. Where malloc puts tensors differs from
process to process and is worth 1 % and more: the cost is the median over the processes, with the interval that it is in
by 95 %, whatever the distribution. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from scipy.stats import quantile_test
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.document import provenance, publish
from trainables import own_loop
from trainables.knobs import Knobs
from trainables.own_run import Run
from trainables.plan import Plan
from trainables.workload import Config, OwnLoop, table_of

WIDTHS = (16, 128, 512, 1024, 2048, 3000, 4600)
"""Of the hidden layers: steps of about a third of a millisecond up to a tenth of a second on one core."""
BATCH, INPUTS, WARM_STEPS, TURN_S, WAIT_S = 32, 64, 10, 0.03, 60.0


class _Turns:
    """What each script calls behind its steps: it waits for its turn, and is timed in it."""

    def __init__(self, count: int, steps: int, *, is_first: bool) -> None:
        self.seconds: list[float] = []
        self.other: Callable[[], object] = lambda: None
        self._turn, self._count, self._of_turn = threading.Semaphore(0), count, steps
        self._steps, self._begun, self._is_first = -WARM_STEPS, 0.0, is_first

    def stepped(self) -> bool:
        """Hands over behind the last step of a turn, and waits for the next; returns whether there is one."""
        self._steps += 1
        if self._steps % self._of_turn or self._steps < 0:
            return True
        if self._steps:
            self.seconds.append((time.perf_counter() - self._begun) / self._of_turn)
        if self._steps or not self._is_first:
            self.other()
        if len(self.seconds) == self._count:
            return False
        if not self._turn.acquire(timeout=WAIT_S):
            raise TimeoutError("the other script has ended")
        self._begun = time.perf_counter()
        return True

    def begin(self) -> None:
        """Lets its script go on."""
        self._turn.release()


def bare(width: int, turns: _Turns) -> None:
    """Trains as a plain script does."""
    loader = DataLoader(_data(), batch_size=BATCH, shuffle=True)
    net, optimizer = _made(width)
    while True:
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(net(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not turns.stepped():
                return


def under_run(width: int, turns: _Turns) -> None:
    """Trains the same script under `run`, in the thread that it is given."""

    def train(run: Run) -> None:
        loader = DataLoader(_data(), shuffle=True, **run.loader())
        net, optimizer = run.prepare(*_made(width))
        for inputs, targets in run.batches(loader):
            run.backward(nn.functional.mse_loss(net(inputs), targets), optimizer)
            if not turns.stepped():
                run.report(loss=0.0)
                return

    workload = OwnLoop(train, {"loss": "min"}, {"batch_size": BATCH}, {}, {}, {}, __file__)
    knobs = Knobs.of({"batch_size": BATCH, "micro_batch_size": BATCH}, table_of(workload))
    state = own_loop.prepare(own_loop.OwnResident(workload), Config(knobs), Plan(samples=10**12, window_s=0.4))
    for _ in own_loop.train(state):
        pass


def longer_s(width: int, count: int, steps: int) -> tuple[float, float]:
    """Returns the seconds of a bare step, and what one takes longer under `run`: medians over turns of `steps` each.

    Both are on one core, which is as warm for the one as for the other.
    """
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    plain, own = _Turns(count, steps, is_first=True), _Turns(count, steps, is_first=False)
    plain.other, own.other = own.begin, plain.begin
    thread = threading.Thread(target=under_run, args=(width, own))
    thread.start()
    bare(width, plain)
    thread.join()
    differences = [b - a for a, b in zip(plain.seconds, own.seconds, strict=True)]
    return statistics.median(plain.seconds), statistics.median(differences)


def measured(width: int, processes: int, seconds: float) -> dict[str, Any]:
    """Returns the row of a width, each figure from a process of its own."""
    step_s, _ = _apart(width, 10, 3)
    steps = max(3, round(TURN_S / step_s))
    count = max(20, round(seconds / (2 * steps * step_s)))
    found = [_apart(width, count, steps) for _ in range(processes)]
    costs = [longer / step for step, longer in found]
    within = quantile_test(costs).confidence_interval(0.95)
    return {
        "width": width,
        "turns": count,
        "turn_steps": steps,
        "step_s": statistics.median(step for step, _ in found),
        "longer_s": statistics.median(longer for _, longer in found),
        "cost_frac": statistics.median(costs),
        "cost_frac_least": float(within.low),
        "cost_frac_most": float(within.high),
    }


def _apart(width: int, count: int, steps: int) -> tuple[float, float]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(longer_s, width, count, steps).result()


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
    parser.add_argument("--processes", type=int, default=12, metavar="N", help="of each width, 6 or more  [12]")
    parser.add_argument("--seconds", type=float, default=4.0, metavar="S", help="about what each trains  [4]")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS), metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the document to it")
    asked = parser.parse_args()
    if asked.processes < 6:
        parser.error(f"--processes {asked.processes}: 6 or more are needed for an interval")
    rows = []
    for width in asked.widths:
        rows.append(row := measured(width, asked.processes, asked.seconds))
        step_ms, longer_us = 1e3 * row["step_s"], 1e6 * row["longer_s"]
        cost, least, most = (100 * row[f"cost_frac{which}"] for which in ("", "_least", "_most"))
        print(f"width {width:5d}  {step_ms:8.3f} ms  {longer_us:+6.1f} us  {cost:+.2f} % ({least:+.2f}, {most:+.2f})")
    malloc = {name: value for name, value in os.environ.items() if name.startswith("MALLOC_")}
    document = {**provenance("own_loop_cost"), "malloc": malloc, "processes": asked.processes, "rows": rows}
    publish(document, asked.out, append=True)


if __name__ == "__main__":
    main()
