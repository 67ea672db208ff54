"""A trial inside the warm process: from rung to rung, again with less memory where that can help, to its result.

What happens in it is not raised: how it ended is the `outcome` of what is returned (docs/design.md section 5).
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from trainables import training
from trainables.evaluation import Evaluation
from trainables.knobs import Knobs, Scalar
from trainables.own_count import OwnState
from trainables.own_loop import OwnResident
from trainables.plan import Plan
from trainables.ranks import RankFailed
from trainables.state import Diverged, Undefined
from trainables.stopwatch import Window
from tuning.memory import oom
from tuning.memory.oom import Outcome
from tuning.workers import user_code
from tuning.workers.windows import spans_of, speed
from tuning.workers.worker_config import Shrink

if TYPE_CHECKING:
    from tuning.workers.session import Session


class Attempt:
    """Sets `outcome` and `message` in a result; an error inside the block becomes its outcome."""

    def __init__(self, session: Session, found: dict[str, Any], cap_bytes: int | None) -> None:
        self._session, self._found = session, found
        self._limited = session.memory.backstop(cap_bytes)
        self.fault = oom.UNKNOWN
        """What the block failed of, if it did."""
        found.update(outcome=str(Outcome.OK), message="")

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
            self._found.update({n: error.found[n] for n in kept if n in error.found}, message=str(error)[:500])
            self._session.recover(error)
            return True
        of_values = oom.UNDEFINED if isinstance(error, Undefined) else oom.DIVERGED
        self.fault = fault = of_values if isinstance(error, Diverged) else oom.fault(error)
        outcome = fault.outcome
        is_theirs = outcome in (Outcome.CRASH, Outcome.DATA) or fault is oom.UNDEFINED
        message = user_code.in_a_line(error) if is_theirs else user_code.in_words(error)[:500]
        if outcome is Outcome.DIVERGED:  # which its type says once more
            message = message.removeprefix(f"{type(error).__name__}: ")
        self._found.update(outcome=str(outcome), message=message, failed_at=time.time(), fault=fault.name)
        if outcome is Outcome.OOM:
            self._found["wanted_bytes"] = self._session.memory.wanted_bytes(str(error))
        if outcome is Outcome.CRASH:
            self._found["traceback"] = "".join(traceback.format_exception(error))[-4000:]
        if oom.poisoned(error):
            self._found.update(poisoned=True, retire="the device context of the process is lost")
        self._session.recover(error)
        return True


class RunningTrial:
    """A configuration being trained; `advance` runs it to its next milestone."""

    def __init__(self, session: Session, knobs: dict[str, Scalar], plan: Plan, seed: int, shrink: Shrink) -> None:
        self._session, self._plan, self._seed, self._shrink = session, plan, seed, shrink
        self._knobs = knobs
        self._restarts: list[dict[str, Any]] = []
        self._begin()

    def _begin(self) -> None:
        self._session.telemetry.begin()
        self._events: Generator[Window | Evaluation] | None = None
        self._state: training.AnyState | None = None
        self._windows: list[Window] = []
        self._setup_s = self._evaluate_s = 0.0

    def advance(self, pause_after_s: float = math.inf) -> dict[str, Any]:
        """Returns what is known at the next milestone, or at the end: then `done` is true. Never raises on OOM.

        What takes longer than `pause_after_s` is `paused` after a window, with no values, and goes on with the next
        call; so is a trial that is to begin again, since a loader that hung has taken most of what an answer may.
        """
        found: dict[str, Any] = {"values": {}}
        start = time.perf_counter()
        with Attempt(self._session, found, self._plan.cap_bytes) as attempt:
            if self._state is None:
                self._session.memory.limit(self._plan.cap_bytes)
                self._state = self._session.prepared(self._knobs, self._plan, self._seed)
                self._events = training.train(self._state)
                self._setup_s = time.perf_counter() - start
            found.update(self._to_milestone(start + pause_after_s))
        if self._restarted(found, attempt.fault):
            if time.perf_counter() <= start + pause_after_s:
                return self.advance(pause_after_s)
            found = {"values": {}, "outcome": str(Outcome.OK), "message": "", "paused": True}
        for name, is_oom in (("ooms", True), ("restarts", False)):
            found[name] = [one for one in self._restarts if (one["outcome"] == Outcome.OOM) == is_oom]
        found.update(self._facts())
        has_ended = self._state is not None and self._state.has_ended
        found["done"] = found["outcome"] != Outcome.OK or found["samples"] >= self._plan.samples or has_ended
        if found["done"]:
            if isinstance(self._state, OwnState) and found["outcome"] == Outcome.OK:
                found["remark"] = self._state.remark
            found.update({} if found.get("poisoned") else self.end())
        return found

    def end(self) -> dict[str, Any]:
        """Ends the trial where it is; returns `Session.settled`."""
        self.close()
        return self._session.settled(self._plan.cap_bytes)

    def close(self) -> None:
        """Ends the trial where it is and lets go of its optimiser; the model stays with the session."""
        if self._events is not None:
            self._events.close()
        self._events = self._state = None

    def _restarted(self, found: Mapping[str, Any], fault: oom.Fault) -> bool:
        """Returns whether the trial is to begin again with less, and makes it ready to."""
        knobs = Knobs.of(self._knobs, self._session.table)
        change = oom.retreat(fault, knobs.micro_batch_size, knobs.num_workers)
        if change is None or found.get("poisoned"):
            return False
        allowed = {"ram_cache", "num_workers"} if self._shrink == "loader" else {"ram_cache"}
        if self._shrink != "all" and not change.keys() <= allowed:
            return False
        resident = self._session.resident
        if isinstance(resident, OwnResident) and not change.keys() <= resident.asked:
            return False  # their loop would do the same again
        kept = {n: found.get(n) for n in ("outcome", "fault", "message", "wanted_bytes")}
        self._restarts.append({**kept, "knobs": dict(self._knobs), "cap_bytes": self._plan.cap_bytes})
        self.close()
        self._knobs.update(change)
        self._begin()
        return True

    def _to_milestone(self, pause_at: float) -> dict[str, Any]:
        telemetry = self._session.telemetry
        telemetry.skip()  # the evaluation, and whatever the process did between two calls
        for event in self._events or ():
            if isinstance(event, Evaluation):
                self._evaluate_s += event.wall_s
                return {"values": event.values}
            self._windows.append(event)
            telemetry.read()
            if time.perf_counter() > pause_at and self._state is not None and self._state.samples < self._plan.samples:
                return {"values": {}, "paused": True}
        return {"values": {}, "outcome": str(Outcome.NO_RESULT), "message": "the loop ended without an evaluation"}

    def _facts(self) -> dict[str, Any]:
        state, windows = self._state, self._windows
        return {
            "knobs": dict(self._knobs),
            "samples": state.samples if state else 0,
            "first_step_at": state.first_step_at if state else 0.0,
            "last_step_at": state.last_step_at if state else 0.0,
            "peak_allocated_bytes": state.peak_allocated_bytes if state else 0,
            "cap_bytes": self._plan.cap_bytes,
            "pid": os.getpid(),
            "active": dict(state.active) if state else {},
            **({"has_ended": True} if state and state.has_ended else {}),
            "measured_samples_per_s": speed(windows[1:] or windows)["samples_per_s"] if windows else None,
            "train_s": sum(w.wall_s for w in windows),
            "evaluate_s": self._evaluate_s + (state.rested_s if isinstance(state, OwnState) else 0.0),
            "setup_s": self._setup_s,
            "spans": spans_of(windows[1:] or windows),
            "telemetry": self._session.telemetry.summary(),
        }
