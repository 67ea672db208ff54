"""A Ray cluster of the user's, joined because `cluster` says so, and left as it was found: only what is ours ends.

Ray takes none of the settings of a user's cluster when it joins. The token is the user's, where Ray looks for it.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainables.knobs import Scalar
from tuning.config.errors import ConfigError, PreflightError
from tuning.journal.events import Facts
from tuning.memory.oom import Outcome
from tuning.workers import SHIPPED_ENVIRONMENT, nvml, shipped
from tuning.workers.nodes import Node, kind_of_device, refusal
from tuning.workers.ray_cluster import keep_terminated
from tuning.workers.ray_measure import RemoteWorker
from tuning.workers.ray_worker import described
from tuning.workers.worker import HANG_TIMES
from tuning.workers.worker_config import Description, WorkerConfig

TOKEN = "the cluster's token in ~/.ray/auth_token, in the file RAY_AUTH_TOKEN_PATH, or as RAY_AUTH_TOKEN"  # noqa: S105
ANSWER_S, JOIN_S = 5.0, 60.0
"""The seconds that a port may take to answer, and a process to join or to be refused."""
_JOIN = """
import sys, ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
except Exception as error:
    print(error.__cause__ or "")
    print(" ".join(f"{type(error).__name__}: {error}".split()))
else:
    print("joined", flush=True)
    ray.shutdown()
"""
_JOINED = "joined"
_REFUSED = ("Unauthenticated", "InvalidAuthToken")


class JoinedCluster:
    """The cluster at `address` ("auto": Ray's own way of finding it), joined with `with`.

    `ref` is the workload on its nodes, once joined. A cluster that lets in everybody is refused, unless `insecure`.
    Raises ConfigError where it cannot be joined, or where the workload cannot travel.
    """

    def __init__(self, address: str, ref: str, leave_out: Path, *, insecure: bool) -> None:
        self._address, self._leave_out, self._insecure = address, leave_out, insecure
        self.ref = ref
        self.nodes: list[Node] = []
        """Every node with cores, once it was checked."""
        self.here = ""
        """The kind of the machine of the run, known once the nodes were checked."""
        self._known: list[Node] = []
        """This machine and the nodes whose kind is known."""
        self._target = ""
        self._ask: Callable[[str], Any] | None = None
        self._asked: dict[Any, _Question] = {}
        self._seen: set[str] = set()

    def __enter__(self) -> JoinedCluster:
        self._require_someone()
        self._try()
        terminated = signal.getsignal(signal.SIGTERM)
        with tempfile.TemporaryDirectory(prefix=f"ct-{os.getpid()}-", ignore_cleanup_errors=True) as folder:
            self.ref = shipped.stage(self.ref, Path(folder), self._leave_out)
            # A job that was submitted with an environment of its own keeps it, as far as ours does not say otherwise.
            os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
            shipping = {"working_dir": folder, "env_vars": {n: os.environ[n] for n in SHIPPED_ENVIRONMENT}}
            try:
                ray.init(
                    address=self._address,
                    runtime_env=shipping,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    configure_logging=False,
                )
            except Exception as error:  # of a node that does not come up Ray raises just that
                raise self._failed(" ".join(f"{type(error).__name__}: {error}".split())) from error
        keep_terminated(terminated)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ray.shutdown()  # ends the job, and with it our actors

    @property
    def training(self) -> list[Node]:
        """Returns the nodes that trials run on."""
        return [node for node in self.nodes if not node.why]

    def left_out(self, node: Node) -> None:
        """Takes that nothing trains any more on a node, whose `why` says why."""
        self.nodes = [node if one.id == node.id else one for one in self.nodes]

    def alive(self) -> list[Node]:
        """Returns the nodes that trials run on, as far as they are there now."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return [node for node in self.training if node.id in alive]

    def worker(self, config: WorkerConfig, warn: Callable[[str], None]) -> RemoteWorker:
        """Returns a worker that measures on a node that trials run on."""
        return RemoteWorker(replace(config, workload=self.ref), self.alive, warn)

    def choose_target(self, asked: str | None) -> str:
        """Returns the kind of device that the study is about; nodes of another kind are left out from here on.

        It is the kind that was asked for, else this machine's if a node of that kind trains, else the kind with most
        devices. Raises ConfigError if no node that can train is of the kind that was asked for.
        """
        devices: Counter[str] = Counter()
        for node in self.training:
            devices[node.kind] += node.cards or 1
        names = sorted(devices, key=lambda kind: (kind != self.here, -devices[kind], kind))
        if asked is not None and asked not in devices:
            what = f"target={asked}: no node of the cluster at {self._address} that can train is of that kind"
            raise ConfigError(what, allowed=", ".join(names), remedy=f"target={names[0]}")
        self._target = asked or names[0]
        self.nodes = [self._compared(node) for node in self.nodes]
        return self._target

    def check(self, config: WorkerConfig, facts: Description, knobs: Mapping[str, Scalar], limit_s: float) -> None:
        """Loads the workload once on each node, and compares what that is with `facts`, of the machine of the run.

        It may take as long as loading here, and a quarter of `limit_s`, the seconds of the whole study. Raises
        PreflightError if no node may train.
        """
        cuda = config.device == "cuda"
        self._timeout_s, self._resource = min(HANG_TIMES * config.hang_s, limit_s / 4), "GPU" if cuda else "CPU"
        self._here = replace(facts, torch=importlib.metadata.version("torch"))
        own = ray.get_runtime_context().get_node_id()
        marks = next((_marks(node) for node in ray.nodes() if node["NodeID"] == own), ())
        cards = len(nvml.gpus()) if cuda else None
        self.here = self._of_its_kind(Node(own, "", 0.0, facts.device, cards=cards, marks=marks)).kind
        config = replace(config, workload=self.ref)

        def ask(node: str) -> Any:
            pinned = NodeAffinitySchedulingStrategy(node, soft=False)
            asked = _described.options(scheduling_strategy=pinned, num_gpus=0.001 if cuda else 0)
            return asked.remote(config, dict(knobs))

        self._ask = ask
        self._begin()
        ray.wait(list(self._asked), num_returns=len(self._asked), timeout=self._timeout_s) if self._asked else None
        self._ended()
        if not self.training:
            why = "; ".join(f"{node.name}: {node.why}" for node in self.nodes) or "no node has a core to give"
            raise PreflightError(
                f"cluster={self._address}: no node can train what this machine does: {why}",
                remedy="mend what it says, or leave out cluster= to train here alone",
            )

    def newcomers(self) -> list[Node]:
        """Returns the nodes that have joined since `check`, each once it is known what it is."""
        self._begin()
        return self._ended()

    def _begin(self) -> None:
        """Asks each node that was not asked yet what it is; the answer takes as long as loading the workload there."""
        if self._ask is None:
            return
        for node in ray.nodes():
            if node["Alive"] and node["Resources"].get(self._resource, 0) >= 1 and node["NodeID"] not in self._seen:
                self._seen.add(node["NodeID"])
                self._asked[self._ask(node["NodeID"])] = _Question(node, time.monotonic() + self._timeout_s)

    def _ended(self) -> list[Node]:
        """Returns the nodes that have answered or have had their time, among `nodes` from now on."""
        if not self._asked:
            return []
        answered, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        late = [ref for ref, question in self._asked.items() if time.monotonic() >= question.until]
        found = [
            self._found(self._asked.pop(ref).node, _answer(ref, self._timeout_s))
            for ref in dict.fromkeys([*answered, *late])
        ]
        self.nodes += found
        return found

    def _found(self, raw: Facts, there: Description) -> Node:
        """Returns a node, with its kind and whether trials may run on it, from what Ray and a worker say of it."""
        node = Node(
            id=raw["NodeID"],
            address=raw["NodeManagerAddress"],
            cores=float(raw["Resources"].get("CPU", 0)),
            device=there.device,
            why=refusal(self._here, there),
            cards=int(raw["Resources"].get("GPU", 0)) if self._resource == "GPU" else None,
            room_bytes=there.room_bytes,
            marks=_marks(raw),
        )
        return node if node.why else self._compared(self._of_its_kind(node))

    def _of_its_kind(self, node: Node) -> Node:
        """Returns a node with the name of its kind, which other nodes are compared with from here on."""
        self._known.append(replace(node, kind=kind_of_device(node, self._known)))
        return self._known[-1]

    def _compared(self, node: Node) -> Node:
        """Returns a node; its `why` says so if it is of another kind than the target."""
        if node.why or self._target in ("", node.kind):
            return node
        return replace(node, why=f"it is of another kind, {node.kind}, than the target, {self._target}")

    def _require_someone(self) -> None:
        """Raises ConfigError where nobody answers at an address; whether it is Ray is seen later."""
        host, _, port = self._address.rpartition(":")
        if not host:
            return
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
        except OSError as error:
            raise self._nobody() from error

    def _try(self) -> None:
        """Raises ConfigError where joining fails, or succeeds without a token.

        Processes of their own try it: Ray reads once a process how it authenticates, and says itself what is wrong.
        """
        tries = 1 if self._insecure else 2
        # As a part of the job that was submitted, where one was, they would take its folder with them as they end.
        env = {k: v for k, v in os.environ.items() if k != "RAY_JOB_CONFIG_JSON_ENV_VAR"}
        env |= {"RAY_NUM_REDIS_GET_RETRIES": "1", "RAY_BACKEND_LOG_LEVEL": "warning"}
        without = {**{k: v for k, v in env.items() if not k.startswith("RAY_AUTH")}, "RAY_AUTH_MODE": "disabled"}
        command = [sys.executable, "-P", "-c", _JOIN, self._address]
        with ExitStack() as stack:
            started = []
            for one in (env, without)[:tries]:
                pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
                started.append(stack.enter_context(subprocess.Popen(command, env=one, text=True, **pipes)))
                stack.callback(started[-1].kill)
            try:
                said = [process.communicate(timeout=JOIN_S)[0] for process in started]
            except subprocess.TimeoutExpired as error:
                raise self._nobody() from error
        if not self._insecure and _JOINED in said[-1].splitlines():
            raise ConfigError(
                f"cluster={self._address} lets in everybody who reaches it, to run what they like",
                allowed="a cluster that asks for a token: RAY_AUTH_MODE=token where `ray start` runs",
                remedy="insecure_cluster=true where you alone reach it",
            )
        if _JOINED not in said[0].splitlines():
            raise self._failed(said[0])

    def _failed(self, said: str) -> ConfigError:
        """Returns what is told where joining failed."""
        if "no authentication token was found" in said:
            return ConfigError(f"cluster={self._address} asks for a token, and there is none here", remedy=TOKEN)
        if any(word in said for word in _REFUSED):
            token = "the token that is here" if not self._insecure else "anybody without its token"
            remedy = TOKEN if not self._insecure else f"leave out insecure_cluster=true, and have {TOKEN}"
            return ConfigError(f"cluster={self._address} does not take {token}", remedy=remedy)
        if "Could not find any running Ray instance" in said or "waiting for GCS" in said:
            return self._nobody()
        last = said.strip().rpartition("\n")[2]
        return ConfigError(f"cluster={self._address} cannot be joined: {last[:300]}", remedy="-v shows all of it")

    def _nobody(self) -> ConfigError:
        return ConfigError(
            f"cluster={self._address}: no Ray cluster answers there",
            remedy="the address that `ray start --head` has printed, HOST:6379; this machine must be one of its nodes",
        )


@dataclass(frozen=True)
class _Question:
    """A node, as Ray describes it, that was asked what it is, and until when it may answer."""

    node: Facts
    until: float


@ray.remote(num_cpus=0, max_retries=0)
def _described(config: WorkerConfig, knobs: dict[str, Scalar]) -> Description:
    return described(config, knobs)


def _answer(ref: Any, timeout_s: float) -> Description:
    """Returns what a node says of itself, or why it does not."""
    try:
        found: Description = ray.get(ref, timeout=0)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(ref, force=True)
        return Description(outcome=Outcome.TIMEOUT, message=f"it did not answer for {timeout_s:.0f} s")
    except ray.exceptions.RayError as error:
        return Description(outcome=Outcome.KILLED, message=str(error).strip().splitlines()[-1][:300])
    return found


def _marks(raw: Facts) -> tuple[str, ...]:
    """Returns the custom resources by which a person tells kinds apart, such as `kind_a` of `ray start --resources`."""
    return tuple(sorted(name for name in raw["Resources"] if name.startswith("kind_")))
