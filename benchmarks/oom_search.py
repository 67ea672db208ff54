"""How many of 60 trials run out of memory, and how many that would have fitted are refused; is P(OOM) right?

    python -m benchmarks.oom_search --seeds 5 --out benchmarks/results/oom_search.jsonl

A virtual card on the CPU, real trainings (`oom_workload`), one process, the same space and the same trainings for all:
  staged   TrialScheduler after the probe stage: a micro-batch is halved if it does not fit
  tune     Ray Tune's OptunaSearch as it comes: an OOM is an error, which it tells Optuna as FAIL
  tpe      Optuna's TPE with a constraint: an OOM is told as infeasible, by how much over the cap
Each launches 60 trials. A line of the file is a way and seed; what it holds already is not run again, so a run that was
stopped goes on. What was refused is trained afterwards, as a check. A guard that only watches judges what
`tune` and `tpe` launch: its P(OOM), compared with what came of it, is not cut off by its own refusals.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from benchmarks.document import provenance
from benchmarks.peers import suggested, tune_domain
from trainables.knobs import KnobTable, Scalar
from trainables.our_knobs import ROWS
from trainables.plan import Plan
from tuning.config.schema import ProbeSection
from tuning.config.space import Choice, Space
from tuning.journal.events import MeasuredRecord, StudyRecord, known_fields
from tuning.journal.format import Record
from tuning.journal.records import Journal
from tuning.memory.groups import guard, learn, need_of
from tuning.memory.guard import MOST_P_OOM, MemoryGuard
from tuning.memory.measure import MemoryStage
from tuning.memory.oom import requested_bytes
from tuning.search.probe import ProbeStage
from tuning.search.protocols import TrialPlan, TrialState
from tuning.search.scheduler import SearchTerms, TrialScheduler
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

WORKLOAD = str(Path(__file__).with_name("oom_workload.py"))
SAMPLES, TRIALS = 128, 60
CAP_BYTES = 20 * 2**20
PLAN = Plan(samples=SAMPLES, milestones=(SAMPLES,), cap_bytes=CAP_BYTES)
TABLE = KnobTable({name: ROWS[name] for name in ("hidden_size", "dropout")})
"""The knobs of the workload."""
SPACE = Space.parse(
    {
        "batch_size": [32, 64],
        "micro_batch_size": [4, 8, 16, 32, 64],
        "hidden_size": [32, 64, 96, 128, 192],
        "amp_dtype": ["fp32", "bf16"],
        "activation_checkpointing": [False, True],
        "learning_rate": {"low": 1e-4, "high": 3e-2, "log": True},
        "weight_decay": {"low": 0.0, "high": 0.2},
    },
    TABLE,
)
WAYS = ("staged", "tune", "tpe")
OBJECTIVES: Mapping[str, Any] = {"samples_per_s": "max", "loss": "min"}
Knobs = Mapping[str, Scalar]
Launched = tuple[dict[str, Scalar], TrialState, float | None]
"""Knobs, what came of them, and the P(OOM) that was said before."""


class Machine:
    """One process with the workload loaded; trains a configuration under the virtual card."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.session = Session(WorkerConfig(WORKLOAD, {"count": SAMPLES}, "cpu", 1, CAP_BYTES, seed))

    def train(self, knobs: Knobs) -> TrialState:
        """Returns how a training ended; an OOM ends it."""
        return self.session.train(knobs, PLAN, self.seed, shrink="")


class Watcher:
    """A guard made of footprints, which says what it thinks of each trial before it is launched, and learns."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        self.journal = journal(machine, folder)
        begun = time.perf_counter()
        MemoryStage(machine.session, SPACE, self.journal, CAP_BYTES).run()
        self.estimate_s = time.perf_counter() - begun
        self.guard: MemoryGuard = guard(self.journal.run, CAP_BYTES)

    def p_oom(self, knobs: Knobs) -> float | None:
        """Returns P(OOM) as known so far."""
        return self.guard.p_oom(*need_of(knobs, TABLE))

    def hear(self, knobs: Knobs, found: TrialState) -> None:
        """Learns what came of it."""
        learn(self.guard, MeasuredRecord.read(Record(0, "", "", {**known_fields(found), "config": knobs})), whole=True)


def journal(machine: Machine, folder: Path) -> Journal:
    """Returns a new journal that says which card and device it is of."""
    opened = Journal.open(folder / "trials.jsonl", create=True)
    device = {"type": machine.session.setting.device}
    card = {"name": "virtual", "cap_bytes": CAP_BYTES}
    opened.append(StudyRecord, card=card, device=device, knobs=TABLE.as_raw())
    return opened


def by_scheduler(machine: Machine, folder: Path) -> tuple[list[Launched], list[dict[str, Any]], Journal]:
    """Returns what our scheduler launched, what it refused, and its journal."""
    watcher = Watcher(machine, folder)
    learned = watcher.guard
    budget = ProbeSection(max_time_s=10.0, probe_time_s=0.2)
    ProbeStage(machine.session, SPACE, watcher.journal, learned, budget).run({}, lambda r: None)
    terms = SearchTerms(10_000, None, machine.seed, {"loss": "min"}, sampler="tpe")
    orders = TrialPlan(SAMPLES, (SAMPLES,), shrink=True, concurrency=1, threads=1)
    scheduler = TrialScheduler(watcher.journal, SPACE, learned, terms, orders, lambda r: None)
    launched: list[Launched] = []
    while len(launched) < TRIALS and (request := scheduler.next_trial()) is not None:
        begun = watcher.journal.run.trials[request.trial].starts[-1]
        found = machine.train(request.knobs)
        launched.append((dict(request.knobs), found, begun.p_oom))
        scheduler.ended(request.trial, found)
    own = [refusal for refusal in watcher.journal.run.refused if refusal.stage == "search"]
    refused = [{"knobs": dict(refusal.config), "p_oom": refusal.p_oom} for refusal in own]
    return launched, refused, watcher.journal


def by_tune(machine: Machine, watcher: Watcher) -> list[Launched]:
    """Returns what Ray Tune's OptunaSearch launched, asked and told as Tune's controller does, one trial at a time."""
    from ray import tune
    from ray.tune.search.optuna import OptunaSearch

    searched = {name: tune_domain(p, tune) for name, p in SPACE.parameters.items()}
    search = OptunaSearch(searched, metric=list(OBJECTIVES), mode=list(OBJECTIVES.values()), seed=machine.seed)
    launched: list[Launched] = []
    for number in range(TRIALS):
        knobs = SPACE.complete(search.suggest(str(number)) or {})  # None: only with a limit of trials, which is not set
        said, found = watcher.p_oom(knobs), machine.train(knobs)
        launched.append((knobs, found, said))
        watcher.hear(knobs, found)
        search.on_trial_complete(str(number), result=_values(found), error=found.outcome != "ok")
    return launched


def by_tpe(machine: Machine, watcher: Watcher) -> list[Launched]:
    """Returns what Optuna's TPE launched, told of an OOM as a constraint violated by what was over the cap."""
    sampler = optuna.samplers.TPESampler(seed=machine.seed, multivariate=True, group=True)
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    launched: list[Launched] = []
    for _ in range(TRIALS):
        trial = study.ask()
        knobs = SPACE.complete({name: suggested(trial, name, p) for name, p in SPACE.parameters.items()})
        said, found = watcher.p_oom(knobs), machine.train(knobs)
        launched.append((knobs, found, said))
        watcher.hear(knobs, found)
        values = _values(found)
        over = requested_bytes(found.message) or 1
        trial.set_constraint("memory", -1.0 if values else over / CAP_BYTES)
        study.tell(trial, [values[n] for n in OBJECTIVES] if values else [0.0, 10.0])
    return launched


def _values(found: TrialState) -> dict[str, float] | None:
    if found.outcome != "ok":
        return None
    return {"samples_per_s": SAMPLES / max(found.train_s, 1e-6), "loss": found.values["loss"] or 0.0}


# -- one way and seed, and figures of all ------------------------------------------------------------------------------


def one_way(seed: int, way: str) -> dict[str, Any]:
    """Returns what a way launched and refused with a seed; of "cells" which share of the space does not fit at all."""
    begun = time.perf_counter()
    machine = Machine(seed)
    if way == "cells":
        return {"unfit_frac": unfit_frac(machine)}
    refused: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if way == "staged":
            launched, refused, held = by_scheduler(machine, Path(folder))
        else:
            watcher = Watcher(machine, Path(folder))
            held = watcher.journal
            launched = (by_tune if way == "tune" else by_tpe)(machine, watcher)
        probes = [probe.outcome for probe in held.run.probes]
        held.close()
    spent_s = time.perf_counter() - begun
    for one in refused:
        one["outcome"] = machine.train(one["knobs"]).outcome
    return {
        "launched": [{"knobs": k, "outcome": f.outcome, "p_oom": p, **_kept(f)} for k, f, p in launched],
        "refused": refused,
        "probes": len(probes),
        "probe_ooms": sum(o == "oom" for o in probes),
        "wall_s": spent_s,
    }


def unfit_frac(machine: Machine) -> float:
    """Returns the share of the space's cells that run out of memory, each trained once."""
    names = [n for n, p in SPACE.parameters.items() if isinstance(p, Choice)]
    cells = itertools.product(*(p.values for p in SPACE.parameters.values() if isinstance(p, Choice)))
    base = {"learning_rate": 1e-3, "weight_decay": 0.0}
    outcomes: dict[tuple[Any, ...], str] = {}
    count = unfit = 0
    for cell in cells:
        knobs = SPACE.complete({**base, **dict(zip(names, cell, strict=True))})
        key = need_of(knobs, TABLE)
        if key not in outcomes:
            outcomes[key] = machine.train(knobs).outcome
        count += 1
        unfit += outcomes[key] == "oom"
    return unfit / count


def _kept(found: TrialState) -> dict[str, Any]:
    return {"values": found.values, "peak_allocated_bytes": found.peak_allocated_bytes}


def reliability(pairs: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Returns the Brier score of (said, came true) and, by tenth, how many, the mean said and the share that came."""
    said, true = np.array([p for p, _ in pairs]), np.array([t for _, t in pairs], dtype=float)
    edges = (0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 1.0 + 1e-9)
    bins = []
    for low, high in itertools.pairwise(edges):
        inside = (said >= low) & (said < high)
        if inside.any():
            bins.append(
                [low, min(high, 1.0), int(inside.sum()), float(said[inside].mean()), float(true[inside].mean())]
            )
    rate = float(true.mean())
    return {
        "count": len(pairs),
        "brier": float(np.mean((said - true) ** 2)),
        "brier_of_the_base_rate": rate * (1 - rate),
        "base_rate": rate,
        "bins": bins,
    }


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the table's figures from rows of one way and seed each."""
    ways: dict[str, Any] = {}
    for way in WAYS:
        of_way = [r for r in rows if r["way"] == way]
        ooms = [sum(t["outcome"] == "oom" for t in r["launched"]) for r in of_way]
        refused = [t for r in of_way for t in r["refused"]]
        wrong = sum(t["outcome"] != "oom" for t in refused)
        asked = sum(len(r["launched"]) for r in of_way) + len(refused)
        best = [min((t["values"]["loss"] for t in r["launched"] if t["outcome"] == "ok"), default=1.0) for r in of_way]
        ways[way] = {
            "seeds": [r["seed"] for r in of_way],
            "ooms": ooms,
            "median_ooms": statistics.median(ooms),
            "launched": [len(r["launched"]) for r in of_way],
            "refused": [len(r["refused"]) for r in of_way],
            "false_refusals": wrong,
            "false_refusal_frac": wrong / max(1, len(refused)),
            "false_refusal_frac_of_all": wrong / asked,
            "probe_ooms": [r["probe_ooms"] for r in of_way],
            "median_best_loss": statistics.median(best),
            "median_wall_s": statistics.median(r["wall_s"] for r in of_way),
        }
    watched = [(t["p_oom"], t["outcome"] == "oom") for r in rows if r["way"] in ("tune", "tpe") for t in r["launched"]]
    own = [
        (t["p_oom"], t["outcome"] == "oom")
        for r in rows
        if r["way"] == "staged"
        for t in (*r["launched"], *r["refused"])
    ]
    return {
        "ways": ways,
        "unfit_frac": [r["unfit_frac"] for r in rows if r["way"] == "cells"],
        "watched": reliability([p for p in watched if p[0] is not None]),
        "own": reliability([p for p in own if p[0] is not None]),
    }


def table(found: Mapping[str, Any]) -> list[str]:
    """Returns the figures as lines of Markdown."""
    lines = [
        "| way | OOMs of 60, by seed | median | probes' OOMs | refused | of those would have fitted | best loss | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way, row in found["ways"].items():
        each = ", ".join(map(str, row["ooms"]))
        wrong = f"{row['false_refusals']} ({row['false_refusal_frac']:.1%})"
        ooms = f"{each} | {row['median_ooms']:g} | {sum(row['probe_ooms'])}"
        ends = f"{row['median_best_loss']:.3f} | {row['median_wall_s']:.0f}"
        lines.append(f"| `{way}` | {ooms} | {sum(row['refused'])} | {wrong} | {ends} |")
    for name in ("watched", "own"):
        one = found[name]
        rate = f"{one['base_rate']:.1%} ran out of memory (always said: Brier {one['brier_of_the_base_rate']:.4f})"
        lines += ["", f"{name}: {one['count']} configurations, {rate}, Brier {one['brier']:.5f}", ""]
        lines += ["| P(OOM) said | how many | mean said | ran out of memory |", "|---|---|---|---|"]
        lines += [f"| {low:g} to {high:g} | {n} | {p:.3f} | {true:.3f} |" for low, high, n, p, true in one["bins"]]
    return lines


def kept_rows(out: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file, none where there is no such file."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return [row for row in map(json.loads, lines) if "way" in row]


def main() -> None:
    """Runs what the file lacks, a row at a time; with all ways of a seed there, prints figures, then JSON."""
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--seeds", type=int, default=5)
    asked.add_argument("--first", type=int, default=0, help="the first seed")
    asked.add_argument("--ways", nargs="*", choices=(*WAYS, "cells"), default=[*WAYS, "cells"])
    asked.add_argument("--out", type=Path, default=Path("oom_search.jsonl"), help="goes on with what it holds")
    arguments = asked.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    rows = kept_rows(arguments.out)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    for seed, way in itertools.product(seeds, arguments.ways):
        if any((r["seed"], r["way"]) == (seed, way) for r in rows):
            continue
        row = {"seed": seed, "way": way, **provenance("oom_search"), **one_way(seed, way)}
        rows.append(row)
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        ooms = sum(t["outcome"] == "oom" for t in row.get("launched", ()))
        print(f"seed {seed} {way}: {ooms} OOM, {len(row.get('refused', ()))} refused", flush=True)
    if {r["way"] for r in rows} < {*WAYS, "cells"}:
        return
    rows.sort(key=lambda r: (r["seed"], (*WAYS, "cells").index(r["way"])))
    about = {"cap_bytes": CAP_BYTES, "space": SPACE.as_raw(), "threshold": MOST_P_OOM}
    document = {**provenance("oom_search"), **about, "figures": figures(rows)}
    arguments.out.write_text("".join(json.dumps(one) + "\n" for one in (document, *rows)), encoding="utf-8")
    print("\n".join(table(document["figures"])))
    print(json.dumps(document["figures"]))


if __name__ == "__main__":
    main()
