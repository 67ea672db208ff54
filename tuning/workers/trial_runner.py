"""One trial after the other on one worker: the same code beside the study and inside Ray's actors. No torch, no Ray."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tuning.config.errors import PreflightError, UserCodeError
from tuning.memory.oom import Outcome
from tuning.workers.worker import LATE, Worker, WorkerLost
from tuning.workers.worker_config import TrialOrder

TRIES = 2
"""A trial whose process was lost is run once more, in a new one."""


class TrialRunner:
    """Begins a trial, takes it from rung to rung, and has its worker replaced where that was lost or is to be retired.

    What happened to the process is in `events` of every result, as pairs of an event and its reason, all since the
    trial began.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._order: TrialOrder
        self._is_open = False
        """Whether the process holds a trial that was not finished."""
        self._left: tuple[str, str] | None = None
        """The event and the reason for which the next trial runs in a new process."""
        self._tries = 0
        self._events: list[tuple[str, str]] = []

    def take(self, order: TrialOrder) -> None:
        """Lets go of what is left of the last trial, and keeps the next; `step` begins it."""
        self.close()
        self._order, self._tries, self._events = order, 0, []
        if self._left is not None:
            event, reason = self._left
            self._events.append((event, f"{reason}; the trial runs in a new process"))
            self._left = None
        self._worker.deadline = None if order.left_s is None else time.monotonic() + order.left_s

    def step(self) -> dict[str, Any]:
        """Returns the trial's state at its next rung or pause, or its result; a process lost is an outcome.

        `fatal` in a result says why no process here can load the workload any more, `elsewhere` whether one of another
        machine may.
        """
        while True:
            try:
                if not self._is_open:
                    self._tries += 1
                    self._worker.begin(self._order)
                    self._is_open = True
                found = self._worker.advance()
                break
            except (PreflightError, UserCodeError) as error:
                fatal = {"fatal": error.what, "elsewhere": error.elsewhere}
                return {**_ended(Outcome.CRASH, error.what), **fatal, "events": self._events}
            except WorkerLost as lost:
                self._is_open = False
                self._worker.end()
                if self._tries >= TRIES or lost.fault is LATE:
                    found = {**_ended(lost.fault.outcome, str(lost)), "fault": lost.fault.name}
                    break
                self._events.append(("lost", f"{lost}; it is run once more"))
        if found["done"]:
            self._is_open = False
            self._keep_reason(found)
        return {**found, "events": list(self._events)}

    def close(self) -> None:
        """Lets go of what is left of the last trial."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._keep_reason(self._worker.finish())
        except WorkerLost as lost:  # it was judged, and its result stands
            self._worker.end()
            self._left = ("lost", str(lost))

    def _keep_reason(self, found: Mapping[str, Any]) -> None:
        if found.get("retire"):  # the worker has ended its process
            self._left = ("retired", str(found["retire"]))


def _ended(outcome: Outcome, message: str) -> dict[str, Any]:
    return {"outcome": str(outcome), "message": message[:500], "values": {}, "samples": 0, "done": True}
