"""The machine as this process may use it: a container's limits (cgroup v1 and v2) count as the machine's own."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path("/")
_UNLIMITED_BYTES = 2**60
"""From here on a limit of cgroup v1 says that there is none."""
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""In the environment of a job's entrypoint alone: what was submitted."""


def cores(root: Path = ROOT) -> int:
    """Returns the cores this process may use: those of its affinity, or its cgroup's share of them if that is less."""
    shares = [quota / period for folder in _folders("cpu", root) for quota, period in _quotas(folder)]
    return max(1, min([len(os.sched_getaffinity(0)), *(int(share) for share in shares)]))


def threads(env: Mapping[str, str] | None = None) -> int:
    """Returns the threads that a training computes with which has the machine to itself: OMP_NUM_THREADS where its user
    has set that, at most the cores.
    """
    asked = (_of_user() if env is None else env).get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(cores(), int(asked)) if asked.isdigit() and int(asked) else cores()


def _of_user() -> Mapping[str, str]:
    """Returns the environment; in a job of Ray's that of its node and what was submitted: Ray gives it one thread.

    More than one are of `--entrypoint-num-cpus`, or the user's.
    """
    job = os.environ.get(_JOB)
    if job is None or os.environ.get("OMP_NUM_THREADS") != "1":
        return os.environ
    node: Mapping[str, str] = os.environ
    with contextlib.suppress(psutil.Error):  # a raylet of another user's
        node = next((p.environ() for p in psutil.Process().parents() if p.name() == "raylet"), os.environ)
    return {**node, **((json.loads(job).get("runtime_env") or {}).get("env_vars") or {})}


class Processor(NamedTuple):
    """Processor seconds of all cores since the machine began: busy ones, all, and those that other machines took."""

    busy_s: float
    whole_s: float
    steal_s: float


def processor() -> Processor:
    """Returns what the cores of this machine have done so far; a container's are those of its host."""
    times = psutil.cpu_times()
    whole_s = sum(times) - times.guest - times.guest_nice  # Linux counts the time of guests in that of users as well
    return Processor(whole_s - times.idle - times.iowait, whole_s, times.steal)


def memory_bytes(root: Path = ROOT) -> int:
    """Returns the RAM that this process and its children may fill at most."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits(root))])


def available_bytes(root: Path = ROOT) -> int:
    """Returns the RAM that is free to them now; files in the page cache are no obstacle."""
    free = [max(0, limit - used) for limit, used in _limits(root)]
    return min([int(psutil.virtual_memory().available), *free])


def is_wsl(root: Path = ROOT) -> bool:
    """Returns whether this Linux runs on Windows, whose driver has the cards."""
    return "microsoft" in text_in(root / "proc/sys/kernel/osrelease").lower()


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """Yields the folders of this process's cgroup and of those above it, where they are mounted."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if names else "")
        below = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(below), -1, -1):
            yield mount.joinpath(*below[:depth])


def _quotas(folder: Path) -> Iterator[tuple[float, float]]:
    """Yields microseconds of processor time in so many of the clock."""
    quota, _, period = text_in(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = text_in(folder / "cpu.cfs_quota_us"), text_in(folder / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit() and int(period) > 0:
        yield float(quota), float(period)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields each limit that holds and what is used of it, in bytes."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for folder in _folders("memory", root):
        for limit_name, used_name in names:
            limit, used = text_in(folder / limit_name), text_in(folder / used_name)
            if limit.isdigit() and int(limit) < _UNLIMITED_BYTES:
                yield int(limit), max(0, int(used) if used.isdigit() else 0) - _cached_bytes(folder)


def _cached_bytes(folder: Path) -> int:
    """Returns what the kernel would give back of a cgroup's used memory: files not read of late."""
    pairs = (line.split() for line in text_in(folder / "memory.stat").splitlines())
    found = {name: int(value) for name, value in pairs}
    return found.get("total_inactive_file", found.get("inactive_file", 0))


def text_in(path: Path) -> str:
    """Returns what a file of the system holds, "" where it cannot be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
