"""The windows of one measurement and what the machine did in them, summed up as plain values."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from trainables import host_memory, loop, precision, training
from trainables.batches import plan_epoch, size_of
from trainables.own_count import OwnState
from trainables.reports import Event
from trainables.stopwatch import LOADING, SPANS, Window
from tuning.journal.events import Timed
from tuning.memory.oom import Outcome
from tuning.search.timing import MicroStep
from tuning.workers.telemetry import TelemetryReader


class WindowReader:
    """Hears a run without milestones, and passes on its windows, the first `dropped` left out; each is read as it
    closes. `take` returns whether they are enough.

    Windows that are left out add to `starts_s`, which is what the beginning of a pass takes, as those read do.

    A window in which a graph was compiled is left out: user code may compile some, even late at a new shape. So is
    one that has shown that freed memory is to be kept: those after it are faster.
    """

    def __init__(
        self, telemetry: TelemetryReader, take: Callable[[Window], bool], starts_s: list[float], dropped: int = 1
    ) -> None:
        self._telemetry, self._take, self._starts_s, self._dropped = telemetry, take, starts_s, dropped
        self._of_process = 0, False

    def __call__(self, event: Event) -> bool:
        """Takes an event; returns whether the run is to end."""
        if not isinstance(event, Window):
            return False
        self._starts_s += event.pass_starts_s
        before, self._of_process = self._of_process, (precision.graphs_made(), host_memory.is_kept())
        if self._dropped:
            self._dropped -= 1
            self._telemetry.begin()
            return False
        if self._of_process != before:
            return False
        self._telemetry.read()
        return self._take(event)


def speed(windows: Sequence[Window], starts_s: Sequence[float] = (), pass_samples: int = 0) -> Timed:
    """Returns samples a second over all windows, what a micro-step and an optimiser step take, and sums over the
    windows: seconds of each span and of all, micro-steps and optimiser steps.

    If the samples of a pass are given, each window has its share of what the beginning of a pass takes (`pass_s`, by
    `starts_s`), whether one fell into it or not.
    """
    names = (*(f"{span}_s" for span in (*SPANS, *LOADING)), "wall_s", "micro_steps", "steps")
    spans = {name: sum(getattr(w, name) for w in windows) for name in names}
    micro_steps, steps, wall_s, optimizer_s = (spans[n] for n in ("micro_steps", "steps", "wall_s", "optimizer_s"))
    samples, pass_s = sum(w.samples for w in windows), statistics.median(starts_s) if starts_s else 0.0
    if pass_samples:
        wall_s += samples * pass_s / pass_samples - sum(sum(w.pass_starts_s) for w in windows)
    return Timed(
        outcome=Outcome.OK,
        windows=tuple(w.samples_per_s for w in windows),
        # All samples over all seconds, not the median of windows: batches differ in length, and their mix is the point.
        samples_per_s=samples / wall_s if wall_s else None,
        pass_s=pass_s,
        optimizer_step_s=optimizer_s / steps if steps else 0.0,
        micro_step_s=(wall_s - optimizer_s) / micro_steps if micro_steps else 0.0,
        spans=spans,
    )


class Planned(NamedTuple):
    """A micro-step before it runs: its work, whether it is of a whole batch, whether it ends its batch."""

    work: float
    whole: bool
    ends_batch: bool


class Works:
    """The work in each micro-step of a run: the positions of its padded batch, 1 where samples have no length.

    If rows are packed there is no padding, and it is the sum of their lengths.
    """

    varies = False

    def __init__(self, state: loop.State) -> None:
        self._state = state
        self._knobs, self._seed = state.config.knobs, state.config.seed
        self.samples, self._lengths = pass_samples_of(state), state.resident.lengths(state.config, "train")
        self._epoch = functools.lru_cache(maxsize=2)(self._of_epoch)
        self.mean = statistics.fmean(one.work for one in self._epoch(0) if one.whole)
        """The mean work of a micro-batch, over the whole batches of the first epoch."""

    def before(self, count: int) -> list[Planned]:
        """Returns the last `count` micro-steps of the run, which stands between two batches."""
        each = len(self._epoch(0))
        end = self._state.epoch * each + self._state.micro_batches_done
        return [self._epoch(number // each)[number % each] for number in range(end - count, end)]

    def _of_epoch(self, epoch: int) -> list[Planned]:
        own = self._knobs
        plan = plan_epoch(self.samples, own, self._seed, epoch if self._lengths else 0, self._lengths)
        sizes = [round(len(m.indices) / m.share) for m in plan]
        pairs = zip(plan, sizes, strict=True)
        return [Planned(self._of(m.indices), size == sizes[0], m.ends_batch) for m, size in pairs]

    def _of(self, indices: Sequence[int]) -> float:
        if self._lengths is None:
            return 1.0
        lengths = [self._lengths[i] for i in indices]
        return float(sum(lengths) if self._knobs.as_dict().get("sequence_packing") else max(lengths) * len(lengths))


class SeenWorks:
    """The work in each micro-step of a custom loop: all alike, but those smaller than the largest are not whole.

    Which samples they hold is not known before they run. A loader of one size has two, with that of a pass's last
    batch: where there are more, or the smaller comes more than once a pass, it `varies`, and all are whole.
    """

    mean = 1.0

    def __init__(self, state: OwnState) -> None:
        self.varies = False
        self._state = state

    @property
    def samples(self) -> int:
        """Returns the samples of a pass."""
        return self._state.pass_samples or 1 << 62

    def before(self, count: int) -> list[Planned]:
        """Returns the last `count` micro-steps of the run, which stands between two batches."""
        sizes = [size for size, _ in self._state.micro_steps]
        whole, seen = max(sizes), sum(sizes)
        smaller = len(sizes) - sizes.count(whole)
        self.varies = len(set(sizes)) > 2 or (smaller - 1) * self.samples >= seen
        last = list(self._state.micro_steps)[-count:]
        return [Planned(1.0, self.varies or size == whole, ends_batch) for size, ends_batch in last]


def pass_samples_of(state: training.AnyState) -> int:
    """Returns the samples of a pass of a run that is prepared."""
    return state.pass_samples if isinstance(state, OwnState) else size_of(state.resident.dataset(state.config, "train"))


def micro_steps(window: Window, planned: Sequence[Planned]) -> list[MicroStep]:
    """Returns the window's micro-steps, those of an epoch's last batch left out where it is smaller."""
    optimizer_steps_s = iter(window.optimizer_steps_s)
    both = [
        (one, MicroStep(one.work, seconds, next(optimizer_steps_s) if one.ends_batch else None))
        for one, seconds in zip(planned, window.micro_steps_s, strict=True)
    ]
    return [step for one, step in both if one.whole]


def telemetry_of(device: str) -> TelemetryReader:
    """Returns what reads the device this process trains on; NVML counts cards otherwise than torch, so by its UUID."""
    if device != "cuda":
        return TelemetryReader(device)
    uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    return TelemetryReader(device, uuid, counters={"allocator_retries": _allocator_retries})


def _allocator_retries() -> float:
    """Returns how often cached memory was freed because an allocation failed, since the process began."""
    return float(torch.cuda.memory_stats().get("num_alloc_retries", 0))
