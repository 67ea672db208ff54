"""Compares samples that loader processes read with those that this process reads.

A file handle or a connection that forked processes share gives each of them bytes of the other: half of the samples
were wrong in a record file with two workers, and the training seemed 2.6 times as fast.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_convert

from trainables.batches import FORKS, length_of, tensors_of

MOST_SAMPLES, READ_S = 4096, 0.5
"""Samples that are compared, fewer if reading them takes longer than so many seconds."""
MOST_TIMES = 100
"""Loader processes read quick samples as often: they disturb each other only while both read."""
CHUNK = 16
HANG_S = 10
"""Seconds after which a loader process that gives no sample is given up: a probe will tell."""
SHARES_A_FILE = (
    "loader processes read other samples than this process does: they may share an open file, which has one position "
    "for all; open it in worker_init_fn, or in the first __getitem__ of each process"
)


def reads_differ(dataset: Dataset[Any], workers: int, init: Callable[[int], None] | None = None) -> bool:
    """Returns whether `workers` loader processes, 1 or more, read samples unlike those that this process reads.

    `init` is the loader's worker_init_fn. False if nothing can be told: samples are drawn anew at each reading, the
    data set has no length, or reading fails in this process, too, which a training reports.
    """
    size = length_of(dataset)
    if not size:
        return False
    try:
        began = time.perf_counter()
        if not tensors_of(default_convert(dataset[0])):
            return False
        fitting = READ_S / max(1e-5, time.perf_counter() - began)
        count = int(min(MOST_SAMPLES, size, fitting))
        picks = [number * size // count for number in range(count)] if count else []
        here = _read(dataset, picks, seed=1)
        if here != _read(dataset, picks, seed=2):
            return False
        times = 1 + int(min(MOST_TIMES, fitting / count)) if count else 0
        chunks = [picks[start : start + CHUNK] for start in range(0, count, CHUNK)]
        loader = DataLoader(
            dataset,
            batch_sampler=chunks * times,
            collate_fn=_digests,
            num_workers=workers,
            worker_init_fn=_Together(workers, init),
            multiprocessing_context=FORKS,
            timeout=HANG_S,
        )
        with torch.random.fork_rng(devices=[]):
            there = [digest for chunk in loader for digest in chunk]
    except Exception as error:  # whatever a user's data set raises
        return "in DataLoader worker process" in str(error)  # what this process has just read
    return here * times != there


class _Together:
    """A worker_init_fn after which loader processes begin to read together."""

    def __init__(self, workers: int, init: Callable[[int], None] | None) -> None:
        self._init, self._barrier = init, multiprocessing.get_context(FORKS).Barrier(workers)

    def __call__(self, worker: int) -> None:
        if self._init is not None:
            self._init(worker)
        with contextlib.suppress(threading.BrokenBarrierError):
            self._barrier.wait(HANG_S / 2)


def draws(dataset: Dataset[Any], picks: Sequence[int]) -> bool:
    """Returns whether a sample differs when it is read under another seed."""
    return _read(dataset, picks, seed=1) != _read(dataset, picks, seed=2)


def _read(dataset: Dataset[Any], picks: Sequence[int], seed: int) -> list[bytes]:
    """Returns what samples are, read with this seed; Python's and torch's generators are as before."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        read = _digests([dataset[index] for index in picks])
    random.setstate(state)
    return read


def _digests(samples: Sequence[Any]) -> list[bytes]:
    """Returns a digest of the tensors and arrays of each sample."""
    found = []
    for sample in samples:
        digest = hashlib.blake2b(digest_size=16)
        for tensor in tensors_of(default_convert(sample)):
            digest.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        found.append(digest.digest())
    return found
