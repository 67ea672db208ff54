"""Pareto geometry on small arrays: ranks, fronts, hypervolume, knee, and an order that spreads.

Arrays are of shape (points, objectives), every objective to be minimised; `signed` makes such rows. A row with a value
that is not finite is worse than every finite row: it has the last rank and is never on the front.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Mode = Literal["min", "max"]
Floats = NDArray[np.float64]
MARKED = 64
"""Rows between two marks of `Pairs`."""


def signed(values: Mapping[str, float | None], objectives: Mapping[str, Mode]) -> Floats:
    """Returns the values in the order of `objectives`, those to maximise negated; None becomes NaN.

    Raises ValueError that names a missing objective and the values there are.
    """
    missing = [name for name in objectives if name not in values]
    if missing:
        raise ValueError(f"objective {missing[0]} is missing; there are {', '.join(values) or 'no values'}")
    row = [np.nan if (v := values[name]) is None else float(v) for name in objectives]
    return np.array(row) * [1.0 if mode == "min" else -1.0 for mode in objectives.values()]


def non_dominated_ranks(points: Floats, tolerances: Sequence[float] | None = None) -> NDArray[np.int64]:
    """Returns each row's rank, shape (points,): 0 for the front, 1 for the front of the others, and so on.

    `tolerances`, one an objective, makes two values equal whose difference is at most that share of the larger
    magnitude. At most one may be above 0: with two, points can dominate each other in a circle. O(n log n) for two
    objectives, else O(points^2).
    """
    points = _checked(points)
    equal = np.zeros(points.shape[1]) if tolerances is None else np.asarray(tolerances, dtype=np.float64)
    if equal.shape != (points.shape[1],) or (equal < 0).any() or (equal > 0).sum() > 1:
        raise ValueError(f"tolerances {equal.tolist()}: expected {points.shape[1]}, none below 0, at most one above")
    ranks = np.full(len(points), -1, dtype=np.int64)
    finite = np.isfinite(points).all(axis=1)
    found = _peeled(points[finite], equal)
    ranks[finite] = found
    ranks[~finite] = max(int(found.max(initial=0)) + 1, 1)
    return ranks


def front(points: Floats) -> NDArray[np.intp]:
    """Returns the indices of the rows that no row dominates, ascending; equal rows are all in."""
    return np.flatnonzero(non_dominated_ranks(points) == 0)


def hypervolume_2d(points: Floats, reference: Sequence[float]) -> float:
    """Returns the area between two-objective points and a reference point that is worse than all of interest.

    Points not better than the reference in both objectives add nothing. O(n log n).
    """
    points = _checked(points)
    if points.shape[1] != 2:
        raise ValueError(f"hypervolume_2d takes 2 objectives, got {points.shape[1]}")
    worst_x, worst_y = (float(r) for r in reference)
    inside = points[np.isfinite(points).all(axis=1) & (points < np.array([worst_x, worst_y])).all(axis=1)]
    area, lowest_y = 0.0, worst_y
    for x, y in inside[np.lexsort((inside[:, 1], inside[:, 0]))]:
        if y < lowest_y:
            area += (worst_x - float(x)) * (lowest_y - float(y))
            lowest_y = float(y)
    return area


def knee(points: Floats) -> int:
    """Returns the index of the front's knee: the point farthest below the line that joins the front's extremes.

    Both objectives are scaled to 0..1 over the front. Of fewer than three front points it is the first; so is the
    first of equals, and an extreme where the front bulges away from the ideal point throughout.
    """
    points = _checked(points)
    if points.shape[1] != 2:
        raise ValueError(f"knee takes 2 objectives, got {points.shape[1]}")
    indices = front(points)
    if not len(indices):
        raise ValueError(f"knee needs a point whose values are all finite, got {len(points)} points without one")
    if len(indices) < 3:
        return int(indices[0])
    # Scaled, the extremes are (0, 1) and (1, 0), so the distance below their line is (1 - x - y) / sqrt(2).
    below = 1.0 - _scaled(points[indices]).sum(axis=1)
    return int(indices[int(np.argmax(np.round(below, 12)))])


def spread_order(points: Floats, until: int | None = None) -> NDArray[np.intp]:
    """Returns the indices in an order whose every beginning covers the points well, or its beginning up to `until`.

    Begins with the point nearest to the ideal (least sum of scaled objectives), then always takes the one farthest from
    all taken: the epsilon-net of Schmucker et al. 2021, "Multi-objective Asynchronous Successive Halving", section 4.
    Ties go to the lower index. Finite rows only. O(points^2).
    """
    points = _checked(points)
    if not np.isfinite(points).all():
        raise ValueError("spread_order takes finite rows only")
    if not len(points):
        return np.zeros(0, dtype=np.intp)
    scaled = _scaled(points)
    order = [int(np.argmin(np.round(scaled.sum(axis=1), 12)))]
    nearest = np.linalg.norm(scaled - scaled[order[0]], axis=1)
    while len(order) < len(points) and order[-1] != until:
        nearest[order] = -1.0
        order.append(int(np.argmax(np.round(nearest, 12))))
        nearest = np.minimum(nearest, np.linalg.norm(scaled - scaled[order[-1]], axis=1))
    return np.array(order, dtype=np.intp)


class Pairs:
    """Ranks of two-objective rows that come one at a time: those of `non_dominated_ranks`, in O(n log n) for all.

    `tolerance` is that of the first objective (0 <= tolerance < 1); the second has none. A row that dominates another
    is less in the second and no more than equal in the first, or equal in the second and less in the first. So one
    pass in the order of the second finds each row's rank from the least first objective of every rank before it.
    """

    def __init__(self, tolerance: float = 0.0) -> None:
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance must be at least 0 and below 1, got {tolerance}")
        self._tolerance = tolerance
        self._rows: dict[Hashable, tuple[float, float]] = {}
        self._order: list[tuple[float, float, float, float, int]] = []
        self._ids: dict[int, Hashable] = {}
        self._numbers: dict[Hashable, int] = {}
        self._found: dict[Hashable, int] = {}
        self._marks: list[tuple[int, list[float]]] = []
        """Places in the order where a group of equal seconds begins, and `least` (see `ranks`) before them."""
        self._due: tuple[int, int] | None = None
        """The first and the last place whose rows have no rank yet."""

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, key: Hashable, first: float, second: float) -> None:
        """Adds a row of finite values, in the place of what the key had before. O(log n), and a move of memory."""
        if key in self._rows:
            number = self._numbers[key]
            del self._order[bisect_left(self._order, self._entry(*self._rows[key], number))]
            self._marks, self._due = [], (0, len(self._order))
        else:
            number = self._numbers[key] = len(self._numbers)
            self._ids[number] = key
        self._rows[key] = (first, second)
        entry = self._entry(first, second, number)
        at, group = bisect_left(self._order, entry), bisect_left(self._order, (second,))
        self._order.insert(at, entry)
        self._marks = [(m + (m > at), least) for m, least in self._marks if m <= group or m > at]
        start, stop = self._due or (group, at)
        self._due = min(start, group), max(stop + (stop >= at and self._due is not None), at)

    def ranks(self) -> dict[Hashable, int]:
        """Returns the rank of each key's row, 0 for the front; the next row changes what was returned.

        Goes on from the last mark before what is new, until a mark finds what it found before: then the rest is as it
        was.
        """
        if self._due is None:
            return self._found
        first_due, last_due = self._due
        order, ids, found = self._order, self._ids, self._found
        before = bisect_right(self._marks, first_due, key=lambda mark: mark[0])
        marks, later = self._marks[:before], [mark for mark in self._marks[before:] if mark[0] > last_due]
        start, least = (marks[-1][0], marks[-1][1].copy()) if marks else (0, [])
        # `least` has by rank the least first objective of the rows so far of that rank or a later one.
        later.reverse()
        pause = min(start + MARKED, later[-1][0] if later else len(order))
        while start < len(order):
            if start >= pause:
                if later and later[-1][0] == start and later.pop()[1] == least:
                    marks += [(start, least), *reversed(later)]
                    break
                marks.append((start, least.copy()))
                pause = min(start + MARKED, later[-1][0] if later else len(order))
            second, stop = order[start][0], start + 1
            if stop == len(order) or order[stop][0] != second:  # as nearly all: then no row of its own group is less
                _, first, _, high, number = order[start]
                rank = found[ids[number]] = bisect_right(least, high)
                if rank == len(least):
                    least.append(first)
                while rank >= 0 and least[rank] >= first:
                    least[rank] = first
                    rank -= 1
                start = stop
                continue
            while stop < len(order) and order[stop][0] == second:
                stop += 1
            group: list[tuple[float, int]] = []
            reach, best = 0, -1  # of the group's own rows that are less in the first objective
            for _, first, low, high, number in order[start:stop]:
                while reach < len(group) and group[reach][0] < low:
                    best = max(best, group[reach][1])
                    reach += 1
                rank = max(bisect_right(least, high), best + 1)
                group.append((first, rank))
                found[ids[number]] = rank
            for first, rank in group:
                least.extend([math.inf] * (rank + 1 - len(least)))
                while rank >= 0 and least[rank] > first:
                    least[rank] = first
                    rank -= 1
            start = stop
        self._marks, self._due = marks, None
        return found

    def _entry(self, first: float, second: float, number: int) -> tuple[float, float, float, float, int]:
        return second, first, self._end(first, -math.inf), self._end(first, math.inf), number

    def _end(self, value: float, towards: float) -> float:
        """Returns the last number in a direction that is equal to the value within the tolerance."""
        if not self._tolerance or not value:
            return value
        outwards = (value > 0) == (towards > 0)
        end = value / (1.0 - self._tolerance) if outwards else value * (1.0 - self._tolerance)
        while abs(value - end) > self._tolerance * max(abs(value), abs(end)):
            end = math.nextafter(end, value)
        while abs(value - (beyond := math.nextafter(end, towards))) <= self._tolerance * max(abs(value), abs(beyond)):
            end = beyond
        return end


def _peeled(points: Floats, equal: Floats) -> NDArray[np.int64]:
    """Returns the ranks of finite rows: two objectives in O(n log n), others front by front in O(n^2)."""
    if points.shape[1] == 2 and equal.max() < 1:
        tolerant = int(np.argmax(equal))
        pairs = Pairs(float(equal[tolerant]))
        for number, row in enumerate(points.tolist()):
            pairs.put(number, row[tolerant], row[1 - tolerant])
        ranks = pairs.ranks()
        return np.array([ranks[number] for number in range(len(points))], dtype=np.int64)
    return _peeled_plainly(points, equal)


def _peeled_plainly(points: Floats, equal: Floats) -> NDArray[np.int64]:
    dominated_by = _dominance(points, equal)
    above = dominated_by.sum(axis=1)  # how many of the rows without a rank dominate each
    found = np.full(len(above), -1, dtype=np.int64)
    rank = 0
    while (found < 0).any():
        peers = (found < 0) & (above == 0)
        found[peers] = rank
        above -= dominated_by[:, peers].sum(axis=1)
        rank += 1
    return found


def _dominance(points: Floats, equal: Floats) -> NDArray[np.bool_]:
    """Whether row i is dominated by row j: j is no worse in every objective and better in one; shape (rows, rows)."""
    ours, theirs = points[:, None, :], points[None, :, :]
    same = np.abs(ours - theirs) <= equal * np.maximum(np.abs(ours), np.abs(theirs))
    better = (theirs < ours) & ~same
    no_worse = (theirs <= ours) | same
    dominated_by: NDArray[np.bool_] = np.all(no_worse, axis=2) & np.any(better, axis=2)
    return dominated_by


def _scaled(points: Floats) -> Floats:
    low = points.min(axis=0)
    span = points.max(axis=0) - low
    scaled: Floats = (points - low) / np.where(span > 0, span, 1.0)
    return scaled


def _checked(points: Floats) -> Floats:
    points = np.asarray(points, dtype=np.float64)
    if points.ndim != 2:
        raise ValueError(f"expected shape (points, objectives), got {points.shape}")
    return points
