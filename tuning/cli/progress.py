"""What moves on the screen: the live line of a study, and the bar of a training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tuning.journal.records import Record
from tuning.report.format import duration, rate
from tuning.report.trial_views import SPEED

REFRESH_PER_S = 4
MIN_TRIALS_FOR_ETA = 3
PLAIN_LINE_S = 5.0
"""Where there is no terminal to draw a training's bar on, a line this often."""


class Status:
    """What the live line shows: stage, how many are done, the best so far, and when the search will be over."""

    def __init__(self, facts: Record | Mapping[str, Any], trials: int = 0) -> None:
        objectives = facts.get("objectives") or {}
        self.objective = next((n for n in objectives if n != SPEED), "")
        self._lower = objectives.get(self.objective) == "min"
        self._trials, self._slots = trials, int(facts.get("concurrency") or 1)
        self._stage, self._entered = "", 0.0
        self._done = {"probe": 0, "search": 0, "confirm": 0}
        self._took_s: list[float] = []
        self._best_value: float | None = None
        self._best_speed: float | None = None
        self.reference: Mapping[str, Any] | None = None

    def enter(self, stage: str, now_s: float) -> None:
        """A stage begins at `now_s` of the caller's clock."""
        self._stage, self._entered = stage, now_s
        if stage == "search":
            self.reference = None

    def take(self, record: Record) -> None:
        """Something was written; `reference` is the configuration that event lines are told against."""
        speed = record.get(SPEED)
        if record.event == "probe":
            self._done["probe"] += 1
            if speed and (self._best_speed is None or speed > self._best_speed):
                self._best_speed, self.reference = speed, record.get("config")
        elif record.event == "trial" or (record.event == "refused" and self._stage == "search"):
            self._done["search"] += 1
            self.reference = self.reference or record.get("config")
            if record.event == "trial":
                self._took_s.append(sum(record.get(k) or 0.0 for k in ("setup_s", "train_s", "evaluate_s")))
            value = (record.get("values") or {}).get(self.objective)
            if value is not None and (self._best_value is None or (value < self._best_value) == self._lower):
                self._best_value = value
        elif record.event in ("window", "confirmed"):
            self._done["confirm"] += 1

    def eta_s(self) -> float | None:
        """Returns the median trial's seconds times the trials left over the slots; None before three have ended."""
        left = self._trials - self._done["search"]
        if self._stage != "search" or len(self._took_s) < MIN_TRIALS_FOR_ETA or left <= 0:
            return None
        return statistics.median(self._took_s) * left / self._slots

    def line(self, now_s: float) -> str:
        """Returns the live line at `now_s` of the caller's clock."""
        total = f"/{self._trials}" if self._stage == "search" and self._trials else ""
        done = f"{self._done[self._stage]}{total} done" if self._stage in self._done else ""
        best = ""
        if self._stage == "probe" and self._best_speed:
            best = f"best {rate(self._best_speed)} samples/s"
        elif self._best_value is not None:
            best = f"best {self.objective} {self._best_value:.3f}"
        eta = self.eta_s()
        left = f"~{duration(eta)} left" if eta is not None else ""
        return "  ".join(p for p in (self._stage, done, best, duration(max(0.0, now_s - self._entered)), left) if p)


class TrainingBar:
    """A training on a person's terminal as a bar with speed, loss and time left; elsewhere a line every few seconds."""

    def __init__(self, messages: Console, total: int, begun_at: int) -> None:
        self._messages, self._total, self._said = messages, total, time.monotonic()
        shown = "{task.percentage:>3.0f}%  {task.fields[rate]}  {task.fields[loss]}"
        columns = (TextColumn("training"), BarColumn(bar_width=None), TextColumn(shown), TimeElapsedColumn())
        left = (TextColumn("left"), TimeRemainingColumn())
        options: dict[str, Any] = {"transient": True, "refresh_per_second": REFRESH_PER_S}
        self._bar = Progress(*columns, *left, console=messages, disable=not messages.is_terminal, **options)
        self._task = self._bar.add_task("", total=total, completed=begun_at, rate="", loss="")

    def __enter__(self) -> TrainingBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def moved(self, samples: int, samples_per_s: float, loss: float) -> None:
        """Shows how far it is."""
        fast, said = f"{samples_per_s:.1f} samples/s", f"loss {loss:.3f}"
        self._bar.update(self._task, completed=samples, rate=fast, loss=said)
        if not self._messages.is_terminal and time.monotonic() - self._said >= PLAIN_LINE_S:
            self._said = time.monotonic()
            self._messages.print(f"{samples}/{self._total} samples  {fast}  {said}", markup=False)
