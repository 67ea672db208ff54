"""Tables of market bars as published, before anything is known of their values: which column holds what.

| layout         | file                        | told by                                               |
|----------------|-----------------------------|-------------------------------------------------------|
| Dukascopy      | .csv                        | header with `Gmt time` or `Time`, dd.mm.yyyy          |
| Binance klines | .csv                        | 12 columns, a header or none, epoch ms or us          |
| HistData ASCII | .csv                        | no header, `20240102 170000;...`, EST without summer  |
| MetaTrader 4   | .csv                        | no header, `2024.01.02,17:00,...`                     |
| MetaTrader 5   | .csv                        | header `<DATE> <TIME> <OPEN> ...`, parted by tabs     |
| yfinance       | .csv                        | header with `Date`, or three lines from `Price,` on   |
| any other      | .csv .txt .parquet          | columns open, high, low, close and one of the time in |
|                |                             | ISO 8601 or since 1970                                |

Text may be gzipped, or the one .csv in a .zip, as Binance and HistData publish it. Times without an offset are taken
as UTC, a broker's too: that shifts its days and leaks nothing.
"""

from __future__ import annotations

import gzip
import io
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd

from trainables.data.errors import wrong

BAR_SUFFIXES = (".csv", ".txt", ".csv.gz", ".txt.gz", ".csv.zip", ".zip", ".parquet")
PRICES = ("open", "high", "low", "close")

_BAR = ["time", "open", "high", "low", "close", "volume"]
_KLINES = [*_BAR, "close_time", "quote_volume", "trades", "taker_base", "taker_quote", "ignore"]
_NAMES = {  # canonical name -> how layouts call it, the first found counts
    "time": ("gmt time", "datetime", "timestamp", "open time", "date", "time", "time (utc)", ""),
    "open": ("open",),
    "high": ("high",),
    "low": ("low",),
    "close": ("close",),
    "volume": ("volume", "tickvol", "vol"),  # MetaTrader 5 has both; `vol` is 0 where trades are not reported
    "adjusted": ("adj close", "adjusted close"),
    "symbol": ("ticker", "symbol"),
}


@dataclass(frozen=True)
class Table:
    """Columns time, open, high, low, close and, where the file has them, volume, adjusted and symbol; not yet checked.

    The row labelled `i` stands in line `first + i` of a text, or is row `first + i` of another file.
    """

    path: Path
    columns: pd.DataFrame
    first: int = 1
    in_lines: bool = False

    def wrong(self, label: int, field: str, found: str, allowed: str) -> NoReturn:
        """Raises DataError for the row labelled so."""
        place = f":{self.first + label}" if self.in_lines else f", row {self.first + label}"
        raise wrong(f"{self.path}{place}", found, allowed, field=field)

    def wrong_value(self, label: int, field: str, allowed: str) -> NoReturn:
        """Raises DataError for the value itself."""
        value = self.columns[field][label]
        self.wrong(label, field, f"{value!r:.60}" if isinstance(value, str) else f"{value}", allowed)


def read_table(path: Path) -> Table:
    """Returns the file's table; raises DataError where its layout is none of those above."""
    if not path.is_file():
        raise wrong(path, "no such file", "a file or a folder of market bars")
    if not path.name.endswith(BAR_SUFFIXES):
        raise wrong(path, f"suffix {path.suffix!r}", ", ".join(BAR_SUFFIXES))
    try:
        return _parquet(path) if path.suffix == ".parquet" else _csv(path, _text(path))
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise wrong(path, str(error).strip(), "a file that can be read to its end") from None


def _text(path: Path) -> str:
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.lower().endswith(".csv")]
            if len(names) != 1:
                raise wrong(path, f"{len(names)} .csv files in the archive", "one")
            raw = archive.read(names[0])
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"  # the first is MetaTrader's
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise wrong(f"{path}:{line}", f"byte 0x{raw[error.start]:02x}", "UTF-8 or UTF-16 text") from None


def _csv(path: Path, text: str) -> Table:
    lines = [line.rstrip("\r") for line in text[:4096].split("\n", 3)[:3]]
    if not text.strip() or not lines[0].strip():
        raise wrong(path, "an empty first line", "a header or a bar")
    separator = max(";\t,", key=lines[0].count)
    cells = [line.split(separator) for line in lines]
    has_header = re.search("[A-Za-z]{2}", lines[0]) is not None
    skipped = int(has_header)
    if has_header and cells[0][0] == "Price" and len(cells) == 3:  # yfinance.download: prices, tickers, "Date"
        tickers = sorted({cell for cell in cells[1][1:] if cell})
        if len(tickers) != 1:
            raise wrong(f"{path}:2", f"tickers {', '.join(tickers)}", "one ticker a file")
        cells[0][0], skipped = cells[2][0], 3
    rest = text.split("\n", skipped)[-1]
    if not rest.strip():
        raise wrong(path, "no bar after the header", "at least one")
    header = cells[0] if has_header else _headerless(path, cells[0])
    table = _cells(path, rest, separator, first=skipped + 1)
    if len(header) != table.shape[1]:
        found = f"{table.shape[1]} columns under a header of {len(header)}"
        raise wrong(f"{path}:{skipped + 1}", found, "as many as the header has")
    return Table(path, _named(path, table, header), first=skipped + 1, in_lines=True)


def _cells(path: Path, text: str, separator: str, first: int) -> pd.DataFrame:
    """Returns the cells as text, by line from 0; blank lines are left out, and counted."""
    try:
        table = pd.read_csv(
            io.StringIO(text), sep=separator, header=None, dtype=str, keep_default_na=False, skip_blank_lines=False
        )
    except pd.errors.ParserError as error:
        more = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", str(error))
        if more is None:
            raise wrong(path, str(error).strip(), "a table of text") from None
        line = first - 1 + int(more[2])
        raise wrong(f"{path}:{line}", f"{more[3]} columns", f"{more[1]}, as the first bar has") from None
    return table[(table.fillna("") != "").any(axis=1)]


def _headerless(path: Path, cells: list[str]) -> list[str]:
    """Returns the column names of a text without a header, told by its first line."""
    if len(cells) == len(_KLINES) and cells[0].isdigit():
        return _KLINES
    if len(cells) == 6 and re.fullmatch(r"\d{8} \d{6}", cells[0]):
        return _BAR
    if len(cells) == 7 and re.fullmatch(r"\d{4}\.\d\d\.\d\d", cells[0]) and re.fullmatch(r"\d\d:\d\d", cells[1]):
        return ["date", *_BAR]
    allowed = "a header, Binance's 12 columns, HistData's 6 or MetaTrader's 7"
    raise wrong(f"{path}:1", f"{len(cells)} columns without a header, the first {cells[0]!r:.40}", allowed)


def _named(path: Path, table: pd.DataFrame, header: list[str]) -> pd.DataFrame:
    """Returns the columns that are read under their canonical names."""
    known = [re.sub(r"[<>\"_ ]+", " ", cell).strip().lower() for cell in header]
    table = table.set_axis(range(table.shape[1]), axis=1)
    kept: dict[str, Any] = {}
    for name, words in _NAMES.items():
        at = next((known.index(word) for word in words if word in known), None)
        if at is not None:
            kept[name] = table[at]
        elif name == "time" or name in PRICES:
            allowed = f"a column {' or '.join(word for word in words if word)}"
            raise wrong(path, f"columns {', '.join(header):.200}", allowed)
    if {"date", "time"} <= set(known):
        kept["time"] = table[known.index("date")] + " " + table[known.index("time")]
    return pd.DataFrame(kept)


def _parquet(path: Path) -> Table:
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are of these two
        raise wrong(path, str(error).strip(), "a whole parquet file") from None
    if isinstance(table.index, pd.DatetimeIndex):
        table = table.rename_axis("datetime").reset_index()
    if table.empty:
        raise wrong(path, "no bar", "at least one")
    return Table(path, _named(path, table.reset_index(drop=True), [str(name) for name in table.columns]))
