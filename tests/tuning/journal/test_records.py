"""The journal: nothing finished is ever lost, damage is named, one process writes."""

import errno
import json
import math
import os
import subprocess
import sys
import zlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuning.config.errors import ConfigError, StoppedEarly
from tuning.journal.events import Event, ProbeRecord
from tuning.journal.records import IN_ANOTHER_CONTAINER, Journal, Record, read, writer_of


@dataclass(frozen=True)
class Step(Event, event="step"):
    """An event of these tests."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trials.jsonl"


def written(path: Path, count: int) -> bytes:
    """Fills a journal with `count` notes and returns its bytes."""
    with Journal.open(path, create=True) as journal:
        for n in range(count):
            journal.append(Step, text=f'note {n}: "quoted", naïve, {{"seq":1}}', number=n)
    return path.read_bytes()


def numbers(records: list[Record]) -> list[int]:
    return [r["number"] for r in records]


def test_a_record_is_what_a_reader_sees(path):
    class Word(StrEnum):
        OK = "ok"

    odd = {"tuple": (1, 2.5), "nested": {"nan": math.nan}, 8: None, "flag": True, "numpy": np.int64(3)}
    with Journal.open(path, create=True) as journal:
        journal.append(
            ProbeRecord,
            name=None,
            config={},
            odd=odd,
            outcome=Word.OK,
            rate=math.inf,
            np=np.float32("nan"),
            raw="\udc80\n\x00",
        )
        [kept] = journal.records
    [seen], warnings = read(path)
    assert seen == kept
    assert not warnings
    assert (seen["rate"], seen["np"], seen["outcome"], seen["raw"]) == (None, None, "ok", "\udc80\n\x00")
    assert seen["odd"] == {"tuple": [1, 2.5], "nested": {"nan": None}, "8": None, "flag": True, "numpy": 3}
    assert path.read_bytes().count(b"\n") == 1


def test_what_json_cannot_hold_is_named_and_not_written(path):
    with Journal.open(path, create=True) as journal, pytest.raises(TypeError, match=r"step\.config\.a\[1\] is a set"):
        journal.append(Step, config={"a": [0, {1}]})
    assert not path.read_bytes()


def test_missing_journal_is_an_error_unless_it_is_to_be_made(path):
    with pytest.raises(ConfigError, match=r"trials\.jsonl: no such file"):
        Journal.open(path)
    assert not list(path.parent.iterdir())
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(path)
    with pytest.raises(StoppedEarly, match=r"gone/trials\.jsonl cannot be written: No such file"):
        Journal.open(path.parent / "gone" / "trials.jsonl", create=True)


def test_torn_at_every_byte_of_the_last_record(path):
    whole = written(path, 4)
    start = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        with Journal.open(path) as journal:
            kept = 4 if cut == len(whole) - 1 else 3  # only the newline is missing: the record is whole
            assert numbers(journal.records) == list(range(kept))
            assert len(journal.warnings) == (1 if start < cut < len(whole) - 1 else 0)
            journal.append(Step, number=kept)
        again, warnings = read(path)
        assert numbers(again) == list(range(kept + 1))
        assert not warnings
    assert (path.parent / "trials.jsonl.corrupt-0").read_bytes() == whole[start : start + 1]


@pytest.mark.parametrize("tail", [b"\0" * 64, b"garbage", b"\0\n\xff\xfe\n{}\n[1]", b'{"seq":9}\n', b"\x80" * 5000])
def test_tail_of_garbage_is_kept_aside(path, tail):
    whole = written(path, 3)
    (path.parent / "trials.jsonl.corrupt-0").write_bytes(b"older")
    path.write_bytes(whole + tail)
    with Journal.open(path) as journal:
        assert numbers(journal.records) == [0, 1, 2]
        assert journal.warnings == [
            f"the last {len(tail)} bytes were no whole record; they were moved to trials.jsonl.corrupt-1"
        ]
    assert path.read_bytes() == whole
    assert (path.parent / "trials.jsonl.corrupt-1").read_bytes() == tail


def test_flipped_bit_loses_its_record_or_with_a_line_feed_two(path):
    whole = written(path, 12)
    last_line = whole.rindex(b"\n", 0, -1) + 1
    for at, bit in np.random.default_rng(5).integers((last_line, 8), size=(200, 2)).tolist():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        records, warnings = read(path)
        line = whole.count(b"\n", 0, at)
        joined = {line + 1} if whole[at] == 10 else set()
        assert set(range(12)) - set(numbers(records)) <= {line} | joined
        assert numbers(records) == sorted(numbers(records))
        assert warnings[0].startswith(f"line {line + 1} is damaged")


def marked(**fields: object) -> bytes:
    """Returns a line whose checksum is right."""
    body = json.dumps(fields)[:-1].encode()
    return body + b',"crc":"%08x"}\n' % zlib.crc32(body + b"}")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"seq":1,"t":"2027-01-01T00:00:00Z","event":"step","crc":"00000000"}\n', "damaged"),
        (marked(seq="1", t="2027-01-01T00:00:00Z", event="step"), "no record"),
        (marked(seq=1, t="yesterday", event="step"), "no record"),
    ],
)
def test_damage_in_the_middle_stays_and_is_skipped(path, line, what):
    first, _, third = written(path, 3).splitlines(keepends=True)
    path.write_bytes(first + line + third)
    with Journal.open(path) as journal:
        assert journal.warnings == [f"line 2 is {what} and was left out"]
        assert numbers(journal.records) == [0, 2]
        assert journal.append(Step, number=3).seq == 3
    assert path.read_bytes().startswith(first + line + third)


def test_reading_beside_a_live_writer_changes_nothing(path):
    with Journal.open(path, create=True) as journal:
        journal.append(Step, number=0)
        with path.open("ab") as file:
            file.write(b'{"seq":1,"t"')
        before = path.read_bytes()
        records, warnings = read(path)
    assert numbers(records) == [0]
    assert warnings == ["trials.jsonl: the last 12 bytes are no whole record"]
    assert path.read_bytes() == before


# -- one writer --------------------------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from tuning.journal.records import Journal

journal = Journal.open(Path(sys.argv[1]), create=True)
print("open", flush=True)
sys.stdin.read()
"""


def test_second_writer_is_told_of_the_first_until_it_dies(path):
    command, root = [sys.executable, "-c", HOLD, str(path)], Path(__file__).parents[3]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as holder:
        assert holder.stdout.readline() == "open\n"
        assert writer_of(path) == holder.pid
        with pytest.raises(ConfigError, match=rf"is in use by process {holder.pid}\b") as caught:
            Journal.open(path)
        assert caught.value.exit_code == 2
        path.with_name("trials.jsonl.lock").write_text(f"{os.getpid()} pid:[1]")  # a pid there, another's here
        assert writer_of(path) == IN_ANOTHER_CONTAINER
        with pytest.raises(ConfigError, match="in use by a process of another container"):
            Journal.open(path)
        holder.kill()
    with Journal.open(path) as journal:
        journal.append(Step, number=0)
        assert writer_of(path) == os.getpid()
    Journal.open(path).close()


# -- a disk that refuses -----------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_whole_records_and_says_what_to_do(path, monkeypatch):
    real, room = os.write, [30]

    def write(file: int, data: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(room[0], len(data))
        room[0] -= taken
        return real(file, bytes(data)[:taken])

    whole = written(path, 2)
    with Journal.open(path) as journal:
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(StoppedEarly, match=r"No space left on device; [^\n]*\n  try: make room in"):
            journal.append(Step, number=2)
        assert path.read_bytes() == whole
        room[0] = 10_000
        assert journal.append(Step, number=2).seq == 2
    assert numbers(read(path)[0]) == [0, 1, 2]


def test_a_failed_sync_is_not_a_record(path, monkeypatch):
    def fsync(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Journal.open(path, create=True) as journal:
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(StoppedEarly, match="Input/output error"):
            journal.append(Step)
        assert journal.records == []
    assert path.read_bytes() == b""


# -- what a run survives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", ["deleted", "moved", "replaced"])
def test_a_journal_that_is_gone_stops_the_run(tmp_path, gone, monkeypatch):
    monkeypatch.chdir(tmp_path)  # its records are saved here
    path = tmp_path / "one" / "trials.jsonl"
    path.parent.mkdir()
    with Journal.open(path, create=True) as journal:
        journal.append(Step, number=0)
        if gone == "moved":
            path.parent.rename(tmp_path / "elsewhere")
        else:
            path.unlink()
        if gone == "replaced":
            path.write_text("another's\n")
        with pytest.raises(StoppedEarly, match=r"was deleted or moved [^\n]*\n  try: put it back") as caught:
            journal.append(Step, number=1)
        assert caught.value.exit_code == 4
        assert numbers(journal.records) == numbers(read(tmp_path / "one.jsonl")[0]) == [0]


def test_a_run_of_somebody_else_is_said_to_be_that(path, monkeypatch):
    written(path, 1)

    def denied(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(ConfigError, match=r"trials\.jsonl cannot be written: Permission denied\n  try: copy the run"):
        Journal.open(path)
