"""The three frameworks' examples: how little of a plain script changes, and a study of each from the command line."""

from __future__ import annotations

import difflib
import importlib.util
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data"
PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def new_lines(name: str) -> list[str]:
    """Returns the lines of a framework's loop that its plain script lacks: all above SPACE but blanks and docstrings."""
    plain, own = ((DATA / f"{name}_{kind}.py").read_text() for kind in ("script", "loop"))
    lines = own.split("\nSPACE = ")[0].splitlines()
    new = [line[2:] for line in difflib.ndiff(plain.splitlines(), lines) if line.startswith("+ ")]
    return [line for line in new if line.strip() and '"""' not in line]


@pytest.mark.parametrize(("name", "lines"), [("trainer", 5), ("lightning", 4), ("accelerate", 8)])
def test_so_many_lines_of_the_script_are_new(name: str, lines: int) -> None:
    assert len(new_lines(name)) == lines
