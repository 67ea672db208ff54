"""The three frameworks' examples: how little of a plain script changes, and a study from the command line."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.commands import ROOT, run
from tests.golden.outputs import BESIDE, answer, of, study

DATA = ROOT / "tests" / "data"


@pytest.mark.parametrize(("name", "lines"), [("trainer", 5), ("lightning", 4), ("accelerate", 8)])
def test_so_many_lines_of_the_script_are_new(name: str, lines: int) -> None:
    """Those above SPACE, but blanks and docstrings."""
    plain, own = ((DATA / f"{name}_{kind}.py").read_text() for kind in ("script", "loop"))
    compared = difflib.ndiff(plain.splitlines(), own.split("\nSPACE = ")[0].splitlines())
    new = [line[2:] for line in compared if line.startswith("+ ") and '"""' not in line]
    assert len([line for line in new if line.strip()]) == lines


@pytest.mark.workload
@pytest.mark.timeout(300)
def test_a_study_and_its_best_trained(tmp_path: Path) -> None:
    """What a worker asks of the other two for it, tests/trainables/test_framework_loops.py has."""
    pytest.importorskip("pytorch_lightning")
    made = ["knobs.learning_rate=[3e-3,1e-2]", "search.trials=2", "budget.confirm.seeds=1", "budget.confirm.top=1"]
    records = study(tmp_path, "concurrency=1", *made, workload=str(DATA / "lightning_loop.py"))
    assert len(of(records, "trial")) == 2 + BESIDE
    assert all(0 <= t["values"]["accuracy"] <= 1 for t in of(records, "trial"))
    assert "not measured" not in " ".join(r["text"] for r in of(records, "note"))
    best = tmp_path / "runs" / "lightning_loop" / "one" / "best.yaml"
    assert answer(tmp_path, "train", "--from", str(best))["samples"] == 1024


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    page = (ROOT / "docs" / "frameworks.md").read_text()
    commands = [line for block in page.split("```\n")[1:] for line in block.splitlines() if line.startswith("python ")]
    assert len(commands) == 4
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    for command in commands:
        _, _, module, *arguments = command.split()
        assert run(module, arguments, tmp_path) == 0, (tmp_path / "err").read_text()[-2000:]
