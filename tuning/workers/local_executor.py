"""Search trials one at a time, in the process that measured. No Ray: one slot of one device has nothing to share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainables.plan import Plan
from tuning.config.errors import PreflightError, StoppedEarly
from tuning.memory import oom
from tuning.search.protocols import Scheduler, TrialPlan, TrialRequest
from tuning.workers.lending import Borrowed, BorrowedTrial, LostError
from tuning.workers.placement import BEAT_S, Placing, Share, given_up
from tuning.workers.worker import Worker

_Answer = TypeVar("_Answer")


class LocalExecutor:
    """Runs what a scheduler hands out in a worker's process, which has loaded torch, data and model already.

    As with Ray, a trial whose process is lost is run once more, in a new one, and a process that holds more than it
    should runs no other (`Session.settled`). Otherwise than with Ray, the search ends where a new one cannot load.
    """

    def __init__(self, profiler: Worker) -> None:
        self._profiler = profiler
        self._process: Borrowed | None = None
        self._left: tuple[str, str] | None = None
        """The event and the reason why the next trial runs in a new process."""

    def run(self, scheduler: Scheduler, orders: TrialPlan) -> None:
        """Returns when the scheduler has no next trial; `orders` are of one slot.

        Raises StoppedEarly where a new process cannot load what the last one had loaded.
        """
        placing = Placing(scheduler, orders, self._profiler.cap_bytes)
        while (placed := placing.take()) is not None:
            request, share = placed.request, placing.share(placed)
            plan = Plan(orders.samples, orders.milestones, window_s=1.0, cap_bytes=share.cap_bytes)
            try:
                found = self._trained(scheduler, request, plan, share)
            except _Gone as gone:
                scheduler.decided("lost", request.trial, f"{gone.result['message']}; it is run once more")
                try:
                    found = self._trained(scheduler, request, plan, share)
                except _Gone as again:
                    found = again.result
            placing.leave(placed)
            scheduler.ended(request.trial, found)

    def _trained(self, scheduler: Scheduler, request: TrialRequest, plan: Plan, share: Share) -> Mapping[str, Any]:
        """Returns the last result of a trial; raises _Gone where its process was lost, or failed beside it."""
        trial = self._begun(scheduler, request, plan, share)
        found = self._asked(trial.advance, BEAT_S)
        while not found["done"]:
            judge = scheduler.goes_on if found.get("paused") else scheduler.at_rung
            if not judge(request.trial, found):
                return self._ended(trial, found)
            found = self._asked(trial.advance, BEAT_S)
        self._let_go_of(found)
        return found

    def _begun(self, scheduler: Scheduler, request: TrialRequest, plan: Plan, share: Share) -> BorrowedTrial:
        """Returns the trial, in a new process where that of the trial before is to run no other, or is lost by now."""
        if self._process is not None:
            try:
                return self._asked(_begin, self._process, request, plan, share)
            except _Gone as gone:
                self._left = ("lost", gone.result["message"])
        if self._left is not None:
            event, reason = self._left
            scheduler.decided(event, request.trial, f"{reason}; the trial runs in a new process")
            self._left = None
        try:
            self._process = self._profiler.trainer()
        except PreflightError as error:
            raise StoppedEarly(error.what, remedy="mend what it names, and go on with resume=") from error
        return self._asked(_begin, self._process, request, plan, share)

    def _ended(self, trial: BorrowedTrial, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ends a trial that was judged, and returns its result: that stands, whatever becomes of the process now."""
        try:
            found = {**found, **self._asked(trial.end)}
        except _Gone as gone:
            self._left = ("lost", gone.result["message"])
            return found
        self._let_go_of(found)
        return found

    def _let_go_of(self, found: Mapping[str, Any]) -> None:
        """Ends the process where its last result says that it should run no other trial."""
        if found.get("retire"):
            self._left = ("retired", str(found["retire"]))
            self._profiler.end()
            self._process = None

    def _asked(self, call: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """Returns what the process answers; raises _Gone where there is no such answer, the process ended."""
        try:
            return call(*arguments)
        except LostError as error:
            self._process = None
            raise _Gone(given_up(oom.PROCESS_LOST, self._profiler.last_words())) from error
        except RuntimeError as error:
            self._process = None
            self._profiler.end()
            raise _Gone(given_up(oom.fault(error), str(error))) from error


def _begin(process: Borrowed, request: TrialRequest, plan: Plan, share: Share) -> BorrowedTrial:
    process.use_threads(share.threads)
    return process.trial(request.knobs, plan, request.seed, shrink=share.shrink)


class _Gone(Exception):
    """A process gave no answer; with the result that this is for its trial."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result["message"])
        self.result = result
