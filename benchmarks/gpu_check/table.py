"""The table at the end, plain, in 80 columns: what was measured, the bar, and whether it is met."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu_check.verdicts import Line, lines

WIDTH = 80
_PART, _WHAT, _FIGURE, _BAR = 10, 34, 13, 9
"""Columns; the state has the last 12."""


def table(documents: Sequence[Mapping[str, Any]], revision: str) -> list[str]:
    """Returns the lines of all documents; what was measured at another revision is marked with a star."""
    said = [*_heading(documents, revision), ""]
    said.append(f"{'part':<{_PART}}{'what':<{_WHAT}}{'measured':>{_FIGURE}} {'bar':<{_BAR}}")
    said.append("-" * WIDTH)
    every: list[Line] = []
    for document in documents:
        star = "" if document.get("revision") == revision else "*"
        own = lines(document)
        every += own
        for number, line in enumerate(own):
            said += _row(line, (line.part + star) if number == 0 else "")
    said.append("-" * WIDTH)
    met, missed = sum(x.met is True for x in every), sum(x.met is False for x in every)
    barred = sum(x.met is None and bool(x.bar) for x in every)
    said.append(f"{met} met, {missed} NOT MET, {barred} not measured")
    if any(d.get("revision") != revision for d in documents):
        said.append("* of other sources than these")
    return said


def _heading(documents: Sequence[Mapping[str, Any]], revision: str) -> Iterator[str]:
    known = next((d for d in documents if d.get("device", {}).get("name")), None)
    if known is None:
        return
    device, versions = known["device"], known["versions"]
    driver = f", driver {known['driver']}" if known.get("driver") else ""
    said = f"{device['name']}{driver}, {device['cores']} cores; torch {versions.get('torch')}, "
    said += f"Python {versions.get('python')}; commit {revision}, seed {known.get('seed')}"
    yield from textwrap.wrap(said, WIDTH)
    total = sum(float(d.get("seconds", 0.0)) for d in documents)
    yield f"{len(documents)} parts in {total:.0f} s"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 2]}.."


def _row(line: Line, part: str) -> Iterator[str]:
    what, figure = _cut(line.what, _WHAT - 1), _cut(line.figure, _FIGURE)
    state = line.state if line.bar else ""
    yield f"{part:<{_PART}}{what:<{_WHAT}}{figure:>{_FIGURE}} {line.bar:<{_BAR}} {state}".rstrip()
    if line.why:
        words = " ".join(line.why.split())
        indent = " " * (_PART + 2)
        yield from textwrap.wrap(words[:320], WIDTH, initial_indent=indent, subsequent_indent=indent)
