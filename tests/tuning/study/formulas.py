"""A study whose speed, memory and quality are formulas: its stages run in one process, without Ray or a worker."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FormulaProfiler
from tests.own_files import Here
from trainables.knobs import Scalar
from tuning.cli.terminal import Terminal
from tuning.config import load
from tuning.config.schema import StudyConfig
from tuning.journal.records import Journal
from tuning.journal.run import History
from tuning.search.protocols import TrialPlan, TrialRequest, TrialState
from tuning.search.scheduler import TrialScheduler
from tuning.study import setup, study
from tuning.workers import executors
from tuning.workers.worker_config import ChangedKnobs, Description

FACTS = Description(
    outcome="ok",
    device={"name": "Example CPU", "type": "cpu", "memory_bytes": 2**34},
    objectives={"error": "min"},
    train_samples=100,
    val_samples=10,
    workload_sha256="w",
    data_sha256="d",
)
SMALL = ("knobs.batch_size=[16,32,64]", "knobs.micro_batch_size=[16,32,64]", "knobs.amp_dtype=fp32")


class Learning(FormulaProfiler):
    """A profiler whose error is a formula of batch and learning rate; any batch but 32 `spoils` it by so much."""

    ooms_above = math.inf
    """The micro-batch above which a trial runs out of memory, and goes on with half of it."""

    def __init__(self, spoils: float = 0.0, drifts: bool = True, cap_bytes: int | None = None) -> None:
        super().__init__(cap_bytes)
        self.spoils, self.drifts = spoils, drifts

    def kinds(self, knobs: Mapping[str, Scalar], changes: Mapping[str, Scalar]) -> ChangedKnobs:
        """Returns that nothing changes what is learned."""
        return ChangedKnobs(outcome="ok")

    def micro_step_s(self, knobs: Mapping[str, Scalar]) -> float:
        """Returns what makes large batches faster by far; processes of the loader save time if it `drifts`."""
        workers = {} if self.drifts else {"num_workers": 0}
        return 0.05 + super().micro_step_s({**knobs, **workers})

    def train(
        self, knobs: Mapping[str, Scalar], samples: int, milestones: Sequence[int], seed: int, left_s: float = math.inf
    ) -> TrialState:
        """Returns the error."""
        size, rate = int(knobs["batch_size"]), float(knobs["learning_rate"])
        error = 0.2 + 0.05 * abs(math.log(rate / 3e-3)) + self.spoils * (size != 32) + 0.002 * math.sin(seed)
        found = super().train(knobs, samples, milestones, seed)
        return replace(found, values={"error": error}, train_s=1.0)


class InTurns:
    """An executor whose slots train by the formula of a profiler, a rung at a time in turns."""

    def __init__(self, profiler: Learning) -> None:
        self._profiler = profiler

    def run(self, scheduler: TrialScheduler, plan: TrialPlan) -> None:
        """Runs trials until the scheduler has no more."""
        live: list[tuple[TrialRequest, list[int]]] = []
        while True:
            while len(live) < plan.concurrency and (request := scheduler.next_trial()) is not None:
                live.append((request, list(plan.milestones)))
            if not live:
                return
            request, rungs = live.pop(0)
            samples = rungs.pop(0)
            found = self._profiler.train(request.knobs, samples, (samples,), request.seed)
            if (size := int(request.knobs["micro_batch_size"])) > self._profiler.ooms_above:
                full = TrialState(outcome="oom", message="full", knobs=request.knobs)
                found = replace(found, retries=(full,), knobs={**request.knobs, "micro_batch_size": size // 2})
            if rungs and found.outcome == "ok" and scheduler.at_rung(request.trial, found):
                live.append((request, rungs))
            else:
                scheduler.ended(request.trial, found)


class Made:
    """A study that has been opened: its stages, its journal and what it says."""

    def __init__(self, folder: Path, config: StudyConfig, profiler: Any, began: float, facts: Description) -> None:
        self.config, self.profiler, self._said = config, profiler, io.StringIO()
        self.journal = Journal.open(folder / "trials.jsonl", create=True)
        terminal = Terminal(out=io.StringIO(), err=self._said, env={})
        self.study = study._Study(config, terminal, self.journal, folder, began)
        self.study.open(facts, setup.setting_of(config))

    @property
    def run(self) -> History:
        """Returns the run as its records tell it."""
        return self.journal.run

    @property
    def said(self) -> str:
        """Returns what it said, in one line."""
        return " ".join(self._said.getvalue().split())

    @property
    def notes(self) -> list[str]:
        """Returns the notes that it wrote."""
        return [note.text for note in self.run.notes]

    def measure(self) -> Made:
        """Runs the stages before the search."""
        self.study.measure(self.profiler)
        return self

    def search(self) -> Made:
        """Runs these and the search, whose trials the formulas train."""
        self.study.measure(self.profiler)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executors, "executor", lambda *_: nullcontext(InTurns(self.profiler)))
            self.study.search(self.profiler, setup.setting_of(self.config))
        return self

    def confirm(self) -> Made:
        """Runs the stage that confirms."""
        self.study.confirm(self.profiler)
        return self


def opened(
    folder: Path, *typed: str, profiler: Any = None, passed_s: float = 0.0, facts: Description = FACTS, **more: Any
) -> Made:
    """Returns a study on a CPU that has been opened in a folder, `passed_s` after it began; `more` is of its settings.

    If the folder has a journal, the study goes on.
    """
    folder.mkdir(exist_ok=True)
    config = setup.prepare_config(load.load(["card=cpu", *typed]), Here())[1].model_copy(update=more)
    return Made(folder, config, profiler or Learning(), time.monotonic() - passed_s, facts)
