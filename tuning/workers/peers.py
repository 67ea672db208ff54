"""The other processes of trials that take several devices: each is a worker, which follows the one that started it."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from trainables.ranks import End, Group
from tuning.memory.oom import Outcome
from tuning.workers.nvml import VISIBLE
from tuning.workers.worker import Worker
from tuning.workers.worker_config import Following, RankEnd, WorkerConfig

GROUP_ENDS_S = 20.0
"""The seconds that a process may take to leave a training that is over; then another one takes its place."""
POLL_S = 0.02
_EVER_S = 1e5
"""They wait for this process, which is itself watched."""


class Peers:
    """The processes of ranks 1 and up, started by that of rank 0 and ended with it; none for one device."""

    def __init__(self, setting: WorkerConfig) -> None:
        cards = cards_of(setting.ranks, os.environ.get(VISIBLE)) if setting.device == "cuda" else [""] * setting.ranks
        self._device = setting.device
        self._workers: list[Worker] = []
        for rank in range(1, setting.ranks):
            slots = setting.slots * setting.ranks
            own = replace(setting, ranks=1, slots=slots, hang_s=_EVER_S, cards=cards[rank])
            self._workers.append(Worker(own))
        self._said: dict[int, RankEnd] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._group: Group | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __bool__(self) -> bool:
        return bool(self._workers)

    def start(self) -> None:
        """Starts the processes, and does not wait until they have loaded."""
        for worker in self._workers:
            worker.start()

    def end(self) -> None:
        """Ends the processes for good."""
        for worker in self._workers:
            worker.__exit__()
        self._workers = []

    def group(self, order: Following, kind: type[Group] = Group) -> Group:
        """Returns the group of a kind that trains as the order says, once all are there."""
        if self._group is not None:  # of a training that was never begun
            self._group.leave()
            self.left("broken")
        count = len(self._workers) + 1
        for worker in self._workers:  # one that cannot load would be waited for in vain
            worker.renew()
        self._folder = tempfile.TemporaryDirectory(prefix="ct-ranks-")  # the last to meet still reads it
        rendezvous = str(Path(self._folder.name) / "rendezvous")
        for number, worker in enumerate(self._workers):
            own = replace(order, rank=number + 1, count=count, rendezvous=rendezvous)
            thread = threading.Thread(target=self._follow, args=(worker, own), daemon=True)
            self._threads[own.rank] = thread
            thread.start()
        try:
            self._group = kind(0, count, rendezvous, torch.device(self._device), self.left)
        except BaseException:
            self.left("broken")
            raise
        return self._group

    def _follow(self, worker: Worker, order: Following) -> None:
        try:
            self._said[order.rank] = found = worker.follow(order)
        except RuntimeError:
            if worker.is_running:
                raise
            return  # `left` has ended its process before it was told
        if found.outcome != Outcome.OK and self._group is not None:
            self._group.abort()

    def left(self, end: End) -> RankEnd | None:
        """Ends a training in every process; returns what the first one that failed said, else None.

        A process that waits for one that has failed can only be ended; another process is started in its place.
        """
        until = time.monotonic() + (0.0 if end == "broken" else GROUP_ENDS_S)
        while any(t.is_alive() for t in self._threads.values()) and time.monotonic() < until:
            if end == "lost" and any(map(_failed_itself, list(self._said.values()))):
                break
            time.sleep(POLL_S)
        said = dict(self._said)
        for rank, thread in self._threads.items():
            if thread.is_alive():
                self._workers[rank - 1].end()
            thread.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._said, self._threads, self._folder, self._group = {}, {}, None, None
        self.start()
        failed = [replace(found, rank=rank) for rank, found in said.items() if found.outcome != Outcome.OK]
        return next(iter([*filter(_failed_itself, failed), *failed]), None)


def cards_of(ranks: int, visible: str | None) -> list[str]:
    """Returns the card of each rank, where these are visible to the process of rank 0; None: all, by number."""
    named = visible.split(",") if visible else []
    return named[:ranks] if len(named) >= ranks else [str(rank) for rank in range(ranks)]


def _failed_itself(found: RankEnd) -> bool:
    """Returns whether a process failed, and not because another one had."""
    return found.outcome != Outcome.OK and not found.of_another
