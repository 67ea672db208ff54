"""python -m tuning init: what it writes runs as it stands, comes from the wheel alone, and overwrites nothing."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_wheel

from tests.commands import ROOT, run, start, wait_for
from tuning import __main__
from tuning.cli.init import FILES

EXAMPLES = ROOT / "tuning" / "examples"


def test_every_example_is_written_and_the_next_commands_are_ones_that_a_shell_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(FILES)
    folder = tmp_path / "my own" / "first"
    assert __main__.main(["init", str(folder)]) == 0
    assert {p.name: p.read_text() for p in folder.iterdir()} == {p.name: p.read_text() for p in EXAMPLES.glob("*.py")}
    out = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line.removeprefix("next: ")) for line in out if line.startswith("next: ")]
    assert [words[:3] for words in commands] == [["python", "-m", "tuning.run"]] * len(FILES)
    assert [words[3] for words in commands] == [f"workload={folder / name}" for name in FILES]


@pytest.mark.parametrize("taken", FILES)
def test_what_is_there_stays_and_nothing_is_written(
    taken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / taken).write_text("mine")
    assert __main__.main(["init", str(tmp_path)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == [taken]
    assert (tmp_path / taken).read_text() == "mine"
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {tmp_path / taken} is there already")
    assert "try: python -m tuning init FOLDER" in err


def test_a_file_in_the_place_of_the_folder_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("")
    assert __main__.main(["init", str(tmp_path / "taken")]) == 2
    assert "taken cannot be written: it is a file" in capsys.readouterr().err


def test_a_name_that_no_folder_can_have_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["init", str(tmp_path / ("x" * 300))]) == 2
    assert "cannot be written: File name too long" in capsys.readouterr().err


def test_an_installed_wheel_has_all_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with zipfile.ZipFile(tmp_path / build_wheel(str(tmp_path))) as wheel:
        wheel.extractall(tmp_path / "installed")
    command = [sys.executable, "-P", "-m", "tuning", "init", "made"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    for name in FILES:
        assert (tmp_path / "made" / name).read_text() == (EXAMPLES / name).read_text()


def test_the_loop_trains_on_its_own(tmp_path: Path) -> None:
    assert run("tuning", ["init"], tmp_path) == 0
    process = start("my_loop", [], tmp_path)
    assert wait_for(lambda: "samples: accuracy" in (tmp_path / "out").read_text(), process)
    process.kill()
    process.wait()
