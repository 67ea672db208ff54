"""What a probe takes, what interval it claims, and how far probes of the same configuration really lie apart.

    python -m benchmarks.probe_cost --probes 12 --out benchmarks/results/probe_cost.jsonl

One warm worker process a workload. The default configuration and its neighbours (another worker count, another
micro-batch) are probed in turns, so that a machine that slows down does so for all; the first round is not counted.
None of these probes has a rival, so they end by their interval or their time: the longest there are. For each
configuration stand the seconds of a probe, the half-width of the 95 % interval it claims, and the real spread: the
standard deviation of its probes over their mean, that of neighbouring rounds (mean square successive difference:
without the machine's slow drift), and how often a claimed interval holds the mean of the other probes. Were the
machine at rest and the claim right, that would be 95 %, less what the mean of the others is off itself. At the end
each configuration is probed once against the fastest, as a search does. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.document import provenance, publish
from trainables.knobs import Knobs, Scalar, is_active
from trainables.workload import BUILT_IN
from tuning.config.load import load
from tuning.config.schema import StudyConfig
from tuning.config.space import Choice, Space
from tuning.memory.groups import defaults
from tuning.search.probe import reference_batch_size
from tuning.study.setup import checked
from tuning.workers import machine
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

CHANGED = ("num_workers", "micro_batch_size")
"""Knobs in which a neighbour differs: the one that changes how data comes, the one that changes the step itself."""


def configurations(space: Space) -> dict[str, dict[str, Scalar]]:
    """Returns what a sweep would begin with, and its neighbours, by name."""
    whole = {"learning_rate": Knobs().learning_rate, **defaults(space), "batch_size": reference_batch_size(space)}
    start: dict[str, Scalar] = {n: v for n, v in whole.items() if is_active(n, whole)}
    found = {"defaults": start}
    for name in CHANGED:
        parameter = space.parameters.get(name)
        others = [v for v in parameter.values if v != start.get(name)] if isinstance(parameter, Choice) else []
        if others:
            found[f"{name}={others[0]}"] = {**start, name: others[0]}
    return found


def spreads(probes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what probes of one configuration took and claimed, and how far they lie apart; from two probes on."""
    rates = [float(p["samples_per_s"]) for p in probes]
    claims = [float(p["spread_frac"] or 1.0) for p in probes]
    mean = statistics.fmean(rates)
    others = [(sum(rates) - rate) / (len(rates) - 1) for rate in rates]
    held = [abs(rate - other) <= claim * rate for rate, other, claim in zip(rates, others, claims, strict=True)]
    steps = [b - a for a, b in itertools.pairwise(rates)]
    return {
        "probes": len(probes),
        "samples_per_s": mean,
        "wall_s": {"median": statistics.median(p["wall_s"] for p in probes), "most": max(p["wall_s"] for p in probes)},
        "claimed_frac": {"median": statistics.median(claims), "most": max(claims)},
        "real_frac": statistics.stdev(rates) / mean,
        "real_without_drift_frac": math.sqrt(statistics.fmean(s * s for s in steps) / 2) / mean,
        "held_frac": sum(held) / len(held),
        "ends": dict(collections.Counter(p.get("end", "") for p in probes)),
    }


def measure(config: StudyConfig, threads: int, probes: int, time_s: float) -> dict[str, Any]:
    """Returns what is found of each configuration of the workload, its probes one by one too."""
    asked = configurations(config.space)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in asked}
    setting = WorkerConfig(config.workload.name, dict(config.workload.options), threads=threads)
    with Worker(setting) as worker:
        for number in range(probes + 1):
            for name, knobs in asked.items():
                one = worker.probe(knobs, time_s, 0.0)
                if number and one["samples_per_s"] is not None:
                    found[name].append(one)
        best = max(statistics.fmean(p["samples_per_s"] for p in own) for own in found.values())
        against = {name: worker.probe(knobs, time_s, best) for name, knobs in asked.items()}
    return {
        name: {
            **spreads(own),
            "against_best": {n: against[name].get(n) for n in ("wall_s", "end")},
            "each": [[round(p[n] or 1.0, 5) for n in ("samples_per_s", "spread_frac", "wall_s")] for p in own],
        }
        for name, own in found.items()
    }


def line(workload: str, name: str, found: Mapping[str, Any]) -> str:
    """Returns a configuration's line of the table."""
    wall, claimed, against = found["wall_s"], found["claimed_frac"], found["against_best"]
    ends = ", ".join(f"{count} {end}" for end, count in found["ends"].items())
    return (
        f"{workload:<9} {name:<20}{found['samples_per_s']:>9.1f}/s {wall['median']:>5.2f} s ({wall['most']:.2f})"
        f"  claimed {claimed['median']:.1%} ({claimed['most']:.1%})  real sd {found['real_frac']:.1%}"
        f" ({found['real_without_drift_frac']:.1%})  held {found['held_frac']:.0%}  {ends};"
        f" against the best {against['wall_s']:.2f} s {against['end']}"
    )


def main() -> None:
    """Measures, prints a table, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=list(BUILT_IN), choices=BUILT_IN)
    parser.add_argument("--probes", type=int, default=12, help="of each configuration")
    parser.add_argument("--threads", type=int, default=machine.cores(), help="of torch; default: as a study has")
    parser.add_argument("--out", type=Path, help="a file for the document")
    asked = parser.parse_args()
    if asked.probes < 3:
        parser.error(f"--probes {asked.probes}: a spread needs 3 or more")
    rows: dict[str, Any] = {}
    for workload in asked.workload:
        _, config = checked(load([f"workload={workload}", "card=cpu"]))
        time_s = config.budget.probe.probe_time_s
        rows[workload] = measure(config, asked.threads, asked.probes, time_s)
        for name, found in rows[workload].items():
            print(line(workload, name, found), file=sys.stderr)
    document = {
        **provenance("probe_cost"),
        "threads": asked.threads,
        "probe_time_s": time_s,
        "rows": rows,
    }
    publish(document, asked.out)


if __name__ == "__main__":
    main()
