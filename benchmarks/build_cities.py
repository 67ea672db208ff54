"""Remakes trainables/data/samples/world_cities_latlng.npz from the package it was taken from.

    pip download bokeh-sampledata==2026.1 --no-deps               # 13 MB
    unzip bokeh_sampledata-2026.1-py3-none-any.whl bokeh_sampledata/_data/world_cities.csv.gz
    python -m benchmarks.build_cities bokeh_sampledata/_data/world_cities.csv.gz

Of each of its 45,065 cities latitude and longitude are kept, in its order, as float32 degrees. Both ends are checked by
sha256: the file that goes in, and the numbers that come out.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from pathlib import Path

import numpy as np

from benchmarks.build_samples import checked
from trainables.data.tours import CITIES_FILE

CITIES_SHA256 = "ea004b67a5db5d8d8ebe12880fae16cd8e8547ad89190baa2eaac5de43b6ef23"
NUMBERS_SHA256 = "c8c0dedc331284799f7cdb6a4d5e54bcead0f873681bb53d331b3a5e1a32a5bc"


def main() -> None:
    """Writes the sample, or says which sha256 is wrong."""
    parser = argparse.ArgumentParser(description="Remakes the embedded cities from bokeh-sampledata's.")
    parser.add_argument("cities", type=Path, help="world_cities.csv.gz of bokeh-sampledata 2026.1")
    parser.add_argument("--out", type=Path, default=CITIES_FILE)
    asked = parser.parse_args()
    packed = checked(str(asked.cities), asked.cities.read_bytes(), CITIES_SHA256)
    rows = csv.DictReader(gzip.decompress(packed).decode().splitlines())
    degrees = np.array([(float(row["lat"]), float(row["lng"])) for row in rows], dtype="<f4")
    checked("the numbers made of it", degrees.tobytes(), NUMBERS_SHA256)
    np.savez_compressed(asked.out, ll=degrees)
    print(f"{asked.out}: {len(degrees)} cities")


if __name__ == "__main__":
    main()
