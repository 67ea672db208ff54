"""Bars of .csv files, as the header names their columns; what else a file holds is refused by line and field."""

import gzip
from datetime import UTC, datetime, timedelta
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


START = datetime(2024, 1, 2, tzinfo=UTC)
BARS = [
    Bar(START + timedelta(hours=i), 1.5 + i / 8, 1.75 + i / 8, 1.25 + i / 8, 1.625 + i / 8, 100.0 * i)
    for i in (0, 1, 2, 5, 6)  # the market was closed for two hours
]
HEADER = "time,open,high,low,close,volume\n"


def rows(layout: str, bars: list[Bar] | None = None) -> str:
    """Returns the bars as lines, their times in a layout of strftime."""
    return "".join(f"{b.at:{layout}},{','.join(str(x) for x in b[1:])}\n" for b in bars or BARS)


ISO = HEADER + rows("%Y-%m-%d %H:%M:%S")
SHUFFLED = "Close,Volume,date,Low,High,Open,Dividends\n" + "".join(
    f"{b.close},{b.volume},{b.at:%Y-%m-%dT%H:%MZ},{b.low},{b.high},{b.open},0.0\n" for b in BARS
)
FILES = {
    "ISO 8601": ISO,
    "Dukascopy": "Gmt time,Open,High,Low,Close,Volume\n" + rows("%d.%m.%Y %H:%M:%S.000"),
    "columns in another order, and more": SHUFFLED,
    "with an offset": HEADER
    + rows("%Y-%m-%d %H:%M:%S-05:00", [b._replace(at=b.at - timedelta(hours=5)) for b in BARS]),
    "newest first": HEADER + rows("%Y-%m-%d %H:%M", BARS[::-1]),
    "twice": ISO + rows("%Y-%m-%d %H:%M:%S", BARS[2:]),
    "Windows": ISO.replace("\n", "\r\n"),
    "blank lines": ISO.replace("\n", "\n\n", 3) + "\n\n",
    "byte order mark": "\ufeff" + ISO,
}


def assert_bars(bars: pd.DataFrame, wanted: list[Bar]) -> None:
    assert list(bars.columns) == list(BAR_COLUMNS)
    assert str(bars.index.tz) == "UTC"
    assert [t.to_pydatetime() for t in bars.index] == [bar.at for bar in wanted]
    assert bars.to_numpy().tolist() == [list(bar[1:]) for bar in wanted]
    assert all(dtype == np.float64 for dtype in bars.dtypes)


@pytest.mark.parametrize("name", FILES)
def test_every_file_gives_the_same_bars_also_zipped(tmp_path, name):
    content = FILES[name].encode()
    (tmp_path / "EURUSD.csv").write_bytes(content)
    (tmp_path / "GBPUSD.csv.gz").write_bytes(gzip.compress(content))
    (tmp_path / ".hidden.csv").write_text("no bars")
    found = read(tmp_path)
    assert list(found) == ["EURUSD", "GBPUSD"]
    for bars in found.values():
        assert_bars(bars, BARS)


def test_a_column_parts_symbols_and_each_is_in_one_file(tmp_path):
    lines = "".join(f"{t},{line}\n" for line in rows("%Y-%m-%d %H:%M").splitlines() for t in ("B", "A"))
    (tmp_path / "both.csv").write_text(f"Ticker,{HEADER}{lines}")
    found = read(tmp_path / "both.csv")
    assert list(found) == ["A", "B"]
    assert_bars(found["B"], BARS)
    (tmp_path / "A.csv").write_text(ISO)
    with pytest.raises(DataError, match=r"both\.csv: found bars of A"):
        read(tmp_path)


def test_adjusted_closes_scale_all_prices(tmp_path):
    path = tmp_path / "stock.csv"
    path.write_text("Date,Open,High,Low,Close,Adj Close,Volume\n2024-01-02,8,12,6,10,5,70\n2024-01-03,5,6,4,5,5,140\n")
    assert read(path)["stock"].to_numpy().tolist() == [[4, 6, 3, 5, 70], [5, 6, 4, 5, 140]]


def test_a_volume_may_be_missing_and_rounding_is_put_right(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("time,open,high,low,close\n2024-01-02,1.0,1.19999,0.8,1.2\n")
    assert read(path)["x"].to_numpy().tolist() == [[1.0, 1.2, 0.8, 1.2, 0.0]]


LINE = "2024-01-02 03:00:00,1,2,1,2,3\n"
REFUSED: dict[str, tuple[str, str | bytes, str]] = {
    "text price": ("x.csv", ISO + LINE.replace(",2,1", ",two,1"), r"x\.csv:7: high: found 'two'; allowed: a number"),
    "volume": ("x.csv", ISO + LINE.replace(",3", ",-3"), r"x\.csv:7: volume: found '-3'; allowed: a number >= 0"),
    "high": ("x.csv", ISO + LINE.replace(",2,1,2", ",1.5,1,2"), r"x\.csv:7: high: found 1\.5, below"),
    "low": ("x.csv", ISO + LINE.replace(",2,1,2", ",2,1.5,2"), r"x\.csv:7: low: found 1\.5, above"),
    "time": ("x.csv", ISO + "\n" + LINE.replace("2024-01-02", "02/01/2024"), r"x\.csv:8: time: found '02/01/2024 03"),
    "time layout": ("x.csv", "time,open,high,low,close\n1/2/2024,1,1,1,1\n", r"x\.csv:2: time: .*ISO .*; try: docs"),
    "epoch": ("x.csv", "time,open,high,low,close\n1704153600,1,1,1,1\n", r"x\.csv:2: time: found '1704153600'"),
    "another bar": ("x.csv", ISO + LINE.replace(" 03", " 02"), r"x\.csv:7: time: found a second, different bar"),
    "fewer fields": ("x.csv", ISO + "2024-01-02 03:00:00,1,2\n", r"x\.csv:7: low: found ''"),
    "more fields": ("x.csv", ISO + LINE.replace(",3", ",3,4"), r"x\.csv: found .*6 fields in line 7"),
    "short header": ("x.csv", "Date,b\n1,2,3\n", r"x\.csv: found .*2 fields in line 2"),
    "no bar": ("x.csv", HEADER, r"x\.csv: found no bar"),
    "no column": ("x.csv", "date,open,high,low\n1,2,3,4\n", r"x\.csv:1: found columns date, open, high, low; .* close"),
    "no header": ("x.csv", "1,2,3\n", r"x\.csv:1: found columns 1, 2, 3; allowed: a header with time or .*; try: docs"),
    "empty": ("x.csv", "", r"x\.csv: found No columns"),
    "not text": ("x.csv", ISO.encode() + b"\xe9", r"x\.csv: found .* byte 0xe9"),
    "torn gz": ("x.csv.gz", gzip.compress(ISO.encode())[:-9], r"x\.csv\.gz: found "),
    "suffix": ("x.parquet", b"PAR1", r"x\.parquet: found suffix '\.parquet'; allowed: \.csv or \.csv\.gz; try: docs/"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_by_file_line_and_field(tmp_path, case):
    name, content, message = REFUSED[case]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        read(path)


def test_refuses_a_place_without_bars(tmp_path):
    with pytest.raises(DataError, match=r"gone\.csv: .*no such file"):
        read(tmp_path / "gone.csv")
    with pytest.raises(DataError, match=r"allowed: files ending in \.csv or \.csv\.gz"):
        read(tmp_path)


def test_spacing_is_that_of_most_bars_and_no_other(tmp_path):
    hours = pd.date_range("2024-01-01", periods=300, freq="h", tz="UTC")
    bars = pd.DataFrame(1.0, index=hours, columns=list(BAR_COLUMNS))
    assert spacing_us(tmp_path, "x", bars.drop(hours[5:40])) == 3_600_000_000
    assert np.diff(times_us(bars)).tolist() == [3_600_000_000] * 299
    minutes = pd.date_range("2024-01-01", periods=6, freq="min", tz="UTC")
    mixed = pd.concat([bars, bars.iloc[1:6].set_index(minutes[1:])]).sort_index()
    with pytest.raises(DataError, match="6 of 304 bars"):
        spacing_us(tmp_path, "x", mixed)
    with pytest.raises(DataError, match="x: found one bar"):
        spacing_us(tmp_path, "x", bars.iloc[:1])
