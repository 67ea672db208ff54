"""Every sample of a data set, prepared once and kept in RAM, where there is room and time for that."""

from __future__ import annotations

import copy
import io
import math
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from trainables.batches import size_of
from trainables.workload import Batch

CACHE_TRIED = 32
"""Samples that are prepared to tell what a cache of all will take."""


class CacheTooLarge(MemoryError):
    """The samples of a data set would take more RAM, or more time to prepare, than there is."""


@dataclass(frozen=True)
class CacheLimits:
    """What keeping every sample in RAM may take: bytes, asked for when a cache is about to be made, and seconds."""

    free_bytes: Callable[[], float] = lambda: math.inf
    most_s: float = math.inf


class Cached(Dataset[Any]):
    """Every sample of a dataset, prepared once and kept in RAM: in tables where it can make such, else in a list.

    Raises CacheTooLarge, after a few samples, where all of them would be beyond the limits.
    """

    is_in_ram = True

    def __init__(self, dataset: Dataset[Any], limits: CacheLimits | None = None) -> None:
        tried = _tried(dataset, limits or CacheLimits())
        in_ram, indices = getattr(dataset, "in_ram", None), range(size_of(dataset))
        self._samples: Any = in_ram() if in_ram else [tried[i] if i in tried else dataset[i] for i in indices]
        if hasattr(self._samples, "batch"):
            self.batch: Callable[[Sequence[int]], Batch] = self._samples.batch

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        sample = self._samples[index]
        return copy.copy(sample) if isinstance(sample, dict | list) else sample  # a collate function may take it apart


def _tried(dataset: Dataset[Any], limits: CacheLimits) -> dict[int, Any]:
    """Returns the samples, by index, that were prepared to tell what all will take; raises CacheTooLarge."""
    count = size_of(dataset)
    if count < CACHE_TRIED:
        return {}
    tried, took_s = {0: dataset[0]}, []  # what the first takes besides, such as opening a file, is no other's
    for index in (count * n // CACHE_TRIED for n in range(1, CACHE_TRIED)):
        begun = time.perf_counter()
        tried[index] = dataset[index]
        took_s.append(time.perf_counter() - begun)
    needed_bytes = count * sum(map(_sample_bytes, tried.values())) / CACHE_TRIED
    needed_s = count * statistics.median(took_s)
    said = f"ram_cache=true would keep {count} samples in RAM"
    if needed_bytes > (free_bytes := limits.free_bytes()):
        least = f"about {needed_bytes / 2**30:.1f} GiB, and {free_bytes / 2**30:.1f} GiB may be used"
        raise CacheTooLarge(f"{said}: {least}; knobs.ram_cache=false")
    if needed_s > limits.most_s:
        raise CacheTooLarge(f"{said}: about {needed_s:.0f} s to prepare, {limits.most_s:.0f} s are allowed")
    return tried


def _sample_bytes(sample: Any) -> int:
    """Returns about what a sample holds: tensors, arrays, numbers in lists, and objects as they are pickled."""
    if isinstance(sample, Tensor):
        return sample.nbytes + 100
    if isinstance(sample, Mapping | list | tuple):
        parts = list(sample.values()) if isinstance(sample, Mapping) else sample
        return sys.getsizeof(sample) + sum(map(_sample_bytes, parts))
    if hasattr(sample, "nbytes") or isinstance(sample, str | bytes | int | float | None):
        return int(getattr(sample, "nbytes", 0)) + sys.getsizeof(sample)
    held = _Held()
    try:  # an image, or a class of the user's: what it holds is not in its own size
        held.dump(sample)
    except Exception:
        return sys.getsizeof(sample)
    return held.tensor_bytes + held.file.tell()


class _Held(pickle.Pickler):
    """Counts what an object holds: tensors by their own bytes, as a view's storage may be the whole data set."""

    def __init__(self) -> None:
        self.file, self.tensor_bytes = io.BytesIO(), 0
        super().__init__(self.file)

    def reducer_override(self, held: Any) -> Any:
        """Returns a number in the place of a tensor."""
        if not isinstance(held, Tensor):
            return NotImplemented
        self.tensor_bytes += held.nbytes
        return int, ()
