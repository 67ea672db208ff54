"""What every tuner gets alike: workload, space, cap, horizon, one core, and how its trainings are written down."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainables.knobs import Scalar
from trainables.plan import Plan
from tuning.config.space import Space
from tuning.search.pruner import milestones
from tuning.workers.worker_config import WorkerConfig

TABLES = Path(__file__).parents[1] / "tables"
ETA, FIRST_FRAC = 2, 0.25


@dataclass(frozen=True)
class Contest:
    """One workload, one seed, one wall budget, for any tuner.

    `started` is the moment (seconds since 1970) at which the tuner's process was asked for: its imports count. The rest
    is settled once (`made`), so that no process of a tuner pays for more than its own work.
    """

    workload: str
    seed: int
    budget_s: float
    started: float
    out: str
    """What is written as it happens: a line for every training that ended, however it did."""
    cap_bytes: int
    """What the virtual card holds: two thirds of the configurations drawn from the space fit."""
    samples: int
    """The horizon of a training, that of the recorded table."""
    objectives: Mapping[str, Any]
    """Speed and quality, with their directions."""
    worst: float
    """The worst quality of the recorded table: what a failed training is said to have, where one says it."""
    options: Mapping[str, Any]
    raw_space: Mapping[str, Any]

    @classmethod
    def made(cls, workload: str, seed: int, budget_s: float, started: float, out: Path) -> Contest:
        """Returns the contest of a workload with its own space on a CPU, and the cap of its recorded table."""
        from benchmarks.arena import arena
        from tuning.config.load import load

        own, config = arena(TABLES / f"{workload}.jsonl"), load([f"workload={workload}", "card=cpu"])
        return cls(
            workload,
            seed,
            budget_s,
            started,
            str(out),
            own.cap_bytes,
            own.table.horizon,
            {"samples_per_s": "max", **own.table.objectives},
            own.worst,
            dict(config.workload.options),
            config.space.as_raw(),
        )

    @property
    def space(self) -> Space:
        """What is searched."""
        return Space.of(self.raw_space)

    @property
    def quality(self) -> str:
        """The quality's name."""
        return next(n for n in self.objectives if n != "samples_per_s")

    @property
    def milestones(self) -> tuple[int, ...]:
        """Where a training is judged, in samples seen."""
        return milestones(max(1, round(self.samples * FIRST_FRAC)), self.samples, ETA)

    @property
    def setting(self) -> WorkerConfig:
        """What a process must know to train."""
        return WorkerConfig(self.workload, dict(self.options), "cpu", 1, self.cap_bytes, self.seed)

    @property
    def left_s(self) -> float:
        """What is left of the budget."""
        return self.started + self.budget_s - time.time()

    def plan(self, *, judged: bool) -> Plan:
        """Returns how a training runs, with rungs or without."""
        steps = (*self.milestones, self.samples) if judged else (self.samples,)
        return Plan(self.samples, steps, cap_bytes=self.cap_bytes)

    def wrote(self, event: str, **fields: Any) -> None:
        """Adds a line."""
        line = json.dumps({"event": event, "at": round(time.time() - self.started, 3), **fields})
        with Path(self.out).open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def ended(self, knobs: Mapping[str, Scalar], found: Mapping[str, Any], began: float) -> None:
        """Writes a training that ended; `began` is when it was asked for, in seconds since 1970."""
        names = ("outcome", "samples", "values", "message")
        kept = {n: found.get(n) for n in names if found.get(n) not in (None, "")}
        first = float(found.get("first_step_at") or 0.0)
        if first:
            kept["first_step"] = round(first - self.started, 3)
        if found.get("ooms"):  # it began again with less: what the attempts before took
            took = sum(float(found.get(n) or 0.0) for n in ("setup_s", "train_s", "evaluate_s"))
            kept["lost_s"] = round(max(0.0, time.time() - began - took), 3)
        rate = found.get("measured_samples_per_s")
        self.wrote("trial", began=round(began - self.started, 3), knobs=dict(knobs), samples_per_s=rate, **kept)


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """What is started meanwhile stays on one core, with all that it starts, and has one thread for its operators."""
    before = os.sched_getaffinity(0)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    kept = {name: os.environ.get(name) for name in names}
    os.sched_setaffinity(0, {sorted(before)[core % len(before)]})
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        for name, value in kept.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
