"""Loads the validation split in batches, the longest samples first, in the training process or in loader processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from trainables.batches import FORKS, as_it_is, at_once, batch_of, loading, size_of
from trainables.workload import Batch, Config

VALIDATION_SAMPLES = 2000
"""A smaller split is loaded in the training process: starting workers would take longer, at least 20 ms each."""


def validation_loader(
    dataset: Dataset[Any],
    collate: Callable[[list[Any]], Batch],
    size: int,
    lengths: Sequence[int] | None,
    config: Config,
) -> Iterable[Batch]:
    """Returns the whole data set in batches of `size` on the host, the longest samples first if `lengths` are known.

    Loader processes make the batches if the knobs ask for such processes, the split is large, and the data set cannot
    make a batch at once. The processes last for one evaluation; batches are pinned as in training.
    """
    knobs, order = config.knobs, longest_first(dataset, lengths)
    parts = _Parts(dataset, collate, [order[start : start + size] for start in range(0, len(order), size)])
    if not knobs.num_workers or len(order) < VALIDATION_SAMPLES or at_once(dataset) is not None:
        return (parts[number] for number in range(len(parts)))
    return DataLoader(
        parts,
        batch_size=None,
        collate_fn=as_it_is,
        **{**loading(knobs, config.device), "persistent_workers": False},
        timeout=config.loader_timeout_s,
        multiprocessing_context=FORKS,
        generator=torch.Generator(),  # for the reason that `Loader` gives
    )


class _Parts(Dataset[Batch]):
    """A data set whose samples are whole batches of another."""

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[list[Any]], Batch], parts: Sequence[Sequence[int]]
    ) -> None:
        self._dataset, self._collate, self._parts = dataset, collate, parts

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> Batch:
        return batch_of(self._dataset, self._collate, self._parts[index])


def longest_first(dataset: Dataset[Any], lengths: Sequence[int] | None) -> list[int]:
    """Returns the indices of all samples, the longest first if `lengths` are known."""
    order = list(range(size_of(dataset)))
    if lengths is not None:
        order.sort(key=lambda index: -lengths[index])
    return order
