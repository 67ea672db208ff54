"""Thirty studies of different kinds: was what each exports run as it stands, and is its quality its own?

    python -m benchmarks.picks --out rows.jsonl [--only 0,7] [--max-time 60s]

Each of fifteen trainings (the five workloads, both examples, loops of the tests with and without a framework, the three
of benchmarks/unseen) is studied twice: with the defaults, and in one other way. A row says whether the exported
configuration was run, whether its micro-batch ran out of memory, and whether its quality is of its own trainings.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainables.knobs import Scalar
from tuning.config import best_file
from tuning.journal.events import MeasuredRecord
from tuning.journal.records import read
from tuning.journal.run import History
from tuning.memory.oom import Outcome
from tuning.report import summary

ROOT = Path(__file__).resolve().parents[1]
UNSEEN = [f"benchmarks/unseen/{task}/loop.py" for task in ("image", "tabular", "text")]
LOOPS = [f"tests/data/{name}_loop.py" for name in ("plain", "lightning", "trainer", "accelerate")]
TRAININGS = {
    "pointer": ["concurrency=2"],
    "temporal": ["search.trials=0"],
    "signals": ["pick.goal=quality"],
    "nli": ["card=rtx4060"],
    "headpose": ["card.memory_gib=0.9"],
    "tuning/examples/my_loop.py": ["search.trials=0", "knobs.batch_size=512"],
    "tuning/examples/my_workload.py": ["search.sampler=tpe"],
    LOOPS[0]: ["card.memory_gib=0.62"],
    LOOPS[1]: ["search.trials=0"],
    LOOPS[2]: ["pick.goal=quality"],
    LOOPS[3]: ["concurrency=2"],
    "tests/data/mine.py": ["search.sampler=random"],
    UNSEEN[0]: ["search.trials=0", "card=cpu", "card.memory_gib=0.8"],
    UNSEEN[1]: ["pick.tolerance=0.01"],
    UNSEEN[2]: ["search.sampler=tpe"],
}
"""The other way in which each is studied."""


def main(argv: Sequence[str] | None = None) -> None:
    """Writes a row for each study, then how many came out right."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--only", type=lambda text: [int(n) for n in text.split(",")], help="studies by number, from 0")
    made.add_argument("--max-time", default="60s")
    asked = made.parse_args(argv)
    studies = [(name, ways) for name, other in TRAININGS.items() for ways in ([], other)]
    rows = []
    for number, (name, ways) in enumerate(studies):
        if asked.only is not None and number not in asked.only:
            continue
        with tempfile.TemporaryDirectory(prefix="picks-") as folder:
            rows.append({"study": number} | studied(name, [*ways, f"search.max_time={asked.max_time}"], Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
        with asked.out.open("a", encoding="utf-8") as out:
            print(json.dumps(rows[-1]), file=out)
    print(f"{sum(row['right'] for row in rows)} of {len(rows)} studies came out right")


def studied(name: str, ways: Sequence[str], folder: Path) -> dict[str, Any]:
    """Runs one study in a folder and returns its row."""
    ref = str(ROOT / name) if name.endswith(".py") else name
    command = [sys.executable, "-m", "tuning.run", f"workload={ref}", "name=picked", *ways]
    env, began = {**os.environ, "PYTHONPATH": str(ROOT)}, time.monotonic()
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    row = {"workload": name, "ways": list(ways), "wall_s": round(time.monotonic() - began), "code": ended.returncode}
    found = next(folder.glob("runs/*/picked/best.yaml"), None)
    if found is None:
        return {**row, "right": False, "said": ended.stderr[-600:]}
    checked = check(found)
    return {**row, **checked, "right": checked["ran"] and not checked["ran_out"] and checked["own_quality"]}


def check(best_yaml: Path) -> dict[str, bool]:
    """Returns whether the exported configuration ran, ran out of memory, and has the quality of its own trainings."""
    run = History(read(best_yaml.parent / "trials.jsonl")[0])
    best = best_file.read(best_yaml).knobs

    def is_best(config: Mapping[str, Scalar]) -> bool:
        return {**run.table.defaults, **config} == {**run.table.defaults, **best}

    outcomes = {one.outcome for one in run.events if isinstance(one, MeasuredRecord) and is_best(one.config)}
    own = {one.seed: one.values for one in run.confirmed if is_best(one.config)}
    pick = summary.of_run(run).best
    quality = {} if pick is None else pick.quality
    return {
        "ran": Outcome.OK in outcomes,
        "ran_out": bool(outcomes & {Outcome.OOM, Outcome.HOST_OOM}),
        "own_quality": all(
            found.by_seed[seed] == values[name]
            for name, found in quality.items()
            for seed, values in own.items()
            if seed in found.by_seed
        ),
    }


if __name__ == "__main__":
    main()
