"""The moving part of a screen: a study as stages, table and time left, drawn from its `Progress`; a training's bar."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tuning.cli import progress
from tuning.cli.progress import StageRow
from tuning.report import format as fmt
from tuning.report.format import duration, plain, plural, rate, size

REFRESH_PER_S = 2
WITH_KNOBS, WITH_PEAK = 60, 100
"""Columns from which on the table has knobs, and memory, too."""
PLAIN_LINE_S = 5.0
"""If there is no terminal to draw a training's bar on, a line this often."""


def study(found: progress.Progress, width: int) -> RenderableType:
    """Returns the whole view, what matters most first: `rich.live` cuts it where the terminal ends."""
    parts: list[RenderableType] = [Text(header(found), style="bold"), _bar(found)]
    if found.doing:
        parts.append(Text(f"{found.doing} ...", style="italic"))
    if found.card:
        parts.append(Text(f"card {found.card}"))
    return Group(*parts, *rows(found, width))


def header(found: progress.Progress) -> str:
    """Returns the stage, what is done of it, and how much faster than the reference the best is."""
    parts = [f"stage {found.number} of {found.stages}: {found.stage}" if found.number else "starting"]
    if unit := progress.UNITS.get(found.stage):
        of = found.planned is not None
        parts.append(f"{found.done} of {plural(found.planned or 0, unit)}" if of else plural(found.done, unit))
    if found.faster:
        parts.append(f"best {found.faster:.2f}x {plain(found.reference)}")
    return "   ".join(parts)


def clock(found: progress.Progress) -> str:
    """Returns the time used of the time allowed, and when the study is expected to end."""
    of = f" of {duration(found.allowed_s)}" if found.allowed_s else ""
    ends = ""
    if found.ends_at_s is not None:
        left_s = found.ends_at_s - found.used_s
        ends = f", ends in about {_whole_s(_rounded(left_s))}" if left_s >= 1 else ", ends at any moment"
    return f"{_whole_s(found.used_s)}{of}{ends}"


def ended(found: progress.Progress, width: int) -> RenderableType:
    """Returns what stays on the screen of a stage that is over: every trial, or the fastest probe and those named."""
    own = [row for row in found.rows if found.stage != "probe" or row.is_best or row.is_named]
    over = replace(found, rows=tuple(replace(row, since_s=None) for row in own))
    return Group(Text(header(found), style="bold"), *rows(over, width))


def rows(found: progress.Progress, width: int) -> list[RenderableType]:
    """Returns what is to be set for the best, and the table: the best, what runs, then the latest of the others."""
    if not found.rows:
        return []
    best, has_value = found.best, bool(found.objective) and found.stage != "probe"
    has_peak, peak = width >= WITH_PEAK, "peak" if found.cap_bytes is None else f"peak of {size(found.cap_bytes)}"
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), expand=True)
    made.add_column("", no_wrap=True)
    made.add_column("", overflow="fold")
    for name in ["samples/s", *[fmt.fit(plain(found.objective), 12)] * has_value, *[peak] * has_peak]:
        made.add_column(Text(name), justify="right", no_wrap=True)
    if width >= WITH_KNOBS:
        made.add_column(f"unlike {'the defaults' if best is None else 'the best'}", ratio=1, overflow="fold")
    for row in in_turn(found.rows)[: progress.MAX_ROWS]:
        value = [f"{row.value:.3f}" if row.value is not None else "-"] * has_value
        figures = [rate(row.samples_per_s or None), *value, *[size(row.peak_bytes)] * has_peak]
        is_known = row.is_best or row.is_named
        knobs = "" if is_known else " ".join(fmt.unlike(row.config, {} if best is None else best.config, found.table))
        running = "" if row.since_s is None else f" {_whole_s(found.used_s - row.since_s)}"
        cells = [("* " if row.is_best else "  ") + row.name, row.state + running, *figures]
        cells += [knobs] * (width >= WITH_KNOBS)
        style = "bold green" if row.is_best else "cyan" if row.since_s is not None else ""
        made.add_row(*(Text(plain(cell)) for cell in cells), style=style)
    if best is None or not best.config:
        return [made]
    chosen = " ".join(fmt.settings(best.config, found.table)) or "the defaults"
    return [Text(f"* {plain(best.name)}: {chosen}", style="green", overflow="fold"), made]


def in_turn(found: Sequence[StageRow]) -> list[StageRow]:
    """Returns the best row first, then what runs, then the others, the latest first."""
    best = [row for row in found if row.is_best]
    runs = [row for row in found if row.since_s is not None and not row.is_best]
    others = [row for row in found if row.since_s is None and not row.is_best]
    return [*best, *runs, *reversed(others)]


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
