"""The embedded sets become trees of .npy files with the numbers, classes and splits they had."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from trainables.data import npy_sequences
from trainables.data.errors import DataError
from trainables.data.npy_sequences import load, read_splits
from trainables.data.sequence_sets import DIGITS, VOWELS, tree


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cardtune"


def test_digits_have_the_sizes_stated_and_come_back_as_they_were(cache: Path) -> None:
    root = tree(None)
    assert root == tree("digits")
    assert [folder.name.rsplit("-", 2)[0] for folder in cache.iterdir()] == ["digits"]
    train, val = read_splits(root, None, 0)
    assert Counter(r.label for r in train) == {str(digit): 240 for digit in range(10)}
    assert Counter(r.label for r in val) == {str(digit): 60 for digit in range(10)}
    assert {r.channels for r in train} == {13}
    assert (min(r.steps for r in train + val), max(r.steps for r in train + val)) == (6, 92)
    with np.load(DIGITS) as source:
        values, digits, ends = source["X"], source["y"], np.cumsum(source["lengths"].astype(int))
    for recording in (train[0], train[-1], val[100]):
        index = int(recording.path.stem)
        np.testing.assert_array_equal(load(recording), values[ends[index] - recording.steps : ends[index]])
        assert recording.label == str(digits[index])


def test_vowels_have_the_published_split() -> None:
    train, test = read_splits(tree("japanese_vowels"), None, 0)
    assert Counter(r.label for r in train) == {str(speaker): 30 for speaker in range(1, 10)}
    assert [Counter(r.label for r in test)[str(s)] for s in range(1, 10)] == [31, 35, 88, 44, 29, 24, 40, 50, 29]
    assert (min(r.steps for r in train), max(r.steps for r in train)) == (7, 26)
    first = next(r for r in train if r.path.stem == "0000")
    with np.load(VOWELS) as source:
        np.testing.assert_array_equal(load(first), source["Xtr"][:20])


def test_a_folder_of_ones_own_is_read_where_it_lies(tmp_path: Path, cache: Path) -> None:
    npy_sequences.write(tmp_path / "own", [("train", "a", "1", np.ones((1, 1)))])
    assert tree(str(tmp_path / "own")) == tmp_path / "own"
    assert not cache.exists()
    with pytest.raises(DataError, match=r"digit: found no such folder; allowed: .* or digits, japanese_vowels"):
        tree("digit")
