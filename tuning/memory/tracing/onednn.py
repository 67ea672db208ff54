"""Memory inside the CPU's operators, taken by oneDNN: workspaces of recurrent networks, reordered copies of images.

Only oneDNN knows: it chooses by the machine's instruction set, shape and type. So it is asked: such an operator is run
once on zeros of the same shapes, and what it allocates is read from torch's profiler. The steps traced are of two or
three samples, so this is cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tuning.memory.tracing.lifetimes import Insides

aten = torch.ops.aten

_RNN = frozenset({aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default})
_ASKED = _RNN | {aten.convolution.default, aten.convolution_backward.default}


@dataclass(frozen=True)
class Answer:
    """An operator as it was seen: the most bytes it held at once beside its results, and their layouts.

    A layout is (number of the storage, shape, strides, dtype), None if the result is no tensor. Results can share a
    storage.
    """

    transient_bytes: int
    layouts: tuple[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype] | None, ...]


class OneDnn(Insides):
    """Memory that the CPU's operators take inside themselves.

    A virtual card counts what the dispatcher shows (`trainables.live_bytes`), so the transient copies are left out
    unless `transient` asks for them.
    """

    def __init__(self, fake: FakeTensorMode, *, transient: bool) -> None:
        self._fake, self._transient = fake, transient
        self._known: dict[str, Answer] = {}

    def transients(self, func: Any, args: Sequence[Any], result: Any) -> Sequence[int]:
        """Returns the most bytes that the operator holds at once beside its result."""
        return (self._asked(func, args).transient_bytes,) if self._transient and func in _ASKED else ()

    def corrected(self, func: Any, args: Sequence[Any], result: Any) -> Any:
        """Returns the result; that of an LSTM's layer as it really is, for torch's fake kernel lacks its workspace."""
        if func not in _RNN:
            return result
        made: dict[int, Tensor] = {}
        with _disable_current_modes(), self._fake:
            for layout in self._asked(func, args).layouts:
                if layout is not None and layout[0] not in made:
                    made[layout[0]] = torch.empty_strided(layout[1], layout[2], dtype=layout[3])
        return tuple(None if layout is None else made[layout[0]] for layout in self._asked(func, args).layouts)

    def _asked(self, func: Any, args: Sequence[Any]) -> Answer:
        """Returns what the operator does on arguments of these shapes; it is run once for each."""
        key = f"{func} {[_layout(a) if isinstance(a, Tensor) else a for a in tree_leaves(args)]}"
        if key not in self._known:
            with _disable_current_modes(), torch.enable_grad():
                real = tree_map(_zeros, args)
                func(*real)  # the first use of a shape may keep something
                with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                    result = func(*real)
            results = result if isinstance(result, list | tuple) else (result,)
            sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in results if t is not None}
            numbers = {address: number for number, address in enumerate(sizes)}
            layouts = (None if t is None else (numbers[t.untyped_storage()._cdata], *_layout(t)) for t in results)
            self._known[key] = Answer(_most_beside(seen, sum(sizes.values())), tuple(layouts))
        return self._known[key]


def allocations(seen: profile) -> list[int]:
    """Returns the allocations that a profile with memory saw, in order: bytes, negative where they are freed."""
    events = cast(Any, seen.profiler).kineto_results.events()
    memory = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]" and e.device_type().name == "CPU"]
    return [size for _, size in sorted(memory, key=lambda pair: pair[0])]


def _most_beside(seen: profile, result_bytes: int) -> int:
    """Returns by how much the most bytes held at once pass those of the result."""
    live = most = 0
    for size in allocations(seen):
        live += size
        most = max(most, live)
    return max(0, most - result_bytes)


def _layout(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _zeros(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(tuple(value.shape), tuple(value.stride()), dtype=value.dtype).zero_()
