"""Which way of searching finds the better pick, as shipped: whole studies from the command line, judged on fresh seeds.

    python -m benchmarks.samplers --workloads signals headpose nli --seeds 3 --time 240 --budget-s 3600
    python -m benchmarks.samplers --ways "shipped" "before" --checkout "before=../older" --extra budget=full

A cell is a workload, a search seed and a way: `python -m tuning.run workload=W search.seed=S search.max_time=T` with
the way's overrides, or Ray Tune's own search (`benchmarks.ray_peer`), in equal wall time. Then the pick is trained by
`python -m tuning train` on seeds that no search used, beside the plain default, in turns, each in a fresh process.
Scored: how many times faster than the default a pick trains; one that misses the rule counts as no faster. The rule:
on fresh seeds at most the tolerance worse than the best pick of any way, and better than the workload's baselines. Rows
are appended to --out as they come; what is there is left out, so that --budget-s may end a session anywhere.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import yaml

from benchmarks.sampler_scores import PEER, Row, scores, table
from trainables.workload_files import load as load_workload
from tuning.config.complete import Machine, complete
from tuning.config.load import load
from tuning.memory.groups import plain_defaults
from tuning.workers import machine

ROOT = Path(__file__).parents[1]
FIRST_FRESH = 1000
"""Seeds of trainings that judge a pick; searches use their own seed and confirm on the next few."""
WAYS: Mapping[str, tuple[str, ...]] = {
    "probes, random": ("search.sampler=random",),
    "probes, tpe": ("search.sampler=tpe",),
    "probes, known": ("search.sampler=known",),
    "probes, tpe, no pruner": ("search.sampler=tpe", "search.pruner=none"),
    "two at a time": ("concurrency=2",),
    "shipped": (),
}
"""Overrides of each way, the simplest first."""
SEARCH, TRAIN = ("workload", "seed", "way", "time_s"), ("workload", "seed", "way", "time_s", "fresh")


class Runner(Protocol):
    """What does the work of a cell: processes, or a fake."""

    def search(self, workload: str, seed: int, way: str) -> dict[str, Any]:
        """Returns pick, options and samples of a search; `why` instead where it found nothing."""
        ...

    def train(self, found: Row, way: str, knobs: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Returns `samples_per_s` and `quality` of a training; `why` instead where it failed."""
        ...

    def plain(self, workload: str) -> dict[str, Any]:
        """Returns the knobs of the plain default, and the rule: objective, mode and tolerance."""
        ...


@dataclass(frozen=True)
class Commands:
    """The commands as a person types them, in the checkout of each way, else in this one."""

    time_s: float
    extra: Sequence[str] = ()
    checkouts: Mapping[str, Path] = field(default_factory=dict)

    def _run(self, way: str, arguments: Sequence[str], folder: Path, limit_s: float) -> tuple[str, str]:
        """Returns stdout of a command, and why it failed or ""."""
        checkout = self.checkouts.get(way, ROOT)
        environment = {**os.environ, "PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(folder / "cache")}
        environment["TORCH_HOME"] = environment["HF_HOME"] = str(folder / "cache")
        command = [sys.executable, "-m", *arguments]
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            return "", f"took more than {limit_s:.0f} s"
        return done.stdout, "" if done.returncode == 0 else f"exit {done.returncode}: {done.stderr[-1000:]}"

    def search(self, workload: str, seed: int, way: str) -> dict[str, Any]:
        """Returns what a study exported, or what the peer printed."""
        limits = [f"workload={workload}", f"search.seed={seed}", f"search.max_time={self.time_s:g}s", *self.extra]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if way == PEER:
                out, why = self._run(way, ["benchmarks.ray_peer", *limits], folder, 2 * self.time_s + 60)
                return {"why": why} if why else dict(json.loads(out.splitlines()[-1]))
            overrides = [*limits, *WAYS.get(way, ()), "name=one"]
            _, why = self._run(way, ["tuning.run", *overrides], folder, 2 * self.time_s + 60)
            made = next(folder.glob("runs/*/one/best.yaml"), None)
            return {"why": why or "no best.yaml"} if made is None else exported(made.parent)

    def train(self, found: Row, way: str, knobs: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Returns speed and quality of a training from a best.yaml written for these knobs."""
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "best.yaml").write_text(yaml.safe_dump(best_file(found, knobs)), encoding="utf-8")
            asked = ["train", "--from", "best.yaml", "--seed", str(seed), "--out", "out", "--json"]
            out, why = self._run(way, ["tuning", *asked], folder, 10 * self.time_s + 600)
        if why:
            return {"why": why}
        result = json.loads(out.splitlines()[-1])
        (objective,) = load_workload(found["ref"]).objectives  # others are told beside it
        return {"samples_per_s": result["samples_per_s"], "quality": result["values"][objective]}

    def plain(self, workload: str) -> dict[str, Any]:
        """Returns the space's defaults, each batch in one pass."""
        config = complete(load([f"workload={workload}", "card=cpu", *self.extra]), Machine(machine.cores()))
        return {"knobs": dict(plain_defaults(config.space)), "tolerance": config.pick.tolerance}


def exported(folder: Path) -> dict[str, Any]:
    """Returns what a finished run is judged by: the pick, the rule's facts, how its trials ended."""
    best = yaml.safe_load((folder / "best.yaml").read_text(encoding="utf-8"))
    records = [json.loads(line) for line in (folder / "trials.jsonl").read_text(encoding="utf-8").splitlines()]
    study = next(r for r in records if r["event"] == "study" and "objectives" in r)
    ((objective, mode),) = study["objectives"].items()
    return {
        "ref": best["workload"]["ref"],
        "options": best["workload"]["options"],
        "samples": best["train"]["samples"],
        "pick": best["knobs"],
        "trials": best["provenance"]["trials"],
        "mode": mode,
        "baselines": [float(v[objective]) for v in study.get("baselines", {}).values() if objective in v],
        "commit": best["provenance"].get("git"),
    }


def best_file(found: Row, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a best.yaml that trains these knobs; nothing was measured, so its figures are empty."""
    measured: dict[str, Any] = {
        "samples_per_s": {"median": None, "spread": None, "windows": [], "trainings": [], "status": "probed"},
        "quality": {},
        "peak_allocated_bytes": None,
        **dict.fromkeys(("device", "card", "says"), ""),
        "virtual": False,
        "cap_bytes": None,
    }
    texts = dict.fromkeys(("study", "trial", "created", "cardtune", "command"), "")
    return {
        "schema": 1,
        "workload": {"ref": found["ref"], "options": dict(found["options"])},
        "knobs": dict(knobs),
        "train": {"samples": found["samples"], "seed": 0},
        "measured": measured,
        "compared": {},
        "provenance": {**texts, "versions": {}, "git": None, "search_seed": None, "trials": {}},
        "sha256": "",
    }


@dataclass
class Rows:
    """The file of results: what is there is not done again."""

    path: Path

    def __post_init__(self) -> None:
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        self.all: list[Row] = [json.loads(line) for line in lines]

    def once(self, key: Sequence[str], fields: Row, made: Callable[[], Row]) -> Row:
        """Returns the row of these fields, made and appended where there is none."""
        kind = "search" if key is SEARCH else "train"
        for row in self.all:
            if row["kind"] == kind and all(row[name] == fields[name] for name in key):
                return row
        began = time.time()
        row = {"kind": kind, **fields, **made(), "wall_s": round(time.time() - began, 1), "at": round(began)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.all.append(row)
        print(", ".join(f"{name} {row[name]}" for name in key), row.get("why", ""), file=sys.stderr, flush=True)
        return row


@dataclass(frozen=True)
class Experiment:
    """What is compared: ways and seeds of searches in `time_s` each, `fresh` trainings of each pick."""

    workloads: Sequence[str]
    ways: Sequence[str]
    seeds: Sequence[int]
    time_s: float
    fresh: int = 3

    def run(self, runner: Runner, rows: Rows, left: Callable[[], bool]) -> bool:
        """Does the cells that are missing while there is time `left`; returns whether all are there."""
        for workload, seed in itertools.product(self.workloads, self.seeds):
            own = {"workload": workload, "seed": seed, "time_s": self.time_s}
            plain, found = runner.plain(workload), dict[str, Row]()
            for way in self.ways:
                if not left():
                    return False
                found[way] = rows.once(SEARCH, {**own, "way": way}, partial(runner.search, workload, seed, way))
            for fields, base, knobs in self._trainings(own, found, plain):
                if not left():
                    return False
                rows.once(TRAIN, fields, partial(runner.train, base, fields["way"], knobs, fields["fresh"]))
        return True

    def _trainings(self, own: Row, found: Mapping[str, Row], plain: Row) -> Iterator[tuple[dict[str, Any], Row, Row]]:
        """Yields each training's fields, the search it belongs to and its knobs; seed by seed, in turns."""
        picked = {way: row for way, row in found.items() if "pick" in row}
        if not picked:
            return
        some = next(iter(picked.values()))
        todo = [("plain", some, plain["knobs"]), *((way, row, row["pick"]) for way, row in picked.items())]
        for turn in range(self.fresh):
            shift = turn * max(1, len(todo) // self.fresh)
            for way, base, knobs in [*todo[shift:], *todo[:shift]]:
                yield {**own, "way": way, "fresh": FIRST_FRESH + turn}, base, knobs


def main() -> int:
    """Runs what the file lacks, prints the table; returns 3 where the time was up before all was there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["signals", "headpose", "nli", "pointer", "temporal"])
    parser.add_argument("--ways", nargs="+", default=[*list(WAYS)[:-2], PEER])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--time", type=float, default=240.0, metavar="S", help="wall seconds of a search  [240]")
    parser.add_argument("--fresh", type=int, default=3, help="trainings of each pick  [3]")
    parser.add_argument("--checkout", nargs="*", default=[], metavar="WAY=PATH", help="a way's own working copy")
    parser.add_argument("--extra", nargs="*", default=[], metavar="KEY=VALUE", help="for every search")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="no cell begins later than this")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "samplers.jsonl")
    asked = parser.parse_args()
    checkouts = {way: Path(path).resolve() for way, path in (text.split("=", 1) for text in asked.checkout)}
    if unknown := [way for way in asked.ways if way not in {*WAYS, PEER, *checkouts}]:
        parser.error(f"no way {unknown[0]!r}; there are {', '.join([*WAYS, PEER])}, or name its --checkout")
    seeds, until = range(asked.first_seed, asked.first_seed + asked.seeds), time.monotonic() + asked.budget_s
    own = Experiment(asked.workloads, asked.ways, seeds, asked.time, asked.fresh)
    runner, rows = Commands(asked.time, asked.extra, checkouts), Rows(asked.out)
    whole = own.run(runner, rows, lambda: time.monotonic() < until)
    done = [r for r in rows.all if r["time_s"] == asked.time and r["workload"] in asked.workloads]
    print("\n".join(table(scores(done, {w: runner.plain(w) for w in asked.workloads}), asked.ways)))
    return 0 if whole else 3


if __name__ == "__main__":
    sys.exit(main())
