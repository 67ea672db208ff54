"""Which nodes of a cluster are like the machine of the run, and where trials run on them; no Ray."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tuning.config.errors import StoppedEarly
from tuning.workers import ray_measure
from tuning.workers.nodes import EMPTY_S, Node, Slots, kind_of_device, refusal
from tuning.workers.ray_measure import RemoteWorker
from tuning.workers.worker_config import Description, WorkerConfig

GIB = 2**30
DEVICE: dict[str, Any] = {"name": "X", "memory_bytes": 24 * GIB, "capability": [8, 6], "cores": 8}
HERE = Description(outcome="ok", device=DEVICE, torch="2.13.0", workload_sha256="a", data_sha256="b")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, ""),
        ({"device": {**DEVICE, "name": "Y"}}, ""),
        ({"torch": "2.12.0"}, "its torch is 2.12.0, and 2.13.0 on the machine of the run"),
        ({"workload_sha256": "z"}, "the workload's code there is not that of the machine of the run"),
        ({"data_sha256": "z"}, "the data there are not those of the machine of the run"),
        ({"outcome": "crash", "message": "no such file"}, "the workload cannot be loaded there: no such file"),
    ],
)
def test_a_node_with_other_code_data_or_torch_is_refused_and_another_device_is_not(
    changed: dict[str, Any], says: str
) -> None:
    assert refusal(HERE, replace(HERE, **changed)) == says


@pytest.mark.parametrize(
    ("device", "cards", "marks", "name"),
    [
        (DEVICE, 2, (), "x-2x-24g-8c"),
        ({**DEVICE, "memory_bytes": 24.3 * GIB}, 2, (), "x-2x-24g-8c"),
        ({**DEVICE, "memory_bytes": 23 * GIB}, 2, (), "x-2x-23g-8c"),
        ({**DEVICE, "name": "NVIDIA A (80GB)"}, 1, (), "nvidia-a-80gb-24g-8c"),
        ({**DEVICE, "capability": [8, 9]}, 2, (), "x-2x-24g-8c-other"),
        ({**DEVICE, "cores": 16}, 2, (), "x-2x-24g-16c"),
        (DEVICE, 1, (), "x-24g-8c"),
        (DEVICE, 2, ("kind_a",), "kind_a"),
    ],
)
def test_devices_that_differ_are_kinds_with_names_of_their_own(
    device: dict[str, Any], cards: int, marks: tuple[str, ...], name: str
) -> None:
    known: list[Node] = []
    for one, own in (((DEVICE, 2, ()), "x-2x-24g-8c"), ((device, cards, marks), name), ((device, cards, marks), name)):
        node = Node(str(len(known)), "10.0.0.1", 8.0, one[0], cards=one[1], marks=one[2])
        known.append(replace(node, kind=kind_of_device(node, known)))
        assert known[-1].kind == own


def slots() -> Slots:
    return Slots([Node(name, "10.0.0.1", 4.0) for name in "abc"])


def test_trials_are_spread_evenly_and_a_slot_that_is_free_again_is_taken_next() -> None:
    found = slots()
    assert found.machines == 3
    taken = [found.take(f"t{n}") for n in range(6)]
    assert sorted(taken) == sorted("aabbcc")
    freed = found.free("t3")
    assert freed.id == taken[3] == found.take("t6")


def test_a_lost_node_takes_its_slots_along_and_its_trials_are_stranded_until_they_are_freed() -> None:
    found = slots()
    where = {f"t{n}": found.take(f"t{n}") for n in range(3)}
    assert found.look("ac", [], 0.0)
    assert not found.look("ac", [], 1.0), "once"
    assert (found.machines, found.stranded()) == (2, {t for t, node in where.items() if node == "b"})
    (stranded,) = found.stranded()
    node = found.free(stranded)
    assert (node.id, found.has(node), found.stranded()) == ("b", False, set())
    assert "b" not in {found.take(f"t{n}") for n in range(3, 6)}
    found.look("", [], 2.0)
    assert found.is_empty
    with pytest.raises(RuntimeError, match="no node is left"):
        found.take("t9")


def test_a_node_that_is_left_out_has_no_slots_for_another_trial() -> None:
    found = slots()
    where = found.take("t0")
    node = Node(where, "10.0.0.1", 4.0, why="no driver")
    found.leave_out(node)
    assert (found.machines, found.at("t0"), found.stranded()) == (2, node, {"t0"})
    assert where not in {found.take(f"t{n}") for n in range(1, 5)}
    assert not found.look("abc", [], 0.0), "it is there, and stays out"
    assert found.machines == 2


def test_a_node_that_joins_takes_trials_and_is_counted_once() -> None:
    found, joined = slots(), Node("d", "10.0.0.1", 4.0)
    for n in range(3):
        found.take(f"t{n}")
    assert found.look("abcd", [joined], 0.0)
    assert not found.look("abcd", [joined], 1.0)
    assert (found.machines, found.take("t3")) == (4, "d")
    assert not slots().look("abc", [joined], 0.0), "it was lost before it was known to be like the others"


@pytest.mark.parametrize(("until", "ends"), [(None, 10.0 + EMPTY_S), (50.0, 50.0), (5.0, 10.0)])
def test_a_search_without_a_node_waits_for_one_and_no_longer_than_the_search(until: float | None, ends: float) -> None:
    found = Slots([Node("a", "10.0.0.1", 4.0), Node("b", "10.0.0.2", 4.0)], until)
    assert found.look("b", [], 0.0)
    if ends > 10.0:
        assert found.look("", [], 10.0)
        assert not found.look("", [], ends - 0.1)
    with pytest.raises(StoppedEarly, match=r"10.0.0.1 \(a\) and 10.0.0.2 \(b\) were lost, and no node is left"):
        found.look("", [], ends)


def test_a_node_that_joins_in_time_ends_the_wait() -> None:
    found = slots()
    found.look("", [], 0.0)
    assert found.look("d", [Node("d", "10.0.0.1", 4.0)], EMPTY_S - 1.0)
    assert found.look("", [], 10 * EMPTY_S), "the next wait begins anew"
    assert not found.look("", [], 11 * EMPTY_S - 1.0)


@pytest.mark.parametrize(("left_s", "timeout_s"), [(math.inf, None), (None, None), (100.0, 160.0), (-5.0, 60.0)])
def test_a_node_has_its_limit_and_a_minute_to_answer(
    monkeypatch: pytest.MonkeyPatch, left_s: float | None, timeout_s: float | None
) -> None:
    """The actor is one that answers what it was asked for; `ray.get` keeps how long it would have waited."""
    waited: list[float | None] = []
    actor = SimpleNamespace(ask=SimpleNamespace(remote=lambda *asked: {"asked": asked[0]}))
    made = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda config: actor))
    monkeypatch.setattr(ray_measure.ray, "remote", lambda cls: made)
    monkeypatch.setattr(ray_measure.ray, "get", lambda found, timeout: waited.append(timeout) or found)
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    monkeypatch.setattr(ray_measure.ray, "kill", lambda actor: None)
    with RemoteWorker(WorkerConfig("nli", {}), lambda: [Node("0" * 56, "127.0.0.1", 0.0)]) as worker:
        worker.deadline = None if left_s is None else 1000.0 + left_s
        assert worker.probe({}, 1.0, 0.0) == {"asked": "probe"}
    assert waited == [timeout_s]
