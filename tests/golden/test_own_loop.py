"""A study of a loop of one's own, from the command line: every stage, the files it leaves, and a kill in between."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.commands import ROOT, run, start, wait_for
from tests.golden.outputs import answer, check_files, journal, of, study, tiny

LOOP = ROOT / "tests" / "data" / "plain_loop.py"
pytestmark = [pytest.mark.workload, pytest.mark.timeout(300)]


def test_a_study_of_a_loop_of_ones_own_and_its_best_trained(tmp_path: Path) -> None:
    records = study(tmp_path, "concurrency=1", workload=str(LOOP))
    assert not of(records, "footprint")
    assert {"probe", "trial", "confirmed", "window", "pick"} <= {r["event"] for r in records}
    assert {t["config"]["momentum"] for t in of(records, "trial")} <= {0.0, 0.9}
    assert "is not predicted" in " ".join(r["text"] for r in of(records, "note"))
    made = tmp_path / "runs" / "plain_loop" / "one"
    best = (made / "best.yaml").read_text()
    assert "momentum:" in best
    assert "weight_decay" not in best, "it is nothing that their loop asks for"
    trained = answer(tmp_path, "train", "--from", str(made / "best.yaml"))
    assert trained["samples"] == 1024
    assert 0.5 < trained["values"]["accuracy"] <= 1
    assert {p.name for p in (made / "train").iterdir()} == {"model.safetensors", "result.json"}


def test_a_cap_that_a_third_of_the_space_does_not_fit_loses_no_trial(tmp_path: Path) -> None:
    text = LOOP.read_text().replace("moons(256, 2)", "moons(16, 2)")  # else evaluating needs most
    (tmp_path / "wide.py").write_text(text.replace("32)", "256)").replace("Linear(32", "Linear(256"))
    card = ["card=rtx4060", "card.memory_gib=0.0001", "card.reserve_gib=0"]
    knobs = ["knobs.micro_batch_size=[16,64]", "knobs.batch_size=[16,64]", "knobs.num_workers=0"]
    records = study(tmp_path, "concurrency=1", "search.trials=5", *card, *knobs, workload="wide.py")
    cap = of(records, "study")[0]["card"]["cap_bytes"]
    failed = [r for r in of(records, "probe") if r["outcome"] == "oom"] + of(records, "oom") + of(records, "refused")
    assert min(r["config"]["micro_batch_size"] for r in failed) >= 32
    assert all(t["config"]["micro_batch_size"] <= 32 for t in of(records, "trial") if t["outcome"] == "ok")
    assert {t["outcome"] for t in of(records, "trial")} <= {"ok", "stopped", "refused"}
    assert max(r["peak_allocated_bytes"] for r in of(records, "confirmed")) <= cap


def test_a_kill_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "plain_loop" / "one"

    def ends() -> int:
        path = folder / "trials.jsonl"
        return path.read_bytes().count(b'"event":"trial",') if path.exists() else 0

    slow = ["concurrency=1", "search.trials=4", "budget.train_epochs=12"]
    slow += ["budget.confirm.seeds=1", "budget.confirm.top=1"]  # of which this is not
    process = start("tuning.run", tiny(f"workload={LOOP}", *slow), tmp_path)
    assert wait_for(lambda: ends() >= 1, process), (tmp_path / "err").read_text()[-2000:]
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {r["trial"]: r["values"] for r in of(journal(folder, killed=True), "trial")}
    assert run("tuning.run", ["resume=one"], tmp_path) == 0, (tmp_path / "err").read_text()[-2000:]
    check_files(folder)
    ended = {r["trial"]: r["values"] for r in of(journal(folder), "trial")}
    assert len(ended) == 4
    assert {t: ended[t] for t in finished} == finished


def test_its_memory_is_no_question_for_an_estimate(tmp_path: Path) -> None:
    assert run("tuning", ["estimate", f"workload={LOOP}", "card=rtx4060"], tmp_path) == 2
    assert "its memory cannot be predicted" in (tmp_path / "err").read_text()
