"""The file of a user's workload, imported by the process that trains it: what it declares, and an import that fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.trainables.test_own_loop import HEAD
from tuning.config.errors import ConfigError
from tuning.workers import own_workload
from tuning.workers import worker as worker_module
from tuning.workers.own_workload import UserFile
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

LOOP = f"""{HEAD}
BEFORE = {{"batch_size": 16, "width": 8}}
SPACE = {{"batch_size": [8, 16], "width": [4, 8]}}
EPOCHS = 3

def train(run): ...
"""


def test_file_is_read_by_the_process_that_trains_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(LOOP)
    with UserFile() as file:
        found = file.declared(str(path))
        assert (found.has_loop, found.epochs, found.before) == (True, 3.0, {"batch_size": 16, "width": 8})
        assert found.table.as_raw() == own_workload.declared(str(path)).table.as_raw()
        with file.worker(WorkerConfig(str(path))) as worker:
            assert worker.is_running
            worker.load()


def test_import_that_ends_its_process_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import os\nos._exit(0)")
    with (
        UserFile() as file,
        pytest.raises(ConfigError, match="could not be imported: the process was lost: exit code 0"),
    ):
        file.declared(str(path))


def test_import_that_hangs_ends_with_the_study_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import threading\nthreading.Event().wait()")
    monkeypatch.setattr(worker_module, "LAST_S", 0.5)
    with Worker(WorkerConfig(str(path))) as worker:
        worker.listen()
        worker.deadline = time.monotonic()
        says = r'search\.max_time was over: no answer .* in File ".*mine\.py", line 2'
        with pytest.raises(ConfigError, match=says) as raised:
            worker.declared()
        assert "a larger search.max_time" in raised.value.remedy
