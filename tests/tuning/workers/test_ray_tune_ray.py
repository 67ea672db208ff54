"""Ray's side of trials: shares of a card, several cards, and trials whose process or actor was killed."""

from __future__ import annotations

import math
import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.data.greedy import CAP_BYTES
from tests.queues import GREEDY, Killing, Queue
from tuning.config.errors import StoppedEarly
from tuning.search.protocols import TrialPlan, TrialState
from tuning.workers import nvml
from tuning.workers.dispatch import Dispatcher
from tuning.workers.nodes import Node, Slots
from tuning.workers.ray_tune import JoinedCluster, RayCluster, RayExecutor, _Asking, _Members, requested
from tuning.workers.ray_worker import REPORT
from tuning.workers.slots import share_bytes
from tuning.workers.worker_config import WorkerConfig

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]
UUIDS = ("GPU-a000", "GPU-b000")
MEETING = '''
import os
from pathlib import Path

from tests.data.greedy import Greedy


class Meeting(Greedy):
    """Greedy, whose training goes on once the processes of two trials have come to their first step."""

    options = {**Greedy.options, "place": ""}

    def dataset(self, config, split):
        self.place = Path(config.options["place"])
        return super().dataset(config, split)

    def loss(self, model, batch):
        (self.place / str(os.getpid())).touch()
        while len(list(self.place.iterdir())) < 2:
            os.sched_yield()
        return super().loss(model, batch)


WORKLOAD = Meeting()
'''


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[RayCluster]:
    """One Ray for the tests of this file: two cores and two cards, which are named by UUID; no card is here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(nvml.VISIBLE, ",".join(UUIDS))
        with RayCluster(cores=2, gpus=2, dashboard=False) as running:
            yield running


def orders(count: int, **more: Any) -> TrialPlan:
    return TrialPlan(64, (64,), False, count, 1, **more)


def test_trials_share_a_card_side_by_side_and_one_that_needs_more_than_its_slot_runs_alone(tmp_path: Path) -> None:
    (tmp_path / "meeting.py").write_text(MEETING)
    (tmp_path / "place").mkdir()
    share, options = CAP_BYTES, {"place": str(tmp_path / "place")}
    trials: list[tuple[str, int | None]] = [("nowhere", share // 2)] * 3 + [("forward", share // 2), ("nowhere", None)]
    trials += [("nowhere", share // 2), ("nowhere", 2 * share), ("nowhere", share // 2)]
    scheduler = Queue(trials)
    config = WorkerConfig(str(tmp_path / "meeting.py"), options, threads=1, cap_bytes=2 * share)
    plan = orders(2, cap_bytes=share, alone_bytes=2 * share)
    RayExecutor(config, "meeting_trials").run(scheduler, plan)
    assert {f.outcome for f in scheduler.found.values()} == {"ok"}, "4 MiB of greed fit two slots"
    assert {t for t, f in scheduler.found.items() if f.cap_bytes == 2 * share} == {"t3", "t6"}
    assert {f.cap_bytes for f in scheduler.found.values()} == {share, 2 * share}
    assert scheduler.decisions == [("widened", "t3", "oom")]
    spans = [(f.first_step_at, f.last_step_at, f.cap_bytes) for f in scheduler.found.values()]
    for moment, _, _ in spans:
        assert sum(cap for begin, end, cap in spans if begin <= moment <= end) <= 2 * share
    pids = {str(f.pid) for f in scheduler.found.values()}
    assert len(pids) == 2
    assert pids == {path.name for path in (tmp_path / "place").iterdir()}


def test_a_trial_whose_process_or_actor_was_killed_is_run_in_another_and_the_worker_of_the_actor_ends() -> None:
    class Beheading(Killing):
        """A scheduler that kills the process of its first trial once it has ended, and its second's actor at a rung."""

        killed: psutil.Process | None = None

        def at_rung(self, trial: str, result: Any) -> bool:
            """Kills the parent of the process that trains."""
            if self.killed is None and trial == "t1":
                self.killed = psutil.Process(result.pid)
                self.killed.parent().kill()
            return True

    scheduler = Beheading([("nowhere", None)] * 2)
    plan = TrialPlan(64, (32, 64), False, 1, 1)
    RayExecutor(WorkerConfig(str(GREEDY), cap_bytes=CAP_BYTES), "greedy_trials").run(scheduler, plan)
    assert [scheduler.found[f"t{n}"].outcome for n in range(2)] == ["ok", "ok"]
    lost = [reason for event, trial, reason in scheduler.decisions if (event, trial) == ("lost", "t1")]
    assert len(lost) == len(scheduler.decisions) == 2, "the process, then the actor"
    psutil.wait_procs([scheduler.killed], timeout=10)
    assert not scheduler.killed.is_running()


class Dying:
    """The one node of a cluster, which is lost at the second look."""

    def __init__(self) -> None:
        self.slots = Slots([Node("a", "10.0.0.1", 1.0)])
        self._looks = 0

    def look(self) -> bool:
        """Raises from the second look on."""
        self._looks += 1
        if self._looks > 1:
            raise StoppedEarly("no node is left")
        return False


def test_a_search_without_a_node_ends_though_a_trial_waits_for_one() -> None:
    scheduler = Queue([("nowhere", None)] * 2)
    dispatcher = Dispatcher(scheduler, orders(1), None)
    asking = _Asking(dispatcher, WorkerConfig("mine.py"), Dying())  # type: ignore[arg-type]
    assert asking.suggest("first")["order"].trial == "t0"
    assert asking.suggest("second") == "FINISHED"
    for _ in range(2):
        with pytest.raises(StoppedEarly, match="no node is left"):
            asking.stranded()


NODES = [Node(name, "10.0.0.1", 1.0) for name in "ab"]
FATAL = TrialState(outcome="crash", done=True, message="no space", fatal="no space")


def members_of(nodes: list[Node], told: list[Node], slots: int = 1) -> _Members:
    """Returns the members of a cluster of such nodes, with so many slots each."""
    cluster = JoinedCluster("head:6379", "mine.py", Path(), insecure=False)
    cluster.nodes = nodes
    return _Members(cluster, orders(slots), 1.0 / slots, told.append)


def asking_of(scheduler: Queue, members: _Members) -> _Asking:
    """Returns who asks the scheduler; Ray is not asked which nodes are there."""
    members._look_at = math.inf
    return _Asking(Dispatcher(scheduler, members.plan, None), WorkerConfig("mine.py"), members)


@pytest.mark.parametrize(
    ("nodes", "elsewhere", "ends"),
    [(NODES, True, False), (NODES, False, True), (NODES[:1], True, True)],
)
def test_a_node_that_cannot_load_the_workload_is_left_out_while_others_can_and_a_fault_of_the_code_ends_the_search(
    nodes: list[Node], elsewhere: bool, ends: bool
) -> None:
    told: list[Node] = []
    members, scheduler = members_of(nodes, told), Queue([("nowhere", None)] * 3)
    asking = asking_of(scheduler, members)
    assert asking.suggest("first")["node"] == "a"
    asking.on_trial_complete("first", {REPORT: replace(FATAL, elsewhere=elsewhere)})
    if ends:
        assert (told, str(asking.failed).splitlines()[0]) == ([], "error: no space")
        return
    assert [(n.id, n.why) for n in told] == [("a", "the workload cannot be loaded there: no space")]
    again = asking.suggest("again")
    assert (again["order"].trial, again["node"], asking.suggest("more")) == ("t0", "b", None)
    assert scheduler.decisions == [("lost", "t0", "node 10.0.0.1 (a) is left out; it is run once more on another")]
    assert [n.id for n in members._cluster.training] == ["b"]


def test_what_still_trains_on_a_node_left_out_takes_no_slot_of_another() -> None:
    asking = asking_of(Queue([("nowhere", None)] * 8), members_of(NODES, [], slots=2))
    where = [asking.suggest(f"r{n}")["node"] for n in range(4)]
    bad = where.index("a")
    asking.on_trial_complete(f"r{bad}", {REPORT: replace(FATAL, elsewhere=True)})
    assert asking.suggest("more") is None, "one still trains on a, two on b"
    asking.on_trial_complete(f"r{where.index('b')}", {REPORT: replace(FATAL, fatal="", outcome="ok")})
    assert asking.suggest("next")["node"] == "b"
    assert asking.suggest("more") is None


def test_the_last_node_is_not_left_out_since_no_other_can_confirm() -> None:
    members = members_of(NODES, told := [])
    assert [members.leave_out(NODES[n], "no space") for n in (0, 0, 1)] == [True, True, False]
    assert [node.id for node in told] == ["a"]


def test_the_token_lies_in_a_folder_of_its_users_own(cluster: RayCluster) -> None:
    assert stat.S_IMODE(cluster.token_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cluster.token_path.parent.stat().st_mode) == 0o700, "Ray opens its own folder to everybody"


@pytest.mark.parametrize(("slots", "each"), [(2, 1), (3, 2)])
def test_the_slots_of_two_cards_have_one_of_them_each_by_uuid(slots: int, each: int) -> None:
    import ray  # here: it is to find the environment that ours is set to

    class Slot:  # here: its process need not import this module
        """What has a slot's share of a card, as the actor of a trial does."""

        def visible(self) -> str:
            """Returns the cards that CUDA would show."""
            return os.environ["CUDA_VISIBLE_DEVICES"]

    plan = TrialPlan(64, (64,), False, slots, 1, devices=2, cap_bytes=share_bytes(24 * 2**30, math.ceil(slots / 2)))
    resources: dict[str, Any] = requested(plan, WorkerConfig("mine.py", device="cuda"), None)
    actors = [ray.remote(num_cpus=0, num_gpus=resources["GPU"])(Slot).remote() for _ in range(slots)]
    seen = Counter(ray.get([actor.visible.remote() for actor in actors]))
    assert set(seen) == set(UUIDS), "both are used"
    assert max(seen.values()) <= each
