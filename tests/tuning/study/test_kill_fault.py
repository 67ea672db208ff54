"""kill -9 of the driver and of a training: nothing finished is lost, nothing finished is run again."""

from __future__ import annotations

import collections
import json
import os
import random
import signal
from pathlib import Path

import psutil
import pytest

from tests.commands import MINE, run, start, wait_for
from tuning.journal.records import read, trials

pytestmark = [pytest.mark.fault, pytest.mark.timeout(420)]
TRIALS = 14
STUDY = [
    f"workload={MINE}",
    "name=killed",
    f"search.trials={TRIALS}",
    "search.max_time=20m",
    "budget.train_epochs=24",
    "budget.probe.max_time_s=1",
    "budget.probe.probe_time_s=0.2",
    "budget.confirm.window_s=0.1",
    "budget.confirm.seeds=1",
    "knobs.batch_size=16",
    "knobs.micro_batch_size=8",
    "knobs.amp_dtype=fp32",
    "knobs.num_workers=0",
]


def test_a_study_killed_at_five_random_moments_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    journal = tmp_path / "runs" / "mine" / "killed" / "trials.jsonl"
    chance = random.Random(20261121)

    def lines() -> int:
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    finished: dict[str, dict[str, float | None]] = {}
    for kill in range(5):
        process = start("tuning.run", STUDY if kill == 0 else ["resume=killed"], tmp_path)
        before = lines()
        # 9 lines open a study up to its search; each trial that runs to its end then writes 3.
        wanted = (9 if kill == 0 else before + 2) + chance.randint(0, 6)
        alive = wait_for(lambda wanted=wanted: lines() >= wanted, process)  # type: ignore[misc]
        assert alive, (tmp_path / "err").read_text()[-2000:]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        records, _ = read(journal)
        found = {t.id: dict(t.values) for t in trials(records)}
        assert {i: found.get(i) for i in finished} == finished, "a finished trial was lost or changed"
        finished = found
    assert run("tuning.run", ["resume=killed"], tmp_path) == 0, (tmp_path / "err").read_text()[-2000:]

    records, warnings = read(journal)
    assert not warnings
    endings = collections.Counter(r["trial"] for r in records if r.event == "trial")
    assert set(endings.values()) == {1}, "a finished trial was run again"
    assert len(endings) == TRIALS
    assert {i: dict(t.values) for t in trials(records) if (i := t.id) in finished} == finished
    assert (journal.parent / "best.yaml").exists()


def test_a_killed_training_goes_on_and_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    best = tmp_path / "best.yaml"
    best.write_text((Path(__file__).parents[2] / "data" / "mine_best.yaml").read_text().replace("MINE", str(MINE)))
    train = ["train", "--from", str(best), "--epochs", "60", "--checkpoint-every", "0.05"]
    assert run("tuning", [*train, "--out", "whole"], tmp_path) == 0
    broken = tmp_path / "broken"
    process = start("tuning", [*train, "--out", "broken"], tmp_path)
    assert wait_for(lambda: (broken / "checkpoint.json").exists(), process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert run("tuning", [*train, "--out", "broken", "--resume"], tmp_path) == 0
    whole, resumed = (json.loads((tmp_path / n / "result.json").read_text()) for n in ("whole", "broken"))
    assert resumed["resumed_at"] > 0
    assert resumed["values"] == whole["values"]
    assert resumed["model_sha256"] == whole["model_sha256"]
    assert not (broken / "checkpoint.json").exists()


def test_a_ctrl_c_that_reaches_the_loaders_workers_too_still_saves_a_checkpoint(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize(
    ("moment", "concurrency"), [(b'"event":"probe"', 2), (b'"event":"trial_start"', 2), (b'"event":"trial_start"', 1)]
)
def test_a_signal_ends_in_order_says_how_to_go_on_and_leaves_no_process(
    tmp_path: Path, number: signal.Signals, code: int, moment: bytes, concurrency: int
) -> None:
    journal = tmp_path / "runs" / "mine" / "killed" / "trials.jsonl"
    process = start("tuning.run", [*STUDY, f"concurrency={concurrency}"], tmp_path)
    assert wait_for(lambda: journal.exists() and moment in journal.read_bytes(), process)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    assert process.wait(timeout=20) == code
    assert "python -m tuning.run resume=killed" in (tmp_path / "err").read_text()
    _, left = psutil.wait_procs(children, timeout=10)
    assert not left
