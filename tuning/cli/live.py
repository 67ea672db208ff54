"""The moving part of a screen: a study's stage, time left, best and what runs; a training's bar."""

from __future__ import annotations

import math
import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tuning.cli import progress
from tuning.report import format as fmt
from tuning.report.format import duration, plain, plural

REFRESH_PER_S = 2
WITH_PEAK = 100
"""Columns from which on a table of trials has memory, too."""
PLAIN_LINE_S = 5.0
"""If there is no terminal to draw a training's bar on, a line this often."""


def study(found: progress.Progress) -> RenderableType:
    """Returns the whole view, what matters most first: `rich.live` cuts it at the end of the terminal."""
    parts: list[RenderableType] = [Text(header(found), style="bold"), _bar(found)]
    if found.doing:
        parts.append(Text(f"{found.doing} ...", style="italic"))
    if found.card:
        parts.append(Text(f"card {found.card}"))
    if (best := found.best) is not None:
        chosen = " ".join(fmt.settings(best.config, found.table)) or "the defaults"
        parts.append(Text(plain(f"best {best.name}: {chosen}"), style="green", overflow="fold"))
    return Group(*parts)


def header(found: progress.Progress) -> str:
    """Returns the stage, what is done of it, and how much faster than the reference the best is."""
    parts = [f"stage {found.number} of {found.stages}: {found.stage}" if found.number else "starting"]
    if unit := progress.UNITS.get(found.stage):
        of = found.planned is not None
        parts.append(f"{found.done} of {plural(found.planned or 0, unit)}" if of else plural(found.done, unit))
    if found.faster:
        parts.append(f"best {found.faster:.2f}x {fmt.spoken(found.reference)}")
    return "   ".join(parts)


def clock(found: progress.Progress) -> str:
    """Returns the time used of the time allowed, and when the study is expected to end."""
    of = f" of {duration(found.allowed_s)}" if found.allowed_s else ""
    ends = ""
    if found.ends_at_s is not None:
        left_s = found.ends_at_s - found.used_s
        ends = f", run ends in about {_whole_s(_rounded(left_s))}" if left_s >= 1 else ", run ends at any moment"
    return f"{_whole_s(found.used_s)}{of}{ends}"


def _bar(found: progress.Progress) -> Table:
    """Returns the time used of the time that the study takes; the bar pulses while nobody knows that."""
    total = found.ends_at_s or found.allowed_s
    made = Table.grid(padding=(0, 1, 0, 0), expand=True)
    made.add_column(ratio=1)
    made.add_column(no_wrap=True)
    made.add_row(ProgressBar(total, min(found.used_s, total) if total else 0, pulse=total is None), Text(clock(found)))
    return made


def _whole_s(seconds: float) -> str:
    """Returns seconds as people count them: without a fraction, which would only flicker."""
    return f"{max(0, math.floor(seconds))}s" if seconds < 60 else duration(math.floor(seconds))


def _rounded(seconds: float) -> float:
    """Returns a time to come as exactly as it is known: to 5 s, above two minutes to 10 s."""
    step = 1 if seconds < 20 else 5 if seconds < 120 else 10
    return step * max(1, round(seconds / step))


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
        """Shows how far it is; a loss that is NaN was not told."""
        fast, said = f"{samples_per_s:.1f} samples/s", "" if math.isnan(loss) else f"loss {loss:.3f}"
        self._bar.update(self._task, completed=samples, rate=fast, loss=said)
        if not self._messages.is_terminal and time.monotonic() - self._said >= PLAIN_LINE_S:
            self._said = time.monotonic()
            self._messages.print(f"{samples}/{self._total} samples  {fast}  {said}".rstrip(), markup=False)
