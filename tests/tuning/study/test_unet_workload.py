"""A stranger's training, whole: a U-Net with batch norm, SGD, a cosine, clipping and knobs of its own is tuned."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from tests.commands import ROOT, run
from tuning import __main__
from tuning.journal.records import read
from tuning.journal.run import History

pytestmark = pytest.mark.workload


def test_unet_is_tuned_with_its_own_knobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    shutil.copy(ROOT / "tests" / "data" / "unet.py", mine)
    settings = ["search.trials=6", "search.sampler=random", "search.max_time=4m", "budget.train_epochs=2"]
    settings += ["budget.probe.max_time_s=3", "budget.probe.probe_time_s=0.2", "budget.confirm.window_s=0.01"]
    settings += ["budget.confirm.seeds=1", "budget.confirm.top=1", "concurrency=1", "name=one"]
    assert run("tuning.run", [f"workload={mine}", *settings], tmp_path) == 0, (tmp_path / "err").read_text()
    folder = tmp_path / "runs" / "mine" / "one"
    written = History(read(folder / "trials.jsonl")[0])
    assert written.kinds.changed.keys() == {"micro_batch_size"}
    assert "BatchNorm2d (down.1)" in written.kinds.changed["micro_batch_size"]
    trained = [start.config for trial in written.begun for start in trial.starts]
    assert {c["optimizer"] for c in trained} == {"sgd"}
    assert len({c["channels"] for c in trained}) == len({c["micro_batch_size"] for c in trained}) == 2
    assert len({c["momentum"] for c in trained}) > 1
    notes = [note.text for note in written.notes]
    assert not [text for text in notes if " was set, but " in text], "of knobs that it does not have"
    best = yaml.safe_load((folder / "best.yaml").read_text())
    assert {"channels", "smoothing", "momentum"} <= best["knobs"].keys()
    assert not {"hidden_size", "architecture", "adapter", "dropout", "augmentation"} & best["knobs"].keys()
    assert (
        "micro_batch_size changes what is learned here, so that speed alone does not choose it: BatchNorm2d"
        in best["measured"]["says"]
    )
    mine.unlink()
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["show", "one"]) == 0, "what was found is read without the file"
    assert "BatchNorm2d" in capsys.readouterr().out
