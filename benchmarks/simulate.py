"""Searches in virtual time over recorded tables: how good, how fast to decide, how many devices, how easily misled.

    python -m benchmarks.simulate strategies --seeds 30      ours staged and joint, TPE with constraints, random, and
                                                             Syne Tune's MOASHA where it is installed
    python -m benchmarks.simulate poison --seeds 30          bad defaults, or a wrong earlier run, against a clean start
    python -m benchmarks.simulate decisions                  milliseconds a decision at 100 to 10,000 finished trials
    python -m benchmarks.simulate scale                      10,000 trials on 1,000 devices: wall time, rate, memory
    python -m benchmarks.simulate tables                     what the tables are, and how far their guesses are off
    python -m benchmarks.simulate summary --out FILE.jsonl   medians over the seeds of a file of strategies or poison

A world is a table of real trials (`benchmarks/tables`, made by `record_table`), which guesses between them by the rule
in `benchmarks/sim/recorded.py`: a figure from here is of the tables, not of the workloads. All ways of searching get
the same virtual seconds, the same space and the same cap, under which a third of the space does not fit. A front is
made of the trials that trained to their end; hypervolume is in units of the table's fastest speed and of the span of
its qualities, against no speed and the worst recorded quality. Every document is one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import moasha
from benchmarks.arena import ETA, Arena, Mislead, arena, orders, ours, peer
from benchmarks.document import provenance, publish
from benchmarks.record_table import design
from benchmarks.sim.recorded import Table
from benchmarks.sim.replay import seconds
from benchmarks.sim.simulator import SimulatedExecutor, VirtualClock, VirtualJournal, samples_per_s
from tuning.config.space import Space
from tuning.journal.records import read
from tuning.memory.groups import guard
from tuning.search.protocols import TrialRequest
from tuning.search.sampler import Sampler
from tuning.search.scheduler import SearchTerms, TrialScheduler
from tuning.stats.pareto import front

TABLES = Path(__file__).parent / "tables"


def strategies(own: Arena, seeds: Sequence[int]) -> dict[str, Any]:
    """Returns, for each way and seed, the final hypervolume and when ours reached each other's."""
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        found = {
            "staged": ours(own, "staged", seed)[0],
            "joint": ours(own, "joint", seed)[0],
            "tpe": peer(own, "tpe", seed),
            "random": peer(own, "random", seed),
        }
        if moasha.is_installed():
            found["moasha"] = peer(own, "moasha", seed)
        row: dict[str, Any] = {"seed": seed}
        for name, one in found.items():
            volume = one.final(own, own.budget_s)
            row[name] = {"volume": round(volume, 4), "ooms": one.ooms, "trials": one.trials}
            if name != "staged":
                at = found["staged"].reaches(own, volume)
                row[name]["staged_reaches_at"] = None if at is None else round(at / own.budget_s, 3)
        rows.append(row)
    return {"table": own.name, "budget_s": own.budget_s, "cap_bytes": own.cap_bytes, "rows": rows}


def bad_defaults(own: Arena) -> Mislead:
    """Returns what gives a search the worst configuration of the space as its first, and two beside it."""

    def mislead(sampler: Sampler, space: Space) -> Sampler:
        names = sampler._names
        ranked = sorted(design(space, 200, 1), key=lambda k: sum(own.point(k)), reverse=True)
        worst = [{n: k[n] for n in names if n in k} for k in ranked[:3]]
        return Sampler(sampler._space, sampler._objectives, sampler._seed, initial=worst)

    return mislead


def wrong_run(own: Arena) -> dict[str, Any]:
    """Returns an earlier run's 12 trials and probes, as `search.reuse` takes them over, with best and worst swapped."""
    table, drawn = own.table, design(own.table.space, 12, 2)
    speeds = [samples_per_s(table, k) for k in drawn]
    values = [table.values(k, table.horizon, 0)[own.objective] for k in drawn]
    speeds = [min(speeds) + max(speeds) - speed for speed in speeds]
    values = [min(values) + max(values) - value for value in values]
    rows = list(zip(drawn, speeds, values, strict=True))
    trials = [{"config": k, "outcome": "ok", "values": {own.objective: v}, "samples_per_s": s} for k, s, v in rows]
    return {"runs": ["wrong"], "left_out": {}, "probes": [{"config": k, "samples_per_s": s} for k, s, _ in rows],
            "trials": trials}  # fmt: skip


def poison(own: Arena, seeds: Sequence[int]) -> dict[str, Any]:
    """Returns hypervolumes of a clean start, and of misled ones at the same and at twice the budget."""
    rows = []
    for seed in seeds:
        row: dict[str, Any] = {"seed": seed, "clean": round(ours(own, "staged", seed)[0].final(own), 4)}
        misled: dict[str, Any] = {
            "bad defaults": {"mislead": bad_defaults(own)},
            "wrong run": {"reused": wrong_run(own)},
        }
        for name, how in misled.items():
            found = ours(own, "staged", seed, times=2.0, **how)[0]
            row[name] = [round(found.final(own, times * own.budget_s), 4) for times in (1.0, 2.0)]
        rows.append(row)
    return {"table": own.name, "rows": rows}


def decisions(own: Arena, counts: Sequence[int]) -> dict[str, Any]:
    """Returns the milliseconds of a suggestion with its launch, of a rung, and of an ending, after so many trials.

    The finished trials are drawn evenly from the space, each second one stopped at its first rung: as many points on a
    rung, and as many ranks, as there can be.
    """
    rows = []
    for count in counts:
        _, journal, _ = ours(own, "staged", 0, trials=8)
        finished(own, journal, count)
        told = orders(own.table, shrink=True)
        learned = guard(journal.records, own.cap_bytes)
        terms = SearchTerms("staged", count + 40, None, 0, ETA, own.table.objectives)
        begun = time.perf_counter()
        scheduler = TrialScheduler(journal, own.table.space, learned, terms, told, lambda r: None)
        row: dict[str, Any] = {"trials": count, "restore_s": time.perf_counter() - begun}
        took: dict[str, list[float]] = {"suggest": [], "rung": [], "end": []}
        executor = SimulatedExecutor(own.table, VirtualClock(), cap_bytes=own.cap_bytes)
        executor.run(_Timed(scheduler, took), told)
        for name, times in took.items():
            row[name] = {"median_ms": statistics.median(times) * 1e3, "max_ms": max(times) * 1e3, "count": len(times)}
        rows.append(row)
    return {"table": own.name, "rows": rows}


def finished(own: Arena, journal: VirtualJournal, count: int) -> None:
    """Writes trials that nobody ran until there are so many."""
    table, first = own.table, orders(own.table, shrink=True).milestones[0]
    have = sum(r.event == "trial" for r in journal.records)
    searched = design(table.space.subset({"learning", "both"}), count - have, 7)
    for number, knobs in enumerate(searched, start=have):
        name, rate, stopped = f"t{number:03d}", samples_per_s(table, knobs), number % 2 == 0
        at = first if stopped else table.horizon
        journal.append("trial_start", trial=name, config=knobs)
        journal.append("rung", trial=name, samples=first, values=table.values(knobs, first, 0), samples_per_s=rate)
        ended = {"outcome": "stopped" if stopped else "ok", "samples": at, "values": table.values(knobs, at, 0)}
        journal.append("trial", trial=name, config=knobs, samples_per_s=rate, **ended)


class _Timed:
    """A scheduler with a stopwatch."""

    def __init__(self, scheduler: TrialScheduler, took: Mapping[str, list[float]]) -> None:
        self._scheduler, self._took = scheduler, took

    def next_trial(self) -> TrialRequest | None:
        """Times a proposal, judged and launched."""
        begun = time.perf_counter()
        found = self._scheduler.next_trial()
        if found is not None:
            self._took["suggest"].append(time.perf_counter() - begun)
        return found

    def at_rung(self, trial: str, result: Mapping[str, Any]) -> bool:
        """Times a decision."""
        begun = time.perf_counter()
        found = self._scheduler.at_rung(trial, result)
        self._took["rung"].append(time.perf_counter() - begun)
        return found

    def goes_on(self, trial: str, result: Mapping[str, Any]) -> bool:
        """Asks the scheduler."""
        return self._scheduler.goes_on(trial, result)

    def ended(self, trial: str, result: Mapping[str, Any] | None) -> None:
        """Times an ending."""
        begun = time.perf_counter()
        self._scheduler.ended(trial, result)
        self._took["end"].append(time.perf_counter() - begun)

    def decided(self, event: str, trial: str, reason: str) -> None:
        """Passes it on."""
        self._scheduler.decided(event, trial, reason)


def scale(own: Arena, devices: int, trials: int) -> dict[str, Any]:
    """Returns what simulating so many trials on so many devices takes of this machine."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun, cpu = time.perf_counter(), time.process_time()
    found, journal, executor = ours(own, "staged", 0, trials=trials, times=None, devices=devices)
    wall_s = time.perf_counter() - begun
    records = journal.records
    judged = executor.events + sum(r.event in ("trial_start", "refused") for r in records)
    points = np.array([p[1:] for p in found.ends])
    return {
        "table": own.name,
        "devices": devices,
        "trials": found.trials,
        "wall_s": round(wall_s, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
        "decisions": judged,
        "decisions_per_s": round(judged / wall_s, 1),
        "virtual_s": round(max(seconds(r) for r in records), 1),
        "records": len(records),
        "front": len(front(points)),
        "memory_mib": [round(kib / 1024) for kib in (before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)],
        "answers": dict(own.table.answers),
    }


def tables(path: Path) -> dict[str, Any]:
    """Returns what a table holds, and how far its guess of each row is off when that row is left out."""
    records = read(path)[0]
    whole = Table(records)
    objective = next(iter(whole.objectives))
    speed, quality, real = [], [], []
    for record in records:
        if record.event == "probe" and record["outcome"] == "ok":
            guess = Table([r for r in records if r is not record])
            knobs = {**whole.space.fixed, **record["config"]}
            speed.append(abs(np.log(samples_per_s(guess, knobs) / samples_per_s(whole, knobs))))
        if record.event == "trial" and record["outcome"] == "ok":
            guess = Table([r for r in records if r.get("trial") != record["trial"]])
            quality.append(guess.values(record["config"], whole.horizon, 0)[objective])
            real.append(record["values"][objective])
    study = records[0]
    ranks = [np.argsort(np.argsort(v)) for v in (quality, real)]
    return {
        "table": path.stem,
        **{n: study[n] for n in ("command", "horizon_samples", "versions") if n in study.fields},
        "commit": study.get("commit"),
        "device": study["device"].get("name"),
        "bytes": path.stat().st_size,
        "probes": len(speed),
        "trials": len(real),
        "speed_error_median": float(np.exp(np.median(speed)) - 1),
        "quality_rank_correlation": float(np.corrcoef(ranks[0], ranks[1])[0, 1]),
    }


def summary(path: Path) -> list[str]:
    """Returns a line for each table and way of a results file of `strategies` or `poison`."""
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        rows.setdefault(document["table"], {}).update({row["seed"]: row for row in document["rows"]})
    said = []
    for table, by_seed in rows.items():
        own = list(by_seed.values())
        for way in (n for n in own[0] if n != "seed"):
            if way in ("bad defaults", "wrong run"):
                share = sorted(row[way][1] / row["clean"] for row in own)
                text = f"of the clean start's volume at twice the budget: least {share[0]:.2f}, "
                text += f"median {statistics.median(share):.2f}; {sum(s >= 0.95 for s in share)} recover"
            elif way == "clean":
                text = f"volume {statistics.median(row[way] for row in own):.3f}"
            else:
                text = f"volume {statistics.median(row[way]['volume'] for row in own):.3f}, "
                text += f"{statistics.median(row[way]['ooms'] for row in own):g} OOMs"
                at = sorted(row[way].get("staged_reaches_at") or float("inf") for row in own)
                if way != "staged":
                    missed = sum(a == float("inf") for a in at)
                    text += f"; staged is there at {statistics.median(at):.2f} of the time ({missed} never)"
            said.append(f"{table:<10}{way:<14}{len(own):>3} seeds: {text}")
    return said


def main() -> None:
    """Runs what is asked for on each table; prints a line of JSON for each."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("what", choices=["strategies", "poison", "decisions", "scale", "tables", "summary"])
    asked.add_argument("--tables", nargs="*", help="[all, or signals for decisions and scale]")
    asked.add_argument("--seeds", type=int, default=30)
    asked.add_argument("--first", type=int, default=0, help="seed")
    asked.add_argument("--devices", type=int, default=1000)
    asked.add_argument("--trials", type=int, default=10_000)
    asked.add_argument("--counts", type=int, nargs="*", default=[100, 1000, 10_000])
    asked.add_argument("--out", type=Path, help="a file to append to; of summary, to read")
    arguments = asked.parse_args()
    if arguments.what == "summary":
        print("\n".join(summary(arguments.out)))
        return
    alone = ["signals"] if arguments.what in ("decisions", "scale") else sorted(p.stem for p in TABLES.glob("*.jsonl"))
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    ways: dict[str, Callable[[Path], dict[str, Any]]] = {
        "strategies": lambda path: strategies(arena(path), seeds),
        "poison": lambda path: poison(arena(path), seeds),
        "decisions": lambda path: decisions(arena(path), arguments.counts),
        "scale": lambda path: scale(arena(path), arguments.devices, arguments.trials),
        "tables": tables,
    }
    for name in arguments.tables or alone:
        found = ways[arguments.what](TABLES / f"{name}.jsonl")
        publish({**provenance(f"simulate {arguments.what}"), **found}, arguments.out, append=True)


if __name__ == "__main__":
    main()
