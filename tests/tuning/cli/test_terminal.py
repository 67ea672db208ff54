"""What a run says while it goes on: its log as a text file, no escape code in a pipe, and no value that is not text."""

import contextlib
import io
import os
import re
import signal
from pathlib import Path

import pytest
from rich.console import Console

from tests.tuning import answered, hostile
from tests.tuning.answered import each
from tests.tuning.snapshots import check
from tuning.cli import live
from tuning.cli.terminal import Terminal
from tuning.config import load
from tuning.config.errors import ConfigError
from tuning.journal.events import StudyRecord
from tuning.journal.run import History
from tuning.report import summary, text
from tuning.workers import doctor

FOLDER = Path("runs/nli/20261121-103412-3f2a")


class Tty(io.StringIO):
    """A terminal that remembers."""

    def isatty(self):
        return True


@pytest.fixture(scope="module")
def plain(records, study):
    """What stdout and stderr of a pipe hold after the whole run."""
    return play(records, study)


def play(records, study, stream=io.StringIO, verbosity=0, **env):
    """Returns what stdout and stderr hold after a whole run."""
    out, err = stream(), stream()
    terminal = Terminal(verbosity, out=out, err=err, env={"TERM": "xterm-256color", **env}, clock=lambda: 0.0)
    run = History()
    terminal.begin(0.0)
    terminal.plan(study)
    terminal.opened(StudyRecord.read(records[0]), FOLDER, 0.0, run)
    for record in records:
        made = run.add(record)
        if record.event == "stage" and record["state"] == "start":
            terminal.stage(record["stage"])
        terminal.record(made)
    written = [FOLDER / name for name in ("best.yaml", "most_accurate.yaml", "front.csv")]
    terminal.summary(summary.of_run(History(records)), FOLDER, written)
    return out.getvalue(), err.getvalue()


def told(verbosity=0, **env):
    """Returns a terminal and what it writes to stderr."""
    stream = io.StringIO()
    return Terminal(verbosity, out=io.StringIO(), err=stream, env=env), stream


@pytest.mark.parametrize(("name", "verbosity"), [("log", 0), ("log_verbose", 1)])
def test_a_pipe_has_a_line_an_event(records, study, name, verbosity):
    counted = each(answered.run(records), "study", parameters={"total": 22_713_216, "trainable": 123_456})
    out, err = play(counted, study, verbosity=verbosity)
    check(name, err)
    assert max(map(len, err.splitlines())) <= 80
    assert out.startswith("Set "), "the result goes to stdout"


def test_a_terminal_gets_a_line_an_event_and_a_live_view(records, study):
    out, err = play(records, study, Tty)
    assert "\x1b[1mlength_bucketing=true" in out
    assert "stage 3 of 5: search   0 of 12 trials" in err
    assert all(f"  t{number:03d}  " in err for number in range(11))


def test_without_colour_a_live_view_has_no_colours(records, study):
    out, err = play(records, study, Tty, NO_COLOR="1")
    assert "stage 3 of 5: search" in err
    assert not re.search(r"\x1b\[[0-9;]*m", out + err)


def test_a_run_that_is_interrupted_early_has_told_its_plan(study):
    terminal, stream = told()
    terminal.begin(0.0)
    terminal.plan(study)
    terminal.interrupted(signal.SIGINT)
    check("interrupted_early", stream.getvalue())
    for limit, probes in (("60s", "15s"), ("10m", "24s")):
        plan = dict(text.planned(load.load(["workload=nli", f"search.max_time={limit}"])))["plan"]
        assert plan.startswith(f"probes for {probes}, ")


@pytest.mark.parametrize(("stream", "columns"), [(io.StringIO, 40), (io.StringIO, 120), (Tty, 60)])
def test_columns_decide_in_a_pipe_and_a_dumb_terminal(records, study, stream, columns):
    said = "".join(play(records, study, stream, COLUMNS=str(columns), TERM="dumb"))
    assert not {"\x1b", "\r"} & set(said)
    widths = [len(line) for line in said.splitlines() if FOLDER.name not in line]  # a path or an id is not cut
    assert columns - 20 < max(widths) <= columns


@pytest.mark.parametrize("columns", ["wide", "9" * 9])
def test_what_is_no_number_of_columns_is_passed_over(records, study, plain, columns):
    assert play(records, study, COLUMNS=columns) == plain


def test_hostile_text_is_printed_as_text(records, study):
    out, err = play(hostile.run(records), study, verbosity=1)
    assert not {"\x1b", "\x07"} & set(out + err)
    assert "[/foo]<script>" in out
    assert "[/foo]<script>" in err


def test_quiet_says_little_and_still_warns(records, study):
    out, err = play(records, study, verbosity=-1)
    assert (err, "; trial t007" in out) == ("", True)
    terminal, stream = told(-1)
    for _ in range(2):
        terminal.warning("the disk is [bold]nearly[/bold] full")
    assert stream.getvalue() == "warning   the disk is [bold]nearly[/bold] full\n"


def test_checks_are_told_when_something_is_wrong():
    terminal, stream = told()
    terminal.checks([doctor.Check("disk", "OK", "9 GiB free"), doctor.Check("shm", "WARN", "64 MiB", "--shm-size=1g")])
    assert stream.getvalue() == "warning   shm: 64 MiB; --shm-size=1g\n"


def test_an_interruption_says_how_to_go_on(records):
    terminal, stream = told(-1)
    terminal.opened(StudyRecord.read(records[0]), Path("elsewhere/nli/x1"), 0.0, History())
    terminal.interrupted(signal.SIGINT)
    assert "interrupted by SIGINT" in stream.getvalue()
    assert "resume with: python -m tuning.run resume=x1 runs_dir=elsewhere\n" in stream.getvalue()


def test_an_error_is_printed_whole_and_without_markup():
    terminal, stream = told(-1)
    terminal.error(ConfigError("name=[/foo]", allowed="letters", remedy="another name"))
    assert stream.getvalue() == "error: name=[/foo]\n  allowed: letters\n  try: another name\n"


def test_a_terminal_that_goes_away_ends_nothing():
    parent, child = os.openpty()
    gone = os.fdopen(child, "w", encoding="utf-8")
    terminal = Terminal(0, out=io.StringIO(), err=gone, env={"TERM": "dumb"})
    terminal.warning("before")
    assert b"before" in os.read(parent, 100)
    os.close(parent)
    terminal.warning("after")
    terminal.left("the best so far is kept")
    with contextlib.suppress(OSError):  # what was not written
        gone.close()


@pytest.mark.parametrize(("left_s", "said"), [(None, ""), (0.5, ""), (21.0, ", 20s left"), (3725.0, ", 1h02m left")])
def test_a_log_of_a_training_has_the_time_left_if_it_is_known(monkeypatch, left_s, said):
    monkeypatch.setattr(live, "PLAIN_LINE_S", 0)
    out = io.StringIO()
    with live.TrainingBar(Console(file=out), 128, 0) as bar:
        bar.moved(64, left_s, lambda: ["32.0 samples/s", "loss 0.250"])
    assert out.getvalue() == f"64/128 samples{said}  32.0 samples/s  loss 0.250\n"


@pytest.mark.parametrize("width", [80, 200])
def test_the_bar_stays_within_the_terminal(width):
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=width, color_system=None)
    figures = [
        "12345.6 samples/s",
        "loss 0.123",
        "18.20 GiB in tensors of 20.52 GiB reserved",
        "gpu 97%",
        "71 C",
        "345 W",
    ]
    with live.TrainingBar(console, 2000, 0) as bar:
        bar.moved(500, 3725.0, lambda: figures)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.getvalue()).replace("\r", "\n").splitlines()
    assert any("25%" in line and "1h02m left" in line for line in lines)
    assert all(len(line) <= width for line in lines)
    assert all(any(figure in line for line in lines) for figure in (figures[0], figures[-1]))
