"""Whether a fresh training of best.yaml runs as fast as best.yaml says, and what the study behind it found.

    python -m benchmarks.exported --out benchmarks/results/exported.jsonl
    python -m benchmarks.exported --from-run runs/pointer/ID --times 3

A study for each workload (`python -m tuning.run workload=W budget=quick`, in a process of its own), then `--times`
repeats. A repeat is the command that the study recommends, in a fresh process (with a folder of its own for `--out`),
and beside it the study's own confirm measurement of the same configuration, seed and samples in a fresh worker;
which goes first changes from repeat to repeat. So three ratios: a training over what was exported, which is asked to be
within 3 % of 1 in the median; the confirm measurement now over what was exported, which is what the machine did since;
and a training over the confirm measurement beside it, which is how far the two ways of measuring differ. The last is
the geometric mean with its 95 % interval. Seconds count from the last training that the study confirmed with. One JSON
document a workload; nothing is written unless --out names a file.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.document import provenance, publish
from trainables.knobs import using
from trainables.workload import BUILT_IN
from tuning.config import best_file
from tuning.config.best_file import Best
from tuning.journal.records import Record, read
from tuning.journal.runs import JOURNAL, known_runs
from tuning.report import sentences, summary
from tuning.report.summary import Summary
from tuning.report.trial_views import SPEED
from tuning.stats.uncertainty import gain
from tuning.workers import machine
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

BOUND = 0.03
"""How far the median of the repeats may be from what was exported."""


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


def confirmed(best: Best, setting: WorkerConfig) -> float:
    """Returns the samples/s of one confirm training of the configuration, in a fresh worker."""
    samples = best.samples or 0
    with Worker(setting) as profiler:
        result = profiler.train(best.knobs, samples, (samples,), best.seed)
    if result["outcome"] != "ok":
        raise RuntimeError(f"{best.path} ended with {result['outcome']}: {result['message']}")
    return float(result["measured_samples_per_s"])


def repeats(folder: Path, found: Summary, times: int, measured_at: float) -> list[dict[str, float]]:
    """Returns the speeds of every repeat and the seconds since the study measured its own, unix time `measured_at`."""
    place = found.place
    with using(found.table):
        best = best_file.completed(best_file.read(folder / "best.yaml"))
    threads = machine.cores()
    if place.cores not in (None, threads):
        raise RuntimeError(f"{folder.name} was measured on {place.cores} cores, and this process may use {threads}")
    setting = WorkerConfig(best.ref, dict(best.options), place.type or "cpu", threads, place.cap_bytes, best.seed)
    recommended = shlex.split(sentences.next_commands(found, folder)[0])[1:]
    ways = {
        "trained": lambda: float(trained(recommended)[SPEED]),
        "confirmed": lambda: confirmed(best, setting),
    }
    rows = []
    for number in range(times):
        row = {"since_s": time.time() - measured_at}
        for name in list(ways) if number % 2 == 0 else list(reversed(ways)):
            row[name] = ways[name]()
        rows.append(row)
        shown = ", ".join(f"{name} {row[name]:.1f}" for name in ways)
        print(f"{best.ref} {number + 1}/{times}: {shown} samples/s", file=sys.stderr)
    return rows


def compared(exported: float, rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Returns the ratios of the repeats; `exported` in samples/s.

    `over_exported` is of the trainings, `drift` of the confirm measurements beside them, both over `exported`, each as
    its values, median, least and largest; `beside` is the trainings over the measurements, with a 95 % interval.
    """
    over = _spread([row["trained"] / exported for row in rows])
    own = gain("trained", "confirmed", [(row["trained"], row["confirmed"]) for row in rows])
    return {
        "exported_samples_per_s": exported,
        "over_exported": over,
        "within_bound": abs(over["median"] - 1) <= BOUND,
        "drift": _spread([row["confirmed"] / exported for row in rows]),
        "beside": asdict(own) if own else None,
    }


def _spread(ratios: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(ratios), "least": min(ratios), "largest": max(ratios), "each": list(ratios)}


def figures(found: Summary) -> dict[str, Any]:
    """Returns what a table of workloads says of a study: speeds, gains, quality, wall seconds and their shares."""
    times = found.times
    parts = ("startup", "probing", "training", "evaluating", "confirming", "waiting")
    best = found.best
    return {
        "wall_s": times.wall_s,
        "shares": {part: getattr(times, f"{part}_s") / times.wall_s for part in parts} if times.wall_s else {},
        "overhead_frac": (times.startup_s + times.waiting_s) / times.wall_s if times.wall_s else 0.0,
        "gap_s": times.gap_s,
        "trials": dict(found.trial_counts),
        "probes": dict(found.probe_counts),
        "samples_per_s": {name: one.samples_per_s for name, one in found.named.items()},
        "gains": [asdict(one) for one in found.gains],
        "claimed": found.claim.ratio if found.claim else None,
        "quality": {name: dict(one.by_seed) for name, one in best.quality.items()} if best else {},
        "baselines": {name: dict(values) for name, values in found.baselines.items()},
        "knobs": dict(best.config) if best else {},
        "rule": found.rule,
    }


def measured_at(records: Sequence[Record]) -> float:
    """Returns the unix time of the last training that a study confirmed with; raises ValueError where there is none."""
    moments = [datetime.fromisoformat(r.t).timestamp() for r in records if r.event == "confirmed"]
    if not moments:
        raise ValueError("the run confirmed nothing")
    return max(moments)


def document(folder: Path, times: int) -> dict[str, Any]:
    """Returns what is to be said of a finished run, after training its best so many times."""
    records, _ = read(folder / JOURNAL)
    found = summary.from_records(records)
    if found.best is None or found.best.trained is None:
        raise RuntimeError(f"{folder} picked nothing that was confirmed")
    rows = repeats(folder, found, times, measured_at(records))
    return {
        **provenance("exported", found.place.type or "cpu"),
        "workload": found.workload,
        "run": folder.name,
        "study": figures(found),
        "trainings": list(found.best.trained.windows),
        **compared(found.best.trained.mean, rows),
        "repeats": rows,
    }


def said(one: Mapping[str, Any]) -> str:
    """Returns the ratios of a document in a line."""
    over, beside, drift = one["over_exported"], one["beside"], one["drift"]
    own = f"{beside['ratio']:.3f}" + (f" ({beside['low']:.3f} to {beside['high']:.3f})" if beside["low"] else "")
    return (
        f"{one['workload']}: exported {one['exported_samples_per_s']:.1f} samples/s, trainings {over['median']:.3f} of "
        f"it ({over['least']:.3f} to {over['largest']:.3f}), the confirm measurement beside them {drift['median']:.3f}"
        f"; a training over it {own}"
    )


def main() -> None:
    """Runs the studies, trains what they exported, prints a JSON document each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", default=list(BUILT_IN), choices=BUILT_IN)
    parser.add_argument("--from-run", type=Path, nargs="+", default=[], help="finished runs, in place of new studies")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--runs", type=Path, help="folder of the new studies  [a temporary one]")
    parser.add_argument("--out", type=Path, help="a file to append to")
    asked = parser.parse_args()
    if asked.times < 1:
        parser.error(f"--times {asked.times}: 1 or more")
    with tempfile.TemporaryDirectory() as temporary:
        runs = asked.runs or Path(temporary)
        for source in asked.from_run or asked.workloads:
            folder = source if isinstance(source, Path) else study(source, runs)
            one = document(folder, asked.times)
            publish(one, asked.out, append=True)
            print(said(one), file=sys.stderr)


if __name__ == "__main__":
    main()
