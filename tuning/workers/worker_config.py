"""The orders to a worker's process, and its answers. No torch: the study that says it has no use for it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from trainables.knobs import Scalar
from trainables.plan import Plan
from tuning.journal.events import Facts, WorkerAnswer, WorkloadFacts

Shrink = Literal["", "loader", "all"]
"""The changes with which a trial that ran out of memory may begin again: nothing, the loader's, the micro-batch too.

A RAM cache that does not fit is left out with any of them: the first slots may have taken the room of the others.
"""


@dataclass(frozen=True)
class WorkerConfig:
    """The settings that a worker needs to do any work of a study.

    `cap_bytes` is what the card holds for tensors, None where the device itself is the limit; `threads` are torch's.
    A process that has not answered for `hang_s` seconds counts as hung. Filling a RAM cache may take `cache_s`;
    a probe leaves room for one in each of `slots` processes. The process works in `folder`, "" for that of whoever
    starts it. It trains with `ranks` - 1 others, which it starts; `cards` are the CUDA devices it sees, "" for those of
    whoever starts it. The model that it loads at first is that of the knobs `start`.
    """

    workload: str
    options: Facts = field(default_factory=dict)
    device: str = "cpu"
    threads: int = 1
    cap_bytes: int | None = None
    seed: int = 0
    hang_s: float = 60.0
    cache_s: float = math.inf
    slots: int = 1
    folder: str = ""
    ranks: int = 1
    cards: str = ""
    start: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialOrder:
    """A trial as a worker runs it; `left_s` are the seconds after which it is cut, None for no limit."""

    trial: str
    knobs: Mapping[str, Scalar]
    seed: int
    plan: Plan
    threads: int
    shrink: Shrink
    left_s: float | None = None


@dataclass(frozen=True)
class Following:
    """A training that a process takes part in as `rank` of `count`; they meet in the file `rendezvous`.

    A loader that is silent for `silent_s` hangs; what is free for RAM caches is shared by `caches` trainings. Both are
    as in the process of rank 0, which would wait in vain for one that gave up later, or had less room.
    """

    knobs: Mapping[str, Scalar]
    seed: int
    plan: Plan
    epoch: int
    threads: int
    silent_s: float
    caches: int
    rank: int = 0
    count: int = 1
    rendezvous: str = ""


@dataclass(frozen=True, kw_only=True)
class Description(WorkerAnswer, WorkloadFacts):
    """Facts of device and workload that only a process with torch can tell.

    For a custom loop, which was tried for a few steps: `seen` are the sizes of its batches; it `averages` if its
    gradients may be averaged over processes; `untrained` is what it reported if nothing was learned by then. `torch` is
    the version and `room_bytes` the free memory of a node.
    """

    averages: bool = False
    seen: Mapping[str, int] = field(default_factory=dict)
    untrained: Mapping[str, float] = field(default_factory=dict)
    torch: str = ""
    room_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Untrained(WorkerAnswer):
    """The objectives before any step; none if they are not defined then."""

    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ChangedKnobs(WorkerAnswer):
    """The knobs that change what is learned, each with the reason in words; `message` if that could not be measured.

    `untold` are those whose change cannot be told from the random numbers that a step draws.
    """

    changed: Mapping[str, str] = field(default_factory=dict)
    untold: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settled:
    """The memory of a process once a training is over: `own_bytes` of the model, `held_bytes` in all.

    `retire` says why it should run nothing else, "" if it may.
    """

    own_bytes: int
    held_bytes: int
    retire: str


@dataclass(frozen=True, kw_only=True)
class RankEnd(WorkerAnswer):
    """How the process of a `rank` fared in a training of several; `of_another`: it failed since another one had."""

    rank: int = 0
    of_another: bool = False


@dataclass(frozen=True)
class Refused:
    """A ConfigError of the worker's process, in words; `traceback` is of the error that it came from, "" for none."""

    what: str
    allowed: str
    remedy: str
    traceback: str


@dataclass(frozen=True)
class Failed:
    """An exception of the worker's process, in words: what a user's file defines cannot be loaded elsewhere.

    `hook` is the method of the workload that failed, where it is known, `last_lines` and `traceback` are of the user's
    files where there are any in it, `remedy` says what would help, "" where nothing is known. `outcome` is what
    `memory.oom` makes of it; `elsewhere` says whether another machine may run it.
    """

    kind: str
    text: str
    traceback: str
    hook: str = ""
    last_lines: str = ""
    remedy: str = ""
    outcome: str = ""
    elsewhere: bool = False
