"""Sets of sequences that do not come as .npy files, written once into such a tree, which is then read as any other.

| set             | what                                                                   | split                 |
|-----------------|------------------------------------------------------------------------|-----------------------|
| digits          | 3,000 spoken digits by 6 speakers, 13 mel-frequency cepstral           | 240 of each digit to  |
|                 | coefficients (MFCC), 6 to 92 steps: Free Spoken Digit Dataset          | train, 60 to validate |
| japanese_vowels | 640 vowels of 9 speakers to tell apart, 12 cepstral coefficients, 7 to | the published one,    |
|                 | 29 steps (Kudo, Toyama and Shimbo 1999)                                | 270 and 370           |

The digits' source does not say who speaks, so both parts have the same six voices; a split by speaker is harder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainables.data import npy_sequences
from trainables.data.cache import written_once
from trainables.data.errors import DataError

SAMPLES_DIR = Path(__file__).parent / "samples"
DIGITS, VOWELS = SAMPLES_DIR / "fsdd_digits_f16.npz", SAMPLES_DIR / "japanese_vowels.npz"
EMBEDDED = {"digits": DIGITS, "japanese_vowels": VOWELS}
LAYOUT = 1
"""Part of the cache's key: a tree that is written in another way gets another number."""

Sequences = Iterator[tuple[str, str, str, NDArray[np.floating]]]
"""Split, label, id and values (time, channel), as `npy_sequences.write` takes them."""


def tree(data: str | None) -> Path:
    """Returns the folder of .npy files: of a set named above (None is digits), or the folder itself.

    What has to be written goes to the cache, under a name with a hash of its source: 3,000 files take 0.5 s, once.
    Raises DataError.
    """
    name = str(data or "digits")
    if name in EMBEDDED:
        digest = hashlib.sha256(EMBEDDED[name].read_bytes()).hexdigest()[:12]
        sequences = _digits() if name == "digits" else _vowels()
        return written_once(f"{name}-{digest}-{LAYOUT}", lambda folder: npy_sequences.write(folder, sequences))
    folder = Path(name)
    if not folder.is_dir():
        raise DataError(f"{name}: found no such folder; allowed: one of .npy files, or {', '.join(EMBEDDED)}")
    return folder


def _digits() -> Sequences:
    """Yields the spoken digits; a fifth of each, drawn once and for all, is for validation."""
    with np.load(DIGITS, allow_pickle=False) as found:
        values, digits, lengths = found["X"], found["y"], found["lengths"]
    held_out = set[int]()
    for digit in range(10):
        held_out.update(np.random.default_rng([0, digit]).permutation(np.flatnonzero(digits == digit))[:60].tolist())
    for index, part in enumerate(_cut(values, lengths)):
        yield "val" if index in held_out else "train", str(digits[index]), f"{index:04d}", part


def _vowels() -> Sequences:
    with np.load(VOWELS, allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    for split, end in (("train", "tr"), ("test", "te")):
        for index, part in enumerate(_cut(arrays[f"X{end}"], arrays[f"l{end}"])):
            yield split, str(arrays[f"y{end}"][index] + 1), f"{index:04d}", part  # the archive counts speakers from 1


def _cut(values: NDArray[np.floating], lengths: NDArray[np.integer]) -> list[NDArray[np.floating]]:
    return np.split(values, np.cumsum(lengths.astype(np.int64))[:-1])
