"""What the fronts of a contest are worth on seeds that nobody searched with.

    python -m benchmarks.tuners.other_seeds --runs benchmarks/results/tuners_others.jsonl --workloads pointer

A search keeps the best of many single trainings, and of a hundred the best is partly lucky. Here what a run believed to
be its front is trained again, on the same data, from `--seeds` other seeds of weights and batches, and its hypervolume
is made of the means: of every run at the end, of ours after every training that changed its front, so that a moment can
be given at which ours is where another ends. Speeds are those that the contest measured again. System knobs change no
quality, so that configurations that differ in nothing else are one. A line of `--out` is a workload.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.document import provenance, publish
from benchmarks.tuners.__main__ import rows, scale
from benchmarks.tuners.contest import Contest
from benchmarks.tuners.figures import OURS, Row, Scale, key, on_front_once
from trainables.knobs import kind_of
from tuning import pareto

FIRST_SEED = 1000
"""Far from those of a contest, which count from 0."""
Qualities = Mapping[str, Sequence[float]]
"""The qualities of a configuration, by `learned`, a seed each; NaN of a training that failed."""


def learned(knobs: Mapping[str, Any]) -> str:
    """Returns the knobs that can change what is learned, as text."""
    return key({name: value for name, value in knobs.items() if kind_of(name) != "system"})


def believed(lines: Sequence[dict[str, Any]], objective: str, mode: str) -> list[dict[str, Any]]:
    """Returns the trainings that no other beats, by the speeds and qualities that their run knew itself."""
    sign = -1.0 if mode == "max" else 1.0
    points = [[-float(x["samples_per_s"]), sign * float(x["values"][objective])] for x in lines]
    return [lines[int(n)] for n in pareto.front(np.array(points).reshape(-1, 2))]


def worth(lines: Sequence[Mapping[str, Any]], scale: Scale, qualities: Qualities) -> float:
    """Returns the hypervolume of configurations by their mean quality on other seeds, a failed one as the worst."""
    sign, fastest = (1.0 if scale.mode == "max" else -1.0), max(scale.speeds.values())
    points = []
    for line in lines:
        each = [scale.worst if math.isnan(value) else value for value in qualities[learned(line["knobs"])]]
        gain = max(0.0, sign * (statistics.fmean(each) - scale.worst) / scale.span)
        points.append((-scale.known(line) / fastest, -gain))
    return pareto.hypervolume_2d(np.array(points), (0.0, 0.0)) if points else 0.0


def curve(row: Row, scale: Scale, qualities: Qualities) -> list[tuple[float, float]]:
    """Returns (share of the budget, what the front that was believed in then is worth); it may fall."""
    lines = on_front_once(row, scale.objective, scale.mode)
    return [
        (
            float(line["at"]) / row["budget_s"],
            worth(believed(lines[: n + 1], scale.objective, scale.mode), scale, qualities),
        )
        for n, line in enumerate(lines)
    ]


def wanted(row: Row, scale: Scale) -> dict[str, dict[str, Any]]:
    """Returns the configurations to train again: of ours all that were on its front, of others those at the end."""
    lines = on_front_once(row, scale.objective, scale.mode)
    kept = lines if row["way"] == OURS else believed(lines, scale.objective, scale.mode)
    return {learned(line["knobs"]): line["knobs"] for line in kept}


def trained(workload: str, seed: int, configurations: Mapping[str, Any], seeds: int) -> dict[str, list[float]]:
    """Returns the qualities of each on so many other seeds, on the data of a contest's `seed`, by one thread."""
    from tuning.backends.session import Session

    contest = Contest.made(workload, seed, 0.0, time.time(), Path())
    plan = dataclasses.replace(contest.plan(judged=False), cap_bytes=None)
    session = Session(dataclasses.replace(contest.setting, cap_bytes=None))
    session.warm({})
    found: dict[str, list[float]] = {}
    for name, knobs in configurations.items():
        results = [session.train(knobs, plan, FIRST_SEED + n) for n in range(seeds)]
        values = [(r.get("values") or {}).get(contest.quality) if r["outcome"] == "ok" else None for r in results]
        found[name] = [math.nan if value is None else float(value) for value in values]
    return found


def document(workload: str, own: Sequence[Row], scale: Scale, seeds: int, processes: int) -> dict[str, Any]:
    """Returns the qualities of all that is wanted, by the contest's seed."""
    asked: dict[int, dict[str, Any]] = {}
    for row in own:
        asked.setdefault(int(row["seed"]), {}).update(wanted(row, scale))
    tasks = [
        (workload, seed, dict(list(configurations.items())[part::processes]), seeds)
        for seed, configurations in sorted(asked.items())
        for part in range(processes)
    ]
    qualities: dict[str, dict[str, list[float]]] = {}
    spawned = multiprocessing.get_context("spawn")
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    with ProcessPoolExecutor(processes, spawned, max_tasks_per_child=1) as pool:
        for task, found in zip(tasks, pool.map(trained, *zip(*tasks, strict=True)), strict=True):
            qualities.setdefault(str(task[1]), {}).update(found)
            print(f"{workload}, seed {task[1]}: {len(found)} configurations", file=sys.stderr)
    commits = sorted({str(row["commit"]) for row in own})
    return {
        **provenance("tuners_other_seeds"),
        "workload": workload,
        "contest": commits,
        "seeds": seeds,
        "qualities": qualities,
    }


def table(workload: str, own: Sequence[Row], scale: Scale, by_seed: Mapping[str, Qualities]) -> list[str]:
    """Returns the lines of a table of Markdown: a way each, a figure for each seed."""
    ours = {row["seed"]: curve(row, scale, by_seed[str(row["seed"])]) for row in own if row["way"] == OURS}
    lines = []
    for way in dict.fromkeys(row["way"] for row in own):
        of_way = sorted((row for row in own if row["way"] == way), key=lambda row: int(row["seed"]))
        ends = [
            worth(
                believed(on_front_once(row, scale.objective, scale.mode), scale.objective, scale.mode),
                scale,
                by_seed[str(row["seed"])],
            )
            for row in of_way
        ]
        claimed = [scale.final(row) for row in of_way]
        shares = [
            next((at for at, volume in ours[row["seed"]] if volume >= end), math.inf)
            for row, end in zip(of_way, ends, strict=True)
            if row["seed"] in ours
        ]
        cells = [
            workload,
            way,
            ", ".join(f"{v:.3f}" for v in claimed),
            ", ".join(f"{v:.3f}" for v in ends),
            f"{statistics.fmean(claimed):.3f}, {statistics.fmean(ends):.3f}",
            "" if way == OURS else ", ".join("never" if math.isinf(s) else f"{s:.2f}" for s in shares),
            "" if way == OURS or not shares else f"{statistics.median(shares):.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Trains what the contests in a file believed in, writes a line a workload, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("benchmarks/results/tuners_others.jsonl"))
    parser.add_argument("--workloads", nargs="+", default=["pointer"])
    parser.add_argument("--budget", type=float, default=300.0, help="wall seconds of the contest's runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="at once, a thread each")
    parser.add_argument("--out", type=Path, help="a file to append to")
    asked = parser.parse_args()
    if min(asked.seeds, asked.processes) < 1:
        parser.error("--seeds and --processes are 1 or more")
    head = "| workload | way | at the end, as found | on other seeds | means | ours is there at, of it all | median |"
    found = [head, "|" + "---|" * 7]
    for workload in asked.workloads:
        own = [row for row in rows(asked.runs, asked.budget) if row["workload"] == workload]
        if not own:
            parser.error(f"{asked.runs} has no runs of {workload} over {asked.budget:g} s")
        measured = scale(workload, asked.runs)
        made = document(workload, own, measured, asked.seeds, asked.processes)
        publish(made, asked.out, append=True)
        found += table(workload, own, measured, made["qualities"])
    print("\n".join(found))


if __name__ == "__main__":
    main()
