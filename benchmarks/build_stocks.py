"""Remakes trainables/data/samples/daily_stocks.csv.gz from the package it was taken from.

    pip download bokeh-sampledata==2026.1 --no-deps               # 13 MB
    unzip bokeh_sampledata-2026.1-py3-none-any.whl bokeh_sampledata/_data/stocks.csv.gz
    python -m benchmarks.build_stocks bokeh_sampledata/_data/stocks.csv.gz

Three of its five series are kept, those that last from 2000 to 2013, each line as it was. Both ends are checked by
sha256: the file that goes in, and the text that comes out (before compression, which differs from one zlib to another).
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

from benchmarks.build_samples import checked
from trainables.workloads.temporal import STOCKS_FILE

STOCKS_SHA256 = "5abadf99b2d394f920120a27de6f0df129859d71d4cfb0bf661bcc99446ab1fd"
TEXT_SHA256 = "feb24b3d3975f99cc675efd9532121d49628455b68bfb80549d73594fb8b8e55"
KEPT = (b"Ticker", b"AAPL", b"IBM", b"MSFT")


def kept_lines(text: bytes) -> bytes:
    """Returns the header and the lines of the series that are kept."""
    return b"".join(line for line in text.splitlines(keepends=True) if line.split(b",")[0] in KEPT)


def main() -> None:
    """Writes the sample, or says which sha256 is wrong."""
    parser = argparse.ArgumentParser(description="Remakes the embedded daily stocks from bokeh-sampledata's.")
    parser.add_argument("stocks", type=Path, help="stocks.csv.gz of bokeh-sampledata 2026.1")
    parser.add_argument("--out", type=Path, default=STOCKS_FILE)
    asked = parser.parse_args()
    stocks = checked(str(asked.stocks), asked.stocks.read_bytes(), STOCKS_SHA256)
    text = checked("the text made of it", kept_lines(gzip.decompress(stocks)), TEXT_SHA256)
    asked.out.write_bytes(gzip.compress(text, 9, mtime=0))
    print(f"{asked.out}: {len(text)} bytes of text")


if __name__ == "__main__":
    main()
