"""Pareto geometry on small arrays: ranks, fronts, hypervolume, knee, and an order that spreads.

Arrays are of shape (points, objectives), every objective to be minimised; `signed` makes such rows. A row with a value
that is not finite is worse than every finite row: it has the last rank and is never on the front.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Mode = Literal["min", "max"]
Floats = NDArray[np.float64]
_Entry = tuple[float, float, float, float, int]
"""A row of `Pairs`: second and first objective, the least and the most that is equal to the first, its number."""


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
    pass in the order of the second finds each row's rank from the least first objective of every rank before it; and
    of a row that comes alone, a pass over those behind it finds which it raises, and which these raise in turn.
    """

    def __init__(self, tolerance: float = 0.0) -> None:
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance must be at least 0 and below 1, got {tolerance}")
        self._tolerance = tolerance
        self._rows: dict[Hashable, tuple[float, float]] = {}
        self._order: list[_Entry] = []
        self._ids: dict[int, Hashable] = {}
        self._numbers: dict[Hashable, int] = {}
        self._found: dict[Hashable, int] = {}
        self._ranks: list[int] | None = None
        """In the order, while all but `_new` have theirs; so are `_firsts` and `_highs`, which are read at length."""
        self._firsts: list[float] = []
        self._highs: list[float] = []
        self._new: _Entry | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, key: Hashable, first: float, second: float) -> None:
        """Adds a row of finite values, in the place of what the key had before. O(log n), and a move of memory."""
        if key in self._rows:
            number = self._numbers[key]
            del self._order[bisect_left(self._order, self._entry(*self._rows[key], number))]
            self._ranks = None
        else:
            number = self._numbers[key] = len(self._numbers)
            self._ids[number] = key
        self._rows[key] = (first, second)
        entry = self._entry(first, second, number)
        insort(self._order, entry)
        if self._new is not None:
            self._ranks = None
        self._new = entry

    def ranks(self) -> Mapping[Hashable, int]:
        """Returns the rank of each key's row, 0 for the front; the next row changes what was returned."""
        if self._new is not None and self._ranks is not None:
            self._place(self._new, self._ranks)
        elif self._new is not None:
            self._rank_all()
        self._new = None
        return self._found

    def _place(self, new: _Entry, ranks: list[int]) -> None:
        """Gives the only row without one its rank, and raises those behind it that it takes along."""
        order, found, ids = self._order, self._found, self._ids
        firsts, highs = self._firsts, self._highs
        at = bisect_left(order, new)
        second, first, low, high, number = new
        group = bisect_left(order, (second,))
        before = [rank for rank, value in zip(ranks[:group], firsts[:group], strict=True) if value <= high]
        before += [rank for rank, value in zip(ranks[group:at], firsts[group:at], strict=True) if value < low]
        mine = found[ids[number]] = max(before, default=-1) + 1
        ranks.insert(at, mine)
        firsts.insert(at, first)
        highs.insert(at, high)
        # `least` has by rank the least first objective of what is new at it or a later one; of equal seconds it has
        # those of the groups before, `same` those of the group itself.
        least = [math.inf] * (max(ranks) + 2)
        same, current = [(first, mine)], second
        for i, old, most in zip(range(at + 1, len(order)), ranks[at + 1 :], highs[at + 1 :], strict=True):
            if not same and least[old] > most:  # as nearly all
                continue
            if same and order[i][0] != current:
                _lower(least, same)
                same = []
            beyond = [rank for value, rank in same if value < order[i][2]]
            rank = max(bisect_right(least, most), max(beyond, default=-1) + 1)
            if rank > old:
                if rank + 1 >= len(least):
                    least.append(math.inf)
                ranks[i] = found[ids[order[i][4]]] = rank
                same.append((order[i][1], rank))
                current = order[i][0]

    def _rank_all(self) -> None:
        """Gives every row its rank."""
        order, ids, found = self._order, self._ids, self._found
        least: list[float] = []  # by rank the least first objective of the rows so far of that rank or a later one
        ranks: list[int] = []
        start = 0
        while start < len(order):
            second, stop = order[start][0], start + 1
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
                ranks.append(rank)
                found[ids[number]] = rank
            least.extend([math.inf] * (max(rank for _, rank in group) + 1 - len(least)))
            _lower(least, group)
            start = stop
        self._ranks = ranks
        self._firsts, self._highs = [entry[1] for entry in order], [entry[3] for entry in order]

    def _entry(self, first: float, second: float, number: int) -> _Entry:
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


def _lower(least: list[float], rows: Sequence[tuple[float, int]]) -> None:
    """Takes (first objective, rank) into the least first objective by rank, of that rank or a later one."""
    for first, rank in rows:
        while rank >= 0 and least[rank] > first:
            least[rank] = first
            rank -= 1


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
