"""Ray Tune for the search trials of several slots: one actor a slot, each with a worker of its own.

On a user's cluster each trial is asked for on one node, so that it is known what a node's loss has cost.

Public API only. A Tune searcher and a Tune scheduler that only ask the dispatcher; a Stopper is not needed, since the
study's scheduler ends the search by having no next trial.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import ray
from ray import tune
from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tuning.config.errors import StoppedEarly, TuningError
from tuning.memory.oom import Outcome
from tuning.search.protocols import Scheduler, TrialPlan, TrialState
from tuning.workers.dispatch import Dispatcher, Placed
from tuning.workers.nodes import Node, Slots, ToldNode, refusal
from tuning.workers.ray_board import RayBoard
from tuning.workers.ray_cluster import RayCluster
from tuning.workers.ray_join import JoinedCluster
from tuning.workers.ray_worker import REPORT, TrialActor
from tuning.workers.worker_config import Description, WorkerConfig

__all__ = ["JoinedCluster", "RayBoard", "RayCluster", "RayExecutor"]
NO_LIMIT = 1_000_000_000
SNAPSHOT_PERIOD = "TUNE_GLOBAL_CHECKPOINT_S"
LOOK_S, GONE_S = 2.0, 60.0
"""How often the nodes of a cluster are looked at, and how long one is waited for whose actor was lost.

Ray counts a node that is cut off as lost after about 30 s.
"""
_LEFT_OUT = "is left out"


class RayExecutor:
    """Runs the search trials with Ray Tune: one actor a slot, reused from trial to trial.

    With a `cluster` of the user's they run on its nodes; `told` hears of each that joins while trials run.
    """

    def __init__(
        self,
        config: WorkerConfig,
        name: str,
        cluster: JoinedCluster | None = None,
        told: ToldNode | None = None,
    ) -> None:
        self._config, self._name, self._cluster = config, name, cluster
        self._told: ToldNode = told or (lambda node: None)

    def run(self, scheduler: Scheduler, plan: TrialPlan) -> None:
        """Returns when the scheduler has no next trial and every trial has ended; `plan` is that of one machine."""
        nodes = self._cluster.training if self._cluster is not None else None
        resources = requested(plan, self._config, nodes)
        members = None
        if self._cluster is not None:
            members = _Members(self._cluster, plan, resources["CPU"], self._told)
            plan = members.plan
        asking = _Asking(Dispatcher(scheduler, plan, self._config.cap_bytes), self._config, members)
        with tempfile.TemporaryDirectory(prefix=f"ct-{os.getpid()}-", ignore_cleanup_errors=True) as folder:
            tuner = tune.Tuner(
                _named(self._name, resources),
                tune_config=tune.TuneConfig(
                    search_alg=asking,
                    scheduler=_Deciding(asking),
                    num_samples=NO_LIMIT,
                    max_concurrent_trials=NO_LIMIT,  # the dispatcher counts: nodes may join
                    reuse_actors=True,
                    trial_name_creator=_trial_name,
                    trial_dirname_creator=lambda trial: str(trial.trial_id),  # one for each time a trial is run
                ),
                run_config=tune.RunConfig(
                    name=self._name,
                    storage_path=folder,
                    verbose=0,
                    failure_config=tune.FailureConfig(max_failures=0),  # only a lost actor fails; see Dispatcher.ended
                    checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
                ),
            )
            # Tune would say of each trial that its own log files, which we switch off, are not there, and at the end
            # which were lost, though they were run once more.
            logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
            try:
                with _without_snapshots():
                    tuner.fit()
            except (ray.exceptions.RayError, RuntimeError, StoppedEarly) as error:
                if asking.failed is not None:
                    raise asking.failed from None
                raise StoppedEarly(f"Ray ended the search: {error}"[:400], remedy="go on with resume=") from error
        if asking.failed is not None:
            raise asking.failed


def requested(plan: TrialPlan, config: WorkerConfig, nodes: Sequence[Node] | None) -> dict[str, float]:
    """Returns what every actor asks of Ray, whatever its trials are given, so that any can take the next.

    `plan` is that of one machine. `nodes` are those of a user's cluster, each with cores of its own, and fewer of them
    to give than it may have; None for a Ray of ours.
    """
    if nodes is not None:
        least = min((node.cores for node in nodes), default=1.0)
        resources = {"CPU": math.floor(1000 * least / plan.concurrency) / 1000}
    else:
        resources = {"CPU": float(max(1, int(ray.cluster_resources().get("CPU", 1)) // plan.concurrency))}
    if config.device == "cuda":
        a_device = math.ceil(plan.concurrency / plan.devices)
        resources["GPU"] = config.ranks * math.floor(1000 / a_device) / 1000
    return resources


class _Members:
    """The nodes of a user's cluster while trials run there: which are lost, which have joined, what a slot of each is.

    `plan` is that of one machine, `cores` what Ray is asked for by a slot; `told` hears of each node that has joined.
    """

    def __init__(self, cluster: JoinedCluster, plan: TrialPlan, cores: float, told: ToldNode) -> None:
        self.slots = Slots(cluster.training, plan.deadline)
        self._cluster, self._plan, self._told = cluster, plan, told
        self._cores = cores * plan.concurrency
        self._look_at = 0.0

    @property
    def plan(self) -> TrialPlan:
        """Returns the plan for the nodes that are there."""
        return self._plan.on_nodes(self.slots.machines)

    def leave_out(self, node: Node, fault: str) -> bool:
        """Takes that no process can load the workload on a node any more; returns False if no other node is left."""
        if not self.slots.has(node):
            return True
        if self.slots.machines == 1:
            return False
        gone = Description(outcome=Outcome.CRASH, message=" ".join(fault.split())[:300])
        left = replace(node, why=refusal(gone, gone))
        self.slots.leave_out(left)
        self._cluster.left_out(left)
        self._told(left)
        return True

    def look(self) -> bool:
        """Returns whether the nodes have changed, looking at most every `LOOK_S`.

        Raises StoppedEarly where none is left, and none has joined.
        """
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_S
        joined = []
        for node in self._cluster.newcomers():
            if not node.why and node.cores < self._cores:
                why = f"Ray gives away {node.cores:g} of its cores, and the slots of a node take {self._cores:g}"
                node = replace(node, why=why)
            self._told(node)
            joined += [] if node.why else [node]
        return self.slots.look((n["NodeID"] for n in ray.nodes() if n["Alive"]), joined, now)


@dataclass
class _Doubt:
    """A trial whose actor was lost: Ray hears some seconds later whether its node was. `asked` is to answer from there.

    If it answers, the node is there; a doubt that is not settled by `until` is the actor's own fault.
    """

    placed: Placed
    node: Node
    asked: Any
    until: float


class _Asking(Searcher):
    """A Tune searcher that passes on the scheduler's trials where there is room, and tells it how they ended.

    `worker` is what the actors are told of their workers; `members` are the nodes of a user's cluster, None in a Ray of
    our own.
    """

    def __init__(self, dispatcher: Dispatcher, worker: WorkerConfig, members: _Members | None) -> None:
        super().__init__(metric="samples", mode="max")
        self._worker, self._members = worker, members
        self._dispatcher: Dispatcher | None = dispatcher
        self._placed: dict[str, Placed] = {}
        self._doubts: dict[str, _Doubt] = {}
        self.failed: TuningError | None = None
        """An exception of the scheduler, such as a full disk; Tune would wrap it in a traceback of its own."""

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        is_empty = False
        if self.failed is None and self._dispatcher is not None:
            try:
                self._attend()
                apart = self._members.slots.stranded() if self._members is not None else set()
                if (placed := self._dispatcher.take(sum(run in apart for run in self._placed))) is not None:
                    self._placed[trial_id] = placed
                    node = self._members.slots.take(trial_id) if self._members is not None else ""
                    return {"worker": self._worker, "order": self._dispatcher.order(placed), "node": node}
                is_empty = self._members is not None and self._members.slots.is_empty
            except TuningError as error:
                self.failed = error
        if self.failed is not None:  # what still waits is ended by `stranded`
            return Searcher.FINISHED
        # Not the end while trials run: one of them may have to begin again.
        return None if self._placed or self._doubts or is_empty else Searcher.FINISHED

    def goes_on(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Returns what the dispatcher says of a trial's state."""
        placed = self._placed.get(trial_id)
        if self.failed is not None or self._dispatcher is None or placed is None:
            return False
        try:
            return self._dispatcher.goes_on(placed, result[REPORT])
        except TuningError as error:
            self.failed = error
            return False

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        placed = self._placed.pop(trial_id, None)
        if placed is None or self.failed is not None or self._dispatcher is None:
            return
        found: TrialState | None = None if error or not result or REPORT not in result else result[REPORT]
        node = self._members.slots.at(trial_id) if self._members is not None else None
        if found is None and node is not None:
            self._doubts[trial_id] = _Doubt(placed, node, _ask(node), time.monotonic() + GONE_S)
            return
        try:
            if node is not None and found is not None and self._members is not None:
                self._members.slots.free(trial_id)
                if found.elsewhere and self._members.leave_out(node, found.fatal):
                    self._dispatcher.replan(self._members.plan)
                    self._dispatcher.node_lost(placed, node.name, _LEFT_OUT, found)
                    return
                found = replace(found, node=node.name)
            self._dispatcher.ended(placed, found)
        except TuningError as failure:
            self.failed = failure

    def stranded(self) -> set[str]:
        """Returns the trials whose node is lost.

        Raises what has failed, such as StoppedEarly where no node is left: a trial that waits for one would not end.
        """
        if self._members is None or self._dispatcher is None:
            return set()
        if self.failed is None:
            try:
                self._attend()
            except TuningError as error:
                self.failed = error
        if self.failed is not None:
            raise self.failed
        return self._members.slots.stranded()

    def _attend(self) -> None:
        """Looks which nodes are there, and settles what became of the trials whose actors were lost."""
        if self._members is None or self._dispatcher is None:
            return
        if self._members.look():
            self._dispatcher.replan(self._members.plan)
        for run, doubt in list(self._doubts.items()):
            is_gone = not self._members.slots.has(doubt.node)
            if not is_gone and not _answers(doubt) and time.monotonic() < doubt.until:
                continue
            del self._doubts[run]
            node = self._members.slots.free(run)
            if is_gone:
                how = _LEFT_OUT if node is not None and node.why else "was lost"
                self._dispatcher.node_lost(doubt.placed, doubt.node.name, how)
            else:
                self._dispatcher.ended(doubt.placed, None)

    def save(self, checkpoint_path: str) -> None:
        """Writes nothing: a study is resumed from its own records, never from Tune's."""

    def restore(self, checkpoint_path: str) -> None:
        """Reads nothing, for the same reason."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dispatcher": None, "_members": None, "_placed": {}, "_doubts": {}}


class _Deciding(FIFOScheduler):
    """A Tune scheduler that asks the dispatcher at every rung, and at every pause between them.

    At every step of Tune's it looks which nodes are left: a trial that waits for one that is lost would wait for ever.
    """

    _supports_buffered_results = False

    def __init__(self, asking: _Asking) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._asking: _Asking | None = asking

    def on_trial_result(self, tune_controller: Any, trial: TuneTrial, result: dict[str, Any]) -> str:
        if result.get("done") or self._asking is None or self._asking.goes_on(trial.trial_id, result):
            return str(TrialScheduler.CONTINUE)
        return str(TrialScheduler.STOP)

    def choose_trial_to_run(self, tune_controller: Any) -> TuneTrial | None:
        """Returns the next trial that is there; ends those that wait in vain, so that they are run elsewhere."""
        stranded = self._asking.stranded() if self._asking is not None else set()
        for trial in tune_controller.get_trials() if stranded else ():
            if trial.trial_id in stranded and trial.status == TuneTrial.PENDING:
                tune_controller.stop_trial(trial)
        return super().choose_trial_to_run(tune_controller)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_asking": None}


@ray.remote(num_cpus=0, max_retries=0)
def _answer() -> None:
    """Returns nothing, which tells that its node is there."""


def _ask(node: Node) -> Any:
    return _answer.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote()


def _answers(doubt: _Doubt) -> bool:
    """Returns whether the node has answered; asks it again where that failed."""
    if ray.wait([doubt.asked], timeout=0)[0]:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(doubt.asked)
            return True
        doubt.asked = _ask(doubt.node)
    return False


@contextlib.contextmanager
def _without_snapshots() -> Iterator[None]:
    """Turns off Tune's snapshots of the experiment while trials run; each pauses the driver for 0.1 s and more."""
    is_ours = SNAPSHOT_PERIOD not in os.environ
    os.environ.setdefault(SNAPSHOT_PERIOD, "1e9")  # seconds; a study is resumed from its own journal
    try:
        yield
    finally:
        if is_ours:
            del os.environ[SNAPSHOT_PERIOD]


def _named(name: str, resources: dict[str, float]) -> type[TrialActor]:
    """Returns the trainable under a name that says in Ray's dashboard what its actors do; each is given `resources`.

    `tune.with_resources` would do the second, and call every actor ResourceTrainable.
    """

    def request(cls: type[TrialActor], config: dict[str, Any]) -> tune.PlacementGroupFactory:
        on: Any = {"bundle_label_selector": [{"ray.io/node-id": config["node"]}]} if config.get("node") else {}
        return tune.PlacementGroupFactory([resources], **on)

    members = {"default_resource_request": classmethod(request)}
    return cast(type[TrialActor], type(name, (TrialActor,), members))


def _trial_name(trial: TuneTrial) -> str:
    """Returns the study's own name of the trial with the knobs most looked for."""
    order = trial.config.get("order")
    if order is None:
        return str(trial.trial_id)
    knobs = order.knobs
    parts = [f"bs{knobs['batch_size']}"] if "batch_size" in knobs else []
    parts += [f"lr{knobs['learning_rate']:.1e}"] if "learning_rate" in knobs else []
    return "-".join([str(order.trial), *parts])
