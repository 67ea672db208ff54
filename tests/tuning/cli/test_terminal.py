"""What a run says: 80 columns, no escape codes in a pipe, and no value that is anything but text."""

import contextlib
import dataclasses
import io
import math
import os
import re
import signal
from pathlib import Path

import pytest
from rich.console import Console

from tests.tuning import hostile
from tuning.cli import live
from tuning.cli.terminal import Terminal
from tuning.config import load
from tuning.config.errors import ConfigError
from tuning.journal.events import StudyRecord
from tuning.journal.records import Record
from tuning.journal.run import History
from tuning.report import summary, text
from tuning.workers import doctor

FOLDER = Path("runs/nli/20261121-103412-3f2a")


class Tty(io.StringIO):
    """A terminal that remembers."""

    def isatty(self):
        return True


@pytest.fixture(scope="module")
def study():
    return load.load(["workload=nli", "search.trials=12"])


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


@pytest.fixture(scope="module")
def piped(records, study):
    return play(records, study)


def test_the_result_goes_to_stdout_and_the_rest_to_stderr(piped):
    out, err = piped
    told = " ".join(out.split())
    answer, _, rest = told.partition(". set ")
    assert answer.startswith("Set length_bucketing=true, ram_cache=true, amp_dtype=bf16, fused_optimizer=true, ")
    assert answer.endswith(
        "trains 1.85 times as fast as before (1.83 to 1.86), with accuracy 0.905 (before 0.887, on one seed)"
    )
    assert "micro_batch_size=8 every other knob at its default (trial t007) " in rest
    assert "accuracy 0.906 (0.893 to 0.919): range of the next run, 95 %, from 3 seeds" in told
    assert "trials 12: 5 ok, 4 stopped, 1 oom, 1 refused, 1 diverged" in told
    assert "Throughput is that of Example CPU" in told
    assert out.endswith("python -m tuning show 20261121-103412-3f2a\n")
    assert "plan      probes for 24s" in err
    assert err.count("\nprobe ") == 6
    assert err.count("\ntrial ") == 11


def test_a_terminal_gets_a_live_view_and_what_each_stage_found(records, study):
    out, err = play(records, study, Tty)
    assert "\x1b[1mlength_bucketing=true" in out
    assert "\ntrial " not in err
    assert "stage 3 of 5: search   11 of 12 trials" in err
    assert all(f" t{number:03d} " in err for number in range(11))


def test_without_colour_a_terminal_has_a_live_view_without_colours(records, study):
    out, err = play(records, study, Tty, NO_COLOR="1")
    assert "stage 3 of 5: search" in err
    assert not re.search(r"\x1b\[[0-9;]*m", out + err)


def test_a_pipe_has_a_line_an_event_with_how_many_are_done(piped):
    _, err = piped
    told = [line.split() for line in err.splitlines()]
    assert [words[1] for words in told if words[:1] == ["probe"]] == [str(n) for n in range(1, 7)]
    assert [words[1] for words in told if words[:1] == ["trial"]] == [f"{n}/12" for n in range(1, 12)]
    stages = [line for line in err.splitlines() if line.startswith("stage")]
    assert [line.split(":")[0] for line in stages] == [f"stage {n} of 5" for n in range(1, 6)]


def test_the_plan_is_told_before_anything_is_loaded_and_a_run_can_be_interrupted_then(study):
    stream = io.StringIO()
    terminal = Terminal(out=io.StringIO(), err=stream, env={})
    terminal.begin(0.0)
    terminal.plan(study)
    told = stream.getvalue()
    assert told.startswith("start     looking at the machine and the workload\n")
    assert "plan      probes for 24s, 12 trials" in told
    terminal.interrupted(signal.SIGINT)
    assert "resume" not in stream.getvalue()


def test_the_plan_has_the_time_that_probes_may_take_of_a_short_study():
    for limit, probes in (("60s", "15s"), ("10m", "24s")):
        plan = dict(text.planned(load.load(["workload=nli", f"search.max_time={limit}"])))["plan"]
        assert plan.startswith(f"probes for {probes}, ")


def test_80_columns_with_twelve_knobs_and_long_values(records, study):
    long = {f"a_knob_with_a_long_name_{n}": "value" * 30 for n in range(12)}
    widened = [changed(r, config=long) if r.event == "trial" or r.get("name") == "best" else r for r in records]
    out, err = play(widened, study, verbosity=1)
    assert max(map(len, (out + err).splitlines())) <= 80
    assert "a_knob_with_a_long_name_11=valuevaluevalueva…" in "".join(out.split())


def test_a_trial_that_the_time_stopped_between_rungs_is_told_with_what_its_last_rung_had(records, study):
    own = next(r for r in records if r.event == "trial" and r["outcome"] == "stopped")
    seen = [r for r in records if r.event == "rung" and r["trial"] == own["trial"]][-1]
    late = changed(own, stopped_at=own["stopped_at"] + 1, values={})
    _, err = play([late if r is own else r for r in records], study)
    told = next(line for line in err.splitlines() if f"{own['trial']}  stopped at" in line)
    assert f"stopped at {own['stopped_at'] + 1}  accuracy {seen['values']['accuracy']:.3f}  " in told


@pytest.mark.parametrize(("stream", "columns"), [(io.StringIO, 40), (io.StringIO, 120), (Tty, 60)])
def test_in_a_pipe_and_a_dumb_terminal_columns_decide_too_and_there_is_no_escape_code(records, study, stream, columns):
    told = "".join(play(records, study, stream, COLUMNS=str(columns), TERM="dumb"))
    assert not {"\x1b", "\r"} & set(told)
    widths = [len(line) for line in told.splitlines() if FOLDER.name not in line]  # a path or an id is not cut
    assert columns - 20 < max(widths) <= columns


@pytest.mark.parametrize("columns", ["wide", "9" * 9])
def test_what_is_no_number_of_columns_is_passed_over(records, study, piped, columns):
    assert play(records, study, COLUMNS=columns) == piped


def test_hostile_text_is_printed_as_text(records, study):
    out, err = play(hostile.run(records), study, verbosity=1)
    assert "\x1b" not in out + err
    assert "\x07" not in out + err
    assert "[/foo]<script>" in out
    assert "[/foo]<script>" in err


def test_quiet_says_little_and_still_warns(records, study):
    out, err = play(records, study, verbosity=-1)
    assert err == ""
    assert "(trial t007)" in out
    stream = io.StringIO()
    terminal = Terminal(-1, out=io.StringIO(), err=stream, env={})
    terminal.warning("the disk is [bold]nearly[/bold] full")
    terminal.warning("the disk is [bold]nearly[/bold] full")
    assert stream.getvalue() == "warning   the disk is [bold]nearly[/bold] full\n"


def test_checks_are_told_when_something_is_wrong():
    stream = io.StringIO()
    checks = [doctor.Check("disk", "OK", "9 GiB free"), doctor.Check("shm", "WARN", "64 MiB", "--shm-size=1g")]
    Terminal(out=io.StringIO(), err=stream, env={}).checks(checks)
    assert stream.getvalue() == "warning   shm: 64 MiB; --shm-size=1g\n"


def test_an_interruption_says_how_to_go_on(records):
    stream = io.StringIO()
    terminal = Terminal(-1, out=io.StringIO(), err=stream, env={})
    terminal.opened(StudyRecord.read(records[0]), Path("elsewhere/nli/x1"), 0.0, History())
    terminal.interrupted(signal.SIGINT)
    assert "interrupted by SIGINT" in stream.getvalue()
    assert "resume with: python -m tuning.run resume=x1 runs_dir=elsewhere\n" in stream.getvalue()


def test_an_error_is_printed_whole_and_without_markup():
    stream = io.StringIO()
    error = ConfigError("name=[/foo]", allowed="letters", remedy="another name")
    Terminal(-1, out=io.StringIO(), err=stream, env={}).error(error)
    assert stream.getvalue() == "error: name=[/foo]\n  allowed: letters\n  try: another name\n"


def test_a_run_cut_off_anywhere_has_a_result(records):
    for end in range(0, len(records), 4):
        out = io.StringIO()
        Terminal(out=out, err=io.StringIO(), env={}).summary(summary.of_run(History(records[:end])), FOLDER)
        told = out.getvalue().splitlines()
        known = any(r.event == "probe" for r in records[:end])
        assert known or "No configuration was picked" in told[0]
        assert max(map(len, told)) <= 80


@pytest.mark.parametrize(("columns", "alone"), [(60, False), (200, True)])
def test_tables_use_the_room_there_is(records, study, columns, alone):
    out, _ = play(records, study, COLUMNS=str(columns))
    row = next(line for line in out.splitlines() if line.startswith("best t007"))
    assert ("1.85x (1.83 to 1.86)" in row) == alone


def test_what_it_trains_on_and_what_holds_it_back_are_said(records, study):
    facts = {"parameters": {"total": 22_713_216, "trainable": 123_456}}
    spans = {"data_wait_s": 3.0, "transfer_s": 0.0, "forward_backward_s": 6.0, "optimizer_s": 1.0, "wall_s": 10.0}
    told = [
        dataclasses.replace(
            r,
            fields={
                **r.fields,
                **(facts if r.event == "study" else {}),
                **({"spans": spans, "telemetry": {"machine_cpu_frac": 0.5}} if r.event == "confirmed" else {}),
            },
        )
        for r in records
    ]
    told.insert(
        5, Record(5, "2026-11-21T10:34:12.000Z", "note", {"text": "data-wait 0.4 %: num_workers is left as it is"})
    )
    out, err = play(told, study)
    assert "model     22,713,216 parameters, 123,456 of them trained" in err
    assert "types     fp32, bf16" in err
    assert "active    " in err
    assert "note      data-wait 0.4 %: num_workers is left as it is" in err
    assert "loader-bound: 60 % in forward and backward, 10 % in the optimiser, data-wait" in " ".join(out.split())
    assert max(map(len, err.splitlines())) <= 80


def changed(record, **fields):
    return dataclasses.replace(record, fields={**record.fields, **fields})


def test_a_terminal_that_goes_away_ends_nothing(records, study):
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


@pytest.mark.parametrize("width", [60, 200])
def test_the_list_of_trials_cuts_no_knob(records, width):
    out = io.StringIO()
    Terminal(out=out, err=io.StringIO(), env={"COLUMNS": str(width)}).trials(summary.of_run(History(records)))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    found = [line for line in lines if line.startswith("t0")]
    assert len(found) == 11
    told = out.getvalue()
    for trial in (r for r in records if r.event == "trial"):
        assert f"batch_size={trial['config']['batch_size']}" in told
    assert all(("=" in line) == (width == 200) for line in found)
    assert not any(line.rstrip().endswith("=") for line in lines)


@pytest.mark.parametrize(
    ("loss", "said"),
    [(0.25, "64/128 samples  32.0 samples/s  loss 0.250"), (math.nan, "64/128 samples  32.0 samples/s")],
)
def test_a_training_that_tells_no_loss_has_none_in_its_lines(monkeypatch, loss, said):
    monkeypatch.setattr(live, "PLAIN_LINE_S", 0)
    out = io.StringIO()
    with live.TrainingBar(Console(file=out), 128, 0) as bar:
        bar.moved(64, 32.0, loss)
    assert out.getvalue() == f"{said}\n"
