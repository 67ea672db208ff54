"""What moves on the screen: a study as stages, table and time left, drawn from its `Progress`; a training's bar."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tuning.cli import progress
from tuning.cli.progress import StageRow
from tuning.report import format as fmt
from tuning.report.format import duration, plain, rate, size

REFRESH_PER_S = 2
BESIDE_ROWS = 5
"""Lines of the view that are not rows of the table: header, bar, what is waited for, the table's head and its rule."""
MIN_ROWS = 3
NARROW = 100
"""Columns below which the peak is shown without its cap."""
MAX_KEPT = 20
"""Rows of a stage that stay on the screen when it is over."""
_INDENTED: Any = {"initial_indent": " " * 8, "subsequent_indent": " " * 8, "break_on_hyphens": False}
PLAIN_LINE_S = 5.0
"""Where there is no terminal to draw a training's bar on, a line this often."""


def study(found: progress.Progress, width: int, height: int) -> RenderableType:
    """Returns the whole view, at most `height` lines of at most `width` columns."""
    parts: list[RenderableType] = [_line(header(found), width, "bold"), _bar(found)]
    if found.doing:
        parts.append(_line(f"{found.doing} ...", width, "italic"))
    if found.card:
        parts.append(_line(f"card {found.card}", width, ""))
        height -= 1
    if not found.rows:
        return Group(*parts)
    best = settings(found)
    lines = list(best.wrap(Console(width=width), width)) if best else []
    parts.append(rows(found, width, max(MIN_ROWS, height - BESIDE_ROWS - len(lines) - 1)))
    return Group(*parts, *lines[: max(0, height - BESIDE_ROWS - MIN_ROWS - 1)])


def header(found: progress.Progress) -> str:
    """Returns the stage, what is done of it, and how much faster than the reference the best is."""
    parts = [f"stage {found.number} of {found.stages}: {found.stage}" if found.number else "starting"]
    if unit := progress.UNITS.get(found.stage):
        of = f" of {found.planned}" if found.planned is not None else ""
        parts.append(f"{found.done}{of} {unit.removesuffix('s') if (found.done, of) == (1, '') else unit}")
    if found.faster:
        parts.append(f"best {found.faster:.2f}x {found.reference}")
    return "   ".join(parts)


def clock(found: progress.Progress) -> str:
    """Returns the time used of the time allowed, and when the study is expected to end."""
    of = f" of {duration(found.allowed_s)}" if found.allowed_s else ""
    ends = ""
    if found.ends_at_s is not None:
        left_s = found.ends_at_s - found.used_s
        ends = f", ends in about {_whole_s(_rounded(left_s))}" if left_s >= 1 else ", ends at any moment"
    return f"{_whole_s(found.used_s)}{of}{ends}"


def settings(found: progress.Progress) -> Text | None:
    """Returns what is to be set for the best so far; None where there is none, or it is not known yet."""
    if found.best is None or not found.best.config:
        return None
    chosen = " ".join(fmt.settings(found.best.config, found.table)) or "the defaults"
    return Text(f"* {plain(found.best.name)}: {chosen}", style="green")


def ended(found: progress.Progress, width: int) -> RenderableType:
    """Returns what stays on the screen of a stage that is over: every trial, or the fastest probe and those named."""
    own = found.rows
    if found.stage == "probe":
        own = tuple(row for row in own if row.is_best or not row.name.isdigit())
    over = replace(found, rows=tuple(shown([replace(row, since_s=None) for row in own], MAX_KEPT)))
    table = rows(over, width, MAX_KEPT * width)  # all of their lines
    return Group(_line(header(found), width, "bold"), table, *filter(None, [settings(over)]))


def rows(found: progress.Progress, width: int, most: int) -> RenderableType:
    """Returns the table, at most `most` lines below its head: the best first, then those shown as they began.

    Knobs that do not fit beside the figures of a row are on lines of their own, so that none is cut. The peak is left
    out where there is no room for it.
    """
    peak = "peak" if found.cap_bytes is None or width < NARROW else f"peak of {size(found.cap_bytes)}"
    has_value = bool(found.objective) and found.stage != "probe"
    head = ["", "", "samples/s", *[fmt.fit(plain(found.objective), 12)] * has_value, peak]
    figures = [_figures(row, found, has_value=has_value) for row in found.rows]
    widths = [max(map(len, column)) for column in zip(["*" * 6, "*" * 9, *head[2:]], *figures, strict=True)]
    gap = "  "
    if sum(widths) + len(gap) * (len(widths) - 1) > width:
        gap, widths = " ", widths[:-1]
    lines, left = dict[int, list[Text]](), most
    for row, cells in zip(found.rows, figures, strict=True):
        style = "bold green" if row.is_best else "cyan" if row.since_s is not None else ""
        knobs, own = " ".join(_unlike(row, found)), _aligned(cells, widths, gap)
        said = [f"{own}  {knobs}"]
        if len(said[0]) > width:
            said = [own, *textwrap.wrap(knobs, width, **_INDENTED)]
        lines[id(row)] = [_line(each, width, style) for each in said]
    for row in _in_turn(found.rows):
        lines[id(row)] = lines[id(row)][: max(0, left)]
        left -= len(lines[id(row)])
    reference = "the defaults" if found.best is None else "the best"
    titles = _aligned(head, widths, gap), f"  unlike {reference}"
    title = "".join(titles) if len("".join(titles)) <= width else titles[0]
    return Group(
        _line(title, width, "bold"),
        Rule(style="none"),
        *(each for row in shown(found.rows, most) for each in lines[id(row)]),
    )


def _figures(row: StageRow, found: progress.Progress, *, has_value: bool) -> list[str]:
    value = [f"{row.value:.3f}" if row.value is not None else "-"] * has_value
    name, speed = f"{'*' if row.is_best else ' '} {plain(row.name)}", rate(row.samples_per_s or None)
    return [name, _state(row, found.used_s), speed, *value, size(row.peak_bytes)]


def _aligned(cells: Sequence[str], widths: Sequence[int], gap: str) -> str:
    """Returns the cells of a line that have a width, names and states from the left, figures from the right."""
    both = enumerate(zip(cells, widths, strict=False))
    return gap.join(f"{cell:<{width}}" if place < 2 else f"{cell:>{width}}" for place, (cell, width) in both)


def _in_turn(found: Sequence[StageRow]) -> list[StageRow]:
    """Returns the rows as they get room: the best, what runs, and the latest of the others."""
    best = [row for row in found if row.is_best]
    runs = [row for row in found if row.since_s is not None and not row.is_best]
    others = [row for row in found if row.since_s is None and not row.is_best]
    return [*best, *runs, *reversed(others)]


def shown(found: Sequence[StageRow], most: int) -> list[StageRow]:
    """Returns at most `most` rows, the best first: it, what runs, and the latest of the others."""
    kept = {id(row) for row in _in_turn(found)[:most]}
    return sorted((row for row in found if id(row) in kept), key=lambda row: not row.is_best)


def _line(text: str, width: int, style: str) -> Text:
    return Text(fmt.fit(text, width), style=style, no_wrap=True)


def _bar(found: progress.Progress) -> Table:
    """Returns the time used of the time that the study takes; the bar pulses while nobody knows that."""
    total = found.ends_at_s or found.allowed_s
    made = Table.grid(padding=(0, 1, 0, 0), expand=True)
    made.add_column(ratio=1)
    made.add_column(no_wrap=True)
    made.add_row(ProgressBar(total, min(found.used_s, total) if total else 0, pulse=total is None), Text(clock(found)))
    return made


def _state(row: StageRow, used_s: float) -> str:
    if row.since_s is None:
        return plain(row.state)
    return f"{plain(row.state)} {_whole_s(used_s - row.since_s)}"


def _unlike(row: StageRow, found: progress.Progress) -> Iterator[str]:
    """Yields the knobs of a row that are not those of the best, which stand below the table."""
    if not row.is_best:
        yield from fmt.unlike(row.config, {} if found.best is None else found.best.config, found.table)


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
