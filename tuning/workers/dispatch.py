"""The scheduler's side of every executor: which trial runs next and in what share, what its states mean, how it ended.

`LocalExecutor.run` is the loop around it without Ray: one slot of one device has nothing to share.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from trainables.plan import Plan
from tuning.config.errors import StoppedEarly
from tuning.memory.oom import PROCESS_LOST, Outcome
from tuning.search.protocols import Scheduler, TrialPlan, TrialRequest, TrialState
from tuning.workers.worker import Worker, WorkerLost
from tuning.workers.worker_config import TrialOrder

TRIAL_WINDOW_S = 1.0
CUT = "search.max_time was over"


@dataclass(frozen=True)
class Placed:
    """A trial as an executor runs it: in a slot or alone; `attempt` is 1 for its first try."""

    request: TrialRequest
    alone: bool = False
    attempt: int = 1
    moved: int = 0
    """How often a node was lost under it, which is not its fault."""


class Dispatcher:
    """Asks a scheduler for trials while slots are free, judges their states, and passes on how they ended.

    Slots are equal. A trial that needs more than its slot, by what is predicted or by an OOM there, runs alone: nothing
    else starts before it, and it waits until nothing else runs. `cap_bytes` is the worker's own cap.
    """

    def __init__(self, scheduler: Scheduler, plan: TrialPlan, cap_bytes: int | None) -> None:
        self._scheduler, self._plan, self._cap_bytes = scheduler, plan, cap_bytes
        self._waiting: list[Placed] = []
        self._running: dict[str, Placed] = {}
        self._told: dict[str, int] = {}
        self._cut: set[str] = set()

    def take(self, beside: int = 0) -> Placed | None:
        """Returns what runs now, its slot taken; None where nothing can before a trial has ended, or at all.

        `beside` trials run in slots that the plan has no more.
        Nothing is asked for while no slot is free: the longer a proposal waits, the less it was made from.
        """
        while len(self._running) - beside < self._plan.concurrency and not any(p.alone for p in self._running.values()):
            if not self._waiting:
                request = self._scheduler.next_trial()
                if request is None:
                    return None
                self._waiting.append(Placed(request, alone=self._is_too_large(request.need_bytes)))
            if self._waiting[0].alone and self._running:
                return None
            placed = self._waiting.pop(0)
            trial = placed.request.trial
            if self._scheduler.goes_on(trial):
                self._running[trial] = placed
                return placed
            self._scheduler.ended(trial, TrialState(outcome=Outcome.REFUSED))
        return None

    def order(self, placed: Placed) -> TrialOrder:
        """Returns what a worker is told of the trial: its share, and until when it may run."""
        plan, request = self._plan, placed.request
        cap_bytes = self._cap_bytes if plan.cap_bytes is None else plan.alone_bytes if placed.alone else plan.cap_bytes
        whole = placed.alone or not self._is_shared
        return TrialOrder(
            trial=request.trial,
            knobs=dict(request.knobs),
            seed=request.seed,
            plan=Plan(plan.samples, plan.milestones, window_s=TRIAL_WINDOW_S, cap_bytes=cap_bytes),
            threads=plan.threads * (plan.concurrency // plan.devices if placed.alone else 1),
            shrink="" if not plan.shrink else "all" if whole else "loader",
            left_s=None if plan.deadline is None else plan.deadline - time.monotonic(),
        )

    def goes_on(self, placed: Placed, found: TrialState) -> bool:
        """Returns whether a trial goes on from this state; what became of its process is told first."""
        self._tell(placed, found)
        if found.done:
            return False
        trial = placed.request.trial
        judge = self._scheduler.at_rung if found.values else self._scheduler.goes_on
        if not judge(trial, found):
            return False
        is_late = self._plan.deadline is not None and time.monotonic() >= self._plan.deadline
        if is_late:
            self._cut.add(trial)
        return not is_late

    def ended(self, placed: Placed, found: TrialState | None) -> None:
        """Takes a trial's last state, None where the one who ran it was lost: it ended, or is to run once more.

        Raises StoppedEarly where no process can load the workload any more.
        """
        trial = placed.request.trial
        self._running.pop(trial, None)
        if found is None:
            self._told.pop(trial, None)
            lost = WorkerLost(PROCESS_LOST, "")
            if placed.attempt == 1:
                self._scheduler.decided("lost", trial, f"{lost}; it is run once more")
                self._waiting.insert(0, replace(placed, attempt=2))
                return
            found = lost.result(TrialState)
        self._tell(placed, found)
        self._told.pop(trial, None)
        if found.fatal:
            raise StoppedEarly(found.fatal, remedy="mend what it names, and go on with resume=")
        if not placed.alone and self._is_shared and found.outcome in (Outcome.OOM, Outcome.HOST_OOM):
            self._scheduler.widened(trial, replace(found, cap_bytes=self._plan.cap_bytes))
            self._waiting.append(replace(placed, alone=True))
            return
        if trial in self._cut:
            found = replace(found, outcome=Outcome.CUT, message=CUT)
        self._scheduler.ended(trial, found)

    def node_lost(self, placed: Placed, node: str, how: str = "was lost", found: TrialState | None = None) -> None:
        """Queues a trial of a lost node once more, for another node; its own retry is left to it.

        Decisions about its process are written first, if its last state, `found`, has come.
        """
        trial = placed.request.trial
        if found is not None:
            self._tell(placed, found)
        self._running.pop(trial, None)
        self._told.pop(trial, None)
        self._scheduler.decided("lost", trial, f"node {node} {how}; it is run once more on another")
        self._waiting.insert(0, replace(placed, moved=placed.moved + 1))

    def replan(self, plan: TrialPlan) -> None:
        """Takes a plan of other slots; what runs in one that is no more goes on."""
        self._plan = plan

    @property
    def _is_shared(self) -> bool:
        """Returns whether a slot holds less than a trial has alone."""
        own, alone = self._plan.cap_bytes, self._plan.alone_bytes
        return own is not None and alone is not None and own < alone

    def _is_too_large(self, need_bytes: int | None) -> bool:
        if need_bytes is None:
            return False
        if self._is_shared:  # what ran out in a slot is taken to need just that much, at least
            return need_bytes >= (self._plan.cap_bytes or 0)
        return self._plan.room_bytes is not None and need_bytes > self._plan.room_bytes

    def _tell(self, placed: Placed, found: TrialState) -> None:
        """Passes on what became of the trial's processes since its last state."""
        trial = placed.request.trial
        for event, reason in found.decisions[self._told.get(trial, 0) :]:
            self._scheduler.decided(event, trial, reason)
        self._told[trial] = len(found.decisions)


class LocalExecutor:
    """Runs what a scheduler hands out on a worker, which has loaded torch, data and model already."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def run(self, scheduler: Scheduler, plan: TrialPlan) -> None:
        """Returns when the scheduler has no next trial; the plan is of one slot.

        Raises StoppedEarly where a new process cannot load what the last one had loaded.
        """
        dispatcher = Dispatcher(scheduler, plan, self._worker.config.cap_bytes)
        while (placed := dispatcher.take()) is not None:
            states = self._worker.trial(dispatcher.order(placed))
            found = next(states)
            while dispatcher.goes_on(placed, found):
                found = next(states)
            dispatcher.ended(placed, found)
            states.close()
