"""Market bars of the public layouts (bar_files.py) in one form, checked: sorted, unique, open to close consistent.

A bar is stamped with the time at which it *opened*, in UTC. What is known of it is known only when it has closed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from trainables.data.bar_files import BAR_SUFFIXES, PRICES, Table, read_table
from trainables.data.errors import DataError
from trainables.data.timeframes import Bars

BAR_COLUMNS = (*PRICES, "volume")
PRICE_ROUNDING_FRAC = 1e-4
"""A high below the close (or the like) by up to this share of the price is put right, being rounding; more is refused.
Adjusted prices are rounded column by column."""

_EST = pd.Timedelta(hours=5)  # HistData: "Eastern Standard Time without day light savings adjustments"
_TIMES = (  # pattern of the first value, format, what makes it UTC
    (r"\d\d\.\d\d\.\d{4} \d\d:\d\d:\d\d\.\d+", "%d.%m.%Y %H:%M:%S.%f", None),
    (r"\d\d\.\d\d\.\d{4} \d\d:\d\d:\d\d", "%d.%m.%Y %H:%M:%S", None),
    (r"\d{4}\.\d\d\.\d\d \d\d:\d\d:\d\d", "%Y.%m.%d %H:%M:%S", None),
    (r"\d{4}\.\d\d\.\d\d \d\d:\d\d", "%Y.%m.%d %H:%M", None),
    (r"\d{4}\.\d\d\.\d\d", "%Y.%m.%d", None),
    (r"\d{8} \d{6}", "%Y%m%d %H%M%S", _EST),
    (r"\d{4}-\d\d-\d\d.*", "ISO8601", None),
)
_LAYOUTS = "dd.mm.yyyy HH:MM:SS, yyyy.mm.dd HH:MM, yyyymmdd HHMMSS, ISO 8601, or seconds to nanoseconds since 1970"
_PERIOD = re.compile(r"[-_]\d{4}([-_]?\d\d){0,2}$")


def read(path: Path) -> dict[str, pd.DataFrame]:
    """Returns the bars of each symbol: open, high, low, close and volume, float64, by the UTC time they opened.

    A file is one symbol, named as the file, or has a column that names them. The files of a folder that differ only in
    the month or year that ends their names are one symbol. Where a file has adjusted closes, all four prices are
    multiplied by their ratio to the closes: a split is then no loss. Without a volume it is 0. Raises DataError with
    file, line (or row) and field.
    """
    files = sorted(f for f in path.iterdir() if _is_bars(f)) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: found no file of market bars; allowed: files ending in {', '.join(BAR_SUFFIXES)}")
    parts: dict[str, list[pd.DataFrame]] = {}
    for file in files:
        for symbol, bars in _checked(read_table(file)).items():
            parts.setdefault(symbol, []).append(bars)
    return {symbol: _joined(path, symbol, found) for symbol, found in sorted(parts.items())}


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


def _is_bars(file: Path) -> bool:
    return file.is_file() and file.name.endswith(BAR_SUFFIXES) and not file.name.startswith(".")


def _checked(table: Table) -> dict[str, pd.DataFrame]:
    """Returns the table's bars by symbol, each symbol's sorted and unique."""
    columns = table.columns
    times = _times(table)
    values = {name: _numbers(table, name) for name in (*BAR_COLUMNS, "adjusted") if name in columns}
    values.setdefault("volume", pd.Series(0.0, index=columns.index))
    _check_prices(table, values)
    if "adjusted" in values:
        factor = values.pop("adjusted") / values["close"]
        values |= {name: values[name] * factor for name in PRICES}
    bars = pd.DataFrame({"time": times, **{name: values[name] for name in BAR_COLUMNS}})
    symbols = columns["symbol"].astype(str) if "symbol" in columns else _symbol(table.path)
    bars["symbol"] = symbols
    bars = bars.sort_values(["symbol", "time"], kind="stable").drop_duplicates()
    again = bars.duplicated(["symbol", "time"])
    if again.any():
        label = bars.index[again][0]
        table.wrong(label, "time", f"a second, different bar of {times[label]}", "one bar at a time")
    return {str(s): b.drop(columns="symbol").set_index("time") for s, b in bars.groupby("symbol")}


def _symbol(path: Path) -> str:
    """Returns the file's name without suffixes and without the month or year that ends it."""
    name = path.name
    while (stem := Path(name).stem) != name and name.endswith(BAR_SUFFIXES):
        name = stem
    return _PERIOD.sub("", name)


def _joined(path: Path, symbol: str, parts: list[pd.DataFrame]) -> pd.DataFrame:
    bars = pd.concat(parts) if len(parts) > 1 else parts[0]
    bars = bars.reset_index().drop_duplicates().set_index("time").sort_index()
    again = bars.index.duplicated()
    if again.any():
        found = f"different bars of {bars.index[again][0]} in two files"
        raise DataError(f"{path}: {symbol}: time: found {found}; allowed: one bar at a time")
    return bars.rename_axis("open_time")


def _numbers(table: Table, name: str) -> pd.Series[float]:
    """Returns the column as float64; prices are to be positive, volumes not negative."""
    column = table.columns[name]
    numbers = pd.to_numeric(column, errors="coerce").astype("float64")
    positive = name != "volume"
    bad = ~np.isfinite(numbers) | ((numbers <= 0.0) if positive else (numbers < 0.0))
    if bad.any():
        label = numbers.index[bad][0]
        table.wrong_value(label, name, "a number > 0" if positive else "a number >= 0")
    return numbers


def _check_prices(table: Table, values: Mapping[str, pd.Series[float]]) -> None:
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
            table.wrong(label, name, found, "low <= open, close <= high")
        values[name][:] = fixed


def _times(table: Table) -> pd.Series[pd.Timestamp]:
    """Returns when each bar opened, in UTC, to the microsecond; the layout is told by the first value."""
    column = table.columns["time"]
    first = column.index[0]
    if isinstance(column.dtype, pd.DatetimeTZDtype) or pd.api.types.is_datetime64_dtype(column):
        times = pd.to_datetime(column, utc=True)
    elif pd.api.types.is_numeric_dtype(column) or re.fullmatch(r"\d{9,19}(\.\d*)?", str(column[first]).strip()):
        times = pd.to_datetime(_epoch_us(column), unit="us", utc=True, errors="coerce")
    else:
        text = column.astype(str).str.strip()
        layout = next((t for t in _TIMES if re.fullmatch(t[0], text[first])), None)
        if layout is None:
            table.wrong_value(first, "time", _LAYOUTS)
        times = pd.to_datetime(text, format=layout[1], utc=True, errors="coerce")
        times = times if layout[2] is None else times + layout[2]
    if times.isna().any():
        label = times.index[times.isna()][0]
        table.wrong_value(label, "time", f"a time written as the first one, {column[first]!r:.40}")
    return times.dt.as_unit("us")


def _epoch_us(column: pd.Series[str]) -> pd.Series[float]:
    """Returns times since 1970 in microseconds, of seconds, milliseconds, microseconds or nanoseconds.

    The size tells which, without doubt from 1973 to 5138, and value by value: Binance's spot files went from
    milliseconds to microseconds with the year 2025.
    """
    numbers = pd.to_numeric(column, errors="coerce")
    scale = np.select([numbers < 1e11, numbers < 1e14, numbers < 1e17], [1e6, 1e3, 1.0], 1e-3)
    return (numbers * scale).round().where(numbers > 0)
