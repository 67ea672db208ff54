"""The command line from end to end, as a person and a program see it: a study, its files, and every verb on them."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest

from tests.commands import MINE, start
from tests.golden.outputs import BESIDE, SLOW, answer, interrupted_once, journal, of, resumed, study, tiny
from tuning.config import best_file

HUNGRY = """
import torch
from tests.data.mine import Moons

class Hungry(Moons):
    seen = 0

    def loss(self, model, batch):
        rows = len(batch[0])
        type(self).seen += rows
        late = torch.ones(64, 2**14) if rows == 64 and self.seen > 2000 else None  # 4 MiB that no estimate foresees
        return super().loss(model, batch) + (0 if late is None else late.sum() * 0)

WORKLOAD = Hungry()
BEFORE = {"learning_rate": 0.01, "batch_size": 16}
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a study that has ended, which ran in one process without Ray; a test works on a copy."""
    folder = tmp_path_factory.mktemp("ended")
    for name in ("ray", "argparse", "logging", "random"):  # the working folder comes first, but for what is Python's
        (folder / f"{name}.py").write_text(f"raise RuntimeError('took {name}.py')")
    study(folder, "concurrency=1", *SLOW)
    return folder


def test_a_study_in_one_process_and_every_verb_on_what_it_left(ended: Path, tmp_path: Path) -> None:
    shutil.copytree(ended, tmp_path, dirs_exist_ok=True)
    records = journal(tmp_path / "runs" / "mine" / "one")
    assert {"study", "footprint", "probe", "trial_start", "trial", "confirmed", "window", "pick"} <= {
        r["event"] for r in records
    }
    shown = (tmp_path / "out").read_text()
    assert shown.startswith("Set ")
    assert "\x1b" not in shown + (tmp_path / "err").read_text()

    (row,) = answer(tmp_path, "list")["runs"]
    assert (row["id"], row["workload"], row["state"], row["trials"]) == ("one", "mine", "finished", 3 + BESIDE)
    summary = answer(tmp_path, "show", "one")
    assert summary["state"] == "finished"
    assert {"best", "before"} <= summary["named"].keys()
    assert sum(summary["trial_counts"].values()) == len(summary["trials"]) == 3 + BESIDE
    files = answer(tmp_path, "report", "one")["files"]
    assert {"best.yaml", "front.csv", "report.html"} <= {Path(f).name for f in files}

    made = tmp_path / "runs" / "mine" / "one"
    trained = answer(tmp_path, "train", "--from", str(made / "best.yaml"))
    assert trained["samples"] == 1024
    assert {"values", "samples_per_s", "seed", "peak_allocated_bytes", "device", "model_sha256"} <= trained.keys()
    assert 0 < trained["values"]["accuracy"] <= 1
    assert {p.name for p in (made / "train").iterdir()} >= {"model.safetensors", "result.json"}

    ablated = answer(tmp_path, "ablate", "one", "--rounds", "2", "--window", "0.05")
    for result in ablated["ablation"]:
        assert result["gain"]["low"] <= result["gain"]["ratio"] <= result["gain"]["high"]
    assert ablated["ablation"]
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_a_virtual_card_holds_its_cap_and_no_oom_is_lost(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(HUNGRY)
    card = ["card=rtx4060", "card.memory_gib=0.003", "card.reserve_gib=0", "knobs.amp_dtype=fp32"]
    time = "budget.probe.max_time_s=30"  # on a slow machine, too, the largest micro-batch is probed
    records = study(tmp_path, "concurrency=1", "search.trials=5", time, *card, *SLOW, workload="hungry.py")
    first = of(records, "study")[0]
    cap = first["card"]["cap_bytes"]
    assert first["card"]["virtual"]
    assert cap < 0.004 * 2**30
    ended = of(records, "trial")
    assert len(ended) == 5 + BESIDE
    assert "lost" not in {r["outcome"] for r in ended}
    failed = [r for r in [*of(records, "probe"), *ended] if r["outcome"] == "oom"]
    assert failed, "at 64 a micro-batch needs 4 MiB more than was measured"
    for r in failed:
        assert "out of memory" in r["message"]
        assert r["wanted_bytes"] > 4 * 2**20
    assert all(r["config"]["micro_batch_size"] < 64 for r in of(records, "confirmed"))
    assert max(r["peak_allocated_bytes"] for r in of(records, "confirmed")) <= cap


@pytest.mark.fault
@pytest.mark.timeout(300)
def test_a_study_killed_then_stopped_loses_and_repeats_nothing(tmp_path: Path) -> None:
    count = 5
    fixed = ["batch_size=16", "micro_batch_size=8", "amp_dtype=fp32", "num_workers=0"]
    slow = ["concurrency=1", f"search.trials={count}", "budget.train_epochs=8", "search.max_time=20m"]
    slow += ["budget.confirm.seeds=1", "budget.confirm.top=1"]  # of which this is not
    asked = tiny(f"workload={MINE}", *slow, *(f"knobs.{f}" for f in fixed))
    finished = interrupted_once(start("tuning.run", asked, tmp_path), tmp_path)
    process = start("tuning.run", ["resume=one"], tmp_path)
    finished |= interrupted_once(process, tmp_path, stops=["stop", "last"])
    assert len(finished) < count, "the study had ended before it was stopped"
    assert "python -m tuning.run resume=one" in (tmp_path / "err").read_text()
    assert f"{Path('runs/mine/one/best.yaml')} holds the best so far" in (tmp_path / "out").read_text()
    said = best_file.read(tmp_path / "runs" / "mine" / "one" / "best.yaml").warnings[0]
    assert said.startswith("best.yaml is the best so far")
    family = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(tmp_path)]
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert len(of(resumed(tmp_path, finished, count), "resume")) == 2
