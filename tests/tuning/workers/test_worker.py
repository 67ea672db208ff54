"""The worker: its process answers, is lost, and ends with whoever started it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.commands import wait_for
from tests.trainables.test_own_loop import HEAD
from tuning.config.errors import PreflightError
from tuning.workers import machine
from tuning.workers import worker as worker_module
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

KNOBS = {"batch_size": 8, "micro_batch_size": 8}
BESIDE = """
import argparse
import multiprocessing
import time

import net  # beside this file

def compute(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass

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

    def loss(self, model, batch):
        if len(batch[0]) == 2:
            helper = multiprocessing.get_context("fork").Process(target=compute, args=(2.5,))
            helper.start()
            helper.join()
            compute(2.0)
        return super().loss(model, batch)

WORKLOAD = Mine()
"""


@pytest.fixture(scope="module")
def said() -> list[str]:  # what the process of this file's tests was lost over
    return []


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, said: list[str]) -> Iterator[Worker]:
    """A process for the tests that leave it as it was, of a file with others beside it."""
    folder = tmp_path_factory.mktemp("beside")
    (folder / "mine.py").write_text(BESIDE, encoding="utf-8")
    (folder / "net.py").write_text("from tests.data.mine import Moons\n", encoding="utf-8")
    (folder / "fractions.py").write_text("raise ImportError('not this one')\n", encoding="utf-8")
    (folder / "tuning").mkdir()
    (folder / "tuning" / "__init__.py").write_text("raise ImportError('not this one')\n", encoding="utf-8")
    (folder / "trainables").mkdir()
    with Worker(WorkerConfig(str(folder / "mine.py"), threads=machine.cores()), said.append) as found:
        yield found


def test_a_file_imports_what_lies_beside_it_in_every_process_and_finds_an_empty_command_line(worker: Worker) -> None:
    assert worker.train({**KNOBS, "num_workers": 1}, 16, (16,), seed=1).outcome == "ok"


def test_a_training_that_confirms_halves_nothing(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"batch_size": 64, "micro_batch_size": 64}
    need = worker.train(wide, 64, (64,), seed=1).peak_allocated_bytes
    monkeypatch.setattr(worker, "config", replace(worker.config, cap_bytes=need - 1))
    found = worker.train(wide, 64, (64,), seed=1)
    assert (found.outcome, found.knobs["micro_batch_size"], found.retries) == ("oom", 64, ())


def test_a_process_that_computes_does_not_hang_because_one_of_its_own_has_ended(
    worker: Worker, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.load()
    monkeypatch.setattr(worker, "config", replace(worker.config, hang_s=2.0))
    assert worker.train({"batch_size": 2, "micro_batch_size": 2}, 2, (2,), seed=0).outcome == "ok"
    assert said == []


@pytest.mark.skipif(machine.cores() < (os.cpu_count() or 1), reason="other programs have cores of their own")
def test_a_probe_tells_what_other_programs_take_of_its_cores_meanwhile(worker: Worker) -> None:
    endless = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
    worker.load()
    others = [subprocess.Popen([sys.executable, "-c", endless]) for _ in range(machine.cores())]
    try:
        beside = worker.probe(KNOBS, 1.0, 0.0)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert 0.1 <= beside.others_cpu_frac <= 1.0


FAULTY = """
import os, signal, subprocess, sys, threading
from pathlib import Path
from tests.data.mine import Moons

HERE, PID = Path(__file__).parent, os.getpid()
wait = "import threading; threading.Event().wait()"
(HERE / f"child_of_{PID}").write_text(str(subprocess.Popen([sys.executable, "-c", wait], start_new_session=True).pid))

class Faulty(Moons):
    def loss(self, model, batch):
        if (HERE / "hang").exists():
            (HERE / "hang").unlink()
            threading.Event().wait()
        if len(batch[0]) == 64:
            print("so long", flush=True)
            (HERE / f"death_of_{PID}").touch()
            os.kill(PID, signal.SIGKILL)
        return super().loss(model, batch)

WORKLOAD = Faulty()
"""


@pytest.mark.fault
@pytest.mark.timeout(300)  # four processes, which take 22 s of one core
def test_what_is_lost_once_is_measured_again_twice_is_an_outcome(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(FAULTY, encoding="utf-8")
    said: list[str] = []

    def warned(text: str) -> None:
        said.append(text)
        worker.config = replace(worker.config, hang_s=60.0)  # on a busy machine the next one loads for long

    with Worker(WorkerConfig(str(tmp_path / "faulty.py")), warned) as worker:
        assert worker.train(KNOBS, 8, (8,), seed=0).outcome == "ok"
        (tmp_path / "hang").touch()
        worker.config = replace(worker.config, hang_s=2.0)
        assert worker.train(KNOBS, 64, (64,), seed=0).outcome == "ok"
        killed = worker.probe({"batch_size": 64, "micro_batch_size": 64}, 0.2, 0.0)
        assert worker.probe(KNOBS, 0.2, 0.0).outcome == "ok"
    assert re.match(r'process hung: no answer for \d+ s in File ".*faulty\.py", line \d+', said[0])
    assert said[0].endswith("search.hang_time gives it more time; what it measured is measured once more")
    assert (killed.outcome, killed.samples_per_s) == ("killed", None)
    assert killed.message == "the process was lost: signal 9 (SIGKILL); so long"
    assert "what it measured is measured once more" in said[1]
    assert (len(said), len(list(tmp_path.glob("death_of_*")))) == (2, 2)
    started = {int(path.read_text()) for path in tmp_path.glob("child_of_*")}
    assert len(started) == 4
    left = [process for process in psutil.process_iter() if process.pid in started]
    assert not psutil.wait_procs(left, timeout=5)[1], "what they started in another session ends with them"


STUCK = """
import os
import threading
from pathlib import Path
from torch.utils.data import DataLoader, Dataset

PIDS = Path(__file__).with_name("pids")

class Stuck(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        PIDS.with_name("begun").write_text(str(os.getpid()))
        PIDS.with_name("begun").rename(PIDS)
        threading.Event().wait()

LOADER = iter(DataLoader(Stuck(), num_workers=1))
while not PIDS.exists():
    os.sched_yield()

def train(run):
    next(LOADER)  # and it never asks for a batch

SPACE = {"batch_size": [8, 16]}
OBJECTIVES = {"error": "min"}
"""


def test_what_hangs_past_the_deadline_is_not_waited_for_or_tried_again_and_its_loader_processes_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "LAST_S", 0.5)
    (tmp_path / "stuck.py").write_text(STUCK, encoding="utf-8")
    said: list[str] = []
    with Worker(WorkerConfig(str(tmp_path / "stuck.py"), {}), said.append) as worker:
        worker.load()
        loader = psutil.Process(int((tmp_path / "pids").read_text()))
        worker.deadline = time.monotonic()
        with pytest.raises(PreflightError, match="before the workload was loaded") as raised:
            worker.describe(KNOBS)
        took_s = time.monotonic() - worker.deadline
        found = worker.train(KNOBS, 64, (64,), seed=0)
    assert "does a train(run) go over run.batches(loader)?" in raised.value.remedy
    assert (found.outcome, found.fault, said) == ("cut", "search.max_time was over", [])
    assert 0.5 <= took_s < 5.0
    assert not psutil.wait_procs([loader], timeout=5)[1]


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
    pids = tmp_path / "pids"
    code = (
        "from tuning.workers.worker import Worker; from tuning.workers.worker_config import WorkerConfig;"
        f"Worker(WorkerConfig({str(tmp_path / 'stuck.py')!r})).describe({{}})"
    )
    with subprocess.Popen([sys.executable, "-c", code], text=True) as study:
        assert wait_for(pids.exists, study)
        loader = psutil.Process(int(pids.read_text()))
        process = loader.parent()
        study.kill()
    assert process is not None
    assert not psutil.wait_procs([loader, process], timeout=20)[1]


ENDLESS = """
from trainables import own_loop

own_loop.LEAVING_S = 0.2

def train(run):
    net, optimizer = made(run)
    while True:
        try:
            for batch in run.batches(DataLoader(DATA, **run.loader())):
                run.backward(loss_of(net, batch), optimizer)
                if run.evaluate_now:
                    run.report(error=0.0)
        except BaseException:
            pass
"""


@pytest.mark.fault
def test_a_loop_that_cannot_be_ended_ends_its_process(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(HEAD + ENDLESS, encoding="utf-8")
    with (
        Worker(WorkerConfig(str(tmp_path / "endless.py"))) as worker,
        pytest.raises(PreflightError, match=r"exit code 1; train\(run\) did not end in 0.2 s: does it catch BaseExc"),
    ):
        worker.describe(KNOBS)


def test_a_process_that_still_loads_torch_ends_with_its_study(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import threading\nthreading.Event().wait()\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
    own = [sys.executable, "-P", "-m", "tuning.workers.serve", "0"]
    ended = subprocess.run(own, stdin=subprocess.DEVNULL, env=env, process_group=0, timeout=20.0)
    assert ended.returncode == -signal.SIGKILL
