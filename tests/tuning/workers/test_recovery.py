"""Out of memory in every place: a result each time, and the next trial finds the process as it was."""

from __future__ import annotations

import ctypes
import gc
import itertools
import re
import resource
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from tests.data.greedy import CAP_BYTES, WHERE, Greedy, hidden_bytes
from tests.trainables.test_garbage import another_collects
from trainables.knobs import Knobs
from trainables.our_knobs import EVERY
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.workload import Config
from tuning.workers import device_memory, machine
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

GREEDY = Path(__file__).parents[2] / "data" / "greedy.py"
PLAN = Plan(samples=64, milestones=(64,), window_s=0.0, cap_bytes=CAP_BYTES)
KNOBS = {"learning_rate": 0.01, "batch_size": 16, "micro_batch_size": 8}


def knobs(where: str) -> dict[str, Any]:
    """Returns a configuration that fails in this place; a loader's failure needs a loader's process."""
    return {**KNOBS, "augmentation": WHERE[where], "num_workers": int(where.startswith("loader"))}


@pytest.fixture(scope="module")
def session() -> Session:
    """One process through all of these tests, as an actor is through all trials; it has run a trial."""
    own = Session(WorkerConfig(str(GREEDY), cap_bytes=CAP_BYTES))
    own.warm(KNOBS)
    assert own.train(knobs("nowhere"), PLAN, 0).outcome == "ok"
    return own


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer", "evaluation"])
def test_an_oom_is_recorded_and_the_next_trial_trains_at_once_with_all_bytes_back(session: Session, where: str) -> None:
    level = session.resident.meter.live_bytes
    failed = session.train(knobs(where), PLAN, 0, shrink="")
    assert (failed.outcome, failed.fault, failed.done) == ("oom", "device allocator", True)
    assert "virtual card out of memory. Tried to allocate" in failed.message
    assert CAP_BYTES < failed.wanted_bytes < 4 * CAP_BYTES
    assert failed.peak_allocated_bytes <= CAP_BYTES
    assert failed.held_bytes == failed.own_bytes == session.resident.meter.live_bytes == level
    assert failed.retire == ""
    again = session.train(knobs("nowhere"), PLAN, 0, shrink="")
    assert (again.outcome, again.held_bytes) == ("ok", level)
    assert again.first_step_at - failed.failed_at <= 0.5


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer", "evaluation"])
def test_the_first_oom_of_a_process_leaves_nothing_behind(where: str) -> None:
    own = Session(WorkerConfig(str(GREEDY), cap_bytes=CAP_BYTES))
    own.warm(KNOBS)
    failed = own.train(knobs(where), PLAN, 0, shrink="")
    assert (failed.outcome, failed.held_bytes) == ("oom", failed.own_bytes)


class Circular(Greedy):
    """Its model holds itself."""

    def model(self, config: Any) -> Any:
        """Returns the net."""
        net = super().model(config)  # type: ignore[no-untyped-call]
        net.apply(lambda part: setattr(part, "root", [net]))
        return net


def test_a_model_in_a_circle_is_gone_before_the_next_is_made() -> None:
    resident = Resident(Circular())
    before = weakref.ref(next(resident.model(Config(Knobs.of(KNOBS, EVERY))).parameters()))
    gc.collect()
    gc.freeze()  # as `Session.warm` does with a model that is to stay
    resident.drop_model()
    assert before() is None


@pytest.mark.parametrize("where", ["loader", "loader_hidden"])
def test_an_oom_in_a_loader_process_is_the_hosts_and_a_trial_goes_on_without_the_process(
    session: Session, where: str
) -> None:
    level = session.resident.meter.live_bytes
    failed = session.train(knobs(where), PLAN, 0, shrink="")
    assert (failed.outcome, failed.fault) == ("host_oom", "host allocator in a loader process")
    assert failed.held_bytes == level
    again = session.train(knobs("nowhere"), PLAN, 0, shrink="")
    assert again.outcome == "ok"
    assert again.first_step_at - failed.failed_at <= 0.5
    retried = session.train(knobs(where), PLAN, 0, shrink="loader")
    assert [r.knobs["num_workers"] for r in retried.retries] == [1]
    assert retried.knobs["num_workers"] == 0
    assert (retried.outcome, retried.fault) == ("host_oom", "host allocator"), "it asks in this process now"


def test_what_no_counter_of_tensors_sees_meets_the_limit_of_the_process_which_is_lifted_after(session: Session) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    failed = session.train(knobs("hidden"), PLAN, 0, shrink="")
    assert (failed.outcome, failed.fault) == ("host_oom", "host allocator")
    assert re.search(r"MemoryError: Unable to allocate [\d.]+ GiB", failed.message)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    uncapped = Plan(64, (64,), window_s=0.0)
    if hidden_bytes() < psutil.virtual_memory().total:  # or the machine itself may refuse
        assert session.train(knobs("hidden"), uncapped, 0).outcome == "ok", "without a cap there is no limit"


def test_an_oom_while_another_thread_collects_garbage_leaves_nothing_behind(session: Session) -> None:
    with another_collects():  # as where a DataLoader is collected, and waits for its processes
        failed = session.train(knobs("optimizer"), PLAN, 0, shrink="")
    assert (failed.outcome, failed.retire) == ("oom", "")
    assert failed.held_bytes == failed.own_bytes == session.resident.meter.live_bytes


def resident_bytes() -> int:
    """Returns what the process holds of the machine's memory, without what GNU's malloc keeps free."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # GNU's C library
        trim(0)
    return int(psutil.Process().memory_info().rss)


def test_hundreds_of_ooms_leave_nothing_behind(session: Session) -> None:
    places = ["forward", "backward", "optimizer", "evaluation"]

    def state() -> tuple[int, int, int]:
        gc.collect()
        meter = session.resident.meter
        return meter.live_bytes, len(meter._known), sum(1 for o in gc.get_objects() if type(o).__name__ == "Tensor")

    def fail(count: int) -> None:
        for number in range(count):
            found = session.train(knobs(places[number % 4]), PLAN, 0, shrink="")
            assert (found.outcome, found.retire) == ("oom", "")

    fail(10)
    before, resident = state(), [resident_bytes()]
    for _ in range(3):
        fail(100)
        resident.append(resident_bytes())
    assert state() == before
    # 84 KB an OOM. The 4 MiB that each asks for come and go in malloc: one hundred may seem to need 12 MiB.
    assert min(b - a for a, b in itertools.pairwise(resident)) < 8 * 2**20
    assert session.train(knobs("nowhere"), PLAN, 0).outcome == "ok"


@pytest.fixture
def leaking() -> Iterator[Session]:
    """A session whose loss keeps 1 % of the cap of every micro-batch."""
    own = Session(WorkerConfig(str(GREEDY), {"leak": CAP_BYTES // 100}, cap_bytes=CAP_BYTES))
    yield own
    sys.modules[type(own.resident.workload).__module__].Greedy.kept.clear()
    Greedy.kept.clear()


def test_a_process_that_keeps_what_its_trials_made_runs_no_other(leaking: Session) -> None:
    plan = Plan(640, (640,), window_s=0.0, cap_bytes=2**30)
    leaking.resident.workload.leak = 0  # type: ignore[attr-defined]
    assert leaking.train(knobs("nowhere"), plan, 0).retire == ""
    leaking.resident.workload.leak = 2**20  # type: ignore[attr-defined]
    found = leaking.train(knobs("nowhere"), plan, 0)
    assert found.outcome == "ok"
    assert re.match(r"\d\d\.\d MiB were still held after a training, 20\.5 MiB are allowed", found.retire)


def test_the_workspaces_of_cublas_are_no_bytes_of_a_trial(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"model": 2**20, "workspaces": 2 * 32 * 2**20}
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: held.pop("workspaces", 0), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: sum(held.values()))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=2**34))
    memory = device_memory.DeviceMemory("cuda", session.resident.meter)
    assert memory.reserved_bytes() == 2**20
    assert (memory.limit_bytes(None), memory.limit_bytes(2**30)) == (2**34, 2**30)


@pytest.mark.parametrize(
    ("kernel", "cap_gib", "held_gib"),
    [
        ("6.8.0-generic", None, 16.0),
        ("5.15.1-microsoft-standard-WSL2", None, 12.0),
        ("5.15.1-microsoft", 8, 8.0),
        ("5.15.1-microsoft", 14, 12.0),
    ],
)
def test_under_wsl_no_process_has_more_than_what_is_free(
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kernel: str,
    cap_gib: int | None,
    held_gib: float,
) -> None:
    gib, fractions = 2**30, list[float]()
    (tmp_path / "proc/sys/kernel").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/osrelease").write_text(kernel)
    here = machine.is_wsl(tmp_path)
    monkeypatch.setattr(machine, "is_wsl", lambda: here)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2 * gib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 * gib, 16 * gib))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=16 * gib))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    device_memory.DeviceMemory("cuda", session.resident.meter).limit(None if cap_gib is None else cap_gib * gib)
    assert fractions == [held_gib / 16]


def test_the_backstop_leaves_what_the_machine_has_never_raises_a_limit_and_is_off_without_a_cap(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[tuple[int, int]] = []
    present = (2**40, resource.RLIM_INFINITY)
    monkeypatch.setattr(device_memory.resource, "getrlimit", lambda what: present)
    monkeypatch.setattr(device_memory.resource, "setrlimit", lambda what, pair: limits.append(pair))
    now = device_memory.data_bytes()
    memory = device_memory.DeviceMemory("cpu", session.resident.meter)
    with memory.backstop(None):
        assert limits == []
    for free in (2**20, 2**33):
        monkeypatch.setattr(device_memory.machine, "available_bytes", lambda free=free: free)
        with memory.backstop(1):
            assert abs(limits[-1][0] - now - max(free, device_memory.ROOM_BYTES)) < 2**24
        assert limits[-1] == present
    monkeypatch.setattr(device_memory, "data_bytes", lambda: 2**40)
    with memory.backstop(1):
        assert limits[-1] == present
