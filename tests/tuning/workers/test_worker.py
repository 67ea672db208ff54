"""The worker: its process answers, is lost, and ends with whoever started it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.commands import MINE, wait_for
from tuning.config.errors import PreflightError
from tuning.workers import machine
from tuning.workers import worker as worker_module
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

KNOBS = {"batch_size": 8, "micro_batch_size": 8}
BROKEN = """
from tests.data.mine import Moons

class Broken(Moons):
    def loss(self, model, batch):
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)

WORKLOAD = Broken()
"""


BESIDE = """
import argparse

import net  # beside this file

class Mine(net.Moons):
    def dataset(self, config, split):
        import fractions  # of the standard library, whatever is called so beside this file
        assert fractions.Fraction
        return super().dataset(config, split)

    def model(self, config):
        parser = argparse.ArgumentParser()
        parser.add_argument("--width", type=int, default=8)
        self.width = parser.parse_args().width  # a command line that is read while it trains is empty
        return super().model(config)

WORKLOAD = Mine()
"""


def test_a_file_imports_what_lies_beside_it_in_every_process_and_finds_an_empty_command_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BESIDE, encoding="utf-8")
    (tmp_path / "net.py").write_text("from tests.data.mine import Moons\n", encoding="utf-8")
    (tmp_path / "fractions.py").write_text("raise ImportError('not this one')\n", encoding="utf-8")
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "__init__.py").write_text("raise ImportError('not this one')\n", encoding="utf-8")
    (tmp_path / "trainables").mkdir()
    with Worker(WorkerConfig(str(tmp_path / "mine.py"))) as worker:
        assert worker.train({**KNOBS, "num_workers": 1}, 16, (16,), seed=1)["outcome"] == "ok"


def test_a_training_that_confirms_halves_nothing() -> None:
    wide = {"batch_size": 64, "micro_batch_size": 64}
    with Worker(WorkerConfig(str(MINE))) as worker:
        need = worker.train(wide, 64, (64,), seed=1)["peak_allocated_bytes"]
    with Worker(WorkerConfig(str(MINE), cap_bytes=need - 1)) as worker:
        found = worker.train(wide, 64, (64,), seed=1)
    assert (found["outcome"], found["knobs"]["micro_batch_size"], found["ooms"]) == ("oom", 64, [])


def test_a_measurement_that_kills_its_process_is_made_once_more_and_then_an_outcome(tmp_path: Path) -> None:
    words = BROKEN.replace("import os, signal", "import os, signal; print('so long', flush=True)")
    (tmp_path / "broken.py").write_text(words, encoding="utf-8")
    said: list[str] = []
    lost = "the process was lost: signal 9 (SIGKILL); so long"
    with Worker(WorkerConfig(str(tmp_path / "broken.py")), said.append) as worker:
        found = worker.probe(KNOBS, 0.5, 0.0)
        assert worker.describe({})["train_samples"] == 1024
    assert (found["outcome"], found["message"], found["samples_per_s"]) == ("killed", lost, None)
    assert said == [f"{lost}; what it measured is measured once more"]


HANGING = """
import threading
from pathlib import Path
from tests.data.mine import Moons

class Hanging(Moons):
    options = {**Moons.options, "until": ""}

    def loss(self, model, batch):
        if not Path(self.until).exists():
            Path(self.until).touch()
            threading.Event().wait()
        if len(batch[0]) == 4:
            threading.Event().wait()
        return super().loss(model, batch)

    def model(self, config):
        self.until = config.options["until"]
        return super().model(config)

WORKLOAD = Hanging()
"""


def test_a_process_that_hangs_is_measured_again_and_says_where_it_stood(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING, encoding="utf-8")
    said: list[str] = []
    config = WorkerConfig(str(tmp_path / "hanging.py"), {"until": str(tmp_path / "hung")}, hang_s=2.0)
    with Worker(config, said.append) as worker:
        assert worker.train(KNOBS, 64, (64,), seed=0)["outcome"] == "ok"
        assert len(said) == 1
        found = worker.window({**KNOBS, "micro_batch_size": 4}, 0.1, 0)
    assert (found["outcome"], found["fault"]) == ("timeout", "process hung")
    assert "hanging.py" in found["message"]
    assert "search.hang_time gives it more time" in found["message"]
    assert len(said) == 2


COMPUTING = """
import multiprocessing
import time
from tests.data.mine import Moons

def compute(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

class Computing(Moons):
    def loss(self, model, batch):
        helper = multiprocessing.get_context("fork").Process(target=compute, args=(2.5,))
        helper.start()
        helper.join()
        compute(1.5)
        return super().loss(model, batch)

WORKLOAD = Computing()
"""


def test_a_process_that_computes_does_not_hang_because_one_of_its_own_has_ended(tmp_path: Path) -> None:
    (tmp_path / "computing.py").write_text(COMPUTING, encoding="utf-8")
    said: list[str] = []
    with Worker(WorkerConfig(str(tmp_path / "computing.py")), said.append) as worker:
        worker.describe({})
        worker.config = replace(worker.config, hang_s=1.0)
        assert worker.train(KNOBS, 8, (8,), seed=0)["outcome"] == "ok"
    assert said == []


STUCK = """
import os
import threading
from pathlib import Path
from torch.utils.data import Dataset
from tests.data.mine import Moons

class Stuck(Dataset):
    def __init__(self, pids):
        self.pids = pids

    def __len__(self):
        return 64

    def __getitem__(self, index):
        with Path(self.pids).open("a") as file:
            file.write(f"{os.getpid()}\\n")
        threading.Event().wait()

class Waiting(Moons):
    options = {**Moons.options, "pids": ""}

    def dataset(self, config, split):
        return Stuck(config.options["pids"])

WORKLOAD = Waiting()
"""


def test_what_hangs_past_the_deadline_is_not_waited_for_or_tried_again_and_its_loader_processes_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "LAST_S", 0.5)
    (tmp_path / "stuck.py").write_text(STUCK, encoding="utf-8")
    pids, said = tmp_path / "pids", list[str]()
    with Worker(WorkerConfig(str(tmp_path / "stuck.py"), {"pids": str(pids)}), said.append) as worker:
        worker.load()
        worker.deadline = time.monotonic() + 3.0
        found = worker.train({**KNOBS, "num_workers": 1}, 64, (64,), seed=0)
        took_s = time.monotonic() - worker.deadline
    assert (found["outcome"], found["fault"], said) == ("cut", "search.max_time was over", [])
    assert 0.5 <= took_s < 5.0
    left = [psutil.Process(pid) for pid in set(map(int, pids.read_text().split())) if psutil.pid_exists(pid)]
    assert not psutil.wait_procs(left, timeout=5)[1]


ENDLESS = """
import time

def train(run):
    while run.progress < 1:  # its batches come from elsewhere
        time.sleep(0.01)

SPACE = {"batch_size": [8, 16]}
OBJECTIVES = {"error": "min"}
"""


def test_a_loop_that_never_asks_for_a_batch_is_told_what_it_may_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "LAST_S", 0.2)
    (tmp_path / "endless.py").write_text(ENDLESS, encoding="utf-8")
    with Worker(WorkerConfig(str(tmp_path / "endless.py"), {})) as worker:
        worker.load()
        worker.deadline = time.monotonic()
        with pytest.raises(PreflightError, match="before the workload was loaded") as raised:
            worker.describe(KNOBS)
    assert "does a train(run) go over run.batches(loader)?" in raised.value.remedy


def test_a_workload_that_is_not_loaded_in_time_says_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "LAST_S", 0.1)
    with Worker(WorkerConfig("tests/data/mine.py", {})) as worker:
        worker.deadline = time.monotonic()
        with pytest.raises(PreflightError) as raised:
            worker.describe(KNOBS)
    assert raised.value.what.startswith("search.max_time was over before the workload was loaded: no answer for ")
    assert raised.value.remedy == "a larger search.max_time"


@pytest.mark.fault
def test_its_process_and_its_loaders_end_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK, encoding="utf-8")
    pids, knobs = tmp_path / "pids", {**KNOBS, "num_workers": 1}
    code = (
        "from tuning.workers.worker import Worker; from tuning.workers.worker_config import WorkerConfig;"
        f"b = Worker(WorkerConfig({str(tmp_path / 'stuck.py')!r}, {{'pids': {str(pids)!r}}}));"
        f"b.train({knobs!r}, 64, (64,), seed=0)"
    )
    with subprocess.Popen([sys.executable, "-c", code], text=True) as study:
        assert wait_for(lambda: pids.exists() and pids.read_text().endswith("\n"), study)
        loader = psutil.Process(int(pids.read_text()))
        process = loader.parent()
        study.kill()
    assert process is not None
    assert not psutil.wait_procs([loader, process], timeout=20)[1]


@pytest.mark.skipif(machine.cores() < (os.cpu_count() or 1), reason="other programs have cores of their own")
def test_a_probe_tells_what_other_programs_take_of_its_cores_meanwhile() -> None:
    cores, endless = machine.cores(), f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    with Worker(WorkerConfig(str(MINE), threads=cores)) as worker:
        worker.load()
        others = [subprocess.Popen([sys.executable, "-c", endless]) for _ in range(cores)]
        try:
            beside = worker.probe(KNOBS, 1.0, 0.0)
        finally:
            for other in others:
                other.kill()
                other.wait()
    assert 0.1 <= beside["others_cpu_frac"] <= 1.0
