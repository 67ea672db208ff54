"""A Ray cluster of several nodes on this machine, on loopback alone: what a test of `cluster=ADDRESS` joins.

    python -m tests.nodes

Each line of its input is a command in JSON, each line of its output the answer. `{"add": {"cpus": 1}}` starts a node
and tells the cluster's address; with `cores` it may use only so many, with `env` it has these variables too, it works
in `cwd` and offers `resources`. With `hide` these folders are empty in a mount namespace of its own, which takes root.
`{"kill": 1}` kills the second node; the answer tells how many are `alive`. All end when the input does.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

_RAY = """
import types
from ray.scripts import scripts

scripts.ray_constants = types.SimpleNamespace(**{**vars(scripts.ray_constants), "ENABLE_RAY_CLUSTER": True})
scripts.main()
"""
"""`ray`, which else starts no second node where its ports are on loopback alone."""
ROOT = Path(__file__).resolve().parent.parent


class Nodes:
    """The process that starts the nodes; ended with `with`. `token` is the cluster's, None for one without."""

    def __init__(self, token: str | None) -> None:
        # A path of sockets holds 107 bytes, so that the folder of a test is too long.
        self._folder = tempfile.TemporaryDirectory(prefix="ct-nodes-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        (folder / "ray").mkdir()  # where Ray writes which cluster of this machine `cluster=auto` means
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"RAY_TMPDIR": str(folder)}
        self.env |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        # A killed node is known as lost after some 5 s, not 20.
        self.env |= {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "2000"}
        self.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}
        self.errors = folder / "errors"
        with self.errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.nodes"],
                cwd=folder,
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.address = ""

    def ask(self, **command: Any) -> dict[str, Any]:
        """Returns the answer to a command."""
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, self.errors.read_text()[-2000:]
        found: dict[str, Any] = json.loads(answer)
        self.address = found["address"]
        return found

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._folder.cleanup()


def _started(cluster: Any, asked: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Returns `ray start` of a node to which some folders are empty, once the cluster has it."""
    empty = [f"mount -t tmpfs none {shlex.quote(folder)}" for folder in asked["hide"]]
    ray = f"{shlex.quote(sys.executable)} -c {shlex.quote(_RAY)} start --block --address={cluster.address}"
    ray += f" --node-ip-address={cluster.address.partition(':')[0]}"
    resources = shlex.quote(json.dumps(asked.get("resources", {})))
    line = " && ".join([*empty, f"exec {ray} --num-cpus={asked['cpus']} --resources={resources}"])
    before = len(cluster.global_state._live_node_ids())
    process = subprocess.Popen(["unshare", "--mount", "sh", "-c", line], stdin=subprocess.DEVNULL, stdout=sys.stderr)
    while len(cluster.global_state._live_node_ids()) == before:
        assert process.poll() is None, "it said why"
        threading.Event().wait(0.05)
    return process


def _serve() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr
    from ray.cluster_utils import Cluster

    cluster, started, usual = Cluster(), [], (os.sched_getaffinity(0), dict(os.environ), Path.cwd())
    apart: list[subprocess.Popen[bytes]] = []
    for text in sys.stdin:
        command = json.loads(text)
        if "kill" in command:
            cluster.remove_node(started[command["kill"]], allow_graceful=False)
        elif "add" in command:
            asked = command["add"]
            os.sched_setaffinity(0, sorted(usual[0])[: asked.get("cores", len(usual[0]))])
            os.environ.update(asked.get("env", {}))
            os.chdir(asked.get("cwd", usual[2]))
            more = {} if started else {"include_dashboard": False}
            if asked.get("hide"):
                apart.append(_started(cluster, asked))
            else:
                more |= {"resources": asked.get("resources", {})}
                started.append(cluster.add_node(num_cpus=asked["cpus"], **more))
            os.sched_setaffinity(0, usual[0])
            os.environ.clear()
            os.environ.update(usual[1])
            os.chdir(usual[2])
        alive = len(cluster.global_state._live_node_ids())
        print(json.dumps({"address": cluster.address, "alive": alive}), file=answers, flush=True)
    for process in apart:
        process.terminate()
        process.wait()
    cluster.shutdown()


if __name__ == "__main__":
    _serve()
