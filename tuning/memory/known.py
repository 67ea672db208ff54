"""What runs found out about memory, kept for the next in `known.jsonl`.

It lies below $XDG_CACHE_HOME/cardtune, or ~/.cache/cardtune where that is not set.

A line is one fact with the `Key` it holds for and a checksum. The file is written whole or not at all (draft, rename),
under a lock, so that two runs at once lose nothing of each other's. What cannot be read is left out, with a warning:
all of it can be found out again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuning.config import atomic
from tuning.config.errors import ConfigError

Fact = Mapping[str, Any]
"""`kind` (footprint, peak, fit or oom), `coupling`, and what the kind needs: see `memory.groups.facts`."""

MOST = 2000
"""Lines kept, some 400 bytes each; the oldest go first."""
_NEEDED = {
    "footprint": ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "points", "source", "measured"),
    "peak": ("micro_batch", "peak_bytes"),
    "fit": ("micro_batch", "peak_bytes"),
    "oom": ("micro_batch",),
}


@dataclass(frozen=True)
class Key:
    """What knowledge of memory holds for: another of these, and it does not."""

    device: str
    cap_bytes: int | None
    torch: str
    cardtune: str
    workload_sha256: str
    options_sha256: str

    @staticmethod
    def digest(values: Mapping[str, Any]) -> str:
        """Returns a hash of plain values, whatever their order."""
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=repr).encode()).hexdigest()[:16]


def default_path() -> Path:
    """Returns where the file is kept for this user."""
    own = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(own) if Path(own).is_absolute() else Path.home() / ".cache"
    return root / "cardtune" / "known.jsonl"


@dataclass
class Known:
    """The file, and in `warnings` what was wrong with it. No method raises for what the file or its folder is like."""

    path: Path = field(default_factory=default_path)
    warnings: list[str] = field(default_factory=list)

    def recall(self, key: Key) -> list[dict[str, Any]]:
        """Returns the facts that hold for the key, oldest first."""
        own = dataclasses.asdict(key)
        return [fact for of, fact in self._read() if of == own]

    def remember(self, key: Key, facts: Sequence[Fact]) -> None:
        """Adds facts; one that says the same of the same configuration as an older one takes its place."""
        own = dataclasses.asdict(key)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                kept = {_about(of, fact): (of, fact) for of, fact in self._read()}
                for fact in facts:
                    about = _about(own, fact)
                    before = kept.pop(about, None)
                    kept[about] = (own, _united(before[1] if before else None, fact))
                lines = [_line(of, fact) for of, fact in list(kept.values())[-MOST:]]
                atomic.write_text(self.path, "".join(lines))
        except (OSError, ConfigError) as error:
            self._warn(f"what was learned about memory could not be kept for the next run: {error}")

    def _read(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            self._warn(f"{self.path} cannot be read: {error.strerror or error}; memory is learned anew")
            return []
        parsed = [_parsed(line) for line in data.split(b"\n") if line]
        damaged = sum(one is None for one in parsed)
        if damaged:
            self._warn(f"{self.path}: {damaged} of {len(parsed)} lines are damaged and were left out")
        return [one for one in parsed if one is not None]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock beside the file; a process that dies gives it back."""
        lock = os.open(self.path.with_name(f"{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


def _about(key: Mapping[str, Any], fact: Fact) -> str:
    """Returns what a fact is about: two facts about the same are one."""
    return json.dumps([key, fact["kind"], fact["coupling"], fact.get("micro_batch")], sort_keys=True)


def _united(before: Fact | None, fact: Fact) -> dict[str, Any]:
    """Returns the later fact with the larger of the two peaks."""
    peaks = [f["peak_bytes"] for f in (before, fact) if f is not None and "peak_bytes" in f]
    return {**fact, "peak_bytes": max(peaks)} if peaks else dict(fact)


def _line(key: Mapping[str, Any], fact: Fact) -> str:
    body = json.dumps({"key": key, "fact": fact}, separators=(",", ":"))
    return f"{zlib.crc32(body.encode()):08x} {body}\n"


def _parsed(line: bytes) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Returns key and fact of a line, None where bytes of it are missing or changed, or it lacks a field."""
    mark, _, body = line.partition(b" ")
    if mark != b"%08x" % zlib.crc32(body):
        return None
    try:
        raw = json.loads(body)
        key, fact = raw["key"], raw["fact"]
        whole = isinstance(fact["coupling"], dict) and all(n in fact for n in _NEEDED[fact["kind"]])
        return (key, fact) if whole and isinstance(key, dict) else None
    except (ValueError, KeyError, TypeError):
        return None
