"""A command as the workload: the file that is made of it, and what is wrong before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuning.config.command_file import with_file
from tuning.config.errors import ConfigError

COMMAND = "workload=python train.py --lr {learning_rate} {batch_size}"
BESIDE = ["metric=acc=([0-9.]+)", "mode=max", "epochs=3", "space=space.yaml"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a space."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.yaml").write_text("learning_rate: [0.1, 0.01]\nnum_workers: [0, 1]\nbefore: {batch_size: 8}")
    return tmp_path


def test_the_file_stands_in_the_place_of_the_command() -> None:
    """The same for the same command; what is typed beside it stays."""
    made = with_file([COMMAND, *BESIDE, "samples=100", "search.max_time=1m"])
    assert made[1:] == ["search.max_time=1m"]
    assert made == with_file([COMMAND, *BESIDE, "samples=100", "search.max_time=1m"])
    text = Path(made[0].removeprefix("workload=")).read_text()
    assert "'python train.py --lr {learning_rate} {batch_size}'" in text
    assert "epochs=3,\n    samples=100," in text
    assert "OBJECTIVES = {'acc': 'max'}" in text
    Path("my loop.py").touch()
    assert with_file(["workload=my loop.py", "name=a"]) == ["workload=my loop.py", "name=a"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ([COMMAND], "needs metric="),
        (["workload=nli", "mode=max"], "belongs to a command"),
        ([COMMAND, *BESIDE, "mode=up"], "mode=up"),
        ([COMMAND, *BESIDE, "epochs=0"], "epochs=0"),
        ([COMMAND, *BESIDE, "samples=few"], "samples=few"),
        ([COMMAND, *BESIDE, "metric=acc"], "0 groups"),
        ([COMMAND, *BESIDE, "metric=("], "metric=("),
        ([COMMAND, *BESIDE, "space=none.yaml"], "cannot be read"),
        (["workload=python train.py", *BESIDE], "no knob in braces"),
        (["workload=python train.py --lr '{learning_rate}", *BESIDE], "No closing quotation"),
        (["workload=python train.py {learning_rate} {", *BESIDE], "workload="),
        (["workload=python train.py {learning_rate} {width}", *BESIDE], "{width} of the command has no values"),
        (["workload=python train.py {num_workers}", *BESIDE], "of space.yaml is not in the command"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(typed: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        with_file(typed)
    assert said in error.value.what
    assert not Path("runs").exists()
