"""The other verbs: what they print for people and for programs, in which order, and what they say to bad input."""

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from tests.commands import ROOT
from trainables import Knob
from trainables.knobs import KnobTable, Scalar
from tuning import __main__, __version__
from tuning.cli import replies, stop
from tuning.journal.events import EVENTS
from tuning.journal.records import IN_ANOTHER_CONTAINER, Journal, Record
from tuning.journal.run import History
from tuning.report import summary, tables
from tuning.report.summary import Summary

OLDEST, NEWEST = "zz-first", "20261121-103412-3f2a"


def written(folder: Path, records: Sequence[Record]) -> Path:
    """Returns the folder, which now holds a journal of these records at their own times."""
    folder.mkdir(parents=True)
    with Journal.open(folder / "trials.jsonl", create=True) as journal:
        for record in records:
            journal.append(EVENTS[record.event], **record.fields)
    return folder


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory, records):
    """An older run that was cut off behind its pick, and a newer whole one; each record waits for the disk."""
    runs = tmp_path_factory.mktemp("runs")
    written(runs / "mine" / OLDEST, [r for r in records if r.get("stage") != "export"])
    written(runs / "nli" / NEWEST, records)
    return runs


@pytest.fixture
def runs_dir(tmp_path, two_runs):
    """A copy of the two runs, below a path with a space."""
    return Path(shutil.copytree(two_runs, tmp_path / "my runs"))


def answered(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Returns exit code, stdout and stderr of one command."""
    code = __main__.main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_list_has_the_newest_last_whatever_the_runs_are_called(runs_dir, capsys):
    code, out, err = answered(capsys, "list", "--runs-dir", runs_dir)
    assert (code, err) == (0, "")
    first, second = (re.split(r" {2,}", line) for line in out.splitlines())
    assert (first[:2], first[3:5]) == ([OLDEST, "mine"], ["unfinished", "11 trials"])
    assert (second[:2], second[3:5]) == ([NEWEST, "nli"], ["finished", "11 trials"])
    assert re.match(r"\d\d \w{3} \d\d:\d\d$", second[2])
    assert re.match(r"\d\.\d\dx ", second[5])
    rows = json.loads(answered(capsys, "list", "--runs-dir", runs_dir, "--json")[1])["runs"]
    assert [row["id"] for row in rows] == [OLDEST, NEWEST]
    assert rows[0]["began"] <= rows[1]["began"]


def test_list_of_nothing_says_so(tmp_path, capsys):
    code, out, err = answered(capsys, "list", "--runs-dir", tmp_path)
    assert (code, out) == (0, "")
    assert f"no runs in {tmp_path}" in err
    assert answered(capsys, "list", "--runs-dir", tmp_path, "--json") == (0, '{"schema":1,"runs":[]}\n', "")


def test_show_of_a_run_that_was_cut_off_says_how_to_go_on(runs_dir, capsys):
    _, out, err = answered(capsys, "show", OLDEST, "--runs-dir", runs_dir)
    assert out.startswith("Set ")
    assert "every other knob as in your settings; trial t007" in " ".join(out.split())
    assert err == f"resume with: python -m tuning.run resume={OLDEST} {shlex.quote(f'runs_dir={runs_dir}')}\n"
    assert answered(capsys, "show", NEWEST, "--runs-dir", runs_dir)[2] == ""


def test_show_before_a_pick_has_the_way_on_as_the_next_command(tmp_path, records, capsys):
    written(tmp_path / "nli" / "early", [r for r in records[:20] if r.event != "probe"])
    _, out, err = answered(capsys, "show", "early", "--runs-dir", tmp_path)
    assert "No configuration was picked" in out
    assert shlex.split(out[out.index("\nnext") :])[1:] == [
        *("python", "-m", "tuning.run", "resume=early", f"runs_dir={tmp_path}")
    ]
    assert err == ""


def test_every_printed_command_is_one_that_a_shell_takes(runs_dir, capsys):
    out = answered(capsys, "show", NEWEST, "--runs-dir", runs_dir)[1]
    commands = out[out.index("\nnext") + 5 :].partition("\n\n")[0].strip().splitlines()
    assert shlex.split(commands[0])[-1] == str(runs_dir / "nli" / NEWEST / "best.yaml")
    assert [shlex.split(c)[3:] for c in commands[1:]] == [
        [verb, NEWEST, "--runs-dir", str(runs_dir)] for verb in ("ablate", "show")
    ]


def test_a_run_is_named_by_its_folder_too(runs_dir, capsys, monkeypatch):
    _, by_id, _ = answered(capsys, "show", NEWEST, "--json", "--runs-dir", runs_dir)
    monkeypatch.chdir(runs_dir / "nli")
    for asked in (runs_dir / "nli" / NEWEST, NEWEST, f"../nli/{NEWEST}"):
        code, by_folder, _ = answered(capsys, "show", asked, "--json")
        assert (code, json.loads(by_folder)["trials"]) == (0, json.loads(by_id)["trials"])
    code, _, err = answered(capsys, "show", "x" * 300, "--runs-dir", runs_dir)
    assert (code, "no run of this id" in err) == (2, True)


@pytest.mark.parametrize(
    ("asked", "remedy"), [("nope", "--runs-dir PATH, if it"), (NEWEST[:-2], f"did you mean {NEWEST}?")]
)
def test_an_unknown_run_is_named_as_it_was_typed(runs_dir, asked, remedy, capsys):
    code, out, err = answered(capsys, "show", asked, "--runs-dir", runs_dir)
    assert (code, out) == (2, "")
    assert err.startswith(
        f"error: {asked}: no run of this id in {runs_dir}\n  allowed: recent runs: {OLDEST}, {NEWEST}"
    )
    assert f"try: {remedy}" in err
    assert "resume=" not in err


def test_an_unknown_command_has_the_nearest_and_none_has_all(capsys):
    code, _, err = answered(capsys, "shwo")
    assert (code, "no command 'shwo'; did you mean show?" in err) == (2, True)
    code, out, _ = answered(capsys)
    assert (code, "python -m tuning train last" in out) == (0, True)
    assert max(map(len, out.splitlines())) <= 80
    assert answered(capsys, "--version")[:2] == (0, f"cardtune {__version__}\n")


def test_a_run_of_another_version_or_without_a_journal_is_a_sentence(runs_dir, records, capsys):
    for name, schema in (("later", 3), ("earlier", 1)):
        study = dataclasses.replace(records[0], fields={**records[0].fields, "schema": schema})
        written(runs_dir / "nli" / name, [study, *records[1:]])
    (runs_dir / "nli" / "odd" / "trials.jsonl").mkdir(parents=True)
    (runs_dir / "nli" / "torn").mkdir()
    (runs_dir / "nli" / "torn" / "trials.jsonl").write_bytes(b'{"seq":0,\xff\n' * 3)
    listed = json.loads(answered(capsys, "list", "--runs-dir", runs_dir, "--json")[1])["runs"]
    states = {row["id"]: row["state"] for row in listed}
    assert (states["later"], states["odd"], states[NEWEST]) == ("other version", "unreadable", "finished")
    for verb in ("show", "report", "ablate"):
        code, out, err = answered(capsys, verb, "later", "--runs-dir", runs_dir)
        assert (code, out) == (2, "")
        assert err.startswith("error: run later was written by a later version of cardtune (schema 3)\n")
        assert answered(capsys, verb, "odd", "--runs-dir", runs_dir)[0] == 2
    err = answered(capsys, "show", "earlier", "--runs-dir", runs_dir)[2]
    assert err.startswith("error: run earlier was written by an earlier version of cardtune (schema 1)\n")
    code, out, err = answered(capsys, "show", "torn", "--runs-dir", runs_dir)
    assert (code, "No configuration was picked" in out) == (0, True)
    assert "damaged" in err or "no whole record" in err


def test_ablate_says_that_a_secret_was_not_written_down(runs_dir, records, capsys):
    workload = {**records[0]["config"]["workload"], "options": {"model": None, "hub_token": "***"}}
    config = {**records[0]["config"], "workload": workload}
    study = dataclasses.replace(records[0], fields={**records[0].fields, "config": config})
    written(runs_dir / "nli" / "secret", [study, *records[1:]])
    code, out, err = answered(capsys, "ablate", "secret", "--runs-dir", runs_dir)
    assert (code, out) == (2, "")
    assert err.startswith("error: run secret: workload.hub_token is a secret, which was not written down\n")


def test_ablate_says_that_nothing_differs(runs_dir, records, capsys):
    best = summary.of_run(History(records)).best
    given = {name for name in summary.of_run(History(records)).named if name not in ("best", "most_accurate")}
    alike = [
        dataclasses.replace(r, fields={**r.fields, "config": best.config}) if r.get("name") in given else r
        for r in records
    ]
    written(runs_dir / "nli" / "alike", alike)
    code, out, err = answered(capsys, "ablate", "alike", "--runs-dir", runs_dir)
    assert (code, out) == (0, "")
    assert "the best of run alike and before differ in nothing that changes speed" in err


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("knobs.compil=default", "did you mean knobs.compile?"),
        ("compile=fast", "knobs.compile: fast is not allowed"),
        ("knobs.compile=[off,default]", "has one value for each knob"),
        ("knobs.learning_rate=0.1", "it changes what is learned, and not how fast"),
        ("knobs.tf32=true", "cannot be had with card=Example CPU"),
        ("card=t4", "card is not a knob of this workload"),
    ],
)
def test_ablate_refuses_a_knob_before_it_measures(runs_dir, capsys, typed, says):
    code, out, err = answered(capsys, "ablate", NEWEST, typed, "--runs-dir", runs_dir)
    assert (code, out) == (2, "")
    assert says in err
    assert not (runs_dir / "nli" / NEWEST / "ablation.jsonl").exists()


def test_help_loads_nothing_that_takes_long():
    heavy = "{'torch', 'ray', 'matplotlib', 'pydantic', 'rich', 'optuna'}"
    code = f"import sys; from tuning.__main__ import main; main(['-h']); sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("arguments", [["tuning", "list", "--json"], ["tuning.run", "--help"]])
def test_a_reader_that_has_gone_ends_the_command_without_a_word(arguments, runs_dir):
    with_runs = [*arguments, "--runs-dir", str(runs_dir)] if "list" in arguments else arguments
    command = [sys.executable, "-m", *with_runs]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_two_runs_are_compared_by_speed_quality_and_the_knobs_that_differ(runs_dir, records, capsys):
    early = list(records[: next(n for n, r in enumerate(records) if r.event == "pick")])
    study = dataclasses.replace(early[0], fields={**early[0].fields, "id": "early"})
    written(runs_dir / "nli" / "early", [study, *(r for r in early[1:] if r.event != "trial" or r["trial"] != "t007")])
    code, out, _ = answered(capsys, "compare", NEWEST, "early", "--runs-dir", runs_dir)
    assert code == 0
    assert NEWEST in out.splitlines()[0]
    found = json.loads(answered(capsys, "compare", NEWEST, "early", "--runs-dir", runs_dir, "--json")[1])["rows"]
    assert found["best"][0] == "trial t007" != found["best"][1]
    assert {"samples/s", "accuracy", "peak", "learning_rate"} <= set(found)
    _, out, _ = answered(capsys, "compare", NEWEST, "early", OLDEST, NEWEST, "--runs-dir", runs_dir)
    assert "early" in out
    assert max(map(len, out.splitlines())) <= 80
    assert answered(capsys, "compare", NEWEST, "--runs-dir", runs_dir)[0] == 2
    assert answered(capsys, "compare", NEWEST, "nope", "--runs-dir", runs_dir)[0] == 2


def test_each_best_is_compared_by_the_knobs_of_its_own_run_and_by_their_values(found):
    def of(own: dict[str, Knob], **config: Scalar) -> Summary:
        best = dataclasses.replace(found.named["best"], config={**config, "amp_dtype": "bf16"})
        study = dataclasses.replace(found.study, asked=("learning_rate", "amp_dtype", *own))
        return dataclasses.replace(found, table=KnobTable(own), study=study, named={"best": best})

    channels, depth = Knob(16, "both", values=(16, 32)), Knob(2, "both", values=(2, 4))
    first = of({"channels": channels}, learning_rate=0.0012341, weight_decay=0.1)
    second = of({"channels": channels, "depth": depth}, learning_rate=0.0012288, channels=16, depth=4)
    rows = {row[0]: list(row[1:]) for row in tables.compared([first, second]).rows}
    shown = {name: cells for name, cells in rows.items() if name in second.table}
    assert shown == {"learning_rate": ["1.2341e-3", "1.2288e-3"], "depth": ["-", "4"]}


@pytest.mark.parametrize(
    ("writer", "says"), [(None, "is not running on this machine"), (IN_ANOTHER_CONTAINER, "is of another container")]
)
def test_a_run_that_nobody_here_runs_is_not_signalled(runs_dir, capsys, monkeypatch, writer, says):
    monkeypatch.setattr(stop, "writer_of", lambda path: writer)
    code, _, err = answered(capsys, "stop", NEWEST, "--runs-dir", runs_dir)
    assert (code, f"run {NEWEST} {says}" in err) == (2, True)


@pytest.mark.parametrize(("platform", "arguments"), [("win32", ["run", "workload=nli"]), ("darwin", ["doctor"])])
def test_native_windows_and_macos_are_answered_in_one_sentence(platform, arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", platform)
    assert __main__.main(arguments) == 3
    said = capsys.readouterr().err
    assert said.startswith("error: cardtune runs on Linux")
    assert "WSL2" in said


def test_a_run_is_written_as_a_study_of_optuna(runs_dir, capsys):
    storage = runs_dir / "nli" / NEWEST / "optuna.log"
    code, out, _ = answered(capsys, "log", NEWEST, "--to", "optuna", "--runs-dir", runs_dir, "--follow")
    assert (code, out.splitlines()[0]) == (0, f"to look at it: optuna-dashboard {shlex.quote(str(storage))}")
    assert answered(capsys, "log", NEWEST, "--to", "mlflow9", "--runs-dir", runs_dir)[0] == 2


@pytest.mark.parametrize("verb", ["show", "list", "report", "doctor"])
def test_replies_in_json_are_as_their_schema_says(verb, runs_dir, capsys):
    run = [] if verb in ("list", "doctor") else [NEWEST]
    code, out, _ = answered(capsys, verb, *run, "--runs-dir", runs_dir, "--json")
    reply = TypeAdapter(replies.REPLIES[verb]).validate_json(out)
    assert (code, reply.schema) == (0, replies.VERSION)
    assert answered(capsys, "schema", verb)[0] == 0


def test_reply_of_a_run_begins_with_what_to_do(runs_dir, found, capsys):
    reply = json.loads(answered(capsys, "show", NEWEST, "--runs-dir", runs_dir, "--json")[1])
    assert reply["answer"].startswith("Set ")
    best, reference = found.best.config, found.reference.config
    assert reply["set"]
    assert all(best[name] == value != reference[name] for name, value in reply["set"].items())
    assert reply["gain"]["low"] <= reply["gain"]["ratio"] <= reply["gain"]["high"]
    assert reply["best_yaml"] is None
    assert answered(capsys, "report", NEWEST, "--runs-dir", runs_dir)[0] == 0
    reply = json.loads(answered(capsys, "show", NEWEST, "--runs-dir", runs_dir, "--json")[1])
    assert Path(reply["best_yaml"]).is_file()
    assert reply["next"][0].startswith("python -m tuning train")


def test_error_is_a_reply_too(runs_dir, capsys):
    code, out, err = answered(capsys, "show", "nope", "--runs-dir", runs_dir, "--json")
    reply = TypeAdapter(replies.ErrorReply).validate_json(out)
    assert (code, reply.exit_code, err.startswith(f"error: {reply.error}")) == (2, 2, True)
