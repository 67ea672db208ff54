"""Market bars of .csv files, checked: sorted, unique, open to close consistent.

    time,open,high,low,close,volume
    2024-01-02 00:00:00,1.05236,1.05253,1.05221,1.05227,1435

The header names the columns, in any order and case: `time` (or date, datetime, timestamp), four prices, and if there
are any `volume`, `adj close` and `ticker` (or symbol). A time is ISO 8601, or `DUKASCOPY`'s, as in gym-anytrading; it
is in UTC if it has no offset. A file may be gzipped.

A bar is stamped with the time at which it *opened*. Its values are known only when it has closed.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trainables.data.errors import OTHER_LAYOUTS, DataError, wrong
from trainables.data.timeframes import Bars

BAR_SUFFIXES = (".csv", ".csv.gz")
PRICES = ("open", "high", "low", "close")
BAR_COLUMNS = (*PRICES, "volume")
DUKASCOPY = "%d.%m.%Y %H:%M:%S.%f"
PRICE_ROUNDING_FRAC = 1e-4
"""A high below the close (or the like) by up to this share of the price is put right, being rounding; more is refused.
Adjusted prices are rounded column by column."""

_NAMES = {  # canonical name -> how headers call it, the first found counts
    "time": ("time", "date", "datetime", "timestamp", "gmt time"),
    **{name: (name,) for name in BAR_COLUMNS},
    "adjusted": ("adj close",),
    "symbol": ("ticker", "symbol"),
}


def read(path: Path) -> dict[str, pd.DataFrame]:
    """Returns the bars of each symbol: open, high, low, close and volume, float64, by the UTC time they opened.

    A file is one symbol, named as the file, or has a column that names them; a folder may hold several files. If a
    file has adjusted closes, all four prices are multiplied by their ratio to the closes: a split is then no loss.
    Without a volume it is 0. Raises DataError with file, line and field.
    """
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.glob("[!.]*") if f.is_file() and f.name.endswith(BAR_SUFFIXES))
    if not files:
        allowed = f"files ending in {' or '.join(BAR_SUFFIXES)}"
        raise wrong(path, "no file of market bars", allowed, remedy=OTHER_LAYOUTS)
    found: dict[str, pd.DataFrame] = {}
    for file in files:
        for symbol, bars in _checked(file, _table(file)).items():
            if symbol in found:
                raise wrong(file, f"bars of {symbol}, as in another file", "one file with all bars of a symbol")
            found[symbol] = bars
    return dict(sorted(found.items()))


def read_closed(path: Path) -> tuple[dict[str, Bars], int]:
    """Returns the bars of each symbol by the time they closed, and the length of the longest in microseconds."""
    frames = read(path)
    lengths_us = {symbol: spacing_us(path, symbol, bars) for symbol, bars in frames.items()}
    closed = {s: Bars(times_us(bars) + lengths_us[s], bars.to_numpy(np.float64)) for s, bars in frames.items()}
    return closed, max(lengths_us.values())


def spacing_us(path: Path, symbol: str, bars: pd.DataFrame) -> int:
    """Returns the length of a bar, in microseconds: the median distance of neighbours, as markets close at times.

    Raises DataError where more than 1 % are closer than that: bars of several lengths overlap, and when such a bar is
    known cannot be told. (Fewer are: one day a year has 23 hours.)
    """
    distances = np.diff(times_us(bars))
    if not len(distances):
        raise DataError(f"{path}: {symbol}: found one bar; allowed: enough for a window")
    length = int(np.median(distances))
    closer = int((distances < length).sum())
    if closer > 0.01 * len(distances):
        found = f"{closer} of {len(distances)} bars closer than their median distance, {pd.Timedelta(length, 'us')}"
        raise DataError(f"{path}: {symbol}: found {found}; allowed: bars of one length")
    return length


def times_us(bars: pd.DataFrame) -> NDArray[np.int64]:
    """Returns when the bars opened, in microseconds since 1970 UTC, shape (bars,)."""
    index = pd.DatetimeIndex(bars.index)
    opened: NDArray[np.int64] = index.tz_convert(None).as_unit("us").to_numpy().astype(np.int64)
    return opened


def _table(path: Path) -> pd.DataFrame:
    """Returns the file's cells as text by canonical names; the row labelled `i` stands in line `i + 1`.

    Raises DataError for a file that cannot be read, or lacks a column.
    """
    if not path.is_file():
        raise wrong(path, "no such file", "a file or a folder of market bars")
    if not path.name.endswith(BAR_SUFFIXES):
        raise wrong(path, f"suffix {path.suffix!r}", " or ".join(BAR_SUFFIXES), remedy=OTHER_LAYOUTS)
    try:
        # Blank lines are left out below: here they count, so that a row's label tells its line.
        cells = pd.read_csv(
            path, header=None, dtype=str, keep_default_na=False, skip_blank_lines=False, encoding="utf-8-sig"
        ).fillna("")
    except (OSError, EOFError, ValueError, zlib.error) as error:  # pandas' own errors are ValueErrors
        raise wrong(path, " ".join(str(error).split()), "a table of text that can be read to its end") from None
    header = [name.strip().lower() for name in cells.iloc[0]]
    named = {}
    for name, words in _NAMES.items():
        column = next((header.index(word) for word in words if word in header), None)
        if column is not None:
            named[name] = cells[column]
        elif name == "time" or name in PRICES:
            found, allowed = f"columns {', '.join(header):.100}", f"a header with {' or '.join(words)}"
            raise wrong(path, found, allowed, line=1, remedy=OTHER_LAYOUTS)
    columns = pd.DataFrame(named)[(cells != "").any(axis=1)][1:]
    if columns.empty:
        raise wrong(path, "no bar", "at least one")
    return columns


def _checked(path: Path, columns: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Returns the table's bars by symbol, each symbol's sorted and unique."""
    times = _times(path, columns["time"])
    values = {name: _numbers(path, name, columns[name]) for name in (*BAR_COLUMNS, "adjusted") if name in columns}
    values.setdefault("volume", pd.Series(0.0, index=columns.index))
    _check_prices(path, values)
    if "adjusted" in values:
        factor = values.pop("adjusted") / values["close"]
        values |= {name: values[name] * factor for name in PRICES}
    bars = pd.DataFrame({"time": times, **{name: values[name] for name in BAR_COLUMNS}})
    stem = path.name.removesuffix(".gz").removesuffix(".csv")
    bars["symbol"] = columns["symbol"].astype(str) if "symbol" in columns else stem
    bars = bars.sort_values(["symbol", "time"], kind="stable").drop_duplicates()
    again = bars.duplicated(["symbol", "time"])
    if again.any():
        label = bars.index[again][0]
        found = f"a second, different bar of {times[label]}"
        raise wrong(path, found, "one bar at a time", line=label + 1, field="time")
    return {
        str(symbol): part.drop(columns="symbol").set_index("time").rename_axis("open_time")
        for symbol, part in bars.groupby("symbol")
    }


def _numbers(path: Path, name: str, column: pd.Series[str]) -> pd.Series[float]:
    """Returns the column as float64; prices are to be positive, volumes not negative."""
    numbers = pd.to_numeric(column, errors="coerce").astype("float64")
    positive = name != "volume"
    bad = ~np.isfinite(numbers) | ((numbers <= 0.0) if positive else (numbers < 0.0))
    if bad.any():
        label = numbers.index[bad][0]
        allowed = "a number > 0" if positive else "a number >= 0"
        raise wrong(path, f"{column[label]!r:.60}", allowed, line=label + 1, field=name)
    return numbers


def _check_prices(path: Path, values: Mapping[str, pd.Series[float]]) -> None:
    """Raises the highs and lowers the lows that rounding put wrong; raises DataError for those it cannot explain."""
    body = pd.concat([values["open"], values["close"]], axis=1)
    for name, other, right in (("high", body.max(axis=1), np.maximum), ("low", body.min(axis=1), np.minimum)):
        given = values[name]
        fixed = right(given, other)
        bad = (fixed - given).abs() > PRICE_ROUNDING_FRAC * given
        if bad.any():
            label = given.index[bad][0]
            side = "below" if name == "high" else "above"
            found = f"{given[label]:g}, {side} open or close ({other[label]:g})"
            raise wrong(path, found, "low <= open, close <= high", line=label + 1, field=name)
        values[name][:] = fixed


def _times(path: Path, column: pd.Series[str]) -> pd.Series[pd.Timestamp]:
    """Returns when each bar opened, in UTC, to the microsecond."""
    text = column.str.strip()
    layout = DUKASCOPY if re.match(r"\d\d\.\d\d\.\d{4} ", text.iloc[0]) else "ISO8601"
    times = pd.to_datetime(text, format=layout, utc=True, errors="coerce")
    if times.isna().any():
        label = times.index[times.isna()][0]
        allowed, found = "ISO 8601, or dd.mm.yyyy HH:MM:SS.fff", f"{text[label]!r:.60}"
        raise wrong(path, found, allowed, line=label + 1, field="time", remedy=OTHER_LAYOUTS)
    return times.dt.as_unit("us")
