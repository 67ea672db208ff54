"""A trial on a worker that answers as it is told: what is run once more, what is an outcome, what is said of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainables.plan import Plan
from tuning.config.errors import PreflightError, TuningError, UserCodeError
from tuning.memory.oom import PROCESS_LOST
from tuning.search.protocols import TrialState
from tuning.workers.worker import HUNG, Worker, WorkerLost
from tuning.workers.worker_config import TrialOrder, WorkerConfig

ORDER = TrialOrder("t0", {}, 0, Plan(64, (32, 64)), 1, "")
RUNG = TrialState(outcome="ok", samples=32, values={"error": 1.0})
DONE = TrialState(outcome="ok", samples=64, values={"error": 0.5}, done=True)
LOST = WorkerLost(PROCESS_LOST, "signal 11 (SIGSEGV)")


class Scripted(Worker):
    """A worker whose process answers what it is told to, an exception by raising it."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(WorkerConfig(""))
        self._said.close()
        self._answers = list(answers)
        self.is_up, self.started = False, 0

    def load(self) -> None:
        """Starts a process if there is none."""
        self.started += not self.is_up
        self.is_up = True

    def _exchange(self, message: object, expected_s: float = 0.0) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        self._retired, self.is_up = answer.retire, not answer.retire
        return answer

    def end(self) -> None:
        """Ends the process."""
        self.is_up = False


def run(worker: Worker) -> TrialState:
    """Returns the result of a trial that nobody stops."""
    states = worker.trial(ORDER)
    last = next(state for state in states if state.done)
    states.close()
    return last


def stop(worker: Worker) -> None:
    """Stops a trial at its first rung."""
    states = worker.trial(ORDER)
    assert next(states).samples == 32
    states.close()


def test_a_trial_whose_process_is_lost_is_run_once_more_in_another() -> None:
    worker = Scripted(RUNG, LOST, RUNG, DONE)
    found = run(worker)
    assert (found.outcome, worker.started) == ("ok", 2)
    assert found.decisions == (("lost", "the process was lost: signal 11 (SIGSEGV); it is run once more"),)


def test_lost_twice_it_is_killed_or_timed_out_with_the_last_words() -> None:
    found = run(Scripted(LOST, LOST))
    assert (found.outcome, found.fault) == ("killed", "process lost")
    assert found.message == "the process was lost: signal 11 (SIGSEGV)"
    hung = run(Scripted(LOST, WorkerLost(HUNG, "no answer for 60 s")))
    assert (hung.outcome, hung.message) == ("timeout", "process hung: no answer for 60 s")


@pytest.mark.parametrize(
    ("answer", "event", "reason"),
    [(LOST, "lost", str(LOST)), (replace(DONE, retire="80 MiB"), "retired", "80 MiB")],
)
def test_a_stopped_trial_stands_whatever_becomes_of_its_process(answer: Any, event: str, reason: str) -> None:
    worker = Scripted(RUNG, answer, DONE)
    stop(worker)
    assert run(worker).decisions == ((event, f"{reason}; the trial runs in a new process"),)


def test_why_a_process_was_given_up_is_said_once_with_the_next_trial() -> None:
    worker = Scripted(replace(DONE, retire="1 MiB were still held"), DONE, DONE)
    assert run(worker).decisions == ()
    assert run(worker).decisions == (("retired", "1 MiB were still held; the trial runs in a new process"),)
    assert run(worker).decisions == ()
    assert worker.started == 2


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (PreflightError("no driver"), True),
        (UserCodeError("no package", elsewhere=True), True),
        (UserCodeError("mine.py raised ValueError"), False),
    ],
)
def test_a_workload_that_cannot_be_loaded_any_more_is_fatal_and_says_whether_elsewhere_too(
    error: TuningError, elsewhere: bool
) -> None:
    found = run(Scripted(RUNG, error))
    assert (found.fatal, found.elsewhere, found.done) == (error.what, elsewhere, True)
