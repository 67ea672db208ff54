"""Screens as text files: compared with what is printed, or written anew if REWRITE_SNAPSHOTS is set, then reviewed."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path

FOLDER = Path(__file__).parent / "snapshots"


def check(name: str, screen: str) -> None:
    """Compares a screen with its file; spaces at the end of a line do not count."""
    text = "".join(f"{line.rstrip()}\n" for line in screen.splitlines())
    path = FOLDER / f"{name}.txt"
    if os.environ.get("REWRITE_SNAPSHOTS"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{name}: if it is better so, REWRITE_SNAPSHOTS=1 writes it anew"


def text_of(page: str) -> str:
    """Returns what a page says: no style, no drawing, a line for each row of a table and each paragraph."""
    body = re.sub(r"<style>.*?</style>|<svg .*?</svg>", "", page, flags=re.DOTALL)
    lines = re.sub(r"\s*(?=<t[hd]\b|<dd|</tr)", "  ", body)
    said = html.unescape(re.sub(r"<[^>]*>", "", lines))
    return "\n".join(line.strip() for line in said.splitlines() if line.strip())
