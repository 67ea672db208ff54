"""Labelled sequences in one HDF5 file, with an array (time, channel) of real numbers at /split/label/id.

The place of an array is written as if the file were a folder: recordings.h5/train/a/0001.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainables.data.errors import OTHER_LAYOUTS, DataError, wrong

_LAYOUT = "an HDF5 file with an array (time, channel) at each /split/label/id, as /train/a/0001"


@functools.lru_cache(maxsize=4)
def opened(file: Path) -> Any:
    """Returns the `h5py.File`, which stays open for later reads of this process; raises DataError."""
    try:
        import h5py
    except ImportError as error:
        raise DataError(f"{file}: found {error}; allowed: with the package, pip install 'cardtune[signals]'") from None
    try:
        return h5py.File(file, "r")
    except OSError as error:
        raise wrong(file, str(error), _LAYOUT, remedy=OTHER_LAYOUTS) from None


# With an open file, a process that is forked would share its descriptor and the state of its library: each opens it.
os.register_at_fork(before=opened.cache_clear)


def places(file: Path, splits: Iterable[str]) -> dict[str, list[tuple[Path, str]]]:
    """Returns the place and the label of each array by its split; raises DataError for another layout."""
    names: list[str] = []
    opened(file).visititems(lambda name, item: names.append(name) if hasattr(item, "dtype") else None)
    parts: dict[str, list[tuple[Path, str]]] = {split: [] for split in splits}
    for split, *inside in (name.split("/") for name in names if name.split("/")[0] in parts):
        if len(inside) != 2:
            raise wrong(file.joinpath(split, *inside), "an array", _LAYOUT, remedy=OTHER_LAYOUTS)
        parts[split].append((file.joinpath(split, *inside), inside[0]))
    if not parts["train"]:
        raise wrong(file, f"arrays at {', '.join(names[:8]) or 'no place'}", _LAYOUT, remedy=OTHER_LAYOUTS)
    return parts


def array(place: Path) -> Any:
    """Returns the `h5py.Dataset` at a place, whose numbers are read when it becomes an array; raises KeyError."""
    return opened(place.parents[2])["/".join(place.parts[-3:])]
