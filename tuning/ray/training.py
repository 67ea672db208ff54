"""A function trainable that is measured: its speed and peak bytes are reported, an OOM is a result and no error.

It follows `torch.optim` by torch's global step hooks, so that the loop of the user stays as it is.
"""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from ray import tune
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from trainables.knobs import LOOP
from trainables.live_bytes import LiveBytes, storage_bytes
from tuning.config.errors import ConfigError
from tuning.memory.oom import Outcome, fault, poisoned, requested_bytes

NO_ROOM = (Outcome.OOM, Outcome.HOST_OOM)
Train = Callable[[dict[str, Any]], object]
_here = threading.local()


class ProbeEnds(BaseException):
    """Ends a probe inside the user's function; no `except Exception` there stops it."""


class StepMeter:
    """Follows the training inside `with`: its optimiser steps, the seconds between them, its peak bytes.

    `cap_bytes` is what tensors may take: a CUDA device is limited to it, on a CPU a card of that size is emulated; None
    is the device's own limit. A step has `batch_size` samples. A probe ends as soon as `is_over` says so after a step;
    None for a trial. If there are several optimisers, the steps of the first are counted.
    """

    def __init__(
        self, cap_bytes: int | None, batch_size: int = 1, is_over: Callable[[StepMeter], bool] | None = None
    ) -> None:
        self.cap_bytes, self.batch_size, self.is_probe = cap_bytes, batch_size, is_over is not None
        self.steps, self.between_s = 0, list[float]()
        self.floor_bytes = 0
        """The bytes of parameters and optimiser state."""
        self.is_cuda = torch.cuda.is_available()
        self._is_over, self._last_s = is_over, 0.0
        self._live = LiveBytes(cap_bytes)
        self._counts = cap_bytes is not None and not self.is_cuda
        self._first: Callable[[], Optimizer | None] = lambda: None

    def __enter__(self) -> Self:
        self._forget_peak()
        if self.is_cuda and self.cap_bytes is not None:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.cap_bytes / total))
        self._hook = register_optimizer_step_post_hook(self._stepped)
        _here.meter = self
        if self._counts:
            self._live.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._counts:
            self._live.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._hook.remove()
        _here.meter = None

    def pause(self) -> None:
        """Leaves the time until the next step out: an evaluation, or a report."""
        self._last_s = 0.0

    @property
    def samples_per_s(self) -> float | None:
        """Returns the mean speed without the first step, and without what was paused; None before two steps."""
        spent_s = sum(self.between_s)
        return self.batch_size * len(self.between_s) / spent_s if spent_s else None

    @property
    def peak_bytes(self) -> int | None:
        """Returns the most bytes of tensors alive since the first step, None if nobody counted: a CPU without a cap."""
        return torch.cuda.max_memory_allocated() if self.is_cuda else self._live.peak_bytes if self._counts else None

    def _forget_peak(self) -> None:
        """Begins the peak anew: what is read and built before the first step does not grow with a batch."""
        self._live.peak_bytes = self._live.live_bytes
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def failure(self, error: BaseException) -> dict[str, object]:
        """Returns an OOM as the fields of a result, bytes included; raises the error again if it is none."""
        found = fault(error)
        if found.outcome not in NO_ROOM or poisoned(error):
            raise error
        asked = requested_bytes(str(error))
        held = torch.cuda.memory_reserved() if self.is_cuda else self._live.live_bytes if self._counts else None
        wanted = held + asked if held is not None and asked is not None else self._live.wanted_bytes or None
        message = str(error).strip().splitlines()[0][:200]
        bytes_of = {"requested_bytes": asked, "held_bytes": held, "wanted_bytes": wanted, "peak_bytes": self.peak_bytes}
        return {"outcome": str(found.outcome), "message": message, **bytes_of}

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (first := self._first()) is None:
            self._first = weakref.ref(optimizer)
        elif first is not optimizer:
            return
        if self.is_probe and self.is_cuda:
            torch.cuda.synchronize()  # a step that is queued has taken no time yet
        now = time.perf_counter()
        if self._last_s:
            self.between_s.append(now - self._last_s)
        self.steps, self._last_s = self.steps + 1, now
        if self.steps == 1:
            self._forget_peak()
        if self._is_over is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = (v for own in optimizer.state.values() for v in own.values() if isinstance(v, torch.Tensor))
            self.floor_bytes = storage_bytes([*parameters, *state])
            if self._is_over(self):
                raise ProbeEnds


def measured(train: Train | None = None, *, metric: str = "", cap_bytes: int | None = None) -> Any:
    """Returns a function trainable as Tune takes it, for `train(config)` that reports by `tuning.ray.report`.

    If it runs out of memory, its trial ends with a result: its `outcome` is "oom" (of the host: "host_oom"), its
    `metric` NaN, and `requested_bytes`, `held_bytes` and `wanted_bytes` say how much it was; the actor stays. Any other
    error is raised. `cap_bytes` is what the tensors of a trial may take: on CUDA the process is held to it, on a CPU a
    card of that size is emulated. A decorator, too: `@measured(metric="accuracy")`. Raises ConfigError for what is no
    function, no name and no number of bytes.
    """
    if not isinstance(metric, str) or not metric:
        raise ConfigError(f"measured(metric={metric!r})", allowed="a name that is reported", remedy="metric='accuracy'")
    if cap_bytes is not None and (not isinstance(cap_bytes, int) or cap_bytes <= 0):
        what = f"measured(cap_bytes={cap_bytes!r})"
        raise ConfigError(what, allowed="a whole number of bytes above 0, or None", remedy="cap_bytes=8 * 2**30")
    if train is None:
        return functools.partial(measured, metric=metric, cap_bytes=cap_bytes)
    if not callable(train) or isinstance(train, type):
        what = f"measured({train!r}): this is no function"
        raise ConfigError(what, allowed="a function that takes a config", remedy="put the training into train(config)")
    return functools.update_wrapper(functools.partial(_run, train, metric, cap_bytes), train)


def parts_of(trainable: Any) -> tuple[Train, str, int | None]:
    """Returns function, metric and cap of a trainable that `measured` made; raises ConfigError for any other."""
    if not isinstance(trainable, functools.partial) or trainable.func is not _run:
        what = f"{getattr(trainable, '__name__', trainable)!r} is not measured"
        raise ConfigError(what, allowed="what measured(train) returned", remedy="measured(train, metric=...) for Tune")
    train, metric, cap_bytes = trainable.args
    return train, metric, cap_bytes


def report(metrics: Mapping[str, object], *, checkpoint: tune.Checkpoint | None = None) -> None:
    """Reports to Tune as `tune.report` does, with `samples_per_s`, `peak_bytes` and the outcome "ok" beside.

    The speed is of training alone: what lies between a report and the last step before it, such as an evaluation, is
    left out. It is in steps a second if the space has no batch size. A probe reports nothing. Raises ConfigError
    outside of a function that is `measured`.
    """
    meter: StepMeter | None = getattr(_here, "meter", None)
    if meter is None:
        what = "tuning.ray.report was called outside of a measured function"
        raise ConfigError(
            what, allowed="a call in train(config), in its own thread", remedy="@measured above def train"
        )
    if not meter.is_probe:
        speed = {"samples_per_s": meter.samples_per_s, "peak_bytes": meter.peak_bytes}
        tune.report({**metrics, "outcome": str(Outcome.OK), **speed}, checkpoint=checkpoint)
    meter.pause()


def _run(train: Train, metric: str, cap_bytes: int | None, config: dict[str, Any]) -> None:
    sizes = (value for name, value in config.items() if LOOP.also_called.get(name, name) == "batch_size")
    failed: dict[str, object] = {}
    with StepMeter(cap_bytes, next(sizes, 1)) as meter:
        try:
            train(dict(config))
        except Exception as error:
            failed = meter.failure(error)
    if failed:
        free()
        tune.report({metric: float("nan"), **failed})


def free() -> None:
    """Gives back what a training has left behind."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
