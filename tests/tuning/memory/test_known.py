"""What is known from run to run: found again under its key only, and never in the way when its file is damaged."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from tuning.memory import known
from tuning.memory.known import Key, Known

KEY = Key("AMD EPYC", 10**9, "2.13.0", "0.1", "ab" * 32, Key.digest({"layers": 3}))


def peak(micro_batch: int, peak_bytes: int, dtype: str = "fp32") -> dict[str, Any]:
    return {"kind": "peak", "coupling": {"amp_dtype": dtype}, "micro_batch": micro_batch, "peak_bytes": peak_bytes}


def oom(micro_batch: int) -> dict[str, Any]:
    return {"kind": "oom", "coupling": {"amp_dtype": "fp32"}, "micro_batch": micro_batch}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "known.jsonl"


def test_it_is_below_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert known.default_path() == tmp_path / "cardtune" / "known.jsonl"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert known.default_path() == Path.home() / ".cache" / "cardtune" / "known.jsonl"


def test_facts_are_found_again_by_another_process_of_the_same_key(path: Path) -> None:
    assert Known(path).recall(KEY) == []
    Known(path).remember(KEY, [peak(8, 100), oom(64)])
    Known(path).remember(KEY, [peak(16, 200)])
    assert Known(path).recall(KEY) == [peak(8, 100), oom(64), peak(16, 200)]


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Key)])
def test_a_key_that_differs_in_anything_finds_nothing(path: Path, name: str) -> None:
    Known(path).remember(KEY, [peak(8, 100)])
    assert Known(path).recall(dataclasses.replace(KEY, **{name: None})) == []


def test_of_one_configuration_one_fact_is_kept_with_the_larger_peak(path: Path) -> None:
    for peak_bytes in (100, 300, 200):
        Known(path).remember(KEY, [peak(8, peak_bytes), oom(64)])
    assert Known(path).recall(KEY) == [peak(8, 300), oom(64)]


def test_the_file_stays_small_and_keeps_the_latest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "MOST", 5)
    for micro_batch in range(1, 10):
        Known(path).remember(KEY, [peak(micro_batch, 100)])
    assert [f["micro_batch"] for f in Known(path).recall(KEY)] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-20],
        lambda data: b"\0" * 64 + b"\n" + data[data.index(b"\n") + 1 :],
        lambda data: data.replace(b"100", b"900", 1),
        lambda data: data.replace(b"\n", b"\n{}\n", 1),
    ],
    ids=["cut", "zeros", "changed", "foreign"],
)
def test_damaged_lines_are_left_out_with_a_warning(path: Path, damage: Any) -> None:
    Known(path).remember(KEY, [peak(8, 100), peak(16, 200)])
    path.write_bytes(damage(path.read_bytes()))
    store = Known(path)
    left = store.recall(KEY)
    assert {f["micro_batch"] for f in left} <= {8, 16}
    assert len(left) >= 1
    assert all(f["peak_bytes"] in (100, 200) for f in left)
    assert len(store.warnings) == 1
    assert "damaged and were left out" in store.warnings[0]
    Known(path).remember(KEY, [peak(32, 400)])
    clean = Known(path)
    assert clean.recall(KEY) == [*left, peak(32, 400)]
    assert clean.warnings == []


def test_a_whole_line_of_another_shape_is_left_out(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(known._line({}, {"kind": "rumour", "coupling": {}}))
    store = Known(path)
    assert (store.recall(KEY), len(store.warnings)) == ([], 1)


def test_nowhere_to_write_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Known(tmp_path / "file" / "known.jsonl")
    store.remember(KEY, [peak(8, 100)])
    assert store.recall(KEY) == []
    assert "could not be kept for the next run" in store.warnings[0]


def test_two_runs_at_once_lose_nothing_of_each_others(path: Path) -> None:
    def work(dtype: str) -> None:
        for micro_batch in range(1, 16):
            Known(path).remember(KEY, [peak(micro_batch, 100, dtype)])

    runs = [threading.Thread(target=work, args=(dtype,)) for dtype in ("fp32", "bf16", "fp16")]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    store = Known(path)
    assert len(store.recall(KEY)) == 45
    assert store.warnings == []
