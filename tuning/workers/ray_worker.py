"""The inside of Ray's processes: the Trainable of search trials. Imports no torch: its worker is a child process."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psutil
from ray import tune

from trainables.knobs import Scalar
from tuning.config.errors import TuningError
from tuning.memory.oom import Outcome
from tuning.workers import doctor, machine, nvml
from tuning.workers.shipped import arrived
from tuning.workers.worker import Worker
from tuning.workers.worker_config import Description, WorkerConfig

REPORT = "report"


def described(config: WorkerConfig, knobs: Mapping[str, Scalar]) -> Description:
    """Returns what a worker says of itself on this node of a user's cluster, or why it cannot be loaded."""
    try:
        with Worker(arrived(config)) as worker:
            found = worker.describe(knobs)
        of_node = psutil.Process().parent() or psutil.Process()  # of Ray's: a task without a core has one thread
        device = {**found.device, "threads": machine.threads(of_node.environ())}
        free_bytes = map(doctor.free_bytes, nvml.gpus() if config.device == "cuda" else [])
        room_bytes = min(free_bytes, default=machine.available_bytes())
        return replace(found, device=device, torch=importlib.metadata.version("torch"), room_bytes=room_bytes)
    except TuningError as error:
        return Description(outcome=Outcome.CRASH, message=" ".join(error.what.split())[:300])


class TrialActor(tune.Trainable):
    """Runs a search trial at a time; every `step` goes to the next rung or pause. It lives as long as its slot.

    The config holds `worker`, a `WorkerConfig`, and `order`, a `TrialOrder`; `node` is that of a user's cluster, "" in
    a Ray of our own. The worker ends with the actor.
    """

    def setup(self, config: dict[str, Any]) -> None:
        """Keeps what the first trial is; loading is left to its first step, where a failure is a result."""
        worker = config["worker"]
        self._worker = Worker(arrived(worker) if config["node"] else worker)
        self._states = self._worker.trial(config["order"])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Ends what is left of the last trial and keeps the next."""
        self._states.close()
        self._states = self._worker.trial(new_config["order"])
        return True

    def step(self) -> dict[str, Any]:
        """Returns the state at the next rung or pause. Tune sees `done` and `samples`, never an exception."""
        found = next(self._states)
        return {"done": found.done, "samples": found.samples, REPORT: found}

    def cleanup(self) -> None:
        """Ends the worker when Tune ends the actor."""
        self._worker.end()
