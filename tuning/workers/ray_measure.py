"""A worker that measures on a node of a user's cluster: a plain actor there holds a `Worker`, this handle asks it."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trainables.knobs import Scalar
from tuning.config.errors import StoppedEarly
from tuning.journal.events import WorkerAnswer
from tuning.search.protocols import TrialState
from tuning.workers.nodes import Node
from tuning.workers.shipped import arrived
from tuning.workers.worker import AnswerT, Asked, Worker
from tuning.workers.worker_config import WorkerConfig

MOST_LOSSES = 2
"""After so many losses a node is not asked again."""
ANSWER_S = 60.0
"""How long after its limit a node may answer: by then its worker has cut what it measures, or it is cut off."""


class RemoteWorker(Worker):
    """A `Worker` on the first of `nodes` that is there, for measurements alone; `end` ends its process.

    If its node is lost, the measurement is made once more on the next. Raises StoppedEarly if none is left, and what a
    worker of this machine would raise.
    """

    def __init__(
        self, config: WorkerConfig, nodes: Callable[[], Sequence[Node]], warn: Callable[[str], None] = lambda text: None
    ) -> None:
        super().__init__(config, warn)
        self._nodes = nodes
        self._actor: Any = None
        self._node = Node("", "", 0.0)
        self._losses: Counter[str] = Counter()

    def start(self) -> None:
        """Starts the actor where there is none; raises StoppedEarly where no node is left."""
        if self._actor is not None:
            return
        left = [node for node in self._nodes() if self._losses[node.id] < MOST_LOSSES]
        if not left:
            raise StoppedEarly("no node that can measure is left", remedy="go on with resume=, once one is")
        self._node = left[0]
        pinned = NodeAffinitySchedulingStrategy(self._node.id, soft=False)
        share = 0.001 if self.config.device == "cuda" else 0
        made = ray.remote(_Bench).options(scheduling_strategy=pinned, num_cpus=0, num_gpus=share)
        self._actor = made.remote(self.config)

    def end(self) -> None:
        """Ends the actor, and its worker's process with it."""
        actor, self._actor = self._actor, None
        if actor is not None:
            ray.kill(actor)

    def train(
        self, knobs: Mapping[str, Scalar], samples: int, milestones: Sequence[int], seed: int, left_s: float = math.inf
    ) -> TrialState:
        """Returns `Worker.train` of that node."""
        return self._there(TrialState, "train", dict(knobs), samples, list(milestones), seed, left_s)

    def _measured(self, kind: type[AnswerT], method: str, *arguments: Any, expected_s: float = 0.0) -> AnswerT:
        return self._there(kind, method, *arguments)

    def _there(self, kind: type[AnswerT], method: str, *arguments: Any) -> AnswerT:
        while True:
            self.start()
            left_s = None if self.deadline is None else self.deadline - time.monotonic()
            self.asked = Asked(method, arguments[0])
            try:
                until_s = None if left_s is None or math.isinf(left_s) else max(0.0, left_s) + ANSWER_S
                found: AnswerT = ray.get(self._actor.ask.remote(method, left_s, *arguments), timeout=until_s)
                return found
            except ray.exceptions.RayTaskError as error:  # what a worker of this machine would have raised
                raise error.cause from None
            except ray.exceptions.RayError as error:
                said = str(error).strip().splitlines()[-1][:200]
                self.warn(f"{self._node.name} was lost: {said}; what it measured is measured once more")
                self._losses[self._node.id] += 1
                self.end()
            finally:
                self.asked = Asked("", self.asked.knobs)


class _Bench:
    """An actor on the node: a worker that measures."""

    def __init__(self, config: WorkerConfig) -> None:
        self._worker = Worker(arrived(config))

    def ask(self, method: str, left_s: float | None, *arguments: Any) -> WorkerAnswer:
        """Returns what the worker's method does, which has `left_s` seconds where there is a limit."""
        self._worker.deadline = None if left_s is None else time.monotonic() + left_s
        found: WorkerAnswer = getattr(self._worker, method)(*arguments)
        return found
