"""What every tuner gets alike: workload, space, cap, horizon, one core, and how its trainings are written down."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.arena import arena
from trainables.knobs import Scalar
from trainables.loop import Plan
from tuning.backends.session import Setting
from tuning.config import StudyConfig, load
from tuning.policies.rungs import milestones

TABLES = Path(__file__).parents[1] / "tables"
ETA, FIRST_FRAC = 2, 0.25


@dataclass(frozen=True)
class Contest:
    """One workload, one seed, one wall budget, for any tuner.

    `started` is the moment (seconds since 1970) at which the tuner's process was asked for: its imports count.
    """

    workload: str
    seed: int
    budget_s: float
    started: float
    out: Path
    """What is written as it happens: a line for every training that ended, however it did."""

    @functools.cached_property
    def config(self) -> StudyConfig:
        """The study's configuration on a CPU: its space, its options, its budget `quick`."""
        return load([f"workload={self.workload}", "card=cpu"])

    @functools.cached_property
    def _arena(self) -> Any:
        return arena(TABLES / f"{self.workload}.jsonl")

    @property
    def cap_bytes(self) -> int:
        """What the virtual card holds: two thirds of the configurations drawn from the space fit."""
        return int(self._arena.cap_bytes)

    @property
    def samples(self) -> int:
        """The horizon of a training, that of the recorded table."""
        return int(self._arena.table.horizon)

    @property
    def objectives(self) -> Mapping[str, Any]:
        """Speed and quality, with their directions."""
        return {"samples_per_s": "max", **self._arena.table.objectives}

    @property
    def quality(self) -> str:
        """The quality's name."""
        return next(n for n in self.objectives if n != "samples_per_s")

    @property
    def milestones(self) -> tuple[int, ...]:
        """Where a training is judged, in samples seen."""
        return milestones(max(1, round(self.samples * FIRST_FRAC)), self.samples, ETA)

    @property
    def setting(self) -> Setting:
        """What a process must know to train."""
        options = dict(self.config.workload.options)
        return Setting(self.workload, options, "cpu", 1, self.cap_bytes, self.seed)

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
        with self.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def ended(self, knobs: Mapping[str, Scalar], found: Mapping[str, Any], began: float) -> None:
        """Writes a training that came to its end, or to an OOM."""
        names = ("outcome", "samples", "values", "message")
        kept = {n: found.get(n) for n in names if found.get(n) not in (None, "")}
        rate = found.get("measured_samples_per_s")
        self.wrote("trial", began=round(began - self.started, 3), knobs=dict(knobs), samples_per_s=rate, **kept)

    def as_plain(self) -> dict[str, Any]:
        """Returns the fields, for a process that is to make the same one."""
        return {**asdict(self), "out": str(self.out)}

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Contest:
        """Returns the contest of such fields."""
        return cls(**{**plain, "out": Path(plain["out"])})


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
            os.environ.pop(name) if value is None else os.environ.update({name: value})
