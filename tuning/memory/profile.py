"""The bytes of a training step by micro-batch size, as points with lines between them. Plain arithmetic: no torch."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tuning.memory.trace import Peak

EXTRAPOLATED, MEASURED = "extrapolated", "measured"
SOURCES = ("traced", "workspaces modelled", "workspaces unseen", "fallback", MEASURED, "bound", "none")


@dataclass(frozen=True)
class Point:
    """At one micro-batch size: the peak a run would report, and the smallest card that holds it, in bytes.

    The second is the larger on CUDA, whose allocator keeps more than tensors; on the CPU both are the same.
    """

    micro_batch: int
    peak_bytes: int
    capacity_bytes: int


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes of one memory group (dtype, checkpointing, adapter ...), by micro-batch size.

    `floor_bytes` are alive at every moment of training: parameters with buffers, and the optimiser's state. `points`
    rise with the micro-batch and never fall; `source` says how they were found, one of `SOURCES`.
    """

    floor_bytes: int
    points: tuple[Point, ...]
    source: str = MEASURED

    def __post_init__(self) -> None:
        if not self.points or any(p.micro_batch < 1 or p.peak_bytes < 0 for p in self.points):
            raise ValueError(
                f"expected points of micro-batch >= 1 and peak bytes >= 0, at least one, got {self.points}"
            )
        if self.source not in SOURCES:
            raise ValueError(f"expected a source of {', '.join(SOURCES)}, got {self.source!r}")
        rising: list[Point] = []
        for point in sorted(self.points, key=lambda p: p.micro_batch):
            before = rising[-1] if rising else Point(0, 0, 0)
            peak = max(point.peak_bytes, before.peak_bytes)
            grown = Point(point.micro_batch, peak, max(point.capacity_bytes, before.capacity_bytes, peak))
            if rising and before.micro_batch == point.micro_batch:
                rising.pop()
            rising.append(grown)
        object.__setattr__(self, "points", tuple(rising))

    @classmethod
    def from_measured(cls, floor_bytes: int, measured: Sequence[tuple[int, int]], spare: float = 1.0) -> MemoryProfile:
        """Returns the profile through measured (micro-batch, peak bytes) pairs.

        `spare` is what a card must hold as a multiple of the peak. A single pair gives no slope: all above the floor
        then counts as the samples', which is too much for larger micro-batches rather than too little.
        """
        points = [Point(m, b, round(b * spare)) for m, b in measured]
        return cls(floor_bytes, tuple(points))

    @classmethod
    def from_peaks(
        cls, peaks: Sequence[Peak], confidence: str, *, cuda: bool, alone: bool = False, floor_bytes: int | None = None
    ) -> MemoryProfile:
        """Returns the profile of predicted peaks: on CUDA of the allocator's bytes, on a CPU of live tensors.

        Batches of one micro-step are the `alone` ones; the allocator is taken to add the same share to them.
        `floor_bytes` is counted on the model itself, else it is the part that is alive at the first peak.
        """
        if floor_bytes is None:
            floor_bytes = sum(peaks[0].breakdown.get(name, 0) for name in ("parameter", "buffer", "optimizer"))

        def point(peak: Peak) -> Point:
            share = peak.alone_bytes / peak.live_bytes if alone and peak.live_bytes else 1.0
            least = min(peak.allocated_bytes, peak.capacity_bytes)  # cuDNN's timing takes more only if there is room
            found = (least, peak.capacity_bytes) if cuda else (peak.live_bytes, peak.live_bytes)
            return Point(peak.micro_batch, *(round(share * size) for size in found))

        return cls(floor_bytes, tuple(point(p) for p in peaks), confidence)

    def as_raw(self) -> dict[str, object]:
        """Returns it as plain values."""
        return {
            "floor_bytes": self.floor_bytes,
            "points": [[p.micro_batch, p.peak_bytes, p.capacity_bytes] for p in self.points],
            "source": self.source,
        }

    def capacity(self, micro_batch: int) -> float:
        """Returns the bytes that a card must hold for a step of `micro_batch` samples."""
        return self._at(micro_batch, lambda p: p.capacity_bytes)

    def peak(self, micro_batch: int) -> float:
        """Returns the bytes that such a step would report as its peak."""
        return self._at(micro_batch, lambda p: p.peak_bytes)

    def scaled(self, ratios: Mapping[int, float]) -> MemoryProfile:
        """Returns the profile with a point at each of `ratios`, micro-batch -> factor, which hold between them too."""
        sizes = sorted({*ratios, *(p.micro_batch for p in self.points)})
        factors = {m: interpolated(ratios, m) for m in sizes}
        points = [Point(m, round(r * self.peak(m)), round(r * self.capacity(m))) for m, r in factors.items()]
        return dataclasses.replace(self, points=tuple(points))

    def _at(self, micro_batch: int, value: Callable[[Point], int]) -> float:
        """Returns the value on the line between two points; beyond the last on the line through the last two.

        A peak is the largest of several lines, so it lies below the first and above the second. For what is below the
        first point see `_at_zero`.
        """
        # A card must hold no less than the peak, also where the capacities of the first two points say less.
        line = [(0, max(self._at_zero(value), self._at_zero(lambda p: p.peak_bytes)))]
        line += [(p.micro_batch, value(p)) for p in self.points]
        right = min(max(1, bisect_left(line, micro_batch, key=lambda p: p[0])), len(line) - 1)
        (m0, b0), (m1, b1) = line[right - 1], line[right]
        if m1 == micro_batch:
            return b1
        return b0 + (b1 - b0) / (m1 - m0) * (micro_batch - m0)

    def _at_zero(self, value: Callable[[Point], int]) -> float:
        """Returns where the line from the first point down meets micro-batch 0, in bytes, at most the first's value.

        It is the floor, or the zero of the line through the first two points if that is more: a step needs it whatever
        its micro-batch, as for a pool of references. A single point does not show it, and is too low by it.

        For a peak, the largest of several lines, the second line is never too high, and too low by at most what it
        falls from the first point: of points at 2 and 8, at 1 by one sample's bytes. A capacity goes in segments of 2
        to 20 MiB: rounded more at the first point than at the second, it is too high, by at most the first's value.
        """
        first = self.points[0]
        floor = min(self.floor_bytes, value(first))
        if len(self.points) == 1:
            return floor
        second = self.points[1]
        slope = (value(second) - value(first)) / (second.micro_batch - first.micro_batch)
        return max(floor, value(first) - slope * first.micro_batch)


def interpolated(values: Mapping[int, float], micro_batch: int) -> float:
    """Returns the value at a micro-batch: on the line between two, that of the nearest beyond them, 1 without any."""
    if not values:
        return 1.0
    sizes = sorted(values)
    return float(np.interp(micro_batch, sizes, [values[m] for m in sizes]))
