"""Data and model that stay loaded between the trials of one process.

Loading takes seconds, often more than a trial itself. So a process loads once, and each trial starts from a copy of the
initial weights. Frozen weights, which training does not change, are neither copied nor restored.
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
"""Numbers of a parameter that are compared to notice a change; up to twice as many in fact."""


class Resident:
    """A workload with its data and its latest model kept in memory."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.meter = LiveBytes()
        """Counts all runs of this process on a CPU: memory that one run does not free counts for the next."""
        self.cache_limits = CacheLimits()
        """Limits of `ram_cache`; infinite until the owner of the process sets them."""
        self._data: dict[Hashable, Dataset[Any]] = {}
        self._lengths: dict[Hashable, list[int] | None] = {}
        self._model: nn.Module | None = None
        self._model_config = Config()
        self._model_reads: set[str] = set()
        """Knobs that `model`, or a model that keeps `config`, has read: another value needs another model."""
        self._first: dict[str, Tensor] = {}
        self._first_plain: dict[str, dict[str, float]] = {}
        self._first_kept: Mapping[tuple[str, str], object] = {}
        self.marks: Mapping[str, Tensor] = {}
        """The result of the function `marks` for the model before any training."""

    def model(self, config: Config) -> nn.Module:
        """Returns the model of the configuration on its device, with its initial weights.

        The same object is returned for the same options, seed, device and values of knobs that shape it (by their rows,
        or because `model` reads them), unless a forward pass has changed something that cannot be restored. Counters in
        its modules are restored, too. Raises HookFailed if the workload returns no model.
        """
        is_other = self._key(config) != self._key(self._model_config)  # `_model_reads` may have grown since
        if self._model is None or is_other or not self._can_be_restored(self._model):
            self.drop_model()
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(config.seed)
                knobs = ReadKnobs(config.knobs, self._model_reads)
                model = self.workload.model(replace(config, knobs=knobs))
                if config.knobs.compile != "off":
                    knobs.closed()  # torch.compile would break its graph at each read
            if not isinstance(model, nn.Module):
                raise HookFailed("model", f"returned a {type(model).__name__}: it must return a torch.nn.Module")
            self._model = model.to(config.device)
            # On the host: a copy on the card would occupy its memory for as long as the process lives.
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
        """Returns whether copying the initial weights into the model restores it completely.

        It does not if a forward pass has made or resized a buffer, changed a plain attribute of a module, or written
        into frozen weights, such as those of a teacher that follows the model.
        """
        now = {name: (t.shape, t.dtype) for name, t in changing(model)}
        first = {name: (t.shape, t.dtype) for name, t in self._first.items()}
        return now == first and _kept(model) == self._first_kept and not written(model, self.marks)

    def held_bytes(self) -> int:
        """Drops the model's gradients; returns the bytes of the model on its device, 0 if none is loaded."""
        if self._model is None:
            return 0
        for parameter in self._model.parameters():
            parameter.grad = None
        return storage_bytes([*self._model.parameters(), *self._model.buffers()])

    def drop_model(self) -> None:
        """Drops the model, so that the next one can use its memory."""
        parts = [weakref.ref(p) for p in self._model.parameters()] if self._model is not None else []
        self._model = None
        self._first.clear()
        self._first_plain.clear()
        self._first_kept, self.marks = {}, {}
        if any(part() is not None for part in parts):  # part of a reference cycle, and perhaps frozen by `gc.freeze`
            gc.unfreeze()
            garbage.collect()
            gc.freeze()

    def dataset(self, config: Config, split: Split) -> Dataset[Any]:
        """Returns the split; with the knob ram_cache, every sample is prepared and kept in RAM.

        Raises CacheTooLarge if the training split does not fit. The validation split is cached only if it fits: its
        size is not measured before a trial has been trained.
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
        """Returns each sample's length, measured once, or None if the workload has no measure of it."""
        key = (_options_key(config), split)
        if key not in self._lengths:
            self._lengths[key] = sample_lengths(self.dataset(config, split), getattr(self.workload, "length", None))
        return self._lengths[key]

    def validation(self, config: Config, size: int) -> Iterable[Batch]:
        """Returns the validation split on the host in batches of `size`, the longest samples first."""
        dataset, lengths = self.dataset(config, "val"), self.lengths(config, "val")
        return validation_loader(dataset, collate_of(self.workload), size, lengths, config)


def plain(module: nn.Module) -> dict[str, float]:
    """Returns a module's attributes that are numbers, such as its count of steps."""
    return {name: value for name, value in vars(module).items() if type(value) in (int, float)}


def _kept(model: nn.Module) -> dict[tuple[str, str], object]:
    """Returns all further attributes of modules, neither tensors nor in `plain`, as values that can be compared."""
    registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}  # some modules list theirs
    return {
        (name, attribute): _comparable(value, registered)
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if attribute not in _OF_EVERY_MODULE and type(value) not in (int, float)
    }


def _comparable(value: Any, registered: Container[int], depth: int = 4) -> object:
    """Returns the content of tensors, containers and plain values; for other objects, or below `depth`, the type."""
    if type(value) is Tensor and id(value) not in registered and value.layout is torch.strided:
        return value.shape, value.dtype, value.device, _mark(value).numpy().tobytes()
    if isinstance(value, dict | list | tuple | set | deque) and depth:
        parts = value.items() if isinstance(value, dict) else value
        return [_comparable(part, registered, depth - 1) for part in parts]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value)


def changing(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns the tensors that a training step may change: trainable parameters and buffers, by name."""
    trainable: list[tuple[str, Tensor]] = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return trainable + list(model.named_buffers())


def marks(model: nn.Module) -> dict[str, Tensor]:
    """Returns, for each parameter by name, some of its numbers as bytes on the host: they show a write to all of it.

    Parameters of another class than nn.Parameter, such as packed ones, are left out.
    """
    plain_ones = ((n, p) for n, p in model.named_parameters() if type(p) is nn.Parameter and p.layout is torch.strided)
    return {name: _mark(p) for name, p in plain_ones}


def written(model: nn.Module, first: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the frozen parameters, by name, whose marks differ from `first`: something has written into them."""
    frozen = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad and name in first}
    return {name: p for name, p in frozen.items() if not torch.equal(_mark(p), first[name])}


def _mark(parameter: Tensor) -> Tensor:
    some = parameter.detach().flatten()[:: max(1, parameter.numel() // MARKED)]
    return some.to("cpu", copy=True).view(torch.uint8)


def _options_key(config: Config) -> Hashable:
    return tuple(sorted((k, repr(v)) for k, v in config.options.items()))
