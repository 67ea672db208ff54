"""A lent process: whoever takes it finds it warm, it ends with them, and is no more to be had."""

from __future__ import annotations

import math
import os
import signal
import threading
from multiprocessing import AuthenticationError
from pathlib import Path

import psutil
import pytest

from tests.commands import MINE
from trainables.plan import Plan
from tuning.workers.lending import Door, LostError
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

KNOBS = {"batch_size": 8, "micro_batch_size": 8}
PLAN = Plan(64, (32, 64))


def test_who_borrows_a_process_trains_in_it_as_the_study_does() -> None:
    with Worker(WorkerConfig(str(MINE))) as worker:
        own = worker.train(KNOBS, 64, (32, 64), seed=1)
        door = worker.lend()
        assert door is not None
        borrowed = door.borrow()
        assert borrowed is not None
        assert door.borrow() is None, "somebody has it"
        trial = borrowed.trial(KNOBS, PLAN, 1)
        first, last = trial.advance(math.inf), trial.advance(math.inf)
        assert (first["pid"], first["samples"], first["done"]) == (own["pid"], 32, False)
        assert (last["outcome"], last["done"], last["values"]) == ("ok", True, own["values"])
        stopped = borrowed.trial(KNOBS, PLAN, 2)
        stopped.advance(math.inf)
        assert stopped.end()["retire"] == ""


def test_the_next_measurement_ends_what_was_lent_and_is_made_in_a_process_of_its_own() -> None:
    with Worker(WorkerConfig(str(MINE))) as worker:
        before = worker.train(KNOBS, 32, (32,), seed=1)
        door = worker.lend()
        after = worker.train(KNOBS, 32, (32,), seed=1)
        assert after["values"] == before["values"]
        assert not psutil.pid_exists(before["pid"])
        assert door is not None
        assert door.borrow() is None


def test_a_borrowed_process_that_is_killed_is_lost_and_one_nobody_needs_any_more_ends() -> None:
    with Worker(WorkerConfig(str(MINE))) as worker:
        pid = worker.train(KNOBS, 32, (32,), seed=1)["pid"]
        door = worker.lend()
        borrowed = door.borrow() if door is not None else None
        assert borrowed is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LostError):
            borrowed.trial(KNOBS, PLAN, 1)

    with Worker(WorkerConfig(str(MINE))) as worker:
        process = psutil.Process(worker.train(KNOBS, 32, (32,), seed=1)["pid"])
        door = worker.lend()
        borrowed = door.borrow() if door is not None else None
        del borrowed  # its end of the connection with it
        process.wait(timeout=10)


def test_an_answer_that_cannot_be_sent_is_an_error_and_the_process_lives_on() -> None:
    with Worker(WorkerConfig(str(MINE))) as worker:
        worker.train(KNOBS, 32, (32,), seed=1)
        door = worker.lend()
        borrowed = door.borrow() if door is not None else None
        assert borrowed is not None
        with pytest.raises(RuntimeError, match="pickle"):
            borrowed.ask("__getattribute__", "trial")
        assert borrowed.trial(KNOBS, PLAN, 1).advance(math.inf)["samples"] == 32


def test_somebody_elses_process_behind_the_door_is_not_borrowed() -> None:
    door = Door()
    stranger = Door(door.folder)

    def answer() -> None:
        with stranger.listener() as listener, pytest.raises(AuthenticationError):
            listener.accept()
        closed.set()

    closed = threading.Event()
    listening = threading.Thread(target=answer)
    listening.start()
    while not closed.is_set() and not (Path(door.folder) / "door").exists():
        closed.wait(0.01)
    assert door.borrow() is None
    listening.join(10)
    assert closed.is_set()
    door.close()


def test_what_has_measured_nothing_is_not_lent_and_nobody_is_behind_a_closed_door() -> None:
    with Worker(WorkerConfig(str(MINE))) as worker:
        assert worker.lend() is None
    door = Door()
    door.close()
    assert door.borrow() is None
