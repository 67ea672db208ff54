"""Labelled sequences of unequal length in .npy files, one recording a file, or in one HDF5 file (`h5_sequences`).

    root/train/<label>/<id>.npy           and root/val/... or root/test/...

Each file holds one array (time, channel) of real numbers; time differs from file to file, the channels are the same
everywhere. Files are mapped into memory and never unpickled, so reading a folder runs no code of it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainables.data import h5_sequences
from trainables.data.errors import OTHER_LAYOUTS, DataError, wrong

SPLITS = ("train", "val", "test")
STATISTICS_FILES = 4096
"""Most files read for mean and deviation, evenly spread: a set of any size is begun within seconds."""
_ARRAY = "an array (time, channel) of real numbers, as numpy.save or h5py writes it"
_One = TypeVar("_One")


@dataclass(frozen=True)
class Recording:
    """An array: its file or its place in one, the class it belongs to, its steps in time and channels, at least 1."""

    path: Path
    label: str
    steps: int
    channels: int


def read_splits(root: Path, val_frac: float | None, seed: int) -> tuple[list[Recording], list[Recording]]:
    """Returns the recordings to train on and those to validate on, each sorted by label and file.

    Without `val_frac` the second part is the folder's own: its val split, else its test split. With it (between 0 and
    1) so much of each label's training recordings is held out, drawn by `seed`, and val and test are left alone.
    Every array's header is read, its numbers are not. Raises DataError.
    """
    if root.is_file():
        parts = h5_sequences.places(root, SPLITS)
    else:
        files = {split: (root / split).glob("[!.]*/[!.]*.npy") for split in SPLITS}
        parts = {split: [(file, file.parent.name) for file in found] for split, found in files.items()}
    train, own = parts["train"], parts["val"] or parts["test"]
    if not train:
        found = ", ".join(sorted(entry.name for entry in root.iterdir())[:8]) if root.is_dir() else "no such folder"
        raise wrong(root, found or "nothing", "train/<label>/<id>.npy", remedy=OTHER_LAYOUTS)
    if val_frac is not None:
        train, own = _held_out(root, train, val_frac, seed)
    elif not own:
        raise wrong(root, "no recording in val or test", "one of them, or val_frac to hold some out")
    recordings = [[_header(path, label) for path, label in sorted(part, key=_by_label)] for part in (train, own)]
    _check(root, *recordings)
    return recordings[0], recordings[1]


def load(recording: Recording) -> NDArray[np.float32]:
    """Returns the recording's numbers, float32, shape (time, channel); raises DataError for one that is not finite."""
    try:
        with np.errstate(over="ignore"):  # what a float32 cannot hold is infinite, and refused below
            values = np.array(_mapped(recording.path)[...], dtype=np.float32, order="C")
    except OSError as error:  # of HDF5, which reads the numbers here
        raise DataError(f"{recording.path}: found {error}; allowed: {_ARRAY}") from None
    if values.shape != (recording.steps, recording.channels):
        was = (recording.steps, recording.channels)
        raise DataError(f"{recording.path}: found shape {values.shape}; allowed: {was}, as when the folder was read")
    if not np.isfinite(values).all():
        step, channel = np.argwhere(~np.isfinite(values))[0]
        bad = f"{values[step, channel]} at step {step}, channel {channel}"
        raise DataError(f"{recording.path}: found {bad}; allowed: finite numbers within the range of float32")
    return values


def some(whole: list[_One], limit: int | None, seed: int) -> list[_One]:
    """Returns at most `limit` of a set, drawn by `seed`, in their order."""
    if limit is None or limit >= len(whole):
        return whole
    chosen = random.Random(seed).sample(range(len(whole)), limit)
    return [whole[i] for i in sorted(chosen)]


def statistics(recordings: Sequence[Recording]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns each channel's mean and standard deviation over all steps, shape (channel,); a constant's is 1."""
    files = recordings[:: -(-len(recordings) // STATISTICS_FILES)]
    near = load(files[0]).mean(axis=0, dtype=np.float64)  # sums of squares around 0 would lose a small deviation
    count, total, squares = 0, np.zeros_like(near), np.zeros_like(near)
    for recording in files:
        values = load(recording) - near
        count, total, squares = count + len(values), total + values.sum(axis=0), squares + (values**2).sum(axis=0)
    mean = total / count
    scale = np.sqrt(np.maximum(squares / count - mean**2, 0.0))
    scale[scale <= 1e-6 * np.abs(near)] = 1.0  # what float32 leaves of a constant
    return (near + mean).astype(np.float32), scale.astype(np.float32)


def write(root: Path, sequences: Iterable[tuple[str, str, str, NDArray[np.floating]]]) -> None:
    """Writes (split, label, id, array) as root/<split>/<label>/<id>.npy in float32."""
    for split, label, name, values in sequences:
        folder = root / split / label
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{name}.npy", np.asarray(values, dtype=np.float32), allow_pickle=False)


def _held_out(
    root: Path, train: Sequence[tuple[Path, str]], frac: float, seed: int
) -> tuple[list[tuple[Path, str]], list[tuple[Path, str]]]:
    """Returns the rest and the part held out; of a label with two recordings or more at least one is in each."""
    if not 0.0 < frac < 1.0:
        raise DataError(f"{root}: found val_frac={frac}; allowed: > 0 and < 1")
    rng, of_label = random.Random(seed), defaultdict(list)
    for item in sorted(train, key=_by_label):
        of_label[item[1]].append(item)
    kept: list[tuple[Path, str]] = []
    held: list[tuple[Path, str]] = []
    for items in of_label.values():
        rng.shuffle(items)
        count = min(len(items) - 1, max(1, round(frac * len(items))))
        held += items[:count]
        kept += items[count:]
    if not held:
        raise DataError(f"{root}: found one recording of each label in train; allowed with val_frac: two or more")
    return kept, held


def _by_label(item: tuple[Path, str]) -> tuple[str, str]:
    return item[1], item[0].name


def _mapped(path: Path) -> Any:
    """Returns the array, in its file until it is read; raises DataError for what is none, or holds no real numbers."""
    try:
        is_inside = path.parents[2].is_file()  # else np.load's own call for .npy; that would open archives too
        values: Any = h5_sequences.array(path) if is_inside else np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OSError, EOFError, KeyError) as error:
        raise DataError(f"{path}: found {error}; allowed: {_ARRAY}") from None
    if values.dtype.kind not in "fiu":
        raise DataError(f"{path}: found numbers of type {values.dtype}; allowed: {_ARRAY}")
    return values


def _header(path: Path, label: str) -> Recording:
    shape: tuple[int, ...] = _mapped(path).shape or ()  # None of an HDF5 array without a space
    if len(shape) != 2 or min(shape) < 1:
        hint = "; of one channel it is (time, 1)" if len(shape) == 1 else ""
        raise DataError(f"{path}: found shape {shape}; allowed: (time, channel), each at least 1{hint}")
    return Recording(path, label, shape[0], shape[1])


def _check(root: Path, train: Sequence[Recording], val: Sequence[Recording]) -> None:
    """Raises DataError for another number of channels, a label that is never trained on, or a single label."""
    first, labels = train[0], {r.label for r in train}
    for r in (*train, *val):
        if r.channels != first.channels:
            turned = "; is it (channel, time)?" if r.steps == first.channels else ""
            allowed = f"{first.channels}, as {first.path} has"
            raise DataError(f"{r.path}: found {r.channels} channels; allowed: {allowed}{turned}")
        if r.label not in labels:
            raise DataError(f"{r.path}: label: found {r.label!r}; allowed: those of train: {', '.join(sorted(labels))}")
    if len(labels) < 2:
        raise DataError(f"{root}: found recordings of one label, {first.label!r}; allowed: two labels or more")
