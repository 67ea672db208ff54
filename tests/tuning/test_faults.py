"""Faults that were seen once, each with what has to come of it: errors behind errors, secrets, links, leftovers."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest

from tuning.cli.runs import list_runs, show_run
from tuning.config.errors import ConfigError
from tuning.config.shareable import MASK, is_masked, is_secret, masked, masked_items
from tuning.journal.format import line_of
from tuning.journal.records import Journal, Record, read
from tuning.journal.runs import known_runs
from tuning.memory import oom
from tuning.memory.oom import Outcome


def raised_while_handling(first: BaseException) -> BaseException:
    """Returns an error that user code raised, without `from`, while it handled another."""
    error = ValueError("my loss failed")
    error.__context__ = first  # as Python sets it
    return error


def test_error_behind_an_error_of_theirs_is_found() -> None:
    assert oom.classify(raised_while_handling(RuntimeError("CUDA out of memory"))) == Outcome.OOM
    assert oom.poisoned(raised_while_handling(RuntimeError("CUDA error: device-side assert triggered")))
    assert not oom.poisoned(raised_while_handling(KeyError("a")))


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`", Outcome.OOM),
        ("MIOpen Error: miopenStatusAllocFailed", Outcome.OOM),
        ("hipErrorOutOfMemory: out of memory", Outcome.OOM),
        ("XPU out of memory. Tried to allocate 2.00 GiB", Outcome.OOM),
        ("MPS backend out of memory (MPS allocated: 9.06 GB)", Outcome.OOM),
        ("Error while creating shared memory segment /dev/shm/nccl-XyZ (size 9637888)", Outcome.SHM),
    ],
)
def test_text_of_another_backend_is_known(text: str, outcome: Outcome) -> None:
    assert oom.classify(RuntimeError(text)) == outcome


@pytest.mark.parametrize(
    "text", ["CUDA error: unknown error", "GPU is lost", "NCCL communicator was aborted on rank 0"]
)
def test_lost_device_needs_a_new_process(text: str) -> None:
    assert oom.poisoned(RuntimeError(text))


@pytest.mark.parametrize(
    "name",
    ["passwd", "db_passwd", "passphrase", "pwd", "auth", "dsn", "aws_access_key_id", "api_keys", "bearer", "webhook"],
)
def test_name_of_a_secret_is_known(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["passes", "author", "keyboard", "session_length", "label_key", "sash"])
def test_name_like_that_of_a_secret_is_none(name: str) -> None:
    assert not is_secret(name)


def test_user_in_a_url_is_not_written_down() -> None:
    url = "https://me:PW@host/data"
    (kept,) = masked({"data": url}).values()
    assert masked_items([f"workload.data={url}"]) == [f"workload.data={kept}"]
    assert "PW" not in kept
    assert is_masked(kept)
    assert is_masked(MASK)
    assert not is_masked("https://host/data")


@pytest.mark.parametrize("name", ["trials.jsonl", "trials.jsonl.lock"])
def test_link_in_place_of_a_file_of_the_run_is_refused(tmp_path: Path, name: str) -> None:
    target = tmp_path / "theirs"
    target.write_text("kept")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).symlink_to(target)
    with pytest.raises(ConfigError, match="symbolic link"):
        Journal.open(folder / "trials.jsonl", create=True)
    assert target.read_text() == "kept"


def test_pipe_in_place_of_a_journal_is_refused_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine" / "x"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "trials.jsonl")
    with pytest.raises(ConfigError, match="is no file"):
        read(folder / "trials.jsonl")
    assert known_runs(str(tmp_path / "runs")) == [folder]


def test_draft_of_a_killed_writer_is_swept(tmp_path: Path) -> None:
    (tmp_path / ".best.yaml.0123abcd.draft").write_text("half")
    Journal.open(tmp_path / "trials.jsonl", create=True).close()
    assert not list(tmp_path.glob(".*.draft"))


@pytest.mark.parametrize("own", [{"mono": 10**400}, {"mono": float("nan")}, {"t": "0001-01-01T00:00:00+23:00"}])
def test_record_with_a_good_mark_and_an_impossible_time_ends_nothing(
    records: list[Record], own: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = records[0]
    raw = {"seq": first.seq, "t": first.t, "event": first.event, **first.fields, **own}
    body = json.dumps(raw).encode()[:-1]
    line = body + b',"crc":"%08x"}\n' % zlib.crc32(body + b"}")
    folder = tmp_path / "mine" / "x"
    folder.mkdir(parents=True)
    (folder / "trials.jsonl").write_bytes(line + b"".join(map(line_of, records)))
    assert list_runs(["--runs-dir", str(tmp_path)]) == 0
    assert show_run(["--runs-dir", str(tmp_path), "x"]) == 0
    assert "finished" in capsys.readouterr().out
