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
from tuning.workers.dispatch import LocalExecutor
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

    def evaluate(self, model, batches):
        self.plan.write_text("dies next")
        return super().evaluate(model, batches)

    def loss(self, model, batch):
        if self.plan.read_text() == "dies next":
            self.plan.write_text("no more")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)

WORKLOAD = Dying()
"""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A process under a cap, for the tests that leave it as it was."""
    with Worker(SETTING) as found:
        yield found


def test_trials_run_in_the_process_that_measured_and_at_once_after_ooms_of_every_kind(worker: Worker) -> None:
    places = ["forward", "backward", "optimizer", "evaluation", "loader"]
    order = [place for where in places for place in (where, "nowhere") * 3]
    scheduler = Queue([(p, None) for p in order])
    measured = worker.train(NOWHERE, 64, (32, 64), seed=0)
    LocalExecutor(worker).run(scheduler, ORDERS)
    found = [scheduler.found[f"t{n}"] for n in range(len(order))]
    expected = {"nowhere": "ok", "loader": "host_oom"}
    assert [f.outcome for f in found] == [expected.get(p, "oom") for p in order]
    assert {f.pid for f in found} == {measured.pid}
    assert {f.held_bytes - f.own_bytes for f in found} == {0}
    assert found[1].values == measured.values
    gaps = [b.first_step_at - a.failed_at for a, b in zip(found[::2], found[1::2], strict=True)]
    assert max(min(gaps[n : n + 3]) for n in range(0, len(gaps), 3)) <= 0.5, "of each place in one of three, at least"
    assert scheduler.decisions == []
    assert worker.train(NOWHERE, 64, (32, 64), seed=0).values == measured.values


@pytest.mark.fault
def test_a_process_that_holds_what_its_trial_left_or_has_died_is_replaced_and_where_none_can_load_the_search_ends(
    tmp_path: Path,
) -> None:
    (tmp_path / "dying.py").write_text(DYING, encoding="utf-8")
    (tmp_path / "plan").touch()
    options = {"plan": str(tmp_path / "plan"), "leak": 8 * 2**20}
    scheduler = Queue([("nowhere", None)] * 3)
    with (
        Worker(WorkerConfig(str(tmp_path / "dying.py"), options, cap_bytes=2**30)) as worker,
        pytest.raises(StoppedEarly, match=r"(?s)raised OSError: the data is gone.*go on with resume="),
    ):
        LocalExecutor(worker).run(scheduler, TrialPlan(64, (64,), False, 1, 1))
    assert {t: f.outcome for t, f in scheduler.found.items()} == {"t0": "ok"}, "t1 is left for a resume"
    assert [(e, t) for e, t, _ in scheduler.decisions] == [("retired", "t1"), ("lost", "t1")]
    assert "MiB were still held after a training" in scheduler.decisions[0][2]
    assert scheduler.decisions[1][2] == "the process was lost: signal 9 (SIGKILL); it is run once more"


def test_a_trial_is_stopped_while_it_runs_or_before_it_begins_where_the_scheduler_wants_it_no_more(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Choosier(Choosy):
        """Wants no t3 after its first rung, either."""

        def at_rung(self, trial: str, result: Any) -> bool:
            """Says so."""
            return trial != "t3"

    monkeypatch.setattr(worker_module, "PAUSE_AFTER_S", 1e-9)
    scheduler = Choosier([("nowhere", None)] * 5)
    LocalExecutor(worker).run(scheduler, ORDERS)
    assert {t: f.outcome for t, f in scheduler.found.items()} == {
        **{"t0": "ok", "t1": "refused", "t2": "ok", "t3": "ok", "t4": "ok"}
    }
    assert [scheduler.found[t].samples for t in ("t0", "t3", "t4")] == [64, 32, 64]
    assert 0 < scheduler.found["t2"].samples < 64
    assert scheduler.found["t3"].values
    assert len({scheduler.found[t].pid for t in ("t0", "t2", "t3", "t4")}) == 1
