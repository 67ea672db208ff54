"""The stages' view of whoever does the work: a profiler to measure on alone, and an executor that runs trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trainables.knobs import Scalar
from tuning.journal.events import Event
from tuning.memory.measure import Footprints

Told = Callable[[Event], None]
"""Hears each event as it is written."""


class Probes(Protocol):
    """Times a configuration."""

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> dict[str, Any]:
        """Returns the speed of the knobs, in samples a second, measured for `time_s`; less where it cannot win."""
        ...


class Profiler(Footprints, Probes, Protocol):
    """A warm process that has the device to itself; every method returns plain values (`workers.session`)."""

    def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> dict[str, Any]:
        """Returns the speed of a configuration for one window, a moment."""
        ...

    def train(
        self, knobs: Mapping[str, Scalar], samples: int, milestones: Sequence[int], seed: int, left_s: float = math.inf
    ) -> dict[str, Any]:
        """Returns the result of training on `samples` samples; its outcome is `cut` where `left_s` was over."""
        ...


@dataclass(frozen=True)
class TrialRequest:
    """A trial to run: its id, its knobs, the seed of its weights and batches, and its expected bytes."""

    trial: str
    knobs: Mapping[str, Scalar]
    seed: int
    need_bytes: int | None = None


class Scheduler(Protocol):
    """Hands out trials and hears of them; an executor calls it from one thread."""

    def next_trial(self) -> TrialRequest | None:
        """Returns the next trial; None when there will be no more."""
        ...

    def at_rung(self, trial: str, result: Mapping[str, Any]) -> bool:
        """Returns whether the trial goes on after this rung."""
        ...

    def goes_on(self, trial: str, result: Mapping[str, Any]) -> bool:
        """Returns whether a trial goes on between rungs, or begins after it waited: `result` is then empty."""
        ...

    def widened(self, trial: str, result: Mapping[str, Any]) -> None:
        """Takes that a trial ran out of memory in its slot, and begins again with a device to itself."""
        ...

    def ended(self, trial: str, result: Mapping[str, Any]) -> None:
        """Takes the last result of a trial."""
        ...

    def decided(self, event: str, trial: str, reason: str) -> None:
        """Takes what the executor did about a trial or its process, such as `retired`, and why."""
        ...


@dataclass(frozen=True)
class TrialPlan:
    """How every trial of a search stage is run.

    `milestones` are samples seen, the last of them the horizon `samples`; `shrink` halves the micro-batch on an OOM.
    `concurrency` trials run at once, each in an equal slot of one of the `devices`, with `threads` of torch's and under
    `cap_bytes`; with a device to itself a trial is under `alone_bytes`. None: it is held to nothing but the worker's
    own cap. If slots have no cap, a trial that is predicted to need more than `room_bytes` still runs alone, with
    None none does. A trial that still runs at `deadline`, in seconds of the monotonic clock, is cut there; None: never.
    """

    samples: int
    milestones: tuple[int, ...]
    shrink: bool
    concurrency: int
    threads: int
    devices: int = 1
    cap_bytes: int | None = None
    alone_bytes: int | None = None
    room_bytes: int | None = None
    deadline: float | None = None

    def on_nodes(self, count: int) -> TrialPlan:
        """Returns the plan for so many machines, each of which has the slots of this one."""
        return replace(self, concurrency=self.concurrency * count, devices=self.devices * count)
