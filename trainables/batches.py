"""Which samples form which micro-batch, and how they reach the device.

The plan is drawn in the training process from the seed alone, so the order of the samples does not depend on how many
workers load them or on how a batch is cut.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, Dataset, Sampler

from trainables import draws
from trainables.knobs import Knobs
from trainables.stopwatch import LOADING
from trainables.workload import Augment, Batch, Config

FORKS = "fork" if sys.platform == "linux" else None
"""Python 3.14 would start workers that import anew, which cannot find what a user's file defines. They use no CUDA."""


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
    as a whole is the same set of samples either way. The last batch of an epoch may be smaller, that before it by one.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(count, generator=generator, device="cpu").tolist()
    plan: list[MicroBatch] = []
    bounds = [*range(0, count, knobs.batch_size), count]
    # Batch norm takes no micro-batch of one sample: the last batch gets one from that before it, and so does the last
    # part of any batch.
    if count > knobs.batch_size > 2 and bounds[-1] - bounds[-2] == 1:
        bounds[-2] -= 1
    for start, stop in itertools.pairwise(bounds):
        batch = order[start:stop]
        if knobs.length_bucketing and lengths is not None:
            batch.sort(key=lambda index: lengths[index])
        cuts = [*range(0, len(batch), knobs.micro_batch_size), len(batch)]
        if knobs.micro_batch_size > 2 < len(cuts) and cuts[-1] - cuts[-2] == 1:
            cuts[-2] -= 1
        for begin, end in itertools.pairwise(cuts):
            part = tuple(batch[begin:end])
            plan.append(MicroBatch(part, len(part) / len(batch), end == len(batch), epoch, phase_at(start)))
    return plan


class Keyed(NamedTuple):
    """A collated batch that is still to be augmented, and its samples' keys, int64, shape (batch,)."""

    batch: Batch
    keys: Tensor


class _Made(Dataset[Batch]):
    """Micro-batches, made whole: by the training process itself, or in a worker by torch's loader.

    What a worker could not know comes with the micro-batch, since its copy of everything is as old as it is. The keys
    are made where the batch is: one at a time in Python they took 2.5 us a sample of the training process.
    """

    def __init__(
        self, dataset: Dataset[Any], config: Config, collate: Callable[[list[Any]], Batch], augment: Augment | None
    ) -> None:
        self._dataset, self._config, self._collate, self._augment = dataset, config, collate, augment
        self._at_once = at_once(dataset)
        self.seconds = dict.fromkeys(LOADING, 0.0)
        """What each part of the work has taken so far, in this process."""

    def __len__(self) -> int:
        return size_of(self._dataset)

    def __getitem__(self, micro: MicroBatch) -> Batch:
        """Returns the batch collated and augmented, or `Keyed` where the device is to augment it."""
        start = time.perf_counter()
        read_at = start
        if self._at_once is not None:
            batch = self._at_once(micro.indices)
        else:
            samples = [self._dataset[i] for i in micro.indices]
            read_at = time.perf_counter()
            batch = self._collate(samples)
        collated_at = time.perf_counter()
        batch = self._augmented(batch, micro)
        seconds = self.seconds
        seconds["read"] += read_at - start
        seconds["collate"] += collated_at - read_at
        seconds["augment"] += time.perf_counter() - collated_at
        return batch

    def _augmented(self, batch: Batch, micro: MicroBatch) -> Batch:
        if self._augment is None:
            return batch
        keyed = Keyed(batch, draws.keys(self._config.seed, micro.epoch, torch.tensor(micro.indices)))
        if self._config.knobs.device_augmentation:
            return keyed
        return self._augment(keyed.batch, keyed.keys, self._config, micro.phase)


class _Planned(Sampler[MicroBatch]):
    """Hands the micro-batches of the epoch at hand to torch's loader, each as if it were one sample's index."""

    def __init__(self) -> None:
        self.micro_batches: Sequence[MicroBatch] = ()

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)


def loading(knobs: Knobs, device: str) -> dict[str, Any]:
    """Returns the arguments of a DataLoader that knobs set, for training on a device such as "cpu" or "cuda:0"."""
    found = {"num_workers": knobs.num_workers, "pin_memory": knobs.pin_memory and device.startswith("cuda")}
    if knobs.num_workers:
        found |= {"prefetch_factor": knobs.prefetch_factor, "persistent_workers": knobs.persistent_workers}
    return found


class Loader:
    """Planned micro-batches, with the loader knobs applied: workers of a DataLoader, or none and no DataLoader."""

    def __init__(
        self, dataset: Dataset[Any], config: Config, collate: Callable[[list[Any]], Batch], augment: Augment | None
    ) -> None:
        knobs, arguments = config.knobs, loading(config.knobs, config.device)
        self._plan, self._cached = _Planned(), getattr(dataset, "is_in_ram", False)
        self._made = _Made(dataset, config, collate, augment)
        self._augments = augment is not None and not knobs.device_augmentation
        self._pins = arguments["pin_memory"]
        self.loader: DataLoader[Any] | None = None
        """torch's, None where this process loads."""
        if not knobs.num_workers:
            return
        self.loader = DataLoader(
            self._made,
            batch_size=None,
            sampler=self._plan,
            collate_fn=as_it_is,
            **arguments,
            timeout=config.loader_timeout_s,
            multiprocessing_context=FORKS,
            # Its own, since every epoch draws the workers' seeds from it: the process's generator is dropout's, and a
            # run that goes on in the middle of an epoch would find it one draw further.
            generator=torch.Generator(),
        )

    @property
    def seconds(self) -> Mapping[str, float]:
        """Returns what each part of loading has taken so far in this process, by name; 0 where workers load."""
        return self._made.seconds

    def epoch(self, plan: Sequence[MicroBatch]) -> Iterator[Batch]:
        """Yields one collated batch for each micro-batch of the plan, on the host; a `Keyed` one if yet to augment."""
        if self.loader is None:
            return self._own(plan)
        self._plan.micro_batches = plan
        return iter(self.loader)

    def _own(self, plan: Sequence[MicroBatch]) -> Iterator[Batch]:
        for micro in plan:
            batch = self._made[micro]
            yield mapped(Tensor.pin_memory, batch) if self._pins else batch

    def seen(self, epoch: Iterator[Batch]) -> dict[str, Any]:
        """Returns how an epoch's batches come about, read from the loader while it delivers them."""
        found = {"samples_in_ram": self._cached, **workers_seen(epoch, self.loader)}
        if self._augments:
            found["augmented_on"] = "loader"
        return found


def workers_seen(epoch: Iterator[Any], loader: Any) -> dict[str, Any]:
    """Returns the live workers of a pass over a DataLoader, and how they are set, read while they deliver."""
    workers = [w for w in getattr(epoch, "_workers", ()) if w.is_alive()]
    if not workers:
        return {"workers": 0}
    lasting = getattr(loader, "_iterator", None) is epoch
    return {
        "workers": len(workers),
        "prefetch_factor": getattr(epoch, "_prefetch_factor", None),
        "persistent_workers": lasting,
    }


def starts_anew(loader: Any) -> bool:
    """Returns whether each pass over a loader starts its workers; None is no loader."""
    return bool(getattr(loader, "num_workers", 0)) and not getattr(loader, "persistent_workers", False)


def fork_workers() -> None:
    """Has every loader of this process start its workers as `FORKS` says, those of frameworks and of their own too."""
    by = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if FORKS is not None and by != FORKS:
        multiprocessing.set_start_method(FORKS, force=True)


def as_it_is(batch: Batch) -> Batch:
    """Returns the batch, for a DataLoader whose samples are batches."""
    return batch


def at_once(dataset: object) -> Callable[[Sequence[int]], Batch] | None:
    """Returns the data set's `batch`, which makes a batch of indices; None where it has none that does.

    That of Hugging Face's data sets, known by its `batch_size`, is another: it cuts the data set into lists.
    """
    own = getattr(dataset, "batch", None)
    if not callable(own) or "batch_size" in inspect.signature(own).parameters:
        return None
    return cast(Callable[[Sequence[int]], Batch], own)


def batch_of(dataset: Dataset[Any], collate: Callable[[list[Any]], Batch], indices: Sequence[int]) -> Batch:
    """Returns the batch of these samples: by the data set at once where it can, else of one sample after the other."""
    whole = at_once(dataset)
    return whole(indices) if whole is not None else collate([dataset[i] for i in indices])


def size_of(dataset: Dataset[Any]) -> int:
    """Returns the number of samples of a map-style dataset; raises TypeError for an iterable one."""
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"{type(dataset).__name__} has no length; a workload's dataset() must be map-style")
    return len(dataset)


def length_of(source: Any) -> int | None:
    """Returns the length of a sampler, a data set or a loader; None where it has none."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


class SampleCounts:
    """How many samples a loader's batches have.

    A DataLoader that draws samples knows how many, whatever its collate function makes of them. Of any other loader's
    batch they are the length of its first tensor with any along a dimension, else as many as its `batch_size`, else as
    many as are `usual`.
    """

    def __init__(self, loader: Any, usual: int | None = None) -> None:
        self._size = int(getattr(loader, "batch_size", None) or 0)
        self._drawn = length_of(getattr(loader, "sampler", None)) or 0
        self._usual = usual

    def of(self, batch: Batch, taken: int, dim: int = 0) -> int:
        """Returns those of a batch, `taken` being those of its pass so far; raises TypeError where nothing tells."""
        if self._size and taken < self._drawn:
            return min(self._size, self._drawn - taken)
        shape = _shape(batch)
        if shape:
            return shape[min(dim, len(shape) - 1)]
        if not (self._size or self._usual):
            raise TypeError(f"a batch of type {type(batch).__name__} does not tell how many samples it has")
        return int(self._size or self._usual or 0)


def samples_dim(batch: Batch, size: int | None) -> int:
    """Returns which dimension of a batch's first tensor its samples are along: 1 where only that one has their size.

    So it is in batches of text that have time first, as PyTorch's recurrent layers take them by default.
    """
    shape = _shape(batch)
    return int(len(shape) > 1 and shape[0] != size and shape[1] == size)


def _shape(batch: Batch) -> tuple[int, ...]:
    """Returns the shape of a batch's first tensor with any dimension, () where it has none."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    if isinstance(batch, PackedSequence):
        return (int(batch.batch_sizes[0]),)
    return next(filter(None, map(_shape, _parts(batch))), ())


def mapped(change: Callable[[Any], Any], batch: Batch, method: str = "") -> Batch:
    """Returns the batch with its tensors changed; tuples, lists and dicts are walked, other values kept.

    What has a `method` of its own is changed whole, as a tensor is.
    """
    if isinstance(batch, Tensor) or (method and hasattr(batch, method)):
        return change(batch)
    if isinstance(batch, dict):
        return {k: mapped(change, v, method) for k, v in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
        return type(batch)(*(mapped(change, v, method) for v in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(change, v, method) for v in batch)
    return batch


def to_device(batch: Batch, device: torch.device, *, non_blocking: bool = False) -> Batch:
    """Returns the batch on the device: its tensors, and by their own `to` packed sequences, encodings and the like."""

    def moved(one: Any) -> Any:
        if isinstance(one, Tensor):
            return one.to(device, non_blocking=non_blocking)
        if isinstance(one, Mapping):  # it moves itself, and the batch on the host is still looked at
            one = copy.copy(one)
        taken = inspect.signature(one.to).parameters.values()
        takes = any(p.name == "non_blocking" or p.kind is p.VAR_KEYWORD for p in taken)
        return one.to(device, non_blocking=non_blocking) if takes else one.to(device)

    return mapped(moved, batch, "to")


class Transfer:
    """Takes batches from the host to the device, on a stream of its own where the knob says so."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        self.device, self._non_blocking, self._on_host = device, knobs.non_blocking, device.type == "cpu"
        beside = knobs.device_prefetch and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if beside else None

    def __call__(self, batch: Batch) -> Batch:
        """Returns the batch on the device.

        The host runs ahead of the device: when it asks for this batch, the step before it is still being computed.
        A copy on the device's own stream would queue behind that step; on another it runs beside it.
        """
        if self._on_host and type(batch) in (list, tuple, dict):  # nothing moves, in every step of small ones
            parts = batch.values() if type(batch) is dict else batch
            if all(type(part) is Tensor for part in parts):
                return batch
        if self._stream is None or not _is_seen(batch):
            return to_device(batch, self.device, non_blocking=self._non_blocking)
        with torch.cuda.stream(self._stream):
            moved = to_device(batch, self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for tensor in tensors_of(moved):
            if tensor.is_cuda:
                tensor.record_stream(current)  # or its memory would be given away while this stream still reads it
        return moved


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
    return [tensor for part in _parts(batch) for tensor in tensors_of(part)]


def _parts(batch: Batch) -> Iterable[Any]:
    return batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()


def _is_seen(batch: Batch) -> bool:
    """Returns whether `tensors_of` finds all that a batch would move: no other object in it has a `to` of its own."""
    if isinstance(batch, Mapping | list | tuple):
        return all(map(_is_seen, _parts(batch)))
    return isinstance(batch, Tensor) or not hasattr(batch, "to")


def sample_lengths(dataset: Dataset[Any], length: Callable[[Any], int] | None) -> list[int] | None:
    """Returns the length of every sample, or None where the workload has no measure of it.

    A data set with a method `sample_lengths()` is asked for all at once: every process of a study asks.
    """
    if length is None:
        return None
    size, own = size_of(dataset), getattr(dataset, "sample_lengths", None)
    if not callable(own):
        return [length(cast(Any, dataset[i])) for i in range(size)]
    found = list(own())
    if len(found) != size:
        raise ValueError(f"{type(dataset).__name__}.sample_lengths(): {len(found)} lengths for {size} samples")
    return found
