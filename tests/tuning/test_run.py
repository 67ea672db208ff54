"""The command line itself: --help at once and without torch, one clear error for bad input, documented exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import commands
from tests.commands import MINE, ROOT
from tests.own_files import Here
from trainables.our_knobs import BUILT_IN
from tuning import run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder, empty."""
    monkeypatch.chdir(tmp_path)


def test_help_answers_at_once_and_imports_neither_torch_nor_ray() -> None:
    code = "import sys; from tuning import run; run.main(['--help']); print(*sorted(sys.modules), file=sys.stderr)"
    spent = []
    for _ in range(3):  # the machine may be busy: the quickest of three is the command's own time
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        spent.append(time.perf_counter() - start)
    assert not {"torch", "ray", "yaml", "pydantic", "optuna"} & set(done.stderr.split())
    assert min(spent) < 0.6
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert f"ours: {', '.join(sorted(BUILT_IN))}" in " ".join(done.stdout.split())
    assert "a100, auto, cpu" in done.stdout
    assert done.stdout.splitlines()[2].strip().startswith("python -m tuning.run")


def test_help_names_every_exit_code() -> None:
    assert all(f"  {code} " in run.HELP.replace("codes\n", "") for code in ("0", "1", "2", "3", "4", "130"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["workloda=nli"], "workload"),
        (["--frobnicate"], "--frobnicate is no option"),
        (["resume=none-such"], "none-such"),
    ],
)
def test_bad_input_is_one_error_with_code_2_and_writes_nothing(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(arguments) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) <= 8
    assert not list(tmp_path.iterdir())


def test_validate_runs_and_writes_nothing(tmp_path: Path) -> None:
    assert run.main(["workload=nli", "search.trials=3", "--validate"]) == 0
    assert not list(tmp_path.iterdir())


def test_a_workload_that_cannot_be_imported_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.py").write_text("WORKLOAD = undefined\n")
    assert run.main(["workload=broken.py"]) == 2
    err = capsys.readouterr().err
    assert "NameError: name 'undefined' is not defined" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", "workload=lacking.py has no module-level WORKLOAD"),
        ("SPACE = {'width': [8]}\nOBJECTIVES = 'max'\ndef train(run): ...\n", "workload=lacking.py has a train(run)"),
        ("SPACE = {'width': [8]}\nOBJECTIVES = {}\ndef train(run): ...\n", "workload=lacking.py: OBJECTIVES must map"),
    ],
)
def test_a_file_is_named_once_in_what_is_said_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: str, says: str
) -> None:
    monkeypatch.setattr("tuning.workers.own_workload.UserFile", Here)
    (tmp_path / "lacking.py").write_text(lines)
    assert run.main(["workload=lacking.py", "--validate"]) == 2
    assert f"error: {says.replace('lacking.py', str(tmp_path / 'lacking.py'))}" in capsys.readouterr().err


def test_a_file_with_a_command_line_finds_an_empty_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reads = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--rate', {})\n"
    rest = f"asked = parser.parse_args()\n{MINE.read_text()}"
    (tmp_path / "optional.py").write_text(reads.format("default=0.1") + rest)
    assert run.main(["workload=optional.py", "--validate"]) == 0
    (tmp_path / "required.py").write_text(reads.format("required=True") + rest)
    assert run.main(["workload=required.py", "--validate"]) == 2
    assert "required.py calls sys.exit when it is imported; what is run belongs behind" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_told_apart_though_a_wait_of_ray_replaces_its_exception(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def waits(*_: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        raise KeyboardInterrupt  # as ray.wait does where the signal arrives before it begins to wait

    monkeypatch.setattr("tuning.study.study.run", waits)
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        assert run.main(["workload=signals"]) == code
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)
    assert f"interrupted by {number.name}" in capsys.readouterr().err


WAITS = """
import contextlib, signal, subprocess, sys
from tuning import run
from tuning.study import study

def waits(*_):
    with contextlib.suppress(KeyboardInterrupt):  # the signal may come as soon as the number is out
        print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
        signal.pause()
    print("heard", flush=True)
    signal.pause()

study.run = waits
sys.exit(run.main(["workload=signals"]))
"""


def test_a_run_in_a_shells_background_obeys_signals_and_a_second_ends_all_its_processes(tmp_path: Path) -> None:
    # A shell's background inherits SIGINT as ignored.
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", WAITS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "heard\n"
        process.send_signal(signal.SIGINT)
        child.wait(timeout=20)
        assert process.wait(timeout=20) == 130
        assert "interrupted by SIGINT" in process.stderr.read()


def test_alone_it_prints_help_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([]) == 0
    assert capsys.readouterr().out == run.HELP
    assert not list(tmp_path.iterdir())


def test_the_console_script_works_beside_a_folder_called_tuning_and_such_files(tmp_path: Path) -> None:
    """It predicts for a card that is not here; tests/golden/test_study.py has such files beside `python -m`."""
    commands.share_library(tmp_path)
    for name in ("argparse", "logging", "random"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('took {name}.py')")
    for folder in ("tuning", "bin", "own"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tuning" / "__init__.py").write_text("raise RuntimeError('took their tuning')")
    script = tmp_path / "bin" / "cardtune"
    script.write_text("import sys\nfrom tuning.__main__ import main\nsys.exit(main())\n")  # as pip writes it
    (tmp_path / "own" / "__init__.py").touch()
    (tmp_path / "own" / "moons.py").write_text(MINE.read_text())
    asked = ["workload=own.moons", "card=rtx4060", "knobs.batch_size=8", "knobs.micro_batch_size=8"]
    code = commands.run(str(script), ["estimate", *asked, "knobs.amp_dtype=fp32", "--json"], tmp_path)
    said = (tmp_path / "out").read_text() + (tmp_path / "err").read_text()
    assert code == 0, said
    assert "took" not in said
    assert "cannot be predicted" not in said
    found = json.loads((tmp_path / "out").read_text().splitlines()[-1])
    assert {"workload", "card", "kernels", "knobs", "rows", "notes", "seconds"} <= found.keys()
    assert (found["card"]["name"], found["kernels"]) == ("rtx4060", "cuda")
    assert 0 < found["card"]["usable_bytes"] < found["card"]["memory_bytes"]
    assert found["rows"]
    assert all({"knobs", "confidence", "cells", "largest"} <= row.keys() for row in found["rows"])


def test_the_first_line_of_a_run_needs_none_of_the_libraries_that_take_long_to_load() -> None:
    code = (
        "import sys, tuning.run, tuning.cli.terminal, tuning.cli.train, tuning.config.load; print(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "ray", "optuna", "scipy.special", "matplotlib"} & set(done.stdout.split())


def test_the_first_line_says_what_was_asked_as_one_may_see_it(capsys: pytest.CaptureFixture[str]) -> None:
    run._first_line(["workload=nli", "workload.hf_token=abc", "name=\x1b[2J"])
    assert capsys.readouterr().err == "cardtune  workload=nli workload.hf_token=*** name=?[2J\n"
    run._first_line([f"knobs.batch_size={n}" for n in range(30)])
    assert max(map(len, capsys.readouterr().err.splitlines())) <= 80
