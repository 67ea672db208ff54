"""Search trials one at a time, in the process that measured. No Ray: one slot of one device has nothing to share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainables.plan import Plan
from tuning.backends.laboratory import Laboratory
from tuning.backends.lending import Borrowed, BorrowedTrial, LostError
from tuning.backends.placing import BEAT_S, Placing, Share, given_up
from tuning.policies import oom
from tuning.stages.bench import Assignment, Desk, Orders


class LaboratoryCrew:
    """Runs what a desk hands out in a laboratory's process, which has loaded torch, data and model already.

    It does for a trial what Ray's crew does: where its process is lost the trial is run once more, in a new one, and a
    process that holds more than it should runs no other (`Session.settled`). `cap_bytes` is what a trial may take.
    """

    def __init__(self, bench: Laboratory, cap_bytes: int | None) -> None:
        self._bench, self._cap_bytes = bench, cap_bytes
        self._process: Borrowed | None = None
        self._retired = ""

    def run(self, desk: Desk, orders: Orders) -> None:
        """Returns when the desk has no next trial; `orders` are of one slot.

        Raises PreflightError where a new process cannot load what the last one had loaded.
        """
        placing = Placing(desk, orders, self._cap_bytes)
        while (placed := placing.take()) is not None:
            assignment, share = placed.assignment, placing.share(placed)
            plan = Plan(orders.samples, orders.milestones, window_s=1.0, cap_bytes=share.cap_bytes)
            if self._retired:
                desk.decided("retired", assignment.trial, f"{self._retired}; the trial runs in a new process")
            found, error = self._trained(desk, assignment, plan, share)
            if error is not None:
                desk.decided("lost", assignment.trial, f"{found['message']}; it is run once more")
                found, _ = self._trained(desk, assignment, plan, share)
            placing.leave(placed)
            desk.ended(assignment.trial, found)

    def _trained(
        self, desk: Desk, assignment: Assignment, plan: Plan, share: Share
    ) -> tuple[Mapping[str, Any], Exception | None]:
        """Returns the last result of a trial, and the error where its process was lost or failed beside it."""
        try:
            trial = self._begun(assignment, plan, share)
            found = trial.advance(BEAT_S)
            while not found["done"]:
                judge = desk.goes_on if found.get("paused") else desk.at_rung
                if not judge(assignment.trial, found):
                    found = {**found, **trial.end()}
                    break
                found = trial.advance(BEAT_S)
        except (LostError, RuntimeError) as error:
            self._end()
            return given_up(oom.PROCESS_LOST if isinstance(error, LostError) else oom.fault(error), str(error)), error
        self._retired = str(found.get("retire") or "")
        if self._retired:
            self._end()
        return found, None

    def _begun(self, assignment: Assignment, plan: Plan, share: Share) -> BorrowedTrial:
        """Returns the trial, in a new process where that of the trial before is gone by now."""
        if self._process is not None:
            try:
                return _begin(self._process, assignment, plan, share)
            except LostError:
                self._end()
        self._process = self._bench.trainer()
        return _begin(self._process, assignment, plan, share)

    def _end(self) -> None:
        self._bench.end()
        self._process = None


def _begin(process: Borrowed, assignment: Assignment, plan: Plan, share: Share) -> BorrowedTrial:
    process.use_threads(share.threads)
    return process.trial(assignment.knobs, plan, assignment.seed, shrink=share.shrink)
