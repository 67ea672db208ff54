"""Checks of a custom loop while it trains: mistakes that change what is learned and that no error of torch shows."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from trainables.batches import length_of
from trainables.loader_check import settled
from trainables.workload import LoopError, NotIndependent

COMPARED, SMALL = 64, 1 << 16
"""Numbers of each parameter that are compared, and the most of a tensor of the module that is kept."""
LEAST_HELD = 2
"""So many earlier models that are still held are a list; one may be a global name that the next training replaces."""
CHECKED_EPOCHS = 3
WRAPPED = 8
"""Data sets within each other, as in a Subset of a Subset, whose attributes are watched."""
STALE = (
    "your code changed the samples after an epoch, and persistent loader processes do not see that: "
    "knobs.persistent_workers=false restarts them in each epoch"
)
EVALUATES = (
    "train(run) ran out of memory in its evaluation, which no micro-batch changes: evaluate smaller batches under "
    "torch.no_grad(), and keep no outputs on the device"
)
USED_UP = (
    ": an iterator is used up after one epoch; give an object whose __iter__ begins anew, or a generator without an "
    "end, or make it within for _ in run.epochs()"
)
TWO_LOOPS = (
    "two loops over run.batches are open at once, and it counts training data: keep it for the training loader, and "
    "iterate over any other loader, such as an evaluation's, without it"
)
LENGTH_FRAC = 0.1
"""An epoch of batches of so many tokens may have more batches than the one before it, by that share at most."""
GROWN_BYTES, GROWN_FRAC = 16 * 2**20, 0.25
"""Memory has grown in a training if what is held has by so many bytes, and by that share."""
_SIMPLE = (bool, int, float, str)


def require_epochs(loader: object) -> None:
    """Raises LoopError if a loader is an iterator that ends after one epoch, as zip(one, other) does."""
    if _ends(loader):
        raise LoopError(f"run.batches got a {type(loader).__name__}{USED_UP}")


def require_count(loader: object, told: int | None, counted: int) -> None:
    """Raises LoopError if an epoch had far fewer or more samples than was told; each loader process may read all."""
    if told and counted and not told / 2 <= counted <= 2 * told * max(1, getattr(loader, "num_workers", 0)):
        raise LoopError(
            f"an epoch of run.batches(loader, samples={told}) had {counted} samples, as the first dimension of a "
            "batch's first tensor counts them: put a tensor with a row for each sample first, or mend samples=N"
        )


def require_length(told: int, counted: int) -> None:
    """Raises LoopError if an epoch had other batches than the length of the batch sampler, by which run.steps goes."""
    if abs(counted - told) > LENGTH_FRAC * told:
        raise LoopError(
            f"the batch sampler has a length of {told}, and an epoch had {counted} batches: run.steps goes by that "
            "length, and so does what is scheduled for it; mend its __len__, or schedule by run.progress"
        )


def _ends(source: Any) -> bool:
    if isinstance(source, zip | map | enumerate | filter):
        return any(map(_ends, source.__reduce__()[1]))
    return isinstance(source, (_BaseDataLoaderIter, *map(type, (iter([]), iter(()), iter(range(0))))))


def require_one_loss(optimizer: torch.optim.Optimizer, parts: int, *, again: bool) -> None:
    """Raises LoopError if an optimiser gets a second loss of one micro-batch, unless it is to step `again` on purpose.

    `parts` are the micro-batches of a batch: a further step within the first of them would have no gradients.
    """
    name = type(optimizer).__name__
    if not again:
        raise LoopError(
            f"run.backward got two losses of one batch for one {name}: for one step, add them, "
            "run.backward(loss_a + loss_b, optimizer); for a step after each, pass again=True"
        )
    if parts > 1:
        raise LoopError(
            f"run.backward(..., again=True) of the {name} needs whole batches, and each comes in {parts} parts: set "
            "knobs.micro_batch_size to the batch size, or load whole batches"
        )


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a weight of an optimiser has a gradient."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def cleared(optimizer: torch.optim.Optimizer) -> LoopError:
    """Returns the error if gradients were cleared between the parts of a batch."""
    return LoopError(
        "run.backward adds up the gradients of a batch that comes in parts, and clears them after its step; lines of "
        f"your own cleared those of the {type(optimizer).__name__} within a batch: leave out its zero_grad()"
    )


def growth(levels: Sequence[tuple[int, int]]) -> str:
    """Returns in words that the bytes of live tensors rose and never fell, by samples so far; "" if they did not."""
    sizes = [size for _, size in levels]
    rises = len(sizes) > 2 and all(0.99 * a <= b for a, b in itertools.pairwise(sizes))
    grown = sizes[-1] - sizes[0] if rises else 0
    if grown < max(GROWN_BYTES, GROWN_FRAC * sizes[0]) or sizes[-1] - sizes[len(sizes) // 2] < GROWN_FRAC * grown:
        return ""  # the latter if what is kept is limited
    (first, least), (last, most) = levels[0], levels[-1]
    return (
        f"memory grew with the steps, from {least / 2**20:,.1f} MiB after {first:,} samples to {most / 2**20:,.1f} MiB "
        f"after {last:,}: does your code keep outputs or losses in a list (without .item() or .detach())? a longer "
        "training needs more, and a smaller micro-batch does not help"
    )


class EarlierModels:
    """The models of earlier trainings of a process, which none of them should hold any more."""

    def __init__(self) -> None:
        self._weights: list[list[weakref.ref[Tensor]]] = []

    def add(self, models: Iterable[nn.Module]) -> None:
        """Adds the models of a training that has ended."""
        self._weights = [held for held in self._weights if any(ref() is not None for ref in held)]
        self._weights += [[weakref.ref(p) for p in model.parameters()] for model in models]

    def held(self, models: Iterable[nn.Module]) -> str:
        """Returns in words that earlier models are still held beside those of a training; "" if they are not."""
        gc.collect()
        own = {id(p) for model in models for p in model.parameters()}
        alive = [[p for ref in refs if (p := ref()) is not None and id(p) not in own] for refs in self._weights]
        if (count := sum(map(bool, alive))) < LEAST_HELD:
            return ""
        size = sum({id(p): p.numel() * p.element_size() for held in alive for p in held}.values()) / 2**20
        return (
            f"train(run) ran out of memory while {count} models of earlier trainings ({size:,.1f} MiB of weights) are "
            "still held, by a list or cache of the module: keep none, and a smaller micro-batch is not needed"
        )


class FirstWeights:
    """The weights with which trainings of a process began, by seed, shapes and own knobs: equal ones begin alike.

    A net made at module level, or a checkpoint that is loaded, begins where the last training ended, so that its
    quality is no other's.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, dict[str, Tensor]] = {}
        self._states: dict[Hashable, int] = {}
        self._sizes: dict[Hashable, int] = {}

    def require_equal(
        self,
        model: nn.Module,
        seed: int,
        own: Hashable,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        sizes: Hashable = (),
    ) -> None:
        """Raises NotIndependent if an earlier training began with other weights, or without an optimiser's state.

        `own` are the values of its own knobs, `sizes` of those that its shapes may depend on, too.
        """
        states = sum(len(getattr(optimizer, "state", ())) for optimizer in optimizers)
        named = [*model.named_parameters(), *model.named_buffers()]
        parameters = [(n, p) for n, p in named if p.layout is torch.strided and p.is_floating_point()]
        weights = {name: p.detach().flatten()[:COMPARED].to("cpu", torch.float32, copy=True) for name, p in parameters}
        count = sum(p.numel() for _, p in parameters)
        if count != (earlier := self._sizes.setdefault((own, sizes), count)):
            raise NotIndependent(
                f"the model has {count:,} parameters, and had {earlier:,} in an earlier training of the same settings: "
                "does it depend on a list, or another object, that each training changes, such as a default argument?"
            )
        key = seed, own, tuple((name, p.dtype, tuple(p.shape)) for name, p in parameters)
        first = self._seen.setdefault(key, weights)
        if states != self._states.setdefault(key, states):
            raise NotIndependent(
                "an optimiser begins with the state of an earlier training: is it made at module level? make it inside "
                "train(run)"
            )
        for name, value in weights.items():
            if not torch.allclose(value, first[name], rtol=1e-3, atol=1e-6, equal_nan=True):
                raise NotIndependent(
                    f"{name} begins with other weights than in an earlier training of the same seed: is the net made "
                    "at module level, or a checkpoint loaded that train(run) writes? make the net inside train(run)"
                )


class FirstSamples:
    """A few samples of the data sets with which trainings of a process began, by seed, length and own knobs."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, list[bytes] | None] = {}

    def require_equal(self, dataset: Any, seed: int, own: Hashable) -> None:
        """Raises NotIndependent if an earlier training began with other samples; `own` are values of its own knobs."""
        key = seed, own, type(dataset), length_of(dataset)
        if self._seen.get(key, []) is None:  # they are drawn, or take long to read
            return
        found = settled(dataset)
        if found != self._seen.setdefault(key, found) and found is not None:
            raise NotIndependent(
                f"{type(dataset).__name__} begins with other samples than in an earlier training of the same seed: "
                "does train(run) change data of the module in place, or an attribute of the data set? begin with the "
                "same each time"
            )


class FirstValues:
    """The state of a user's module that a training changes: a best accuracy, weights beside it, a list of losses.

    Each training begins with the first values; one that goes on from another's would be told to be as good as both.
    """

    def __init__(self, function: object) -> None:
        self._names: dict[str, object] = getattr(function, "__globals__", {})
        module = self._names.get("__name__")
        self._first = {n: v for n, v in self._names.items() if type(v) in (int, float, Tensor)}
        tensors = (v for v in self._first.values() if isinstance(v, Tensor) and v.numel() <= SMALL)
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        own = [v for n, v in self._names.items() if not n.startswith("__")]
        objects = [v for v in own if type(v).__module__ == module and not isinstance(v, nn.Module | Dataset)]
        classes = [v for v in own if isinstance(v, type) and v.__module__ == module]
        methods = [m for one in classes for m in vars(one).values()]
        defaults = [d for f in [*own, *methods] if isinstance(f, FunctionType) for d in f.__defaults__ or ()]
        held = [v for v in [*own, *defaults] if type(v) in (dict, list, set)]
        held += [vars(v) for v in objects if hasattr(v, "__dict__")]
        self._held = [(one, one.copy()) for one in held if len(one) <= SMALL]
        self._of_classes = [(c, n, v) for c in classes for n, v in vars(c).items() if type(v) in (int, float)]

    def restore(self) -> None:
        """Gives each its first value."""
        self._names.update(self._first)
        for tensor, first in self._tensors:
            tensor.data.copy_(first)
        for owner, name, value in self._of_classes:
            setattr(owner, name, value)
        for held, first in self._held:
            if _has_learned(held, first):
                held.clear()
                held.extend(first) if isinstance(held, list) else held.update(first)


def _has_learned(held: Any, first: Any) -> bool:
    """Returns whether a dict, list or set has another number, or another value in the place of one that was not None.

    Objects that were added, or that were filled in, are a cache.
    """
    if isinstance(held, set):
        return bool(held != first)
    before = first if isinstance(first, dict) else dict(enumerate(first))
    now = held if isinstance(held, dict) else dict(enumerate(held))
    if before.keys() - now.keys():
        return True
    changed = ((value, before.get(name)) for name, value in now.items() if value is not before.get(name))
    return any(was is not None or type(value) in (int, float) for value, was in changed)


class Calls(TorchFunctionMode):
    """Passes each call of a torch function to `saw`, after `before`: function, arguments and result."""

    def __init__(self, saw: Callable[..., None], *before: object) -> None:
        super().__init__()
        self._saw, self._before = saw, before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Returns the normal result."""
        result = func(*args, **(kwargs or {}))
        self._saw(*self._before, func, args, result)
        return result


def require_gradients(state: Any, func: object, args: tuple[Any, ...], result: object) -> None:
    """Raises LoopError if torch's clipping has just read that a weight has no gradient, which run.backward clears."""
    is_clipping = result is None and sys._getframe(2).f_globals.get("__name__") == clip_grad.__name__
    weights = (p for optimizer in state.optimizers for group in optimizer.param_groups for p in group["params"])
    if is_clipping and state.averages and any(args[0] is p for p in weights):
        raise LoopError(
            "gradients are clipped where there are none: run.backward(loss, optimizer, max_norm=1.0) clips, steps and "
            "clears them, so leave out your own clip_grad_norm_"
        )


def settings_of(loader: Any) -> dict[str, object]:
    """Returns the attributes of a loader's collate_fn and data set, and of those it wraps, such that an assignment to
    one is seen.

    An attribute that is None is left out: a handle or a length may be filled in at its first use.
    """
    found = dict[str, object]()
    for holder in (getattr(loader, "collate_fn", None), getattr(loader, "dataset", None)):
        name = type(holder).__name__
        for _ in range(WRAPPED):
            if not hasattr(holder, "__dict__"):
                break
            there = {f"{name}.{key}": value for key, value in vars(holder).items() if value is not None}
            found |= {key: _mark(value) for key, value in there.items()}
            name, holder = f"{name}.dataset", vars(holder).get("dataset")
    return found


def _mark(value: object) -> object:
    """Returns what differs once an attribute is assigned, or its first elements are."""
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, list):
        return id(value), *map(id, value[:COMPARED])
    return (id(value), value._version) if isinstance(value, Tensor) else id(value)


def require_unchanged(loader: Any, before: Mapping[str, object], when: str, remedy: str) -> None:
    """Raises LoopError if an attribute of `settings_of` was assigned since `before`: loader processes have a copy."""
    now = settings_of(loader)
    changed = next((name for name, value in before.items() if name in now and now[name] != value), None)
    if changed is not None:
        raise LoopError(f"{changed} was set {when}, which loader processes do not see: {remedy}")
