"""The check of a card without a card: verdicts, the table, what is kept and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check.__main__ import PARTS, main, settled
from benchmarks.gpu_check.place import Kept, OutOfTime, Place, read, revision, write
from benchmarks.gpu_check.table import WIDTH, table
from benchmarks.gpu_check.verdicts import exit_code, lines


def document(part: str, found: dict[str, Any], device: str = "cuda", **more: Any) -> dict[str, Any]:
    facts = {"type": device, "name": "NVIDIA H100 80GB HBM3", "cores": 16}
    versions = {"torch": "2.11.0", "python": "3.12.3"}
    head = {"part": part, "device": facts, "driver": "580.1", "versions": versions, "revision": "abc", "seed": 0}
    return {**head, "seconds": 1.0, "finished": True, "error": "", "found": found, **more}


def row(error: float, **more: Any) -> dict[str, Any]:
    real = {f"{name}_bytes": 1000 for name in ("allocated", "reserved", "capacity")}
    said = {f"predicted_{name}": value * (1 + error) for name, value in real.items()}
    return {"coupling": f"kind {error}", "micro_batch": 1, "wrong": False, **real, **said, **more}


def states(found: dict[str, Any]) -> dict[str, str]:
    return {line.what: line.state for line in lines(found) if line.bar}


def test_memory_is_judged_by_mean_and_largest_error() -> None:
    good = document("memory", {"rows": [row(0.01), row(-0.04)]})
    assert set(states(good).values()) == {"met"}
    spread = states(document("memory", {"rows": [row(0.0)] * 9 + [row(-0.11)]}))
    assert spread["allocated: mean and largest error"] == "NOT MET", "one row past 10 %"
    mean = states(document("memory", {"rows": [row(0.031)]}))
    assert mean["capacity: mean and largest error"] == "NOT MET", "the mean past 3 %"


def test_one_configuration_said_to_fit_that_does_not_is_one_too_many() -> None:
    assert states(document("memory", {"rows": [row(0.0), row(0.0, wrong=True)]}))["said to fit where it does not"] == (
        "NOT MET"
    )
    fits = [{"card": "rtx4060", "said": "fits", "came": came, "coupling": "k", "micro_batch": 2} for came in ("OOM",)]
    found = document("cap", {"caps": {"rtx4060": 1}, "fits": fits, "phases": []})
    assert states(found)["rtx4060: said to fit, OOM"] == "NOT MET"


def test_what_has_no_prediction_is_not_passed_over() -> None:
    lost = {"coupling": "LSTM", "micro_batch": 1, "allocated_bytes": 5, "notes": ["no fake kernel"]}
    found = document("memory", {"rows": [row(0.0), lost]})
    (line,) = [x for x in lines(found) if x.what.startswith("without")]
    assert (line.met, line.why) == (False, "LSTM: no fake kernel")


@pytest.mark.parametrize(
    ("change", "met"),
    [({}, True), ({"next_s": 0.6}, False), ({"then": "oom"}, False), ({"retired": "holds 3 MiB"}, False)],
)
def test_recovery_is_in_the_same_process_and_quick(change: dict[str, Any], met: bool) -> None:
    one = {"phase": "backward", "outcome": "oom", "then": "ok", "retired": "", "next_s": 0.1, "left_bytes": 0}
    found = document("cap", {"caps": {}, "fits": [], "phases": [one, {**one, **change}]})
    assert [line.met for line in lines(found)] == [met]


def test_a_study_may_launch_one_trial_that_runs_out_of_memory() -> None:
    one = {"workload": "nli", "card": "rtx3090", "launched": 20, "launched_ooms": 1, "trains": True}
    assert list(states(document("search", {"rows": [one]})).values()) == ["met", "met"]
    two = {**one, "launched_ooms": 2, "trains": False, "gain": 3.9, "claimed_factor": 4.0}
    assert list(states(document("search", {"rows": [two]})).values()) == ["NOT MET", "NOT MET", "NOT MET"]
    on_a_cpu = states(document("search", {"rows": [two]}, "cpu"))
    assert on_a_cpu["nli, rtx3090: best over before"] == "not measured", "the claim is of a card"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 0),
        ({"error": "ValueError: no"}, 2),
        ({"finished": False}, 2),
        ({"finished": False, "skipped": "no ray"}, 0),
    ],
)
def test_the_exit_code_tells_what_failed_from_what_was_left_out(change: dict[str, Any], code: int) -> None:
    assert exit_code([document("memory", {"rows": [row(0.0)]}, **change)]) == code
    assert exit_code([document("memory", {"rows": [row(0.5)]})]) == 1, "a bar that is not met"


@given(st.text(max_size=400), st.floats(0, 1e9), st.sampled_from(list(PARTS)))
def test_the_table_has_80_columns_whatever_it_says(text: str, number: float, part: str) -> None:
    documents = [
        document("memory", {"rows": [row(number, coupling=text)]}),
        document(part, {}, error=text or "x"),
        document("memory", {"rows": []}, "cpu"),
        document("search", {"rows": [{"workload": "nli", "card": "t4", "why": text}]}, revision="other"),
        {"part": "search", "device": {"type": "cuda"}, "skipped": text, "found": {}, "finished": False},
    ]
    assert all(len(line) <= WIDTH for line in table(documents, "abc"))


def place(tmp_path: Path, **more: Any) -> Place:
    return Place("cpu", tmp_path, "abc", **more)


def test_a_row_is_measured_once_and_again_when_asked_or_when_the_sources_changed(tmp_path: Path) -> None:
    def value(kept: Kept, now: int) -> Any:
        return kept.row("a", lambda: now)

    assert value(Kept(place(tmp_path), "memory"), 1) == 1
    assert value(Kept(place(tmp_path), "memory"), 2) == 1
    assert value(Kept(Place("cpu", tmp_path, "other"), "memory"), 3) == 3
    assert value(Kept(Place("cpu", tmp_path, "other", again=True), "memory"), 4) == 4


def test_no_row_is_begun_that_the_minutes_do_not_hold(tmp_path: Path) -> None:
    kept = Kept(place(tmp_path, limit_s=1.0), "memory")
    with pytest.raises(OutOfTime):
        kept.row("a", lambda: 1, needed_s=2.0)
    assert dict(kept) == {}


def test_a_document_stands_while_sources_and_seed_are_the_same(tmp_path: Path) -> None:
    whole = {"revision": "abc", "seed": 0, "finished": True}
    assert settled(whole, place(tmp_path))
    for change in ({"revision": "x"}, {"seed": 1}, {"finished": False}):
        assert not settled({**whole, **change}, place(tmp_path))
    assert not settled(whole, place(tmp_path, again=True))


def test_parts_that_are_there_are_shown_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in PARTS:
        found = document(part, {"rows": []}, "cpu", revision=revision())
        write(tmp_path / f"{part}_cpu.json", found)
    assert main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    assert "not measured" in capsys.readouterr().out
    assert read(tmp_path / "memory_cpu.json") == document("memory", {"rows": []}, "cpu", revision=revision())


def test_a_part_that_does_not_exist_is_refused_with_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["memroy"])
    assert "no part memroy; parts are memory, cap, search" in capsys.readouterr().err


def test_without_a_card_nothing_is_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.gpu_check.__main__.has_card", lambda: False)
    assert main([]) == 2
    assert "no CUDA device here; --device cpu runs the same code, small" in capsys.readouterr().err


def test_a_part_that_lacks_a_package_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["search", "--device", "cpu", "--out", str(tmp_path)]) == 0
    found = read(tmp_path / "search_cpu.json")
    assert found["skipped"] == "not installed: ray, optuna, pydantic, matplotlib, rich, jinja2"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--minutes", "nan"], "--minutes nan: more than 0"),
        (["--seed", "-3"], "--seed -3: 0 or more"),
        (["--out", "{file}/deeper"], "is a file; name a folder"),
    ],
)
def test_what_cannot_be_asked_for_ends_before_anything_runs(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "file"
    taken.write_text("kept")
    with pytest.raises(SystemExit, match="2"):
        main([a.format(file=taken) for a in arguments])
    assert says in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_minutes_are_those_of_all_parts_and_one_file_has_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shares: list[float] = []

    def ran(place: Place, name: str) -> None:
        shares.append(place.limit_s)
        write(place.document(name), document(name, {}))

    monkeypatch.setattr(gpu_check, "run", ran)
    gpu_check.main(["--device", "cpu", "--minutes", "9", "--out", str(tmp_path)])
    assert shares == pytest.approx([180, 270, 540], abs=5)  # each share of what the one before it left
    sent = json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))
    assert [one["part"] for one in sent["parts"]] == ["memory", "cap", "search"]
    assert str(tmp_path / "gpu_check.json") in capsys.readouterr().err
