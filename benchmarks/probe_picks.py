"""Are the picks of probes alone the fastest that can be had? Five workloads, five repeats, then long turns.

    python -m benchmarks.probe_picks --folder FOLDER --out rows.jsonl [--only nli,temporal] [--repeats 5] [--rounds 30]

Each repeat is `python -m tuning.run workload=W search.trials=0` with its own seed. All picks and the plain defaults are
then timed in turns, in one process. A second call goes on with what the folder lacks. A row says how fast each pick is
beside the fastest of them and beside the plain defaults, as means of the log over rounds with their standard errors.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainables.knobs import Scalar, identity
from tuning.cli import ablate
from tuning.config import best_file
from tuning.config.schema import ConfirmSection
from tuning.journal.records import Journal, read
from tuning.journal.run import History
from tuning.journal.runs import JOURNAL
from tuning.report import summary
from tuning.search.confirm import measure_windows
from tuning.workers.worker import Worker

ROOT = Path(__file__).resolve().parents[1]
WORKLOADS = ("nli", "pointer", "headpose", "temporal", "signals")
DEFAULTS = "plain defaults"


def main(argv: Sequence[str] | None = None) -> None:
    """Writes and prints a row for each workload."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, required=True, help="where the runs and windows are kept")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--only", type=lambda text: text.split(","), default=WORKLOADS)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--rounds", type=int, default=30)
    made.add_argument("--window", type=float, default=1.0, help="seconds of one window")
    asked = made.parse_args(argv)
    for workload in asked.only:
        runs = [studied(workload, seed, asked.folder) for seed in range(asked.repeats)]
        row = compared(workload, runs, asked.folder, asked.rounds, asked.window)
        print(json.dumps(row), flush=True)
        with asked.out.open("a", encoding="utf-8") as out:
            print(json.dumps(row), file=out)


def studied(workload: str, seed: int, folder: Path) -> Path:
    """Returns the folder of the run with that seed, which is made if it is not there."""
    run = folder / "runs" / workload / f"probes{seed}"
    if not (run / "best.yaml").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tuning.run", f"workload={workload}", "search.trials=0"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([*command, f"search.seed={seed}", f"name={run.name}", "-q"], cwd=folder, env=env, check=True)
    return run


def compared(workload: str, runs: Sequence[Path], folder: Path, rounds: int, window_s: float) -> dict[str, Any]:
    """Returns the row of a workload: its picks and the plain defaults, timed in turns."""
    run = History(read(runs[0] / JOURNAL)[0])
    found = summary.of_run(run)
    defaults, table = found.named[DEFAULTS].config, found.table
    picks = [dict(best_file.read(path / "best.yaml").knobs) for path in runs]
    names = {identity(config, table): f"pick {number}" for number, config in reversed(list(enumerate(picks)))}
    of_pick = [names.get(identity(config, table), "") for config in picks]
    turns: dict[str, Mapping[str, Scalar]] = {name: picks[int(name.split()[1])] for name in sorted(set(of_pick))}
    if identity(defaults, table) in names:
        turns[DEFAULTS] = turns.pop(names[identity(defaults, table)])
        of_pick = [DEFAULTS if name not in turns else name for name in of_pick]
    turns.setdefault(DEFAULTS, dict(defaults))
    path, budget = folder / f"{workload}.jsonl", ConfirmSection(seeds=1, windows=rounds, window_s=window_s, top=1)
    with Worker(ablate.worker_of(runs[0], run)) as profiler, Journal.open(path, create=not path.exists()) as journal:
        measure_windows(profiler, journal, turns, budget, lambda made: None, lambda: math.inf)
        windows = journal.run.windows
    speed = {name: {w.round: w.samples_per_s for w in windows if w.name == name and w.samples_per_s} for name in turns}
    mean = {name: statistics.fmean(map(math.log, own.values())) for name, own in speed.items()}
    fastest = max(mean, key=lambda name: mean[name])
    beside = {
        name: {"best": ratio(own, speed[fastest]), DEFAULTS: ratio(own, speed[DEFAULTS])} for name, own in speed.items()
    }
    differs = {n for config in turns.values() for n in config if len({str(c.get(n)) for c in picks}) > 1}
    return {
        "workload": workload,
        "fastest": fastest,
        "picks": of_pick,
        "mean_of_picks": round(math.exp(statistics.fmean(mean[name] - mean[fastest] for name in of_pick)), 3),
        "beside": beside,
        "rounds": {name: len(own) for name, own in speed.items()},
        "differs": {name: {n: config.get(n) for n in sorted(differs)} for name, config in turns.items()},
    }


def ratio(own: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    """Returns the geometric mean of the ratios by round, and the standard error of its log."""
    logs = [math.log(own[n] / other[n]) for n in sorted(own.keys() & other.keys())]
    error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return [round(math.exp(statistics.fmean(logs)), 3), round(error, 4)]


if __name__ == "__main__":
    main()
