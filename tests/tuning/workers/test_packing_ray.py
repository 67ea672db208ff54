"""Ray's side of memory: one process through OOMs of every kind, shares of a card, processes given up, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.data.greedy import CAP_BYTES
from tests.queues import GREEDY, NOWHERE, Choosy, Killing, Queue
from tuning.search.protocols import TrialPlan
from tuning.workers import ray_tune
from tuning.workers.ray_tune import RayCluster, RayExecutor
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[RayCluster]:
    """One Ray for the tests of this file."""
    with RayCluster(cores=2, gpus=0, dashboard=False) as running:
        yield running


def orders(count: int, **more: Any) -> TrialPlan:
    return TrialPlan(64, (64,), False, count, 1, **more)


def test_the_same_actor_trains_the_next_trial_within_half_a_second_of_any_oom() -> None:
    places = [
        "nowhere",
        *(p for w in ("forward", "backward", "optimizer", "evaluation", "loader") for p in (w, "nowhere")),
    ]
    scheduler = Queue([(p, None) for p in places])
    RayExecutor(WorkerConfig(str(GREEDY), cap_bytes=CAP_BYTES), "greedy_trials").run(scheduler, orders(1))
    found = [scheduler.found[f"t{n}"] for n in range(len(places))]
    expected = {"nowhere": "ok", "loader": "host_oom"}
    assert [f["outcome"] for f in found] == [expected.get(p, "oom") for p in places]
    assert len({f["pid"] for f in found}) == 1
    assert {f["held_bytes"] - f["own_bytes"] for f in found} == {0}
    gaps = [b["first_step_at"] - a["failed_at"] for a, b in zip(found[1::2], found[2::2], strict=True)]
    assert max(gaps) <= 0.5
    assert scheduler.decisions == []


def test_trials_share_a_card_and_one_that_needs_more_than_its_share_gets_more() -> None:
    share = CAP_BYTES
    trials: list[tuple[str, int | None]] = [("nowhere", share // 2)] * 3 + [("forward", share // 2), ("nowhere", None)]
    trials += [("nowhere", share // 2), ("nowhere", 2 * share), ("nowhere", share // 2)]
    scheduler = Queue(trials)
    RayExecutor(WorkerConfig(str(GREEDY), cap_bytes=2 * share), "greedy_trials").run(
        scheduler, orders(2, slot_bytes=share)
    )
    assert {f["outcome"] for f in scheduler.found.values()} == {"ok"}, "4 MiB of greed fit two shares"
    caps = {name: f["cap_bytes"] // share for name, f in scheduler.found.items()}
    assert {caps.pop(t) for t in ("t0", "t1", "t2")} == {1}
    assert {caps.pop(t) for t in ("t3", "t4", "t6")} == {2}
    assert set(caps.values()) <= {1, 2}, "t5 and t7 need what t3 was thought to: one share, or two once that is known"
    assert [(e, t) for e, t, _ in scheduler.decisions] == [("widened", "t3")]
    assert "more than its share of 4 MiB, and begins again in 2 of 2 slots" in scheduler.decisions[0][2]
    spans = [(f["first_step_at"], f["returned_at"], f["cap_bytes"]) for f in scheduler.found.values()]
    for moment, _, _ in spans:
        assert sum(cap for begin, end, cap in spans if begin <= moment <= end) <= 2 * share


def test_a_process_that_holds_what_its_trial_left_is_given_up_and_no_trial_is_lost() -> None:
    scheduler = Queue([("nowhere", None)] * 3)
    setting = WorkerConfig(str(GREEDY), {"leak": 8 * 2**20}, cap_bytes=2**30)
    RayExecutor(setting, "greedy_trials").run(scheduler, orders(1))
    assert [scheduler.found[f"t{n}"]["outcome"] for n in range(3)] == ["ok"] * 3
    assert len({f["pid"] for f in scheduler.found.values()}) == 3
    assert [(e, t) for e, t, _ in scheduler.decisions] == [("retired", "t1"), ("retired", "t2")]
    assert "MiB were still held after the trial" in scheduler.decisions[0][2]


def test_a_trial_whose_process_was_killed_is_run_in_another_and_it_is_said() -> None:
    scheduler = Killing([("nowhere", None)] * 2)
    RayExecutor(WorkerConfig(str(GREEDY), cap_bytes=CAP_BYTES), "greedy_trials").run(scheduler, orders(1))
    assert [f["outcome"] for f in scheduler.found.values()] == ["ok", "ok"]
    # Tune may give the dead process to the trial a second time before it starts another.
    assert {(e, t) for e, t, _ in scheduler.decisions} == {("lost", "t1")}


def test_trials_train_in_the_process_that_was_lent_and_in_another_once_it_is_killed() -> None:
    setting = WorkerConfig(str(GREEDY), cap_bytes=CAP_BYTES)
    with Worker(setting) as worker:
        lent = worker.train(NOWHERE, 64, (64,), seed=0)
        scheduler = Killing([("nowhere", None), ("forward", None), ("nowhere", None)])
        RayExecutor(setting, "greedy_trials", worker.lend()).run(scheduler, orders(1))
    pids = [scheduler.found[f"t{n}"]["pid"] for n in range(3)]
    assert [scheduler.found[f"t{n}"]["outcome"] for n in range(3)] == ["ok", "oom", "ok"]
    assert pids[0] == lent["pid"]
    assert pids[1] == pids[2] != pids[0]
    assert scheduler.decisions == []  # nothing had begun
    assert scheduler.found["t0"]["values"] == lent["values"]


def test_a_trial_is_stopped_while_it_runs_or_before_it_begins_where_the_desk_wants_it_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_tune, "BEAT_S", 0.0)
    scheduler = Choosy([("nowhere", None)] * 4)
    RayExecutor(WorkerConfig(str(GREEDY), cap_bytes=CAP_BYTES), "greedy_trials").run(scheduler, orders(1))
    assert {t: f["outcome"] for t, f in scheduler.found.items()} == {
        "t0": "ok",
        "t1": "refused",
        "t2": "ok",
        "t3": "ok",
    }
    assert [scheduler.found[t]["samples"] for t in ("t0", "t3")] == [64, 64]
    assert 0 < scheduler.found["t2"]["samples"] < 64
    assert len({scheduler.found[t]["pid"] for t in ("t0", "t2", "t3")}) == 1
