"""Live tensor bytes of this thread's CPU work, counted at the dispatcher: peak memory, and a card of a chosen size.

The CPU has no `torch.cuda.max_memory_allocated`. Process size is no substitute: the C allocator keeps freed blocks (288
MB live showed as 527 MB). So every storage an operator returns is counted from its birth to its death.

Counting costs 2 to 25 % of a CPU step of 40 ms and more, hence the loop counts its first optimiser step only, unless a
cap is to be enforced. Not seen: what an operator allocates and frees inside itself, such as oneDNN's workspaces.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of CPU storages born while it is active; above `cap_bytes` it raises torch.OutOfMemoryError.

    Tensors made before are counted through `adopt`. The count goes down as storages die, also after the mode has ended.
    """

    def __init__(self, cap_bytes: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cap_bytes = cap_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors that exist already, such as the model's parameters; raises when they pass the cap."""
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator, then counts what it returned."""
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, list | tuple) else (result,):
            if isinstance(item, Tensor):
                self._count(item)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages or size == 0:
            return

        def died(_: object) -> None:
            self.live_bytes -= size
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, died)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self.cap_bytes is not None and self.live_bytes > self.cap_bytes:
            raise torch.OutOfMemoryError(
                f"virtual card out of memory. Tried to allocate {size / 2**20:.2f} MiB: "
                f"{self.live_bytes / 2**20:.1f} MiB live, {self.cap_bytes / 2**20:.1f} MiB capacity"
            )


def parameter_bytes(model: nn.Module, *, trainable_only: bool = False) -> int:
    """Returns the bytes of the model's parameters, and of its buffers unless only trainable ones are asked for."""
    chosen: list[Tensor] = [p for p in model.parameters() if p.requires_grad or not trainable_only]
    if not trainable_only:
        chosen += list(model.buffers())
    return sum(t.numel() * t.element_size() for t in chosen)
