"""Search trials one at a time on the worker that measured. No Ray: one slot of one device has nothing to share."""

from __future__ import annotations

from tuning.search.protocols import Scheduler, TrialPlan
from tuning.workers.dispatch import Dispatcher
from tuning.workers.worker import Worker


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
