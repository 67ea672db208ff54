"""An unedited program is counted, timed and changed from outside, and ended with all that it started."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests.tuning.outside.test_compare import LOADER, Formula, seen
from tuning.__main__ import main
from tuning.cli import probe as probing
from tuning.config.errors import ConfigError
from tuning.outside.runs import Command

SCRIPT = """\
import subprocess, sys, torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(400, 4), torch.randint(0, 2, (400,)))
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
helper = subprocess.Popen(["sleep", "600"], start_new_session=True)
held_out = DataLoader(data, batch_size=100)
for epoch in range(10**6):
    train = DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    print(train.num_workers, optimizer.param_groups[0]["fused"], flush=True)
    for x, y in train:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        for x, y in held_out:
            model(x)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def program(*arguments: str, **env: str) -> Command:
    """Returns the command that runs a script; `env` is more of its environment."""
    folder = Path("runs")
    folder.mkdir(exist_ok=True)
    return Command([sys.executable, *arguments], folder, {"PATH": "/usr/bin:/bin", **env})


RESUMING = 'import os\nif os.path.exists("last.pt"):\n    open("last.pt").read()\nopen("last.pt", "w").write("1")\n'


def test_program_is_counted_then_changed_and_nothing_is_left(place: Path) -> None:
    """Two runs of a script that goes on from its own checkpoint, beside a start-up module of its user."""
    Path("train.py").write_text(RESUMING + SCRIPT)
    (place / "theirs").mkdir()
    (place / "theirs" / "sitecustomize.py").write_text("print('theirs', flush=True)\n")
    own = program("train.py", RANK="3", SLURM_JOB_ID="1", PYTHONPATH=str(place / "theirs"))
    assert own.dropped == ["RANK", "SLURM_JOB_ID"]
    first = own.look({}, None, 0.2, 60.0)
    assert first.samples == 16 * first.counted > 0
    loader = first.loader
    assert (Path(loader.file).name, loader.line, loader.batch_size) == ("train.py", 13, 16)
    assert len(first.loaders) == 2, "one that is made again in each epoch is the same"
    assert [(Path(o.file).name, o.line, o.name) for o in first.optimizers] == [("train.py", 9, "AdamW")]
    assert 0.9 < sum(first.share(part) for part in ("waiting", "backward", "optimizer")) + 0.9 < 1.9
    assert first.split_s == pytest.approx(first.measured_s)
    assert first.reread == []
    assert [Path(path).name for path in own.wrote] == ["last.pt"], "and nothing of ours"
    second = own.look({"num_workers": 1, "persistent_workers": True, "fused": True}, 1, 0.2, 60.0)
    assert own.output.read_text().splitlines()[:2] == ["theirs", "1 True"]
    assert second.loader.num_workers == 1
    assert [Path(path).name for path in second.reread] == ["last.pt"]
    assert _running(str(place)) == [], "what it started has ended with it"


def _running(folder: str) -> list[str]:
    """Returns the commands of processes that run in a folder, zombies left out."""
    others = [one for one in psutil.process_iter(["cwd", "cmdline"]) if one.pid != os.getpid()]
    return [" ".join(one.info["cmdline"]) for one in others if one.info["cwd"] == folder and one.info["cmdline"]]


def test_weights_that_are_updated_by_hand_have_steps_too(place: Path) -> None:
    by_hand = "[p.data.add_(p.grad, alpha=-0.1) for p in model.parameters()]"
    (place / "train.py").write_text(
        SCRIPT.replace("optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)\n", "")
        .replace("optimizer.step()", by_hand)
        .replace("optimizer.zero_grad()", "model.zero_grad()")
        .replace(', optimizer.param_groups[0]["fused"]', "")
    )
    found = program("train.py").look({}, None, 0.2, 60.0)
    assert found.samples == 16 * found.counted > 0
    assert found.optimizers == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import sys\ndef f():\n    raise ValueError('no cats')\nf()\n", ["exit code 1", "line 3, in f", "no cats"]),
        (SCRIPT.replace("range(10**6)", "range(1)").replace("batch_size=16", "batch_size=200"), ["2 steps, too few"]),
        ("print('nothing trains here')\n", ["no step of a training", "nothing trains here"]),
    ],
)
def test_what_cannot_be_measured_is_said(place: Path, text: str, says: list[str]) -> None:
    Path("other.py").write_text(text)
    with pytest.raises(ConfigError) as raised:
        program("other.py").look({}, None, 0.2, 60.0)
    assert all(part in raised.value.what for part in says)


def test_the_command_says_what_to_write_and_where(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Known(Formula):
        """A program whose figures are given; those of the script above are in other tests."""

        dropped: tuple[str, ...] = ()
        wrote: tuple[str, ...] = ()
        others_frac = 0.0

        def __init__(self, command: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
            today = seen(loader=LOADER.model_copy(update={"file": str(place / "train.py"), "line": 9}))
            super().__init__({"num_workers=2": 0.5}, today)

    monkeypatch.setattr(probing, "Command", Known)
    assert main(["probe", "--max-time", "5m", "--json", "--", "python", "train.py"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["set"] == {"num_workers": 2, "persistent_workers": True}
    assert "train.py:9" in found["answer"]
    (folder,) = (place / "runs" / "probe").iterdir()
    subprocess.run(["git", "apply", str(folder / "probe.patch")], cwd=place, check=True)
    assert "drop_last=True, num_workers=2, persistent_workers=True)" in (place / "train.py").read_text()
    assert main(["probe", "--max-time", "5m", "--", "python", "train.py"]) == 0
    assert capsys.readouterr().out.startswith("Write num_workers=2, persistent_workers=True in DataLoader(...)")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-time", "3", "--", "true"], "10s to 24h"),
        (["--"], "no command"),
        (["--", "no-such-program"], "cannot be started"),
    ],
)
def test_bad_input_is_said(place: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    assert main(["probe", *words]) == 2
    assert says in capsys.readouterr().err
    assert not list(place.glob("runs/probe/*")), "nothing is written"
