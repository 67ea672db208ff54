"""Live tensor bytes of this thread's CPU work, counted at the dispatcher: peak memory, and a card of a chosen size.

The CPU has no `torch.cuda.max_memory_allocated`. Process size is no substitute: the C allocator keeps freed blocks (288
MB live showed as 527 MB). So every storage an operator returns is counted from its birth to its death.

Counting costs a few microseconds an operator, most of them torch's own call into Python, hence the loop counts its
first optimiser step only, unless a cap is to be enforced. Not seen: what an operator allocates and frees inside itself,
such as oneDNN's workspaces, and what other threads make.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class _Counted(weakref.ref[Any]):
    """A storage that is counted; the reference tells its counter when it dies."""

    __slots__ = ("key", "size")
    key: int
    size: int


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of CPU storages born while it is active; above `cap_bytes` it raises torch.OutOfMemoryError.

    The storage that would pass the cap is let go before the error is raised, as a card never makes it: the count is
    then what it was before the operator. Tensors made outside are counted through `adopt`, and while `adopts` is on as
    soon as an operator takes them. The count goes down as storages die, also after the mode has ended.
    """

    supports_higher_order_operators = True  # such as FlexAttention, which are refused otherwise

    def __init__(self, cap_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cap_bytes = cap_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self.wanted_bytes = 0
        """What the operator that was refused last would have brought the count to; 0 where none was."""
        self.adopts = False
        self._paused = False
        self._known: dict[int, _Counted] = {}
        self._died = self._forget  # one bound method for all references

    def begin(self, cap_bytes: int | None) -> None:
        """Starts a run: its cap, and its peak from what is live now, which may hold what an earlier run left."""
        self.cap_bytes, self.peak_bytes, self.wanted_bytes = cap_bytes, self.live_bytes, 0

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that exist already, such as the model's parameters; raises when they pass the cap."""
        for tensor in tensors:
            size = self._add(tensor)
            if size:
                raise self._out_of_memory(size)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Makes operators in the block count for nothing: they are the host's, such as those that collate a batch."""
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
        makes = _MAKES.get(func)
        if makes is None:
            makes = _MAKES.setdefault(func, _makes_storage(func))
        if not makes:
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
        """Counts the tensor's storage; returns its bytes, uncounted, where it would pass the cap, else 0."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # sparse: two dense tensors; others, such as oneDNN's own layout, show nothing
            parts = (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else ()
            return next((size for part in parts if (size := self._add(part))), 0)
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        grown = size - (known.size if known is not None else 0)  # not 0 for one that was resized
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
        # What was live when it was refused: of an operator's several results the first have been let go since.
        asked, live, cap = _size(size), _size(self.wanted_bytes - size), _size(self.cap_bytes or 0)
        return torch.OutOfMemoryError(
            f"virtual card out of memory. Tried to allocate {asked}: {live} live, {cap} capacity"
        )


class Sparse:
    """Which parts of a capped run are counted, so that the others run at full speed.

    What a micro-batch needs grows with its shape. So it is counted when one of its dimensions is larger than in any
    that was counted under the same circumstances: its phase, and whether gradients of the batch were there before it.
    The first two optimiser steps and every tenth are counted whole. Bytes that rise from one of those to the next,
    twice, are a leak: from then on everything is counted.
    """

    EVERY = 10

    def __init__(self) -> None:
        self.always = False
        self._counted: dict[tuple[str, bool], list[tuple[int, ...]]] = {}
        self._micro_batches = 0
        self._evaluations = 0
        self._levels: list[int] = []

    def whole(self, steps: int) -> bool:
        """Returns whether the optimiser step after so many is counted whole."""
        return self.always or steps < 2 or steps % self.EVERY == 0

    def part(self, steps: int, phase: str, tensors: Iterable[Tensor]) -> bool:
        """Returns whether the next micro-batch is counted, and takes it for counted then."""
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
        """Returns whether the next evaluation is counted: the first of a run, since all take the same batches."""
        self._evaluations += 1
        return self.always or self._evaluations == 1

    def stepped(self, steps: int, live_bytes: int) -> None:
        """Takes the bytes that are live after an optimiser step, the number of those before it given."""
        self._micro_batches = 0
        if self.whole(steps):
            self._levels = [*self._levels[-2:], live_bytes]
            rising = len(self._levels) > 2 and self._levels[0] < self._levels[1] < self._levels[2]
            self.always = self.always or rising


_MAKES: dict[Any, bool] = {}
"""Whether an operator can return storage that was not there before, by operator; about half of a step's cannot."""


def _makes_storage(func: Any) -> bool:
    """Returns False for views and for what works in place; an `out=` or a resize may give a storage other bytes."""
    schema = getattr(func, "_schema", None)
    if (
        schema is None
        or any(returned.alias_info is None for returned in schema.returns)
        or any(a.is_out for a in schema.arguments)
    ):
        return True
    return "resize" in schema.name or schema.name == "aten::lift_fresh"  # the latter hands over torch.tensor(...)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _size(count: int) -> str:
    """Returns bytes in the words of torch's own message, which `tuning.memory.oom.requested_bytes` reads."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the storages behind the tensors, each once, as a device holds them."""
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def parameter_bytes(model: nn.Module, *, trainable_only: bool = False) -> int:
    """Returns the bytes of the model's parameters, and of its buffers unless only trainable ones are asked for."""
    chosen: list[Tensor] = [p for p in model.parameters() if p.requires_grad or not trainable_only]
    if not trainable_only:
        chosen += list(model.buffers())
    return sum(t.numel() * t.element_size() for t in chosen)
