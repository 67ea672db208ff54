"""Who runs the trials of a study: Ray if it can start here, with what a process of it is told; by fakes of Ray."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tuning.config import load
from tuning.config.errors import ConfigError
from tuning.search.protocols import TrialPlan
from tuning.study import setup
from tuning.workers import executors, nvml
from tuning.workers.nvml import Gpu
from tuning.workers.worker_config import WorkerConfig


def test_workers_know_how_many_trials_run_beside_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By it a RAM cache leaves room; on a card it is known behind the probes alone."""
    seen: list[WorkerConfig] = []
    fake = SimpleNamespace(RayCluster=lambda **_: nullcontext(), RayExecutor=lambda worker, name: seen.append(worker))
    monkeypatch.setattr(executors, "_chosen", [])
    monkeypatch.setattr(executors, "_ray", lambda: fake)
    config = load.load(["workload=nli", "card=cpu", "concurrency=3"])
    config = config.model_copy(update={"card": config.card.on("cpu")})
    setting = dataclasses.replace(setup.setting_of(config), slots=1)
    profiler: Any = SimpleNamespace(end=lambda: None)
    with executors.executor(config, TrialPlan(64, (64,), False, 3, 1), profiler, setting):
        assert [one.slots for one in seen] == [3]


def test_process_has_a_ray_of_its_own_or_joins_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_chosen", [])
    monkeypatch.setattr(executors, "_ray", lambda: SimpleNamespace(RayCluster=lambda **_: "own"))
    alone = load.load(["workload=nli", "card=cpu"])
    assert [executors.cluster(alone), executors.cluster(alone)] == ["own", "own"]
    with pytest.raises(ConfigError, match="has had a Ray of its own, and is asked for a user's cluster"):
        executors.prepare(load.load(["workload=nli", "card=cpu", "cluster=head:6379"]))


def test_ray_imported_first_has_not_read_how_to_listen() -> None:
    said = "import sys; {} from tuning.workers import UNREAD_BY_RAY; print(*sorted(UNREAD_BY_RAY))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    for before, unread in (("", ""), ("sys.modules['ray'] = sys;", "RAY_AUTH_MODE RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")):
        command = [sys.executable, "-c", said.format(before)]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == unread


@pytest.mark.parametrize(
    ("typed", "needs_ray"),
    [
        ("concurrency=2", True),
        ("dashboard=true", True),
        ("cluster=head:6379", True),
        ("cluster=head:6379 insecure_cluster=true", False),  # a Ray that was imported first has read enough for it
        ("concurrency=2 search.trials=0", False),
        ("concurrency=1", False),
        ("", False),
    ],
)
def test_what_ray_cannot_do_is_said_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, typed: str, needs_ray: bool
) -> None:
    config, said = load.load(["workload=nli", "card=cpu", *typed.split()]), list[str]()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setattr(executors, "UNREAD_BY_RAY", set())
    assert executors.as_ray_allows(config, said.append) == config
    monkeypatch.setattr(executors, "UNREAD_BY_RAY", {"RAY_AUTH_MODE"})
    if not needs_ray:
        assert executors.as_ray_allows(config, said.append) == config
    else:
        with pytest.raises(ConfigError, match=r"ray was imported before tuning\.tune") as raised:
            executors.as_ray_allows(config, said.append)
        assert "`from tuning import tune` before `import ray`" in raised.value.remedy
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
        with pytest.raises(ConfigError, match="a Ray runs in this process"):
            executors.as_ray_allows(config, said.append)
    assert not said


def test_card_takes_one_trial_if_ray_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "gpus", lambda: [Gpu("RTX 3090", 24 * 2**30)])
    config, said = load.load(["workload=nli"]), list[str]()
    config = config.model_copy(update={"card": config.card.on("cuda")})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert executors.as_ray_allows(config, said.append).concurrency == 1
    assert len(said) == 1
    assert said[0].endswith("trials run one at a time")
