"""Several processes that run one loop of its own: each takes its part of a batch, and gradients are averaged.

Each process calls `train(run)`, and reads the same micro-batches in the same order. Rank 0 leads, as in `ranks`: it
alone evaluates, and says before each batch whether there is another one.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, distributed

from trainables.ranks import SEEDS_APART, Group
from trainables.workload import LoopError


class LoopGroup(Group):
    """The processes of one training by a loop of its own."""

    _is_new = False

    def same_order(self) -> None:
        """A pass begins: every rank has the generators of rank 0, from which samplers draw."""
        own: list[Any] = [None]
        if self.rank == 0:
            own = [(torch.get_rng_state(), random.getstate(), np.random.get_state())]
        distributed.broadcast_object_list(own, 0)
        if self.rank:
            ours, pythons, numpys = own[0]
            torch.set_rng_state(ours)
            random.setstate(pythons)
            np.random.set_state(numpys)
        self._is_new = True

    def part_of(self, batch: Any, dim: int, size: int) -> tuple[Any, float]:
        """Returns this rank's samples, every `count`-th of a batch, and the weight of their mean loss.

        Where there are fewer samples than ranks, a rank without one takes the first, with weight 0. Raises
        LoopError for a batch that holds nothing that can be taken apart.
        """
        if self._is_new and self.rank:  # the order is drawn by now; dropout is to differ
            torch.manual_seed(int(torch.randint(1 << 31, ())) + SEEDS_APART * self.rank)
        self._is_new = False
        own = list(range(size))[self.rank :: self.count]
        taken, found = _taken(batch, dim, size, own or [0])
        if not found:
            said = f"devices_per_trial={self.count}: a batch of type {type(batch).__name__} holds no tensor or list of"
            raise LoopError(f"{said} {size} samples, so no process can take its part of it")
        return taken, self.count * len(own) / size

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes an optimiser's gradients the mean over the ranks, and its learning rates those of rank 0.

        A gradient that no rank has stays away.
        """
        rates = torch.tensor([float(group["lr"]) for group in optimizer.param_groups], dtype=torch.float64)
        distributed.broadcast(rates, 0)
        for group, rate in zip(optimizer.param_groups, rates.tolist(), strict=True):
            if not isinstance(group["lr"], Tensor):
                group["lr"] = rate
        own = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        has = torch.tensor([p.grad is not None for p in own], dtype=torch.int32)
        distributed.all_reduce(has, distributed.ReduceOp.MAX)
        meant = [p for p, is_there in zip(own, has.tolist(), strict=True) if is_there]
        for kind in dict.fromkeys((p.device, p.dtype) for p in meant):
            alike = [p for p in meant if (p.device, p.dtype) == kind]
            for parameter in alike:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            flat = torch.cat([cast(Tensor, p.grad).flatten() for p in alike])
            distributed.all_reduce(flat)
            flat /= self.count
            for parameter, mean in zip(alike, flat.split([p.numel() for p in alike]), strict=True):
                cast(Tensor, parameter.grad).copy_(mean.view_as(parameter))

    def _meet(self, state: Any) -> None:
        for model in state.prepared:
            for tensor in (*model.parameters(), *model.buffers()):
                own = tensor.detach().contiguous()
                distributed.broadcast(own, 0)
                tensor.detach().copy_(own)


def _taken(batch: Any, dim: int, size: int, own: Sequence[int]) -> tuple[Any, bool]:
    """Returns those samples of a batch, and whether anything in it was taken apart.

    Raises LoopError for a tensor of several numbers without as many samples: each process would have all of it.
    """
    if isinstance(batch, Tensor):
        along = dim if batch.dim() > dim and batch.shape[dim] == size else 0
        if batch.dim() and batch.shape[along] == size:
            return batch.index_select(along, torch.tensor(own, device=batch.device)), True
        if batch.numel() > 1:
            raise LoopError(f"a tensor of shape {tuple(batch.shape)} in a batch of {size} samples has none to each")
        return batch, False
    if isinstance(batch, Mapping):
        parts = {name: _taken(value, dim, size, own) for name, value in batch.items()}
        made: Any = copy.copy(batch)
        for name, (part, _) in parts.items():
            made[name] = part
        return made, any(is_apart for _, is_apart in parts.values())
    if not isinstance(batch, list | tuple):
        return batch, False
    if len(batch) == size and _are_samples(batch):
        return type(batch)(batch[i] for i in own), True
    found = [_taken(value, dim, size, own) for value in batch]
    values, is_apart = [part for part, _ in found], any(is_apart for _, is_apart in found)
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values), is_apart


def _are_samples(values: Sequence[Any]) -> bool:
    """Returns whether a list or tuple has a sample in each place, and not inputs in one and labels in another.

    So do words, numbers, and tensors of one shape; those of several, or of as many rows as samples, are parts.
    """
    if hasattr(values, "_fields"):
        return False
    if all(isinstance(value, Tensor) for value in values):
        alike = len({(value.shape, value.dtype) for value in values}) == 1
        return alike and values[0].dim() > 1 and len(values[0]) != len(values)
    return not any(isinstance(value, Tensor | list | tuple | Mapping) for value in values)
