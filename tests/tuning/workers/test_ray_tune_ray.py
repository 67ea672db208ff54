"""Ray's side of memory: one process through OOMs of every kind, shares of a card, processes given up, and why."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.data.greedy import CAP_BYTES
from tests.queues import GREEDY, Killing, Queue
from tuning.config.errors import StoppedEarly
from tuning.search.protocols import TrialPlan
from tuning.workers.dispatch import Dispatcher
from tuning.workers.nodes import Node, Slots
from tuning.workers.ray_tune import RayCluster, RayExecutor, _Asking
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


def test_trials_share_a_card_and_one_that_needs_more_than_its_slot_runs_alone() -> None:
    share = CAP_BYTES
    trials: list[tuple[str, int | None]] = [("nowhere", share // 2)] * 3 + [("forward", share // 2), ("nowhere", None)]
    trials += [("nowhere", share // 2), ("nowhere", 2 * share), ("nowhere", share // 2)]
    scheduler = Queue(trials)
    RayExecutor(WorkerConfig(str(GREEDY), cap_bytes=2 * share), "greedy_trials").run(
        scheduler, orders(2, cap_bytes=share, alone_bytes=2 * share)
    )
    assert {f["outcome"] for f in scheduler.found.values()} == {"ok"}, "4 MiB of greed fit two slots"
    assert {t for t, f in scheduler.found.items() if f["cap_bytes"] == 2 * share} == {"t3", "t6"}
    assert {f["cap_bytes"] for f in scheduler.found.values()} == {share, 2 * share}
    assert [(e, t) for e, t, _ in scheduler.decisions] == [("widened", "t3")]
    assert "more than its slot of 4 MiB, and begins alone" in scheduler.decisions[0][2]
    spans = [(f["first_step_at"], f["returned_at"], f["cap_bytes"]) for f in scheduler.found.values()]
    for moment, _, _ in spans:
        assert sum(cap for begin, end, cap in spans if begin <= moment <= end) <= 2 * share
    assert len({f["pid"] for f in scheduler.found.values()}) == 2


def test_a_trial_whose_process_or_actor_was_killed_is_run_in_another_and_the_worker_of_the_actor_ends() -> None:
    class Beheading(Killing):
        """A scheduler that kills the process of its first trial once it has ended, and its second's actor at a rung."""

        killed: psutil.Process | None = None

        def at_rung(self, trial: str, result: Any) -> bool:
            """Kills the parent of the process that trains."""
            if self.killed is None and trial == "t1":
                self.killed = psutil.Process(result["pid"])
                self.killed.parent().kill()
            return True

    scheduler = Beheading([("nowhere", None)] * 2)
    plan = TrialPlan(64, (32, 64), False, 1, 1)
    RayExecutor(WorkerConfig(str(GREEDY), cap_bytes=CAP_BYTES), "greedy_trials").run(scheduler, plan)
    assert [scheduler.found[f"t{n}"]["outcome"] for n in range(2)] == ["ok", "ok"]
    lost = [reason for event, trial, reason in scheduler.decisions if (event, trial) == ("lost", "t1")]
    assert len(lost) == len(scheduler.decisions) == 2, "the process, then the actor"
    assert scheduler.killed is not None
    psutil.wait_procs([scheduler.killed], timeout=10)
    assert not scheduler.killed.is_running()


class Dying:
    """The one node of a cluster, which is lost at the second look."""

    def __init__(self) -> None:
        self.slots = Slots([Node("a", "10.0.0.1", 1.0)])
        self._looks = 0

    def take(self, run: str, kind: str) -> str:
        """Returns the node."""
        return self.slots.take(run, kind)

    def plan(self, kind: str) -> TrialPlan:
        """Returns one slot."""
        return orders(1)

    def look(self) -> bool:
        """Raises from the second look on."""
        self._looks += 1
        if self._looks > 1:
            raise StoppedEarly("no node is left")
        return False


def test_a_search_without_a_node_ends_though_a_trial_waits_for_one() -> None:
    scheduler = Queue([("nowhere", None)] * 2)
    told = {"": {"worker": WorkerConfig("mine.py")}}
    asking = _Asking({"": Dispatcher(scheduler, orders(1), None)}, told, Dying())  # type: ignore[arg-type]
    assert asking.suggest("first")["order"].trial == "t0"
    assert asking.suggest("second") == "FINISHED"
    for _ in range(2):
        with pytest.raises(StoppedEarly, match="no node is left"):
            asking.stranded()


def test_the_token_lies_in_a_folder_of_its_users_own(cluster: RayCluster) -> None:
    assert stat.S_IMODE(cluster.token_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cluster.token_path.parent.stat().st_mode) == 0o700, "Ray opens its own folder to everybody"
