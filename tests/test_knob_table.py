"""docs/knobs.md has every knob once, with its kind, and names tests that exist. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from trainables import knobs

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| knob")
]


def test_every_knob_has_its_row_and_kind() -> None:
    assert {row[0]: row[1] for row in ROWS} == {name: knobs.kind_of(name) for name in knobs.NAMES}
    assert len(ROWS) == len(knobs.NAMES)


def test_the_tests_it_names_exist_and_each_knob_has_one_that_shows_it_active() -> None:
    for row in ROWS:
        assert "::" in row[3], row[0]
        for file, name in re.findall(r"`([\w.]+)::(\w+)`", " ".join(row)):
            assert f"def {name}(" in (ROOT / "tests" / "trainables" / file).read_text(encoding="utf-8"), row[0]
