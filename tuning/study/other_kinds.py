"""The kinds of device of a cluster beside the target: measured there, each on a node of its own, at the same time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tuning.config.cards import Card
from tuning.config.errors import TuningError
from tuning.config.schema import StudyConfig
from tuning.config.space import Space
from tuning.journal.device_kinds import OfKind
from tuning.journal.records import Journal, stage_done
from tuning.memory import groups
from tuning.memory.measure import LIMIT_S, MemoryStage
from tuning.report.format import rate
from tuning.search.other_kinds import OtherKind
from tuning.search.probe import ProbeStage
from tuning.search.throughput import probed
from tuning.study.limits import Limits
from tuning.workers.nodes import KindShare, Node
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig


class KindStudy:
    """What a study does with one other kind: estimates memory and probes on a node like `node`, then has trials there.

    `facts` is the study's record; `began` as `Limits` has it.
    """

    def __init__(
        self,
        config: StudyConfig,
        facts: Mapping[str, Any],
        journal: Journal,
        node: Node,
        setting: WorkerConfig,
        began: float,
    ) -> None:
        self.name, self.journal = node.kind, OfKind(journal, node.kind)
        self.why = ""
        """Why it could not be measured, "" where it trains."""
        self._config, self._node = config, node
        cores, threads = int(node.device["cores"]), int(node.device["threads"])
        own = {**facts, "device": dict(node.device)}
        devices = node.cards or 1
        if isinstance(config.concurrency, int):  # on a node with fewer cores than this machine
            config = config.model_copy(update={"concurrency": min(config.concurrency, cores)})
        self._limits = Limits(config, own, self.journal, began, node.room_bytes, devices, cores, threads)
        self.setting = replace(setting, threads=threads)
        self._error: Exception | None = None

    def measure(self, worker: Worker, space: Space) -> None:
        """Measures memory and speeds as the target's are, but that nothing is traced; keeps what went wrong."""
        if stage_done(self.journal.records, "probe"):  # in a session before this one
            return
        try:
            with worker:
                worker.deadline = self._limits.ends_at
                cap_bytes, cuda = self._limits.cap_bytes(), self._config.card.device == "cuda"
                if not any(r.get("asked") for r in self.journal.records if r.event == "study"):
                    limit_s = min(LIMIT_S, max(0.0, self._limits.left_s() / 5))
                    MemoryStage(worker, space, self.journal, cap_bytes, cuda=cuda).run(None, limit_s)
                budget = self._config.budget.probe.model_copy(update={"max_time_s": self._limits.probe_s()})
                learned = groups.guard(self.journal.records, cap_bytes)
                ProbeStage(worker, space, self.journal, learned, budget).run({}, lambda record: None)
            if self._limits.left_s() > 0:
                self.journal.append("stage", stage="probe", state="end")
        except TuningError as error:
            self.why = error.what
        except Exception as error:  # of ours: it is raised where the study waits for this thread
            self._error = error

    def settle(self) -> str:
        """Returns what was found, in a sentence; raises what failed in `measure` and is no fault of the kind."""
        if self._error is not None:
            raise self._error
        if self.why:
            return f"nothing is trained on {self.name}: {self.why}"
        found = probed(self.journal.records)
        fastest = max((one.samples_per_s for one in found), default=0.0)
        return f"{self.name} was measured too: {len(found)} probes, the fastest {rate(fastest)} samples/s"

    def share(self) -> KindShare:
        """Returns how trials run there."""
        plan = self._limits.plan()
        return KindShare(self.name, plan, replace(self.setting, slots=plan.concurrency))

    def other(self, space: Space) -> OtherKind:
        """Returns what the scheduler has to know of it."""
        plan = self._limits.plan()
        learned = groups.guard(self.journal.records, plan.alone_bytes or self._limits.cap_bytes())
        return OtherKind(self.journal, space, learned, self._card(), shrink=plan.shrink)

    def _card(self) -> Card:
        own, device = self._config.card, self._node.device
        capability = device.get("capability")
        return own.on(own.device, tuple(capability) if capability else None, int(device["cores"]))


@contextmanager
def beside(kinds: Sequence[tuple[KindStudy, Worker]], space: Space) -> Iterator[None]:
    """Measures kinds while the block does what it does; waits for them at its end, and ends them where it fails."""
    threads = [threading.Thread(target=kind.measure, args=(worker, space), daemon=True) for kind, worker in kinds]
    for thread in threads:
        thread.start()
    try:
        yield
    except BaseException:
        for _, worker in kinds:
            with contextlib.suppress(Exception):
                worker.__exit__()
        raise
    finally:
        for thread in threads:
            thread.join()
