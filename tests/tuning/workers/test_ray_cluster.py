"""The folders of clusters whose runs were killed are removed; those of the living and of others are not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuning.config.errors import PreflightError, StoppedEarly
from tuning.workers.ray_cluster import RayCluster, sweep

LOST_EARLY = """
import os, psutil, threading
from tuning.workers.ray_cluster import RayCluster

def is_watched():
    links = list[str]()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:
            pass
    return any("pidfd" in link for link in links)

def kill():
    while not is_watched():
        threading.Event().wait(0.01)  # a loop that computes would keep the watch from looking
    next(p for p in psutil.Process().children() if p.name() == "gcs_server").kill()

threading.Thread(target=kill, daemon=True).start()
RayCluster(cores=1, gpus=0, dashboard=False).__enter__()
"""


def test_folders_of_dead_runs_are_swept(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    names = {"dead": f"ct-{ended.pid}-abc", "ours": f"ct-{os.getpid()}-abc", "other": "ct-x-abc", "plain": "ct-abc"}
    for name in names.values():
        (tmp_path / name / "ray").mkdir(parents=True)
    assert sweep(tmp_path) == [tmp_path / names["dead"]]
    assert {p.name for p in tmp_path.iterdir()} == set(names.values()) - {names["dead"]}


@pytest.mark.ray
@pytest.mark.timeout(120)
def test_gcs_server_lost_while_ray_starts_is_said() -> None:
    ended = subprocess.run([sys.executable, "-c", LOST_EARLY], capture_output=True, text=True, check=False)
    assert "its process gcs_server is gone" in ended.stderr


def test_what_ray_raises_while_it_starts_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nMore of it")

    monkeypatch.setattr("ray.init", fails)
    with pytest.raises(PreflightError, match=r"Ray did not start: The current node timed out during startup\.\n  try"):
        RayCluster(cores=1, gpus=0, dashboard=False).__enter__()


@pytest.mark.parametrize("kind", [None, KeyboardInterrupt, RuntimeError])
def test_a_lost_process_ends_the_search_whatever_came_of_the_interrupt(kind: type[BaseException] | None) -> None:
    cluster: Any = RayCluster(cores=1, gpus=0, dashboard=False)
    cluster._watch = SimpleNamespace(end=lambda: "its process raylet is gone")
    with pytest.raises(StoppedEarly, match="its process raylet is gone"):
        cluster.__exit__(kind, None if kind is None else kind(), None)
