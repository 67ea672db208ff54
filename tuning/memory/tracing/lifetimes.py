"""When each storage of a device is born and dies, seen at the dispatcher."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from tuning.memory.trace import Event, Trace


class Insides:
    """Memory that operators of a kind of device take inside themselves, unseen by the dispatcher; here nothing."""

    def transients(self, func: Any, args: Sequence[Any], result: Any) -> Iterable[int | Event]:
        """Returns the bytes that the operator takes beside its result and gives back one by one, and marks."""
        return ()

    def kept_bytes(self, func: Any, phase: str) -> int:
        """Returns the bytes that the operator's library takes at this use, its first, and never gives back."""
        return 0

    def corrected(self, func: Any, args: Sequence[Any], result: Any) -> Any:
        """Returns the result with those tensors replaced whose size the operator's fake kernel does not know."""
        return result


_SCALAR = torch.ops.aten._local_scalar_dense.default
_PACK = torch.ops.aten._pack_padded_sequence.default
_ADD = torch.ops.aten.add.Tensor


class Untraceable(Exception):
    """A step whose memory depends on numbers that a fake tensor does not hold; names the operator."""


class Lifetimes(TorchDispatchMode):
    """Records the storages of one kind of device; takes the place of `trainables.live_bytes.LiveBytes` in the loop.

    Fake tensors are of that device. Tensors of the host stay real, and what is computed from real ones alone is really
    computed: an index or a length that the host knows has its value, as beside a true card. A number read from the
    device is refused (Untraceable), but for floating point ones, which are 1: they seldom decide a shape.

    Tensors born in the backward pass, recomputed blocks included, belong to the phase "backward", whatever `phase` is.

    Autograd adds gradients in place if nobody else holds the first one, but never below a dispatch mode. So on a card a
    gradient that dies with its sum is counted as dead before it; a virtual card counts below such a mode.
    """

    cap_bytes = 1 << 62
    peak_bytes = 0

    def __init__(self, device_type: str, fake: FakeTensorMode, insides: Insides) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "setup"
        self.notes: set[str] = set()
        self.operators: set[str] = set()
        """Names of all operators that ran on the device."""
        self._device_type, self._fake, self._insides = device_type, fake, insides
        self._is_card = device_type != "cpu"
        self._events: list[Event] = []
        self._ops: list[str] = []
        self._marks: list[tuple[int, str]] = []
        self._categories: dict[int, str] = {}
        self._born_in: list[str] = []
        self._ids: dict[int, int] = {}
        """Address of a storage -> id, of those alive."""
        self._refs: dict[int, Any] = {}
        self._sum_at = -1
        """Index of the last event that is a birth, if that is of a sum of gradients; -1 if not."""

    def adopt(self, tensors: Iterable[Tensor], category: str = "batch") -> None:
        """Counts tensors that exist already; they are called a `category`."""
        for tensor in tensors:
            self._see(tensor, "to device")
            self.name([tensor], category)

    def name(self, tensors: Iterable[Tensor], category: str) -> None:
        """Gives the storages of tensors a category; those that are not known stay so."""
        for tensor in tensors:
            for part in _parts(tensor):
                found = self._ids.get(part.untyped_storage()._cdata)
                if found is not None:
                    self._categories[found] = category

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator, on fake tensors where it touches the device, then records what it made."""
        kwargs = kwargs or {}
        if func is _SCALAR and isinstance(args[0], FakeTensor):
            return self._scalar(args[0])
        if func is _PACK and isinstance(args[0], FakeTensor):
            func = _packed
        self._enter("backward" if torch._C._current_graph_task_id() != -1 else self.phase)
        device = kwargs.get("device")
        on_device = device is not None and self._is_card and torch.device(device).type == self._device_type
        if func is not _packed and (on_device or _any_fake(args)):
            # Straight to the mode: by way of the tensors' class it takes half as long again.
            result = self._fake.__torch_dispatch__(func, types, args, kwargs)
        else:
            result = func(*args, **kwargs)
        operator, phase = str(func) if func is not _packed else str(_PACK), self._marks[-1][1]
        kept = self._insides.kept_bytes(func, phase)
        if kept > 0:
            self._birth(kept, operator, "workspace")
        result = self._insides.corrected(func, args, result)
        for item in result if isinstance(result, list | tuple) else (result,):
            if isinstance(item, Tensor):
                self._see(item, operator)
        if func is _ADD and self._is_card and phase == "backward" and not torch.is_grad_enabled():
            self._sum_at = len(self._events) - 1 if self._events[-1][1] >= 0 else -1
        for hidden in self._insides.transients(func, args, result):
            if isinstance(hidden, tuple):
                self._events.append(hidden)
            elif hidden > 0:
                self._events.append((self._birth(hidden, operator, "workspace"), -1))
        return result

    def hold(self, sizes: Iterable[int]) -> None:
        """Counts storages that a workload keeps on the device from step to step."""
        for size in sizes:
            self._birth(size, "kept by the workload", "buffer")

    @property
    def births(self) -> int:
        """The number of storages so far, which is the id of the next."""
        return len(self._ops)

    def survivors(self) -> list[int]:
        """Returns the bytes of each storage that is alive, once whoever asks has let go of the step."""
        return [size for own, size in self._events if own in self._refs and size >= 0]

    def trace(self, micro_batch: int) -> Trace:
        """Returns what was recorded so far."""
        return Trace(micro_batch, tuple(self._events), self._finished(), tuple(self._marks), tuple(self._ops))

    def _enter(self, phase: str) -> None:
        if not self._marks or self._marks[-1][1] != phase:
            self._marks.append((len(self._events), phase))

    def _see(self, tensor: Tensor, operator: str) -> None:
        for part in _parts(tensor):
            if part.device.type != self._device_type:
                continue
            self.operators.add(operator)
            storage = part.untyped_storage()
            address, size = storage._cdata, storage.nbytes()
            if address in self._ids or size == 0:
                continue
            own = self._ids[address] = self._birth(size, operator, "")

            def died(_: object, own: int = own, address: int = address, size: int = size) -> None:
                if self._refs.pop(own, None) is not None:
                    is_summed = self._sum_at >= 0 and self._events[self._sum_at][1] == size
                    self._events.insert(self._sum_at if is_summed else len(self._events), (own, -1))
                    self._sum_at = -1 if is_summed else self._sum_at
                    del self._ids[address]

            self._refs[own] = weakref.ref(storage, died)

    def _birth(self, size: int, operator: str, category: str) -> int:
        own = self.births
        if not self._marks:
            self._enter(self.phase)
        self._events.append((own, size))
        self._sum_at = -1
        self._ops.append(operator)
        self._born_in.append(self._marks[-1][1])
        if category:
            self._categories[own] = category
        return own

    def _finished(self) -> dict[int, str]:
        """Returns every storage's category: what is born forward and lives on is an activation, all else temporary."""
        found, alive, phase = dict(self._categories), set[int](), dict(self._marks)
        for index, (own, size) in enumerate(self._events):
            if phase.get(index) == "backward":
                found |= {i: "activation" for i in alive if i not in found}
                alive.clear()
            if size < 0:
                alive.discard(own)
            elif self._born_in[own] == "forward":
                alive.add(own)
        return {own: found.get(own, "temporary") for own in range(len(self._ops))}

    def _scalar(self, tensor: Tensor) -> float:
        if tensor.dtype.is_floating_point:
            self.notes.add("a floating-point number that the step reads from the device was taken for 1")
            return 1.0
        raise Untraceable(
            "aten._local_scalar_dense: the step reads a whole number or a truth value from the device (.item(), int(), "
            "if), and what follows may depend on it"
        )


def _any_fake(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, FakeTensor) or (isinstance(value, list | tuple) and _any_fake(value)):
            return True
    return False


def _packed(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Returns the data and batch sizes of a packed sequence; the lengths are the host's, as torch demands."""
    if isinstance(lengths, FakeTensor):
        said = "the lengths are on the device; as a list of whole numbers in the batch they stay on the host"
        raise Untraceable(f"{_PACK}: {said}")
    steps = torch.arange(int(lengths[0]))
    sizes = (lengths[:, None] > steps).sum(dim=0)
    return padded.new_empty((int(lengths.sum()), *padded.shape[2:])), sizes


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    """Yields the plain tensors that a tensor is made of: itself, or those that a wrapper holds."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))
