"""What every test shares: the --workload option, a folder for runs, and no network outside the machine."""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import os
import socket
import uuid
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

import tuning.workers  # noqa: F401  which Ray reads, before any test imports Ray

# Everything that a run of tests starts inherits it, however far it goes from us; its xdist workers too.
SESSION = os.environ.setdefault("CARDTUNE_TEST_SESSION", uuid.uuid4().hex)
LEAVE_S = 10.0

os.environ["HF_HUB_OFFLINE"] = "1"  # read once, when transformers is imported
# Read once, when torch is loaded. Two processes of tests with two threads each fight for two cores: an LSTM's test took
# 79 s so and takes 1 s with a thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No deadline: a machine that does much else takes longer than the 200 ms of an example that hypothesis allows. The same
# examples in every run, so that a commit passes or fails by what it changes; --hypothesis-profile=search draws others.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=1_000)
hypothesis.settings.load_profile("same")

# Tiers that start servers of their own; their traffic is not only Python's, so the guard below would see half of it.
OTHER_TIERS = ("ray", "fault", "browser", "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --workload, so that the contract suite runs on a user's own file."""
    parser.addoption(
        "--workload",
        default=None,
        metavar="REF",
        help="the workload the contract suite tests: a name, a dotted module or a path to a .py file  [all of ours]",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives `workload_ref` what --workload names, as `workload_files.load` takes it, or each of ours."""
    if "workload_ref" in metafunc.fixturenames:
        from trainables.workload import BUILT_IN

        asked = metafunc.config.getoption("--workload")
        metafunc.parametrize("workload_ref", [asked] if asked else BUILT_IN, scope="module")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Has files whose tests may take longest, by their limits, begin first: what is left for the end is short.

    Each process of xdist begins with a share of those files; tests of a file stay together, for its fixtures.
    """
    limits: dict[Path, float] = {}
    for item in items:
        limit = item.get_closest_marker("timeout")
        limits[item.path] = max(limits.get(item.path, 0.0), float(limit.args[0]) if limit and limit.args else 0.0)
    jobs = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    longest = sorted(limits, key=lambda path: -limits[path])
    turn = {path: (place % jobs, place) for place, path in enumerate(longest)}
    items.sort(key=lambda item: turn[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leaves the modules and tests that are now loaded to no garbage collection: they stay until the end.

    Code under test collects on purpose, in each traced step for one, and went through a million objects each time.
    """
    gc.collect()
    gc.freeze()


def _ours() -> list[psutil.Process]:
    """Returns the processes that this run of tests started and that are there, but this one."""
    found = []
    for process in psutil.process_iter():
        try:
            there = process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid()
            if there and process.environ().get("CARDTUNE_TEST_SESSION") == SESSION:
                found.append(process)
        except psutil.Error:  # it ended meanwhile, or is somebody else's
            continue
    return found


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run where a process that a test started is left behind; says which, and ends it."""
    if hasattr(session.config, "workerinput"):  # xdist: its controller looks, after the workers have gone
        return
    _, left = psutil.wait_procs(_ours(), timeout=LEAVE_S)
    for process in left:
        with contextlib.suppress(psutil.Error):
            print(f"\nleft behind: {process.pid} {' '.join(process.cmdline())[:200]}")
            process.kill()
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def is_local(family: int, address: Any) -> bool:
    """Returns whether a socket address is on this machine: a Unix socket, localhost or a loopback IP."""
    if family not in (socket.AF_INET, socket.AF_INET6):
        return True
    host = str(address[0])
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@pytest.fixture(autouse=True)
def no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a default-tier test that connects to another machine, whatever the code under test does about errors."""
    if any(request.node.get_closest_marker(tier) for tier in OTHER_TIERS):
        return

    def guarded(name: str) -> Any:
        real = getattr(socket.socket, name)

        def call(self: socket.socket, address: Any) -> Any:
            if not is_local(self.family, address):
                pytest.fail(f"this test connects to {address!r}; tests reach this machine only")
            return real(self, address)

        return call

    monkeypatch.setattr(socket.socket, "connect", guarded("connect"))
    monkeypatch.setattr(socket.socket, "connect_ex", guarded("connect_ex"))
