"""A trial on a worker that answers as it is told: what is run once more, what is an outcome, what is said of it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from trainables.plan import Plan
from tuning.config.errors import PreflightError, TuningError, UserCodeError
from tuning.memory.oom import PROCESS_LOST
from tuning.workers.trial_runner import TrialRunner
from tuning.workers.worker import HUNG, Worker, WorkerLost
from tuning.workers.worker_config import TrialOrder

ORDER = TrialOrder("t0", {}, 0, Plan(64, (32, 64)), 1, "")
RUNG = {"samples": 32, "done": False, "outcome": "ok", "values": {"error": 1.0}}
DONE = {"samples": 64, "done": True, "outcome": "ok", "values": {"error": 0.5}}
LOST = WorkerLost(PROCESS_LOST, "signal 11 (SIGSEGV)")


class Scripted:
    """A worker whose process answers what it is told to, an exception by raising it."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.started = 0
        self.is_running, self.deadline = False, cast(float | None, None)

    def begin(self, order: TrialOrder) -> None:
        """Takes any order."""
        self.started += not self.is_running
        self.is_running = True

    def advance(self) -> dict[str, Any]:
        """Returns the next answer."""
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            self.is_running = False
            raise answer
        if answer.get("retire"):
            self.is_running = False
        return dict(answer)

    finish = advance

    def end(self) -> None:
        """Ends the process."""
        self.is_running = False


def runner_of(*answers: Any) -> tuple[TrialRunner, Scripted]:
    scripted = Scripted(*answers)
    return TrialRunner(cast(Worker, scripted)), scripted


def run(runner: TrialRunner) -> dict[str, Any]:
    """Returns the result of a trial that nobody stops."""
    runner.take(ORDER)
    while not (found := runner.step())["done"]:
        pass
    return found


def test_a_trial_whose_process_is_lost_is_run_once_more_in_another() -> None:
    runner, worker = runner_of(RUNG, LOST, RUNG, DONE)
    found = run(runner)
    assert (found["outcome"], worker.started) == ("ok", 2)
    assert found["events"] == [("lost", "the process was lost: signal 11 (SIGSEGV); it is run once more")]


def test_lost_twice_it_is_killed_or_timed_out_with_the_last_words() -> None:
    found = run(runner_of(LOST, LOST)[0])
    assert (found["outcome"], found["fault"]) == ("killed", "process lost")
    assert found["message"] == "the process was lost: signal 11 (SIGSEGV)"
    hung = run(runner_of(LOST, WorkerLost(HUNG, "no answer for 60 s"))[0])
    assert (hung["outcome"], hung["message"]) == ("timeout", "process hung: no answer for 60 s")


def test_what_was_judged_stands_though_its_process_is_lost_while_it_ends() -> None:
    runner, _ = runner_of(RUNG, LOST, DONE)
    runner.take(ORDER)
    assert runner.step()["samples"] == 32
    found = run(runner)
    assert found["events"] == [("lost", f"{LOST}; the trial runs in a new process")]


def test_why_a_process_was_given_up_is_said_once_with_the_next_trial() -> None:
    runner, worker = runner_of({**DONE, "retire": "1 MiB were still held"}, DONE, DONE)
    assert run(runner)["events"] == []
    assert run(runner)["events"] == [("retired", "1 MiB were still held; the trial runs in a new process")]
    assert run(runner)["events"] == []
    assert worker.started == 2


def test_a_stopped_trial_is_finished_before_the_next_and_may_retire_its_process() -> None:
    runner, _ = runner_of(RUNG, {"retire": "80 MiB"}, DONE)
    runner.take(ORDER)
    runner.step()
    assert run(runner)["events"] == [("retired", "80 MiB; the trial runs in a new process")]


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
    found = run(runner_of(RUNG, error)[0])
    assert (found["fatal"], found["elsewhere"], found["done"]) == (error.what, elsewhere, True)
