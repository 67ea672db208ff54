"""A command as a custom loop: counted from outside, judged by what it prints, ended with all that it has started."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.fakes import heard
from trainables import hook, kinds, training
from trainables.evaluation import Evaluation
from trainables.integrations.program import Program
from trainables.knobs import Knobs
from trainables.own_count import OwnState
from trainables.plan import Plan
from trainables.reports import Event
from trainables.stopwatch import Window
from trainables.workload import Config, NotIndependent, WorkloadError, table_of
from trainables.workload_files import epochs_of, load

SCRIPT = """
import os, sys
{first}
import torch
from torch.utils.data import DataLoader, TensorDataset
lr, size, epochs = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
x = torch.randn(70, 4, generator=torch.Generator().manual_seed(0))
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=lr)
for epoch in range(epochs):
    loader = DataLoader(TensorDataset(x, x.sum(1)), batch_size=size, shuffle=True, drop_last=True)
    for a, b in loader:
        loss = (net(a).squeeze(1) - b).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    with torch.no_grad():
        error = sum((net(a).squeeze(1) - b).square().sum() for a, b in DataLoader(TensorDataset(x, x.sum(1)), 35)) / 70
    print(f"{{epoch}}/{{epochs}} workers {{loader.num_workers}} error={{error:.5f}}")
{last}
"""
FILE = """
import json
import sys
from trainables.integrations.program import Program
command = [sys.executable, "script.py", "{{learning_rate}}", "{{batch_size}}", {epochs}]
train = Program(command, {{"error": {pattern!r}}},
                epochs=4{more})
SPACE = {{"learning_rate": [0.1, 0.01], "batch_size": [10, 16], "num_workers": [0, 1]}}
OBJECTIVES = {{"error": "min"}}
"""
PATTERN = r"error=([-+.\w]+)"


def trained(
    folder: Path,
    samples: int,
    *,
    first: str = "",
    last: str = "",
    epochs: str = '"{epochs}"',
    more: str = "",
    **knobs: Any,
) -> tuple[OwnState, list[Event]]:
    """Returns how a script was trained, by a file that says how, and the events; `samples` is the horizon."""
    (folder / "script.py").write_text(SCRIPT.format(first=first, last=last))
    path = folder / "loop.py"
    if not path.exists():
        path.write_text(FILE.format(epochs=epochs, pattern=PATTERN, more=more))
    loaded = load(str(path))
    values = {"learning_rate": 0.1, "batch_size": 16, "micro_batch_size": 16, **knobs}
    state = training.prepare(
        training.resident_of(loaded),
        Config(Knobs.of(values, table_of(loaded))),
        Plan(samples=samples, milestones=(samples,), window_s=0.01),
    )
    assert isinstance(state, OwnState)
    events = heard(state)
    return state, events


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_trains_as_typed_and_reports_what_is_printed(place: Path) -> None:
    """64 of 70 samples an epoch in batches of 16; three epochs as {epochs}; a process that it started is ended."""
    first = 'import subprocess; child = subprocess.Popen(["sleep", "600"], start_new_session=True)\n'
    first += 'open("child", "w").write(str(child.pid))'
    state, events = trained(place, 3 * 64, first=first, last='open("done", "w").write("1")', num_workers=1)
    assert (state.pass_samples, state.samples, state.steps) == (64, 192, 12)
    reports = [event for event in events if isinstance(event, Evaluation)]
    assert [event.samples for event in reports] == [192]
    assert 0 < reports[0].values["error"] < 3
    assert sum(event.samples for event in events if isinstance(event, Window)) == 192
    assert state.active["batch_size"] == 16
    assert state.active["workers"] == 1  # set from outside: the script has no argument for it
    assert state.peak_allocated_bytes > 2**20
    assert {"learning_rate", "batch_size", "num_workers"} <= state.asked
    assert (place / "done").exists()  # it may end by itself
    child = int((place / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert epochs_of(str(place / "loop.py")) == 4


def test_what_it_cannot_train_with_is_one_error(place: Path) -> None:
    """A lack of memory is told from a mistake; a checkpoint of an earlier training makes no second one."""
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        trained(place, 64, first='raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")')
    with pytest.raises(WorkloadError, match=r"exit code 1 at File .*script.py.*ZeroDivisionError"):
        trained(place, 64, first="1 / 0")
    with pytest.raises(WorkloadError, match="no step of a training"):
        trained(place, 64, first="sys.exit()")
    again = 'if os.path.exists("last.pt"): open("last.pt").read()'
    trained(place, 64, first=again, last='open("last.pt", "w").write("1")')
    with pytest.raises(NotIndependent, match=r"last\.pt"):
        trained(place, 64, first=again)


def test_no_gradients_are_compared(place: Path) -> None:
    """It shows no model, so whether a system knob changes what is learned is not measured."""
    (place / "loop.py").write_text(FILE.format(epochs='"1"', pattern=PATTERN, more=""))
    loaded = load(str(place / "loop.py"))
    config = Config(Knobs.of({}, table_of(loaded)))
    with pytest.raises(WorkloadError, match="no gradients"):
        kinds.differing(training.resident_of(loaded), config, {"num_workers": 1})


@pytest.mark.parametrize(
    ("command", "metric", "said"),
    [
        ("", "x=(.)", "empty"),
        ("python a.py {", "x=(.)", "brace"),
        ("python a.py {0}", "x=(.)", "no knob's name"),
        ("python a.py", "x=.", "0 groups"),
        ("python a.py", "x=(", "no regular expression"),
    ],
)
def test_what_is_wrong_with_a_command_is_said_at_once(command: str, metric: str, said: str) -> None:
    """Before anything is started."""
    with pytest.raises(WorkloadError, match=said):
        Program(command, {"x": metric}, epochs=1)


def test_variables_are_shown_before_the_command() -> None:
    """As they are typed in a shell."""
    made = Program([sys.executable, "a.py", "{hidden}"], {"x": "x=(.)"}, epochs=1, env={"LR": "{learning_rate}"})
    assert made.typed == ("env", "LR={learning_rate}", sys.executable, "a.py", "{hidden}")
    assert made.placeholders == ("hidden", "learning_rate")


@pytest.mark.parametrize(("of_loader", "calls", "counted"), [(16, 1, 16), (0, 4, 64)])
def test_steps_are_timed_by_the_clock_of_the_program(
    place: Path, monkeypatch: pytest.MonkeyPatch, of_loader: int, calls: int, counted: int
) -> None:
    """However late they are heard of; without a loader each call of backward has a batch. An evaluation is no step."""
    facts = {"loader": 0, "samples": 640, "batch_size": 16, "reread": [], "num_workers": 0}

    def fed(self: Program, hearer: Any, folder: Path, settings: object) -> None:
        step = [of_loader, calls, 0.1, 0.05]
        entries: list[Any] = [["begins", 1000.0, facts], *(["step", 1000.0 + 0.5 * n, *step] for n in range(4))]
        entries += [["rests", 1001.5], ["goes on", 1009.0], ["step", 1009.5, *step]]
        if not hearer._told(json.dumps([1010.0, 2**20, entries])):  # it looked for the loader alone
            return
        hearer._held.append((1011.0, "error=0.5"))
        hearer._told(json.dumps([1012.0, 2**20, []]))

    monkeypatch.setattr(Program, "_run", fed)
    _, events = trained(place, 5 * counted)
    windows = [event for event in events if isinstance(event, Window)]
    assert sum(one.wall_s for one in windows) == pytest.approx(4 * 0.5)
    assert sum(one.data_wait_s for one in windows) == pytest.approx(4 * 0.1)
    assert sum(one.optimizer_s for one in windows) == pytest.approx(4 * 0.05)
    assert sum(one.samples for one in windows) == 5 * counted
    assert [event.values for event in events if isinstance(event, Evaluation)] == [{"error": 0.5}]


def test_only_a_training_that_is_kept_has_its_trackers(place: Path) -> None:
    """`train` keeps its folder; those of a search are deleted, with what MLflow writes."""
    off = hook.environment({"WANDB_MODE": "online"}, place)
    assert (off["WANDB_MODE"], off["MLFLOW_TRACKING_URI"]) == ("disabled", str(place))
    assert hook.environment({"WANDB_MODE": "online", hook.OUT_FOLDER: "out"}, place)["WANDB_MODE"] == "online"
