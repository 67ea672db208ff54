"""Data parallelism: several processes train one model, each on its part of every micro-batch (PyTorch's DDP).

Rank 0 leads. Only rank 0 evaluates and keeps the time; before each batch it broadcasts whether there is another one, so
the other ranks need no clock. Gradients are averaged at the end of a batch. Batches, micro-batches and the order of the
samples are the same as in one process: `micro_batch_size` counts the samples of all ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from trainables.batches import MicroBatch
from trainables.workload import LoopError, Workload

NEVER = timedelta(days=1)
"""No timeout, as ranks wait while rank 0 evaluates: a lost rank closes its connection, a hung one the study ends."""
LOST = re.compile(r"gloo|NCCL|Connection (?:closed|reset)|Broken pipe|process group", re.IGNORECASE)
End = Literal["whole", "broken", "lost"]
"""How training ended in one rank: between two batches; by an error within a batch; because another rank was lost."""
SEEDS_APART = 1_000_003
"""Difference of the seeds for dropout of two neighbouring ranks."""


class RankFailed(Exception):
    """Another rank failed; `found` is the report of its process, with its `rank` and a `message`."""

    def __init__(self, found: Any) -> None:
        super().__init__(f"rank {found.rank}: {found.message}")
        self.found = found


class Ranks:
    """A process that trains alone; `Group` overrides its methods for several processes."""

    rank, count = 0, 1

    def parts(self, todo: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Returns this rank's part of each micro-batch."""
        return todo

    def more(self, samples: int = 0) -> bool:
        """Returns whether there is another batch; called before each. A custom loop gives its samples so far."""
        return True

    def micro_step(self, *, ends_batch: bool) -> contextlib.AbstractContextManager[object]:
        """Returns the context of a forward and backward pass."""
        return contextlib.nullcontext()

    def loss(self, workload: Workload, model: nn.Module, batch: Any) -> Tensor:
        """Returns the loss of this rank's part."""
        return workload.loss(model, batch)

    def stepped(self, samples: int = 0) -> None:
        """Is called after each optimiser step with the samples so far."""

    def same_order(self) -> None:
        """Is called when a custom loop begins an epoch, so that all ranks draw the same order of samples."""

    def part_of(self, batch: Any, dim: int, size: int) -> tuple[Any, float]:
        """Returns this rank's part of a batch whose `size` samples lie along `dim`, and the weight of its mean loss."""
        return batch, 1.0

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        """Replaces the gradients by their mean over the ranks, and the learning rates by those of rank 0."""

    def training(self, state: Any) -> contextlib.AbstractContextManager[object]:
        """Returns the context of a whole training."""
        return contextlib.nullcontext()


ALONE = Ranks()


class Group(Ranks):
    """The processes of one training, which meet by the file `rendezvous`. Each creates its `Group` at the same time.

    `left` is called after this process has left the group, with how its training ended. It returns the report of the
    first other rank that failed, or None.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        rendezvous: str,
        device: torch.device,
        left: Callable[[End], Any] = lambda end: None,
    ) -> None:
        self.rank, self.count = rank, count
        self._device, self._left, self._between, self._aborted = device, left, False, False
        self._is_met = False
        self._ddp: DistributedDataParallel | None = None
        self._seed: int | None = None
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        for library in ("GLOO", "NCCL"):  # a trial runs on one machine: no port is open to others
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # by default, `abort` would end the process
        self._excepthook = sys.excepthook  # to restore: every process group wraps it once more
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = distributed.FileStore(rendezvous, count)  # type: ignore[attr-defined]
        distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=NEVER)

    def parts(self, todo: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Returns this rank's part of each micro-batch, weighted so that the mean over ranks is the mean of the batch.

        A rank takes every `count`-th sample, so that the parts are alike if samples are sorted by length. If there are
        fewer samples than ranks, a rank without one takes the first, with weight 0.
        """
        return [part(micro, self.rank, self.count) for micro in todo]

    def more(self, samples: int = 0, *, over: bool = False) -> bool:
        """Returns whether there is another batch, by the word of rank 0: yes, unless rank 0 gives `over`.

        Raises LoopError if rank 0 has taken another number of samples than this rank.
        """
        message = torch.tensor([int(not over), samples])
        distributed.broadcast(message, 0)
        is_another, first_samples = message.tolist()
        if is_another and first_samples != samples:
            counts = f"rank {self.rank} has taken {samples} samples, and rank 0 {first_samples}"
            raise LoopError(f"{counts}: does it skip a step?")
        self._between = not is_another
        return bool(is_another)

    def micro_step(self, *, ends_batch: bool) -> contextlib.AbstractContextManager[object]:
        """Returns the context of a micro-step; only the last one of a batch averages gradients in its backward pass."""
        return contextlib.nullcontext() if ends_batch else self._ddp_module().no_sync()

    def loss(self, workload: Workload, model: nn.Module, batch: Any) -> Tensor:
        """Returns the loss of this rank's part."""
        loss: Tensor = self._ddp_module()(model, batch)
        return loss

    def stepped(self, samples: int = 0) -> None:
        """Is called after each optimiser step; raises RuntimeError if the group was aborted, so a rank was missing."""
        if self._aborted:
            raise RuntimeError("the process group was aborted")
        self._between = True
        self._seed_dropout(samples)

    def ready(self, *, is_so: bool = True) -> None:
        """Waits until every rank has its model; raises RuntimeError if one has none. Does nothing a second time."""
        if self._is_met:
            return
        self._is_met = True
        message = torch.tensor([int(is_so)])
        distributed.all_reduce(message, distributed.ReduceOp.MIN)
        if is_so and not message.item():
            raise RuntimeError("a rank of the process group has no model")

    @contextlib.contextmanager
    def training(self, state: Any) -> Iterator[None]:
        """Trains with the group inside the block, from the state of rank 0; raises RankFailed if another rank fails."""
        try:
            self.ready()
            self._synchronize(state)
            self._between = True
            yield
        except BaseException as error:
            over = state.samples >= state.plan.samples
            if self._between and not over and self.rank == 0:
                with contextlib.suppress(RuntimeError):  # a rank may be gone
                    self.more(over=True)
            self.leave()
            lost = isinstance(error, RuntimeError) and bool(LOST.search(str(error)))
            report = self._left("whole" if self._between else "lost" if lost else "broken")
            if report is not None and (lost or self._aborted) and isinstance(error, Exception):
                raise RankFailed(report) from error
            raise
        self.leave()
        self._left("whole")

    def _synchronize(self, state: Any) -> None:
        """Gives this rank the model and the state of rank 0."""
        whole = _Loss(state.resident.workload, state.model)
        # Buffers are left out: only those of rank 0 are evaluated and saved, and buffers of a cache may differ in size.
        buffers = [name for name, _ in whole.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(whole, buffers)
        self._ddp = DistributedDataParallel(
            whole,
            gradient_as_bucket_view=True,
            find_unused_parameters=True,  # phases and heads may leave some out
        )
        # The counters and the optimiser of rank 0; DDP has copied its weights by now.
        message: list[Any] = [None]
        if self.rank == 0:
            counters = {n: getattr(state, n) for n in ("samples", "steps", "epoch", "micro_batches_done")}
            optimizer = state.optimizer.state_dict() if state.samples else None
            message = [(counters, optimizer, state.scaler.state_dict())]
        distributed.broadcast_object_list(message, 0)
        if self.rank == 0:
            return
        counters, optimizer, scaler = message[0]
        for name, value in counters.items():
            setattr(state, name, value)
        if optimizer is not None:
            state.optimizer.load_state_dict(optimizer)
        state.scaler.load_state_dict(scaler)
        self._seed = state.config.seed + SEEDS_APART * self.rank
        self._seed_dropout(state.samples)

    def _seed_dropout(self, samples: int) -> None:
        """Seeds the dropout of a rank above 0 for its next batch; after a resume it draws the same numbers."""
        if self._seed is not None:
            torch.manual_seed(self._seed + samples)

    def _ddp_module(self) -> DistributedDataParallel:
        if self._ddp is None:
            raise RuntimeError("the group does not train")
        return self._ddp

    def leave(self) -> None:
        """Leaves the group, once."""
        self._ddp = None
        sys.excepthook = self._excepthook
        if distributed.is_initialized():
            with contextlib.suppress(RuntimeError):  # the group may be broken
                distributed.destroy_process_group()

    def abort(self) -> None:
        """Ends, from another thread, a wait for a lost rank; with NCCL nothing else ends it."""
        self._aborted = True
        if self._device.type == "cuda" and (whole := distributed.group.WORLD) is not None:
            whole.abort()


class _Loss(nn.Module):
    """A workload's loss as the forward pass of a module, so that DDP sees every call of the model."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        super().__init__()
        self._workload, self.model = workload, model

    def forward(self, called: nn.Module, batch: Any) -> Tensor:
        """Returns the loss; `called` is the model, compiled or not."""
        return self._workload.loss(called, batch)


def part(micro: MicroBatch, rank: int, count: int) -> MicroBatch:
    """Returns one rank's part of a micro-batch, as described at `Group.parts`."""
    indices = micro.indices[rank::count]
    share = micro.share * count * len(indices) / len(micro.indices)
    return replace(micro, indices=indices or micro.indices[:1], share=share)


def part_size(micro_batch: int, count: int) -> int:
    """Returns the size of the largest part of a micro-batch that is split over `count` ranks."""
    return -(-micro_batch // count)
