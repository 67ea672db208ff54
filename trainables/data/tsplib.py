"""Travelling salesman problems and tours in the format of TSPLIB 95 (Reinelt, "TSPLIB 95", Heidelberg 1995).

A file is lines of `KEYWORD : value` and sections of data rows. Problems with coordinates are read, by
EDGE_WEIGHT_TYPE (`tsplib_metrics` has their distances): a network that points at nodes has to be shown where they lie,
so matrices (EXPLICIT) are refused. Every file may be gzipped, as the library itself is published.
"""

from __future__ import annotations

import gzip
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainables.data.errors import DataError, wrong
from trainables.data.tsplib_metrics import KINDS, metric, projected

_PARTS = ("NODE_COORD_SECTION", "DISPLAY_DATA_SECTION", "TOUR_SECTION")


@dataclass(frozen=True)
class Problem:
    """Nodes, where to draw them on a plane, and how far apart they are in the problem's own metric.

    `points` (nodes, 2) are for the eye, or a network: what is GEO is projected. Lengths come from `distances` alone.
    """

    name: str
    kind: str
    points: NDArray[np.float64]
    numbers: NDArray[np.float64] = field(repr=False)
    """The file's coordinates, (nodes, 2)."""

    def __len__(self) -> int:
        return len(self.points)

    def distances(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the distances from each node of `rows` to each of `columns`, (rows, columns), 0 to itself."""
        found = metric(self.kind, self.numbers[rows][:, None], self.numbers[columns][None])
        found[rows[:, None] == columns[None]] = 0.0  # GEO's formula gives 1 km
        return found


def read_problem(path: Path) -> Problem:
    """Returns the problem of a .tsp file; raises DataError with the file, the line and the field that is wrong."""
    file = _File(path)
    file.value("TYPE", ("TSP",), default="TSP")
    count = file.dimension()
    kind = file.value("EDGE_WEIGHT_TYPE", KINDS)
    rows = file.rows("NODE_COORD_SECTION")
    found: dict[int, tuple[float, float]] = {}
    for line, text in rows:
        words = text.split()
        if len(words) != 3:
            raise file.wrong(repr(text[:60]), "id, x and y", line, "NODE_COORD_SECTION")
        node = file.node(words[0], count, found, line, "NODE_COORD_SECTION")
        try:
            found[node] = float(words[1]), float(words[2])
        except ValueError:
            found[node] = np.nan, np.nan
        if not np.isfinite(found[node]).all():
            raise file.wrong(repr(text[:60]), "numbers", line, "NODE_COORD_SECTION")
    if len(found) < count:
        raise file.wrong(f"{len(found)} nodes", f"{count}, as DIMENSION has it", rows[-1][0], "NODE_COORD_SECTION")
    numbers = np.array([found[node] for node in range(1, count + 1)])
    return Problem(file.header.get("NAME", path.name), kind, projected(numbers) if kind == "GEO" else numbers, numbers)


def read_tour(path: Path, count: int) -> NDArray[np.int64]:
    """Returns the nodes of a .tour file over `count` nodes in their order, counted from 0; raises DataError."""
    file = _File(path)
    file.value("TYPE", ("TOUR",), default="TOUR")
    if "DIMENSION" in file.header and file.dimension() != count:
        raise file.wrong(file.header["DIMENSION"], f"{count}, as the problem has", key="DIMENSION")
    order: dict[int, None] = {}
    rows = file.rows("TOUR_SECTION")
    for line, word in ((line, word) for line, text in rows for word in text.split()):
        if word == "-1":
            break
        order[file.node(word, count, order, line, "TOUR_SECTION")] = None
    if len(order) < count:
        raise file.wrong(f"{len(order)} nodes", f"all {count} of the problem", rows[-1][0], "TOUR_SECTION")
    return np.array(list(order), dtype=np.int64) - 1


class _File:
    """The header and the sections of a file, with the line of each row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.header: dict[str, str] = {}
        self._sections: dict[str, list[tuple[int, str]]] = {}
        rows: list[tuple[int, str]] | None = None
        for line, raw in enumerate(self._text().splitlines(), 1):
            text = raw.strip()
            if text == "EOF":
                break
            word, colon, value = (part.strip() for part in text.partition(":"))
            if (word in self.header and word != "COMMENT") or word in self._sections:
                raise self.wrong(f"{word} a second time", "once", line)
            if word in _PARTS and not value:
                rows = self._sections[word] = []
            elif colon and re.fullmatch("[A-Z_]+", word):
                rows, self.header[word] = None, value
            elif rows is not None and text and not text[0].isalpha():
                rows.append((line, text))
            elif text:
                raise self.wrong(repr(text[:60]), f"KEYWORD : value, or {' or '.join(_PARTS)}", line)

    def _text(self) -> str:
        try:
            raw = self._path.read_bytes()
            # Comments may be in any encoding.
            return (gzip.decompress(raw) if self._path.suffix == ".gz" else raw).decode("utf-8", errors="replace")
        except (OSError, EOFError, zlib.error) as error:
            raise self.wrong(str(error), "a file that can be read to its end") from None

    def value(self, key: str, allowed: tuple[str, ...], default: str = "nothing") -> str:
        """Returns the first word of a header's value (some files add an author), which must be one of `allowed`."""
        word = self.header.get(key, default).partition(" ")[0]
        if word not in allowed:
            raise self.wrong(repr(word), ", ".join(allowed), key=key)
        return word

    def dimension(self) -> int:
        """Returns the number of nodes, at least 3."""
        text = self.header.get("DIMENSION", "nothing")
        if not re.fullmatch(r"\d{1,9}", text) or int(text) < 3:
            raise self.wrong(text, "a whole number >= 3", key="DIMENSION")
        return int(text)

    def rows(self, section: str) -> list[tuple[int, str]]:
        """Returns line and text of a section's rows, at least one."""
        if not self._sections.get(section):
            raise self.wrong(f"no {section}", "one with a row for each node")
        return self._sections[section]

    def node(self, word: str, count: int, seen: object, line: int, section: str) -> int:
        """Returns the node's number, from 1 to `count` and not yet `seen`."""
        node = int(word) if re.fullmatch(r"\d{1,9}", word) else 0
        again = isinstance(seen, dict) and node in seen
        if again or not 1 <= node <= count:
            raise self.wrong(f"node {word}{' a second time' * again}", f"each of 1 to {count} once", line, section)
        return node

    def wrong(self, found: str, allowed: str, line: int | None = None, key: str = "") -> DataError:
        """Returns the error to raise."""
        return wrong(self._path, found, allowed, line=line, field=key)
