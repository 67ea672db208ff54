"""Which samples form which micro-batch, and how they reach the device.

The plan is drawn in the training process from the seed alone, so the order of the samples does not depend on how many
workers load them or on how a batch is cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from trainables import draws
from trainables.knobs import Knobs
from trainables.workload import Augment, Batch, Config

WORKER_TIMEOUT_S = 120.0
"""A loader worker silent for so long is taken for hung; without a limit the loop would wait for ever."""


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward and backward pass; `share` is their part of the batch they belong to, 0 to 1."""

    indices: tuple[int, ...]
    share: float
    ends_batch: bool
    epoch: int = 0
    phase: str = ""


def plan_epoch(
    count: int,
    knobs: Knobs,
    seed: int,
    epoch: int,
    lengths: Sequence[int] | None,
    phase_at: Callable[[int], str] = lambda start: "",
) -> list[MicroBatch]:
    """Returns one epoch over `count` samples as micro-batches, in the order they are to be trained on.

    `phase_at(start)` is the phase of the batch that begins after `start` samples of the epoch.
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
            ends = cut + knobs.micro_batch_size >= len(batch)
            plan.append(MicroBatch(part, len(part) / len(batch), ends, epoch, phase_at(start)))
    return plan


class Keyed(NamedTuple):
    """A collated batch that is still to be augmented, and its samples' keys, int64, shape (batch,)."""

    batch: Batch
    keys: Tensor


class _Item(NamedTuple):
    """What the sampler asks of a data set whose samples are augmented."""

    sample: int
    key: int
    phase: str


class _WithKeys(Dataset[Any]):
    """Samples with their key and phase, which a worker could not know: its copy of everything is as old as it is."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return size_of(self._dataset)

    def __getitem__(self, item: _Item) -> tuple[_Item, Any]:
        return item, self._dataset[item.sample]


class _Augmenting:
    """Collates, then augments on the host, or leaves that to the device."""

    def __init__(self, collate: Callable[[list[Any]], Batch], augment: Augment, config: Config) -> None:
        self._collate, self._augment, self._config = collate, augment, config
        self.in_place: bool | None = None
        """Whether the first batch was augmented in place; None before, and where workers augment."""

    def __call__(self, samples: list[tuple[_Item, Any]]) -> Batch:
        keyed = Keyed(self._collate([sample for _, sample in samples]), torch.tensor([item.key for item, _ in samples]))
        if self._config.knobs.device_augmentation:
            return keyed
        call = functools.partial(self._augment, keyed.batch, keyed.keys, self._config, samples[0][0].phase)
        if self.in_place is not None:
            return call()
        batch, self.in_place = writing(call, keyed.batch)
        return batch


class _Planned(Sampler[list[Any]]):
    """Hands the micro-batches of the epoch at hand to the DataLoader: indices, or items where samples have keys."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed
        self.micro_batches: Sequence[MicroBatch] = ()

    def __iter__(self) -> Iterator[list[Any]]:
        for m in self.micro_batches:
            if self._seed is None:
                yield list(m.indices)
            else:
                yield [_Item(i, draws.key(self._seed, m.epoch, i), m.phase) for i in m.indices]

    def __len__(self) -> int:
        return len(self.micro_batches)


class Loader:
    """A DataLoader over planned micro-batches, with the loader knobs applied."""

    def __init__(
        self, dataset: Dataset[Any], config: Config, collate: Callable[[list[Any]], Batch], augment: Augment | None
    ) -> None:
        knobs = config.knobs
        workers = knobs.num_workers
        self._plan = _Planned(config.seed if augment is not None else None)
        self._cached = isinstance(dataset, Cached)
        self._augmenting = _Augmenting(collate, augment, config) if augment is not None else None
        if self._augmenting is not None:
            dataset, collate = _WithKeys(dataset), self._augmenting
        self._on_device = knobs.device_augmentation
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._plan,
            collate_fn=collate,
            num_workers=workers,
            prefetch_factor=knobs.prefetch_factor if workers else None,
            persistent_workers=knobs.persistent_workers and workers > 0,
            pin_memory=knobs.pin_memory and config.device.startswith("cuda"),
            timeout=WORKER_TIMEOUT_S if workers else 0,
            # Its own, since every epoch draws the workers' seeds from it: the process's generator is dropout's, and a
            # run that goes on in the middle of an epoch would find it one draw further.
            generator=torch.Generator(),
        )

    def epoch(self, plan: Sequence[MicroBatch]) -> Iterator[Batch]:
        """Yields one collated batch for each micro-batch of the plan, on the host; a `Keyed` one if yet to augment."""
        self._plan.micro_batches = plan
        return iter(self._loader)

    def seen(self, epoch: Iterator[Batch]) -> dict[str, Any]:
        """Returns how an epoch's batches come about, read from the loader while it delivers them."""
        workers = [w for w in getattr(epoch, "_workers", ()) if w.is_alive()]
        found: dict[str, Any] = {"samples_in_ram": self._cached, "workers": len(workers)}
        if workers:
            found["prefetch_factor"] = getattr(epoch, "_prefetch_factor", None)
            found["persistent_workers"] = getattr(self._loader, "_iterator", None) is epoch
        if self._augmenting is not None and not self._on_device:
            found["augmented_on"] = "loader"
            if self._augmenting.in_place is not None:
                found["augmented_in_place"] = self._augmenting.in_place
        return found


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


class Transfer:
    """Takes batches from the host to the device, on a stream of its own where the knob says so."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        self._device, self._non_blocking = device, knobs.non_blocking
        beside = knobs.device_prefetch and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if beside else None

    def __call__(self, batch: Batch) -> Batch:
        """Returns the batch on the device.

        The host runs ahead of the device: when it asks for this batch, the step before it is still being computed.
        A copy on the device's own stream would queue behind that step; on another it runs beside it.
        """
        if self._stream is None:
            return to_device(batch, self._device, non_blocking=self._non_blocking)
        with torch.cuda.stream(self._stream):
            moved = to_device(batch, self._device, non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        for tensor in tensors_of(moved):
            tensor.record_stream(current)  # or its memory would be given away while this stream still reads it
        return moved


def writing(call: Callable[[], Batch], batch: Batch) -> tuple[Batch, bool]:
    """Returns what `call` returns, and whether it wrote into tensors of `batch`."""
    tensors = tensors_of(batch)
    before = [t._version for t in tensors]
    return call(), [t._version for t in tensors] != before


def sorted_by_length(plan: Sequence[MicroBatch], lengths: Sequence[int] | None) -> bool:
    """Returns whether the plan's first batch comes in the order of its samples' lengths; False where none are known."""
    if lengths is None:
        return False
    found: list[int] = []
    for micro in plan:
        found += [lengths[i] for i in micro.indices]
        if micro.ends_batch:
            break
    return found == sorted(found)


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
