"""Timeframes: bars made of shorter bars, their features, and what there is to foretell about them.

A bar is known when it has *closed*, so everything here goes by closing times, in microseconds since 1970 UTC.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Label = Literal["volatility", "direction"]

BAR_FEATURES = ("log return", "log high/low", "log close/open", "log volume")
HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
_UNITS_US = {"min": HOUR_US // 60, "h": HOUR_US, "D": DAY_US, "W": 7 * DAY_US, "M": 28 * DAY_US}
_MONDAY_US = 4 * DAY_US  # the first Monday after 1970 began


@dataclass(frozen=True)
class Timeframe:
    """Bars of `count` units (min, h, D, W from Monday, M of the calendar), the last `window` of which are looked at."""

    count: int
    unit: str
    window: int

    @property
    def name(self) -> str:
        """The frame without its window, such as 4h."""
        return f"{self.count}{self.unit}"

    @property
    def length_us(self) -> int:
        """The length of a bar in microseconds, of the shortest for months."""
        return self.count * _UNITS_US[self.unit]

    def end_us(self, close_us: Ints) -> Ints:
        """Returns the end of the bar within which something closes, in microseconds; a close on the end is within."""
        if self.unit == "M":
            months = (close_us - 1).astype("datetime64[us]").astype("datetime64[M]").astype(np.int64)
            ends: Ints = (months // self.count + 1) * self.count
            return ends.astype("datetime64[M]").astype("datetime64[us]").astype(np.int64)
        offset = _MONDAY_US if self.unit == "W" else 0
        return -((offset - close_us) // self.length_us) * self.length_us + offset


def parse(text: str) -> tuple[Timeframe, ...]:
    """Returns the timeframes of a text such as "1h:24 4h:18 1D:10", frame and window, the shortest first.

    Raises ValueError with what is wrong.
    """
    frames = []
    for item in re.split(r"[\s,]+", text.strip()):
        match = re.fullmatch(r"(\d{1,4})(min|h|D|W|M):(\d{1,4})", item)
        if match is None or int(match[1]) < 1 or int(match[3]) < 1:
            raise ValueError(f"{item!r}: expected frame:window, such as 15min:32, 4h:18, 1D:10, 1W:8 or 1M:6")
        frames.append(Timeframe(int(match[1]), match[2], int(match[3])))
    frames.sort(key=lambda frame: frame.length_us)
    lengths = [frame.length_us for frame in frames]
    if len(set(lengths)) < len(lengths):
        raise ValueError(f"{text!r} has one frame twice")
    return tuple(frames)


@dataclass(frozen=True)
class Bars:
    """Bars by the time they closed, in microseconds since 1970 UTC, shape (bars,), sorted; values (bars, 5).

    The values are open, high, low, close, volume.
    """

    close_us: Ints
    values: Floats


def resample(bars: Bars, frame: Timeframe) -> Bars:
    """Returns the bars of a longer frame: first, highest, lowest, last, sum. Frames without a bar are left out.

    A bar belongs where it *closes*, so one that straddles two frames gives nothing to the earlier. The last frame is
    left out unless the data reaches its end.
    """
    ends = frame.end_us(bars.close_us)
    starts = np.flatnonzero(np.diff(ends, prepend=ends[0] - 1))
    opened, high, low, close, volume = bars.values.T
    columns = [
        opened[starts],
        np.maximum.reduceat(high, starts),
        np.minimum.reduceat(low, starts),
        close[np.append(starts[1:], len(ends)) - 1],
        np.add.reduceat(volume, starts),
    ]
    whole = len(starts) - int(ends[-1] > bars.close_us[-1])
    return Bars(ends[starts][:whole], np.stack(columns, axis=1)[:whole])


def features(bars: Bars) -> Floats:
    """Returns BAR_FEATURES of each bar but the first, which has no return, shape (bars - 1, 4)."""
    opened, high, low, close, volume = bars.values.T
    columns = [np.diff(np.log(close)), np.log(high / low)[1:], np.log(close / opened)[1:], np.log1p(volume)[1:]]
    return np.stack(columns, axis=1)


def volatility(bars: Bars, horizon: int) -> Floats:
    """Returns the standard deviation of the last `horizon` log returns at each bar, NaN where there are fewer."""
    found = np.full(len(bars.close_us), np.nan)
    if len(found) > horizon:
        returns = np.diff(np.log(bars.values[:, 3]))
        found[horizon:] = sliding_window_view(returns, horizon).std(axis=1, ddof=1)
    return found


def answers(bars: Bars, label: Label, horizon: int) -> Floats:
    """Returns the label at each bar, 0 or 1, NaN where too little is known before or after it.

    volatility: the next `horizon` returns have the higher standard deviation, compared with the last `horizon`;
    direction: the close is higher `horizon` bars later.
    """
    now = volatility(bars, horizon) if label == "volatility" else bars.values[:, 3]
    later = np.full(len(now), np.nan)
    later[:-horizon] = now[horizon:]
    return np.where(np.isnan(now) | np.isnan(later), np.nan, later > now)
