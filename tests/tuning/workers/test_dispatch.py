"""What every executor asks: which trial runs where, what its states mean, and how it ended; with results as told."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from tests.queues import Queue
from tuning.config.errors import StoppedEarly
from tuning.search.protocols import TrialPlan, TrialState
from tuning.workers.dispatch import Dispatcher, Placed

SHARED = TrialPlan(64, (32, 64), True, 3, 2, 1, 100, 300)
OK = TrialState(outcome="ok", done=True, samples=64, values={"error": 0.5})
OOM = replace(OK, outcome="oom")
RUNG = replace(OK, done=False, samples=32)
PAUSED = replace(RUNG, values={})


def taken(dispatcher: Dispatcher) -> Placed:
    """Returns what runs next."""
    placed = dispatcher.take()
    assert placed is not None
    return placed


def test_slots_are_equal_and_nothing_is_asked_for_while_none_is_free() -> None:
    scheduler = Queue([("nowhere", 50)] * 4)
    dispatcher = Dispatcher(scheduler, SHARED, None)
    three = [taken(dispatcher) for _ in range(3)]
    assert dispatcher.take() is None
    orders = [dispatcher.order(p) for p in three]
    assert {(o.plan.cap_bytes, o.threads, o.shrink) for o in orders} == {(100, 2, "loader")}
    dispatcher.ended(three[1], OK)
    assert taken(dispatcher).request.trial == "t3"


@pytest.mark.parametrize("need_bytes", [50, None])
def test_a_trial_that_runs_out_of_memory_in_its_slot_runs_once_more_alone_with_all(need_bytes: int | None) -> None:
    scheduler = Queue([("nowhere", need_bytes), ("nowhere", None), ("nowhere", None)])
    dispatcher = Dispatcher(scheduler, SHARED, None)
    large, small, last = (taken(dispatcher) for _ in range(3))
    dispatcher.ended(large, OOM)
    assert [d[:2] for d in scheduler.decisions] == [("widened", "t0")]
    assert dispatcher.take() is None, "others still run"
    dispatcher.ended(small, OK)
    dispatcher.ended(last, OK)
    again = taken(dispatcher)
    order = dispatcher.order(again)
    assert (again.request.trial, order.plan.cap_bytes, order.threads, order.shrink) == ("t0", 300, 6, "all")
    dispatcher.ended(again, OOM)
    assert scheduler.found["t0"].outcome == "oom", "once"
    assert dispatcher.take() is None


@pytest.mark.parametrize("need_bytes", [200, 100])
def test_a_trial_predicted_to_need_more_than_a_slot_runs_alone_at_once_and_nothing_beside_it(need_bytes: int) -> None:
    """A need of just the slot is what the guard says of one that ran out there."""
    dispatcher = Dispatcher(Queue([("nowhere", need_bytes), ("nowhere", 10)]), SHARED, None)
    large = taken(dispatcher)
    assert (large.alone, dispatcher.take()) == (True, None)
    dispatcher.ended(large, OK)
    assert taken(dispatcher).alone is False


def test_where_nothing_caps_a_slot_what_needs_more_than_its_part_of_the_memory_runs_alone() -> None:
    plan = TrialPlan(64, (64,), False, 2, 3, room_bytes=100)
    dispatcher = Dispatcher(Queue([("nowhere", 60), ("nowhere", 101), ("nowhere", None)]), plan.on_nodes(2), 500)
    small = taken(dispatcher)
    assert (small.alone, dispatcher.take()) == (False, None), "the large one waits, and nothing starts before it"
    dispatcher.ended(small, OK)
    large = taken(dispatcher)
    order = dispatcher.order(large)
    assert (large.alone, order.threads, order.plan.cap_bytes, dispatcher.take()) == (True, 6, 500, None)
    dispatcher.ended(large, OK)
    assert taken(dispatcher).alone is False


def test_without_shares_a_trial_has_the_workers_own_cap_and_an_oom_is_its_end() -> None:
    scheduler = Queue([("nowhere", 10**9)])
    dispatcher = Dispatcher(scheduler, TrialPlan(64, (64,), False, 1, 1), 500)
    placed = taken(dispatcher)
    assert (dispatcher.order(placed).plan.cap_bytes, dispatcher.order(placed).shrink) == (500, "")
    dispatcher.ended(placed, OOM)
    assert scheduler.found["t0"].outcome == "oom"


def test_a_trial_that_runs_when_the_time_is_over_is_cut_at_its_next_pause_and_says_so() -> None:
    scheduler = Queue([("nowhere", None)] * 2)
    late = TrialPlan(64, (32, 64), False, 2, 1, deadline=time.monotonic() - 1)
    dispatcher = Dispatcher(scheduler, late, None)
    first, second = taken(dispatcher), taken(dispatcher)
    left_s = dispatcher.order(first).left_s
    assert left_s is not None
    assert left_s < 0
    for placed, state in ((first, PAUSED), (second, RUNG)):
        assert not dispatcher.goes_on(placed, state)
        dispatcher.ended(placed, state)
    assert {f.outcome for f in scheduler.found.values()} == {"cut"}
    assert {f.message for f in scheduler.found.values()} == {"search.max_time was over"}


def test_an_hour_is_left_of_an_hour() -> None:
    plan = TrialPlan(64, (32, 64), False, 1, 1, deadline=time.monotonic() + 3600)
    dispatcher = Dispatcher(Queue([("nowhere", None)]), plan, None)
    placed = taken(dispatcher)
    assert dispatcher.order(placed).left_s == pytest.approx(3600, abs=10)
    assert dispatcher.goes_on(placed, PAUSED)
    assert dispatcher.goes_on(placed, RUNG)
    assert not dispatcher.goes_on(placed, OK)


def test_what_became_of_a_process_is_told_once() -> None:
    scheduler = Queue([("nowhere", None)])
    dispatcher = Dispatcher(scheduler, SHARED, None)
    placed, lost, retired = taken(dispatcher), ("lost", "a"), ("retired", "b")
    dispatcher.goes_on(placed, replace(PAUSED, decisions=(lost,)))
    dispatcher.goes_on(placed, replace(PAUSED, decisions=(lost,)))
    dispatcher.goes_on(placed, replace(OK, decisions=(lost, retired)))
    dispatcher.ended(placed, replace(OK, decisions=(lost, retired)))
    assert scheduler.decisions == [("lost", "t0", "a"), ("retired", "t0", "b")]


def test_a_trial_whose_executor_was_lost_is_run_once_more_and_then_is_killed() -> None:
    scheduler = Queue([("nowhere", None)])
    dispatcher = Dispatcher(scheduler, SHARED, None)
    dispatcher.ended(taken(dispatcher), None)
    again = taken(dispatcher)
    assert (again.request.trial, again.attempt) == ("t0", 2)
    dispatcher.ended(again, None)
    assert (scheduler.found["t0"].outcome, scheduler.found["t0"].fault) == ("killed", "process lost")
    assert scheduler.decisions == [("lost", "t0", "the process was lost; it is run once more")]


@pytest.mark.parametrize("error", [RecursionError("a fault of ours"), StoppedEarly("the disk is full")])
def test_what_the_scheduler_raises_is_no_result_of_a_trial(error: Exception) -> None:
    class Faulty(Queue):
        """A scheduler that fails at a rung."""

        def at_rung(self, trial: str, result: Any) -> bool:
            """Raises."""
            raise error

    scheduler = Faulty([("nowhere", None)])
    dispatcher = Dispatcher(scheduler, SHARED, None)
    placed = taken(dispatcher)
    with pytest.raises(type(error)) as raised:
        dispatcher.goes_on(placed, RUNG)
    assert raised.value is error
    assert (scheduler.found, scheduler.decisions) == ({}, [])


def test_a_lost_node_is_not_the_trials_fault_and_its_own_second_try_is_left_to_it() -> None:
    scheduler = Queue([("nowhere", None)])
    dispatcher = Dispatcher(scheduler, TrialPlan(64, (64,), False, 1, 1), None)
    for node in ("a", "b"):
        dispatcher.node_lost(taken(dispatcher), node)
    dispatcher.ended(taken(dispatcher), None)
    last = taken(dispatcher)
    assert (last.attempt, last.moved) == (2, 2)
    dispatcher.ended(last, OK)
    assert [d[0] for d in scheduler.decisions] == ["lost"] * 3
    assert scheduler.decisions[0][2] == "node a was lost; it is run once more on another"
    assert scheduler.found["t0"].outcome == "ok"


def test_the_slots_of_a_lost_node_are_no_more() -> None:
    plan = TrialPlan(64, (64,), False, 2, 3, 1, 100, 300)
    dispatcher = Dispatcher(Queue([("nowhere", 10)] * 8), plan.on_nodes(3), None)
    running = [taken(dispatcher) for _ in range(6)]
    assert dispatcher.take() is None
    assert {dispatcher.order(p).threads for p in running} == {3}
    dispatcher.replan(plan.on_nodes(2))
    dispatcher.node_lost(running.pop(), "c")
    dispatcher.ended(running.pop(), OK)
    assert dispatcher.take() is None, "four run on the two that are left"
    dispatcher.ended(running.pop(), OK)
    assert taken(dispatcher).request.trial == "t5"
