"""The check as a person runs it, small and on the CPU: its parts and the table; test_gpu_check.py has a second time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_check.__main__ import PARTS

ROOT = Path(__file__).parents[2]
# The search is a study and a training from the command line, as tests/golden has them.
PARTS_OF_TESTS = [
    pytest.param([p for p in PARTS if p != "search"], marks=pytest.mark.workload),
    pytest.param(["search"], marks=pytest.mark.slow),
]
# A machine with a card may lack what only a search needs; every process of the check reads this first.
WITHOUT = """
import importlib.machinery, sys

class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in ("ray", "optuna", "pydantic"):
            return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Without
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("parts", PARTS_OF_TESTS, ids=" ".join)
def test_every_part_runs_on_a_cpu_and_all_but_the_search_without_ray_optuna_and_pydantic(
    parts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text("" if "search" in parts else WITHOUT)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "first")}
    command = [sys.executable, "-m", "benchmarks.gpu_check", *parts, "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "NOT MET" not in done.stdout.replace("0 NOT MET", "")
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    for part in parts:
        assert f"\n{part} " in done.stdout
        document = json.loads((tmp_path / f"{part}_cpu.json").read_text(encoding="utf-8"))
        assert document["finished"], part
        assert document["versions"]["torch"]
        assert document["device"]["name"]
        assert document["revision"]
