"""The journal of a study: `trials.jsonl`, one JSON object a line, the only truth the parts of a run share.

    {"seq": 7, "t": "2026-11-21T10:34:12.345Z", "event": "probe", ..., "crc": "89abcdef"}

Every line ends with the CRC-32 of itself without that last key. A line is on disk before anyone is told of it, so after
a power cut at most the line being written is lost; what opening finds damaged it leaves out, and says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import psutil

from tuning.config.errors import ConfigError, StoppedEarly

FAILPOINT = "TUNING_FAILPOINT"
"""Environment variable for crash tests: `after_write:probe:3` ends the process once its third probe is on disk."""

_OWN_KEYS = ("seq", "t", "event", "crc")
_MARK_LENGTH = len(b',"crc":"89abcdef"}')
_WHOLE = re.compile(rb'\{"seq":.*?,"crc":"[0-9a-f]{8}"\}')


@dataclass(frozen=True)
class Record:
    """One line: its number from 0, its UTC time in ISO 8601, its event, and the event's own fields by name."""

    seq: int
    t: str
    event: str
    fields: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        """Returns a field; raises KeyError that names the event and the fields it has."""
        try:
            return self.fields[key]
        except KeyError:
            raise KeyError(f"{key} (record {self.seq}, {self.event}, has {', '.join(self.fields)})") from None

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a field, or `default` where the event has none of that name."""
        return self.fields.get(key, default)


class Journal:
    """An open `trials.jsonl`; `open` makes one. A process that dies gives the lock back with its last breath."""

    def __init__(self, path: Path, lock: int, records: list[Record], warnings: list[str]) -> None:
        self.path, self.warnings, self._lock = path, warnings, lock
        self._begin(records)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._end = os.fstat(self._file).st_size

    def _begin(self, records: list[Record]) -> None:
        self._records = records
        self._counts: Counter[str] = Counter()
        self._next = max((r.seq for r in records), default=-1) + 1

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Journal:
        """Returns the journal, locked for this process and healed; `warnings` says what was damaged.

        A damaged tail is moved to `trials.jsonl.corrupt-N`; damaged lines before the last good one are skipped.
        Raises ConfigError where there is no journal and `create` is False, or where a live process holds it.
        """
        if not create and not path.is_file():
            raise ConfigError(f"{path}: no such file", remedy="start a new run, or name another with resume=ID")
        lock = _lock(path)
        try:
            if not path.exists():
                path.touch()
                _sync_folder(path)
            found = _Scan(path.read_bytes())
            _heal(path, found)
            journal = cls(path, lock, found.records, found.warnings)
            if found.lacks_newline:
                journal._write(b"\n")
            return journal
        except OSError as error:
            os.close(lock)
            raise _unwritable(path, error) from error

    @property
    def records(self) -> list[Record]:
        """What the journal holds, in the order of the lines."""
        return list(self._records)

    def append(self, event: str, /, **fields: Any) -> Record:
        """Returns the record once it is on disk (write, fsync).

        NaN and infinities become null, tuples lists, so that a record is what a reader of the file will see. Raises
        StoppedEarly where the file cannot be written; the file then ends with the record before.
        """
        taken = [key for key in fields if key in _OWN_KEYS]
        if taken:
            raise ValueError(f"{event}: a field cannot be called {taken[0]}; the journal writes {', '.join(_OWN_KEYS)}")
        record = Record(self._next, self._stamp(), event, {k: _plain(v, f"{event}.{k}") for k, v in fields.items()})
        self._keep(record)
        self._records.append(record)
        self._next += 1
        self._counts[event] += 1
        if os.environ.get(FAILPOINT) == f"after_write:{event}:{self._counts[event]}":
            os._exit(9)
        return record

    def close(self) -> None:
        """Gives file and lock back; closing twice is no error."""
        if self._file >= 0:
            os.close(self._file)
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stamp(self) -> str:
        return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def _keep(self, record: Record) -> None:
        self._write(_line(record))

    def _write(self, line: bytes) -> None:
        left = memoryview(line)
        try:
            while left:  # a disk that fills up takes part of a line before it refuses the rest
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise _unwritable(self.path, error) from error
        self._end += len(line)


def read(path: Path) -> tuple[list[Record], list[str]]:
    """Returns the good records of a journal and what was damaged, without locking or changing it.

    For readers beside a live run: its last line may be half written. Raises ConfigError where the file cannot be read.
    """
    try:
        found = _Scan(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy="name the folder of a run") from error
    tail = [f"{path.name}: the last {len(found.tail)} bytes are no whole record"] if found.tail else []
    return found.records, found.warnings + tail


class _Scan:
    """A journal's bytes taken apart: good records, warnings of damage inside, the bytes after the last good line."""

    def __init__(self, data: bytes) -> None:
        self.records: list[Record] = []
        self.good_bytes = position = good_lines = 0
        damage: list[tuple[int, str]] = []  # line number from 1, what became of it
        for number, line in enumerate(data.split(b"\n"), start=1):
            position += len(line) + 1
            whole = _parse(line)
            # A flipped newline joins two records to one line; both are still there.
            kept = [whole] if whole else [r for m in _WHOLE.finditer(line) if (r := _parse(m[0]))]
            if line and whole is None:
                damage.append((number, "; its records were kept" if kept else " and was left out"))
            if kept:
                self.records += kept
                self.good_bytes, good_lines = min(position, len(data)), number
        self.warnings = [f"line {n} is damaged{fate}" for n, fate in damage if n <= good_lines]
        self.tail = data[self.good_bytes :]
        self.lacks_newline = self.good_bytes > 0 and data[self.good_bytes - 1 : self.good_bytes] != b"\n"


def _parse(line: bytes) -> Record | None:
    """Returns the record of a whole line, or None where bytes of it are missing or changed."""
    body, mark = line[:-_MARK_LENGTH], line[-_MARK_LENGTH:]
    if mark != _mark(body):
        return None
    try:
        raw = json.loads(line)
        seq, t, event, _ = (raw.pop(key) for key in _OWN_KEYS)
    except (ValueError, KeyError, RecursionError):
        return None
    return Record(seq, t, event, raw)


def _line(record: Record) -> bytes:
    raw = {"seq": record.seq, "t": record.t, "event": record.event, **record.fields}
    text = json.dumps(raw, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Half of a surrogate pair, as in an undecodable file name, has no UTF-8; its escape is JSON's own.
    body = text.encode("utf-8", "backslashreplace")[:-1]
    return body + _mark(body) + b"\n"


def _mark(body: bytes) -> bytes:
    return b',"crc":"%08x"}' % zlib.crc32(body + b"}")


def _plain(value: Any, where: str) -> Any:
    """Returns the value as JSON has it; raises TypeError that names the field for what JSON has not."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str | int):
        return str(value) if isinstance(value, str) else int(value)  # of an enumeration, its value
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if hasattr(value, "item"):  # a NumPy scalar
        return _plain(value.item(), where)
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold: {value!r}")


def _heal(path: Path, found: _Scan) -> None:
    """Cuts the file after its last good record; what came after is kept aside and named in the warnings."""
    if not found.tail:
        return
    aside = next(p for n in itertools.count() if not (p := path.with_name(f"{path.name}.corrupt-{n}")).exists())
    with aside.open("xb") as file:
        file.write(found.tail)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path)  # kept aside for certain before it is cut off
    with path.open("r+b") as file:
        file.truncate(found.good_bytes)
        os.fsync(file.fileno())
    size = len(found.tail)
    found.warnings.append(f"the last {size} bytes were no whole record; they were moved to {aside.name}")


def _lock(path: Path) -> int:
    """Returns the descriptor that holds `<path>.lock`, which names our process."""
    name = path.with_name(f"{path.name}.lock")
    try:
        lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(lock)
            os.close(lock)
            raise ConfigError(
                f"{path} is in use by process {holder or '(just started)'}",
                remedy="wait for it, or start another run: one process writes a run",
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except OSError as error:
        raise _unwritable(name, error) from error
    return lock


def _holder(lock: int) -> str:
    """Returns the pid in a lock file, or "" where none is written in 0.2 s; the holder takes microseconds."""
    for _ in range(20):
        written = os.pread(lock, 32, 0)
        # A dead holder's pid stays until the next one has written its own.
        if written.isdigit() and psutil.pid_exists(int(written)):
            return written.decode()
        time.sleep(0.01)
    return ""


def _sync_folder(path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _unwritable(path: Path, error: OSError) -> StoppedEarly:
    room = f"make room in {path.parent} (1 MB holds about 1000 records)"
    return StoppedEarly(
        f"{path} cannot be written: {error.strerror or error}; what it holds is safe",
        remedy=f"{room}, then go on with resume={path.parent.name}",
    )


# -- views: functions of a sequence of records -------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """How a trial ended. `outcome` is one of `memory.oom.Outcome`; `values` has None for what was not finite.

    `samples_per_s` is the throughput it was judged by; `stopped_at` the samples at which a rung stopped it, else None.
    Times are seconds, `*_at` seconds since 1970, 0 where a trial did not come that far.
    """

    id: str
    config: Mapping[str, Any]
    outcome: str
    values: Mapping[str, float | None] = field(default_factory=dict)
    samples: int = 0
    stopped_at: int | None = None
    samples_per_s: float | None = None
    train_s: float = 0.0
    evaluate_s: float = 0.0
    setup_s: float = 0.0
    first_step_at: float = 0.0
    last_step_at: float = 0.0
    peak_allocated_bytes: int = 0
    message: str = ""
    seed: int | None = None

    @classmethod
    def of(cls, record: Record) -> Trial:
        """Returns the trial of a `trial` record; what the record lacks, or has as null, keeps its default."""
        named = (f.name for f in fields(cls) if f.name != "id")
        return cls(id=record["trial"], **{n: record[n] for n in named if record.get(n) is not None})


def last(records: Sequence[Record], event: str) -> Record | None:
    """Returns the latest record of an event, or None."""
    return next((r for r in reversed(records) if r.event == event), None)


def trials(records: Sequence[Record]) -> list[Trial]:
    """Returns each trial that ended, once, with its latest ending, in the order of the first endings.

    One that was rated anew, with the system knobs that another tried, has these and that speed.
    """
    ended = {r["trial"]: Trial.of(r) for r in records if r.event == "trial"}
    for trial, record in rated(records).items():
        ended[trial] = replace(ended[trial], config=record["config"], samples_per_s=record["samples_per_s"])
    return list(ended.values())


def rated(records: Sequence[Record]) -> dict[str, Record]:
    """Returns the latest `rated` record of each trial that ended and has one since."""
    found: dict[str, Record | None] = {}
    for record in records:
        if record.event == "trial":
            found[record["trial"]] = None
        elif record.event == "rated" and record["trial"] in found:  # the line of its trial may have been damaged
            found[record["trial"]] = record
    return {trial: record for trial, record in found.items() if record is not None}


def unfinished(records: Sequence[Record]) -> list[tuple[str, dict[str, Any]]]:
    """Returns id and configuration of each trial that began and has no ending since, in the order they began.

    A trial that was refused when it was to begin again has ended too.
    """
    begun: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.event == "trial_start":
            begun[record["trial"]] = dict(record["config"])
        elif record.event == "trial" or (record.event == "refused" and record.get("trial")):
            begun.pop(record["trial"], None)
    return list(begun.items())


def stage_done(records: Sequence[Record], stage: str) -> bool:
    """Returns whether the stage has ended."""
    return any(r.event == "stage" and r["stage"] == stage and r["state"] == "end" for r in records)


def is_finished(records: Sequence[Record]) -> bool:
    """Returns whether the study came to its end: it says so, or its last stage has ended."""
    stop = last(records, "stop")
    return stage_done(records, "export") or (stop is not None and not stop["resumable"])
