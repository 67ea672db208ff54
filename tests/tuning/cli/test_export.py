"""python -m tuning export: what is printed, and what is said of a run without anything to export."""

import json
import shutil

import pytest

from tests.commands import ROOT
from trainables import Knob
from trainables.knobs import KnobTable
from tuning.__main__ import main
from tuning.journal.events import StudyRecord
from tuning.journal.records import Journal

DATA = ROOT / "tests" / "data"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    made = tmp_path / "runs" / "mine" / "one"
    made.mkdir(parents=True)
    shutil.copy(DATA / "sample_run" / "trials.jsonl", made)
    monkeypatch.chdir(tmp_path)
    return made


def test_the_words_go_to_stdout_and_what_is_unsaid_to_stderr(folder, capsys):
    shutil.copy(DATA / "mine_best.yaml", folder / "best.yaml")
    assert main(["export", "last", "--to", "lightning"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["Trainer"]["precision"] == "bf16-mixed"
    assert found["DataLoader"]["batch_size"] >= 1
    assert "set by hand: learning_rate=" in shown.err
    assert main(["export", "one", "--to", "lightning", "--python"]) == 0
    shown = capsys.readouterr()
    assert "# set by hand: learning_rate=" in shown.out
    assert "not said" not in shown.err, "it stands in what was printed"
    assert main(["export", "one", "--to", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["knobs"]["batch_size"] >= 1


def test_a_run_without_a_best_says_so(folder, capsys):
    assert main(["export", "one", "--to", "transformers"]) == 2
    assert "run one has no best.yaml" in capsys.readouterr().err


def test_a_knob_of_the_runs_own_is_not_taken_for_ours(folder, records, capsys):
    own = KnobTable({"optimizer": Knob("adam", "learning", values=("adam", "lion"))}, hooks=["optimizer"])
    (folder / "trials.jsonl").unlink()
    with Journal.open(folder / "trials.jsonl", create=True) as journal:
        study = {**records[0].fields, "workload": "mine.py", "knobs": own.as_raw(), "hooks": [*own.hooks]}
        journal.append(StudyRecord, **study)
    text = (DATA / "mine_best.yaml").read_text(encoding="utf-8")
    (folder / "best.yaml").write_text(text.replace("knobs:\n", "knobs:\n  optimizer: lion\n"), encoding="utf-8")
    assert main(["export", "last", "--to", "transformers"]) == 0
    shown = capsys.readouterr()
    assert "optim" not in json.loads(shown.out)
    assert "set by hand: optimizer='lion': your own code sets it" in shown.err
