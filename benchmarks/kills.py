"""Kills a process of a study at a random moment, again and again, and goes on with the study: is anything lost?

    python -m benchmarks.kills --kills 40 --seed 0 --out rows.jsonl

Each row: what was killed and when, how the study ended, which finished trials were lost or run once more after a
resume, and the processes that were left 10 s after. A custom loop and the contract's take turns; gcs_server and raylet
are of a study with two trials at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tuning.journal.records import Record, read
from tuning.workers import leftovers

ROOT = Path(__file__).resolve().parents[1]
FILES = (ROOT / "tests" / "data" / "mine.py", ROOT / "tests" / "data" / "plain_loop.py")
QUICK = (
    "search.trials=4",
    "search.max_time=10m",
    "search.sampler=random",
    "budget.train_epochs=8",
    "budget.probe.max_time_s=1",
    "budget.probe.probe_time_s=0.2",
    "budget.confirm.windows=5",
    "budget.confirm.window_s=0.05",
    "budget.confirm.seeds=1",
    "budget.confirm.top=1",
    "name=killed",
)
TARGETS = {"driver": 1, "worker": 1, "raylet": 2, "gcs_server": 2, "both": 1}
"""What is killed, and with how many trials at once; both: the driver, and the worker before it."""
LONGEST_S = 15.0
"""The latest moment of a kill after the process is there: about where a study ends on two slow cores."""
GONE_S = 10.0
WAIT_S = 900.0
"""What no study takes, even on a machine that does much else: one that is not over by then hangs."""


def main(argv: Sequence[str] | None = None) -> None:
    """Writes a row for each kill, then what they come to."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--kills", type=int, default=40)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, required=True)
    asked = made.parse_args(argv)
    draw, rows = random.Random(asked.seed), list[dict[str, Any]]()
    for number in range(asked.kills):
        target = list(TARGETS)[number % len(TARGETS)]
        at_s = draw.uniform(0.0, LONGEST_S)
        with tempfile.TemporaryDirectory(prefix="kills-") as folder:
            rows.append(killed(target, at_s, FILES[number // len(TARGETS) % 2], Path(folder)))
        with asked.out.open("a", encoding="utf-8") as out:
            print(json.dumps(rows[-1]), file=out)
    total = Counter[str]()
    for row in rows:
        total += Counter({name: len(row[name]) for name in ("lost", "twice", "left")} | {"wrong end": not row["ends"]})
    print(f"{len(rows)} kills:", *(f"{total[name]} {name}" for name in ("lost", "twice", "left", "wrong end")))


def killed(target: str, at_s: float, file: Path, folder: Path) -> dict[str, Any]:
    """Returns the row of one kill."""
    token = f"kill-{os.getpid()}-{time.monotonic_ns()}"
    at_once = TARGETS[target]
    process = _started([f"workload={file}", f"concurrency={at_once}", *QUICK], folder, token)
    names = [target] if target != "both" else ["worker", "driver"]
    while process.poll() is None and not all(_named(process, name) for name in names):
        time.sleep(0.05)
    time.sleep(at_s)
    hits = [_kill(process, name) for name in names]
    code = process.wait(WAIT_S)
    left = sorted(_left(token))
    path = next(folder.glob("runs/*/killed/trials.jsonl"), None)
    before = read(path)[0] if path is not None else []
    resumed = code
    if path is not None and any(record.event == "study" for record in before) and code != 0:
        resumed = _started(["resume=killed"], folder, token).wait(WAIT_S)
        left += sorted(_left(token))
    after = read(path)[0] if path is not None else []
    done, twice = _finished(before), [trial for trial, count in Counter(_finished(after)).items() if count > 1]
    ends = resumed == 0 or path is None or not any(record.event == "study" for record in before)
    return {
        "target": target,
        "at_s": round(at_s, 2),
        "hit": any(hits),
        "workload": file.stem,
        "code": code,
        "resumed": resumed,
        "finished": len(done),
        "lost": sorted(set(done) - set(_finished(after))),
        "twice": twice,
        "left": left,
        "ends": ends,
        **({} if ends else {"said": (folder / "out").read_text(errors="replace")[-1000:]}),
    }


def _started(arguments: Sequence[str], folder: Path, token: str) -> subprocess.Popen[bytes]:
    env = leftovers.marked(token, {**os.environ, "PYTHONPATH": str(ROOT)})
    out = (folder / "out").open("ab")
    return subprocess.Popen(
        [sys.executable, "-m", "tuning.run", *arguments], cwd=folder, env=env, stdout=out, stderr=out
    )


def _named(study: subprocess.Popen[bytes], name: str) -> list[psutil.Process]:
    """Returns the processes of a study by what they are."""
    found = []
    with contextlib.suppress(psutil.Error):
        driver = psutil.Process(study.pid)
        if name == "driver":
            return [driver]
        for child in driver.children(recursive=True):
            is_worker = name == "worker" and "tuning.workers.serve" in " ".join(child.cmdline())
            found += [child] if is_worker or child.name() == name else []
    return found


def _kill(study: subprocess.Popen[bytes], name: str) -> bool:
    """Kills a process of the study by what it is; returns False if there is none now."""
    with contextlib.suppress(psutil.Error):
        for process in _named(study, name)[:1] if study.poll() is None else []:
            process.kill()
            return True
    return False


def _left(token: str) -> Iterator[str]:
    """Yields the commands of the processes of a study that are there `GONE_S` after its end; ends them."""
    until = time.monotonic() + GONE_S
    while (pids := list(leftovers.pids(token.encode()))) and time.monotonic() < until:
        time.sleep(0.1)
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            yield " ".join(psutil.Process(pid).cmdline())[-80:]
    leftovers.end(token)


def _finished(records: Sequence[Record]) -> list[str]:
    return [str(record["trial"]) for record in records if record.event == "trial"]


if __name__ == "__main__":
    main()
