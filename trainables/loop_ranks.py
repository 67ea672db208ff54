"""Data parallelism of a custom loop: each process takes its part of a batch, and gradients are averaged.

Each process calls `train(run)`, and reads the same micro-batches in the same order. Rank 0 leads, as in `ranks`: only
rank 0 evaluates, and before each batch it broadcasts whether there is another one.
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
    """The processes of one training by a custom loop."""

    _is_new = False

    def same_order(self) -> None:
        """Begins an epoch: copies the random generators of rank 0, from which samplers draw, to every rank."""
        message: list[Any] = [None]
        if self.rank == 0:
            message = [(torch.get_rng_state(), random.getstate(), np.random.get_state())]
        distributed.broadcast_object_list(message, 0)
        if self.rank:
            torch_state, python_state, numpy_state = message[0]
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
            np.random.set_state(numpy_state)
        self._is_new = True

    def part_of(self, batch: Any, dim: int, size: int) -> tuple[Any, float]:
        """Returns this rank's samples, every `count`-th of a batch, and the weight of their mean loss.

        If there are fewer samples than ranks, a rank without one takes the first, with weight 0. Raises LoopError for a
        batch that cannot be split.
        """
        if self._is_new and self.rank:  # the order is drawn by now; dropout is to differ
            torch.manual_seed(int(torch.randint(1 << 31, ())) + SEEDS_APART * self.rank)
        self._is_new = False
        indices = list(range(size))[self.rank :: self.count]
        samples, is_split = taken(batch, dim, size, indices or [0])
        if not is_split:
            what = f"devices_per_trial={self.count}: a batch of type {type(batch).__name__} holds no tensor or list of"
            raise LoopError(f"{what} {size} samples, so no process can take its part of it")
        return samples, self.count * len(indices) / size

    def average(self, optimizer: torch.optim.Optimizer) -> None:
        """Replaces the gradients by their mean over the ranks, and the learning rates by those of rank 0.

        A parameter that has no gradient in any rank keeps none.
        """
        rates = torch.tensor([float(group["lr"]) for group in optimizer.param_groups], dtype=torch.float64)
        distributed.broadcast(rates, 0)
        for group, rate in zip(optimizer.param_groups, rates.tolist(), strict=True):
            if not isinstance(group["lr"], Tensor):
                group["lr"] = rate
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        has = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32)
        distributed.all_reduce(has, distributed.ReduceOp.MAX)
        averaged = [p for p, is_there in zip(trained, has.tolist(), strict=True) if is_there]
        for kind in dict.fromkeys((p.device, p.dtype) for p in averaged):
            alike = [p for p in averaged if (p.device, p.dtype) == kind]
            for parameter in alike:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            flat = torch.cat([cast(Tensor, p.grad).flatten() for p in alike])
            distributed.all_reduce(flat)
            flat /= self.count
            for parameter, mean in zip(alike, flat.split([p.numel() for p in alike]), strict=True):
                cast(Tensor, parameter.grad).copy_(mean.view_as(parameter))

    def _synchronize(self, state: Any) -> None:
        for model in state.prepared:
            for tensor in (*model.parameters(), *model.buffers()):
                copy_of_first = tensor.detach().contiguous()
                distributed.broadcast(copy_of_first, 0)
                tensor.detach().copy_(copy_of_first)


def taken(batch: Any, dim: int, size: int, indices: Sequence[int]) -> tuple[Any, bool]:
    """Returns the samples `indices` of a batch of `size`, and whether it holds anything that was split.

    Raises LoopError for a tensor of several numbers that has not `size` samples: each process would use all of it.
    """
    if isinstance(batch, Tensor):
        along = dim if batch.dim() > dim and batch.shape[dim] == size else 0
        if batch.dim() and batch.shape[along] == size:
            return batch.index_select(along, torch.tensor(indices, device=batch.device)), True
        if batch.numel() > 1:
            raise LoopError(f"a tensor of shape {tuple(batch.shape)} in a batch of {size} samples has none to each")
        return batch, False
    if isinstance(batch, Mapping):
        parts = {name: taken(value, dim, size, indices) for name, value in batch.items()}
        result: Any = copy.copy(batch)
        for name, (part, _) in parts.items():
            result[name] = part
        return result, any(is_split for _, is_split in parts.values())
    if not isinstance(batch, list | tuple):
        return batch, False
    if len(batch) == size and _are_samples(batch):
        return type(batch)(batch[i] for i in indices), True
    members = [taken(value, dim, size, indices) for value in batch]
    values, is_split = [part for part, _ in members], any(is_split for _, is_split in members)
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values), is_split


def _are_samples(values: Sequence[Any]) -> bool:
    """Returns whether the members of a list or tuple are samples, and not parts such as inputs and labels.

    Words, numbers, and tensors of one shape are samples. Tensors of several shapes, or with as many rows as there are
    members, are parts.
    """
    if hasattr(values, "_fields"):
        return False
    if all(isinstance(value, Tensor) for value in values):
        alike = len({(value.shape, value.dtype) for value in values}) == 1
        return alike and values[0].dim() > 1 and len(values[0]) != len(values)
    return not any(isinstance(value, Tensor | list | tuple | Mapping) for value in values)
