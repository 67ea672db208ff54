"""The moving part of a screen: a study's stage, time left, best and what runs; a training's bar."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
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
    parts: list[RenderableType] = [
        Text(header(found), style="bold"),
        _bar(found.ends_at_s or found.allowed_s, found.used_s, clock(found)),
    ]
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


def _bar(total: float | None, done: float, said: str) -> Table:
    """Returns what is done of all there is, with what is said beside it; it pulses while nobody knows the total."""
    made = Table.grid(padding=(0, 1, 0, 0), expand=True)
    made.add_column(ratio=1)
    made.add_column(no_wrap=True)
    made.add_row(ProgressBar(total, min(done, total) if total else 0, pulse=total is None), Text(said))
    return made


def _whole_s(seconds: float) -> str:
    """Returns seconds as people count them: without a fraction, which would only flicker."""
    return f"{max(0, math.floor(seconds))}s" if seconds < 60 else duration(math.floor(seconds))


def _rounded(seconds: float) -> float:
    """Returns a time to come as exactly as it is known: to 5 s, above two minutes to 10 s."""
    step = 1 if seconds < 20 else 5 if seconds < 120 else 10
    return step * max(1, round(seconds / step))


class TrainingBar:
    """A training as a bar above figures on a terminal; elsewhere a line every few seconds or hundredth of its time."""

    def __init__(self, messages: Console, total: int, begun_at: int) -> None:
        self._messages, self._total, self._began = messages, total, time.monotonic()
        self._said, self._samples, self._left, self._figures = self._began, begun_at, "", ""
        self._live = Live(get_renderable=self._view, console=messages, refresh_per_second=REFRESH_PER_S, transient=True)

    def __enter__(self) -> TrainingBar:
        if self._messages.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def _view(self) -> RenderableType:
        clocks = f"{self._samples / self._total:.0%}  {_whole_s(time.monotonic() - self._began)}{self._left}"
        return Group(_bar(self._total, self._samples, clocks), Text(self._figures, overflow="fold"))

    def moved(self, samples: int, left_s: float | None, figures: Callable[[], Sequence[str]]) -> None:
        """Shows how far it is; `left_s` is None while nobody knows, `figures` are asked for if they are shown."""
        now = time.monotonic()
        self._samples, self._left = samples, f", {_whole_s(_rounded(left_s))} left" if left_s and left_s >= 1 else ""
        if self._messages.is_terminal:
            self._figures = "  ".join(figures())
        elif now - self._said >= max(PLAIN_LINE_S, (now - self._began) / 100):
            self._said = now
            told = "  ".join((f"{samples}/{self._total} samples{self._left}", *figures()))
            self._messages.print(told, markup=False, soft_wrap=True)
