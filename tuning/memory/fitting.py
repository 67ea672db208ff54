"""Which micro-batches fit a card, before there is one: predictions that the memory guard judges as in a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trainables.knobs import LOOP, Scalar
from tuning.memory.allocator import replay
from tuning.memory.guard import MemoryGuard
from tuning.memory.peaks import highest
from tuning.memory.prediction import Confidence, Prediction
from tuning.memory.profile import MemoryProfile
from tuning.memory.trace import Peak

Kernels = Literal["cuda", "cpu"]
Word = Literal["fits", "tight", "no", ""]
"""fits, tight: a study would launch it; tight with P(OOM) over `TIGHT`. no: it would refuse it. "": without a limit."""

TIGHT = 0.05
MAX_MICRO_BATCH = 65_536
"""The largest micro-batch that is looked at: the knob's own limit."""
_ONE = ()
"""The memory group: a prediction is of one, so it needs no knobs."""


@dataclass(frozen=True)
class Cell:
    """A micro-batch size: the bytes a card must have for it, their share of the card's, and what they are made of."""

    micro_batch: int
    needed_bytes: int
    share_frac: float | None
    p_oom: float | None
    verdict: Word
    peak: Peak


@dataclass(frozen=True)
class Fit:
    """A memory group: a cell for each micro-batch size asked, and the largest that a study would launch.

    `largest` is 0 if not one sample fits, and None if that cannot be said: no limit, or a prediction that holds
    for its own sizes only; `largest_cell` is its cell. `cells` leaves out the sizes that cannot be predicted.
    """

    knobs: Mapping[str, Scalar]
    confidence: Confidence
    notes: tuple[str, ...]
    cells: tuple[Cell, ...]
    largest: int | None
    largest_cell: Cell | None


def needed_bytes(peak: Peak, kernels: Kernels) -> int:
    """Returns what a card must have: on the CPU, where a virtual card counts storages, what is live at once."""
    return peak.capacity_bytes if kernels == "cuda" else peak.live_bytes


def fit(
    knobs: Mapping[str, Scalar],
    prediction: Prediction,
    micro_batches: Sequence[int],
    usable_bytes: int | None,
    kernels: Kernels,
) -> Fit:
    """Returns how the micro-batch sizes fit in `usable_bytes`, what a card has less its context, and the largest."""
    peaks = [peak for m in micro_batches if (peak := prediction.peak(m)) is not None]
    if not peaks:
        return Fit(knobs, prediction.confidence, prediction.notes, (), None, None)
    profile = MemoryProfile.from_peaks(peaks, prediction.confidence, cuda=kernels == "cuda")
    guard = MemoryGuard(usable_bytes, {_ONE: profile}, LOOP)
    largest = None if usable_bytes is None else largest_that_fits(prediction, guard, kernels)
    cells = tuple(_cell(peak, guard, kernels) for peak in peaks)
    most = prediction.peak(largest) if largest else None
    largest_cell = None
    if most is not None:  # its capacity is known to half a percent, and that the limit is enough
        limit = guard.limit_bytes(_ONE) or 0
        most = replace(most, capacity_bytes=min(most.capacity_bytes, limit))
        one = MemoryProfile.from_peaks(
            [most], prediction.confidence, cuda=kernels == "cuda", floor_bytes=profile.floor_bytes
        )
        largest_cell = _cell(most, MemoryGuard(usable_bytes, {_ONE: one}, LOOP), kernels)
    return Fit(knobs, prediction.confidence, prediction.notes, cells, largest, largest_cell)


def largest_that_fits(prediction: Prediction, guard: MemoryGuard, kernels: Kernels) -> int | None:
    """Returns the largest micro-batch that the guard lets run, 0 for none, None where not every size is known.

    By doubling and halving, so it assumes that what fits also fits with fewer samples.
    """
    limit = guard.limit_bytes(_ONE)
    if limit is None or prediction.trace(MAX_MICRO_BATCH) is None:
        return None

    def fits(micro_batch: int) -> bool:
        trace = prediction.trace(micro_batch)
        if trace is None or highest(trace.events)[1] > limit:
            return False
        return kernels == "cpu" or replay(trace.events, capacity_bytes=limit).failed_at is None

    low, high = 0, 1
    while high <= MAX_MICRO_BATCH and fits(high):
        low, high = high, high * 2
    high = min(high, MAX_MICRO_BATCH + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _cell(peak: Peak, guard: MemoryGuard, kernels: Kernels) -> Cell:
    needed, usable_bytes = needed_bytes(peak, kernels), guard.cap_bytes
    if usable_bytes is None:
        return Cell(peak.micro_batch, needed, None, None, "", peak)
    judged = guard.judge(_ONE, peak.micro_batch)
    p_oom = judged.p_oom or 0.0
    word: Word = "no" if not judged.fits else "tight" if p_oom > TIGHT else "fits"
    return Cell(peak.micro_batch, needed, needed / usable_bytes if usable_bytes else None, p_oom, word, peak)
