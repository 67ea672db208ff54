"""The predictor: what it asks the tracing process for, what it keeps, and what it makes of a process that fails."""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.commands import heard_interrupts
from trainables.knobs import Knob, KnobTable
from trainables.our_knobs import EVERY
from tuning.memory import predictor
from tuning.memory.prediction import Prediction
from tuning.memory.predictor import Request, predict_all
from tuning.memory.trace import Trace

TRACE = Trace(2, ((0, 512), (0, -1)), {0: "activation"}, ((0, "forward"),), ("aten.relu.default",))
MINE = "tests/data/mine.py"


def request(**knobs: Any) -> Request:
    return Request(MINE, {}, knobs, "cuda")


class Process:
    """Stands in for the tracing process: answers each line, and dies over those of a `deadly` dropout."""

    def __init__(self, deadly: str = "no such thing") -> None:
        self.runs: list[list[dict[str, Any]]] = []
        self._deadly = deadly

    def __call__(self, lines: Sequence[str], limit_s: float) -> tuple[list[str], str]:
        asked = [json.loads(line) for line in lines]
        self.runs.append(asked)
        answers = []
        for line, one in zip(lines, asked, strict=True):
            if self._deadly in line:
                return answers, "the tracing process ended with -11"
            answers.append(Prediction("traced", (one["knobs"]["amp_dtype"],), (TRACE,)).to_json())
        return answers, ""


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    made = Process()
    monkeypatch.setattr(predictor, "_run", made)
    return made


def test_an_answer_is_kept_and_found_again(process: Process, tmp_path: Path) -> None:
    first = predict_all([request()], EVERY, cache=tmp_path)
    assert predict_all([request()], EVERY, cache=tmp_path) == first
    assert len(process.runs) == 1
    predict_all([request()], EVERY, cache=None)
    assert len(process.runs) == 2


def test_knobs_without_effect_share_an_answer_and_others_do_not(process: Process, tmp_path: Path) -> None:
    predict_all([request()], EVERY, cache=tmp_path)
    predict_all([request(micro_batch_size=64, learning_rate=0.1, num_workers=2, dropout=0.3)], EVERY, cache=tmp_path)
    assert len(process.runs) == 1
    predict_all([request(dropout=0.0)], EVERY, cache=tmp_path)
    predict_all([request(amp_dtype="bf16")], EVERY, cache=tmp_path)
    assert len(process.runs) == 3


def test_a_rate_without_effect_is_asked_for_within_its_range(process: Process, tmp_path: Path) -> None:
    own = {
        "weight": Knob(10.0, "learning", low=1.0, high=50.0, shapes_model=True),
        "share": Knob(0.1, "learning", values=(0.0, 0.1), shapes_model=True),
    }
    predict_all([request(weight=value) for value in (2.0, 10.0, 50.0)], KnobTable(own), cache=None)
    (asked,) = [line["knobs"] for line in process.runs[0]]
    assert (asked["weight"], asked["share"]) == (10.0, 0.1)


def test_a_torn_answer_is_traced_again(process: Process, tmp_path: Path) -> None:
    predict_all([request()], EVERY, cache=tmp_path)
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text()[:40])
    assert predict_all([request()], EVERY, cache=tmp_path)[0].confidence == "traced"
    assert len(process.runs) == 2


def test_requests_share_a_process_and_equal_ones_a_trace(process: Process, tmp_path: Path) -> None:
    asked = [request(), request(amp_dtype="bf16"), request(learning_rate=0.1), Request(MINE, {}, {}, "cpu")]
    notes = [found.notes for found in predict_all(asked, EVERY, cache=tmp_path)]
    assert notes == [("fp32",), ("bf16",), ("fp32",), ("fp32",)]
    assert [len(run) for run in process.runs] == [2, 1]


def test_a_process_that_dies_costs_the_request_it_died_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(predictor, "_run", Process(deadly='"amp_dtype": "bf16"'))
    asked = [request(), request(amp_dtype="bf16"), request(amp_dtype="fp16")]
    found = predict_all(asked, EVERY, cache=tmp_path)
    assert [one.confidence for one in found] == ["traced", "none", "traced"]
    assert found[1].notes == ("the tracing process ended with -11",)
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_a_process_that_is_too_slow_is_killed(tmp_path: Path) -> None:
    own = tmp_path / "slow.py"
    own.write_text("import signal\nsignal.pause()\n")
    (found,) = predict_all([Request(str(own), {}, {}, "cpu")], EVERY, timeout_s=1.0, cache=tmp_path / "kept")
    assert found.confidence == "none"
    assert "was stopped" in found.notes[0]
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("changed", ["own.py", "helper.py", "data.csv", "model/config.json"])
def test_an_answer_holds_until_the_code_or_its_data_change(process: Process, tmp_path: Path, changed: str) -> None:
    (tmp_path / "model").mkdir()
    texts = {"own.py": "import helper  # 1\n", "helper.py": "N = 1\n", "data.csv": "1", "model/config.json": "1"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    options = {"model": str(tmp_path / "model"), "data": str(tmp_path / "data.csv"), "size": 3, "none": None}
    asked = [Request(str(tmp_path / "own.py"), options, {}, "cuda")]
    for _ in range(2):
        predict_all(asked, EVERY, cache=tmp_path / "kept")
    assert len(process.runs) == 1
    (tmp_path / changed).write_text(texts[changed].replace("1", "100"))
    predict_all(asked, EVERY, cache=tmp_path / "kept")
    assert len(process.runs) == 2


def test_what_could_not_be_predicted_is_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = iter([Prediction("none", ("ImportError: no helper",), ()), Prediction("traced", (), (TRACE,))])
    monkeypatch.setattr(predictor, "_run", lambda lines, limit_s: ([next(answers).to_json()], ""))
    found = [predict_all([request()], EVERY, cache=tmp_path)[0].confidence for _ in range(3)]
    assert found == ["none", "traced", "traced"]


def test_an_interrupt_ends_what_another_thread_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that does not end stands for a step that takes long: torch is not loaded before it has."""
    ready, slow = tmp_path / "ready", tmp_path / "slow"
    os.mkfifo(ready)
    slow.write_text(f"#!/bin/sh\necho > '{ready}'\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with heard_interrupts(), ThreadPoolExecutor() as pool:
        asked = pool.submit(predict_all, [request()], EVERY, timeout_s=60.0, cache=None)
        ready.read_text()  # waits for it
        predictor.interrupt()
        with pytest.raises(KeyboardInterrupt):
            asked.result(timeout=30.0)
