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


def of_data(splits: Sequence[Dataset[Any]]) -> dict[str, str]:
    """Returns `data_sha256`, of sizes and samples, and `shapes_sha256`, of what of them decides the speed.

    Each is "" where samples cannot be read, hold what cannot be hashed, or are other ones each time they are read, as
    with random crops: nothing can then be said of other data.
    """
    try:
        once, again = _read(splits), _read(splits)
    except Exception:  # whatever a workload's dataset raises: the measurements that follow will say it
        return {"data_sha256": "", "shapes_sha256": ""}
    return {name: value if again[name] == value else "" for name, value in once.items()}


def _read(splits: Sequence[Dataset[Any]]) -> dict[str, str]:
    data, shapes = hashlib.sha256(), hashlib.sha256()
    for split in splits:
        size = size_of(split)
        data.update(f"{size};".encode())
        for number in range(min(HASHED_SAMPLES, size)):
            _add(split[number * size // min(HASHED_SAMPLES, size)], data, shapes)
    return {"data_sha256": data.hexdigest(), "shapes_sha256": shapes.hexdigest()}


def _add(value: Any, data: Any, shapes: Any) -> None:
    if isinstance(value, torch.Tensor):
        shapes.update(f"{value.dtype}{tuple(value.shape)};".encode())
        data.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            data.update(f"{key}:".encode())
            _add(value[key], data, shapes)
    elif isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor | Mapping | list | tuple) for v in value):
        for one in value:
            _add(one, data, shapes)
    else:
        size = len(value) if isinstance(value, str | bytes | list | tuple) else getattr(value, "shape", "")
        shapes.update(f"{type(value).__name__}{size};".encode())
        data.update(pickle.dumps(value))
