"""Our search against the others: hypervolume against wall time, trainings real, two tuners side by side.

    python -m benchmarks.tuners --out benchmarks/results/tuners.jsonl
    python -m benchmarks.tuners --ways staged ray tpe random --workloads signals --seeds 2 --budget 120

Each tuner gets one core of its own and the same wall seconds, its imports included. Two run at a time, in the order
that they are named, and change cores from seed to seed, so that what the machine does meanwhile happens to both.
Workload, space, horizon, virtual card (a third of the configurations drawn from the space does not fit) and training
loop are the same for all. A front is made of trainings that came to their end within the budget. Those that were on it
by the tuner's own speeds are measured again afterwards in a process on a core, in random order, with windows of one and
the same between them that tell the machine's pace: a hypervolume is in units of the fastest of those, and of the span
of qualities of the recorded table (`benchmarks/tables`), against no speed and the table's worst.

A line of the file is a tuner, a workload and a seed, or speeds; what it holds is not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.arena import arena
from benchmarks.document import provenance, publish
from benchmarks.tuners.contest import TABLES, Contest, on_core
from benchmarks.tuners.figures import OURS, Scale, at_one_pace, on_front_once, slim, speed_key, table
from tuning.config.load import load

WORKLOADS = ("signals", "temporal", "pointer")
GRACE_S = 60.0
"""What a tuner may take to end after its budget; nothing that ends then counts."""
WINDOW_S, ROUNDS, REFERENCE_EVERY = 1.0, 2, 4
"""Seconds of a window, how often each configuration has one, and after how many comes one of the same for all.

A configuration's windows a minute apart differ by 4 %, those of another hour by up to 40: the machine changes its pace.
"""


def main() -> None:
    """Runs what the file lacks, measures speeds again, prints the table."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    asked.add_argument("--ways", nargs="*", default=[OURS, "ray, OOMs told"])
    asked.add_argument("--seeds", type=int, default=5)
    asked.add_argument("--budget", type=float, default=300.0, help="wall seconds of each")
    asked.add_argument("--out", type=Path, default=Path("benchmarks/results/tuners.jsonl"))
    asked.add_argument("--table", action="store_true", help="of what is there")
    asked.add_argument("--one", help=argparse.SUPPRESS)
    arguments = asked.parse_args()
    if arguments.one:
        one(json.loads(arguments.one))
        return
    if not arguments.table:
        for seed, workload in itertools.product(range(arguments.seeds), arguments.workloads):
            have = {
                r["way"]
                for r in rows(arguments.out, arguments.budget)
                if (workload, seed) == (r["workload"], r["seed"])
            }
            missing = [way for way in arguments.ways if way not in have]
            for start in range(0, len(missing), 2):
                pair = missing[start : start + 2]
                for row in side_by_side(workload, seed, pair, arguments.budget):
                    own = arena(TABLES / f"{workload}.jsonl")
                    short = slim(row, own.objective, own.table.objectives[own.objective])
                    publish({**provenance("tuners"), **short}, arguments.out, append=True)
        with ThreadPoolExecutor(2) as both:  # a core each, as the tuners had
            parts = [(core, arguments.workloads[core::2]) for core in range(2)]
            for documents in both.map(lambda part: [measure_again(w, part[0], arguments.out) for w in part[1]], parts):
                for document in documents:
                    if document is not None:
                        publish(document, arguments.out, append=True)
    found = rows(arguments.out, arguments.budget)
    scales = {w: scale(w, arguments.out) for w in dict.fromkeys(r["workload"] for r in found)}
    for workload in [w for w, own in scales.items() if not all(own.knows(r) for r in found if r["workload"] == w)]:
        print(f"{workload}: its speeds are not measured again yet; without --table they are")
        del scales[workload]
    print("\n".join(table(found, scales, {w: load([f"workload={w}", "card=cpu"]).pick.tolerance for w in scales})))


def rows(out: Path, budget_s: float) -> list[dict[str, Any]]:
    """Returns the runs of a budget in a file."""
    return [x for x in documents(out) if "way" in x and x["budget_s"] == budget_s]


def scale(workload: str, out: Path) -> Scale:
    """Returns the scale of a workload, from the last speeds in a file."""
    measured = [x["speeds"] for x in documents(out) if x.get("speeds") is not None and x["workload"] == workload]
    return Scale.of(arena(TABLES / f"{workload}.jsonl"), measured[-1] if measured else {})


def documents(out: Path) -> list[dict[str, Any]]:
    """Returns what a file holds, a line each; nothing where there is none."""
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []


def side_by_side(workload: str, seed: int, ways: Sequence[str], budget_s: float) -> list[dict[str, Any]]:
    """Returns the rows of one or two tuners, each in a process of its own on a core of its own."""
    with tempfile.TemporaryDirectory() as folder:
        made = Contest.made(workload, seed, budget_s, 0.0, Path())
        started = time.time()
        running = []
        for place, way in enumerate(ways):
            out = Path(folder) / f"{place}.jsonl"
            contest = dataclasses.replace(made, started=started, out=str(out))
            order = json.dumps({"way": way, "contest": dataclasses.asdict(contest)})
            said = (Path(folder) / f"{place}.txt").open("w", encoding="utf-8")
            command = [sys.executable, "-m", "benchmarks.tuners", "--one", order]
            with on_core((place + seed) % 2):
                running.append((way, out, subprocess.Popen(command, stdout=said, stderr=said), said))
        found = []
        for way, out, process, said in running:
            try:
                code = process.wait(started + budget_s + GRACE_S - time.time())
            except subprocess.TimeoutExpired:
                process.terminate()
                code = process.wait()
            said.close()
            lines = documents(out)
            last = Path(said.name).read_text(encoding="utf-8")[-2000:]
            if code and not any(x["event"] == "trial" for x in lines):
                raise SystemExit(f"{way} on {workload} ended with {code}:\n{last}")
            row = {"way": way, "workload": workload, "seed": seed, "budget_s": budget_s, "code": code}
            found.append({**row, "beside": [w for w in ways if w != way], "lines": lines})
        return found


def one(order: Mapping[str, Any]) -> None:
    """Runs one tuner in this process."""
    from benchmarks.tuners.ways import WAYS

    contest = Contest(**order["contest"])
    result = WAYS[order["way"]](contest)
    contest.wrote("end", **result)


def measure_again(workload: str, core: int, out: Path) -> dict[str, Any] | None:
    """Returns the speeds of every training that was on the front of its run; None where the file has them all.

    All are measured anew where one is missing: only then were they measured at one pace. Trainings that differ in
    nothing that speed can depend on are one.
    """
    known, own = scale(workload, out), arena(TABLES / f"{workload}.jsonl")
    mode = own.table.objectives[own.objective]
    lines = [
        x
        for r in documents(out)
        if r.get("way") and r["workload"] == workload
        for x in on_front_once(r, own.objective, mode)
    ]
    wanted = {speed_key(x["knobs"]): x["knobs"] for x in lines}
    if all(known.speed(x["knobs"]) is not None for x in lines):
        return None
    code = (
        "import json, sys; from benchmarks.tuners.__main__ import speeds; "
        "asked = json.load(sys.stdin); json.dump(speeds(*asked), sys.stdout)"
    )
    asked = json.dumps([workload, list(wanted.values())])
    with on_core(core):
        done = subprocess.run([sys.executable, "-c", code], input=asked, stdout=subprocess.PIPE, text=True, check=True)
    return {**provenance("tuners"), "workload": workload, "speeds": json.loads(done.stdout)}


def speeds(workload: str, configurations: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the samples a second of each, measured in several orders, at one pace of the machine."""
    from tuning.workers.session import Session

    contest = Contest.made(workload, 0, 0.0, time.time(), Path())
    # Tensors are counted, as in the contest, and none is refused: a training may have fitted by the batches it met.
    session = Session(dataclasses.replace(contest.setting, cap_bytes=sys.maxsize))
    session.warm({})
    first, order = configurations[0], list(configurations[1:])
    draw, asked = random.Random(0), [first]
    for _ in range(ROUNDS):
        draw.shuffle(order)
        for start in range(0, max(1, len(order)), REFERENCE_EVERY):
            asked += [*order[start : start + REFERENCE_EVERY], first]
    windows = []
    for knobs in asked:
        window = session.window(knobs, WINDOW_S, seed=0)
        if window["samples_per_s"] is None:
            ended = f"{window['outcome']}, {window['message']}"
            raise RuntimeError(f"{dict(knobs)} ended when it was measured again: {ended}")
        windows.append((speed_key(knobs), float(window["samples_per_s"])))
    return at_one_pace(windows, speed_key(first))


if __name__ == "__main__":
    main()
