"""The stages' view of whoever does the work: a profiler to measure on alone, and an executor that runs trials."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from trainables.knobs import Scalar
from tuning.journal.events import Config, Event, Timed, Trained, Values
from tuning.memory.measure import Footprints

Told = Callable[[Event], None]
"""Hears each event as it is written."""


@dataclass(frozen=True, kw_only=True)
class TrialState(Trained):
    """A trial as its worker tells of it: at a rung, which has `values`, between two rungs, or `done`.

    `knobs` are those that it trains with; `retries` is how earlier attempts ended, whose knobs took too much. `curve`
    has the seconds of training, the samples and the values of each milestone so far. `own_bytes` of `held_bytes` are
    the model's. `decisions` are pairs of an event and its reason: what became of the process. If `fatal` says why no
    process here can load the workload any more, one of another machine may if it is so `elsewhere`.
    """

    knobs: Config = field(default_factory=dict)
    samples: int = 0
    done: bool = False
    retries: tuple[TrialState, ...] = ()
    curve: tuple[tuple[float, int, Values], ...] = ()
    own_bytes: int = 0
    pid: int = 0
    decisions: tuple[tuple[str, str], ...] = ()
    fatal: str = ""
    elsewhere: bool = False


class Probes(Protocol):
    """Times a configuration."""

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
        """Returns the speed of the knobs, in samples a second, measured for `time_s`; less where it cannot win."""
        ...


class Profiler(Footprints, Probes, Protocol):
    """A warm process that has the device to itself; `workers.session` says what it does."""

    def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> Timed:
        """Returns the speed of a configuration for one window, a moment."""
        ...

    def train(
        self, knobs: Mapping[str, Scalar], samples: int, milestones: Sequence[int], seed: int, left_s: float = math.inf
    ) -> TrialState:
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

    def at_rung(self, trial: str, state: TrialState) -> bool:
        """Returns whether the trial goes on after this rung."""
        ...

    def goes_on(self, trial: str, state: TrialState | None = None) -> bool:
        """Returns whether a trial goes on between rungs, or begins after it waited: it has no state then."""
        ...

    def widened(self, trial: str, state: TrialState) -> None:
        """Takes that a trial ran out of memory in its slot, and begins again with a device to itself."""
        ...

    def ended(self, trial: str, state: TrialState) -> None:
        """Takes the last state of a trial."""
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
