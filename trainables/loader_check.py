"""Compares samples that loader processes read with those that this process reads.

A file handle or a connection that forked processes share gives each of them bytes of the other: half of the samples
were wrong in a record file with two workers, and the training seemed 2.6 times as fast.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import hashlib
import io
import itertools
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, default_convert

from trainables import moving_numbers
from trainables.batches import FORKS, length_of, tensors_of

MOST_SAMPLES, READ_S = 4096, 0.5
"""Samples that are compared, fewer if reading them takes longer than so many seconds."""
MOST_TIMES = 100
"""Loader processes read quick samples as often: they disturb each other only while both read."""
CHUNK, SETTLED_S = 16, 0.05
STREAMED = 32
"""Samples of a stream that are compared, for each loader process."""
_ASKS_PROCESS = {"getpid", "get_worker_info"}
HANG_S = 10
"""Seconds after which a loader process that gives no sample is given up: a probe will tell."""
STREAM = (
    "the data set is a stream, which every loader process reads by itself: all of it, unless it is sharded by "
    "get_worker_info()"
)
COPIES = (
    "loader processes repeat their samples in each epoch, as each begins with the same seed, or copy of the data set's "
    "generator or counter: draw from torch's generator, or seed yours in worker_init_fn by torch.initial_seed()"
)
KEPT = (
    "the data set keeps samples after it has drawn them: this process keeps each for good, and loader processes draw "
    "anew in each epoch; keep samples as they are before anything is drawn"
)
COUNTS_READS = "samples depend on {}, which each read changes, and a loader process counts the reads of its own alone"
MOVES = "samples depend on {}, which your loop changes as it trains, and a loader process keeps the value it began with"
SHARES_A_FILE = (
    "loader processes read other samples than this process does: they may share an open file, which has one position "
    "for all; open it in worker_init_fn, or in the first __getitem__ of each process (by os.getpid())"
)


def reads_differ(dataset: Dataset[Any], workers: int, init: Callable[[int], None] | None = None) -> str:
    """Returns why `workers` loader processes, 1 or more, read other samples than this process does, "" if they do not.

    `init` is the loader's worker_init_fn. "" also if nothing can be told: the data set has no length, or reading fails
    in this process, too, which a training reports.
    """
    given = dataset
    try:
        if isinstance(given, IterableDataset):
            return _stream_differs(given, workers, init)
        dataset = _copied(given)
        size = length_of(dataset)
        if not size:
            return ""
        began = time.perf_counter()
        with _seeded(0):
            if not tensors_of(default_convert(dataset[0])):
                return ""
        fitting = READ_S / max(1e-5, time.perf_counter() - began)
        count = int(min(MOST_SAMPLES, size, fitting))
        picks = [number * size // count for number in range(count)] if count else []
        first = _loader(given, workers, init, batch_sampler=[[size // 3]] * workers)
        is_drawn = count and _read_by(first) != _read_by(first)  # before this process has read it
        numbers = moving_numbers.numbers_of(dataset)
        before, few = moving_numbers.values_of(numbers), picks[:CHUNK]
        here = _read(dataset, picks, seed=1)
        times = moving_numbers.multiples(max(count, 1), size)
        if name := moving_numbers.decisive(numbers, before, times, lambda: _read(dataset, few, seed=1)):
            return COUNTS_READS.format(name)
        if here != (other := _read(dataset, picks, seed=2)):
            drawn = next(pick for pick, a, b in zip(picks, here, other, strict=True) if a != b)
            return _copies_differ(given, drawn, workers, init)
        if is_drawn:
            return KEPT
        repeats = 1 + int(min(MOST_TIMES, fitting / count)) if count else 0
        chunks = [picks[start : start + CHUNK] for start in range(0, count, CHUNK)] * repeats
        there = _read_by(_loader(given, workers, init, batch_sampler=chunks))
    except Exception as error:  # whatever a user's data set raises
        is_theirs = "in DataLoader worker process" in str(error)  # what this process has just read
        return SHARES_A_FILE if is_theirs else ""
    return "" if here * repeats == there else SHARES_A_FILE


def _copied(dataset: Any) -> Any:
    """Returns a copy of a data set and of those that it wraps: a file opened in it is not open in the processes."""
    if not hasattr(dataset, "__dict__"):
        return dataset
    copied = copy.copy(dataset)
    if "dataset" in vars(copied):
        vars(copied)["dataset"] = _copied(copied.dataset)
    return copied


def open_file(held: object, depth: int = 3) -> str:
    """Returns the name of an attribute, or of one of its own, that is a file open for reading; "" for none.

    A class that asks for its process is taken to open a file in each.
    """
    methods = [m for owner in type(held).__mro__ for m in vars(owner).values() if isinstance(m, FunctionType)]
    if any(_ASKS_PROCESS.intersection(method.__code__.co_names) for method in methods):
        return ""
    attributes: dict[str, object] = getattr(held, "__dict__", {})
    for name, value in attributes.items():
        if isinstance(value, io.IOBase):
            if not value.closed and value.readable() and value.seekable() and not isinstance(value, io.BytesIO):
                return name
        elif depth and (within := open_file(value, depth - 1)):
            return f"{name}.{within}"
    return ""


def _copies_differ(dataset: Dataset[Any], pick: int, workers: int, init: Callable[[int], None] | None) -> str:
    """Returns COPIES if a sample that this process reads anew each time is the same in two epochs of loader processes.

    Samples drawn by the generators of torch, NumPy or Python differ unless `init` seeds these by a number of its own.
    """
    copied = _copied(dataset)
    if init is None and _read(copied, [pick], seed=1) == _read(copied, [pick], seed=1):
        return ""
    loader = _loader(dataset, workers, init, batch_sampler=[[pick] * 4] * workers)
    return COPIES if _read_by(loader) == _read_by(loader) else ""


def _stream_differs(stream: IterableDataset[Any], workers: int, init: Callable[[int], None] | None) -> str:
    """Returns STREAM if loader processes read samples of a stream more than once, or if that cannot be told.

    COPIES if it counts its epochs by itself, which a copy of it does not.
    """
    until = time.perf_counter() + READ_S
    most = STREAMED * workers

    def first(seed: int) -> list[bytes]:
        with _seeded(seed):
            found = []
            for sample in itertools.islice(stream, most):
                found.append(sample)
                if time.perf_counter() > until:
                    break
            return _digests(found)

    here, loader = first(1), _loader(stream, workers, init, batch_size=1)
    if any(a != b for a, b in zip(here, first(1), strict=False)) and _read_by(loader, most) == _read_by(loader, most):
        return COPIES
    if workers == 1:
        return ""
    if not here or here != first(2)[: len(here)]:
        return STREAM
    there = _read_by(loader, len(here))
    more = collections.Counter(there) - collections.Counter(here)
    return STREAM if any(digest in here for digest in more) else ""


def _loader(dataset: Any, workers: int, init: Callable[[int], None] | None, **batches: Any) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        collate_fn=_digests,
        num_workers=workers,
        worker_init_fn=_Together(workers, init),
        multiprocessing_context=FORKS,
        timeout=HANG_S,
        **batches,
    )


def _read_by(loader: DataLoader[Any], most: int | None = None) -> list[bytes]:
    """Returns the digests that a loader's processes give; torch's generator draws their seeds."""
    epoch = iter(loader)
    return list(itertools.islice(itertools.chain.from_iterable(epoch), most))


class _Together:
    """A worker_init_fn after which loader processes begin to read together."""

    def __init__(self, workers: int, init: Callable[[int], None] | None) -> None:
        self._init, self._barrier = init, multiprocessing.get_context(FORKS).Barrier(workers)

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(HANG_S / 2)


class Moving:
    """The numbers that samples depend on, as they are when a training begins."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        self._dataset, self._collate = dataset, None if collate is default_collate else collate
        self._before = moving_numbers.values_of(moving_numbers.numbers_of(dataset, self._collate))

    def matters(self, samples: int, pass_samples: int, progress: float = 1.0) -> str:
        """Returns why loader processes would read other samples than this process; "" if they would not.

        The training has gone on for so many samples, a share `progress` of it.
        """
        name = self.changed(moving_numbers.multiples(samples, pass_samples, progress))
        return MOVES.format(name) if name else ""

    def changed(self, times: Sequence[float] = (0.0,)) -> str:
        """Returns the first number that has changed and that samples depend on, if its change is so many `times` as
        large, or is taken back; "" for none.
        """
        copied, collate = _copied(self._dataset), self._collate
        size, most = 0 if isinstance(copied, IterableDataset) else length_of(copied) or 0, CHUNK

        def read() -> list[bytes]:
            nonlocal most
            until = time.perf_counter() + SETTLED_S
            each = (copied[number * size // CHUNK] for number in range(CHUNK)) if size else iter(copied)
            found = []
            with _seeded(1):
                for sample in itertools.islice(each, most):
                    found.append(sample)
                    if most == CHUNK and time.perf_counter() > until:
                        most = len(found)  # in each further reading, too
                        break
                return _digests([collate(found)] if collate else found)

        return moving_numbers.decisive(moving_numbers.numbers_of(copied, collate), self._before, times, read)


def settled(dataset: Any) -> list[bytes] | None:
    """Returns digests of two samples; None if a data set has no length, draws them anew, or takes long to read."""
    size = None if isinstance(dataset, IterableDataset) else length_of(dataset)
    if not size or not hasattr(dataset, "__getitem__"):
        return None
    try:
        copied, picks, began = _copied(dataset), (0, size // 2), time.perf_counter()
        found = _read(copied, picks, seed=1)
        is_quick = time.perf_counter() - began < SETTLED_S
        return found if is_quick and found == _read(copied, picks, seed=1) else None
    except Exception:  # whatever a user's data set raises: the training reports it
        return None


def draws(dataset: Dataset[Any], picks: Sequence[int]) -> bool:
    """Returns whether a sample differs when it is read under another seed."""
    return _read(dataset, picks, seed=1) != _read(dataset, picks, seed=2)


def seeds() -> str:
    """Returns a digest of the generators of torch, NumPy and Python."""
    states = torch.get_rng_state().numpy().tobytes(), repr(random.getstate()), repr(np.random.get_state(legacy=False))
    return hashlib.blake2b(repr(states).encode()).hexdigest()


def collates_anew(dataset: Any, collate: Callable[[list[Any]], Any], most: int) -> bool:
    """Returns whether `most` samples, or all, make another batch under another seed; False if that cannot be told."""
    size = None if isinstance(dataset, IterableDataset) else length_of(dataset)
    copied, found = _copied(dataset), []
    try:
        for seed in (1, 2):
            with _seeded(1):
                samples = [copied[index] for index in range(min(most, size or 0))]
            with _seeded(seed):
                found.append(_digests([collate(samples)]))
    except Exception:  # whatever a user's data set raises: the training reports it
        return False
    return found[0] != found[1]


def _read(dataset: Dataset[Any], picks: Sequence[int], seed: int) -> list[bytes]:
    """Returns what samples are, read with this seed."""
    with _seeded(seed):
        return _digests([dataset[index] for index in picks])


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seeds the generators of torch, NumPy and Python inside the block; they are as before after it."""
    state, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(of_numpy)


def _digests(samples: Sequence[Any]) -> list[bytes]:
    """Returns a digest of the tensors, arrays, numbers and texts of each sample."""
    found = []
    for sample in samples:
        digest, parts = hashlib.blake2b(digest_size=16), [default_convert(sample)]
        while parts:
            part = parts.pop()
            if isinstance(part, Tensor):
                digest.update(repr((tuple(part.shape), part.dtype)).encode())
                digest.update(part.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
            elif isinstance(part, str | bytes | int | float):
                digest.update(repr(part).encode())
            elif isinstance(part, Mapping | list | tuple):
                parts += part.values() if isinstance(part, Mapping) else part
        found.append(digest.digest())
    return found
