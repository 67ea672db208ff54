"""A study whose trials take two processes each, and a training with what it found."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import yaml

from tests.commands import run
from tests.golden.outputs import SLOW, of, study
from tuning.run import main

pytestmark = [pytest.mark.workload, pytest.mark.timeout(300)]


def test_trials_of_two_processes_go_through_every_stage_and_the_best_trains(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    asked = ["devices_per_trial=2", "concurrency=1", "knobs.num_workers=0", "search.trials=1", "budget.confirm.top=1"]
    asked += ["budget.confirm.seeds=1"]
    records = study(tmp_path, *asked, *SLOW)
    assert {r["outcome"] for r in of(records, "trial")} <= {"ok", "stopped"}
    assert of(records, "confirmed")
    best = tmp_path / "runs/mine/one/best.yaml"
    measured = yaml.safe_load(best.read_text())["measured"]
    assert measured["devices_per_trial"] == 2
    assert "2 processes a trial" in measured["says"]
    assert run("tuning", ["train", "--from", str(best), "--out", "trained"], tmp_path) == 0, (
        tmp_path / "err"
    ).read_text()
    result = json.loads((tmp_path / "trained/result.json").read_text())
    assert result["values"]["accuracy"] == pytest.approx(measured["quality"]["accuracy"]["mean"], abs=0.05)
    assert set(psutil.Process().children(recursive=True)) <= before, "no process is left"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["devices_per_trial=9"], "devices_per_trial=9, and there"),
        (["devices_per_trial=2", "concurrency=99"], "allowed: concurrency=1 to"),
        (["devices_per_trial=2", "cluster=auto"], "a trial of several devices is of this machine alone"),
        (["devices_per_trial=0"], "at least 1"),
    ],
    ids=["too many", "too many at once", "a cluster", "none"],
)
def test_what_cannot_be_is_said_and_nothing_is_written(
    asked: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["workload=temporal", *asked]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())
