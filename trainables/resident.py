"""What stays loaded between the trials of one process: the data, and the model with its first weights.

Loading costs seconds and a trial's own work can be shorter than that, so a process loads once and each trial starts
from a copy of the first weights. What training cannot change (frozen weights) is neither copied nor restored.
"""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Container, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from trainables import garbage
from trainables.batches import sample_lengths
from trainables.knobs import ReadKnobs
from trainables.live_bytes import LiveBytes, storage_bytes
from trainables.ram_cache import Cached, CacheLimits, CacheTooLarge
from trainables.validation import validation_loader
from trainables.workload import Batch, Config, HookFailed, Split, Workload, collate_of

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
MARKED = 1000
"""Numbers of a parameter that are looked at to see whether it has changed, up to twice as many."""


class Resident:
    """A workload with its data and its latest model kept in memory."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.meter = LiveBytes()
        """Of all runs of this process on a CPU: what one run leaves behind is there when the next begins."""
        self.cache_limits = CacheLimits()
        """What `ram_cache` may take; without limits until whoever owns the process sets some."""
        self._data: dict[Hashable, Dataset[Any]] = {}
        self._lengths: dict[Hashable, list[int] | None] = {}
        self._model: nn.Module | None = None
        self._model_config = Config()
        self._model_reads: set[str] = set()
        """The knobs that `model` has read, or a model that keeps `config`: another value needs another model."""
        self._first: dict[str, Tensor] = {}
        self._first_plain: dict[str, dict[str, Any]] = {}
        self._first_kept: Mapping[tuple[str, str], object] = {}
        self.marks: Mapping[str, Tensor] = {}
        """Of the model's parameters before any training, as `marks` returns them."""

    def model(self, config: Config) -> nn.Module:
        """Returns the model of the configuration on its device, with the weights it has before any training.

        The same object is returned for the same options, seed, device and knobs that shape it, by their rows or as
        `model` reads them, unless its forward pass has changed what is not restored. Numbers that its modules count in
        are what they were, too. Raises HookFailed where the workload gives none.
        """
        is_other = self._key(config) != self._key(self._model_config)  # by what is known by now to have been read
        if self._model is None or is_other or not self._can_be_restored(self._model):
            self.drop_model()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                knobs = ReadKnobs(config.knobs, self._model_reads)
                model = self.workload.model(replace(config, knobs=knobs))
                if config.knobs.compile != "off":
                    knobs.closed()  # torch.compile would break its graph at each reading
            if not isinstance(model, nn.Module):
                raise HookFailed("model", f"returned a {type(model).__name__}: it must return a torch.nn.Module")
            self._model = model.to(config.device)
            # On the host: a copy of all that trains would be held on the card for as long as the process lives.
            self._first = {name: t.detach().to("cpu", copy=True) for name, t in changing(self._model)}
            self._first_plain = {name: plain(module) for name, module in self._model.named_modules()}
            self._first_kept, self.marks = _kept(self._model), marks(self._model)
            self._model_config = config
            return self._model
        for name, module in self._model.named_modules():
            for attribute, value in self._first_plain.get(name, {}).items():
                now = vars(module).get(attribute)
                if type(now) is type(value) and now != value:
                    setattr(module, attribute, value)
        with torch.no_grad():
            for name, tensor in changing(self._model):
                tensor.copy_(self._first[name])
        for parameter in self._model.parameters():
            parameter.grad = None
        return self._model

    def _key(self, config: Config) -> Hashable:
        rows = config.knobs.table
        shape = [(n, v) for n, v in config.knobs.as_dict().items() if rows[n].shapes_model or n in self._model_reads]
        return _options_key(config), config.seed, config.device, tuple(shape)

    def _can_be_restored(self, model: nn.Module) -> bool:
        """Returns whether the model is what it was once its first weights are copied into it.

        It is not where a forward pass has made or resized a buffer, changed what a module keeps in plain attributes, or
        written into frozen weights, such as those of a teacher that follows the model.
        """
        now = {name: (t.shape, t.dtype) for name, t in changing(model)}
        first = {name: (t.shape, t.dtype) for name, t in self._first.items()}
        return now == first and _kept(model) == self._first_kept and not written(model, self.marks)

    def held_bytes(self) -> int:
        """Returns the bytes of the model on its device, 0 where none is loaded; drops its gradients."""
        if self._model is None:
            return 0
        for parameter in self._model.parameters():
            parameter.grad = None
        return storage_bytes([*self._model.parameters(), *self._model.buffers()])

    def drop_model(self) -> None:
        """Forgets the model, so that its memory can be used by the next."""
        parts = [weakref.ref(p) for p in self._model.parameters()] if self._model is not None else []
        self._model = None
        self._first.clear()
        self._first_plain.clear()
        self._first_kept, self.marks = {}, {}
        if any(part() is not None for part in parts):  # in a circle, and maybe frozen with what never changes
            gc.unfreeze()
            garbage.collect()
            gc.freeze()

    def dataset(self, config: Config, split: Split) -> Dataset[Any]:
        """Returns the split, with every sample prepared in RAM when the knob says so; raises CacheTooLarge.

        Of the validation split that is only as far as it fits: nobody measures it before a trial has been trained.
        """
        key = (_options_key(config), split)
        if key not in self._data:
            self._data[key] = self.workload.dataset(config, split)
        if not config.knobs.ram_cache:
            return self._data[key]
        cached = (key, "cached")
        if cached not in self._data:
            try:
                self._data[cached] = Cached(self._data[key], self.cache_limits)
            except CacheTooLarge:
                if split == "train":
                    raise
                self._data[cached] = self._data[key]
        return self._data[cached]

    def lengths(self, config: Config, split: Split) -> list[int] | None:
        """Returns each sample's length, measured once, or None where the workload has no measure of it."""
        key = (_options_key(config), split)
        if key not in self._lengths:
            self._lengths[key] = sample_lengths(self.dataset(config, split), getattr(self.workload, "length", None))
        return self._lengths[key]

    def validation(self, config: Config, size: int) -> Iterable[Batch]:
        """Returns the validation split on the host, longest samples first, in batches of `size`, loaded as asked."""
        dataset, lengths = self.dataset(config, "val"), self.lengths(config, "val")
        return validation_loader(dataset, collate_of(self.workload), size, lengths, config)


def plain(module: nn.Module) -> dict[str, Any]:
    """Returns the numbers that a module keeps beside its tensors, such as its count of steps."""
    return {name: value for name, value in vars(module).items() if type(value) in (int, float)}


def _kept(model: nn.Module) -> dict[tuple[str, str], object]:
    """Returns what modules keep beside their tensors and the numbers of `plain`, as values that can be compared."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}  # some modules list theirs
    return {
        (name, attribute): _comparable(value, own)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if attribute not in _OF_EVERY_MODULE and type(value) not in (int, float)
    }


def _comparable(value: Any, own: Container[int], depth: int = 4) -> object:
    """Returns the content of tensors, containers and plain values; of other objects, and further down, the type."""
    if type(value) is Tensor and id(value) not in own and value.layout is torch.strided:
        return value.shape, value.dtype, value.device, _mark(value).numpy().tobytes()
    if isinstance(value, dict | list | tuple | set | deque) and depth:
        parts = value.items() if isinstance(value, dict) else value
        return [_comparable(one, own, depth - 1) for one in parts]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value)


def changing(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns what a training step may change: trainable parameters and buffers."""
    trainable: list[tuple[str, Tensor]] = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return trainable + list(model.named_buffers())


def marks(model: nn.Module) -> dict[str, Tensor]:
    """Returns some numbers of each parameter, by name, as bytes on the host: what writes into all of it changes them.

    Parameters of a class of their own, such as packed ones, have none.
    """
    own = ((name, p) for name, p in model.named_parameters() if type(p) is nn.Parameter and p.layout is torch.strided)
    return {name: _mark(p) for name, p in own}


def written(model: nn.Module, first: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the frozen parameters, by name, whose marks are not the `first` ones."""
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad and name in first}
    return {name: p for name, p in frozen.items() if not torch.equal(_mark(p), first[name])}


def _mark(parameter: Tensor) -> Tensor:
    some = parameter.detach().flatten()[:: max(1, parameter.numel() // MARKED)]
    return some.to("cpu", copy=True).view(torch.uint8)


def _options_key(config: Config) -> Hashable:
    return tuple(sorted((k, repr(v)) for k, v in config.options.items()))
