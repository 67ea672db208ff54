"""The embedded digits become a tree of .npy files with the numbers, classes and splits they had."""

from collections import Counter

import numpy as np

from trainables.data import spoken_digits
from trainables.data.npy_sequences import load, read_splits


def test_digits_have_the_sizes_stated_and_come_back_as_they_were(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = spoken_digits.folder()
    assert root == spoken_digits.folder()
    assert [folder.name.rsplit("-", 2)[0] for folder in (tmp_path / "cardtune").iterdir()] == ["digits"]
    train, val = read_splits(root, None, 0)
    assert Counter(r.label for r in train) == {str(digit): 240 for digit in range(10)}
    assert Counter(r.label for r in val) == {str(digit): 60 for digit in range(10)}
    assert {r.channels for r in train} == {13}
    assert (min(r.steps for r in train + val), max(r.steps for r in train + val)) == (6, 92)
    with np.load(spoken_digits.DIGITS) as source:
        values, digits, ends = source["X"], source["y"], np.cumsum(source["lengths"].astype(int))
    for recording in (train[0], train[-1], val[100]):
        index = int(recording.path.stem)
        np.testing.assert_array_equal(load(recording), values[ends[index] - recording.steps : ends[index]])
        assert recording.label == str(digits[index])
