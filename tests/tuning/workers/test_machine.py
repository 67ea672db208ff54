"""A container's limits are the machine's: cgroup v1 and v2, of the process's own group and of those above."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.commands import ROOT
from tuning.workers import machine

GIB = 2**30
ONE = {"OMP_NUM_THREADS": "1"}
JOB = '{"runtime_env": {"env_vars": %s}, "metadata": {}}'


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine of 64 cores and 256 GiB, 200 of them free, without cgroups."""
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(64)))
    whole = SimpleNamespace(total=256 * GIB, available=200 * GIB)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: whole)
    return tmp_path


@pytest.mark.parametrize(("asked", "threads"), [("", 64), ("1", 1), ("8,2", 8), ("9999", 64), ("0", 64), ("many", 64)])
def test_a_training_computes_with_what_openmp_is_told_at_most_the_cores(
    root: Path, monkeypatch: pytest.MonkeyPatch, asked: str, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert machine.threads() == threads


@pytest.mark.parametrize(
    ("node", "submitted", "is_of_user"),
    [({}, {}, False), (ONE, {}, True), ({}, ONE, True), ({}, None, True)],
    ids=["Ray's", "of the node", "submitted", "no job"],
)
def test_the_one_thread_that_ray_gives_a_jobs_entrypoint_is_no_wish_of_its_user(
    tmp_path: Path, node: dict[str, str], submitted: dict[str, str] | None, is_of_user: bool
) -> None:
    """A shell called raylet starts what a raylet does, in its environment but for what Ray adds."""
    (tmp_path / "raylet").symlink_to("/bin/sh")
    ask = "from tuning.workers import machine; print(machine.threads(), machine.cores())"
    given = {**ONE, **({} if submitted is None else {"RAY_JOB_CONFIG_JSON_ENV_VAR": JOB % json.dumps(submitted)})}
    command = shlex.join(["env", *(f"{name}={value}" for name, value in given.items()), sys.executable, "-c", ask])
    env = {name: value for name, value in os.environ.items() if name not in given} | node
    said = subprocess.check_output([tmp_path / "raylet", "-c", f"{command}; exit"], env=env, cwd=ROOT, text=True)
    threads, cores = map(int, said.split())
    assert threads == (1 if is_of_user else cores)


def test_a_raylet_of_another_user_is_not_asked_for_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(process: psutil.Process) -> dict[str, str]:
        raise psutil.AccessDenied(process.pid)

    monkeypatch.setattr(psutil.Process, "name", lambda process: "raylet")
    monkeypatch.setattr(psutil.Process, "environ", denied)
    for name, value in {**ONE, "RAY_JOB_CONFIG_JSON_ENV_VAR": JOB % "{}"}.items():
        monkeypatch.setenv(name, value)
    assert machine.threads() == 1


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n", encoding="ascii")


def figures(root: Path) -> tuple[int, int, int]:
    return machine.cores(root), machine.memory_bytes(root) // GIB, machine.available_bytes(root) // GIB


V2 = {
    "proc/self/cgroup": "0::/",
    "sys/fs/cgroup/cpu.max": "200000 100000",
    "sys/fs/cgroup/memory.max": str(8 * GIB),
    "sys/fs/cgroup/memory.current": str(3 * GIB),
    "sys/fs/cgroup/memory.stat": f"anon {2 * GIB}\ninactive_file {GIB}",
}
V1 = {
    "proc/self/cgroup": "4:cpu,cpuacct:/docker/a\n7:memory:/docker/a\n1:name=systemd:/docker/a",
    "sys/fs/cgroup/cpu/docker/a/cpu.cfs_quota_us": "350000",
    "sys/fs/cgroup/cpu/docker/a/cpu.cfs_period_us": "100000",
    "sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes": str(8 * GIB),
    "sys/fs/cgroup/memory/docker/a/memory.usage_in_bytes": str(3 * GIB),
    "sys/fs/cgroup/memory/docker/a/memory.stat": f"total_inactive_file {GIB}",
}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, (64, 256, 200)),
        (V2, (2, 8, 6)),
        (V1, (3, 8, 6)),
        ({**V2, "sys/fs/cgroup/cpu.max": "max 100000", "sys/fs/cgroup/memory.max": "max"}, (64, 256, 200)),
        ({**V2, "sys/fs/cgroup/cpu.max": "50000 100000"}, (1, 8, 6)),
        ({**V2, "sys/fs/cgroup/memory.current": str(9 * GIB)}, (2, 8, 0)),
        ({**V2, "proc/self/cgroup": "0::/user/one", "sys/fs/cgroup/user/one/cpu.max": "100000 100000"}, (1, 8, 6)),
        ({**V1, "sys/fs/cgroup/cpu/docker/a/cpu.cfs_quota_us": "-1"}, (64, 8, 6)),
        (
            {**V1, "sys/fs/cgroup/memory/docker/a/memory.limit_in_bytes": "9223372036854771712"},
            (3, 256, 200),
        ),
    ],
)
def test_the_least_of_machine_and_cgroups_holds(root: Path, files: dict[str, str], found: tuple[int, int, int]) -> None:
    write(root, files)
    assert figures(root) == found
