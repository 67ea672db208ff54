"""Keeps every sample of a data set in RAM, prepared once, if memory and time allow."""

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
"""Samples prepared to estimate memory and time of the whole cache."""


class CacheTooLarge(MemoryError):
    """A cache would need more RAM, or more time to prepare, than its limits allow."""


@dataclass(frozen=True)
class CacheLimits:
    """Limits of a cache in RAM: `free_bytes` is called before a cache is made; `most_s` are seconds of preparation."""

    free_bytes: Callable[[], float] = lambda: math.inf
    most_s: float = math.inf


class Cached(Dataset[Any]):
    """A data set with every sample prepared and kept in RAM: in tables by the data set's `in_ram`, else in a list.

    Raises CacheTooLarge, after a few samples, if all of them would exceed the limits.
    """

    is_in_ram = True

    def __init__(self, dataset: Dataset[Any], limits: CacheLimits | None = None) -> None:
        tried = _try_samples(dataset, limits or CacheLimits())
        in_ram, indices = getattr(dataset, "in_ram", None), range(size_of(dataset))
        self._samples: Any = in_ram() if in_ram else [tried[i] if i in tried else dataset[i] for i in indices]
        if hasattr(self._samples, "batch"):
            self.batch: Callable[[Sequence[int]], Batch] = self._samples.batch

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        sample = self._samples[index]
        return copy.copy(sample) if isinstance(sample, dict | list) else sample  # a collate function may take it apart


def _try_samples(dataset: Dataset[Any], limits: CacheLimits) -> dict[int, Any]:
    """Prepares a few samples to estimate the cache, and returns them by index; raises CacheTooLarge."""
    count = size_of(dataset)
    if count < CACHE_TRIED:
        return {}
    tried, took_s = {0: dataset[0]}, []  # the first is not timed: it may open files for all others
    for index in (count * n // CACHE_TRIED for n in range(1, CACHE_TRIED)):
        begun = time.perf_counter()
        tried[index] = dataset[index]
        took_s.append(time.perf_counter() - begun)
    needed_bytes = count * sum(map(_sample_bytes, tried.values())) / CACHE_TRIED
    needed_s = count * statistics.median(took_s)
    what = f"ram_cache=true would keep {count} samples in RAM"
    if needed_bytes > (free_bytes := limits.free_bytes()):
        least = f"about {needed_bytes / 2**30:.1f} GiB, and {free_bytes / 2**30:.1f} GiB may be used"
        raise CacheTooLarge(f"{what}: {least}; knobs.ram_cache=false")
    if needed_s > limits.most_s:
        raise CacheTooLarge(f"{what}: about {needed_s:.0f} s to prepare, {limits.most_s:.0f} s are allowed")
    return tried


def _sample_bytes(sample: Any) -> int:
    """Returns the approximate bytes of a sample: tensors, arrays, numbers in lists, and other objects as pickled."""
    if isinstance(sample, Tensor):
        return sample.nbytes + 100
    if isinstance(sample, Mapping | list | tuple):
        parts = list(sample.values()) if isinstance(sample, Mapping) else sample
        return sys.getsizeof(sample) + sum(map(_sample_bytes, parts))
    if hasattr(sample, "nbytes") or isinstance(sample, str | bytes | int | float | None):
        return int(getattr(sample, "nbytes", 0)) + sys.getsizeof(sample)
    held = _Held()
    try:  # an image, or a user's class: its size does not include the objects that it holds
        held.dump(sample)
    except Exception:
        return sys.getsizeof(sample)
    return held.tensor_bytes + held.file.tell()


class _Held(pickle.Pickler):
    """Counts the bytes that an object holds; a tensor counts by its own bytes, as its storage may be shared by all."""

    def __init__(self) -> None:
        self.file, self.tensor_bytes = io.BytesIO(), 0
        super().__init__(self.file)

    def reducer_override(self, held: Any) -> Any:
        """Returns a number in the place of a tensor."""
        if not isinstance(held, Tensor):
            return NotImplemented
        self.tensor_bytes += held.nbytes
        return int, ()
