"""What counting a command from outside costs it: steps a second that it prints itself, with and without, in turns.

    python -m benchmarks.command_cost [--rounds 6] [--widths 256 1024 2048]

Each run is a process that trains a net of that width for some seconds on two threads and prints its steps a second;
with: as a trial runs it (`trainables.integrations.program`), told of every 50 ms. A line a width: milliseconds of a
step, and the geometric mean of the ratio with its 95 % interval.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.fakes import heard
from trainables import training
from trainables.knobs import Knobs
from trainables.plan import Plan
from trainables.workload import Config, table_of
from trainables.workload_files import load
from tuning.stats import uncertainty
from tuning.stats.uncertainty import Pair

SCRIPT = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(2)
width, seconds = int(sys.argv[1]), float(sys.argv[2])
net = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width),
                          torch.nn.ReLU(), torch.nn.Linear(width, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
data = DataLoader(TensorDataset(torch.randn(3200, 64)), batch_size=64)
steps, begun = 0, None
while begun is None or time.perf_counter() - begun < seconds:
    for (x,) in data:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        steps += 1
        if steps == 50:
            begun = time.perf_counter()
print("per_s", (steps - 50) / (time.perf_counter() - begun))
open("per_s", "w").write(str((steps - 50) / (time.perf_counter() - begun)))
"""
LOOP = """
from trainables.integrations.program import Program
train = Program([{python!r}, "script.py", "{{width}}", "{seconds}"], {{"per_s": r"per_s ([0-9.]+)"}}, epochs=1)
SPACE = {{"width": [{width}, 1]}}
OBJECTIVES = {{"per_s": "max"}}
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a line for each width."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=6)
    made.add_argument("--widths", type=int, nargs="+", default=[256, 1024, 2048])
    made.add_argument("--seconds", type=float, default=4.0)
    asked = made.parse_args(argv)
    for width in asked.widths:
        pairs = list[Pair]()
        for number in range(asked.rounds):
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                Path("script.py").write_text(SCRIPT, encoding="utf-8")
                Path(f"loop{width}_{number}.py").write_text(
                    LOOP.format(python=sys.executable, width=width, seconds=asked.seconds), encoding="utf-8"
                )
                found = {}
                for way in ("with", "without")[:: -1 if number % 2 else 1]:
                    if way == "with":
                        counted(f"loop{width}_{number}.py", width)
                    else:
                        subprocess.run([sys.executable, "script.py", str(width), str(asked.seconds)], check=True)
                    found[way] = float(Path("per_s").read_text("utf-8"))
                pairs.append(Pair(found["with"], found["without"]))
                os.chdir("/")
        gain = uncertainty.gain("with", "without", pairs)
        if gain is not None and gain.low is not None and gain.high is not None:
            step_ms = 1000 / (sum(pair.theirs for pair in pairs) / len(pairs))
            print(f"width {width}: {step_ms:.1f} ms a step, {gain.ratio:.3f} ({gain.low:.3f} to {gain.high:.3f})")


def counted(file: str, width: int) -> None:
    """Runs the script to its end as a trial does."""
    loop = load(file)
    knobs = Knobs.of({"width": width}, table_of(loop))
    plan = Plan(samples=1_000_000_000, milestones=(1_000_000_000,), window_s=1.0)
    heard(training.prepare(training.resident_of(loop), Config(knobs), plan))


if __name__ == "__main__":
    main()
