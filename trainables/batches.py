"""Plans which samples form which micro-batch, loads them, and moves them to the device.

The training process draws the plan from the seed alone, so the order of the samples depends neither on the number of
workers nor on the size of micro-batches.
"""

from __future__ import annotations

import collections
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
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from trainables import draws
from trainables.knob_columns import Seen
from trainables.knobs import Knobs
from trainables.stopwatch import LOADING
from trainables.workload import Augment, Batch, Config

FORKS = "fork" if sys.platform == "linux" else None
"""Workers that import anew, the default of Python 3.14, cannot find classes of a user's file. Workers use no CUDA."""
LEAST_FILES, MOST_FILES = 1024, 65_536
"""A loader process hands over each tensor by an open file; if fewer may be open, it waits forever without a word."""


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
    as a whole is the same set of samples either way. The last batch of an epoch may be smaller, and the batch before it
    may have one sample less.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(count, generator=generator, device="cpu").tolist()
    plan: list[MicroBatch] = []
    bounds = [*range(0, count, knobs.batch_size), count]
    # Batch norm refuses a micro-batch of one sample: the last batch then gets a second one from the batch before it,
    # and the last micro-batch of a batch likewise.
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


class _MicroBatches(Dataset[Batch]):
    """A data set whose samples are whole micro-batches, read by the training process or by loader processes.

    The index is a `MicroBatch`: it holds epoch and phase, which a worker's copy of the process could not know. Keys are
    made together with the batch; made one at a time, they took the training process 2.5 us a sample.
    """

    def __init__(
        self, dataset: Dataset[Any], config: Config, collate: Callable[[list[Any]], Batch], augment: Augment | None
    ) -> None:
        self._dataset, self._config, self._collate, self._augment = dataset, config, collate, augment
        self._at_once = at_once(dataset)
        self.seconds = dict.fromkeys(LOADING, 0.0)
        """Seconds of each part of loading so far, in this process."""

    def __len__(self) -> int:
        return size_of(self._dataset)

    def __getitem__(self, micro: MicroBatch) -> Batch:
        """Returns the batch collated and augmented, or `Keyed` if the device is to augment it."""
        start = time.perf_counter()
        read_at = start
        if self._at_once is not None:
            batch = self._at_once(micro.indices)
        else:
            samples = [self._dataset[i] for i in micro.indices]
            read_at = time.perf_counter()
            batch = self._collate(samples)
        collated_at = time.perf_counter()
        if self._augment is not None:
            keyed = Keyed(batch, draws.keys(self._config.seed, micro.epoch, torch.tensor(micro.indices)))
            on_device = self._config.knobs.device_augmentation
            batch = keyed if on_device else self._augment(*keyed, self._config, micro.phase)
        seconds = self.seconds
        seconds["read"] += read_at - start
        seconds["collate"] += collated_at - read_at
        seconds["augment"] += time.perf_counter() - collated_at
        return batch


class _Planned(Sampler[MicroBatch]):
    """Gives torch's loader the micro-batches of the current epoch, each in the place of a sample's index."""

    def __init__(self) -> None:
        self.micro_batches: Sequence[MicroBatch] = ()

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)


def loading(knobs: Knobs, device: str) -> dict[str, Any]:
    """Returns the DataLoader arguments that knobs set, for training on a device such as "cpu" or "cuda:0"."""
    arguments = {"num_workers": knobs.num_workers, "pin_memory": knobs.pin_memory and device.startswith("cuda")}
    if knobs.num_workers:
        arguments |= {"prefetch_factor": knobs.prefetch_factor, "persistent_workers": knobs.persistent_workers}
    return arguments


class Loader:
    """Loads planned micro-batches as the knobs say: by a DataLoader with workers, or in this process without one."""

    def __init__(
        self, dataset: Dataset[Any], config: Config, collate: Callable[[list[Any]], Batch], augment: Augment | None
    ) -> None:
        knobs, arguments = config.knobs, loading(config.knobs, config.device)
        self._plan, self._cached = _Planned(), getattr(dataset, "is_in_ram", False)
        self._micro_batches = _MicroBatches(dataset, config, collate, augment)
        self._augments = augment is not None and not knobs.device_augmentation
        self._pins = arguments["pin_memory"]
        self.loader: DataLoader[Any] | None = None
        """torch's loader; None if this process loads."""
        if not knobs.num_workers:
            return
        self.loader = DataLoader(
            self._micro_batches,
            batch_size=None,
            sampler=self._plan,
            collate_fn=as_it_is,
            **arguments,
            timeout=config.loader_timeout_s,
            multiprocessing_context=FORKS,
            # Its own generator, since every epoch draws the workers' seeds from it. Dropout uses the process's: a run
            # that resumes in the middle of an epoch would find that one draw ahead.
            generator=torch.Generator(),
        )

    @property
    def seconds(self) -> Mapping[str, float]:
        """Returns the seconds of each part of loading so far in this process, by name; 0 if workers load."""
        return self._micro_batches.seconds

    def epoch(self, plan: Sequence[MicroBatch]) -> Iterator[Batch]:
        """Yields a collated batch for each micro-batch of the plan, on the host; `Keyed` if the device augments it."""
        if self.loader is None:
            loaded = map(self._micro_batches.__getitem__, plan)
            return (mapped(Tensor.pin_memory, batch) for batch in loaded) if self._pins else loaded
        self._plan.micro_batches = plan
        return iter(self.loader)

    def seen(self, epoch: Iterator[Batch]) -> Seen:
        """Returns facts about the loading of an epoch, read from the loader while it delivers batches."""
        facts = {"samples_in_ram": self._cached, **workers_seen(epoch, self.loader)}
        if self._augments:
            facts["augmented_on"] = "loader"
        return facts


def workers_seen(epoch: Iterator[Any], loader: Any) -> Seen:
    """Returns the number of live workers of a DataLoader's epoch, and their settings, read while they deliver."""
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
    """Returns whether a loader starts its workers anew for each epoch; False for None."""
    return bool(getattr(loader, "num_workers", 0)) and not getattr(loader, "persistent_workers", False)


def fork_workers() -> None:
    """Makes every loader of this process start its workers as `FORKS` says, also in frameworks and custom loops."""
    by = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if FORKS is not None and by != FORKS:
        multiprocessing.set_start_method(FORKS, force=True)
    if FORKS is not None and _open_files() < LEAST_FILES:
        torch.multiprocessing.set_sharing_strategy("file_system")


def _open_files() -> int:
    """Returns how many files this process may open, once that is as many as the system lets it."""
    import resource  # Linux has it

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (MOST_FILES if limit == resource.RLIM_INFINITY else limit for limit in (soft, hard))
    if soft < (more := min(hard, MOST_FILES)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return max(soft, more)


def as_it_is(batch: Batch) -> Batch:
    """Returns the batch unchanged: the collate function of a DataLoader whose samples are batches."""
    return batch


def at_once(dataset: object) -> Callable[[Sequence[int]], Batch] | None:
    """Returns the data set's method `batch(indices)`, which makes a whole batch; None if it has no such method.

    The `batch` of Hugging Face's data sets, which has a parameter `batch_size`, cuts the data set into lists instead.
    """
    method = getattr(dataset, "batch", None)
    if not callable(method) or "batch_size" in inspect.signature(method).parameters:
        return None
    return cast(Callable[[Sequence[int]], Batch], method)


def batch_of(dataset: Dataset[Any], collate: Callable[[list[Any]], Batch], indices: Sequence[int]) -> Batch:
    """Returns the batch of these samples: made by the data set at once if it can, otherwise sample by sample."""
    whole = at_once(dataset)
    return whole(indices) if whole is not None else collate([dataset[i] for i in indices])


def size_of(dataset: Dataset[Any]) -> int:
    """Returns the number of samples of a map-style dataset; raises TypeError for an iterable one."""
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"{type(dataset).__name__} has no length; a workload's dataset() must be map-style")
    return len(dataset)


def length_of(source: Any) -> int | None:
    """Returns the length of a sampler, a data set or a loader; None if it has none."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def knows_its_length(loader: Any) -> bool:
    """Returns whether a loader is torch's and its length is that of an epoch, unlike a stream's."""
    is_known = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    return is_known and bool(length_of(loader))


class CountedSampler:
    """A batch sampler whose batches have any size, such as those of so many tokens; `sizes` are those not yet taken."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.sizes: collections.deque[int] = collections.deque()

    def __iter__(self) -> Iterator[Any]:
        self.sizes = sizes = collections.deque[int]()
        for indices in self._sampler:
            sizes.append(len(indices))
            yield indices

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def sampler_of(loader: Any) -> CountedSampler | None:
    """Returns the batch sampler of a DataLoader that has no batch size, which from now on counts; else None."""
    if type(loader) is not DataLoader or loader.batch_size is not None or loader.batch_sampler is None:
        return None
    if not isinstance(loader.batch_sampler, CountedSampler):
        vars(loader)["batch_sampler"] = CountedSampler(loader.batch_sampler)  # torch refuses an assignment
    return cast(CountedSampler, loader.batch_sampler)


class SampleCounts:
    """Counts the samples of a loader's batches.

    A batch sampler knows the samples of its batches, and a DataLoader how many it draws, whatever its collate function
    makes of them. For a stream it knows the `batch_size`, or the size that was `asked` for: the tensor of that length
    counts the samples, which in a batch of graphs need not be the first. For any other loader the count is the length
    of the batch's first tensor along a dimension; without a tensor, the loader's `batch_size`; without that, `usual`.
    """

    def __init__(self, loader: Any, usual: int | None = None, asked: int | None = None) -> None:
        self._size = int(getattr(loader, "batch_size", None) or 0)
        self._asked = self._size or asked or 0
        self._drawn = length_of(getattr(loader, "sampler", None)) or 0
        self._usual, self._sampler = usual, sampler_of(loader)
        self._place: int | None = None
        """Which tensor of a batch had that length; None before one had."""

    def of(self, batch: Batch, taken: int, dim: int = 0) -> int:
        """Returns the samples of a batch after `taken` samples of its epoch; raises TypeError if they are not known."""
        if self._sampler is not None and self._sampler.sizes:
            return self._sampler.sizes.popleft()
        if self._size and taken < self._drawn:
            return min(self._size, self._drawn - taken)
        shape = _shape(batch)
        if self._asked and shape and self._asked != shape[min(dim, len(shape) - 1)]:
            lengths = [len(tensor) if tensor.dim() else 0 for tensor in tensors_of(batch)]
            if self._asked in lengths:
                self._place = lengths.index(self._asked)
            if self._place is not None and self._place < len(lengths) and lengths[self._place] <= self._asked:
                return lengths[self._place]
        if shape:
            return shape[min(dim, len(shape) - 1)]
        if not (self._size or self._usual):
            raise TypeError(f"a batch of type {type(batch).__name__} does not tell how many samples it has")
        return int(self._size or self._usual or 0)


def samples_dim(batch: Batch, size: int | None) -> int:
    """Returns the sample dimension of a batch's first tensor: 1 if that one has length `size` and the first has not.

    Dimension 1 occurs in batches of text with time first, which PyTorch's recurrent layers take by default.
    """
    shape = _shape(batch)
    return int(len(shape) > 1 and shape[0] != size and shape[1] == size)


def _shape(batch: Batch) -> tuple[int, ...]:
    """Returns the shape of a batch's first tensor that is not a scalar; () if there is none."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape)
    if isinstance(batch, PackedSequence):
        return (int(batch.batch_sizes[0]),)
    return next(filter(None, map(_shape, _parts(batch))), ())


def mapped(change: Callable[[Any], Any], batch: Batch, method: str = "") -> Batch:
    """Applies `change` to the tensors of a batch; tuples, lists and dicts are walked, other values kept.

    An object with the named `method` is passed to `change` as a whole, like a tensor.
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
    """Returns the batch on the device: tensors, and all else that has a method `to`, such as packed sequences."""

    def move(part: Any) -> Any:
        if isinstance(part, Tensor):
            return part.to(device, non_blocking=non_blocking)
        if isinstance(part, Mapping):  # its `to` works in place, and the batch on the host is still read
            part = copy.copy(part)
        parameters = inspect.signature(part.to).parameters.values()
        takes = any(p.name == "non_blocking" or p.kind is p.VAR_KEYWORD for p in parameters)
        return part.to(device, non_blocking=non_blocking) if takes else part.to(device)

    return mapped(move, batch, "to")


class Transfer:
    """Copies batches from the host to the device, on a separate stream if the knob device_prefetch says so."""

    def __init__(self, knobs: Knobs, device: torch.device) -> None:
        self.device, self._non_blocking, self._on_host = device, knobs.non_blocking, device.type == "cpu"
        beside = knobs.device_prefetch and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if beside else None

    def __call__(self, batch: Batch) -> Batch:
        """Returns the batch on the device.

        The host runs ahead of the device: when it asks for this batch, the step before it is still being computed.
        A copy on the default stream would queue after that step; on another stream it runs in parallel.
        """
        if self._on_host and type(batch) in (list, tuple, dict):  # a fast path for small steps: nothing moves
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
                tensor.record_stream(current)  # otherwise its memory could be reused while this stream still reads it
        return moved


def sorted_by_length(plan: Sequence[MicroBatch], lengths: Sequence[int] | None) -> bool:
    """Returns whether the samples of the plan's first batch are sorted by length; False if lengths are not known."""
    if lengths is None:
        return False
    first: list[int] = []
    for micro in plan:
        first += [lengths[i] for i in micro.indices]
        if micro.ends_batch:
            break
    return first == sorted(first)


def tensors_of(batch: Batch) -> list[Tensor]:
    """Returns the tensors of a batch of tuples, lists and dicts."""
    if isinstance(batch, Tensor):
        return [batch]
    return [tensor for part in _parts(batch) for tensor in tensors_of(part)]


def _parts(batch: Batch) -> Iterable[Any]:
    return batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()


def _is_seen(batch: Batch) -> bool:
    """Returns whether `tensors_of` finds everything to move: no other object of the batch has a method `to`."""
    if isinstance(batch, Mapping | list | tuple):
        return all(map(_is_seen, _parts(batch)))
    return isinstance(batch, Tensor) or not hasattr(batch, "to")


def sample_lengths(dataset: Dataset[Any], length: Callable[[Any], int] | None) -> list[int] | None:
    """Returns the length of every sample, or None if the workload has no measure of it.

    If the data set has a method `sample_lengths()`, it gives all of them: every process of a study needs them.
    """
    if length is None:
        return None
    size, method = size_of(dataset), getattr(dataset, "sample_lengths", None)
    if not callable(method):
        return [length(cast(Any, dataset[i])) for i in range(size)]
    lengths = list(method())
    if len(lengths) != size:
        raise ValueError(f"{type(dataset).__name__}.sample_lengths(): {len(lengths)} lengths for {size} samples")
    return lengths
