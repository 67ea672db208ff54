"""Data parallelism: several processes train one model, each on its part of every micro-batch (PyTorch's DDP).

Rank 0 leads. It alone evaluates, keeps the time, and says before each batch whether there is another one, so that the
others need no clock. Their gradients are averaged at the end of a batch. Batches, micro-batches and the order of the
samples are those of one process: `micro_batch_size` counts the samples of all ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from trainables.batches import MicroBatch
from trainables.workload import LoopError, Workload

NEVER = timedelta(days=1)
"""Rank 0 evaluates while the others wait; one that is gone is known by its closed connection, or ended by the study."""
LOST = re.compile(r"gloo|NCCL|Connection (?:closed|reset)|Broken pipe|process group", re.IGNORECASE)
End = Literal["whole", "broken", "lost"]
"""How a training of several ended in one: between two batches; of an error in the midst of one; as another was lost."""
SEEDS_APART = 1_000_003
"""Between the seeds of two ranks' dropout."""


class RankFailed(Exception):
    """Another rank failed; `found` is what its process said of it."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        super().__init__(f"rank {found.get('rank')}: {found.get('message')}")
        self.found = found


class Ranks:
    """One process that trains alone, and what `Group` changes where there are several."""

    rank, count = 0, 1

    def parts(self, todo: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Returns this rank's part of each micro-batch."""
        return todo

    def more(self, samples: int = 0) -> bool:
        """Returns whether there is another batch; asked before each, in a loop of one's own with its samples so far."""
        return True

    def micro_step(self, *, ends_batch: bool) -> contextlib.AbstractContextManager[object]:
        """Returns what a forward and backward pass runs in."""
        return contextlib.nullcontext()

    def loss(self, workload: Workload, model: nn.Module, batch: Any) -> Tensor:
        """Returns the loss of this rank's part."""
        return workload.loss(model, batch)

    def stepped(self, samples: int = 0) -> None:
        """The optimiser's step is over, and so is the batch, with so many samples so far."""

    def same_order(self) -> None:
        """A loop of one's own begins a pass: every rank draws the same order."""

    def part_of(self, batch: Any, dim: int, size: int) -> tuple[Any, float]:
        """Returns this rank's part of a batch whose `size` samples lie along `dim`, and the weight of its mean loss."""
        return batch, 1.0

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes an optimiser's gradients the mean over the ranks, and its rates those of rank 0."""

    def training(self, state: Any) -> contextlib.AbstractContextManager[object]:
        """Returns what a whole training runs in."""
        return contextlib.nullcontext()


ALONE = Ranks()


class Group(Ranks):
    """The processes of one training, which meet in the file `rendezvous`; made by each of them at the same time.

    `left` is called with how it ended once the group is left, and returns what the first other that failed said, None
    where none did.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        rendezvous: str,
        device: torch.device,
        left: Callable[[End], Mapping[str, Any] | None] = lambda end: None,
    ) -> None:
        self.rank, self.count = rank, count
        self._device, self._left, self._between, self._aborted = device, left, False, False
        self._ddp: DistributedDataParallel | None = None
        self._seed: int | None = None
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        for library in ("GLOO", "NCCL"):  # a trial is of one machine: nothing listens to others
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # for `abort`; by default the process is ended
        self._excepthook = sys.excepthook  # which every group wraps once more
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = distributed.FileStore(rendezvous, count)  # type: ignore[attr-defined]
        distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=NEVER)

    def parts(self, todo: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Returns this rank's part of each micro-batch; `share` is such that the mean over ranks is the batch's mean.

        Every second sample, say, so that those sorted by length are alike. Where there are fewer samples than ranks, a
        rank without one takes the first, which then counts nothing.
        """
        return [part(micro, self.rank, self.count) for micro in todo]

    def more(self, samples: int = 0, *, over: bool = False) -> bool:
        """Returns whether there is another batch, as rank 0 has it: all but `over`.

        Raises LoopError where it has taken other samples than this rank.
        """
        said = torch.tensor([int(not over), samples])
        distributed.broadcast(said, 0)
        goes_on, theirs = said.tolist()
        if goes_on and theirs != samples:
            raise LoopError(f"rank {self.rank} has taken {samples} samples, and rank 0 {theirs}: does it skip a step?")
        self._between = not goes_on
        return bool(goes_on)

    def micro_step(self, *, ends_batch: bool) -> contextlib.AbstractContextManager[object]:
        """Returns what a pass runs in: gradients are averaged in the backward pass of a batch's last one."""
        return contextlib.nullcontext() if ends_batch else self._wrapped().no_sync()

    def loss(self, workload: Workload, model: nn.Module, batch: Any) -> Tensor:
        """Returns the loss of this rank's part."""
        found: Tensor = self._wrapped()(model, batch)
        return found

    def stepped(self, samples: int = 0) -> None:
        """The optimiser's step is over, and so is the batch; raises RuntimeError where it was made without a rank."""
        if self._aborted:
            raise RuntimeError("the process group was aborted")
        self._between = True
        self._draw(samples)

    def ready(self, *, is_so: bool = True) -> None:
        """Waits until every rank has its model; raises RuntimeError where one has none."""
        said = torch.tensor([int(is_so)])
        distributed.all_reduce(said, distributed.ReduceOp.MIN)
        if is_so and not said.item():
            raise RuntimeError("a rank of the process group has no model")

    @contextlib.contextmanager
    def training(self, state: Any) -> Iterator[None]:
        """Trains as one of the group inside the block, from where rank 0 is; raises RankFailed where another fails."""
        try:
            self.ready()
            self._meet(state)
            self._between = True
            yield
        except BaseException as error:
            over = state.samples >= state.plan.samples
            if self._between and not over and self.rank == 0:
                with contextlib.suppress(RuntimeError):  # one that is gone need not be told
                    self.more(over=True)
            self.leave()
            lost = isinstance(error, RuntimeError) and bool(LOST.search(str(error)))
            said = self._left("whole" if self._between else "lost" if lost else "broken")
            if said is not None and (lost or self._aborted) and isinstance(error, Exception):
                raise RankFailed(said) from error
            raise
        self.leave()
        self._left("whole")

    def _meet(self, state: Any) -> None:
        """Makes what this rank trains that of rank 0."""
        whole = _Loss(state.resident.workload, state.model)
        # Only rank 0's are evaluated and written, and those of a cache may differ in size.
        buffers = [name for name, _ in whole.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(whole, buffers)
        self._ddp = DistributedDataParallel(
            whole,
            gradient_as_bucket_view=True,
            find_unused_parameters=True,  # phases and heads may leave some out
        )
        self._as_the_first(state)

    def _as_the_first(self, state: Any) -> None:
        """Makes this rank's counters and optimiser those of rank 0; its weights are by now."""
        own: list[Any] = [None]
        if self.rank == 0:
            went = {n: getattr(state, n) for n in ("samples", "steps", "epoch", "micro_batches_done")}
            optimizer = state.optimizer.state_dict() if state.samples else None
            own = [(went, optimizer, state.scaler.state_dict())]
        distributed.broadcast_object_list(own, 0)
        if self.rank == 0:
            return
        went, optimizer, scaler = own[0]
        for name, value in went.items():
            setattr(state, name, value)
        if optimizer is not None:
            state.optimizer.load_state_dict(optimizer)
        state.scaler.load_state_dict(scaler)
        self._seed = state.config.seed + SEEDS_APART * self.rank
        self._draw(state.samples)

    def _draw(self, samples: int) -> None:
        """Seeds the dropout of a rank above 0 for its next batch: one that goes on from a checkpoint draws the same."""
        if self._seed is not None:
            torch.manual_seed(self._seed + samples)

    def _wrapped(self) -> DistributedDataParallel:
        if self._ddp is None:
            raise RuntimeError("the group does not train")
        return self._ddp

    def leave(self) -> None:
        """Leaves the group, once."""
        self._ddp = None
        sys.excepthook = self._excepthook
        if distributed.is_initialized():
            with contextlib.suppress(RuntimeError):  # of one that is broken
                distributed.destroy_process_group()

    def abort(self) -> None:
        """Ends what waits for a rank that is gone, from another thread; on a card nothing else does."""
        self._aborted = True
        if self._device.type == "cuda" and (whole := distributed.group.WORLD) is not None:
            whole.abort()


class _Loss(nn.Module):
    """A workload's loss as the forward pass of a module, so that DDP sees all that is called of the model."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        super().__init__()
        self._workload, self.model = workload, model

    def forward(self, called: nn.Module, batch: Any) -> Tensor:
        """Returns the loss; `called` is the model, or what torch.compile made of it."""
        return self._workload.loss(called, batch)


def part(micro: MicroBatch, rank: int, count: int) -> MicroBatch:
    """Returns one rank's part of a micro-batch, as `Group.parts` has it."""
    own = micro.indices[rank::count]
    share = micro.share * count * len(own) / len(micro.indices)
    return replace(micro, indices=own or micro.indices[:1], share=share)


def part_size(micro_batch: int, count: int) -> int:
    """Returns the largest part of a micro-batch that one of `count` ranks has."""
    return -(-micro_batch // count)
