"""Which micro-batches fit a card: predicted peaks, with a margin for their error, against what tensors may take.

Pure arithmetic over predictions; `tuning.estimate` shows it, `levers` asks it what would fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trainables.knobs import Scalar
from tuning.memory.allocator import replay
from tuning.memory.peaks import highest
from tuning.memory.prediction import Confidence, Peak, Prediction
from tuning.memory.trace import Trace

Kernels = Literal["cuda", "cpu"]
Verdict = Literal["fits", "tight", "no", ""]
"""tight: it fits as predicted, and not with the margin. "": there is no limit to judge by."""

MARGIN_FRAC: Mapping[Confidence, float] = {"traced": 0.05, "workspaces unseen": 0.15, "fallback": 0.3, "none": 0.3}
"""How far a step may need more than was predicted, by confidence."""

MOST = 65_536
"""The largest micro-batch that is looked at: the knob's own limit."""


@dataclass(frozen=True)
class Cell:
    """One micro-batch size: the bytes a card must have for it, their share of what it has, and what they are."""

    micro_batch: int
    needed_bytes: int
    share_frac: float | None
    verdict: Verdict
    peak: Peak


@dataclass(frozen=True)
class Fit:
    """One coupling of memory knobs: a cell for each micro-batch size asked, and the largest that fits.

    `largest` is 0 where not one sample fits, and None where that cannot be said: no limit, or a prediction that holds
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


def verdict(needed: int, usable_bytes: int | None, confidence: Confidence) -> Verdict:
    """Returns whether a peak of `needed` bytes fits in `usable_bytes`, what a card has less its context."""
    if usable_bytes is None:
        return ""
    if needed <= _limit(usable_bytes, confidence):
        return "fits"
    return "tight" if needed <= usable_bytes else "no"


def fit(
    knobs: Mapping[str, Scalar],
    prediction: Prediction,
    micro_batches: Sequence[int],
    usable_bytes: int | None,
    kernels: Kernels,
) -> Fit:
    """Returns how the micro-batch sizes fit, and the largest of all that does."""
    cells = [cell(prediction, m, usable_bytes, kernels) for m in micro_batches]
    largest = None if usable_bytes is None else largest_that_fits(prediction, usable_bytes, kernels)
    largest_cell = cell(prediction, largest, usable_bytes, kernels) if largest else None
    if largest_cell is not None:  # its capacity is known to half a percent, which may be more than the limit
        largest_cell = replace(largest_cell, verdict="fits")
    known = tuple(c for c in cells if c is not None)
    return Fit(knobs, prediction.confidence, prediction.notes, known, largest, largest_cell)


def cell(prediction: Prediction, micro_batch: int, usable_bytes: int | None, kernels: Kernels) -> Cell | None:
    """Returns one micro-batch size's cell, None where it cannot be predicted."""
    peak = prediction.peak(micro_batch)
    if peak is None:
        return None
    needed = needed_bytes(peak, kernels)
    share = None if usable_bytes is None else needed / usable_bytes
    return Cell(micro_batch, needed, share, verdict(needed, usable_bytes, prediction.confidence), peak)


def largest_that_fits(prediction: Prediction, usable_bytes: int, kernels: Kernels) -> int | None:
    """Returns the largest micro-batch that fits with its margin, 0 for none, None where not every size is known.

    By doubling and halving, so it assumes that what fits also fits with fewer samples.
    """
    limit = _limit(usable_bytes, prediction.confidence)
    if prediction.trace(MOST) is None:
        return None

    def fits(micro_batch: int) -> bool:
        trace = prediction.trace(micro_batch)
        return trace is not None and _fits(trace, limit, kernels)

    low, high = 0, 1
    while high <= MOST and fits(high):
        low, high = high, high * 2
    high = min(high, MOST + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fits(trace: Trace, limit_bytes: int, kernels: Kernels) -> bool:
    live_bytes = highest(trace)[1]
    if live_bytes > limit_bytes or kernels == "cpu":
        return live_bytes <= limit_bytes
    return replay(trace.events, capacity_bytes=limit_bytes).failed_at is None


def _limit(usable_bytes: int, confidence: Confidence) -> int:
    return int(usable_bytes / (1 + MARGIN_FRAC[confidence]))
