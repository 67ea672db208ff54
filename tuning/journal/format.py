"""A line of the journal: a record, its checksum, and what is read of bytes that somebody may have damaged.

    {"seq": 7, "t": "2026-11-21T10:34:12.345Z", "mono": 93.2, "event": "probe", ..., "crc": "89abcdef"}

`t` is for people; `mono` counts the seconds since the journal was opened, whatever happens to the clock. Every line
ends with the CRC-32 of itself without that last key.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tuning.config.lenient import finite

OWN_KEYS = ("seq", "t", "mono", "event", "crc")
_MARK_LENGTH = len(b',"crc":"89abcdef"}')


@dataclass(frozen=True)
class Record:
    """A line: its number from 0, its UTC time in ISO 8601, its event, and the event's own fields by name.

    `mono` is the seconds since the journal was opened, None where a line has none.
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
            if line[-_MARK_LENGTH:] != _mark(line[:-_MARK_LENGTH]):
                damage += [f"line {number} is damaged and was left out"] if line else []
                continue
            if (record := _parse(line)) is not None:
                self.records.append(record)
            else:
                damage.append(f"line {number} is no record and was left out")
            good, self.warnings, damage = min(position, len(data)), self.warnings + damage, []
        self.good_bytes, self.tail = good, data[good:]
        self.lacks_newline = good > 0 and data[good - 1 : good] != b"\n"


def _parse(line: bytes) -> Record | None:
    """Returns the record of a line whose mark is right, or None where it is none all the same."""
    try:
        raw = json.loads(line)
        seq, t, mono, event, _ = (raw.pop(key, None) for key in OWN_KEYS)
        datetime.fromisoformat(t)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    if type(seq) is not int or not isinstance(event, str) or (mono is not None and finite(mono) is None):
        return None
    return Record(seq, t, event, raw, mono)


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
