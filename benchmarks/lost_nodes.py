"""What a lost node costs a study on a cluster: nodes killed, cut off and added, each at many random moments.

    python -m benchmarks.lost_nodes --moments 10 --crashes 3 --seed 0

It takes root and `ip`. All of it runs in network and process namespaces of its own (`benchmarks.nodes_apart`): nothing
listens on the machine's network, nothing outlives it. Studies of tests/data/mine.py, whose steps wait so that a trial
takes some 3 s on any machine, follow each other on one cluster, each with two nodes at first. In each comes one event
of each kind, in an order and at moments that the seed draws: uniformly from the first trial to the end of the last but
one, counted in trials that have ended and parts of one. Where no node is left, the next is added within ten seconds. In
`--crashes` further studies a node is killed under a trial, and then the actor that runs it again: it ends well only
where the lost node has left it its own second try.

Checked of each event: what had ended before is in the journal once; one trial at most was run again for that node,
once, since a node has one slot. Checked of each study: every trial is there once, and `ok`; no loss is told but those
of nodes that were lost (of a crash, one more), so that no trial has used its own second try; the exit code is 0; no
process of the study is left, but on what was cut off. Rows are appended to --out.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.document import provenance
from benchmarks.nodes_apart import APART, HEAD, ROOT, Cluster, Node, said_by

KINDS = ("kill", "cut", "add")
TRIALS, BESIDE, TRIAL_S = 8, 1, 3.0
"""Trials that are asked for, `before` beside them, and what one takes, roughly."""
SLOW = """
import time
from mine import BEFORE, Moons


class Slow(Moons):
    def loss(self, model, batch):
        time.sleep(0.0012 * len(batch[0]))
        return super().loss(model, batch)


WORKLOAD = Slow()
"""
STUDY = [
    *(f"cluster={HEAD}", "workload=slow.py", "name=one", "concurrency=1", "search.pruner=none", "search.max_time=30m"),
    *(
        f"search.trials={TRIALS}",
        "budget.train_epochs=2",
        "budget.probe.max_time_s=2",
        "budget.probe.probe_time_s=0.2",
    ),
    *("budget.confirm.window_s=0.05", "budget.confirm.seeds=1", "budget.confirm.top=1"),
]
SOON = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "2000"}
"""With it Ray counts a node that is cut off as lost after some 10 s; by its defaults after some 30."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Event:
    """What was done to a node, when, and which trials had ended by then."""

    kind: str
    node: Node
    at_s: float
    ended: Sequence[str]

    def is_why(self, lost: Row) -> bool:
        """Returns whether a loss is that of this node."""
        return self.kind != "add" and lost["reason"].startswith(f"node {self.node.address} (")


class Study:
    """One study on the cluster, and what was done to it."""

    def __init__(self, cluster: Cluster, folder: Path, draw: random.Random) -> None:
        self._cluster, self._draw, self._path = cluster, draw, folder / "runs/slow/one/trials.jsonl"
        self.events: list[Event] = []
        self.crashes = 0
        shutil.copy(ROOT / "tests" / "data" / "mine.py", folder)
        (folder / "slow.py").write_text(SLOW, encoding="utf-8")
        command, env = [sys.executable, "-m", "tuning.run", *STUDY], {**cluster.env, "XDG_CACHE_HOME": str(folder)}
        with (folder / "said").open("w") as said:
            self._process = subprocess.Popen(command, cwd=folder, env=env, stdout=said, stderr=subprocess.STDOUT)

    def of(self, event: str) -> list[Row]:
        """Returns its records of an event."""
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True) if self._path.exists() else []
        return [r for line in lines if line.endswith("\n") for r in [json.loads(line)] if r["event"] == event]

    def goes_on(self) -> Iterator[float]:
        """Yields the trials that have ended, and parts of the next by the clock, from the first that begins on."""
        ended, since = -1, 0.0
        while self._process.poll() is None:
            if (now := len(self.of("trial"))) > ended and self.of("trial_start"):
                ended, since = now, time.monotonic()
            if ended >= 0:
                yield ended + min(0.999, (time.monotonic() - since) / TRIAL_S)
            time.sleep(0.05)

    def do(self, kind: str) -> None:
        """Adds a node, or kills or cuts off one of those that are there."""
        ended, at_s = [r["trial"] for r in self.of("trial")], time.time()
        node = self._cluster.add() if kind == "add" else self._draw.choice(self._cluster.alive)
        if kind != "add":
            (self._cluster.kill if kind == "kill" else self._cluster.cut)(node)
        self.events.append(Event(kind, node, at_s, ended))

    def moments(self) -> None:
        """Does one event of each kind."""
        dues = sorted(self._draw.uniform(0, TRIALS + BESIDE - 1) for _ in KINDS)
        todo, wait_s = list(zip(self._draw.sample(KINDS, len(KINDS)), dues, strict=True)), 10 * self._draw.random()
        empty_at = math.inf
        for done in self.goes_on():
            empty_at = math.inf if self._cluster.alive else min(empty_at, time.monotonic())
            if todo and (done >= todo[0][1] or time.monotonic() >= empty_at + wait_s):
                self.do(todo.pop(0)[0])

    def crash(self) -> None:
        """Kills a node, and the actor that runs its trial again on the other one, once what ran there has ended."""
        due, struck = self._draw.uniform(0, TRIALS - 3), math.inf
        for done in self.goes_on():
            if not self.events and done >= due:
                self.do("kill")
            elif self.events and struck == math.inf and self.of("lost"):
                struck = math.floor(done) + 1.3
            elif done >= struck > 0:
                struck, self.crashes = 0, 1
                for process in self._cluster.busy():
                    process.kill()

    def found(self) -> Row:
        """Returns what is found of the study, once it has ended."""
        trials, lost = self.of("trial"), self.of("lost")
        own = [r for r in lost if not any(event.is_why(r) for event in self.events)]
        ended = Counter(r["trial"] for r in trials)
        _, left = psutil.wait_procs([*self._cluster.strangers(), *self._cluster.busy()], timeout=10)
        found = {
            "exit": self._process.returncode,
            "missing": sorted({f"t{n:03d}" for n in range(TRIALS + BESIDE)} - ended.keys()),
            "duplicates": sorted(t for t, n in ended.items() if n > 1),
            "not_ok": {r["trial"]: r["outcome"] for r in trials if r["outcome"] != "ok"},
            "own_tries": [f"{r['trial']}: {r['reason']}" for r in own],
            "left": [said_by(p)[-200:] for p in left],
        }
        is_ok = not any(found[name] for name in ("exit", "missing", "duplicates", "not_ok", "left"))
        return {**found, "study_ok": is_ok and len(own) <= self.crashes}

    def rows(self, study: Row) -> Iterator[Row]:
        """Yields what is found of each event."""
        trials = self.of("trial")
        ended, first_s = Counter(r["trial"] for r in trials), _seconds(self.of("trial_start")[0])
        for event in self.events:
            again = [r for r in self.of("lost") if event.is_why(r)]
            is_crash = any(said.startswith(f"{r['trial']}: ") for r in again for said in study["own_tries"])
            row = {
                **{
                    "kind": "crash" if is_crash else event.kind,
                    "at_s": round(event.at_s - first_s, 1),
                    "ended_before": len(event.ended),
                },
                "finished_lost": sum(ended[t] == 0 for t in event.ended),
                "run_again": [r["trial"] for r in again],
                "told_after_s": [round(_seconds(r) - event.at_s, 1) for r in again],
                "trained_there": sum(r["node"].startswith(f"{event.node.address} (") for r in trials),
            }
            yield {**row, **study, "ok": not row["finished_lost"] and len(again) <= 1 and study["study_ok"]}


def _seconds(record: Row) -> float:
    return datetime.fromisoformat(record["t"]).timestamp()


def table(rows: Sequence[Row], short: Sequence[str]) -> list[str]:
    """Returns the verdict and the figures; `short` are kinds of which there are too few."""
    is_ok, fine = not short and all(row["ok"] for row in rows), sum(row["ok"] for row in rows)
    lines = [f"{'holds' if is_ok else 'DOES NOT HOLD'}: {fine} of {len(rows)} events are as they should be"]
    lines += [f"too few: {', '.join(short)}"] * bool(short)
    lines += ["event | moments | ok | finished lost | duplicates | run again | most for one | own tries | told after s"]
    for kind in (*KINDS, "crash"):
        own = [row for row in rows if row["kind"] == kind]
        counts = [len(row["run_again"]) for row in own]
        told = [s for row in own for s in row["told_after_s"]]
        sums = [sum(row["ok"] for row in own), sum(row["finished_lost"] for row in own)]
        sums += [
            len({(row["study"], t) for row in own for t in row["duplicates"]}),
            sum(counts),
            max(counts, default=0),
        ]
        tries = len({(row["study"], t) for row in own for t in row["own_tries"]})
        span = f"{min(told):.0f} to {max(told):.0f}" if told else "-"
        lines.append(" | ".join(map(str, (kind, len(own), *sums, tries, span))))
    return lines


def studies(cluster: Cluster, folder: Path, asked: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of studies until there are enough of each kind; of half as many studies more at most."""
    draw, counts, least = random.Random(asked.seed), Counter[str](), _least(asked)
    for number in range(math.ceil(1.5 * sum(least.values()))):
        short = [kind for kind in least if counts[kind] < least[kind]]
        if not short:
            return
        cluster.restore()
        (folder / f"study{number}").mkdir()
        study = Study(cluster, folder / f"study{number}", draw)
        study.crash() if "crash" in short else study.moments()
        for row in study.rows(study.found()):
            counts[row["kind"]] += 1
            yield {"study": number, **row}


def _least(asked: argparse.Namespace) -> dict[str, int]:
    return {**dict.fromkeys(KINDS, asked.moments), "crash": asked.crashes}


def main() -> int:
    """Runs studies until there are enough moments; returns 1 where a check fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=10, metavar="N", help="of each kind of event  [10]")
    parser.add_argument("--crashes", type=int, default=3, metavar="N", help="losses with a crash after them  [3]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patient", action="store_true", help="Ray's defaults say when a node counts as lost")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "lost_nodes.jsonl")
    parser.add_argument("--within", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.within:
        command = [*APART, sys.executable, "-m", "benchmarks.lost_nodes", *sys.argv[1:], "--within"]
        return subprocess.run(command, check=False).returncode
    about = {**provenance("lost_nodes"), "command": " ".join(sys.argv[1:-1]), "seed": asked.seed}
    rows, health = list[Row](), {} if asked.patient else SOON
    with tempfile.TemporaryDirectory(prefix="lost-") as folder, Cluster(Path(folder), health) as cluster:
        for row in studies(cluster, Path(folder), asked):
            rows.append(row)
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**about, **row}) + "\n")
            print(json.dumps(row), file=sys.stderr, flush=True)
    counts = Counter(row["kind"] for row in rows)
    lines = table(rows, [kind for kind, least in _least(asked).items() if counts[kind] < least])
    print("\n".join(lines))
    return 0 if lines[0].startswith("holds") else 1


if __name__ == "__main__":
    sys.exit(main())
