"""Travelling salesman problems and tours in the format of TSPLIB 95 (Reinelt, "TSPLIB 95", Heidelberg 1995).

A file is lines of `KEYWORD : value` and sections of data rows. Symmetric problems of these kinds are read:

| EDGE_WEIGHT_TYPE | distance of two nodes                                                                   |
|------------------|-----------------------------------------------------------------------------------------|
| EUC_2D, CEIL_2D  | Euclidean, to the nearest whole number, or the next above                               |
| MAN_2D, MAX_2D   | sum, or the larger, of the differences along the axes, to the nearest whole number      |
| ATT              | Euclidean divided by the root of 10, to the next whole number above ("pseudo-Euclidean") |
| GEO              | kilometres on a sphere, from DDD.MM (degrees and minutes) of latitude and longitude     |
| EXPLICIT         | EDGE_WEIGHT_SECTION: FULL_MATRIX, or half of it by rows or columns, with diagonal or not |

Every file may be gzipped, as the library itself is published.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainables.data.errors import DataError
from trainables.data.tsplib_metrics import PLANE, laid_out, metric, projected

_KINDS = (*PLANE, "GEO", "EXPLICIT")
# Of a symmetric matrix the upper half by columns is the lower half by rows: (rows of the upper half, with diagonal).
_HALVES = {
    "UPPER_ROW": (True, False),
    "LOWER_COL": (True, False),
    "LOWER_ROW": (False, False),
    "UPPER_COL": (False, False),
    "UPPER_DIAG_ROW": (True, True),
    "LOWER_DIAG_COL": (True, True),
    "LOWER_DIAG_ROW": (False, True),
    "UPPER_DIAG_COL": (False, True),
}
_HEADERS = (
    *("NAME", "TYPE", "COMMENT", "DIMENSION", "CAPACITY", "EDGE_WEIGHT_TYPE", "EDGE_WEIGHT_FORMAT"),
    *("EDGE_DATA_FORMAT", "NODE_COORD_TYPE", "DISPLAY_DATA_TYPE"),
)
_SECTIONS = ("NODE_COORD_SECTION", "DISPLAY_DATA_SECTION", "EDGE_WEIGHT_SECTION", "TOUR_SECTION")


@dataclass(frozen=True)
class Problem:
    """Nodes, where to draw them on a plane, and how far apart they are in the problem's own metric.

    `points` (nodes, 2) are for the eye, or a network: what is GEO is projected, an EXPLICIT matrix without
    DISPLAY_DATA_SECTION is laid out by multidimensional scaling. Lengths come from `distances` alone.
    """

    name: str
    kind: str
    points: NDArray[np.float64]
    numbers: NDArray[np.float64] = field(repr=False)
    """The file's coordinates, (nodes, 2), or the whole matrix for EXPLICIT, (nodes, nodes)."""

    def __len__(self) -> int:
        return len(self.points)

    def distances(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns the distances from each node of `rows` to each of `columns`, (rows, columns), 0 to itself."""
        if self.kind == "EXPLICIT":
            return self.numbers[np.ix_(rows, columns)]
        found = metric(self.kind, self.numbers[rows][:, None], self.numbers[columns][None])
        found[rows[:, None] == columns[None]] = 0.0  # GEO's formula gives 1 km
        return found


def read_problem(path: Path) -> Problem:
    """Returns the problem of a .tsp file; raises DataError with the file, the line and the field that is wrong."""
    header, sections = _parse(path)
    _expect(path, header, "TYPE", ("TSP",))
    count = _dimension(path, header)
    kind = _expect(path, header, "EDGE_WEIGHT_TYPE", _KINDS, needed=True)
    name = header.get("NAME", (0, path.name))[1]
    if kind == "EXPLICIT":
        matrix = _matrix(path, header, sections, count)
        shown = "DISPLAY_DATA_SECTION"
        points = _coordinates(path, sections, shown, count) if shown in sections else laid_out(matrix)
        return Problem(name, kind, points, matrix)
    numbers = _coordinates(path, sections, "NODE_COORD_SECTION", count)
    return Problem(name, kind, projected(numbers) if kind == "GEO" else numbers, numbers)


def read_tour(path: Path, count: int) -> NDArray[np.int64]:
    """Returns the nodes of a .tour file over `count` nodes in their order, counted from 0; raises DataError."""
    header, sections = _parse(path)
    _expect(path, header, "TYPE", ("TOUR",))
    if "DIMENSION" in header and _dimension(path, header) != count:
        raise _wrong(path, header["DIMENSION"][1], f"{count}, as the problem has", header["DIMENSION"][0], "DIMENSION")
    order: list[int] = []
    seen: set[int] = set()
    line: int | None = None
    for line, text in _words(path, sections, "TOUR_SECTION"):
        if text == "-1":
            break
        node = int(text) if re.fullmatch(r"\d{1,9}", text) else 0
        if not 1 <= node <= count or node in seen:
            found = f"node {text} a second time" if node in seen else repr(text)
            raise _wrong(path, found, f"each of 1 to {count} once, then -1", line, "TOUR_SECTION")
        seen.add(node)
        order.append(node - 1)
    if len(order) < count:
        raise _wrong(path, f"{len(order)} nodes", f"all {count} of the problem", line, "TOUR_SECTION")
    return np.array(order, dtype=np.int64)


def _matrix(path: Path, header: _Header, sections: _Sections, count: int) -> NDArray[np.float64]:
    form = _expect(path, header, "EDGE_WEIGHT_FORMAT", ("FULL_MATRIX", *_HALVES), needed=True)
    words = list(_words(path, sections, "EDGE_WEIGHT_SECTION"))
    upper, diagonal = _HALVES.get(form, (True, True))
    size = count * count if form == "FULL_MATRIX" else count * (count + 1) // 2 - (0 if diagonal else count)
    if len(words) != size:
        line = words[-1][0] if words else sections["EDGE_WEIGHT_SECTION"][0]
        allowed = f"{size}, for {count} nodes as {form}"
        raise _wrong(path, f"{len(words)} numbers up to here", allowed, line, "EDGE_WEIGHT_SECTION")
    weights = np.array([_number(path, line, text, "EDGE_WEIGHT_SECTION", least=0.0) for line, text in words])
    matrix = np.zeros((count, count))
    if form == "FULL_MATRIX":
        matrix = weights.reshape(count, count)
        where = np.argwhere(matrix != matrix.T)
        if len(where):
            i, j = where[0]
            found = f"{matrix[i, j]:g} from node {i + 1} to {j + 1} and {matrix[j, i]:g} back"
            line = words[i * count + j][0]
            raise _wrong(path, found, "the same both ways (symmetric problems)", line, "EDGE_WEIGHT_SECTION")
    else:
        cut = 0 if diagonal else 1
        half = np.triu_indices(count, cut) if upper else np.tril_indices(count, -cut)
        matrix[half] = matrix[half[::-1]] = weights
    np.fill_diagonal(matrix, 0.0)  # some files have a large number there, to forbid the way to itself
    return matrix


def _coordinates(path: Path, sections: _Sections, section: str, count: int) -> NDArray[np.float64]:
    """Returns two numbers for each node, (nodes, 2), in the order of their ids 1 to `count`."""
    if section not in sections:
        raise _wrong(path, f"no {section}", "one row of id, x and y for each node")
    found: dict[int, tuple[float, float]] = {}
    line, rows = sections[section]
    for line, text in rows:
        words = text.split()
        if len(words) != 3:
            raise _wrong(path, repr(text[:60]), "id, x and y", line, section)
        node = int(words[0]) if re.fullmatch(r"\d{1,9}", words[0]) else 0
        if not 1 <= node <= count or node in found:
            what = f"node {words[0]} a second time" if node in found else f"node {words[0]!r}"
            raise _wrong(path, what, f"each of 1 to {count} once", line, section)
        found[node] = (_number(path, line, words[1], section), _number(path, line, words[2], section))
    if len(found) < count:
        raise _wrong(path, f"{len(found)} nodes up to here", f"{count}, as DIMENSION has it", line, section)
    return np.array([found[node] for node in range(1, count + 1)])


_Header = dict[str, tuple[int, str]]
"""Keyword -> its line and value."""
_Sections = dict[str, tuple[int, list[tuple[int, str]]]]
"""Name -> its line, and line and text of each row."""


def _parse(path: Path) -> tuple[_Header, _Sections]:
    header: _Header = {}
    sections: _Sections = {}
    rows: list[tuple[int, str]] | None = None
    for line, text in _lines(path):
        if text == "EOF":
            break
        word, colon, value = (part.strip() for part in text.partition(":"))
        if (word in sections or word in header) and word != "COMMENT":
            raise _wrong(path, f"{word} a second time", "once", line)
        if word in _SECTIONS and not value:
            rows = []
            sections[word] = (line, rows)
        elif word in _HEADERS and colon:
            rows = None
            header[word] = (line, value)
        elif rows is not None and not text[0].isalpha():
            rows.append((line, text))
        else:
            raise _wrong(path, repr(text[:60]), ", ".join((*_HEADERS, *_SECTIONS)), line)
    return header, sections


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the number, from 1, and the text of each line that is not blank."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            for number, raw in enumerate(stream, 1):
                text = raw.decode("utf-8", errors="replace").strip()  # comments may be in any encoding
                if text:
                    yield number, text
    except (OSError, EOFError, zlib.error) as error:
        raise _wrong(path, str(error), "a file that can be read to its end") from None


def _words(path: Path, sections: _Sections, section: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of each word of a section."""
    if section not in sections:
        raise _wrong(path, f"no {section}", "one")
    for line, text in sections[section][1]:
        for word in text.split():
            yield line, word


def _expect(path: Path, header: _Header, key: str, allowed: tuple[str, ...], *, needed: bool = False) -> str:
    """Returns the header's value, which must be one of `allowed`; "" where it is not given and not needed."""
    if key not in header:
        if needed:
            raise _wrong(path, f"no {key}", ", ".join(allowed))
        return ""
    line, value = header[key]
    word = value.partition(" ")[0]  # some files add an author: "TSP (M.~Hofmeister)"
    if word not in allowed:
        raise _wrong(path, repr(value), ", ".join(allowed), line, key)
    return word


def _dimension(path: Path, header: _Header) -> int:
    line, text = header.get("DIMENSION", (None, "nothing"))
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < 3:
        raise _wrong(path, text, "a whole number >= 3", line, "DIMENSION")
    return int(text)


def _number(path: Path, line: int, text: str, section: str, least: float = -np.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not np.isfinite(value) or value < least:
        raise _wrong(path, repr(text[:60]), "a number" if least < 0 else f"a number >= {least:g}", line, section)
    return value


def _wrong(path: Path, found: str, allowed: str, line: int | None = None, key: str = "") -> DataError:
    where = str(path) if line is None else f"{path}:{line}"
    return DataError(f"{where}: {key + ': ' if key else ''}found {found}; allowed: {allowed}")
