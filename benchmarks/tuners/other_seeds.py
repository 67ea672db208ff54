"""What the fronts of a contest are worth on seeds that nobody searched with.

    python -m benchmarks.tuners.other_seeds --runs benchmarks/results/tuners_others.jsonl --workloads pointer

A search keeps the best of many single trainings, and of a hundred the best is partly lucky. Here all that was on the
front of a run once is trained again, on the same data, from `--seeds` other seeds of weights and batches. What a run
had for its front at a moment, by the qualities of the single trainings it had, is then worth the hypervolume of their
means. That may fall: one that was lucky hides one that is better. Speeds are those that the contest measured again, of
the front too: by speeds that a run measured itself, twins come on it side by side. As the means of few seeds are still
uncertain, moments are compared by the mean of all runs of a way, and one counts from which on it stays. System knobs
change no quality, so that configurations that differ in nothing else are one. A line of `--out` is a workload, and what
it holds is not trained again.
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
from benchmarks.tuners.__main__ import documents, rows, scale
from benchmarks.tuners.contest import Contest
from benchmarks.tuners.figures import OURS, Row, Scale, key, on_front_once
from trainables.knobs import kind_of
from tuning.stats import pareto

FIRST_SEED = 1000
"""Far from those of a contest, which count from 0."""
SHOWN = (0.1, 0.15, 0.2, 0.3, 0.5)
GRID = tuple(n / 100 for n in range(5, 101))
"""Shares of the budget: of the table's columns, and at which ours is looked at."""
Qualities = Mapping[str, Sequence[float]]
"""The qualities of a configuration, by `learned`, a seed each; NaN of a training that failed."""


def learned(knobs: Mapping[str, Any]) -> str:
    """Returns the knobs that can change what is learned, as text."""
    return key({name: value for name, value in knobs.items() if kind_of(name) != "system"})


def believed(lines: Sequence[dict[str, Any]], scale: Scale) -> list[dict[str, Any]]:
    """Returns the trainings that no other beats, by speeds measured again and the qualities that their run saw."""
    sign = -1.0 if scale.mode == "max" else 1.0
    points = [[-scale.known(x), sign * float(x["values"][scale.objective])] for x in lines]
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


def worth_at(row: Row, scale: Scale, qualities: Qualities, share: float) -> float:
    """Returns what the front is worth that a run believed in after a share of its budget."""
    lines = on_front_once(row, scale.objective, scale.mode)
    ended = [line for line in lines if float(line["at"]) <= share * row["budget_s"]]
    return worth(believed(ended, scale), scale, qualities)


def trained(workload: str, seed: int, configurations: Mapping[str, Any], seeds: int) -> dict[str, list[float]]:
    """Returns the qualities of each on so many other seeds, on the data of a contest's `seed`, by one thread."""
    from tuning.workers.session import Session

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


def qualities_of(
    own: Sequence[Row], scale: Scale, known: Mapping[str, Qualities], seeds: int, processes: int
) -> dict[str, dict[str, Sequence[float]]]:
    """Returns the qualities of all that was on a front once, by the contest's seed; those `known` are not trained."""
    found: dict[str, dict[str, Sequence[float]]] = {}
    tasks = []
    for seed in sorted({int(row["seed"]) for row in own}):
        found[str(seed)] = dict(known.get(str(seed), {}))
        lines = [x for r in own if r["seed"] == seed for x in on_front_once(r, scale.objective, scale.mode)]
        missing = {learned(x["knobs"]): x["knobs"] for x in lines if learned(x["knobs"]) not in found[str(seed)]}
        parts = [dict(list(missing.items())[part::processes]) for part in range(processes)]
        tasks += [(str(own[0]["workload"]), seed, part, seeds) for part in parts if part]
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for task, made in zip(tasks, pool.map(trained, *zip(*tasks, strict=True)) if tasks else [], strict=True):
            found[str(task[1])].update(made)
            print(f"{task[0]}, seed {task[1]}: {len(made)} configurations", file=sys.stderr)
    return found


def table(workload: str, own: Sequence[Row], scale: Scale, by_seed: Mapping[str, Qualities]) -> list[str]:
    """Returns the lines of a table of Markdown, a way each: means over the seeds, and the ends of each seed."""
    ways = {way: [row for row in own if row["way"] == way] for way in dict.fromkeys(str(row["way"]) for row in own)}

    def at(way: str, share: float) -> list[float]:
        return [worth_at(row, scale, by_seed[str(row["seed"])], share) for row in ways[way]]

    def moment(way: str, volume: float) -> float:
        """Returns the share from which on a way is worth so much; inf where it is not at the end."""
        below = [n for n, share in enumerate(GRID) if statistics.fmean(at(way, share)) < volume]
        first = below[-1] + 1 if below else 0
        return GRID[first] if first < len(GRID) else math.inf

    lines = []
    for way, runs in ways.items():
        ends = at(way, 1.0)
        deviation = statistics.stdev(ends) / math.sqrt(len(ends)) if len(ends) > 1 else math.nan
        there = moment(OURS, statistics.fmean(ends)) if OURS in ways else math.inf
        cells = [
            workload,
            way,
            f"{statistics.fmean(scale.final(row) for row in runs):.3f}",
            *(f"{statistics.fmean(at(way, share)):.3f}" for share in SHOWN),
            f"{statistics.fmean(ends):.3f} ({deviation:.3f}): " + ", ".join(f"{v:.3f}" for v in ends),
            "" if way == OURS else "never" if math.isinf(there) else f"{there:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Trains what the contests in a file believed in, writes a line a workload, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("benchmarks/results/tuners_others.jsonl"))
    parser.add_argument("--workloads", nargs="+", default=["pointer"])
    parser.add_argument("--ways", nargs="+", help="of the runs  [all]")
    parser.add_argument("--budget", type=float, default=300.0, help="wall seconds of the contest's runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="at once, a thread each")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tuners_other_seeds.jsonl"))
    asked = parser.parse_args()
    if min(asked.seeds, asked.processes) < 1:
        parser.error("--seeds and --processes are 1 or more")
    shares = " | ".join(f"{share:.0%}" for share in SHOWN)
    found = [f"| workload | way | as found | {shares} | 100% | ours is there from |", "|" + "---|" * (5 + len(SHOWN))]
    for workload in asked.workloads:
        there = [row for row in rows(asked.runs, asked.budget) if row["workload"] == workload]
        own = [row for row in there if asked.ways is None or row["way"] in asked.ways]
        if not own:
            parser.error(f"{asked.runs} has no such runs of {workload} over {asked.budget:g} s")
        of = {"workload": workload, "contest": sorted({str(row["commit"]) for row in own}), "seeds": asked.seeds}
        before = [x for x in documents(asked.out) if all(x.get(name) == value for name, value in of.items())]
        known = before[-1]["qualities"] if before else {}
        measured = scale(workload, asked.runs)
        qualities = qualities_of(own, measured, known, asked.seeds, asked.processes)
        if qualities != known:
            publish({**provenance("tuners_other_seeds"), **of, "qualities": qualities}, asked.out, append=True)
        found += table(workload, own, measured, qualities)
    print("\n".join(found))


if __name__ == "__main__":
    main()
