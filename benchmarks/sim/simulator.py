"""A study in virtual time: the same scheduler, sampler, rungs, guard and placing, over a world instead of processes.

    clock = VirtualClock()
    with VirtualJournal(clock) as journal:
        profiler, executor = SimulatedProfiler(world, clock), SimulatedExecutor(world, clock, devices=1000)

A world answers for any configuration: its step times, its bytes, what it learns (`rks.sim.recorded` has those of
recorded trials). Nothing here trains, sleeps or starts a process, and neither torch nor Ray is imported. What an
executor decides itself, who waits and who begins again in a wider share, is decided by the code that Ray uses
(`workers.placement`); what is not simulated is a process that is lost.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from trainables.knobs import Knobs, Scalar
from tuning.journal.format import plain
from tuning.journal.records import Journal, Record
from tuning.memory import oom
from tuning.memory.oom import Outcome
from tuning.memory.profile import Sizes
from tuning.search.protocols import Scheduler, TrialPlan
from tuning.workers.placement import Placed, Placing, Share

OOM_S = 0.3
"""What an out-of-memory error costs: the step that failed and the collection after it (`oom_recovery`)."""


REFUSAL_S = 0.03
"""What a refusal costs: a proposal and a judgement. Were it free, a sweep of refusals would never end."""


class VirtualClock:
    """Seconds that pass when they are told to; called, it says how many have. Stands in for `time.monotonic`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def __call__(self) -> float:
        """Returns the seconds that have passed."""
        return self._now_s

    def spend(self, seconds: float) -> None:
        """Lets so many seconds pass."""
        self._now_s += max(0.0, seconds)

    def reach(self, moment_s: float) -> None:
        """Lets time pass until a moment; one that is over changes nothing."""
        self._now_s = max(self._now_s, moment_s)


class VirtualJournal(Journal):
    """A journal that is never written: the same records, stamped with virtual time, in memory alone."""

    def __init__(self, clock: VirtualClock, records: Sequence[Record] = ()) -> None:
        self.path, self.warnings = Path("virtual"), []
        self._records, self._clock = list(records), clock

    def append(self, event: str, /, **fields: Any) -> Record:
        """Returns the record, stamped with virtual time; a refused configuration takes `REFUSAL_S`."""
        now_s = self._clock()
        stamp = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        record = Record(len(self._records), stamp, event, {k: plain(v, k) for k, v in fields.items()}, now_s)
        self._records.append(record)
        if event == "refused":
            self._clock.spend(REFUSAL_S)
        return record

    def close(self) -> None:
        """Has nothing to give back."""


class World(Protocol):
    """What would be measured of any configuration. The same question has the same answer."""

    def step_s(self, knobs: Mapping[str, Scalar]) -> tuple[float, float]:
        """Returns the seconds of a micro-step, at the knobs' own micro-batch, and of an optimiser step."""
        ...

    def peak_bytes(self, knobs: Mapping[str, Scalar], micro_batch: int) -> int:
        """Returns the most that is alive while the configuration trains."""
        ...

    def sizes(self, knobs: Mapping[str, Scalar]) -> Sizes:
        """Returns the bytes of parameters, gradients and the optimiser's state."""
        ...

    def values(self, knobs: Mapping[str, Scalar], samples: int, seed: int) -> dict[str, float]:
        """Returns the objectives after so many training samples; one that is not finite means that it diverged."""
        ...

    def evaluate_s(self, knobs: Mapping[str, Scalar]) -> float:
        """Returns the seconds of one evaluation."""
        ...


def samples_per_s(world: World, knobs: Mapping[str, Scalar]) -> float:
    """Returns the speed of whole optimiser steps."""
    own = Knobs.of(knobs)
    micro_s, optimizer_s = world.step_s(knobs)
    steps = math.ceil(own.batch_size / min(own.micro_batch_size, own.batch_size))
    return own.batch_size / (steps * micro_s + optimizer_s)


class SimulatedProfiler:
    """The profiler of a world (`search.protocols.Profiler`); what it measures takes the seconds that it would."""

    def __init__(self, world: World, clock: VirtualClock, cap_bytes: int | None = None) -> None:
        self._world, self._clock, self._cap_bytes = world, clock, cap_bytes

    def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> dict[str, Any]:
        """Returns sizes, and the peak for each micro-batch that fits."""
        sizes = self._world.sizes(knobs)
        peaks = ((m, self._world.peak_bytes(knobs, m)) for m in micro_batches)
        measured = list(itertools.takewhile(lambda pair: self._fits(pair[1]), peaks))
        self._clock.spend(0.1 * len(micro_batches))
        return {
            "parameter_bytes": sizes.parameter_bytes,
            "gradient_bytes": sizes.gradient_bytes,
            "optimizer_bytes": sizes.optimizer_bytes,
            "measured": measured,
            "message": "" if len(measured) == len(micro_batches) else "CUDA out of memory (simulated)",
        }

    def probe(
        self, knobs: Mapping[str, Scalar], time_s: float, spread_frac: float, best_samples_per_s: float
    ) -> dict[str, Any]:
        """Returns the world's speed, or an OOM above the cap; takes `time_s`, half of it where it cannot win."""
        own = Knobs.of(knobs)
        peak = self._world.peak_bytes(knobs, min(own.micro_batch_size, own.batch_size))
        if not self._fits(peak):
            self._clock.spend(OOM_S)
            message = f"CUDA out of memory (simulated): {peak} of {self._cap_bytes} bytes"
            return {"outcome": str(Outcome.OOM), "message": message, "samples_per_s": None, "wall_s": OOM_S}
        rate = samples_per_s(self._world, knobs)
        micro_s, optimizer_s = self._world.step_s(knobs)
        wall_s = time_s if rate > best_samples_per_s else time_s / 2
        self._clock.spend(wall_s)
        return {
            "outcome": str(Outcome.OK),
            "message": "",
            "samples_per_s": rate,
            "windows": [rate],
            "micro_step_s": micro_s,
            "optimizer_step_s": optimizer_s,
            "spread_frac": 0.0,
            "peak_allocated_bytes": peak,
            "wall_s": wall_s,
        }

    def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> dict[str, Any]:
        """Returns the world's speed."""
        return self.probe(knobs, window_s, 0.0, 0.0)

    def train(self, knobs: Mapping[str, Scalar], samples: int, milestones: Sequence[int], seed: int) -> dict[str, Any]:
        """Returns the result of a training alone on the device."""
        trial = SimulatedTrial(self._world, knobs, (*milestones, samples), seed, Share(self._cap_bytes, 1, "all"))
        result: dict[str, Any] = {"done": False}
        while not result["done"]:
            seconds, result = trial.advance()
            self._clock.spend(seconds)
        return {**result, "window_samples_per_s": []}

    def _fits(self, peak_bytes: int) -> bool:
        return self._cap_bytes is None or peak_bytes <= self._cap_bytes


class Course(Protocol):
    """A trial under way; the results are those of `workers.session.Trial`."""

    def advance(self) -> tuple[float, dict[str, Any]]:
        """Returns the seconds to the next rung or the end, and the result there."""
        ...


class SimulatedTrial:
    """A configuration trained in a world; halves its micro-batch after an OOM as a process does (`oom.retreat`)."""

    def __init__(
        self, world: World, knobs: Mapping[str, Scalar], milestones: Sequence[int], seed: int, share: Share
    ) -> None:
        self._world, self._knobs, self._seed, self._share = world, dict(knobs), seed, share
        self._left = sorted(set(milestones))
        self._samples, self._spent_s, self._evaluated_s = 0, 0.0, 0.0
        self._ooms: list[dict[str, Any]] = []

    def advance(self) -> tuple[float, dict[str, Any]]:
        """Returns the seconds to the next rung or the end, and the result there."""
        lost_s, message = self._settle() if not self._samples else (0.0, "")
        if message:
            return lost_s, self._result({}, Outcome.OOM, message)
        reached = self._left.pop(0)
        values = self._world.values(self._knobs, reached, self._seed)
        took_s = (reached - self._samples) / samples_per_s(self._world, self._knobs)
        self._samples, self._spent_s = reached, self._spent_s + took_s
        evaluate_s = self._world.evaluate_s(self._knobs)
        self._evaluated_s += evaluate_s
        whole_s = lost_s + took_s + evaluate_s
        if not all(math.isfinite(v) for v in values.values()):
            return whole_s, self._result(dict.fromkeys(values), Outcome.DIVERGED, "the mean training loss is nan")
        return whole_s, self._result(values, Outcome.OK, "")

    def _settle(self) -> tuple[float, str]:
        """Returns the seconds lost to OOMs before the first step, and what the last said where the trial ends of it."""
        own = Knobs.of(self._knobs)
        micro, lost_s = min(own.micro_batch_size, own.batch_size), 0.0
        while self._share.cap_bytes is not None and (
            (peak := self._world.peak_bytes(self._knobs, micro)) > self._share.cap_bytes
        ):
            lost_s += OOM_S
            message = f"CUDA out of memory (simulated): {peak} of {self._share.cap_bytes} bytes"
            change = oom.retreat(oom.DEVICE, micro, 0)
            if change is None or self._share.shrink != "all":
                return lost_s, message
            failed = {"outcome": str(Outcome.OOM), "fault": oom.DEVICE.name, "message": message}
            wanted = {"wanted_bytes": peak, "cap_bytes": self._share.cap_bytes}
            self._ooms.append({"knobs": dict(self._knobs), **failed, **wanted})
            self._knobs.update(change)
            micro = change["micro_batch_size"]
        return lost_s, ""

    def _result(self, values: Mapping[str, float | None], outcome: Outcome, message: str) -> dict[str, Any]:
        own = Knobs.of(self._knobs)
        return {
            "outcome": str(outcome),
            "message": message,
            "done": outcome != Outcome.OK or not self._left,
            "values": dict(values),
            "samples": self._samples,
            "knobs": dict(self._knobs),
            "ooms": list(self._ooms),
            "restarts": [],
            "measured_samples_per_s": samples_per_s(self._world, self._knobs) if self._samples else None,
            "train_s": self._spent_s,
            "evaluate_s": self._evaluated_s,
            "peak_allocated_bytes": self._world.peak_bytes(self._knobs, min(own.micro_batch_size, own.batch_size)),
            "cap_bytes": self._share.cap_bytes,
        }


@dataclass(frozen=True)
class _Running:
    """A trial on a device, and what it will report when its time comes."""

    device: int
    placed: Placed
    course: Course
    result: dict[str, Any]


class SimulatedExecutor:
    """Runs the trials a scheduler hands out on so many devices at once, each shared as `TrialPlan.slots` has it.

    `courses` makes the course of a placed trial, by default that of the world; `start_s` passes before a trial's first
    step. `asks` are the moments at which new trials are asked for, where they are known, as of a recorded search; else
    it is whenever a device has room.
    """

    def __init__(
        self,
        world: World | None,
        clock: VirtualClock,
        *,
        devices: int = 1,
        cap_bytes: int | None = None,
        start_s: float = 0.0,
        courses: Callable[[Placed, Share, TrialPlan], Course] | None = None,
        asks: Sequence[float] = (),
    ) -> None:
        if courses is None and world is None:
            raise ValueError("a simulated executor needs a world, or the courses of its trials")
        self._world, self._clock, self._devices, self._cap_bytes = world, clock, devices, cap_bytes
        self._start_s, self._courses, self._asks = start_s, courses or self._in_world, tuple(asks)
        self.events = 0
        """How many results have been judged: rungs and endings."""

    def run(self, scheduler: Scheduler, orders: TrialPlan) -> None:
        """Returns when every trial has ended."""
        placings = [Placing(scheduler, orders, self._cap_bytes) for _ in range(self._devices)]
        number = itertools.count()
        due: list[tuple[float, int, _Running | None]] = [(at, next(number), None) for at in self._asks]
        heapq.heapify(due)

        def launch(device: int, placed: Placed) -> None:
            course = self._courses(placed, placings[device].share(placed), orders)
            push(_Running(device, placed, course, {}), self._start_s)

        def push(running: _Running, after_s: float = 0.0) -> None:
            seconds, result = running.course.advance()
            then = _Running(running.device, running.placed, running.course, result)
            heapq.heappush(due, (self._clock() + after_s + seconds, next(number), then))

        def fill(device: int) -> None:
            while (placed := placings[device].take()) is not None:
                launch(device, placed)

        if not due:
            for device in range(self._devices):
                fill(device)
        asked = len(self._asks)
        while due:
            moment_s, _, running = heapq.heappop(due)
            self._clock.reach(moment_s)
            if running is None:  # a recorded search asked now, for one trial
                asked -= 1
                if (placed := placings[0].take()) is not None:
                    launch(0, placed)
                continue
            self.events += 1
            trial, placing = running.placed.request.trial, placings[running.device]
            if not running.result["done"] and scheduler.at_rung(trial, running.result):
                push(running)
                continue
            placing.leave(running.placed)
            if not placing.widened(running.placed, running.result):
                scheduler.ended(trial, running.result)
            if not asked or placing.waiting:
                fill(running.device)

    def _in_world(self, placed: Placed, share: Share, orders: TrialPlan) -> Course:
        assert self._world is not None  # noqa: S101  (said by __init__)
        milestones = (*orders.milestones, orders.samples)
        own = placed.request
        return SimulatedTrial(self._world, own.knobs, milestones, own.seed, share)
