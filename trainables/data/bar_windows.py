"""Windows over the bars of several timeframes, cut so that nothing of the future reaches a feature.

Rules that keep the future out:
- a bar is known when it has closed, and one of a longer frame holds whole bars of the data only (timeframes.py);
- a decision sees the bars closed by then, of each frame (`decisions`);
- a training label ends before the first validation decision, so that `horizon` bars lie between the two (`split_at`);
- features are scaled by what the bars before the last training decision say (`scaled`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables.data.errors import DataError
from trainables.data.timeframes import Bars, Floats, Ints, Label, Timeframe, answers, features, resample


@dataclass(frozen=True)
class BarWindows:
    """A split: windows (decisions, bars of all frames, feature), frame after frame, oldest bar first.

    `labels` are 0 or 1, `last_labels` the labels known last at the decisions, `decided_us` when these are, all of
    shape (decisions,).
    """

    windows: NDArray[np.float32]
    labels: Ints
    last_labels: Ints
    decided_us: Ints


@dataclass(frozen=True)
class Decisions:
    """The points of one series at which something is to be foretold, in the order of time, all of shape (decisions,).

    `known_us` is when the label is known; `last_labels` are those known at the decision; `ends` has, for each frame,
    how many bars with features are closed at the decision.
    """

    decided_us: Ints
    known_us: Ints
    labels: Ints
    last_labels: Ints
    ends: tuple[Ints, ...]


def parts(
    series: Mapping[str, Bars], frames: Sequence[Timeframe], label: Label, horizon: int, val_frac: float
) -> tuple[BarWindows, BarWindows]:
    """Returns the training and the validation part of all series, split at one point in time.

    Raises DataError for a series with nothing to train on.
    """
    framed = {name: [resample(bars, frame) for frame in frames] for name, bars in series.items()}
    made = {name: decisions(frames, bars, label, horizon) for name, bars in framed.items()}
    cut_us = split_at(list(made.values()), val_frac)
    found: list[list[tuple[NDArray[Any], ...]]] = [[], []]
    for name, these in made.items():
        training = these.known_us <= cut_us
        if not training.any():
            needed = ", ".join(f"{frame.window + 1} of {frame.name}" for frame in frames)
            raise DataError(
                f"{name}: found {len(series[name].close_us)} bars, with nothing to train on; allowed: as many as the "
                f"windows ({needed}) and three horizons of {horizon} need before the validation part; leave the series "
                "out, or shorten the windows"
            )
        until_us = int(these.decided_us[training][-1])
        values = [scaled(features(bars), bars.close_us[1:], until_us) for bars in framed[name]]
        for part, chosen in zip(found, (training, these.decided_us >= cut_us), strict=True):
            looks = (windows(v, e[chosen], f.window) for v, e, f in zip(values, these.ends, frames, strict=True))
            answers_of = (column[chosen] for column in (these.labels, these.last_labels, these.decided_us))
            part.append((np.concatenate(list(looks), axis=1), *answers_of))
    train, val = (BarWindows(*map(np.concatenate, zip(*part, strict=True))) for part in found)
    return train, val


def decisions(frames: Sequence[Timeframe], bars: Sequence[Bars], label: Label, horizon: int) -> Decisions:
    """Returns a decision at the close of each bar of the shortest frame with full windows and a known label.

    `bars` are those of each frame. The label known last at a decision is that of `horizon` bars before; where there is
    none the decision is left out.
    """
    base = bars[0]
    labels = answers(base, label, horizon)
    last = np.concatenate([np.full(min(horizon, len(labels)), np.nan), labels[:-horizon]])
    ends = [np.searchsorted(b.close_us[1:], base.close_us, side="right") for b in bars]  # the first has no features
    usable = ~np.isnan(labels) & ~np.isnan(last)
    for frame, end in zip(frames, ends, strict=True):
        usable &= end >= frame.window
    at = np.flatnonzero(usable)
    return Decisions(
        base.close_us[at],
        base.close_us[at + horizon],
        labels[at].astype(np.int64),
        last[at].astype(np.int64),
        tuple(end[at] for end in ends),
    )


def split_at(series: Sequence[Decisions], val_frac: float) -> int:
    """Returns the time, in microseconds, from which on decisions are for validation, so that `val_frac` of all are.

    Training decisions are those whose label is known by then: the `horizon` decisions in between belong to neither.
    """
    decided = np.sort(np.concatenate([d.decided_us for d in series]))
    if not len(decided):
        return 0
    return int(decided[min(int((1.0 - val_frac) * len(decided)), len(decided) - 1)])


def scaled(values: Floats, close_us: Ints, until_us: int) -> NDArray[np.float32]:
    """Returns features with mean 0 and standard deviation 1 over the bars closed by `until_us`, the training's.

    A feature that does not vary there, such as a volume that is not reported, becomes 0.
    """
    known = values[close_us <= until_us]
    spread = known.std(axis=0)
    constant = spread < 1e-12
    result = (values - known.mean(axis=0)) / np.where(constant, 1.0, spread)
    scaled_values: NDArray[np.float32] = np.where(constant, 0.0, result).astype(np.float32)
    return scaled_values


def windows(values: NDArray[np.float32], ends: Ints, window: int) -> NDArray[np.float32]:
    """Returns the last `window` rows before each end, oldest first, shape (ends, window, feature)."""
    looks: NDArray[np.float32] = values[ends[:, None] + np.arange(-window, 0)]
    return looks
