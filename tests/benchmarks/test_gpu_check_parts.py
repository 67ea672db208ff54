"""The check as a person runs it, small and on the CPU: its parts, the table, and a second time at once."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu_check.__main__ import PARTS

ROOT = Path(__file__).parents[2]
# The search is a study and a training from the command line, as tests/golden has them.
PARTS_OF_TESTS = [
    pytest.param([p for p in PARTS if p != "search"], marks=pytest.mark.workload),
    pytest.param(["search"], marks=pytest.mark.slow),
]


def check(parts: list[str], out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_check", *parts, "--device", "cpu", "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("parts", PARTS_OF_TESTS, ids=" ".join)
def test_every_part_runs_on_a_cpu_and_what_is_there_is_not_run_again(parts: list[str], tmp_path: Path) -> None:
    done = check(parts, tmp_path)
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
    began = time.monotonic()
    again = check(parts, tmp_path)
    assert again.returncode == 0
    assert again.stdout == done.stdout
    assert time.monotonic() - began < 20.0, "nothing is measured again"
