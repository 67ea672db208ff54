"""The sequences that need no download: spoken digits, written once into a tree of .npy files, read as any other.

3,000 digits by 6 speakers, 13 mel-frequency cepstral coefficients (MFCC), 6 to 92 steps: the Free Spoken Digit Dataset.
For each digit 240 are for training and 60 for validation. The source does not say who speaks, so both parts have the
same six voices; a split by speaker is harder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainables.data import npy_sequences
from trainables.data.cache import written_once

DIGITS = Path(__file__).parent / "samples" / "fsdd_digits_f16.npz"
LAYOUT = 1
"""Part of the cache's key: a tree that is written in another way gets another number."""


def folder() -> Path:
    """Returns the folder of the cache with the digits, under a name with a hash of their source.

    It is written where it does not exist: 3,000 files take 0.5 s, once. Raises DataError.
    """
    digest = hashlib.sha256(DIGITS.read_bytes()).hexdigest()[:12]
    return written_once(f"digits-{digest}-{LAYOUT}", lambda root: npy_sequences.write(root, _digits()))


def _digits() -> Iterator[tuple[str, str, str, NDArray[np.floating]]]:
    """Yields split, label, id and values; a fifth of each digit, drawn once and for all, is for validation."""
    with np.load(DIGITS, allow_pickle=False) as found:
        values, digits, lengths = found["X"], found["y"], found["lengths"]
    held_out = set[int]()
    for digit in range(10):
        held_out.update(np.random.default_rng([0, digit]).permutation(np.flatnonzero(digits == digit))[:60].tolist())
    for index, part in enumerate(np.split(values, np.cumsum(lengths.astype(np.int64))[:-1])):
        yield "val" if index in held_out else "train", str(digits[index]), f"{index:04d}", part
