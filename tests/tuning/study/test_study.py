"""What a study does before Ray starts, and says about itself; with a profiler of formulas, and no Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from tests.commands import MINE
from tests.fakes import FormulaProfiler, study_of
from tests.tuning.workers.test_user_code import Here
from trainables import knob_columns
from trainables.knobs import Scalar
from trainables.our_knobs import EVERY
from tuning import run
from tuning.cli.terminal import Terminal
from tuning.config import best_file, load, resolve
from tuning.config.complete import fit_to_workload
from tuning.config.errors import ConfigError, NoUsableTrial, UserCodeError
from tuning.config.schema import PLANNED_TRIALS, StudyConfig
from tuning.config.space import Space
from tuning.journal.events import (
    EVENTS,
    NoteRecord,
    ProbeRecord,
    RefusedRecord,
    ResumeRecord,
    StartRecord,
    StudyRecord,
    Timed,
    TrialRecord,
)
from tuning.journal.records import Journal, Record
from tuning.memory import groups
from tuning.memory.measure import Footprint
from tuning.report import export, report, sentences, summary, text
from tuning.search.protocols import TrialPlan, TrialState
from tuning.search.rule import Baseline, Rule
from tuning.search.scheduler import TrialScheduler
from tuning.search.selection import rule_of
from tuning.study import picking, setup, study
from tuning.study.limits import FEWEST_STEPS, MOST_EPOCHS, Limits
from tuning.workers import executors, machine, nvml
from tuning.workers.nodes import Node
from tuning.workers.nvml import Gpu
from tuning.workers.worker import Worker
from tuning.workers.worker_config import ChangedKnobs, Description, Untrained, WorkerConfig

FINISHED = "20261121-103412-3f2a"
FACTS = Description(
    outcome="ok",
    device={"name": "Example CPU", "type": "cpu", "memory_bytes": 2**34},
    objectives={"error": "min"},
    train_samples=100,
    val_samples=10,
    workload_sha256="w",
    data_sha256="d",
)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty working folder, and a Ray that fails the test which starts it."""

    def started(**_: object) -> None:
        pytest.fail("Ray was started")

    monkeypatch.setattr(executors, "_ray", lambda: SimpleNamespace(RayCluster=started, RayExecutor=started))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def finished(tmp_path: Path, records: list[Record]) -> Path:
    """The journal of a whole run, whose study record can be gone on with."""
    folder = tmp_path / "my runs" / "nli" / FINISHED
    folder.mkdir(parents=True)
    typed = load.load(["knobs.dropout=0.2"])
    opening = {**records[0].fields, "config": resolve.resolved(typed)}
    with Journal.open(folder / "trials.jsonl", create=True) as journal:
        journal.append(StudyRecord, **opening)
        for record in records[1:]:
            journal.append(EVENTS[record.event], **record.fields)
    return folder / "trials.jsonl"


def test_finished_run_is_printed_again_and_unchanged(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, beside = finished.read_bytes(), sorted(finished.parent.iterdir())
    assert run.main([f"resume={FINISHED}", "runs_dir=my runs"]) == 0
    out, err = capsys.readouterr()
    assert "(trial t007)" in out
    assert f"the run {FINISHED} is finished" in err
    assert finished.read_bytes() == before
    assert sorted(finished.parent.iterdir()) == beside


def test_resumed_run_keeps_its_configuration(finished: Path) -> None:
    typed = [f"resume={FINISHED}", "runs_dir=my runs", "dashboard=true"]
    folder, resumed = setup.prepare_config(load.load(typed))
    assert folder is not None
    assert folder.resolve() == finished.parent
    assert (resumed.space.fixed["dropout"], resumed.dashboard) == (0.2, True)
    assert shlex.split(setup.command_of(resumed)) == ["python", "-m", "tuning.run", *typed]


def test_run_of_an_earlier_schema_is_refused_even_by_force(finished: Path) -> None:
    with Journal.open(finished) as journal:
        journal.rewrite(StudyRecord, schema=1)
    with pytest.raises(ConfigError, match=r"was written by an earlier version of cardtune \(schema 1\)"):
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
    ("typed", "joins"),
    [
        ([], ("one:6379", True)),
        (["cluster=two:6379"], ("two:6379", False)),
        (["cluster=null"], (None, False)),
        (["insecure_cluster=false"], ("one:6379", False)),
    ],
)
def test_run_goes_on_on_its_cluster_or_where_it_is_said_now(
    tmp_path: Path, typed: list[str], joins: tuple[str | None, bool]
) -> None:
    begun(tmp_path, "card=cpu", "cluster=one:6379", "insecure_cluster=true")
    found = gone_on(tmp_path, *typed)
    assert (found.cluster, found.insecure_cluster) == joins


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["search.max_time=8m", "search.trials=20"], ""),
        (["search.max_time=null"], ""),
        (["search.trials=auto"], ""),
        (["search.max_time=2m"], "search.max_time=120.0 beside resume=one: the run has 240 s"),
        (["search.trials=12"], "search.trials=12 beside resume=one: the run has 12"),
        (["search.seed=3"], "search.seed=3 beside resume=one: a run goes on with the configuration it began with"),
        (["knobs.own=3"], "knobs.own=3 beside resume=one: a run goes on with the configuration it began with"),
        (["workload.rows=3"], "workload.rows=3 beside resume=one: a run goes on with the configuration it began with"),
    ],
)
def test_a_run_may_be_given_more_trials_and_time_and_no_less(tmp_path: Path, more: list[str], says: str) -> None:
    opening = begun(tmp_path, "card=cpu", "search.trials=12")
    if says:
        with pytest.raises(ConfigError, match="beside resume=one") as raised:
            gone_on(tmp_path, *more)
        assert says in str(raised.value)
        return
    found = gone_on(tmp_path, *more)
    assert found.search.max_time_s in (480.0, 240.0, None)
    assert found.search.trials in (20, 12, "auto")
    assert found.search.seed == resolve.from_resolved(opening.config, EVERY).search.seed
    assert setup.reopens(found, opening)
    assert not setup.reopens(gone_on(tmp_path), opening)


@pytest.mark.parametrize(("asked", "kept"), [("0.2", 0.2), ("5%", "5%")])
def test_another_tolerance_opens_a_run_again(tmp_path: Path, asked: str, kept: float | str) -> None:
    opening = begun(tmp_path, "card=cpu", "search.trials=12")
    found = gone_on(tmp_path, f"pick.tolerance={asked}")
    assert (found.pick.tolerance, found.search) == (kept, gone_on(tmp_path).search)
    assert setup.reopens(found, opening)
    same = gone_on(tmp_path, f"pick.tolerance={resolve.from_resolved(opening.config, EVERY).pick.tolerance}")
    assert not setup.reopens(same, opening)


def test_nodes_of_a_cluster_are_written_told_and_reported(
    tmp_path: Path,
) -> None:
    alike = [Node(name, f"10.0.0.{n}", 4.0) for n, name in enumerate("abc")]
    nodes = [*alike, Node("d", "10.0.0.9", 16.0, why="its cores are 16, and 8 on the machine of the study")]
    _, complete = setup.prepare_config(load.load(["card=cpu", "concurrency=1"]))
    users, said = SimpleNamespace(nodes=nodes, training=alike), io.StringIO()
    with Journal.open(tmp_path / "trials.jsonl", create=True) as journal:
        terminal = Terminal(out=io.StringIO(), err=said, env={})
        made = study._Study(complete, terminal, journal, tmp_path, time.monotonic(), users)  # type: ignore[arg-type]
        made.open(FACTS, setup.setting_of(complete))
        assert journal.records[0]["concurrency"] == 3, "one on each that trains"
        assert [r.why == "" for r in journal.run.nodes] == [True, True, True, False]
        report.write_report(summary.of_run(journal.run), tmp_path / "report.html")
    why = "10.0.0.9 (d) is left out: its cores are 16, and 8 on the machine of the study"
    assert why in " ".join(said.getvalue().split())
    assert why in (tmp_path / "report.html").read_text()


def test_a_secret_was_not_written_down_and_is_given_again(tmp_path: Path) -> None:
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
        (["workload=signals", "name=one"], "name=one: runs/nli/one exists\n  try: resume=one, or another name"),
        (["name=last"], "name=last means the newest run\n  try: another name"),
        (["runs_dir=file"], "runs_dir=file cannot be written: it is a file\n  allowed: a folder of yours"),
        (["runs_dir=file/below"], "file is a file"),
        (["runs_dir=/proc/nowhere"], "runs_dir=/proc/nowhere cannot be written: "),
        ([f"workload={MINE}", "workload.hiden=3"], "workload.hiden=3: the workload has no option hiden"),
        ([f"workload={MINE}", "workload.hidden=wide"], "workload.hidden=wide is not allowed"),
        (["card=cpu", "knobs.adapter_rank={low: 4, high: 64}"], "knobs.adapter_rank is a range"),
        (["name=one", "--validate"], "name=one: runs/nli/one exists"),
        ([f"workload={MINE}", "workload.hiden=3", "--validate"], "workload.hiden=3: the workload has no option hiden"),
    ],
)
def test_what_can_be_known_before_ray_starts_is_refused_before(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    Path("runs/nli/one").mkdir(parents=True)
    Path("runs/nli/one/trials.jsonl").touch()
    before = sorted(Path().rglob("*"))
    assert run.main(arguments) == 2
    assert says in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before


def test_validate_says_what_would_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["card=cpu", "--validate"]) == 0
    err = capsys.readouterr().err
    assert "note      left out, as a CUDA device is needed: " in err
    assert "tf32" in err
    assert err.endswith("note      the configuration is valid\n")


class Described(Worker):
    """A profiler that describes itself as it is told to, and has no process."""

    def __init__(self, text: str = "", **facts: Any) -> None:
        self._facts, self._text = Description(outcome="ok", **facts), text

    def describe(self, knobs: object) -> Description:
        """Returns the facts, or raises as the real one does when its process died."""
        if self._text:
            raise UserCodeError("the process died", traceback=self._text)
        return self._facts


DIED = "Traceback (most recent call last):\n  File x, line 1\n"
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
        setup.describe_workload(Described(DIED + said), OPTIONS, {})
    assert (raised.value.what, raised.value.allowed) == (what, allowed)
    assert raised.value.remedy
    assert raised.value.exit_code == 2


def test_missing_data_are_one_error_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(study, "Worker", Here)
    assert run.main(["workload=signals", "workload.data=nothing.csv"]) == 2
    err = capsys.readouterr().err
    error = err[err.index("error: ") :]
    assert "workload.data=nothing.csv" in error
    assert "Traceback" not in err
    assert error.count("error: ") == 1
    assert len(error.strip().splitlines()) <= 8
    assert not list(Path().iterdir())


def test_any_other_end_of_the_measuring_process_stays_what_it_is() -> None:
    with pytest.raises(UserCodeError, match="the process died"):
        setup.describe_workload(Described(f"{DIED}ZeroDivisionError: division by zero"), OPTIONS, {})


def test_an_empty_split_is_an_error_of_the_command_line() -> None:
    with pytest.raises(ConfigError, match="the validation split of the workload is empty"):
        setup.describe_workload(Described(train_samples=5, val_samples=0), {}, {})


def test_untrained_model_is_a_baseline() -> None:
    class Tried(Described):
        """Has hooks that do what they should."""

        def sanity_check(self, knobs: Mapping[str, Scalar]) -> Untrained:
            return Untrained(outcome="ok", values={"error": 2.5})

    tried = Tried(train_samples=5, val_samples=5, baselines={"mean": {"error": 2.0}})
    assert setup.describe_workload(tried, {}, {}).baselines == {
        "mean": {"error": 2.0},
        "untrained model": {"error": 2.5},
    }


def test_too_few_data_and_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.machine, "cores", lambda: 2)
    _, config = setup.prepare_config(
        load.load(["workload=signals", "card=cpu", "knobs.batch_size=[8,64]", "named.after.batch_size=64"])
    )
    few = list(setup.cautions(config, study_of({"train_samples": 32, "val_samples": 5})))
    assert [f.split(":")[0] for f in few] == [
        "the validation split has 5 samples",
        "after has batches of 64, and there are 32 training samples",
    ]
    assert not list(setup.cautions(config, study_of({"train_samples": 64, "val_samples": 50})))
    many = load.load(["workload=signals", "card=cpu", "knobs.num_workers=[0,64]", "concurrency=8"])
    told = [f.split(",")[0] for f in setup.cautions(many, study_of({"train_samples": 10_000, "val_samples": 50}))]
    assert told == ["knobs.num_workers goes to 64", "concurrency goes to 8"]


def test_cards_that_differ_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [setup.nvml.Gpu("RTX 3090", 24 * 2**30, 0, (8, 6)), setup.nvml.Gpu("GT 1030", 2 * 2**30, 0, (6, 1))]
    monkeypatch.setattr(setup.nvml, "gpus", lambda: gpus)
    _, config = setup.prepare_config(load.load(["workload=signals"]))
    facts = {"train_samples": 10_000, "val_samples": 500}
    (said,) = [s for s in setup.cautions(config, study_of(facts)) if s.startswith("cards that differ")]
    assert "RTX 3090 (24 GiB), GT 1030 (2 GiB); devices=N" in said
    del gpus[1]
    assert not [s for s in setup.cautions(config, study_of(facts)) if s.startswith("cards that differ")]


def test_first_model_of_a_process_has_the_knobs_of_the_study() -> None:
    _, config = setup.prepare_config(load.load(["workload=nli", "card=cpu", "knobs.adapter_rank=4"]))
    assert setup.setting_of(config).start["adapter_rank"] == 4


@pytest.mark.parametrize(
    ("rate", "limit", "is_said"), [(10.0, "null", True), (1e6, "null", False), (10.0, "8h", False)]
)
def test_a_search_that_takes_half_a_day_without_a_limit_is_told(
    tmp_path: Path, rate: float, limit: str, is_said: bool
) -> None:
    _, config = setup.prepare_config(load.load(["workload=nli", "card=cpu", "budget=full", f"search.max_time={limit}"]))
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    steps = {"micro_step_s": 1.0, "optimizer_step_s": 0.0, "samples_per_s": rate}
    journal.append(ProbeRecord, name=None, config={"batch_size": 16}, outcome="ok", **steps)
    limits = Limits(config, study_of({"train_samples": 100_000}), journal, time.monotonic())
    assert ("search.max_time=8h" in limits.long()) is is_said


@pytest.mark.parametrize(
    ("typed", "left", "note"),
    [
        ("[8,10,64]", [8, 10], "knobs.batch_size=[8,10,64] goes to [8,10]: there are 10 training samples"),
        ("[8,64]", 8, "knobs.batch_size=[8,64] goes to [8]: there are 10 training samples"),
        ("{low: 4, high: 64, log: true}", {"low": 4, "high": 10, "log": True}, "high: 10, log: true}"),
        ("[4,10]", [4, 10], ""),
    ],
)
def test_batches_larger_than_the_data_are_left_out_with_a_note(typed: str, left: Any, note: str) -> None:
    strategy = "search.strategy=joint"  # a staged search takes no range of what is probed
    _, config = setup.prepare_config(load.load(["workload=signals", "card=cpu", strategy, f"knobs.batch_size={typed}"]))
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
    assert raised.value.exit_code == 2


def opened(
    tmp_path: Path, *typed: str, started: float, baselines: dict[str, dict[str, float]] | None = None
) -> tuple[study._Study, Journal, io.StringIO]:
    """Returns a study of formulas behind its opening, its journal, and what it says."""
    _, complete = setup.prepare_config(load.load(["card=cpu", *typed]))
    said = io.StringIO()
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    made = study._Study(complete, Terminal(out=io.StringIO(), err=said, env={}), journal, tmp_path, started)
    made.open(dataclasses.replace(FACTS, baselines=baselines or {}), setup.setting_of(complete))
    return made, journal, said


def resumed(tmp_path: Path, force: str, **changed: Any) -> ResumeRecord:
    """Returns what a study writes that goes on here, where its first record says otherwise."""
    made, journal, _ = opened(tmp_path, started=time.monotonic())
    journal.rewrite(StudyRecord, **changed)
    (tmp_path / "config.yaml").unlink()
    made._config = made._config.model_copy(update={"resume": "one", "force": force == "true"})
    try:
        made.open(FACTS, setup.setting_of(made._config))
        return journal.run.resumes[0]
    finally:
        journal.close()


def test_run_goes_on_elsewhere_or_otherwise_only_by_force(tmp_path: Path) -> None:
    changed = {
        **{"versions": {"torch": "1.0.0"}, "device": {"name": "Another CPU"}},
        **{"data_sha256": "e", "workload_sha256": "v"},
    }
    with pytest.raises(ConfigError, match="the run began elsewhere or otherwise") as raised:
        resumed(tmp_path, "false", **changed)
    assert raised.value.exit_code == 2
    assert "force=true" in raised.value.remedy
    (tmp_path / "forced").mkdir()
    record = resumed(tmp_path / "forced", "true", **changed)
    says = ["data has changed", "device name was Another CPU and is Example CPU"]
    says += ["the workload's source has changed", "torch was 1.0.0 and is"]
    assert all(wanted in told for wanted, told in zip(says, sorted(record.changed), strict=True))
    assert all(told in str(raised.value) for told in record.changed)
    assert (tmp_path / "forced" / "config.yaml").exists(), "a run that was killed before it wrote that"


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "nli").touch()
    with pytest.raises(ConfigError, match=r"runs/nli/.* cannot be made: Not a directory"):
        setup.new_folder(load.load(["workload=nli", "card=cpu", f"runs_dir={tmp_path / 'runs'}"]))


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        (["named.before.learning_rate=0.5"], "before"),
        ([], "plain defaults"),  # `before` of a workload of ours is nobody's at hand
        ([f"workload={MINE}"], "before"),
    ],
)
def test_reference_is_what_is_trained_today_as_it_stands(tmp_path: Path, typed: list[str], name: str) -> None:
    made, journal, _ = opened(tmp_path, *typed, started=time.monotonic())
    limits = made._limits
    assert (limits.terms().reference_name, limits.terms().reference) == limits.reference()
    assert limits.reference()[0] == name
    own = made._config.named["before"] if name == "before" else groups.plain_defaults(made._config.space)
    reference = limits.reference()[1]
    assert {n: reference.get(n, v) for n, v in own.items()} == own
    assert (limits.before() is None) == (name != "before")
    journal.close()


@pytest.mark.parametrize(("rate", "is_short"), [(1.0, True), (1e4, False)])
def test_reference_takes_a_fifth_of_the_search_at_most(tmp_path: Path, rate: float, is_short: bool) -> None:
    asked = ["search.max_time=1000s", "budget.train_epochs=auto", "named.before.batch_size=1", "knobs.batch_size=[1,2]"]
    made, journal, _ = opened(tmp_path, *asked, started=time.monotonic())
    steps = {"optimizer_step_s": 0.0, "outcome": "ok"}
    reference = made._limits.reference()[1]
    journal.append(ProbeRecord, name="before", config=reference, samples_per_s=rate, micro_step_s=1 / rate, **steps)
    fast = {**reference, "batch_size": 2, "micro_batch_size": 2}
    journal.append(ProbeRecord, name=None, config=fast, samples_per_s=5000.0, micro_step_s=2 / 5000, **steps)
    horizon, search_s = made._limits.horizon(), 1000.0 * (1 - study.SHARE)
    least = FEWEST_STEPS * groups.defaults(made._config.space)["batch_size"]
    assert horizon <= max(least, search_s / 5 * rate)
    assert (horizon < MOST_EPOCHS * FACTS.train_samples) == is_short
    journal.close()


class Compared(FormulaProfiler):
    """A profiler that finds the micro-batch to change what is learned, and counts how often it was asked."""

    asked = 0

    def kinds(self, knobs: Mapping[str, Scalar], changes: Mapping[str, Scalar]) -> ChangedKnobs:
        """Returns what a batch norm would show."""
        assert changes["micro_batch_size"]
        self.asked += 1
        return ChangedKnobs(outcome="ok", changed={"micro_batch_size": "BatchNorm2d (down) gives other values"})


def test_what_is_compared_is_what_may_change_learning() -> None:
    space = Space.parse(
        {"num_workers": [0, 1, 2], "pin_memory": [False, True], "sdpa_backend": ["auto", "math"]}, EVERY
    )
    assert setup.comparable(space, {}) == {"micro_batch_size": 1, "num_workers": 2, "sdpa_backend": "math"}


def test_what_changes_learning_is_measured_once(tmp_path: Path) -> None:
    made, journal, said = opened(tmp_path, "search.trials=0", started=time.monotonic())
    profiler = Compared()
    for _ in range(2):
        made.measure_kinds(profiler)  # type: ignore[arg-type]
        assert made._space.table["micro_batch_size"].kind == "both"
        assert "micro_batch_size" in made._space.fixed, "probes alone change nothing that is learned"
    assert profiler.asked == 1
    sentence = "micro_batch_size changes what is learned here: BatchNorm2d (down) gives other values"
    assert [note.text for note in journal.run.notes].count(sentence) == 1
    assert "BatchNorm2d" in said.getvalue()
    found = summary.of_run(journal.run)
    assert (found.table["micro_batch_size"].kind, sentences.kinds(found.kinds)) == ("both", [sentence])
    journal.close()


def test_kinds_that_the_time_cut_are_measured_later(tmp_path: Path) -> None:
    class Cut(Compared):
        def kinds(self, knobs: Mapping[str, Scalar], changes: Mapping[str, Scalar]) -> ChangedKnobs:
            return ChangedKnobs(outcome="cut", message="search.max_time was over")

    made, journal, _ = opened(tmp_path, "search.trials=0", started=time.monotonic())
    made.measure_kinds(Cut())  # type: ignore[arg-type]
    assert made._space.table["micro_batch_size"].kind == "system"
    made.measure_kinds(Compared())  # type: ignore[arg-type]
    assert made._space.table["micro_batch_size"].kind == "both"
    journal.close()


def test_workers_know_how_many_trials_run_beside_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By it a trial's energy is told, and a RAM cache leaves room; on a card it is known behind the probes alone."""
    seen: list[WorkerConfig] = []
    fake = SimpleNamespace(
        RayCluster=lambda **_: contextlib.nullcontext(), RayExecutor=lambda worker, name: seen.append(worker)
    )
    monkeypatch.setattr(executors, "_chosen", [])
    monkeypatch.setattr(executors, "_ray", lambda: fake)
    made, journal, _ = opened(tmp_path, "concurrency=3", started=time.monotonic())
    setting = dataclasses.replace(setup.setting_of(made._config), slots=1)
    with executors.executor(
        made._config, made._limits.plan(), cast(Worker, SimpleNamespace(end=lambda: None)), setting
    ):
        assert [one.slots for one in seen] == [3]
    journal.close()


def test_process_has_a_ray_of_its_own_or_joins_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "_chosen", [])
    monkeypatch.setattr(executors, "_ray", lambda: SimpleNamespace(RayCluster=lambda **_: "own"))
    alone = load.load(["workload=nli", "card=cpu"])
    assert [executors.cluster(alone), executors.cluster(alone)] == ["own", "own"]
    with pytest.raises(ConfigError, match="this process has had a Ray of its own, and is asked for a user's cluster"):
        executors.prepare(load.load(["workload=nli", "card=cpu", "cluster=head:6379"]))


def test_ray_imported_first_has_not_read_how_to_listen() -> None:
    said = "import sys; {} from tuning.workers import UNREAD_BY_RAY; print(*sorted(UNREAD_BY_RAY))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    for before, unread in (("", ""), ("sys.modules['ray'] = sys;", "RAY_AUTH_MODE RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")):
        command = [sys.executable, "-c", said.format(before)]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == unread


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("concurrency=2", "ray was imported before tuning.tune"),
        ("dashboard=true", "ray was imported before tuning.tune"),
        ("cluster=head:6379", "ray was imported before tuning.tune"),
        ("cluster=head:6379 insecure_cluster=true", None),
        ("concurrency=2 search.trials=0", None),
        ("concurrency=1", None),
        ("", None),
    ],
)
def test_what_ray_cannot_do_is_said_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, typed: str, why: str | None
) -> None:
    config, said = load.load(["workload=nli", "card=cpu", *typed.split()]), list[str]()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    monkeypatch.setattr(executors, "UNREAD_BY_RAY", set())
    assert executors.as_ray_allows(config, said.append) == config
    monkeypatch.setattr(executors, "UNREAD_BY_RAY", {"RAY_AUTH_MODE"})
    if why is None:
        assert executors.as_ray_allows(config, said.append) == config
    else:
        with pytest.raises(ConfigError, match=why) as raised:
            executors.as_ray_allows(config, said.append)
        assert "`from tuning import tune` before `import ray`" in raised.value.remedy
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
        with pytest.raises(ConfigError, match="a Ray runs in this process"):
            executors.as_ray_allows(config, said.append)
    assert not said


def test_card_takes_one_trial_if_ray_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvml, "gpus", lambda: [Gpu("RTX 3090", 24 * 2**30)])
    config, said = load.load(["workload=nli"]), list[str]()
    config = config.model_copy(update={"card": config.card.on("cuda")})
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert executors.as_ray_allows(config, said.append).concurrency == 1
    assert said == ["a Ray runs in this process, which takes one at a time: trials run one at a time"]


def test_target_alone_and_dashboard_beside_a_cluster_are_refused() -> None:
    with pytest.raises(ConfigError, match="target=kind_a names a kind of device of a cluster, and there is none"):
        setup.prepare_config(load.load(["workload=nli", "target=kind_a"]))
    with pytest.raises(ConfigError, match="has its own"):
        setup.prepare_config(load.load(["workload=nli", "cluster=auto", "dashboard=true"]))


class InTurn:
    """An executor that trains one trial after another by the formula of a profiler."""

    def __init__(self, profiler: FormulaProfiler) -> None:
        self._profiler = profiler

    def run(self, scheduler: TrialScheduler, plan: TrialPlan) -> None:
        """Runs trials until the scheduler has no more."""
        while (request := scheduler.next_trial()) is not None:
            for samples in plan.milestones:
                found = self._profiler.train(request.knobs, samples, (samples,), request.seed)
                if samples == plan.samples or not scheduler.at_rung(request.trial, found):
                    scheduler.ended(request.trial, found)
                    break


class Learning(FormulaProfiler):
    """A profiler whose error is a formula of batch and learning rate; what `spoils` has another batch than 32."""

    def __init__(self, spoils: float = 0.0, drifts: bool = True) -> None:
        super().__init__()
        self.spoils, self.drifts = spoils, drifts

    def micro_step_s(self, knobs: Mapping[str, Scalar]) -> float:
        """Returns what makes large batches faster by far; processes of the loader save time if it `drifts`."""
        workers = {} if self.drifts else {"num_workers": 0}
        return 0.05 + super().micro_step_s({**knobs, **workers})

    def train(
        self, knobs: Mapping[str, Scalar], samples: int, milestones: Sequence[int], seed: int, left_s: float = math.inf
    ) -> TrialState:
        """Returns the error."""
        size, rate = int(knobs["batch_size"]), float(knobs["learning_rate"])
        error = 0.2 + 0.05 * abs(math.log(rate / 3e-3)) + self.spoils * (size != 32) + 0.002 * math.sin(seed)
        found = super().train(knobs, samples, milestones, seed)
        return dataclasses.replace(found, values={"error": error}, train_s=1.0)


def searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profiler: FormulaProfiler, *typed: str
) -> tuple[study._Study, Journal, io.StringIO]:
    """Returns a study of formulas that has searched, its journal, and what it says."""
    monkeypatch.setattr(executors, "executor", lambda *_: contextlib.nullcontext(InTurn(profiler)))
    knobs = ["knobs.batch_size=[16,32,64]", "knobs.micro_batch_size=[16,32,64]", "knobs.amp_dtype=fp32"]
    asked = ["search.max_time=null", "search.trials=8", *knobs, *typed]
    made, journal, said = opened(tmp_path, *asked, started=time.monotonic())
    made.measure(profiler)  # type: ignore[arg-type]
    made.search(profiler, setup.setting_of(made._config))  # type: ignore[arg-type]
    return made, journal, said


PICKS: Mapping[str, tuple[Learning, list[str], str, int]] = {
    "faster": (Learning(), [], "faster", 64),
    "system": (Learning(spoils=1.0), [], "system", 32),
    "reference": (Learning(spoils=1.0, drifts=False), [], "reference", 32),
    "faster by a tolerance": (Learning(spoils=0.5), ["pick.tolerance=0.6"], "faster", 64),
    "faster by a quality": (Learning(spoils=0.5), ["pick.at_least=0.9"], "faster", 64),
    "better": (Learning(), ["pick.goal=quality"], "faster", 64),
    "beside before": (Learning(), ["named.before.batch_size=16", "named.before.learning_rate=0.001"], "faster", 64),
}


@pytest.mark.parametrize("case", PICKS)
def test_whole_study_ends_with_a_pick_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    profiler, typed, kind, size = PICKS[case]
    made, journal, _ = searched(tmp_path, monkeypatch, profiler, *typed)
    made.confirm(profiler)  # type: ignore[arg-type]
    (pick,) = journal.run.picks
    assert (pick.kind, pick.config["batch_size"]) == (kind, size)
    assert pick.reference == ("before" if "before" in case else "plain defaults")
    assert (pick.best != "") == (kind == "faster")
    rates = {
        name: [r.samples_per_s for r in journal.run.all_windows if r.config == config]
        for name, config in (("pick", pick.config), ("reference", made._limits.reference()[1]))
    }
    assert len(rates["pick"]) >= 5
    assert min(rates["pick"]) >= max(rates["reference"]), "in turns it is no slower"
    if kind == "faster":
        gains = next(r["gains"] for r in journal.records if r.event == "pick")[pick.best]
        assert len(gains) >= 3
        rule = rule_of(journal.run)
        assert rule is not None
        assert rule.admits(sum(gains) / len(gains))
    known = len(journal.records)
    made.confirm(profiler)  # type: ignore[arg-type]
    assert len(journal.records) == known
    made.publish()
    found = summary.of_run(journal.run)
    assert found.best is not None
    assert best_file.read(tmp_path / "best.yaml").knobs["batch_size"] == size
    assert (tmp_path / "report.html").exists()
    assert journal.records[-1].event == "stop"
    journal.close()


def test_trainings_that_set_their_own_seed_are_not_called_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OneSeed(Learning):
        def train(self, *asked: Any, **named: Any) -> TrialState:
            return dataclasses.replace(super().train(*asked, **named), active={"seed": 7})

    profiler = OneSeed()
    made, journal, _ = searched(tmp_path, monkeypatch, profiler)
    made.confirm(profiler)  # type: ignore[arg-type]
    (pick,) = journal.run.picks
    assert "train(run) sets its seed itself" in pick.rule
    journal.close()


def test_today_s_system_knobs_are_the_pick_s_if_faster_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Turned(Learning):
        """Loader processes are fast in probes, and slow in turns."""

        def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> Timed:
            found = super().window(knobs, window_s, seed)
            rate = (found.samples_per_s or 0.0) * (0.5 if knobs.get("num_workers") else 1)
            return dataclasses.replace(found, samples_per_s=rate)

    profiler = Turned()
    made, journal, _ = searched(tmp_path, monkeypatch, profiler)
    made.confirm(profiler)  # type: ignore[arg-type]
    (pick,) = journal.run.picks
    assert (pick.kind, pick.config["num_workers"]) == ("faster", 0)
    searched_knobs = next(end.config for end in journal.run.ended if end.trial == pick.best)
    assert searched_knobs["num_workers"] == 2
    journal.close()


def test_another_tolerance_makes_the_pick_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = Learning(spoils=0.5)
    made, journal, _ = searched(tmp_path, monkeypatch, profiler)
    made.confirm(profiler)  # type: ignore[arg-type]
    assert [r.kind for r in journal.run.picks] == ["system"]
    before = sum(r.event == "trial" for r in journal.records)
    wide = made._config.model_copy(update={"pick": made._config.pick.model_copy(update={"tolerance": 0.6})})
    for _ in range(2):  # as if it is broken off before it has confirmed
        terminal = Terminal(out=io.StringIO(), err=io.StringIO(), env={})
        again = study._Study(wide, terminal, journal, tmp_path, time.monotonic())
        again.open(FACTS, setup.setting_of(wide))
    assert journal.run.is_done("search")
    assert not journal.run.is_done("confirm")
    again.confirm(profiler)  # type: ignore[arg-type]
    picks = [r for r in journal.records if r.event == "pick"]
    assert [(r["kind"], r["tolerance"]) for r in picks] == [("system", 0.0), ("faster", 0.6)]
    assert sum(r.event == "trial" for r in journal.records) == before
    journal.close()


def test_notes_of_a_pick_that_was_replaced_are_not_reported(tmp_path: Path) -> None:
    made, journal, _ = opened(tmp_path, started=time.monotonic())
    journal.append(NoteRecord, text="of the machine")
    for said, pick in (("of the first", {}), ("of the second", {"pick": {"tolerance": 0.1}})):
        if pick:
            journal.append(ResumeRecord, command="", startup_s=0.0, changed=[], **pick)
        with made._stage("confirm"):
            journal.append(NoteRecord, text=said)
    journal.close()
    notes = summary.of_run(journal.run).notes
    assert [note for note in notes if note.startswith("of ")] == ["of the machine", "of the second"]


def test_baselines_of_the_workload_are_in_the_rule_of_the_pick(tmp_path: Path) -> None:
    baselines = {"mean": {"error": 0.9}, "last": {"error": 0.204}, "none": {"error": float("nan")}}
    asked = ["search.max_time=null", "pick.tolerance=10%", "pick.goal=quality"]
    _, journal, _ = opened(tmp_path, *asked, started=time.monotonic(), baselines=baselines)
    journal.append(StartRecord, trial="t000", config={}, named="plain defaults", beside=True)
    own = {"outcome": "ok", "values": {"error": 2.0}, "samples_per_s": 9.0}
    journal.append(TrialRecord, trial="t000", config={}, **own)
    rule = rule_of(journal.run)
    assert rule == Rule("error", "min", 0.2, Baseline("last", 0.204), None, "quality")
    journal.close()


def plan_of(folder: Path, arguments: list[str]) -> TrialPlan:
    """Returns how a study with these arguments would run its trials on a CPU."""
    loaded = load.load(["workload=nli", *arguments])
    loaded = loaded.model_copy(update={"card": loaded.card.on("cpu")})
    with Journal.open(folder / "trials.jsonl", create=True) as journal:
        facts = {"device": {"memory_bytes": 24 * 2**30}, "parameters": {"total": 10**6}, "train_samples": 100}
        return Limits(loaded, study_of(facts), journal, 1000.0).plan()


def test_trials_on_a_virtual_card_share_it_under_caps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 4)
    found = plan_of(tmp_path, ["card=rtx4060", "concurrency=4"])
    cap = load.load(["card=rtx4060"]).card.cap_bytes
    assert cap is not None
    assert (found.concurrency, found.threads, found.cap_bytes, found.alone_bytes) == (4, 1, cap // 4, cap)


def test_without_a_card_trials_are_held_to_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "available_bytes", lambda: 1000)
    found = plan_of(tmp_path, ["card=cpu", "concurrency=2"])
    assert (found.concurrency, found.threads, found.cap_bytes, found.alone_bytes) == (2, 2, None, None)
    assert found.room_bytes == 400, "what needs more than its part of the free RAM runs alone"


@pytest.mark.parametrize("typed", [["card=cpu", "concurrency=1"], ["card=rtx4060", "concurrency=2"]])
def test_one_trial_at_a_time_and_trials_under_a_cap_need_no_room(tmp_path: Path, typed: list[str]) -> None:
    assert plan_of(tmp_path, typed).room_bytes is None


def test_slots_that_would_leave_a_card_idle_are_fewer(tmp_path: Path) -> None:
    made, journal, _ = opened(tmp_path, "concurrency=5", started=time.monotonic())
    for count in (5, 4):
        made._share(TrialPlan(64, (64,), False, count, 1, devices=4))
    said = "concurrency=5: equal slots would leave some of 4 cards idle, so 4 trials run at once, as many on each"
    assert [r["text"] for r in journal.records if r.get("warns") == "concurrency"] == [said]
    journal.close()


def test_running_trials_are_cut_when_the_windows_begin(tmp_path: Path) -> None:
    limit = plan_of(tmp_path, ["card=cpu", "search.max_time=1000s"]).deadline
    assert limit is not None
    assert 1000 + 0.7 * 1000 <= limit < 1000 + 1000
    (tmp_path / "none").mkdir()
    assert plan_of(tmp_path / "none", ["card=cpu", "search.max_time=null"]).deadline is None


@pytest.mark.parametrize("typed", [["search.strategy=joint"], ["search.strategy=staged"]])
def test_search_without_speeds_ends_before_trials_are_cut(tmp_path: Path, typed: list[str]) -> None:
    made, journal, _ = opened(tmp_path, "search.max_time=4m", *typed, started=time.monotonic())
    deadline, cut_at = made._limits.terms().deadline, made._limits.plan().deadline
    assert deadline is not None
    assert cut_at is not None
    assert deadline <= cut_at, "what begins later is cut at its first pause"
    journal.close()


@pytest.mark.parametrize("asked", ["search.trials=0", "search.trials=4"])  # of the four, time left none
def test_without_trials_what_is_learned_stays_as_it_is(asked: str, tmp_path: Path) -> None:
    typed = ("named.before.learning_rate=0.00123", "named.before.num_workers=0")
    made, journal, _ = opened(tmp_path, asked, *typed, started=time.monotonic())
    profiler = FormulaProfiler()
    made.measure(profiler)  # type: ignore[arg-type]
    made.confirm(profiler)  # type: ignore[arg-type]
    found = summary.of_run(journal.run)
    assert found.best is not None
    before, best = found.named["before"].config, found.best.config
    assert {n: best[n] for n in before if EVERY[n].kind != "system"} == {
        n: v for n, v in before.items() if EVERY[n].kind != "system"
    }
    assert (best["learning_rate"], best["num_workers"]) == (0.00123, 2)
    assert found.named["plain defaults"].config["learning_rate"] != 0.00123
    assert "as in before" in found.rule
    journal.close()


def test_without_trials_a_typed_knob_has_its_value(tmp_path: Path) -> None:
    typed = ("knobs.learning_rate=0.01", "named.before.learning_rate=0.00123", "named.before.weight_decay=0.5")
    made, journal, _ = opened(tmp_path, "search.trials=0", *typed, started=time.monotonic())
    made.measure(FormulaProfiler())  # type: ignore[arg-type]
    made.confirm(FormulaProfiler())  # type: ignore[arg-type]
    found = summary.of_run(journal.run)
    assert found.best is not None
    assert (found.best.config["learning_rate"], found.best.config["weight_decay"]) == (0.01, 0.5)
    assert "as in before, learning_rate=0.01 as typed" in found.rule
    journal.close()


def test_without_trials_the_pick_has_the_fastest_system_knobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knob_columns, "flags_of_cpu", lambda: frozenset({"avx512bw"}))
    made, journal, _ = opened(tmp_path, "search.trials=0", "knobs.amp_dtype=[fp32,bf16]", started=time.monotonic())
    profiler = FormulaProfiler()
    made.measure(profiler)  # type: ignore[arg-type]
    made.search(profiler, setup.setting_of(made._config))  # type: ignore[arg-type]
    made.confirm(profiler)  # type: ignore[arg-type]
    found = summary.of_run(journal.run)
    assert found.best is not None
    start = groups.defaults(made._config.space)
    learned = {n: v for n, v in start.items() if EVERY[n].kind != "system"}
    assert {n: found.best.config[n] for n in learned} == learned
    assert found.best.config["num_workers"] == 2
    assert all(p.config["amp_dtype"] == start["amp_dtype"] for p in found.probes if not p.trial)
    assert {(g.of, g.over) for g in found.gains} >= {("best", "before"), ("best", "plain defaults")}
    assert not any(r.event in ("trial_start", "confirmed") for r in journal.records)
    assert "nothing was trained" in found.rule
    paths = export.write_all(found, tmp_path)
    assert best_file.read(paths[0]).knobs["num_workers"] == 2
    journal.close()


@pytest.mark.parametrize("outcome", ["cut", "crash"])
def test_reference_that_alone_came_to_its_end_has_a_pick(tmp_path: Path, outcome: str) -> None:
    made, journal, _ = opened(tmp_path, "search.max_time=null", started=time.monotonic())
    made.measure(FormulaProfiler())  # type: ignore[arg-type]
    today = made._limits.reference()[1]
    ended = {"outcome": "ok", "values": {"error": 0.2}, "samples_per_s": 9.0, "message": "", "seed": 0}
    journal.append(StartRecord, trial="t000", config=today, named="plain defaults", beside=True)
    journal.append(TrialRecord, trial="t000", config=today, **ended)
    lost = {"outcome": outcome, "values": {}, "samples_per_s": None, "message": "it is gone", "seed": 0}
    journal.append(StartRecord, trial="t001", config=today)
    journal.append(TrialRecord, trial="t001", config=today, **lost)
    made.confirm(FormulaProfiler())  # type: ignore[arg-type]
    (pick,) = journal.run.picks
    assert (pick.best, pick.kind, pick.config["num_workers"]) == ("", "system", 2)
    journal.close()


def test_plain_defaults_are_one_configuration(tmp_path: Path) -> None:
    (tmp_path / "free.py").write_text(MINE.read_text().split("BEFORE")[0])
    made, journal, _ = opened(tmp_path, f"workload={tmp_path / 'free.py'}", started=time.monotonic())
    name, reference = made._limits.reference()
    journal.close()
    assert reference == made._config.space.whole(made._config.named[name])


def test_reference_is_confirmed_with_the_micro_batch_that_fitted(tmp_path: Path) -> None:
    typed = ["search.max_time=null", "named.before.batch_size=32", "named.before.micro_batch_size=32"]
    made, journal, _ = opened(tmp_path, *typed, started=time.monotonic())
    made.measure(FormulaProfiler())  # type: ignore[arg-type]
    today = {**made._limits.reference()[1], "micro_batch_size": 16}
    journal.append(StartRecord, trial="t000", config=today, named="before", beside=True)
    own = {"outcome": "ok", "values": {"error": 0.2}, "samples_per_s": 9.0, "message": "", "seed": 0}
    journal.append(TrialRecord, trial="t000", config=today, **own)
    made.confirm(FormulaProfiler())  # type: ignore[arg-type]
    again = [r["config"] for r in journal.records if r.event in ("confirmed", "window") and r["name"] == "before"]
    assert again
    assert all(config == today for config in again)
    journal.close()


def test_study_whose_trainings_all_failed_has_no_pick(tmp_path: Path) -> None:
    made, journal, _ = opened(tmp_path, "search.max_time=null", started=time.monotonic())
    made.measure(FormulaProfiler())  # type: ignore[arg-type]
    for trial, named in (("t000", {"named": "plain defaults", "beside": True}), ("t001", {})):
        journal.append(StartRecord, trial=trial, config={}, **named)
        lost = {"outcome": "crash", "values": {}, "samples_per_s": None, "message": "it is gone", "seed": 0}
        journal.append(TrialRecord, trial=trial, config={}, **lost)
    with pytest.raises(NoUsableTrial, match=r"no trial of the search reached its end in .*; 1 of them: crash: it is"):
        made.confirm(FormulaProfiler())  # type: ignore[arg-type]
    journal.close()


def test_knob_that_is_not_honoured_is_told_once(tmp_path: Path) -> None:
    made, journal, _ = opened(tmp_path, started=time.monotonic())
    active = {"device": "cpu", "batch_size": 8, "micro_batch_size": 8, "weight_decays": [0.5]}
    for number, asked in enumerate((0.1, 0.2, 0.3)):
        made._told(journal.append(TrialRecord, trial=f"t{number}", config={"weight_decay": asked}, active=active))
    (note,) = [note.text for note in journal.run.notes if "was asked" in note.text]
    assert note == "t0: knobs.weight_decay=0.1 was asked; the first step showed weight decay 0.5"
    journal.close()


REFUSED = {"stage": "search", "config": {}, "reason": "predicted peak 3 GiB at a cap of 1 GiB"}
CRASHED = {"name": None, "config": {}, "outcome": "crash", "message": "it broke", "samples_per_s": None, "wall_s": 0.0}


@pytest.mark.parametrize(
    ("event", "fields", "says", "remedy"),
    [
        ("refused", REFUSED, "; 2 of the proposals: refused: predicted peak 3 GiB at a cap of 1 GiB", picking.SMALLER),
        ("probe", CRASHED, "; 2 of the probes: crash: it broke", "mend what it names"),
        ("probe", {**CRASHED, "outcome": "oom"}, "; 2 of the probes: oom: it broke", picking.SMALLER),
        ("probe", {**CRASHED, "outcome": "cut"}, "", "search.max_time=10m"),
    ],
)
def test_where_nothing_was_trained_it_is_said_why_and_what_helps(
    tmp_path: Path, event: str, fields: dict[str, Any], says: str, remedy: str
) -> None:
    made, journal, _ = opened(tmp_path, started=time.monotonic())
    for _ in range(2):
        journal.append(EVENTS[event], **fields)
    with pytest.raises(NoUsableTrial) as raised:
        made.confirm(FormulaProfiler())  # type: ignore[arg-type]
    assert raised.value.what == f"no trial of the search reached its end in {tmp_path}{says}"
    assert raised.value.remedy == remedy
    journal.close()


def test_more_time_is_the_remedy_if_time_alone_cut_trials(tmp_path: Path) -> None:
    made, journal, _ = opened(tmp_path, "search.strategy=joint", started=time.monotonic())
    journal.append(RefusedRecord, **REFUSED)
    journal.append(TrialRecord, trial="t000", config={}, outcome="cut", values={}, message="search.max_time was over")
    with pytest.raises(NoUsableTrial) as raised:
        made.confirm(FormulaProfiler())  # type: ignore[arg-type]
    assert raised.value.remedy == "search.max_time=10m"
    journal.close()


def test_a_search_begins_only_where_a_training_can_end(tmp_path: Path) -> None:
    late = time.monotonic() - 100
    made, journal, _ = opened(tmp_path, "search.max_time=120s", "budget.train_epochs=1000", started=late)
    made.measure(FormulaProfiler())  # type: ignore[arg-type]
    made.search(FormulaProfiler(), setup.setting_of(made._config))  # type: ignore[arg-type]
    (said,) = [note.text for note in journal.run.notes if "are left for the search" in note.text]
    assert "search.max_time=" in said
    journal.close()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([], "3 trials are few to choose among: search.max_time=16m has about 12"),
        (["search.max_time=30s"], "3 trials are few to choose among: search.max_time=2m has about 12"),
        (["search.trials=4"], "3 trials are few to choose among: search.max_time=6m has about 4"),
        (["search.trials=3"], ""),
        (["search.max_time=null"], ""),
    ],
)
def test_few_trials_are_told_with_a_time_that_has_more(tmp_path: Path, asked: list[str], said: str) -> None:
    made, journal, _ = opened(tmp_path, *asked, started=time.monotonic())
    for trial in "abca":  # one began again
        journal.append(StartRecord, trial=trial, config={})
    journal.append(StartRecord, trial="d", config={}, beside=True)
    assert made._limits.few() == said
    journal.close()


@pytest.mark.parametrize(("asked", "planned"), [(["search.trials=10"], 10), ([], PLANNED_TRIALS)])
def test_an_own_workload_trains_as_long_as_the_time_allows(tmp_path: Path, asked: list[str], planned: int) -> None:
    made, journal, _ = opened(tmp_path, f"workload={MINE}", *asked, started=time.monotonic())
    assert journal.run.study.horizon_samples is None  # type: ignore[union-attr]
    made.measure(FormulaProfiler())  # type: ignore[arg-type]
    horizon = journal.run.study.horizon_samples  # type: ignore[union-attr]
    fastest = max(r.samples_per_s for r in journal.run.probes)
    assert horizon % FACTS.train_samples == 0
    assert 0 < horizon <= fastest * 240 * 0.7 / planned
    assert made._limits.plan().samples == horizon
    journal.close()


@pytest.mark.parametrize(
    ("epochs", "asked", "trains", "said"),
    [
        ("1.5", [], 1.5, "as EPOCHS of "),
        ("1.5", ["search.max_time=null"], 1.5, "as EPOCHS of "),
        ("0.01", [], 0.01, "as EPOCHS of "),  # fewer steps than are chosen by time
        ("9000.0", [], None, "what is best for 9000 passes may be another: a larger search.max_time"),
        ("None", [], None, "what is best for a longer one may be another: budget.train_epochs=N"),
    ],
)
def test_no_trial_is_longer_than_training_is_today(
    tmp_path: Path, epochs: str, asked: list[str], trains: float | None, said: str
) -> None:
    (tmp_path / "timed.py").write_text(f"{MINE.read_text()}\nEPOCHS = {epochs}\n")
    made, journal, _ = opened(tmp_path, f"workload={tmp_path / 'timed.py'}", *asked, started=time.monotonic())
    made.measure(FormulaProfiler())  # type: ignore[arg-type]
    horizon, samples = journal.run.study.horizon_samples, FACTS.train_samples  # type: ignore[union-attr]
    assert horizon == round(trains * samples) if trains else horizon < 9000 * samples
    (note,) = [note for note in journal.run.notes if "a trial trains on" in note.text]
    assert said in note.text
    assert (note.text in summary.of_run(journal.run).warnings) == (epochs == "9000.0")
    journal.close()


def test_a_warning_is_in_the_summary_as_long_as_it_is_so(tmp_path: Path) -> None:
    made, journal, _ = opened(tmp_path, started=time.monotonic())
    for said, warns in (
        ("no", ""),
        ("one of 2", "probes"),
        ("two of 3", "probes"),
        ("before is not trained", "before"),
    ):
        made._note(said, warns=warns)
    found = summary.of_run(journal.run)
    few = next(said for said in found.warnings if "10 samples" in said)
    assert found.warnings == (few, "two of 3", "before is not trained")
    printed = io.StringIO()
    Console(file=printed, width=80).print(*text.summary(found))
    assert "two of 3" in printed.getvalue()
    assert "one of 2" not in printed.getvalue()
    journal.append(StartRecord, trial="t000", config={}, named="before")
    assert summary.of_run(journal.run).warnings == (few, "two of 3")
    journal.close()


@pytest.mark.parametrize(("outcome", "beside"), [("ok", False), ("cut", False), ("oom", True), ("crash", True)])
def test_plain_defaults_are_measured_if_before_cannot_be(tmp_path: Path, outcome: str, beside: bool) -> None:
    made, journal, _ = opened(tmp_path, f"workload={MINE}", started=time.monotonic())
    assert "plain defaults" not in made._named
    journal.append(ProbeRecord, name="before", config={}, outcome=outcome, samples_per_s=None)
    made._settle_space()
    assert ("plain defaults" in made._named) == beside
    journal.close()


@pytest.mark.parametrize(
    ("typed", "passed_s"),
    [
        (["search.trials=0"], 0.0),  # nothing is trained
        (["search.max_time=2m"], 105.0),  # nor where no time is left for it
    ],
)
def test_length_of_trainings_is_settled_when_one_begins(tmp_path: Path, typed: list[str], passed_s: float) -> None:
    made, journal, _ = opened(tmp_path, f"workload={MINE}", *typed, started=time.monotonic() - passed_s)
    made.measure(FormulaProfiler())  # type: ignore[arg-type]
    assert any(r.event == "probe" for r in journal.records)
    assert journal.run.study.horizon_samples is None  # type: ignore[union-attr]
    assert not any("a trial trains on" in note.text for note in journal.run.notes)
    journal.close()


class Late(FormulaProfiler):
    """A profiler after search.max_time: whatever is asked of it is cut."""

    def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> Footprint:
        """Returns nothing measured."""
        return Footprint(outcome="cut")

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
        """Returns no speed."""
        return Timed(outcome="cut")


def test_study_that_loads_longer_than_its_time_says_so(tmp_path: Path) -> None:
    made, journal, _ = opened(tmp_path, "search.max_time=30s", started=time.monotonic() - 40)
    made.measure(Late())  # type: ignore[arg-type]
    made.search(Late(), setup.setting_of(made._config))  # type: ignore[arg-type]
    assert not any(r.event in ("footprint", "refused", "trial_start") for r in journal.records)
    with pytest.raises(NoUsableTrial, match=r"search\.max_time=30s was over before anything was measured: 4\ds"):
        made.confirm(Late())  # type: ignore[arg-type]
    journal.close()


def test_what_a_short_start_left_out_is_measured_later(tmp_path: Path) -> None:
    typed = [f"workload={MINE}", "search.max_time=30s"]
    made, journal, _ = opened(tmp_path, *typed, started=time.monotonic() - 40)
    made.measure(Late())  # type: ignore[arg-type]
    assert not any(journal.run.is_done(stage) for stage in ("estimate", "probe"))
    assert journal.run.study.horizon_samples is None  # type: ignore[union-attr]
    journal.close()
    more, journal, _ = opened(tmp_path, *typed[:1], "search.max_time=4m", started=time.monotonic())
    more.measure(FormulaProfiler())  # type: ignore[arg-type]
    assert all(journal.run.is_done(stage) for stage in ("estimate", "probe"))
    assert {r.outcome for r in journal.run.probes} == {"cut", "ok"}
    assert journal.run.study.horizon_samples > FACTS.train_samples  # type: ignore[union-attr]
    journal.close()
