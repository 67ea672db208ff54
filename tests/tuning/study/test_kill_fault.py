"""kill -9 of a training and signals to a study: all goes on where it was, and no process is left."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.commands import MINE, start, wait_for
from tuning import __main__

pytestmark = [pytest.mark.fault, pytest.mark.timeout(420)]
STUDY = [
    f"workload={MINE}",
    "name=killed",
    "search.trials=14",
    "search.max_time=20m",
    "budget.train_epochs=24",
    "budget.probe.max_time_s=1",
    "budget.probe.probe_time_s=0.2",
    "budget.confirm.window_s=0.01",
    "budget.confirm.seeds=1",
    "knobs.batch_size=16",
    "knobs.micro_batch_size=8",
    "knobs.amp_dtype=fp32",
    "knobs.num_workers=0",
]


@pytest.mark.parametrize("asked", [["--keep", "best"], ["--keep", "best", "--patience", "40"], ["--patience", "9"]])
def test_kept_weights_averages_and_patience_survive_kills(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    best, broken = tmp_path / "best.yaml", tmp_path / "broken" / "checkpoint.json"
    text = (Path(__file__).parents[2] / "data" / "mine_best.yaml").read_text().replace("MINE", str(MINE))
    best.write_text(text.replace("  dropout: 0.1\n", "  dropout: 0.1\n  ema_decay: 0.99\n"))
    train = ["train", "--from", str(best), "--epochs", "100", "--checkpoint-every", "0.01", *asked]
    assert __main__.main([*train, "--out", "whole"]) == 0
    whole = json.loads((tmp_path / "whole" / "result.json").read_text())
    draws, kills, resumes = random.Random(len(asked)), 0, list[str]()
    for share in (draws.uniform(0.05, 0.4), draws.uniform(0.4, 0.9)):
        process = start("tuning", [*train, "--out", "broken", *resumes], tmp_path)
        at = share * whole["samples"]
        if wait_for(lambda at=at: broken.exists() and json.loads(broken.read_text())["samples"] >= at, process):  # type: ignore[misc]
            os.kill(process.pid, signal.SIGKILL)
            kills, resumes = kills + 1, ["--resume"]
        process.wait()
    assert kills
    assert __main__.main([*train, "--out", "broken", "--resume"]) == 0
    resumed = json.loads((tmp_path / "broken" / "result.json").read_text())
    for found in (whole, resumed):
        found["evaluations"] = [(one["samples"], one["values"]) for one in found["evaluations"]]
    same = ("values", "model_sha256", "samples", "weights_at", "ended_early", "evaluations")
    assert resumed["resumed_at"] > 0
    assert [resumed[name] for name in same] == [whole[name] for name in same]


def test_killed_training_ends_where_an_unbroken_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    best = tmp_path / "best.yaml"
    best.write_text((Path(__file__).parents[2] / "data" / "mine_best.yaml").read_text().replace("MINE", str(MINE)))
    train = ["train", "--from", str(best), "--epochs", "60", "--checkpoint-every", "0.05"]
    assert __main__.main([*train, "--out", "whole"]) == 0
    broken = tmp_path / "broken"
    process = start("tuning", [*train, "--out", "broken"], tmp_path)
    assert wait_for(lambda: (broken / "checkpoint.json").exists(), process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert __main__.main([*train, "--out", "broken", "--resume"]) == 0
    whole, resumed = (json.loads((tmp_path / n / "result.json").read_text()) for n in ("whole", "broken"))
    assert resumed["resumed_at"] > 0
    assert resumed["values"] == whole["values"]
    assert resumed["model_sha256"] == whole["model_sha256"]
    assert not (broken / "checkpoint.json").exists()


def test_ctrl_c_that_reaches_the_loaders_saves_a_checkpoint(tmp_path: Path) -> None:
    best = tmp_path / "best.yaml"
    text = (Path(__file__).parents[2] / "data" / "mine_best.yaml").read_text().replace("MINE", str(MINE))
    best.write_text(text.replace("num_workers: 0", "num_workers: 2"))
    often = ["--epochs", "10000", "--checkpoint-every", "0.05", "--out", "trained"]
    process = start("tuning", ["train", "--from", str(best), *often], tmp_path)
    assert wait_for(lambda: (tmp_path / "trained" / "checkpoint.json").exists(), process), (
        tmp_path / "err"
    ).read_text()
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=20) == 130
    said, go_on = (tmp_path / "err").read_text().splitlines()[-2:]
    assert "interrupted by SIGINT; saved at " in said
    assert go_on.endswith("--out trained --resume")
    _, left = psutil.wait_procs(family, timeout=10)
    assert not left


def trial_begins(folder: Path, *typed: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """Returns a study in which one more trial has begun, and the processes that it has started."""
    journal = folder / "runs" / "mine" / "killed" / "trials.jsonl"

    def begun() -> int:
        return journal.read_bytes().count(b'"event":"trial_start"') if journal.exists() else 0

    before = begun()
    process = start("tuning.run", typed, folder)
    assert wait_for(lambda: begun() > before, process)
    return process, psutil.Process(process.pid).children(recursive=True)


def test_search_whose_ray_is_killed_goes_on_until_interrupted(tmp_path: Path) -> None:
    heard = 0
    for typed, code in (([*STUDY, "concurrency=2"], 4), (["resume=killed"], 130)):
        process, children = trial_begins(tmp_path, *typed)
        if code == 4:
            (raylet,) = (child for child in children if child.name() == "raylet")
            raylet.kill()
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == code
        said = (tmp_path / "err").read_text()[heard:]
        heard += len(said)
        assert re.search(r"python -m tuning\.run resume=(killed|last)", said)
        assert ("error: Ray ended the search: its process raylet is gone" in said) == (code == 4)
        left = psutil.wait_procs(children, timeout=10)[1]
        assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
