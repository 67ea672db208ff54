"""Whether two runs have the same data: hashes of some samples, not of files, which may be many gigabytes."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from trainables.batches import size_of

HASHED_SAMPLES = 32
"""So many samples of each split, evenly spaced, stand for all of them."""


def of_data(splits: Sequence[Dataset[Any]]) -> str:
    """Returns a hash of the sizes and of some samples.

    It is "" where samples cannot be read, hold what cannot be hashed, or are other ones each time they are read, as
    with random crops: nothing can then be said of other data.
    """
    try:
        once, again = _read(splits), _read(splits)
    except Exception:  # whatever a workload's dataset raises: the measurements that follow will say it
        return ""
    return once if once == again else ""


def _read(splits: Sequence[Dataset[Any]]) -> str:
    data = hashlib.sha256()
    for split in splits:
        size = size_of(split)
        data.update(f"{size};".encode())
        for number in range(min(HASHED_SAMPLES, size)):
            _add(split[number * size // min(HASHED_SAMPLES, size)], data)
    return data.hexdigest()


def _add(value: Any, data: Any) -> None:
    if isinstance(value, torch.Tensor):
        data.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            data.update(f"{key}:".encode())
            _add(value[key], data)
    elif isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor | Mapping | list | tuple) for v in value):
        for one in value:
            _add(one, data)
    else:
        data.update(pickle.dumps(value))
