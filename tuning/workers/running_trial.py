"""A trial inside the warm process: it tells of each rung, begins again with less memory where that can help, and ends.

Its errors are not raised: the `outcome` of its last state says how it ended (docs/design.md section 5).
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from trainables import training
from trainables.evaluation import Evaluation
from trainables.knobs import Knobs
from trainables.own_count import OwnResident, OwnState
from trainables.ranks import RankFailed
from trainables.reports import Event
from trainables.state import Diverged, Undefined
from trainables.stopwatch import Window
from tuning.journal.events import Facts, Values
from tuning.memory import oom
from tuning.memory.oom import Outcome
from tuning.search.protocols import TrialState
from tuning.workers import user_code
from tuning.workers.windows import speed
from tuning.workers.worker_config import TrialOrder

if TYPE_CHECKING:
    from tuning.workers.session import Session


ALIKE = 3
"""Attempts with halved micro-batches that run out after as many samples, from which memory is said to grow."""
Tell = Callable[[TrialState], float]
"""Hears of a trial; returns after how many seconds it is to hear again at the latest, 0 to end the trial."""


def to_the_end(state: TrialState) -> float:
    """Lets a trial train to its end."""
    return math.inf


class Attempt:
    """Turns an error inside the block into an outcome."""

    def __init__(self, session: Session, cap_bytes: int | None) -> None:
        self._session = session
        self._limited = session.memory.backstop(cap_bytes)
        self.fault = oom.UNKNOWN
        """The fault of the block, if it failed."""
        self.failure: Facts = {}
        """The fields of a `WorkerAnswer` that say how it failed; none if it did not."""
        self.is_poisoned = False
        """Whether the device context of the process is lost."""

    def __enter__(self) -> Attempt:
        self._limited.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self._limited.__exit__(None, None, None)  # before recovering, which may need room
        if not isinstance(error, Exception):  # none, or KeyboardInterrupt, SystemExit, GeneratorExit
            return False
        if isinstance(error, RankFailed):
            self.fault = oom.fault(error)
            kept = ("outcome", "failed_at", "fault", "wanted_bytes", "traceback")
            self.failure = {**{name: getattr(error.found, name) for name in kept}, "message": str(error)[:500]}
            self._session.recover(error)
            return True
        of_values = oom.UNDEFINED if isinstance(error, Undefined) else oom.DIVERGED
        self.fault = fault = of_values if isinstance(error, Diverged) else oom.fault(error)
        outcome = fault.outcome
        is_theirs = outcome in (Outcome.CRASH, Outcome.DATA) or fault is oom.UNDEFINED
        message = user_code.in_a_line(error) if is_theirs else user_code.in_words(error)[:500]
        if outcome is Outcome.DIVERGED:  # which its type says once more
            message = message.removeprefix(f"{type(error).__name__}: ")
        failure = {"outcome": str(outcome), "message": message, "failed_at": time.time(), "fault": fault.name}
        if outcome is Outcome.OOM:
            failure["wanted_bytes"] = self._session.memory.wanted_bytes(str(error))
        if outcome is Outcome.CRASH:  # a default dtype, no gradients: every later training would have them
            failure["traceback"] = "".join(traceback.format_exception(error))[-4000:]
            failure["retire"] = "the code failed, and what it left in the process is not known"
        if oom.poisoned(error):
            self.is_poisoned, failure["retire"] = True, "the device context of the process is lost"
        self.failure = failure
        self._session.recover(error)
        return True


class RunningTrial:
    """A configuration being trained, again with less memory where that can help."""

    def __init__(self, session: Session, order: TrialOrder, tell: Tell) -> None:
        self._session, self._order, self._plan, self._tell = session, order, order.plan, tell
        self._knobs = dict(order.knobs)
        self._state: training.AnyState | None = None
        self._retries: tuple[TrialState, ...] = ()

    def run(self, pause_after_s: float = math.inf) -> TrialState:
        """Returns the last state of the trial, which ended or was told to end; never raises on OOM.

        It tells of its state at each milestone; in between, without values, after a window if the last was told of more
        than `pause_after_s` ago, or what the answer said; and before it begins again, since a loader that hung has
        taken most of that.
        """
        self._pause_at, self._is_stopped, done = time.perf_counter() + pause_after_s, False, False
        while not done:
            self._begin()
            with Attempt(self._session, self._plan.cap_bytes) as attempt:
                self._train()
            found = replace(self._now(), **attempt.failure)
            grows = self._grows(found)
            found = replace(found, message=f"{found.message}; {grows}") if grows else found
            done = self._is_stopped or bool(grows) or not self._retries_after(found, attempt)
            if not done and (found.outcome == Outcome.OOM or time.perf_counter() > self._pause_at):
                self._begin()
                done = self._told({})
        if isinstance(self._state, OwnState) and found.outcome == Outcome.OK:
            found = replace(found, remark=self._state.remark)
            self._state = None
            with Attempt(self._session, self._plan.cap_bytes) as attempt:
                self._session.require_own_report(found)
            found = replace(found, **attempt.failure)
        self._state = None
        if attempt.is_poisoned:
            return replace(found, done=True)
        left = self._session.settled(self._plan.cap_bytes)
        found = replace(found, done=True, own_bytes=left.own_bytes, held_bytes=left.held_bytes)
        return replace(found, retire=found.retire or left.retire)

    def _begin(self) -> None:
        self._session.telemetry.begin()
        self._began = time.perf_counter()
        self._state = None
        self._windows: list[Window] = []
        self._outcome = Outcome.OK
        self._values: Values = {}
        self._curve: tuple[tuple[float, int, Values], ...] = ()
        self._setup_s = self._evaluate_s = 0.0

    def _train(self) -> None:
        session, plan = self._session, self._plan
        session.memory.limit(plan.cap_bytes)
        state = self._state = training.prepare(session.resident, session.config(self._knobs, self._order.seed), plan)

        def heard(event: Event) -> bool:
            is_last = state.samples >= plan.samples or state.has_ended
            if isinstance(event, Evaluation):
                self._evaluate_s += event.wall_s
                self._curve = (*self._curve, (sum(w.wall_s for w in self._windows), event.samples, event.values))
                if is_last:
                    self._values = event.values
                return is_last or self._told(event.values)
            if isinstance(event, Window):
                self._windows.append(event)
                session.telemetry.read()
                return not is_last and time.perf_counter() > self._pause_at and self._told({})
            self._setup_s = time.perf_counter() - self._began
            session.telemetry.skip()
            return False

        session.run(state, heard)
        if not (self._values or self._is_stopped):
            self._outcome = Outcome.NO_RESULT

    def _told(self, values: Values) -> bool:
        """Tells of the state; returns whether the trial is to end."""
        after_s = self._tell(replace(self._now(), values=values))
        self._pause_at, self._is_stopped = time.perf_counter() + after_s, after_s <= 0
        self._session.telemetry.skip()  # the evaluation, and the wait for an answer
        return self._is_stopped

    def _grows(self, found: TrialState) -> str:
        """Returns that memory grows with the steps, "" if the micro-batch may be the cause.

        Half of a micro-batch gets further, unless what is kept of each sample fills the memory. It gets less far if
        what an attempt made is still held after it.
        """
        ooms = [*self._retries[1 - ALIKE :], found]
        samples = [one.samples for one in ooms if one.outcome == Outcome.OOM]
        first = Knobs.of(ooms[0].knobs, self._session.table).batch_size
        if len(samples) > 1 and samples[-2] > 2 * first and samples[-1] < samples[-2] / 2:
            return (
                f"half the micro-batch ran out after {samples[-1]:,} samples in place of {samples[-2]:,}: the module "
                "keeps what steps make, also after a training, as in a list of outputs; empty it"
            )
        if len(samples) < ALIKE or min(samples) <= 2 * first or max(samples) > 1.1 * min(samples):
            return ""
        sizes = ", ".join(str(one.knobs.get("micro_batch_size")) for one in ooms)
        return (
            f"micro-batches of {sizes} ran out after about {max(samples):,} samples alike: something grows with the "
            "steps, such as a list of losses or outputs with their graphs; keep loss.item() or .detach()"
        )

    def _retries_after(self, found: TrialState, attempt: Attempt) -> bool:
        """Returns whether the trial is to begin again with less, and makes it ready to."""
        knobs = Knobs.of(self._knobs, self._session.table)
        change = oom.retreat(attempt.fault, knobs.micro_batch_size, knobs.num_workers)
        if change is None or attempt.is_poisoned:
            return False
        shrink = self._order.shrink
        allowed = {"ram_cache", "num_workers"} if shrink == "loader" else {"ram_cache"}
        if shrink != "all" and not change.keys() <= allowed:
            return False
        resident = self._session.resident
        if isinstance(resident, OwnResident) and not change.keys() <= resident.asked:
            return False  # their loop would do the same again
        self._retries = (*self._retries, replace(found, retries=()))
        self._knobs.update(change)
        return True

    def _now(self) -> TrialState:
        state, seen = self._state, self._windows[1:]
        if not isinstance(state, OwnState) or not state.workload.is_outside:  # whose first step is not timed
            seen = seen or self._windows
        timed = speed(seen)
        found = TrialState(
            outcome=self._outcome,
            message="the loop ended without an evaluation" if self._outcome == Outcome.NO_RESULT else "",
            knobs=dict(self._knobs),
            values=self._values,
            curve=self._curve,
            cap_bytes=self._plan.cap_bytes,
            pid=os.getpid(),
            retries=self._retries,
            setup_s=self._setup_s,
            telemetry=self._session.telemetry.summary(),
            measured_samples_per_s=timed.samples_per_s,
            train_s=sum(w.wall_s for w in self._windows),
            spans=timed.spans,
        )
        if state is None:
            return found
        return replace(
            found,
            samples=state.samples,
            first_step_at=state.first_step_at,
            last_step_at=state.last_step_at,
            peak_allocated_bytes=state.peak_allocated_bytes,
            active=dict(state.active),
            has_ended=state.has_ended,
            evaluate_s=self._evaluate_s + (state.rested_s if isinstance(state, OwnState) else 0.0),
        )
