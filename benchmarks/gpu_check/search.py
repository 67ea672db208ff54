"""Part `search`: whole studies under virtual cards, with Ray: nli on one of 24 GB, signals on one of 8 GB.

Each is `python -m tuning.run`, then `python -m tuning train --from best.yaml`, as a person would type them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.cards import caps, free_bytes
from benchmarks.gpu_check.place import ROOT, Kept, OutOfTime, Place
from tuning.journal.events import OomRecord
from tuning.journal.records import read
from tuning.journal.run import History
from tuning.journal.runs import JOURNAL

STUDIES = {"cuda": {"nli": "rtx3090", "signals": "rtx4060"}, "cpu": {"signals": "rtx4060"}}
CLAIMED = {"nli": 4.0, "signals": 1.28}
"""What documents claim for `after` over `before` on such cards (benchmarks/claims.md)."""
TRIALS = {"cuda": 20, "cpu": 2}
STUDY_S = {"cuda": 200.0, "cpu": 100.0}
"""What a study may take; with training its best.yaml, a row takes a third more at most."""
SMALL = (
    *("workload.max_train_samples=96", "workload.max_val_samples=16"),
    *("budget.train_epochs=0.7", "budget.probe.max_time_s=2", "budget.probe.probe_time_s=0.2"),
    *("budget.confirm.window_s=0.1", "budget.confirm.seeds=1"),
)


def run(place: Place) -> dict[str, Any]:
    """Returns a row for each study."""
    kept = Kept(place, "search")
    found: dict[str, Any] = {"rows": [], "finished": True}
    # A card that is larger than the one at hand would be refused before anything starts.
    there = caps(place, free_bytes(place))
    for workload, wanted in STUDIES[place.device].items():
        card = wanted if place.small or wanted in there else "auto"
        try:
            found["rows"].append(
                kept.row(workload, partial(measured, place, workload, card), 1.3 * STUDY_S[place.device])
            )
        except OutOfTime:
            found["finished"] = False
    return found


def measured(place: Place, workload: str, card: str) -> dict[str, Any]:
    """Returns how a study's trials ended, its gain, and whether its best.yaml trains."""
    name = f"gpu_check_{workload}_{place.device}"
    runs = place.out / "runs"
    shutil.rmtree(runs / workload / name, ignore_errors=True)
    overrides = [f"workload={workload}", f"card={card}", f"search.trials={TRIALS[place.device]}", f"name={name}"]
    overrides += [f"runs_dir={runs}", f"search.seed={place.seed}", f"search.max_time={STUDY_S[place.device]:.0f}s"]
    if place.small:
        overrides += SMALL
    began = time.monotonic()
    code, said = _called(["tuning.run", *overrides], place, 1.5 * STUDY_S[place.device])
    row: dict[str, Any] = {"workload": workload, "card": card, "overrides": overrides, "exit": code}
    folder = runs / workload / name
    if code != 0 or not (folder / "best.yaml").exists():
        return {**row, "why": said, "wall_s": round(time.monotonic() - began, 1)}
    run = History(read(folder / JOURNAL)[0])
    row |= {"wall_s": round(time.monotonic() - began, 1), **counted(run)}
    from tuning.report import summary  # needs pydantic, without which the other parts run

    found = summary.of_run(run)
    gain = found.gain("best", found.reference.name) if found.reference else None
    row["gain"] = gain.ratio if gain else None
    row["claimed_factor"] = CLAIMED.get(workload)
    small = ["--samples", "64"] if place.small else []
    out = folder / "trained"
    code, said = _called(
        ["tuning", "train", "--from", str(folder / "best.yaml"), "--out", str(out), *small],
        place,
        STUDY_S[place.device],
    )
    return {**row, "trains": code == 0, "train_said": said}


def counted(run: History) -> dict[str, Any]:
    """Returns how many trials were launched, by outcome, and how many of the launches ran out of memory.

    A trial that ran out of memory and began again, with half the micro-batch or out of its slot, is one that did.
    """
    ooms = {event.trial for event in run.events if isinstance(event, OomRecord)}
    ooms |= {end.trial for end in run.ended if end.outcome == "oom"}
    return {
        "launched": sum(len(trial.starts) for trial in run.begun),
        "outcomes": dict(Counter(end.outcome for end in run.ended)),
        "launched_ooms": len(ooms),
        "refused": len(run.refused),
        "probes": Counter(probe.outcome for probe in run.probes),
    }


def _called(arguments: list[str], place: Place, limit_s: float) -> tuple[int, str]:
    """Returns the exit code of a command of ours and the end of what it said; 124 where it ran past its limit."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if place.small:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    log = place.out / "search.log"
    with log.open("w+", encoding="utf-8") as said:
        try:
            done = subprocess.run(
                [sys.executable, "-m", *arguments],
                stdout=said,
                stderr=said,
                env=environment,
                cwd=ROOT,
                timeout=limit_s,
                check=False,
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = 124
    return code, _end(log)


def _end(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-4:])[-400:]
