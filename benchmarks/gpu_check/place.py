"""Where a part runs, how much of it, until when; and its document, with what was measured kept as it goes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = ("benchmarks", "search_spaces", "trainables", "tuning")
GIB_BYTES, MIB_BYTES = 2**30, 2**20


class OutOfTime(Exception):
    """The part's minutes are over; what it has measured is kept, and the next run goes on from there."""


@dataclass(frozen=True)
class Place:
    """What every part is given. `again` measures anew what is kept; `small` is whether this is not a card."""

    device: str
    out: Path
    revision: str
    seed: int = 0
    again: bool = False
    limit_s: float = 540.0
    _began: float = field(default_factory=time.monotonic)

    @property
    def small(self) -> bool:
        """Returns whether the same code is to run small, as on a CPU."""
        return self.device == "cpu"

    @property
    def cores(self) -> int:
        """Returns the processor's cores that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    @property
    def left_s(self) -> float:
        """Returns the seconds that are left, negative where the time is over."""
        return self.limit_s - (time.monotonic() - self._began)

    def check(self, needed_s: float = 0.0) -> None:
        """Raises OutOfTime where less than `needed_s` is left."""
        if self.left_s < needed_s:
            raise OutOfTime

    def document(self, part: str) -> Path:
        """Returns the path of a part's result."""
        return self.out / f"{part}_{self.device}.json"


class Kept:
    """Rows of a part, one a unit of work, written as they are measured: what is there is not measured again.

    The file begins with the revision of the sources; rows of another are dropped.
    """

    def __init__(self, place: Place, part: str) -> None:
        self._place = place
        self._path = place.out / f"{part}_{place.device}.rows.jsonl"
        self._rows: dict[str, Any] = {}
        lines = [] if place.again else _lines(self._path)
        if lines and lines[0].get("revision") == place.revision:
            self._rows = {line["key"]: line["row"] for line in lines[1:]}
        else:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"revision": place.revision}) + "\n", encoding="utf-8")

    def row(self, key: str, measure: Callable[[], Any], needed_s: float = 0.0) -> Any:
        """Returns the row kept under a key, measured now where there is none; raises OutOfTime with too little left."""
        if key not in self._rows:
            self._place.check(needed_s)
            self._rows[key] = json.loads(json.dumps(measure()))
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "row": self._rows[key]}) + "\n")
        return self._rows[key]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._rows.items())


def revision() -> str:
    """Returns the commit, with a hash of the sources where they differ from it or where git cannot tell."""
    commit = _git("rev-parse", "--short", "HEAD")
    if commit and not _git("status", "--porcelain", "--untracked-files=all", "--", *SOURCES):
        return commit
    found = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cpp", ".yaml"):
                found.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return f"{commit or 'no-git'}+{found.hexdigest()[:8]}"


def read(path: Path) -> dict[str, Any] | None:
    """Returns a document, None where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a document whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        json.dump(document, out, indent=1)
        out.write("\n")
    Path(draft).chmod(0o644)
    Path(draft).replace(path)


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    whole = text[: text.rfind("\n") + 1]  # a last line without an end was cut off
    return [json.loads(line) for line in whole.splitlines()]


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)  # noqa: S607
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
