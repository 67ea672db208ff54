"""Equal wall time for cardtune, Ray Tune and Optuna on small trainings that none was tuned on, judged by plain scripts.

    python -m benchmarks.unseen.contest --tasks text tabular image --ways ours ray optuna --seconds 120 --seeds 5
    python -m benchmarks.unseen.contest --tasks tabular text --ways command loop --seconds 180 --seeds 5

A task is a folder beside this file, or a path to one (`task.py` says what it holds). For each search seed the ways take
turns, in the opposite order on odd seeds. Then the plain script trains the person's first guess and every pick on seeds
that no search used, in turns, each in a fresh process. A pick scores its speed over the first guess's, where its mean
accuracy is not lower than the guess's by more than SLACK; else, or where there is none, it scores 1, as one who goes on
with the guess. Rows are added to --out as they come, and what is there is left out of a rerun, whatever its commit: use
a file for each. Where a rerun has some of a round to train, it trains the guess again before it. Let nothing else run:
where another process has a core, trainings of two threads are slowed by any factor, each by another.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

import yaml

from benchmarks.document import provenance
from benchmarks.unseen.task import KNOBS_OF_A_COMMAND

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WAYS = ("ours", "ray", "optuna", "command", "loop")
"""The script as a custom loop of ours, Ray Tune and Optuna in a process; the script as a command: ours, Optuna's."""
GUESS = "guess"
FIRST_FRESH, SLACK = 1000, 0.002
CELL = ("task", "way", "seed", "seconds")
Row = dict[str, Any]


class Rows:
    """The rows of a file, or of this process alone; those added are written at once."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        lines = out.read_text(encoding="utf-8").splitlines() if out and out.is_file() else []
        self._rows: list[Row] = [json.loads(line) for line in lines]
        found = provenance("unseen")
        device = found["device"]
        self._from = {"machine": f"{device['name']}, {device['cores']} cores", "commit": found["commit"]}

    def add(self, kind: str, row: Row) -> Row:
        """Writes a row of a kind, with where and when it came to be, and returns it."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._rows.append({"kind": kind, **row, **self._from, "date": now})
        if self._out:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            with self._out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self._rows[-1]) + "\n")
        return self._rows[-1]

    def of(self, kind: str, **values: Any) -> Iterator[Row]:
        """Yields the rows of a kind with these values, in their order."""
        return (row for row in self._rows if row["kind"] == kind and values.items() <= row.items())


def run(arguments: Sequence[str], folder: str, limit_s: float) -> tuple[str, str]:
    """Returns stdout of `python -m ...` in a folder, and why it failed or ""."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": f"{folder}/cache"}
    command = [sys.executable, "-m", *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return "", f"took more than {limit_s:.0f} s"
    return done.stdout, "" if done.returncode == 0 else f"exit {done.returncode}: {done.stderr[-1000:]}"


def search(path: Path, way: str, seed: int, seconds: int) -> Row:
    """Returns the pick of a search, how many trials it took and how long; `why` where it has none."""
    began, limit_s = time.monotonic(), 3.0 * seconds + 300
    with tempfile.TemporaryDirectory() as folder:
        if way in ("ours", "command"):
            asked = command(path, Path(folder)) if way == "command" else [f"workload={path / 'loop.py'}"]
            asked += [f"search.max_time={seconds}s", f"search.seed={seed}", "name=one"]
            _, why = run(["tuning.run", *asked], folder, limit_s)
            best = next(Path(folder).glob("runs/*/one/best.yaml"), None)
            found = exported(best) if best else {"pick": None}
        else:
            out, why = run([f"benchmarks.unseen.{way}_peer", str(path), str(seed), str(seconds)], folder, limit_s)
            found = {"pick": None} if why else json.loads(out.splitlines()[-1])
    why = "" if found["pick"] else why or "no training came to its end"
    return {**found, "wall_s": round(time.monotonic() - began, 1), **({"why": why} if why else {})}


def command(path: Path, folder: Path) -> list[str]:
    """Returns what is typed to search a task's script as a command; its space is written into the folder."""
    code = f"import sys, json; sys.path.insert(0, {str(path)!r}); import script as s"
    told = f"{code}; print(json.dumps([s.SPACE, s.GUESS, s.EPOCHS]))"
    out = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout
    space, guess, epochs = json.loads(out)
    searched = {name: space[name] for name in KNOBS_OF_A_COMMAND} | {
        "before": {n: guess[n] for n in KNOBS_OF_A_COMMAND}
    }
    (folder / "space.yaml").write_text(yaml.safe_dump(searched), encoding="utf-8")
    settings = ", ".join(f'"{name}": {{{name}}}' for name in (*KNOBS_OF_A_COMMAND, "seed"))
    typed = f"{sys.executable} {path / 'script.py'} '{{{{{settings}}}}}'"
    return [f"workload={typed}", r"metric=^[0-9.]+ ([0-9.]+)$", "mode=max", f"epochs={epochs}", "space=space.yaml"]


def exported(best: Path) -> Row:
    """Returns the pick of a study, as far as its space names it, and how its trials ended."""
    found = yaml.safe_load(best.read_text(encoding="utf-8"))
    records = map(json.loads, (best.parent / "trials.jsonl").read_text(encoding="utf-8").splitlines())
    space = next(r for r in records if r["event"] == "study" and "config" in r)["config"]["knobs"]
    pick = {name: value for name, value in found["knobs"].items() if name in space}
    return {"pick": pick, "trials": found["provenance"]["trials"]}


def judged(path: Path, settings: Row, fresh: int) -> Row:
    """Returns what a training by the plain script comes to; `why` where it fails."""
    asked = json.dumps({**settings, "seed": fresh})
    with tempfile.TemporaryDirectory() as folder:
        out, why = run(["benchmarks.unseen.task", str(path), asked], folder, 1800)
    if why:
        return {"why": why}
    speed, quality = map(float, out.splitlines()[-1].split())
    return {"samples_per_s": speed, "quality": quality}


def contest(path: Path, arguments: argparse.Namespace, rows: Rows) -> list[Row]:
    """Searches, trains and scores what is not there yet of a task; returns the scores."""
    picks = []
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for way in arguments.ways[:: -1 if seed % 2 else 1]:
            cell = dict(zip(CELL, (path.name, way, seed, arguments.seconds), strict=True))
            found = next(rows.of("search", **cell), None)
            if found is None:
                found = rows.add("search", {**cell, **search(path, way, seed, arguments.seconds)})
                print(
                    f"{path.name} {way} {seed}: {found['wall_s']:.0f} s, {found.get('why') or found['pick']}",
                    flush=True,
                )
            picks.append(found)
    for fresh in range(FIRST_FRESH, FIRST_FRESH + arguments.fresh):
        cells = [{**{name: pick[name] for name in CELL}, "fresh": fresh} for pick in picks]
        due = [n for n, cell in enumerate(cells) if picks[n]["pick"] and not any(rows.of("judged", **cell))]
        if due:
            guess = {"task": path.name, "way": GUESS, "seed": None, "seconds": None, "fresh": fresh}
            base = rows.add("judged", {**guess, **judged(path, {}, fresh)})
            if "why" in base:
                raise SystemExit(f"{path.name}: the first guess does not train: {base['why']}")
        for n in due:
            found = judged(path, picks[n]["pick"], fresh)
            rows.add("judged", {**cells[n], **found, "guess": [base["samples_per_s"], base["quality"]]})
    scores = []
    for pick in picks:
        score = scored(pick, rows, arguments.fresh)
        known = next(rows.of("score", **score), None)
        scores.append(rows.add("score", score) if known is None else known)
    return scores


def scored(pick: Row, rows: Rows, fresh: int) -> Row:
    """Returns a pick with its trainings on fresh seeds, each beside the guess's, and what it scores."""
    cell = {name: pick[name] for name in CELL}
    found = [row for row in rows.of("judged", **cell) if row["fresh"] < FIRST_FRESH + fresh]
    score: Row = {**cell, "pick": pick["pick"], "ratio": None, "quality_difference": None, "score": 1.0}
    if not found or any("why" in row for row in found):
        return score
    speeds, qualities = [r["samples_per_s"] for r in found], [r["quality"] for r in found]
    guess_speeds, guess_qualities = zip(*(row["guess"] for row in found), strict=True)
    ratio, difference = geometric_mean(speeds) / geometric_mean(guess_speeds), mean(qualities) - mean(guess_qualities)
    score |= {"ratio": ratio, "quality_difference": difference, "score": ratio if difference >= -SLACK else 1.0}
    return score | {
        "speeds": speeds,
        "qualities": qualities,
        "guess_speeds": [*guess_speeds],
        "guess_qualities": [*guess_qualities],
    }


def report(scores: Sequence[Row], ways: Sequence[str]) -> Iterator[str]:
    """Yields a line for each pick, then for each task and for all what the ways come to."""
    for row in scores:
        told = "no pick, or it does not train" if row["ratio"] is None else f"{row['ratio']:6.2f} of the guess's speed"
        told += "" if row["ratio"] is None else f", accuracy {row['quality_difference']:+.4f}"
        yield f"{row['task']:10} {row['way']:7} {row['seed']:3}  scores {row['score']:6.2f}  {told}  {row['pick']}"
    tasks = list(dict.fromkeys(row["task"] for row in scores))
    for of, names in [*((name, [name]) for name in tasks), ("all", tasks)][: None if tasks[1:] else -1]:
        means = {}
        for way in ways:
            rows = [row for row in scores if row["way"] == way and row["task"] in names]
            means[way] = geometric_mean(row["score"] for row in rows)
            differences = [row["quality_difference"] for row in rows if row["ratio"] is not None]
            lost = sum(row["score"] == 1.0 for row in rows)
            yield (
                f"{of}: {way} {means[way]:.2f} times the guess, least {min(row['score'] for row in rows):.2f}, "
                f"{lost} of {len(rows)} as the guess, accuracy {mean(differences) if differences else math.nan:+.4f}"
            )
        own = next((way for way in ("ours", "command") if way in means), "")
        peers = {way: means[way] for way in ways if way not in ("ours", "command")}
        if own and peers:
            better = max(peers, key=lambda way: peers[way])
            yield f"{of}: {own} over the better peer ({better}) {means[own] / peers[better]:.2f}"


def main(given: Sequence[str] | None = None) -> int:
    """Runs what is asked for and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=["text", "tabular", "image"], help="folders here, or paths")
    parser.add_argument("--ways", nargs="+", default=list(WAYS[:3]), choices=WAYS)
    parser.add_argument("--seconds", type=int, default=120, help="wall time of a search")
    parser.add_argument("--seeds", type=int, default=5, help="how many search seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--fresh", type=int, default=3, help="how many fresh seeds a pick is judged on")
    parser.add_argument("--out", type=Path, help="a file of JSON lines to add to, and to go on with")
    arguments = parser.parse_args(given)
    paths = [HERE / name if (HERE / name).is_dir() else Path(name).resolve() for name in arguments.tasks]
    if missing := [str(path) for path in paths if not (path / "script.py").is_file()]:
        parser.error(f"no script.py in {', '.join(missing)}")
    rows = Rows(arguments.out)
    scores = [score for path in paths for score in contest(path, arguments, rows)]
    print(*report(scores, arguments.ways), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
