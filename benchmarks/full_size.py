"""Whether data of full size start in time: pairs as many as SNLI's and faces as many as 300W-LP's, made small here.

    python -m benchmarks.full_size --workloads nli headpose --out benchmarks/results/full_size.jsonl

Pairs are made of the embedded sample's words, 366,000 to train on and 10,000 to validate on; 122,450 faces share the
content of `--drawn` rendered ones. Four commands of each workload, with `workload.data=FOLDER` and a cache of their
own: two studies of `--time` seconds, of which the first finds no index; `estimate`; and a study that asks for the RAM
cache. A row has the seconds from the command to the first probe and to the end, the probes and trials by outcome,
notes that name a limit, and the least memory the machine had available. One JSON line each.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.document import provenance, publish
from trainables.data import nli_pairs, rendered_heads

ROOT = Path(__file__).parents[1]
TRAIN_PAIRS, DEV_PAIRS, FACES, VIEWS = 366_000, 10_000, 122_450, 10
LIMITS = re.compile(r"limit|longer than|timed? ?out|hang", re.IGNORECASE)


def make_pairs(folder: Path, rng: random.Random) -> None:
    """Writes SNLI's two files: sentences as long as the sample's, in words of the sample, drawn anew."""
    sample = nli_pairs.read(nli_pairs.ENTAILMENT_FILE)
    words = sorted({word for pair in sample for word in pair.premise.split()})
    lengths = [(len(pair.premise.split()), len(pair.hypothesis.split())) for pair in sample]
    for split, count in (("train", TRAIN_PAIRS), ("dev", DEV_PAIRS)):
        with (folder / f"snli_1.0_{split}.jsonl").open("w", encoding="utf-8") as file:
            for number in range(count):
                premise, hypothesis = (" ".join(rng.choices(words, k=k)) for k in rng.choice(lengths))
                label = ("entailment", "neutral", "contradiction")[number % 3]
                file.write(json.dumps({"gold_label": label, "sentence1": premise, "sentence2": hypothesis}) + "\n")


def make_faces(folder: Path, drawn: int) -> None:
    """Writes 300W-LP's layout: names of ten views a photograph, each a copy of one of `drawn` rendered faces."""
    stems = sorted(path.with_suffix("") for path in rendered_heads.folder(drawn, "300w_lp").rglob("*.mat"))
    for number in range(FACES):
        for suffix in (".mat", ".jpg"):
            name = f"AFW_{number // VIEWS}_1_{number % VIEWS}{suffix}"
            shutil.copyfile(stems[number % len(stems)].with_suffix(suffix), folder / name)


def watched(command: Sequence[str], folder: Path) -> tuple[subprocess.CompletedProcess[str], float, int]:
    """Runs a command; returns what it said, its seconds, and the least of the machine's available memory in bytes."""
    least, over = [psutil.virtual_memory().available], threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            least[0] = min(least[0], psutil.virtual_memory().available)

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    wall_s = time.perf_counter() - start
    over.set()
    watcher.join()
    return done, wall_s, least[0]


def row(name: str, command: Sequence[str], folder: Path) -> dict[str, Any]:
    """Returns what a command took and found."""
    began = time.time()
    done, wall_s, least = watched(command, folder)
    found: dict[str, Any] = {"run": name, "exit": done.returncode, "wall_s": wall_s, "least_available_bytes": least}
    if done.returncode:
        found["why"] = done.stderr[-1500:]
    journals = list(folder.glob(f"runs/*/{name}/trials.jsonl"))
    if not journals:
        return found
    records = [json.loads(line) for line in journals[0].read_text(encoding="utf-8").splitlines()]
    of = {event: [r for r in records if r["event"] == event] for event in ("probe", "trial", "note", "confirmed")}
    if of["probe"]:
        found["first_probe_s"] = datetime.fromisoformat(of["probe"][0]["t"]).timestamp() - began
    for event in ("probe", "trial"):
        found[f"{event}s"] = dict(Counter(r["outcome"] for r in of[event]))
    found["confirmed"] = [r["values"] for r in of["confirmed"]]
    found["notes"] = [r["text"] for r in of["note"] if LIMITS.search(r["text"])]
    return found


def commands(workload: str, data: Path, time_s: float) -> dict[str, list[str]]:
    """Returns the commands of a workload by the names of their runs, in their order."""
    what = [f"workload={workload}", f"workload.data={data}"]
    timed = [*what, f"search.max_time={time_s:g}s"]
    return {
        "first": ["tuning.run", *timed, "name=first"],
        "indexed": ["tuning.run", *timed, "name=indexed"],
        "estimate": ["tuning", "estimate", *what],
        "ram_cache": ["tuning.run", *timed, "knobs.ram_cache=true", "name=ram_cache"],
    }


def main() -> int:
    """Makes the data and prints a row for each command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["nli", "headpose"], choices=["nli", "headpose"])
    parser.add_argument("--time", type=float, default=240.0, help="seconds of a study")
    parser.add_argument("--drawn", type=int, default=600, help="rendered faces that the names share")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for workload in options.workloads:
        with tempfile.TemporaryDirectory() as temporary:
            folder, data = Path(temporary), Path(temporary) / "data"
            data.mkdir()
            if workload == "nli":
                make_pairs(data, random.Random(0))
            else:
                make_faces(data, options.drawn)
            for name, command in commands(workload, data, options.time).items():
                found = {**provenance("full_size"), "workload": workload, **row(name, command, folder)}
                publish(found, options.out, append=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
