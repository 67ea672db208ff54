"""A line of the journal: a record, its checksum, and what is read of bytes that somebody may have damaged.

    {"seq": 7, "t": "2026-11-21T10:34:12.345Z", "mono": 93.2, "event": "probe", ..., "crc": "89abcdef"}

`t` is for people; `mono` counts the seconds since the journal was opened, whatever happens to the clock. Every line
ends with the CRC-32 of itself without that last key.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

OWN_KEYS = ("seq", "t", "mono", "event", "crc")
_MARK_LENGTH = len(b',"crc":"89abcdef"}')

_FIELD_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("changed", "config", "coupling", "values"), dict),
    **dict.fromkeys(("round", "samples", "seed"), int),
    "name": (str, type(None)),
    "resumable": bool,
    "samples_per_s": (int, float, type(None)),
}
_NEEDED: Mapping[str, Sequence[str]] = {
    "study": ["config"],
    "stage": ["stage", "state"],
    "kinds": ["changed"],
    "footprint": ["coupling"],
    "probe": ["name", "config", "outcome"],
    "refused": ["stage", "config"],
    "trial_start": ["trial", "config"],
    "rung": ["trial", "samples", "values"],
    "rated": ["trial", "config", "samples_per_s"],
    "trial": ["trial", "config", "outcome"],
    "window": ["name", "round", "samples_per_s"],
    "confirmed": ["name", "seed", "values", "samples_per_s"],
    "rival": ["trial", "decision"],
    "note": ["text"],
    "stop": ["resumable"],
}
"""What readers take for granted of an event; a field is text where `_FIELD_TYPES` has no type of it."""


@dataclass(frozen=True)
class Record:
    """One line: its number from 0, its UTC time in ISO 8601, its event, and the event's own fields by name.

    `mono` is the seconds since the journal was opened, None in journals of earlier versions.
    """

    seq: int
    t: str
    event: str
    fields: Mapping[str, Any]
    mono: float | None = None

    def __getitem__(self, key: str) -> Any:
        """Returns a field; raises KeyError that names the event and the fields it has."""
        try:
            return self.fields[key]
        except KeyError:
            raise KeyError(f"{key} (record {self.seq}, {self.event}, has {', '.join(self.fields)})") from None

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a field, or `default` where the event has none of that name."""
        return self.fields.get(key, default)


class Scan:
    """A journal's bytes taken apart: good records, warnings of damage inside, the bytes after the last good line."""

    def __init__(self, data: bytes) -> None:
        self.records: list[Record] = []
        self.warnings: list[str] = []
        damage: list[str] = []  # since the last good line
        good = position = 0
        for number, line in enumerate(data.split(b"\n"), start=1):
            position += len(line) + 1
            if not _is_marked(line):
                damage += [f"line {number} is damaged and was left out"] if line else []
                continue
            record, fault = _parse(line)
            self.records += [record] if record is not None else []
            damage += [f"line {number} {fault}, as of another version, and was left out"] if fault else []
            good, self.warnings, damage = min(position, len(data)), self.warnings + damage, []
        self.good_bytes, self.tail = good, data[good:]
        self.lacks_newline = good > 0 and data[good - 1 : good] != b"\n"


def _is_marked(line: bytes) -> bool:
    return line[-_MARK_LENGTH:] == _mark(line[:-_MARK_LENGTH])


def _parse(line: bytes) -> tuple[Record | None, str]:
    """Returns the record of a line whose mark is right, or None and what keeps this version from reading it."""
    try:
        raw = json.loads(line)
        seq, t, mono, event, _ = (raw.pop(key, None) for key in OWN_KEYS)
        datetime.fromisoformat(t)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None, "is no record"
    if type(seq) is not int or not isinstance(event, str) or not isinstance(mono, float | int | None):
        return None, "is no record"
    needed = _NEEDED.get(event, ())
    missing = [n for n in needed if n not in raw or not isinstance(raw[n], _FIELD_TYPES.get(n, str))]
    if missing:
        return None, f"({event}) lacks {', '.join(missing)}"
    return Record(seq, t, event, raw, mono), ""


def line_of(record: Record) -> bytes:
    """Returns the line of a record as it stands in `trials.jsonl`: JSON with its checksum, and a line feed."""
    own = {"seq": record.seq, "t": record.t, "mono": record.mono, "event": record.event}
    raw = {**{k: v for k, v in own.items() if v is not None}, **record.fields}
    text = json.dumps(raw, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Half of a surrogate pair, as in an undecodable file name, has no UTF-8; its escape is JSON's own.
    body = text.encode("utf-8", "backslashreplace")[:-1]
    return body + _mark(body) + b"\n"


def _mark(body: bytes) -> bytes:
    return b',"crc":"%08x"}' % zlib.crc32(body + b"}")


def plain(value: Any, where: str) -> Any:
    """Returns the value as JSON has it; raises TypeError that names the field for what JSON has not."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str | int):
        return str(value) if isinstance(value, str) else int(value)  # of an enumeration, its value
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if hasattr(value, "item"):  # a NumPy scalar
        return plain(value.item(), where)
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold: {value!r}")
