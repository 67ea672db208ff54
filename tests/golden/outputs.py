"""What a study leaves behind, read without any module of ours: these tests stay true whatever the inside becomes."""

from __future__ import annotations

import collections
import csv
import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.commands import MINE, run, wait_for

TINY = {
    "name": "one",
    "search.trials": "3",
    "search.sampler": "random",  # which begins as many trials as are asked for
    "search.max_time": "10m",  # far more than it takes: on a slow machine trials would else be left out
    "budget.train_epochs": "1",
    "budget.probe.max_time_s": "2",
    "budget.probe.probe_time_s": "0.2",
    "budget.confirm.window_s": "0.01",
    "budget.confirm.seeds": "2",
}
"""A study that goes through every stage; of `mine` it takes about 12 s with one slot."""
SLOW = ["named.before.batch_size=8", "named.before.micro_batch_size=8", "pick.tolerance=1"]
"""What makes almost any configuration of `mine` a faster one that is as good as today's: that is trained again."""
BESIDE = 1
"""Trials beside those that are asked for: the reference, which is `before` of `mine`."""
ENDINGS = {"ok", "stopped", "oom", "refused", "lost"}
BEST: dict[str, type | tuple[type, ...]] = {
    "schema": int,
    "workload.ref": str,
    "workload.options": dict,
    "knobs.batch_size": int,
    "knobs.micro_batch_size": int,
    "knobs.learning_rate": float,
    "train.samples": int,
    "train.seed": int,
    "measured.samples_per_s.median": (int, float),
    "measured.samples_per_s.status": str,
    "measured.samples_per_s.windows": list,
    "measured.quality": dict,
    "measured.peak_allocated_bytes": int,
    "measured.device": str,
    "measured.card": str,
    "measured.virtual": bool,
    "measured.cap_bytes": (int, type(None)),
    "measured.says": str,
    "compared": dict,
    "provenance.study": str,
    "provenance.trial": str,
    "provenance.created": str,
    "provenance.versions": dict,
    "provenance.command": str,
    "provenance.trials": dict,
    "sha256": str,
}
"""Keys of best.yaml, sections before a dot, and what is behind them."""


def journal(folder: Path, killed: bool = False) -> list[dict[str, Any]]:
    """Returns the records of a run; every line is one, numbered in order, but the last where the writer was killed."""
    lines = (folder / "trials.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    records = [json.loads(line) for line in lines if not killed or line.endswith("\n")]
    assert [r["seq"] for r in records] == list(range(len(records)))
    assert all({"t", "event", "crc"} <= r.keys() for r in records)
    return records


def of(records: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    """Returns the records of one kind."""
    return [r for r in records if r["event"] == event]


def tiny(*arguments: str) -> list[str]:
    """Returns the arguments of a tiny study; what is named takes the place of what `TINY` says."""
    return [f"{key}={value}" for key, value in {**TINY, **dict(a.split("=", 1) for a in arguments)}.items()]


def study(folder: Path, *arguments: str, workload: str = str(MINE)) -> list[dict[str, Any]]:
    """Runs a whole study in `folder` and returns its records; every file it promises is there."""
    code = run("tuning.run", tiny(f"workload={workload}", *arguments), folder)
    errors = (folder / "err").read_text(encoding="utf-8")
    assert code == 0, errors[-3000:]
    assert "Traceback" not in errors
    (made,) = (folder / "runs").glob("*/one")
    check_files(made)
    return journal(made)


def interrupted_once(
    process: subprocess.Popen[str], folder: Path, more: int = 1, stops: Sequence[str] = ()
) -> dict[str, Any]:
    """Kills the study of `folder` once so many more trials have ended; returns the values of all that have.

    `stops` is a command of ours that ends it in order instead.
    """
    made = folder / "runs" / "mine" / "one"

    def ends() -> int:
        path = made / "trials.jsonl"
        return path.read_bytes().count(b'"event":"trial",') if path.exists() else 0

    wanted = ends() + more
    assert wait_for(lambda: ends() >= wanted, process), (folder / "err").read_text()[-2000:]
    if stops:
        assert run("tuning", stops, folder) == 0
    else:
        process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=20) == (130 if stops else -signal.SIGKILL)
    return {r["trial"]: r["values"] for r in of(journal(made, killed=True), "trial")}


def resumed(folder: Path, finished: dict[str, Any], count: int, *typed: str) -> list[dict[str, Any]]:
    """Goes on with a study that was killed, and returns its records: nothing was lost or repeated.

    `typed` is the command where it is not `python -m tuning.run`.
    """
    module, *arguments = typed or ("tuning.run",)
    assert run(module, [*arguments, "resume=one"], folder) == 0, (folder / "err").read_text()[-2000:]
    made = folder / "runs" / "mine" / "one"
    records = journal(made)
    ended = {r["trial"]: r["values"] for r in of(records, "trial")}
    assert len(of(records, "trial")) == len(ended) == count + BESIDE, "a finished trial was run again, or one was lost"
    assert {t: ended[t] for t in finished} == finished
    check_files(made)
    return records


def check_files(made: Path) -> None:
    """Checks the files of a finished run: best.yaml's keys, front.csv's columns, report.html, the journal's order."""
    best = yaml.safe_load((made / "best.yaml").read_text(encoding="utf-8"))
    for key, kind in BEST.items():
        value: Any = best
        for part in key.split("."):
            value = value[part]
        assert isinstance(value, kind), f"{key}: {value!r}"
    (objective,) = best["measured"]["quality"].values()
    assert {"mean", "interval", "by_seed", "status"} <= objective.keys()
    assert best["compared"].keys() & {"before", "plain defaults"}
    for compared in best["compared"].values():
        assert compared["low"] <= compared["ratio"] <= compared["high"]
    with (made / "front.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {"trial", "outcome", "on_front", "pick", "samples_per_s", "batch_size", "learning_rate"} <= rows[0].keys()
    assert [r["trial"] for r in rows if r["pick"] == "best"] == [t for t in [best["provenance"]["trial"]] if t]
    report = (made / "report.html").read_text(encoding="utf-8")
    assert report.startswith("<!") or report.lstrip().startswith("<html")
    assert "http" not in report.split("<body")[0].replace("http-equiv", "")
    check_journal(journal(made), best["provenance"]["trial"])


def check_journal(records: list[dict[str, Any]], picked: str) -> None:
    """Checks the order of a finished study's records: what begins ends once, the pick was measured again."""
    assert records[0]["event"] == "study"
    assert records[-1]["event"] == "stop"
    assert (records[-1]["reason"], records[-1]["resumable"]) == ("finished", False)
    ended = collections.Counter(r["trial"] for r in of(records, "trial"))
    assert set(ended.values()) == {1}
    assert {r["outcome"] for r in of(records, "trial")} <= ENDINGS
    begun = {r["trial"] for r in of(records, "trial_start")}
    assert {r["trial"] for r in of(records, "trial") if r["outcome"] in ("ok", "stopped", "oom")} <= begun
    (pick,) = of(records, "pick")
    assert pick["best"] == (picked if pick["kind"] == "faster" else "")
    names = {"faster": picked, "system": "system knobs"}
    assert pick["kind"] == "reference" or any(r["name"] == names[pick["kind"]] for r in of(records, "confirmed"))
    is_kept = pick["kind"] == "reference"  # then nothing takes turns with it
    assert is_kept or pick["reference"] in {r["name"] for r in of(records, "window")}
    timed = [r["config"] for r in of(records, "window")]
    assert is_kept or pick["config"] in timed, "the pick took turns with the reference"
    stages = [r["stage"] for r in of(records, "stage") if r["state"] == "end"]
    assert stages[-3:] == ["search", "confirm", "export"]


def answer(folder: Path, *arguments: str) -> Any:
    """Returns the JSON that `python -m tuning VERB ... --json` prints as the last line of stdout."""
    (folder / "out").write_text("")
    assert run("tuning", [*arguments, "--json"], folder) == 0, (folder / "err").read_text()[-3000:]
    return json.loads((folder / "out").read_text().splitlines()[-1])
