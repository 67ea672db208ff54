"""The worker: its process answers, is lost, and ends with whoever started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.commands import MINE
from tuning.config.errors import PreflightError
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

KNOBS = {"batch_size": 8, "micro_batch_size": 8}
BROKEN = """
from tests.data.mine import Moons

class Odd(Exception):
    pass

class Broken(Moons):
    def dataset(self, config, split):
        if config.options.get("fail"):
            raise Odd("no such place")
        return super().dataset(config, split)

    def loss(self, model, batch):
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)

WORKLOAD = Broken()
"""


def test_a_process_measures_and_a_fresh_one_follows_when_it_was_ended() -> None:
    with Worker(WorkerConfig(str(MINE))) as worker:
        first = worker.train(KNOBS, 32, (32,), seed=1)
        worker.end()
        again = worker.train(KNOBS, 32, (32,), seed=1)
    assert first["outcome"] == again["outcome"] == "ok"
    assert first["values"] == again["values"]


def test_what_a_workload_raises_comes_back_in_words_whatever_its_class(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN, encoding="utf-8")
    with (
        Worker(WorkerConfig(str(tmp_path / "broken.py"), {"fail": True})) as worker,
        pytest.raises(PreflightError, match="cannot start: Odd: no such place") as raised,
    ):
        worker.describe({})
    assert "broken.py" in str(raised.value.__cause__)  # its traceback, for -v


def test_a_process_that_is_killed_is_an_error_with_its_signal(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN, encoding="utf-8")
    with (
        Worker(WorkerConfig(str(tmp_path / "broken.py"))) as worker,
        pytest.raises(PreflightError, match=r"was lost: signal 9 \(SIGKILL\)"),
    ):
        worker.train(KNOBS, 32, (32,), seed=1)


@pytest.mark.fault
def test_it_ends_when_the_process_that_started_it_is_killed() -> None:
    code = (
        "from tuning.workers.worker import Worker; from tuning.workers.session import WorkerConfig;"
        f"b = Worker(WorkerConfig({str(MINE)!r})); b.describe({{}}); print(b._process.pid, flush=True); input()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as study:
        assert study.stdout is not None
        pid = int(study.stdout.readline())
        os.kill(study.pid, signal.SIGKILL)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=20)
