"""Which samples form which micro-batch, and how they reach the device.

The plan is drawn in the training process from the seed alone, so the order of the samples does not depend on how many
workers load them or on how a batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from trainables.knobs import Knobs
from trainables.workload import Batch

WORKER_TIMEOUT_S = 120.0
"""A loader worker silent for so long is taken for hung; without a limit the loop would wait for ever."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward pass; `share` is their part of the batch they belong to, 0 to 1."""

    indices: tuple[int, ...]
    share: float
    ends_batch: bool


def plan_epoch(count: int, knobs: Knobs, seed: int, epoch: int, lengths: Sequence[int] | None) -> list[MicroBatch]:
    """Returns one epoch over `count` samples as micro-batches, in the order they are to be trained on.

    With `lengths` and the bucketing knob the samples of a batch are sorted by length before the batch is cut; the batch
    as a whole is the same set of samples either way. The last batch of an epoch may be smaller.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(count, generator=generator).tolist()
    plan: list[MicroBatch] = []
    for start in range(0, count, knobs.batch_size):
        batch = order[start : start + knobs.batch_size]
        if knobs.length_bucketing and lengths is not None:
            batch.sort(key=lambda index: lengths[index])
        cuts = range(0, len(batch), knobs.micro_batch_size)
        for cut in cuts:
            part = tuple(batch[cut : cut + knobs.micro_batch_size])
            plan.append(MicroBatch(part, len(part) / len(batch), cut + knobs.micro_batch_size >= len(batch)))
    return plan


class _Planned(Sampler[list[int]]):
    """Hands the micro-batches of the epoch at hand to the DataLoader."""

    def __init__(self) -> None:
        self.micro_batches: Sequence[MicroBatch] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return (list(m.indices) for m in self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)


class Loader:
    """A DataLoader over planned micro-batches, with the loader knobs applied."""

    def __init__(
        self, dataset: Dataset[Any], knobs: Knobs, collate: Callable[[list[Any]], Batch], device: torch.device
    ) -> None:
        workers = knobs.num_workers
        self._plan = _Planned()
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._plan,
            collate_fn=collate,
            num_workers=workers,
            prefetch_factor=knobs.prefetch_factor if workers else None,
            persistent_workers=knobs.persistent_workers and workers > 0,
            pin_memory=knobs.pin_memory and device.type == "cuda",
            timeout=WORKER_TIMEOUT_S if workers else 0,
            # Its own, since every epoch draws the workers' seeds from it: the process's generator is dropout's, and a
            # run that goes on in the middle of an epoch would find it one draw further.
            generator=torch.Generator(),
        )

    def epoch(self, plan: Sequence[MicroBatch]) -> Iterator[Batch]:
        """Yields one collated batch for each micro-batch of the plan, on the host."""
        self._plan.micro_batches = plan
        return iter(self._loader)


class Cached(Dataset[Any]):
    """Every sample of a dataset, prepared once and kept in RAM."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._samples = [dataset[i] for i in range(size_of(dataset))]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def size_of(dataset: Dataset[Any]) -> int:
    """Returns the number of samples of a map-style dataset; raises TypeError for an iterable one."""
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"{type(dataset).__name__} has no length; a workload's dataset() must be map-style")
    return len(dataset)


def to_device(batch: Batch, device: torch.device, *, non_blocking: bool = False) -> Batch:
    """Returns the batch with its tensors on the device; tuples, lists and dicts are walked, other values kept."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if isinstance(batch, dict):
        return {k: to_device(v, device, non_blocking=non_blocking) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(to_device(v, device, non_blocking=non_blocking) for v in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(v, device, non_blocking=non_blocking) for v in batch)
    return batch


def tensors_of(batch: Batch) -> list[Tensor]:
    """Returns the tensors of a batch of tuples, lists and dicts."""
    if isinstance(batch, Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def validation_batches(
    dataset: Dataset[Any],
    collate: Callable[[list[Any]], Batch],
    size: int,
    lengths: Sequence[int] | None,
) -> Iterable[Batch]:
    """Yields the whole data set in batches of `size` on the host, samples of like length together where known."""
    order = list(range(size_of(dataset)))
    if lengths is not None:
        order.sort(key=lambda index: lengths[index])
    for start in range(0, len(order), size):
        yield collate([dataset[i] for i in order[start : start + size]])


def sample_lengths(dataset: Dataset[Any], length: Callable[[Any], int] | None) -> list[int] | None:
    """Returns the length of every sample, or None where the workload has no measure of it."""
    if length is None:
        return None
    return [length(cast(Any, dataset[i])) for i in range(size_of(dataset))]
