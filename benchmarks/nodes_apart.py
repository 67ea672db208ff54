"""A Ray cluster on this machine whose nodes have networks and processes of their own, so that one can be lost as a
machine is.

    with Cluster(folder) as cluster:    # inside `APART`: see `benchmarks.lost_nodes`
        cluster.restore()

The head has no cores: a study leads on it, at `HEAD`. A node has one core, and reaches the head over a bridge. To kill
a node ends all its processes at once. To cut one off takes its link down, for good; what runs there goes on until
`restore`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
HEAD = "10.77.0.1:6379"
APART = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Begins a command in a network and a process namespace of its own; takes root. Kill it, and all within is killed."""
_SECONDS = 90.0
_RAY = """
import subprocess, sys
if "--head" not in sys.argv:
    subprocess.run(["mount", "-t", "tmpfs", "none", {folder!r}], check=True)
print("apart", flush=True)
sys.stdin.readline()
from ray.scripts.scripts import main
main()
"""
"""`ray`, once its network is there. Nodes do not see the head's files, nor each other's."""


@dataclass
class Node:
    """A node, or the head: its address, the process under which all of it runs, and what it says."""

    address: str
    process: subprocess.Popen[str]
    log: Path
    is_cut: bool = False

    def wait(self, words: str = "Ray runtime started") -> None:
        """Returns once it has said so; raises RuntimeError where it does not."""
        until = time.monotonic() + _SECONDS
        while words not in (said := self.log.read_text(encoding="utf-8")):
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self.address} did not start: {said[-1000:]}")
            time.sleep(0.02)


class Cluster:
    """The head and its nodes, started and ended with `with`; `env` is for those who join, `health` for Ray's checks."""

    def __init__(self, folder: Path, health: Mapping[str, str]) -> None:
        self._folder, self._count = folder, 0
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.env |= {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT), **health}
        self.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.nodes: list[Node] = []

    def __enter__(self) -> Cluster:
        for line in ("link set lo up", "link add ct0 type bridge", "addr add 10.77.0.1/24 dev ct0", "link set ct0 up"):
            _ip(line)
        _ip("route add default dev ct0")  # by it Ray finds its own address
        self.head = self._started((), ("--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false"))
        self.head.wait()
        return self

    def __exit__(self, *_: object) -> None:
        for node in (*self.nodes, self.head):
            _end(node)

    @property
    def alive(self) -> list[Node]:
        """Returns the nodes that were neither killed nor cut off; one may still be starting."""
        return [node for node in self.nodes if not node.is_cut]

    def add(self) -> Node:
        """Returns a node of one core that has begun to start."""
        node = self._started(APART, (f"--address={HEAD}", "--num-cpus=1"))
        self.nodes.append(node)
        return node

    def kill(self, node: Node) -> None:
        """Ends all processes of a node at once."""
        _end(node)
        self.nodes.remove(node)

    def cut(self, node: Node) -> None:
        """Takes a node's link down."""
        _ip(f"link set ct{node.address.rpartition('.')[2]} down")
        node.is_cut = True

    def restore(self) -> None:
        """Ends what was cut off and what is too much; returns with two nodes."""
        for node in [*(n for n in self.nodes if n.is_cut), *self.alive[2:]]:
            self.kill(node)
        while len(self.nodes) < 2:
            self.add()
        for node in self.nodes:
            node.wait()

    def busy(self) -> list[psutil.Process]:
        """Returns the processes on nodes that are there in which Ray runs something, and our workers."""
        return [p for node in self.alive for p in _family(node) if _is_busy(p)]

    def strangers(self) -> list[psutil.Process]:
        """Returns the processes beside this one and the cluster's: at first the study's, at last what it has left."""
        cluster = (self.head, *self.nodes)
        own = {os.getpid(), *(n.process.pid for n in cluster), *(p.pid for n in cluster for p in _family(n))}
        return [p for p in psutil.process_iter() if p.pid not in own and said_by(p)]

    def _started(self, apart: Sequence[str], arguments: Sequence[str]) -> Node:
        self._count += 1
        number = self._count
        address, log = f"10.77.0.{number}", self._folder / f"node{number}"
        ray = [sys.executable, "-c", _RAY.format(folder=str(self._folder)), "start", "--block", *arguments]
        command = [*apart, *ray, f"--node-ip-address={address}"]
        with log.open("w", encoding="utf-8") as out:
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": out, "stderr": subprocess.STDOUT, "text": True}
            node = Node(address, subprocess.Popen(command, cwd="/", env=self.env, **pipes), log)
        node.wait("apart")
        if apart:
            _ip(f"link add ct{number} type veth peer name eth0 netns {node.process.pid}")
            _ip(f"link set ct{number} master ct0 up")
            within = ("link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up")
            for line in (*within, "route add default dev eth0"):
                _ip(line, within=node.process.pid)
        if node.process.stdin is not None:
            node.process.stdin.write("\n")
            node.process.stdin.flush()
        return node


def _ip(line: str, within: int | None = None) -> None:
    """Runs `ip` here, or in the network of a process."""
    at = [] if within is None else ["nsenter", "-t", str(within), "-n"]
    subprocess.run([*at, "ip", *line.split()], check=True)


def _end(node: Node) -> None:
    node.process.kill()
    node.process.wait()


def _family(node: Node) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(node.process.pid).children(recursive=True)
    return []


def said_by(process: psutil.Process) -> str:
    """Returns the command of a process, "" where it has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _is_busy(process: psutil.Process) -> bool:
    """Returns whether a process is a worker of ours, or Ray's for us: neither an idle one nor an agent of Ray's own."""
    said = said_by(process)
    return "tuning.workers" in said or (said.startswith("ray::") and not any(w in said for w in ("IDLE", "Agent")))
