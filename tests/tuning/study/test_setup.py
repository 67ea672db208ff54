"""A study before it starts: what it may go on with, what is refused, what its data and machine change."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import own_files
from tests.commands import MINE
from tests.fakes import study_of
from tests.tuning.workers.test_user_code import Here
from trainables.knobs import Scalar
from trainables.our_knobs import EVERY
from tuning import run
from tuning.config import load, resolve
from tuning.config.complete import fit_to_workload
from tuning.config.errors import ConfigError, UserCodeError
from tuning.config.schema import StudyConfig
from tuning.config.space import Space
from tuning.journal.events import EVENTS, StudyRecord
from tuning.journal.records import Journal, Record
from tuning.report import sentences
from tuning.study import setup
from tuning.workers.worker import Worker
from tuning.workers.worker_config import Description, Untrained

FINISHED = "20261121-103412-3f2a"


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def finished(tmp_path: Path, records: list[Record]) -> Path:
    """The journal of a whole run, whose study record can be gone on with."""
    folder = tmp_path / "my runs" / "nli" / FINISHED
    folder.mkdir(parents=True)
    opening = {**records[0].fields, "config": resolve.resolved(load.load(["knobs.dropout=0.2"]))}
    with Journal.open(folder / "trials.jsonl", create=True) as journal:
        journal.append(StudyRecord, **opening)
        for record in records[1:]:
            journal.append(EVENTS[record.event], **record.fields)
    return folder / "trials.jsonl"


def test_finished_run_is_printed_again_and_unchanged(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, beside = finished.read_bytes(), sorted(finished.parent.iterdir())
    assert run.main([f"resume={FINISHED}", "runs_dir=my runs"]) == 0
    out, err = capsys.readouterr()
    assert "; trial t007" in out
    assert f"the run {FINISHED} is finished" in err
    assert finished.read_bytes() == before
    assert sorted(finished.parent.iterdir()) == beside


def test_resumed_run_keeps_its_configuration(finished: Path) -> None:
    typed = [f"resume={FINISHED}", "runs_dir=my runs", "dashboard=true"]
    folder, resumed = setup.prepare_config(load.load(typed))
    assert folder.resolve() == finished.parent
    assert (resumed.space.fixed["dropout"], resumed.dashboard) == (0.2, True)
    assert shlex.split(setup.command_of(resumed)) == ["python", "-m", "tuning.run", *typed]


def test_run_of_an_earlier_schema_is_refused_even_by_force(finished: Path) -> None:
    with Journal.open(finished) as journal:
        journal.rewrite(StudyRecord, schema=1)
    with pytest.raises(ConfigError, match=r"an earlier version of cardtune \(schema 1\)"):
        setup.prepare_config(load.load([f"resume={FINISHED}", "runs_dir=my runs", "force=true"]))


def begun(tmp_path: Path, *typed: str) -> StudyRecord:
    """Returns the first record of the run `one`, which has begun with these arguments."""
    config = load.load([f"workload={MINE}", *typed])
    folder = tmp_path / "runs" / "mine" / "one"
    folder.mkdir(parents=True)
    with Journal.open(folder / "trials.jsonl", create=True) as journal:
        return journal.append(StudyRecord, config=resolve.resolved(config), command=setup.command_of(config))


def gone_on(tmp_path: Path, *typed: str) -> StudyConfig:
    """Returns the configuration with which that run goes on."""
    return setup.prepare_config(load.load(["resume=one", f"runs_dir={tmp_path / 'runs'}", *typed]))[1]


@pytest.mark.parametrize(
    ("typed", "part", "changed"),
    [
        ("search.max_time=8m", "search", {"max_time_s": 480.0}),
        ("search.max_time=null", "search", {"max_time_s": None}),
        ("search.trials=20", "search", {"trials": 20}),
        ("search.trials=auto", "search", {"trials": "auto"}),
        ("pick.tolerance=0.2", "pick", {"tolerance": 0.2}),
        ("pick.tolerance=5%", "pick", {"tolerance": "5%"}),
        ("cluster=two:6379", "", {"cluster": "two:6379", "insecure_cluster": False}),
        ("cluster=null", "", {"cluster": None, "insecure_cluster": False}),
        ("insecure_cluster=false", "", {"insecure_cluster": False}),
    ],
)
def test_run_may_be_given_more_or_another_question(
    tmp_path: Path, typed: str, part: str, changed: dict[str, Any]
) -> None:
    opening = begun(tmp_path, "card=cpu", "search.trials=12", "cluster=one:6379", "insecure_cluster=true")
    same, found = gone_on(tmp_path), gone_on(tmp_path, typed)
    assert (same.cluster, same.insecure_cluster, setup.reopens(same, opening)) == ("one:6379", True, [])
    assert setup.reopens(found, opening) == [part] * bool(part)
    wanted = {part: getattr(same, part).model_copy(update=changed)} if part else changed
    assert found == same.model_copy(update={"overrides": found.overrides, "origins": found.origins, **wanted})


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("search.max_time=120.0", "the run has 240 s"),
        ("search.trials=12", "the run has 12"),
        ("search.seed=3", "goes on with the configuration it began with"),
        ("knobs.own=3", "goes on with the configuration it began with"),
        ("workload.rows=3", "goes on with the configuration it began with"),
    ],
)
def test_run_is_given_no_less_and_nothing_else(tmp_path: Path, typed: str, says: str) -> None:
    begun(tmp_path, "card=cpu", "search.trials=12")
    with pytest.raises(ConfigError, match=f"{typed}.* beside resume=one: .*{says}"):
        gone_on(tmp_path, typed)


def test_secret_is_not_written_down_and_given_again(tmp_path: Path) -> None:
    begun(tmp_path, "workload.hub_token=hunter2")
    assert "hunter2" not in (tmp_path / "runs" / "mine" / "one" / "trials.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"beside resume: workload\.hub_token=<value>"):
        gone_on(tmp_path)
    found = gone_on(tmp_path, "workload.hub_token=hunter2")
    assert found.workload.options.items() >= {("hub_token", "hunter2")}
    assert "hunter2" not in setup.command_of(found)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["name=one"], "name=one: runs/nli/one exists\n  try: resume=one, or another name"),
        (["workload=signals", "name=one"], "name=one: runs/nli/one exists"),
        (["name=last"], "name=last means the newest run"),
        (["runs_dir=file"], "runs_dir=file cannot be written: it is a file"),
        (["runs_dir=file/below"], "file is a file"),
        (["runs_dir=/proc/nowhere"], "runs_dir=/proc/nowhere cannot be written: "),
        ([f"workload={MINE}", "workload.hiden=3"], "workload.hiden=3: the workload has no option hiden"),
        ([f"workload={MINE}", "workload.hidden=wide"], "workload.hidden=wide is not allowed"),
        (["card=cpu", "knobs.adapter_rank={low: 4, high: 64}"], "knobs.adapter_rank is a range"),
        (["target=kind_a"], "target=kind_a names a kind of device of a cluster"),
        (["cluster=auto", "dashboard=true"], "has its own"),
        (["name=one", "--validate"], "name=one: runs/nli/one exists"),
        ([f"workload={MINE}", "workload.hiden=3", "--validate"], "workload.hiden=3: the workload has no option hiden"),
    ],
)
def test_what_can_be_known_is_refused_before_a_start(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tuning.workers.own_workload.UserFile", own_files.Here)
    Path("file").touch()
    Path("runs/nli/one").mkdir(parents=True)
    Path("runs/nli/one/trials.jsonl").touch()
    before = sorted(Path().rglob("*"))
    assert run.main(arguments) == 2
    assert says in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "nli").touch()
    with pytest.raises(ConfigError, match=r"runs/nli/.* cannot be made: Not a directory"):
        setup.new_folder(load.load(["workload=nli", "card=cpu", f"runs_dir={tmp_path / 'runs'}"]))


class Described(Worker):
    """A worker that describes itself as it is told to, or has died with a traceback, and has no process."""

    def __init__(self, text: str = "", **facts: Any) -> None:
        self._facts, self._text = Description(outcome="ok", **facts), text

    def describe(self, knobs: object) -> Description:
        """Returns the facts, or raises as the real one does when its process died."""
        if self._text:
            raise UserCodeError("the process died", traceback=f"Traceback:\n  File x, line 1\n{self._text}")
        return self._facts

    def sanity_check(self, knobs: Mapping[str, Scalar]) -> Untrained:
        """Returns what the untrained model reaches."""
        return Untrained(outcome="ok", values={"error": 2.5})


OPTIONS = {"data": "/d/pairs.jsonl", "layers": 0, "model": None, "val_frac": 2}


@pytest.mark.parametrize(
    ("said", "what", "allowed"),
    [
        (
            "trainables.workload.WorkloadError: workload.layers=0: expected a whole number >= 1",
            *("workload.layers=0 is not allowed", "a whole number >= 1"),
        ),
        (
            "trainables.data.errors.DataError: /d/pairs.jsonl: found no such file; allowed: a file of pairs",
            *("workload.data=/d/pairs.jsonl: /d/pairs.jsonl: found no such file", "a file of pairs"),
        ),
        (
            "DataError: x.gz: split: found val_frac=2; allowed: > 0 and < 1",
            *("workload.val_frac=2: x.gz: split: found val_frac=2", "> 0 and < 1"),
        ),
        ("mine.WorkloadError: it is\nnot my day", "it is not my day", ""),
    ],
)
def test_what_a_workload_says_of_its_options_is_an_error(said: str, what: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as raised:
        setup.describe_workload(Described(said), OPTIONS, {})
    assert (raised.value.what, raised.value.allowed) == (what, allowed)
    assert raised.value.remedy
    assert raised.value.exit_code == 2


def test_description_of_a_workload() -> None:
    with pytest.raises(UserCodeError, match="the process died"):  # any other end stays what it is
        setup.describe_workload(Described("ZeroDivisionError: division by zero"), OPTIONS, {})
    with pytest.raises(ConfigError, match="the validation split of the workload is empty"):
        setup.describe_workload(Described(train_samples=5, val_samples=0), {}, {})
    facts: dict[str, Any] = {"train_samples": 5, "val_samples": 5, "baselines": {"mean": {"error": 2.0}}}
    found = setup.describe_workload(Described(**facts), {}, {})
    assert found.baselines == {"mean": {"error": 2.0}, "untrained model": {"error": 2.5}}


def test_missing_data_are_one_error_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tuning.workers.own_workload.Worker", Here)
    assert run.main(["workload=signals", "workload.data=nothing.csv"]) == 2
    err = capsys.readouterr().err
    error = err[err.index("error: ") :]
    assert "workload.data=nothing.csv" in error
    assert "Traceback" not in err
    assert error.count("error: ") == 1
    assert len(error.strip().splitlines()) <= 8
    assert not list(Path().iterdir())


FEW = {"train_samples": 32, "val_samples": 5}
MANY = {"train_samples": 10_000, "val_samples": 50}


@pytest.mark.parametrize(
    ("typed", "facts", "said"),
    [
        ([], MANY, []),
        ([], FEW, ["the validation split has 5 samples"]),
        (["named.after.batch_size=64"], {**MANY, "train_samples": 32}, ["after has batches of 64"]),
        (["named.after.batch_size=64"], {**MANY, "train_samples": 64}, []),
        (["knobs.num_workers=[0,64]"], MANY, ["knobs.num_workers goes to 64"]),
        (["concurrency=8"], MANY, ["concurrency goes to 8"]),
        ([], {**MANY, "reseeds": True}, ["train(run) sets a seed of its own"]),
        (["pick.tolerance=2"], {**MANY, "objectives": {"val_accuracy": "max"}}, ["pick.tolerance=2 gives up half"]),
        (["pick.tolerance=2"], {**MANY, "objectives": {"loss": "min"}}, []),
        ([], {**MANY, "silent_passes": 2}, ["train(run) was tried for 2 passes"]),
    ],
)
def test_few_data_and_cores_are_told(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], facts: dict[str, Any], said: list[str]
) -> None:
    monkeypatch.setattr(setup.machine, "cores", lambda: 2)
    _, config = setup.prepare_config(load.load(["workload=signals", "card=cpu", "knobs.batch_size=[8,64]", *typed]))
    found = list(setup.cautions(config, study_of(facts)))
    assert len(found) == len(said)
    assert all(text.startswith(wanted) for text, wanted in zip(found, said, strict=True))


def test_cards_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [setup.nvml.Gpu("RTX 3090", 24 * 2**30, 0, (8, 6)), setup.nvml.Gpu("GT 1030", 2 * 2**30, 0, (6, 1))]
    monkeypatch.setattr(setup.nvml, "gpus", lambda: gpus)
    _, config = setup.prepare_config(load.load(["workload=signals"]))
    (said,) = [s for s in setup.cautions(config, study_of(MANY)) if s.startswith("cards that differ")]
    assert "RTX 3090 (24 GiB), GT 1030 (2 GiB); devices=N" in said
    del gpus[1]
    assert not [s for s in setup.cautions(config, study_of(MANY)) if s.startswith("cards that differ")]


def test_first_model_of_a_process_has_the_studys_knobs() -> None:
    _, config = setup.prepare_config(load.load(["workload=nli", "card=cpu", "knobs.adapter_rank=4"]))
    assert setup.setting_of(config).start["adapter_rank"] == 4


@pytest.mark.parametrize(
    ("typed", "left", "note"),
    [
        ("[8,10,64]", [8, 10], "knobs.batch_size=[8,10,64] goes to [8,10]: there are 10 training samples"),
        ("[8,64]", 8, "goes to [8]: there are 10 training samples"),
        ("{low: 4, high: 64, log: true}", {"low": 4, "high": 10, "log": True}, "high: 10, log: true}"),
        ("[4,10]", [4, 10], ""),
    ],
)
def test_batches_larger_than_the_data_are_left_out(typed: str, left: Any, note: str) -> None:
    _, config = setup.prepare_config(load.load(["workload=signals", "card=cpu", f"knobs.batch_size={typed}"]))
    found = fit_to_workload(config, 10, None, {}, averages=False)
    assert found.space.as_raw()["batch_size"] == left
    said = [text for text in sentences.left_out(found) if "training samples" in text]
    assert [note in text for text in said] == [True] * bool(note)


def test_batch_that_the_data_do_not_fill_is_refused() -> None:
    typed = "knobs.batch_size=[11,12]"
    _, config = setup.prepare_config(load.load(["workload=signals", "card=cpu", typed]))
    with pytest.raises(ConfigError, match="there are 10 training samples") as raised:
        fit_to_workload(config, 10, None, {}, averages=False)
    assert typed in str(raised.value)
    assert (raised.value.allowed, raised.value.remedy) == ("1 to 10", "knobs.batch_size=4, or more data")


def test_what_is_compared_is_what_may_change_learning() -> None:
    space = Space.parse(
        {"num_workers": [0, 1, 2], "pin_memory": [False, True], "sdpa_backend": ["auto", "math"]}, EVERY
    )
    assert setup.comparable(space, {}) == {"micro_batch_size": 1, "num_workers": 2, "sdpa_backend": "math"}
