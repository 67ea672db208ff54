"""Trials one at a time in the process that measured: one process through OOMs, a new one where it was lost or left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.data.greedy import CAP_BYTES
from tests.queues import GREEDY, NOWHERE, Choosy, Queue
from tuning.config.errors import StoppedEarly
from tuning.search.protocols import TrialPlan
from tuning.workers import worker as worker_module
from tuning.workers.local_executor import LocalExecutor
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

ORDERS = TrialPlan(64, (32, 64), False, 1, 1)
SETTING = WorkerConfig(str(GREEDY), cap_bytes=CAP_BYTES)
DYING = """
import os, pathlib, signal
from tests.data.greedy import Greedy

class Dying(Greedy):
    options = {**Greedy.options, "plan": ""}

    def dataset(self, config, split):
        self.plan = pathlib.Path(config.options["plan"])
        if self.plan.read_text() == "no more":
            raise OSError("the data is gone")
        return super().dataset(config, split)

    def loss(self, model, batch):
        moments = self.plan.read_text().split()
        if moments:
            self.plan.write_text("no more" if moments == ["last"] else " ".join(moments[1:]))
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)

WORKLOAD = Dying()
"""


def dying(folder: Path, plan: str) -> WorkerConfig:
    """Returns a workload whose process is killed in its first step, as often as the plan has words."""
    (folder / "dying.py").write_text(DYING, encoding="utf-8")
    (folder / "plan").write_text(plan, encoding="utf-8")
    return WorkerConfig(str(folder / "dying.py"), {"plan": str(folder / "plan")})


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A process under a cap, for the tests that leave it as it was."""
    with Worker(SETTING) as found:
        yield found


def test_trials_run_in_the_process_that_measured_and_at_once_after_ooms_of_every_kind(worker: Worker) -> None:
    places = [p for w in ("forward", "backward", "optimizer", "evaluation", "loader") for p in (w, "nowhere")]
    scheduler = Queue([(p, None) for p in places])
    measured = worker.train(NOWHERE, 64, (32, 64), seed=0)
    LocalExecutor(worker).run(scheduler, ORDERS)
    found = [scheduler.found[f"t{n}"] for n in range(len(places))]
    expected = {"nowhere": "ok", "loader": "host_oom"}
    assert [f["outcome"] for f in found] == [expected.get(p, "oom") for p in places]
    assert {f["pid"] for f in found} == {measured["pid"]}
    assert {f["held_bytes"] - f["own_bytes"] for f in found} == {0}
    assert found[1]["values"] == measured["values"]
    assert max(b["first_step_at"] - a["failed_at"] for a, b in zip(found[::2], found[1::2], strict=True)) <= 0.5
    assert scheduler.decisions == []
    assert worker.train(NOWHERE, 64, (32, 64), seed=0)["values"] == measured["values"]


@pytest.mark.fault
def test_a_process_that_holds_what_its_trial_left_is_given_up_and_no_trial_is_lost() -> None:
    scheduler = Queue([("nowhere", None)] * 2)
    with Worker(WorkerConfig(str(GREEDY), {"leak": 8 * 2**20}, cap_bytes=2**30)) as worker:
        LocalExecutor(worker).run(scheduler, ORDERS)
    assert [scheduler.found[f"t{n}"]["outcome"] for n in range(2)] == ["ok"] * 2
    assert len({f["pid"] for f in scheduler.found.values()}) == 2
    assert [(e, t) for e, t, _ in scheduler.decisions] == [("retired", "t1")]
    assert "MiB were still held after the trial" in scheduler.decisions[0][2]


@pytest.mark.fault
def test_a_trial_whose_process_dies_twice_is_lost_and_where_no_other_can_load_the_search_ends(tmp_path: Path) -> None:
    scheduler = Queue([("nowhere", None)] * 3)
    with (
        Worker(dying(tmp_path, "once again last")) as worker,
        pytest.raises(StoppedEarly, match=r"(?s)raised OSError: the data is gone.*go on with resume="),
    ):
        LocalExecutor(worker).run(scheduler, ORDERS)
    assert {t: f["outcome"] for t, f in scheduler.found.items()} == {"t0": "killed"}, "t1 is left for a resume"
    said = "the process was lost: signal 9 (SIGKILL)"
    assert (scheduler.found["t0"]["fault"], scheduler.found["t0"]["message"]) == ("process lost", said)
    assert scheduler.decisions == [("lost", t, f"{said}; it is run once more") for t in ("t0", "t1")]


def test_a_trial_is_stopped_while_it_runs_or_before_it_begins_where_the_scheduler_wants_it_no_more(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Choosier(Choosy):
        """Wants no t3 after its first rung, either."""

        def at_rung(self, trial: str, result: Any) -> bool:
            """Says so."""
            return trial != "t3"

    monkeypatch.setattr(worker_module, "BEAT_S", 0.0)
    scheduler = Choosier([("nowhere", None)] * 5)
    LocalExecutor(worker).run(scheduler, ORDERS)
    assert {t: f["outcome"] for t, f in scheduler.found.items()} == {
        **{"t0": "ok", "t1": "refused", "t2": "ok", "t3": "ok", "t4": "ok"}
    }
    assert [scheduler.found[t]["samples"] for t in ("t0", "t3", "t4")] == [64, 32, 64]
    assert 0 < scheduler.found["t2"]["samples"] < 64
    assert scheduler.found["t3"]["values"]
    assert len({scheduler.found[t]["pid"] for t in ("t0", "t2", "t3", "t4")}) == 1
