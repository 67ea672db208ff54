"""Travelling salesman instances in the text files of the pointer network paper (Vinyals et al., arXiv 1506.03134)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainables.data.errors import DataError
from trainables.data.tsp_instances import Instance, euclidean


def read(path: Path) -> Iterator[Instance]:
    """Yields the instances of a file, one a line; raises DataError with the line and the field.

    `x1 y1 ... xn yn output i1 ... in i1`: coordinates, then the tour by numbers from 1, back to its start.
    """
    number = 0
    try:
        with path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield _instance(f"{path}:{number}", line)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}:{number + 1}: found {error}; allowed: lines of text") from None


def _instance(where: str, line: str) -> Instance:
    left, word, right = line.partition("output")
    values, tour = left.split(), right.split()
    nodes = len(values) // 2
    if not word or len(values) % 2 or nodes < 3:
        allowed = "x and y of 3 nodes or more, then 'output'"
        raise DataError(
            f"{where}: coordinates: found {len(values)} numbers{word and ' before output'}; allowed: {allowed}"
        )
    if len(tour) != nodes + 1 or tour[0] != tour[-1] or set(tour) != {str(i + 1) for i in range(nodes)}:
        found = f"{len(tour)} numbers" if len(tour) != nodes + 1 else " ".join(tour)[:80]
        allowed = f"each of 1 to {nodes} once, and the first again at the end"
        raise DataError(f"{where}: output: found {found}; allowed: {allowed}")
    points = np.array([_finite(where, value) for value in values]).reshape(nodes, 2)
    return Instance(points, euclidean(points), np.array([int(i) - 1 for i in tour[:-1]], dtype=np.int64))


def _finite(where: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not np.isfinite(value):
        raise DataError(f"{where}: coordinates: found {text[:40]!r}; allowed: a number")
    return value
