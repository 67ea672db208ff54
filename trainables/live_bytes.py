"""Counts the live tensor bytes of this thread on a CPU: for peak memory, and to simulate a card of a chosen size.

The CPU has no `torch.cuda.max_memory_allocated`. Process size is no substitute: the C allocator keeps freed blocks (288
MB live showed as 527 MB). So every storage that an operator returns is counted from allocation to release.

Counting takes a few microseconds an operator, mostly for torch's call into Python. Hence the loop counts its first
optimiser step only, unless a cap is to be enforced. Memory that an operator allocates and frees internally, such as
oneDNN's workspaces, and memory of other threads are not counted.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class _Counted(weakref.ref[Any]):
    """A weak reference to a counted storage; its callback reduces the count when the storage is freed."""

    __slots__ = ("key", "size")
    key: int
    size: int


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of CPU storages made while it is active; above `cap_bytes` it raises torch.OutOfMemoryError.

    The storage that would exceed the cap is freed before the error is raised, since a card would never allocate it: the
    count is then as before the operator. Tensors made outside are counted by `adopt`, or if `adopts` is on, as soon as
    an operator uses them. The count goes down when storages are freed, also after the mode has ended.
    """

    supports_higher_order_operators = True  # otherwise torch refuses them, FlexAttention for example

    def __init__(self, cap_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cap_bytes = cap_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self.wanted_bytes = 0
        """The count that the last refused operator would have reached; 0 if none was refused."""
        self.adopts = False
        self._paused = False
        self._known: dict[int, _Counted] = {}
        self._died = self._forget  # one bound method for all references

    def begin(self, cap_bytes: int | None) -> None:
        """Starts a run with its cap; its peak starts from the bytes live now, including those of earlier runs."""
        self.cap_bytes, self.peak_bytes, self.wanted_bytes = cap_bytes, self.live_bytes, 0

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that exist already, such as the model's parameters; raises if they exceed the cap."""
        for tensor in tensors:
            size = self._add(tensor)
            if size:
                raise self._out_of_memory(size)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Pauses counting inside the block, for operators of the host, such as those that collate a batch."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator, then counts what it returned."""
        result = func(*args, **kwargs) if kwargs else func(*args)
        if self._paused:
            return result
        if self.adopts:
            self.adopt(_tensors((*args, *(kwargs or {}).values())))
        if not _makes_storage(func):
            return result
        over = 0
        if isinstance(result, Tensor):
            over = self._add(result)
        elif isinstance(result, list | tuple):
            for item in result:
                if isinstance(item, Tensor) and (over := self._add(item)):
                    break
            item = None
        if over:
            result = None
            raise self._out_of_memory(over)
        return result

    def _add(self, tensor: Tensor) -> int:
        """Counts the tensor's storage and returns 0; if it would exceed the cap, returns its bytes uncounted."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse: two dense tensors; other layouts, such as oneDNN's, are not counted
            parts = (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else ()
            return next((size for part in parts if (size := self._add(part))), 0)
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        grown = size - (known.size if known is not None else 0)  # not 0 if a known storage was resized
        if grown == 0:
            return 0
        live = self.live_bytes + grown
        if self.cap_bytes is not None and live > self.cap_bytes and grown > 0:
            self.wanted_bytes = live
            return grown
        if known is None:
            known = self._known[key] = _Counted(storage, self._died)
            known.key = key
        known.size = size
        self.live_bytes = live
        if live > self.peak_bytes:
            self.peak_bytes = live
        return 0

    def _forget(self, dead: weakref.ref[Any]) -> None:
        if isinstance(dead, _Counted) and self._known.get(dead.key) is dead:
            self.live_bytes -= dead.size
            del self._known[dead.key]

    def _out_of_memory(self, size: int) -> torch.OutOfMemoryError:
        # `live` is the count at the refusal: earlier results of the same operator have been freed since.
        wanted, cap = self.wanted_bytes, self.cap_bytes or 0
        return torch.OutOfMemoryError(
            f"virtual card out of memory. Tried to allocate {_size(size)}: {_size(wanted - size)} live, {_size(cap)} "
            f"capacity, at least {_size(wanted - cap)} too few"
        )


class Sparse:
    """Decides which parts of a capped run are counted, so that all other parts run at full speed.

    The memory of a micro-batch grows with its shape. So a micro-batch is counted unless one with at least its size in
    every dimension was counted in the same phase, and equally with or without earlier gradients of the batch. The first
    two optimiser steps and every tenth are counted completely. If bytes rise twice in a row between those steps, there
    is a leak: from then on everything is counted.
    """

    EVERY = 10

    def __init__(self) -> None:
        self.always = False
        self._counted: dict[tuple[str, bool], list[tuple[int, ...]]] = {}
        self._micro_batches = 0
        self._evaluations = 0
        self._levels: list[int] = []

    def whole(self, steps: int) -> bool:
        """Returns whether the optimiser step after `steps` earlier ones is counted completely."""
        return self.always or steps < 2 or steps % self.EVERY == 0

    def part(self, steps: int, phase: str, tensors: Iterable[Tensor]) -> bool:
        """Returns whether the next micro-batch is to be counted, and if so records it as counted."""
        circumstances = (phase, self._micro_batches > 0)
        self._micro_batches += 1
        shape = tuple(size for tensor in tensors for size in tensor.shape)
        known = self._counted.setdefault(circumstances, [])
        for other in known:
            if len(other) == len(shape) and all(a >= b for a, b in zip(other, shape, strict=True)):
                return self.whole(steps)
        known[:] = [o for o in known if len(o) != len(shape) or any(a > b for a, b in zip(o, shape, strict=True))]
        known.append(shape)
        return True

    def evaluation(self) -> bool:
        """Returns whether the next evaluation is counted: only the first of a run, since all use the same batches."""
        self._evaluations += 1
        return self.always or self._evaluations == 1

    def stepped(self, steps: int, live_bytes: int) -> None:
        """Records the live bytes after an optimiser step; `steps` is the number of steps before it."""
        self._micro_batches = 0
        if self.whole(steps):
            self._levels = [*self._levels[-2:], live_bytes]
            rising = len(self._levels) > 2 and self._levels[0] < self._levels[1] < self._levels[2]
            self.always = self.always or rising


@functools.cache
def _makes_storage(func: Any) -> bool:
    """Returns whether an operator can return a new storage; about half of a step's cannot.

    False for views and in-place operators; True also for `out=` and resizes, which may resize a storage.
    """
    schema = getattr(func, "_schema", None)
    if (
        schema is None
        or any(returned.alias_info is None for returned in schema.returns)
        or any(a.is_out for a in schema.arguments)
    ):
        return True
    return "resize" in schema.name or schema.name == "aten::lift_fresh"  # the latter returns torch.tensor(...)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _size(count: int) -> str:
    """Returns bytes in the format of torch's own message, which `tuning.memory.oom.requested_bytes` parses."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors' storages; a shared storage counts once, as on a device."""
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def parameter_bytes(model: nn.Module, *, trainable_only: bool = False) -> int:
    """Returns the bytes of the model's parameters and buffers, or of its trainable parameters only."""
    chosen: list[Tensor] = [p for p in model.parameters() if p.requires_grad or not trainable_only]
    if not trainable_only:
        chosen += list(model.buffers())
    return sum(t.numel() * t.element_size() for t in chosen)
