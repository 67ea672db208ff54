"""The journal of a study: `trials.jsonl`, one JSON object a line, the only truth the parts of a run share.

A line is on disk before anyone is told of it, so after a power cut at most the line being written is lost; what opening
finds damaged it leaves out, and says so. `tuning.journal.format` says what a line looks like.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, cast

import psutil

from trainables.files import sync_folder, write_whole
from tuning.config.errors import ConfigError, StoppedEarly
from tuning.journal.events import Event, EventT
from tuning.journal.format import OWN_KEYS, Scan, line_of, plain
from tuning.journal.format import Record as Record
from tuning.journal.run import History

IN_ANOTHER_CONTAINER = 0
"""In the place of a writer's pid: it is a process of another container."""
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


class Journal:
    """An open `trials.jsonl`; `open` makes one. A process that dies gives the lock back with its last breath."""

    def __init__(self, path: Path, lock: int, records: list[Record], warnings: list[str]) -> None:
        self.path, self.warnings, self._lock = path, warnings, lock
        self._records, self.run = records, History(records)
        self._next = max((r.seq for r in records), default=-1) + 1
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._end = os.fstat(self._file).st_size
        self._opened = time.monotonic()
        self.heard: Callable[[Event], None] = lambda event: None
        """Hears of each event that is on disk."""

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Journal:
        """Returns the journal, locked for this process and healed; `warnings` says what was damaged.

        A damaged tail is moved to `trials.jsonl.corrupt-N`; damaged lines before the last good one are skipped.
        Raises ConfigError where there is no journal and `create` is False, where a live process holds it, and where it
        is not ours to write; StoppedEarly where the disk refuses.
        """
        if not create and not path.is_file():
            raise ConfigError(f"{path}: no such file", remedy="start a new run, or name another with resume=ID")
        try:
            if path.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            lock = _lock(path)
            try:
                for draft in path.parent.glob(".*.draft"):  # of a writer that was killed: now we alone write here
                    draft.unlink(missing_ok=True)
                if not path.exists():
                    path.touch()
                    sync_folder(path.parent)
                found = Scan(path.read_bytes())
                _heal(path, found)
                journal = cls(path, lock, found.records, found.warnings)
                if found.lacks_newline:
                    journal._write(b"\n")
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
                what = f"{path} cannot be locked: its file system has no locks"
                raise ConfigError(what, remedy="runs_dir=PATH, on a disk of this machine") from error
            if error.errno == errno.ELOOP:
                what = f"{path} or its lock is a symbolic link"
                raise ConfigError(what, remedy="another name, or another runs_dir") from error
            if error.errno in _DENIED:
                what = f"{path} cannot be written: {error.strerror}"
                raise ConfigError(what, remedy="copy the run to a folder of yours, named by runs_dir=PATH") from error
            raise _unwritable(path, error) from error
        return journal

    @property
    def records(self) -> list[Record]:
        """The records of the journal, in the order of the lines."""
        return list(self._records)

    def append(self, kind: type[EventT], /, **fields: Any) -> EventT:
        """Returns the event once its record is on disk (write, fsync), and `run` has it.

        Fields that the event has no name for are written, too. NaN and infinities become null, tuples lists, so that an
        event is what a reader of the file will see. Raises StoppedEarly if the file cannot be written, which then ends
        with the record before, and if it was deleted or moved.
        """
        event = kind.event
        taken = [key for key in fields if key in OWN_KEYS]
        if taken:
            raise ValueError(f"{event}: a field cannot be called {taken[0]}; the journal writes {', '.join(OWN_KEYS)}")
        stamp = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        mono = round(time.monotonic() - self._opened, 3)
        record = Record(self._next, stamp, event, {k: plain(v, f"{event}.{k}") for k, v in fields.items()}, mono)
        if not self._is_in_place():
            what = f"{self.path} was deleted or moved while the run went on"
            aside = Path.cwd() / f"{self.path.parent.name}.jsonl"
            with contextlib.suppress(OSError):
                write_whole(aside, b"".join(map(line_of, self._records)))
                what = f"{what}; its {len(self._records)} records are in {aside}"
            back = f"put it back as {self.path.name} in a folder of that name, and resume={self.path.parent.name}"
            raise StoppedEarly(what, remedy=back)
        self._write(line_of(record))
        self._records.append(record)
        made = cast(EventT, self.run.add(record))
        self._next += 1
        self.heard(made)
        return made

    def rewrite(self, kind: type[EventT], /, **changed: Any) -> EventT:
        """Returns the latest event of a kind once it is on disk again with some fields changed."""
        latest = next(record for record in reversed(self._records) if record.event == kind.event)
        return self.append(kind, **{**latest.fields, **changed})

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

    def _is_in_place(self) -> bool:
        """Returns whether what is written will be found under the journal's name."""
        try:
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        except OSError:
            return False


def read(path: Path) -> tuple[list[Record], list[str]]:
    """Returns the good records of a journal and what was damaged, without locking or changing it.

    For readers beside a live run: its last line may be half written. Raises ConfigError where the file cannot be read.
    """
    remedy = "name the folder of a run"
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no file", remedy=remedy)
    try:
        found = Scan(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy=remedy) from error
    tail = [f"{path.name}: the last {len(found.tail)} bytes are no whole record"] if found.tail else []
    return found.records, found.warnings + tail


def _heal(path: Path, found: Scan) -> None:
    """Cuts the file after its last good record; what came after is kept aside and named in the warnings."""
    if not found.tail:
        return
    aside = next(p for n in itertools.count() if not (p := path.with_name(f"{path.name}.corrupt-{n}")).exists())
    write_whole(aside, found.tail)  # kept aside for certain before it is cut off
    with path.open("r+b") as file:
        file.truncate(found.good_bytes)
        os.fsync(file.fileno())
    size = len(found.tail)
    found.warnings.append(f"the last {size} bytes were no whole record; they were moved to {aside.name}")


def _lock(path: Path) -> int:
    """Returns the descriptor that holds `<path>.lock`, which names our process."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW  # a link made by another would be emptied
    lock = os.open(path.with_name(f"{path.name}.lock"), flags, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = _holder(lock)
        os.close(lock)
        who = "a process of another container" if pid == IN_ANOTHER_CONTAINER else f"process {pid or '(just started)'}"
        what = f"{path} is in use by {who}"
        raise ConfigError(what, remedy="wait for it, or start another run: one process writes a run") from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()} {_pids()}".encode(), 0)
    return lock


def writer_of(path: Path) -> int | None:
    """Returns the pid of the process that writes the journal at `path`, None where none does.

    It is `IN_ANOTHER_CONTAINER` where that is a process of another container, whose pids are not ours.
    """
    try:
        lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(lock)
    finally:
        os.close(lock)
    return None


def _holder(lock: int) -> int | None:
    """Returns the pid in a lock file, or None where none is written in 0.2 s; the holder takes microseconds."""
    for _ in range(20):
        pid, _, pids = os.pread(lock, 64, 0).decode(errors="replace").partition(" ")
        if pids and pids != _pids():
            return IN_ANOTHER_CONTAINER
        # A dead holder's pid stays until the next one has written its own.
        if pid.isdigit() and psutil.pid_exists(int(pid)):
            return int(pid)
        time.sleep(0.01)
    return None


def _pids() -> str:
    """Returns among which pids this process has its own: containers have pids of their own."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return "unknown"


def _unwritable(path: Path, error: OSError) -> StoppedEarly:
    room = f"make room in {path.parent} (1 MB holds about 1000 records)"
    return StoppedEarly(
        f"{path} cannot be written: {error.strerror or error}; what it holds is safe",
        remedy=f"let {path.parent} be written again" if error.errno in _DENIED else room,
    )
