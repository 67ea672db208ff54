"""python -m tuning init: what it writes, which tests/test_pages.py runs as it stands; it overwrites nothing."""

import shlex

import pytest

from tests.commands import ROOT
from tuning import __main__
from tuning.cli.init import FILES

EXAMPLES = ROOT / "tuning" / "examples"


def test_every_example_is_written_and_the_next_commands_are_ones_that_a_shell_takes(tmp_path, capsys):
    written = [path for path in EXAMPLES.glob("*.py") if path.name != "my_tune.py"]  # a script of Ray Tune's users
    assert {path.name for path in written} == set(FILES)
    folder = tmp_path / "my own" / "first"
    assert __main__.main(["init", str(folder)]) == 0
    assert {p.name: p.read_text() for p in folder.iterdir()} == {p.name: p.read_text() for p in written}
    out = capsys.readouterr().out.splitlines()
    commands = [shlex.split(line.removeprefix("next: ")) for line in out if line.startswith("next: ")]
    assert [words[:3] for words in commands] == [["python", "-m", "tuning.run"]] * len(FILES)
    assert [words[3] for words in commands] == [f"workload={folder / name}" for name in FILES]


@pytest.mark.parametrize("taken", FILES)
def test_what_is_there_stays_and_nothing_is_written(taken, tmp_path, capsys):
    (tmp_path / taken).write_text("mine")
    assert __main__.main(["init", str(tmp_path)]) == 2
    assert [path.name for path in tmp_path.iterdir()] == [taken]
    assert (tmp_path / taken).read_text() == "mine"
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {tmp_path / taken} is there already")
    assert "try: python -m tuning init FOLDER" in err


@pytest.mark.parametrize(("name", "why"), [("taken", "it is a file"), ("x" * 300, "File name too long")])
def test_what_can_be_no_folder_is_one_error(name, why, tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert __main__.main(["init", str(tmp_path / name)]) == 2
    assert f"cannot be written: {why}" in capsys.readouterr().err
