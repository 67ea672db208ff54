"""Measures how the time of a step is spent, without making the device wait.

On the CPU a span is host time. On CUDA the spans of the device are pairs of events, read back once when a window
closes; only that reading synchronises. Waiting for data is host time everywhere.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

StepSpan = Literal["data_wait", "transfer", "forward_backward", "optimizer"]
SPANS: tuple[StepSpan, ...] = ("data_wait", "transfer", "forward_backward", "optimizer")
LOADING = ("read", "collate", "augment")
"""Parts of `data_wait` if the training process loads data itself: reading samples, collating and augmenting batches."""


class _Mark(NamedTuple):
    """The end of a span of a step, and the micro-steps of the window counted by then."""

    span: str
    at: float
    event: torch.cuda.Event | None
    micro_steps: int = 0

    def until(self, later: _Mark) -> float:
        """Returns the seconds between two marks: of the device if they have events, otherwise of the host."""
        if self.event is None or later.event is None:
            return later.at - self.at
        return float(self.event.elapsed_time(later.event)) / 1000.0  # milliseconds


class _Start(NamedTuple):
    """The wait for an epoch's first batch: seconds before a pause, begin and end after it, index of the next mark."""

    before_s: float
    began: _Mark
    ended: _Mark
    next_mark: int


@dataclass(frozen=True)
class Window:
    """The measurements between two readings of the clock.

    `wall_s` is host time; the `*_s` spans are sums over the window (on CUDA the last three are device time, so they
    need not add up to `wall_s`). `loss` is the mean over the samples of the window. The seconds of `LOADING` are parts
    of `data_wait_s`; time in loader processes is not included.
    """

    samples: int
    steps: int
    micro_steps: int
    wall_s: float
    data_wait_s: float
    transfer_s: float
    forward_backward_s: float
    optimizer_s: float
    loss: float
    read_s: float = 0.0
    collate_s: float = 0.0
    augment_s: float = 0.0
    micro_steps_s: tuple[float, ...] = ()
    """Seconds of each micro-step, from the end of the span before it; empty unless each step is timed."""
    optimizer_steps_s: tuple[float, ...] = ()
    """Seconds of each optimiser step, likewise."""
    pass_starts_s: tuple[float, ...] = ()
    """For each epoch that began in this window: seconds from the last step to the first batch, beyond an ordinary wait,
    such as the start of workers. They are part of `data_wait_s`, and of no micro-step."""

    @property
    def samples_per_s(self) -> float:
        """Returns training samples a second, waiting for data and optimiser steps included."""
        return self.samples / self.wall_s if self.wall_s > 0 else 0.0


class Stopwatch:
    """Splits the time since the last reading into spans; `lap(span)` ends one and starts the next."""

    def __init__(
        self,
        device: torch.device,
        loading: Mapping[str, float] | None = None,
        *,
        each_step: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`loading` holds the seconds of `LOADING` so far, by name; it is read when a window opens and closes.

        With `each_step`, windows hold the seconds of every step; on CUDA device time, idle time included.
        """
        self._clock = clock or time.perf_counter
        self._each_step = each_step
        self._cuda = device.type == "cuda"
        self._device = device
        self._loading = {} if loading is None else loading
        self._pass_s: float | None = None
        self.restart()

    def restart(self) -> None:
        """Starts a window."""
        self._spans: dict[str, float] = dict.fromkeys(SPANS, 0.0)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._loaded = dict(self._loading)
        self.steps = self.micro_steps = self.samples = 0
        self._opened = self._last = self._clock()
        self._last_event = self._record() if self._cuda else None
        self._marks = [_Mark("", self._opened, self._last_event)]
        self._starts: list[_Start] = []
        self._paused_at: float | None = None

    def next_pass(self) -> None:
        """Begins an epoch: the wait for its first batch is timed separately, and is part of no step."""
        self._pass_s = 0.0

    @property
    def lapped_at(self) -> float:
        """When the last lap ended, as a reading of the clock."""
        return self._last

    @property
    def is_paused(self) -> bool:
        """Whether the clock is paused within a window."""
        return self._paused_at is not None

    def pause(self) -> None:
        """Stops the clock until `go_on`; synchronises a CUDA device, whose steps are in the window."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        self._paused_at = self._clock()
        if self._pass_s is not None and not self._cuda:  # on CUDA, steps may have been computed meanwhile
            self._pass_s += self._paused_at - self._last

    def go_on(self) -> None:
        """Resumes after a pause, which is in no span; starts a window if the clock was not paused."""
        if self._paused_at is None:
            self.restart()
            return
        self._last = self._clock()
        self._opened += self._last - self._paused_at
        self._last_event = self._record() if self._cuda else None
        self._marks.append(_Mark("", self._last, self._last_event))
        self._paused_at = None

    def lap(self, span: StepSpan, at: float | None = None) -> float:
        """Adds the time since the last lap to `span`, and returns the host seconds since the window opened.

        The span ended `at` that reading of the clock, or now. On CUDA, idle time of the device before a wait has
        no span.
        """
        now = self._clock() if at is None else max(at, self._last)
        if not self._cuda or span == "data_wait":
            self._spans[span] += now - self._last
        before, self._last = _Mark("", self._last, self._last_event), now
        if self._cuda:
            event = self._record()
            if span != "data_wait" and self._last_event is not None:
                self._events.append((span, self._last_event, event))
            self._last_event = event
        if self._pass_s is not None and span == "data_wait":
            self._starts.append(_Start(self._pass_s, before, _Mark(span, now, self._last_event), len(self._marks)))
            self._pass_s = None
        if self._each_step and span in ("forward_backward", "optimizer"):
            self._marks.append(_Mark(span, now, self._last_event, self.micro_steps))
        return now - self._opened

    def elapsed_s(self) -> float:
        """Returns host seconds since the window opened, without pauses; does not synchronise."""
        return (self._paused_at or self._clock()) - self._opened

    def window(self, loss: float) -> Window:
        """Returns the window that ends now; synchronises a CUDA device."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
            for span, start, end in self._events:
                self._spans[span] += start.elapsed_time(end) / 1000.0  # milliseconds
        spans = {f"{name}_s": seconds for name, seconds in self._spans.items()}
        spans |= {f"{name}_s": seconds - self._loaded[name] for name, seconds in self._loading.items()}
        starts_s = self._starts_s()
        later_s = {start.next_mark: seconds for start, seconds in zip(self._starts, starts_s, strict=True)}
        micro_s, optimizer_s = self._steps_s("forward_backward", later_s), self._steps_s("optimizer", {})
        return Window(
            self.samples,
            self.steps,
            self.micro_steps,
            self.elapsed_s(),
            **spans,
            loss=loss,
            micro_steps_s=micro_s,
            optimizer_steps_s=optimizer_s,
            pass_starts_s=tuple(start.before_s + more_s for start, more_s in zip(self._starts, starts_s, strict=True)),
        )

    def _starts_s(self) -> list[float]:
        """Returns, for each epoch that began, the seconds of its first wait beyond an ordinary wait of this window."""
        others = self.micro_steps - len(self._starts)
        waits_s = self._spans["data_wait"] - sum(start.ended.at - start.began.at for start in self._starts)
        usual_s = waits_s / others if others > 0 else 0.0
        return [max(0.0, start.began.until(start.ended) - usual_s) for start in self._starts]

    def _steps_s(self, span: StepSpan, less_s: Mapping[int, float]) -> tuple[float, ...]:
        """Returns the seconds of `span` in each micro-step, without `less_s`, which is by the index of a mark."""
        steps_s: dict[int, float] = {}  # a micro-step has a span for each of several optimisers
        for number, (a, b) in enumerate(itertools.pairwise(self._marks), start=1):
            if b.span == span:
                steps_s[b.micro_steps] = steps_s.get(b.micro_steps, 0.0) + a.until(b) - less_s.get(number, 0.0)
        return tuple(steps_s.values())

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
