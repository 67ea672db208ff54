"""Every public layout of market bars gives the same frame; what else a file holds is refused by line and field.

The writers here are made from the publishers' descriptions, not from the reader.
"""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest

from trainables.data.bars import BAR_COLUMNS, read, spacing_us, times_us
from trainables.data.errors import DataError


class Bar(NamedTuple):
    at: datetime
    open: float
    high: float
    low: float
    close: float
    volume: float

    @property
    def ms(self) -> int:
        return int(self.at.timestamp()) * 1000


START = datetime(2024, 1, 2, tzinfo=UTC)
BARS = [
    Bar(START + timedelta(hours=i), 1.5 + i / 8, 1.75 + i / 8, 1.25 + i / 8, 1.625 + i / 8, 100.0 * i)
    for i in (0, 1, 2, 5, 6)  # the market was closed for two hours
]


def values(bar: Bar, separator: str = ",") -> str:
    return separator.join(str(x) for x in bar[1:])


def rows(header: str, row: Callable[[Bar], str], bars: list[Bar] | None = None) -> str:
    return header + "".join(row(bar) + "\n" for bar in bars or BARS)


def kline(bar: Bar, us: bool = False) -> str:
    scale = 1000 if us else 1
    return f"{bar.ms * scale},{values(bar)},{(bar.ms + 3_600_000) * scale - 1},1.0,7,0.5,0.5,0"


def mt5(bar: Bar) -> str:
    prices = "\t".join(str(x) for x in bar[1:5])
    return f"{bar.at:%Y.%m.%d\t%H:%M:%S}\t{prices}\t{bar.volume:.0f}\t0\t3"


def download(bar: Bar) -> str:
    return f"{bar.at.isoformat(sep=' ')},{bar.close},{bar.high},{bar.low},{bar.open},{bar.volume:.0f}"


KLINES = "open_time,open,high,low,close,volume,close_time,quote_volume,count,taker_buy_volume,taker_buy_quote,ignore\n"
MT5 = "<DATE>\t<TIME>\t<OPEN>\t<HIGH>\t<LOW>\t<CLOSE>\t<TICKVOL>\t<VOL>\t<SPREAD>\n"
YFINANCE = "Price,Close,High,Low,Open,Volume\nTicker,X,X,X,X,X\nDatetime,,,,,\n"
EST, NEW_YORK = timedelta(hours=-5), "-05:00"
LAYOUTS = {
    "dukascopy": rows("Gmt time,Open,High,Low,Close,Volume\n", lambda b: f"{b.at:%d.%m.%Y %H:%M:%S}.000,{values(b)}"),
    "dukascopy, Time": rows("Time,Open,High,Low,Close,Volume\n", lambda b: f"{b.at:%d.%m.%Y %H:%M:%S}.000,{values(b)}"),
    "binance": rows("", kline),
    "binance with header": rows(KLINES, kline),
    "binance, microseconds": rows("", lambda b: kline(b, us=True)),
    "binance, into 2025": rows("", kline, BARS[:2]) + rows("", lambda b: kline(b, us=True), BARS[2:]),
    "histdata": rows("", lambda b: f"{b.at + EST:%Y%m%d %H%M%S};{values(b, ';')}"),
    "metatrader 4": rows("", lambda b: f"{b.at:%Y.%m.%d,%H:%M},{values(b)}"),
    "metatrader 5": rows(MT5, mt5),
    "yfinance download": rows(YFINANCE, download),
    "yfinance history": rows(
        "Datetime,Open,High,Low,Close,Volume,Dividends,Stock Splits\n",
        lambda b: f"{b.at + EST:%Y-%m-%d %H:%M:%S}{NEW_YORK},{values(b)},0.0,0.0",
    ),
    "ISO 8601": rows("timestamp;open;high;low;close;volume\n", lambda b: f"{b.at:%Y-%m-%dT%H:%M:%SZ};{values(b, ';')}"),
    "epoch seconds": rows("time,open,high,low,close,volume\n", lambda b: f"{b.ms // 1000},{values(b)}"),
    "index without a name": rows(",open,high,low,close,volume\n", lambda b: f"{b.at:%Y-%m-%d %H:%M:%S},{values(b)}"),
    "newest first": rows(
        "date,open,high,low,close,volume\n", lambda b: f"{b.at:%Y-%m-%d %H:%M},{values(b)}", BARS[::-1]
    ),
    "twice": rows("", kline) + rows("", kline, BARS[2:]),
}


def assert_bars(bars: pd.DataFrame, wanted: list[Bar]) -> None:
    assert list(bars.columns) == list(BAR_COLUMNS)
    assert bars.index.tz is UTC or str(bars.index.tz) == "UTC"
    assert [t.to_pydatetime() for t in bars.index] == [bar.at for bar in wanted]
    assert bars.to_numpy().tolist() == [list(bar[1:]) for bar in wanted]
    assert all(dtype == np.float64 for dtype in bars.dtypes)


@pytest.mark.parametrize(
    ("layout", "how"),
    [
        *((name, "plain") for name in LAYOUTS),
        ("binance", "gz"),
        ("yfinance download", "crlf"),
        ("twice", "blank lines"),
    ],
)
def test_every_layout_gives_the_same_bars(tmp_path: Path, layout: str, how: str) -> None:
    path, text = tmp_path / "EURUSD.csv", LAYOUTS[layout]
    if how == "gz":
        path = tmp_path / "EURUSD.csv.gz"
        path.write_bytes(gzip.compress(text.encode()))
    else:
        text = text.replace("\n", "\r\n") if how == "crlf" else text
        path.write_bytes((text + "\n\n" if how == "blank lines" else text).encode())
    found = read(path)
    assert list(found) == ["EURUSD"]
    assert_bars(found["EURUSD"], BARS)


def test_layouts_that_are_not_plain_text(tmp_path: Path) -> None:
    frame = pd.DataFrame([bar[1:] for bar in BARS], columns=list(BAR_COLUMNS))
    times = pd.to_datetime([bar.ms for bar in BARS], unit="ms", utc=True)
    frame.set_index(times).to_parquet(tmp_path / "indexed.parquet")
    frame.set_index(times.tz_convert(None)).to_parquet(tmp_path / "naive.parquet")
    frame.assign(open_time=[bar.ms * 1_000_000 for bar in BARS]).to_parquet(tmp_path / "ns.parquet")
    (tmp_path / "utf16.csv").write_bytes(LAYOUTS["metatrader 5"].encode("utf-16"))
    (tmp_path / "bom.csv").write_bytes(LAYOUTS["dukascopy"].encode("utf-8-sig"))
    with zipfile.ZipFile(tmp_path / "zip.zip", "w") as archive:
        archive.writestr("DAT_ASCII_EURUSD_M1_2024.csv", LAYOUTS["histdata"])
        archive.writestr("DAT_ASCII_EURUSD_M1_2024.txt", "File Status Report")
    found = read(tmp_path)
    assert sorted(found) == ["bom", "indexed", "naive", "ns", "utf16", "zip"]
    for bars in found.values():
        assert_bars(bars, BARS)


def test_files_of_one_symbol_are_joined_and_a_column_parts_symbols(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "BTCUSDT-1h-2024-01.csv").write_text(rows("", kline, BARS[:3]))
    (folder / "BTCUSDT-1h-2024-02.csv").write_text(rows("", kline, BARS[2:]))
    (folder / "ETHUSDT-1h-2024-01-02.csv").write_text(rows("", kline, BARS[1:]))
    (folder / ".hidden.csv").write_text("no bars")
    found = read(folder)
    assert list(found) == ["BTCUSDT-1h", "ETHUSDT-1h"]
    assert_bars(found["BTCUSDT-1h"], BARS)
    assert_bars(found["ETHUSDT-1h"], BARS[1:])
    both = tmp_path / "both.csv"
    header = "Ticker,Date,Open,High,Low,Close,Volume\n"
    both.write_text(header + "".join(f"{t},{b.at:%Y-%m-%d %H:%M},{values(b)}\n" for b in BARS for t in ("B", "A")))
    found = read(both)
    assert list(found) == ["A", "B"]
    assert_bars(found["B"], BARS)


def test_adjusted_closes_scale_all_prices(tmp_path: Path) -> None:
    path = tmp_path / "stock.csv"
    path.write_text("Date,Open,High,Low,Close,Adj Close,Volume\n2024-01-02,8,12,6,10,5,70\n2024-01-03,5,6,4,5,5,140\n")
    assert read(path)["stock"].to_numpy().tolist() == [[4, 6, 3, 5, 70], [5, 6, 4, 5, 140]]


def test_a_volume_may_be_missing_and_rounding_is_put_right(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("time,open,high,low,close\n2024-01-02,1.0,1.19999,0.8,1.2\n")
    assert read(path)["x"].to_numpy().tolist() == [[1.0, 1.2, 0.8, 1.2, 0.0]]


GOOD = LAYOUTS["ISO 8601"]
LINE = "2024-01-02T03:00:00Z;1;2;1;2;3\n"
REFUSED: dict[str, tuple[str, str | bytes, str]] = {
    "text price": ("x.csv", GOOD + LINE.replace(";2;1", ";two;1"), r"x\.csv:7: high: found 'two'; allowed: a number"),
    "volume": ("x.csv", GOOD + LINE.replace(";3", ";-3"), r"x\.csv:7: volume: found '-3'; allowed: a number >= 0"),
    "high": ("x.csv", GOOD + LINE.replace(";2;1;2", ";1.5;1;2"), r"x\.csv:7: high: found 1\.5, below open or close"),
    "low": ("x.csv", GOOD + LINE.replace(";2;1;2", ";2;1.5;2"), r"x\.csv:7: low: found 1\.5, above open or close"),
    "time": ("x.csv", GOOD + "\n" + LINE.replace("2024-01-02T", "02/01/2024 "), r"x\.csv:8: time: found '02/01/2024 "),
    "time layout": ("x.csv", "time,open,high,low,close\n1/2/2024,1,1,1,1\n", r"x\.csv:2: time: found .*ISO"),
    "another bar": ("x.csv", GOOD + LINE.replace("T03", "T02"), r"x\.csv:7: time: found a second, different bar"),
    "more fields": ("x.csv", GOOD + LINE.replace(";3", ";3;4"), r"x\.csv:7: found 7 columns; allowed: 6"),
    "short header": ("x.csv", "Date,b\n1,2,3\n", r"x\.csv:2: found 3 columns under a header of 2"),
    "no close": ("x.csv", "date,open,high,low\n", r"x\.csv: found no bar after the header"),
    "no column": ("x.csv", "date,open,high,low\n1,2,3,4\n", r"x\.csv: found columns date, open, high, low; .* close"),
    "unknown layout": ("x.csv", "1,2,3\n", r"x\.csv:1: found 3 columns without a header, the first '1'; .* Binance's"),
    "two tickers": ("x.csv", YFINANCE.replace("X,X\n", "X,Y\n") + "a", r"x\.csv:2: found tickers X, Y; allowed: one"),
    "empty": ("x.csv", "", r"x\.csv: found an empty first line; allowed: a header or a bar"),
    "not text": ("x.csv", GOOD.encode() + b"\xe9", r"x\.csv:7: found byte 0xe9; allowed: UTF-8 or UTF-16 text"),
    "torn gz": ("x.csv.gz", gzip.compress(GOOD.encode())[:-9], r"x\.csv\.gz: found .*end-of-stream"),
    "parquet": ("x.parquet", b"PAR1", r"x\.parquet: found .*; allowed: a whole parquet file"),
    "suffix": ("x.xlsx", b"", r"x\.xlsx: found suffix '\.xlsx'; allowed: \.csv, "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_by_file_line_and_field(tmp_path: Path, case: str) -> None:
    name, content, message = REFUSED[case]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        read(path)


def test_refuses_folders_and_parts_that_disagree(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file; allowed: a file or a folder of market bars"):
        read(tmp_path / "gone.csv")
    with pytest.raises(DataError, match=r"found no file of market bars; allowed: files ending in \.csv"):
        read(tmp_path)
    (tmp_path / "X-2024-01.csv").write_text(rows("", kline))
    (tmp_path / "X-2024-02.csv").write_text(rows("", kline, [BARS[0]._replace(volume=1.0)]))
    with pytest.raises(DataError, match=r"X: time: found different bars of 2024-01-02 00:00:00\+00:00 in two files"):
        read(tmp_path)


def test_spacing_is_that_of_most_bars_and_bars_of_two_lengths_are_refused(tmp_path: Path) -> None:
    hours = pd.date_range("2024-01-01", periods=300, freq="h", tz="UTC")
    bars = pd.DataFrame(1.0, index=hours, columns=list(BAR_COLUMNS))
    assert spacing_us(tmp_path, "x", bars.drop(hours[5:40])) == 3_600_000_000
    assert np.diff(times_us(bars)).tolist() == [3_600_000_000] * 299
    minutes = pd.date_range("2024-01-01", periods=6, freq="min", tz="UTC")
    mixed = pd.concat([bars, bars.iloc[1:6].set_index(minutes[1:])]).sort_index()
    with pytest.raises(DataError, match="6 of 304 bars closer than their median distance, 0 days 01:00:00"):
        spacing_us(tmp_path, "x", mixed)
    with pytest.raises(DataError, match="x: found one bar"):
        spacing_us(tmp_path, "x", bars.iloc[:1])
