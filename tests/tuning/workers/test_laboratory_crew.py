"""Trials one at a time in the process that measured: one process through OOMs, a new one where it was lost or left."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from tests.data.greedy import CAP_BYTES
from tests.queues import GREEDY, NOWHERE, Choosy, Killing, Queue
from tuning.config.errors import StoppedEarly
from tuning.search.bench import Orders
from tuning.workers import laboratory_crew
from tuning.workers.laboratory import Laboratory
from tuning.workers.laboratory_crew import LaboratoryCrew
from tuning.workers.lending import LostError
from tuning.workers.setting import Setting

ORDERS = Orders(64, (32, 64), False, 1, 1)
SETTING = Setting(str(GREEDY), cap_bytes=CAP_BYTES)
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


def dying(folder: Path, plan: str) -> Setting:
    """Returns a workload whose process is killed in its first step, as often as the plan has words."""
    (folder / "dying.py").write_text(DYING, encoding="utf-8")
    (folder / "plan").write_text(plan, encoding="utf-8")
    return Setting(str(folder / "dying.py"), {"plan": str(folder / "plan")})


def test_trials_run_in_the_process_that_measured_through_ooms_of_every_kind() -> None:
    places = [p for w in ("forward", "backward", "optimizer", "evaluation", "loader") for p in (w, "nowhere")]
    desk = Queue([(p, None) for p in places])
    with Laboratory(SETTING) as laboratory:
        measured = laboratory.train(NOWHERE, 64, (32, 64), seed=0)
        LaboratoryCrew(laboratory).run(desk, ORDERS)
        found = [desk.found[f"t{n}"] for n in range(len(places))]
        expected = {"nowhere": "ok", "loader": "host_oom"}
        assert [f["outcome"] for f in found] == [expected.get(p, "oom") for p in places]
        assert {f["pid"] for f in found} == {measured["pid"]}
        assert {f["held_bytes"] - f["own_bytes"] for f in found} == {0}
        assert found[1]["values"] == measured["values"]
        assert desk.decisions == []
        assert laboratory.train(NOWHERE, 64, (32, 64), seed=0)["values"] == measured["values"]


@pytest.mark.fault
def test_a_process_that_holds_what_its_trial_left_is_given_up_and_no_trial_is_lost() -> None:
    desk = Queue([("nowhere", None)] * 3)
    with Laboratory(Setting(str(GREEDY), {"leak": 8 * 2**20}, cap_bytes=2**30)) as laboratory:
        LaboratoryCrew(laboratory).run(desk, ORDERS)
    assert [desk.found[f"t{n}"]["outcome"] for n in range(3)] == ["ok"] * 3
    assert len({f["pid"] for f in desk.found.values()}) == 3
    assert [(e, t) for e, t, _ in desk.decisions] == [("retired", "t1"), ("retired", "t2")]
    assert "MiB were still held after the trial" in desk.decisions[0][2]


@pytest.mark.fault
def test_a_process_that_is_killed_between_two_trials_is_replaced_and_it_is_said() -> None:
    desk = Killing([("nowhere", None)] * 2)
    with Laboratory(SETTING) as laboratory:
        LaboratoryCrew(laboratory).run(desk, ORDERS)
    assert [f["outcome"] for f in desk.found.values()] == ["ok", "ok"]
    assert desk.found["t0"]["pid"] != desk.found["t1"]["pid"]
    said = "the process was lost: signal 9 (SIGKILL); the trial runs in a new process"
    assert desk.decisions == [("lost", "t1", said)]


@pytest.mark.fault
def test_one_that_was_killed_before_the_first_trial_is_replaced_too() -> None:
    desk = Queue([("nowhere", None)])
    with Laboratory(SETTING) as laboratory:
        os.kill(laboratory.train(NOWHERE, 64, (64,), seed=0)["pid"], signal.SIGKILL)
        LaboratoryCrew(laboratory).run(desk, ORDERS)
    assert desk.found["t0"]["outcome"] == "ok"


@pytest.mark.fault
def test_a_trial_whose_process_dies_twice_is_lost_and_the_next_one_runs(tmp_path: Path) -> None:
    desk = Queue([("nowhere", None)] * 2)
    with Laboratory(dying(tmp_path, "once again")) as laboratory:
        LaboratoryCrew(laboratory).run(desk, ORDERS)
    assert [desk.found[f"t{n}"]["outcome"] for n in range(2)] == ["killed", "ok"]
    said = "the process was lost: signal 9 (SIGKILL)"
    assert desk.decisions == [("lost", "t0", f"{said}; it is run once more")]
    assert (desk.found["t0"]["fault"], desk.found["t0"]["message"]) == ("process lost", said)


@pytest.mark.fault
def test_where_no_new_process_can_load_the_search_ends_with_what_it_says_and_can_be_resumed(tmp_path: Path) -> None:
    desk = Queue([("nowhere", None)] * 2)
    with (
        Laboratory(dying(tmp_path, "last")) as laboratory,
        pytest.raises(StoppedEarly, match=r"(?s)cannot start: OSError: the data is gone.*go on with resume="),
    ):
        LaboratoryCrew(laboratory).run(desk, ORDERS)
    assert desk.found == {}
    assert [e for e, _, _ in desk.decisions] == ["lost"]


class Scripted:
    """A laboratory whose processes answer what they are told to, an exception by raising it; then it is done."""

    cap_bytes = None

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.started = self.ended = 0

    def trainer(self) -> Scripted:
        """Starts a process."""
        self.started += 1
        return self

    def use_threads(self, count: int) -> None:
        """Takes any."""

    def trial(self, *_: Any, shrink: str) -> Scripted:
        """Begins one."""
        return self

    def advance(self, beat_s: float) -> dict[str, Any]:
        """Returns the next answer."""
        return self._next({"samples": 64, "done": True, "outcome": "ok"})

    def end(self) -> dict[str, Any]:
        """Ends a trial, or the process."""
        self.ended += 1
        return self._next({"retire": ""}) if self._answers and self._answers[0] == "end" else {}

    def last_words(self) -> str:
        """Returns how it ended."""
        return "signal 11 (SIGSEGV)"

    def _next(self, usual: dict[str, Any]) -> dict[str, Any]:
        answer = self._answers.pop(0) if self._answers else usual
        if answer == "end":
            answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)


RUNG = {"samples": 32, "done": False, "outcome": "ok", "values": {"error": 1.0}}


def run_with(bench: Scripted, desk: Queue) -> None:
    LaboratoryCrew(cast(Laboratory, bench)).run(desk, ORDERS)


class Stopping(Queue):
    """A desk that stops every trial at its first rung, and counts what it judged."""

    judged = 0

    def at_rung(self, trial: str, result: Any) -> bool:
        """Stops it."""
        self.judged += 1
        return False


def test_what_was_judged_stands_though_its_process_is_lost_while_it_ends() -> None:
    desk, bench = Stopping([("nowhere", None)] * 2), Scripted(RUNG, "end", LostError())
    run_with(bench, desk)
    assert (desk.found["t0"]["samples"], desk.judged, bench.started) == (32, 1, 2)
    said = "the process was lost: signal 11 (SIGSEGV); the trial runs in a new process"
    assert desk.decisions == [("lost", "t1", said)]


def test_a_trial_beside_which_its_process_fails_is_run_once_more_in_another() -> None:
    desk, bench = Queue([("nowhere", None)]), Scripted(RuntimeError("TypeError: cannot pickle\na lock"))
    run_with(bench, desk)
    assert desk.found["t0"]["outcome"] == "ok"
    assert desk.decisions == [("lost", "t0", "a lock; it is run once more")]
    assert bench.started == 2


def test_why_a_process_was_given_up_is_said_once() -> None:
    retiring = {"samples": 64, "done": True, "outcome": "ok", "retire": "1 MiB were still held"}
    desk, bench = Queue([("nowhere", None)] * 3), Scripted(retiring, LostError(), LostError())
    run_with(bench, desk)
    assert [(e, t) for e, t, _ in desk.decisions] == [("retired", "t1"), ("lost", "t1")]
    assert [desk.found[f"t{n}"]["outcome"] for n in range(3)] == ["ok", "killed", "ok"]


@pytest.mark.parametrize("error", [RecursionError("a fault of ours"), StoppedEarly("the disk is full")])
def test_what_the_desk_raises_is_no_result_of_a_trial(error: Exception) -> None:
    class Faulty(Queue):
        """A desk that fails at a rung."""

        def at_rung(self, trial: str, result: Any) -> bool:
            """Raises."""
            raise error

    desk = Faulty([("nowhere", None)])
    with pytest.raises(type(error)) as raised:
        run_with(Scripted(RUNG), desk)
    assert raised.value is error
    assert (desk.found, desk.decisions) == ({}, [])


def test_a_trial_is_stopped_while_it_runs_or_before_it_begins_where_the_desk_wants_it_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Choosier(Choosy):
        """Wants no t3 after its first rung, either."""

        def at_rung(self, trial: str, result: Any) -> bool:
            """Says so."""
            return trial != "t3"

    monkeypatch.setattr(laboratory_crew, "BEAT_S", 0.0)
    desk = Choosier([("nowhere", None)] * 5)
    with Laboratory(SETTING) as laboratory:
        LaboratoryCrew(laboratory).run(desk, ORDERS)
    assert {t: f["outcome"] for t, f in desk.found.items()} == {
        **{"t0": "ok", "t1": "refused", "t2": "ok", "t3": "ok", "t4": "ok"}
    }
    assert [desk.found[t]["samples"] for t in ("t0", "t3", "t4")] == [64, 32, 64]
    assert 0 < desk.found["t2"]["samples"] < 64
    assert desk.found["t3"]["values"]
    assert len({desk.found[t]["pid"] for t in ("t0", "t2", "t3", "t4")}) == 1
