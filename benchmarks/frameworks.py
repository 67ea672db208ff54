"""Whether what a study exports trains as fast in the framework alone as best.yaml says.

    python -m benchmarks.frameworks --out benchmarks/results/frameworks.jsonl
    python -m benchmarks.frameworks --from-run runs/lightning_loop/ID --times 5

A study of each example (`tests/data/NAME_loop.py`, budget=quick), then `--times` pairs, each way in a fresh process and
the first in turns: the framework's own loop with the exported settings and environment and nothing of ours, and
`python -m tuning train --from best.yaml` over as many samples. Both speeds are samples over seconds behind the first
optimiser step, waiting for data included. The bound of 5 % is on the median of a pair's ratio, since the machine
drifts; beside it stands the ratio to what best.yaml says. One JSON document an example; nothing is written unless --out
names a file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.document import provenance, publish
from trainables.host_memory import AT_START
from tuning.config import best_file
from tuning.config.best_file import Best
from tuning.config.environment import ON_A_CPU
from tuning.journal.records import read
from tuning.journal.run import History
from tuning.journal.runs import JOURNAL, known_runs
from tuning.report import summary
from tuning.report.frameworks import exported
from tuning.report.summary import Place
from tuning.report.trial_views import SPEED
from tuning.stats.uncertainty import Pair, gain

BOUND_FRAC = 0.05
"""How far the median ratio of the pairs may be from 1."""


class Clock:
    """The seconds between the first optimiser step's end and the last one's."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._last = 0.0

    def step(self) -> None:
        """An optimiser step is over."""
        self._last = time.perf_counter()
        self._first = self._last if self._first is None else self._first

    def seconds(self) -> float:
        """Returns them; 0 with fewer than two steps."""
        return self._last - (self._last if self._first is None else self._first)


@dataclass(frozen=True)
class Found:
    """A configuration, and where it was measured."""

    best: Best
    place: Place

    def words(self, framework: str) -> Mapping[str, Mapping[str, Any]]:
        """Returns the settings in the words of a framework."""
        return exported(self.best, framework, self.place).settings


def study(workload: str, runs: Path) -> Path:
    """Returns the folder of a new quick study; raises RuntimeError with its last words where it did not finish."""
    before = set(known_runs(str(runs)))
    command = [sys.executable, "-m", "tuning.run", f"workload={workload}", "budget=quick", f"runs_dir={runs}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    made = [folder for folder in known_runs(str(runs)) if folder not in before]
    if done.returncode or len(made) != 1:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return made[0]


def trained(arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the result of `python ARGUMENTS --out FOLDER --json`, the folder being temporary.

    `arguments` begin with `-m tuning train`. Raises RuntimeError with the training's last words where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *arguments, "--out", f"{folder}/train", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout))


def found_in(folder: Path) -> Found:
    """Returns what a finished run has found."""
    return Found(best_file.read(folder / "best.yaml"), summary.of_run(History(read(folder / JOURNAL)[0])).place)


def in_trainer(script: Any, found: Found, passes: int, clock: Clock) -> None:
    """Trains the example of transformers' Trainer for whole passes."""
    from transformers import BertForTokenClassification, Trainer, TrainerCallback, TrainingArguments

    class Timing(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    (settings,) = found.words("transformers").values()
    still: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, num_train_epochs=passes, **still, **settings)
        model = BertForTokenClassification(script.CONFIG)
        Trainer(model, arguments, train_dataset=script.TRAIN, callbacks=[Timing()]).train()


def in_lightning(script: Any, found: Found, passes: int, clock: Clock) -> None:
    """Trains the example of Lightning for whole passes."""
    from pytorch_lightning import Callback, Trainer

    class Timing(Callback):  # type: ignore[misc]  # what a check may lack
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step > self.steps:
                self.steps = trainer.global_step
                clock.step()

        steps = 0

    settings = found.words("lightning")
    still: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    still |= {"enable_model_summary": False, "limit_val_batches": 0}
    trainer = Trainer(max_epochs=passes, callbacks=[Timing()], **still, **settings["Trainer"])
    trainer.fit(script.Net(found.best.knobs["learning_rate"]), script.Data(**settings["DataLoader"]))


def in_accelerate(script: Any, found: Found, passes: int, clock: Clock) -> None:
    """Trains the example of Accelerate for whole passes."""
    import torch
    from accelerate import Accelerator
    from torch import nn
    from torch.utils.data import DataLoader

    settings = found.words("accelerate")
    accelerator = Accelerator(**settings["Accelerator"])
    net: Any = script.network()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=float(found.best.knobs["learning_rate"]))
    loader: Any = DataLoader(script.TRAIN, shuffle=True, **settings["DataLoader"])
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _ in range(passes):
        for points, labels in loader:
            with accelerator.accumulate(net):
                accelerator.backward(nn.functional.cross_entropy(net(points), labels))
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                clock.step()


EXAMPLES: Mapping[str, Callable[[Any, Found, int, Clock], None]] = {
    "trainer": in_trainer,
    "lightning": in_lightning,
    "accelerate": in_accelerate,
}
"""The framework's own loop of each example, without a line of ours."""


def speed(example: str, found: Found, passes: int) -> float:
    """Returns the samples/s of an example in its framework, with the exported settings, in this process."""
    script, clock = importlib.import_module(f"tests.data.{example}_script"), Clock()
    EXAMPLES[example](script, found, passes, clock)
    return float((passes * len(script.TRAIN) - int(found.best.knobs["batch_size"])) / clock.seconds())


def there(example: str, folder: Path, passes: int) -> float:
    """Returns the same of a fresh process; raises RuntimeError with its last words where it fails."""
    command = [sys.executable, "-m", "benchmarks.frameworks", "--there", example, str(folder), str(passes)]
    environment = {**ON_A_CPU, **AT_START, **os.environ}  # as `export` lists it
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{example} ended with {done.returncode}: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def pairs(example: str, folder: Path, times: int, passes: int, samples: int) -> list[dict[str, float]]:
    """Returns the speeds of each pair: in the framework, and by `python -m tuning train`."""
    arguments = ["-m", "tuning", "train", "--from", str(folder / "best.yaml"), "--samples", str(samples)]
    ways = {"there": lambda: there(example, folder, passes), "trained": lambda: float(trained(arguments)[SPEED])}
    rows = []
    for number in range(times):
        row = {name: ways[name]() for name in (list(ways) if number % 2 == 0 else list(reversed(ways)))}
        rows.append(row)
        shown = ", ".join(f"{name} {rate:.1f}" for name, rate in row.items())
        print(f"{example} {number + 1}/{times}: {shown} samples/s", file=sys.stderr)
    return rows


def compared(said: float, rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Returns what pairs come to: the ratios of each, median and spread, and those to what best.yaml says."""
    ratios = [row["there"] / row["trained"] for row in rows]
    beside = gain("there", "trained", [Pair(row["there"], row["trained"]) for row in rows])
    return {
        "said_samples_per_s": said,
        "over_trained": {"median": statistics.median(ratios), "least": min(ratios), "largest": max(ratios)},
        "over_said": statistics.median(row["there"] / said for row in rows),
        "beside": asdict(beside) if beside else None,
        "within_bound": abs(statistics.median(ratios) - 1) <= BOUND_FRAC,
        "pairs": [dict(row) for row in rows],
    }


def document(example: str, folder: Path, times: int, seconds: float) -> dict[str, Any]:
    """Returns what is to be said of the run of an example."""
    found = found_in(folder)
    best = found.best
    said, count = (
        best.measured.samples_per_s.median or 0.0,
        len(importlib.import_module(f"tests.data.{example}_script").TRAIN),
    )
    passes = max(2, math.ceil(seconds * said / count))
    framework = "transformers" if example == "trainer" else example
    return {
        **provenance("frameworks", found.place.type or "cpu"),
        "example": example,
        "run": folder.name,
        "knobs": dict(best.knobs),
        "unsaid": list(exported(best, framework, found.place).unsaid),
        "samples": passes * count,
        **compared(said, pairs(example, folder, times, passes, passes * count)),
    }


def main() -> None:
    """Runs the studies and the pairs, and prints a JSON document each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", nargs="*", default=list(EXAMPLES), choices=tuple(EXAMPLES))
    parser.add_argument("--from-run", type=Path, nargs="+", default=[], help="finished runs, in place of new studies")
    parser.add_argument("--times", type=int, default=5, metavar="N", help="pairs of each, 2 or more  [5]")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help="about the length of a training  [10]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the documents to it")
    parser.add_argument("--there", nargs=3, metavar=("EXAMPLE", "RUN", "PASSES"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.there:
        example, folder, passes = asked.there
        print(json.dumps(speed(example, found_in(Path(folder)), int(passes))))
        return
    if asked.times < 2:
        parser.error(f"--times {asked.times}: 2 or more")
    with tempfile.TemporaryDirectory() as made:
        folders = {folder.parent.name.removesuffix("_loop"): folder for folder in asked.from_run}
        for example in folders or asked.examples:
            own = folders.get(example) or study(f"tests/data/{example}_loop.py", Path(made))
            publish(document(example, own, asked.times, asked.seconds), asked.out, append=True)


if __name__ == "__main__":
    main()
