"""What a study does before Ray starts, and says about itself; with a profiler of formulas, and no Ray."""

from __future__ import annotations

import io
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.commands import MINE, ROOT
from tests.fakes import FormulaProfiler
from trainables.knobs import Scalar
from tuning import run
from tuning.cli.terminal import Terminal
from tuning.config import load, resolve
from tuning.config.errors import ConfigError, PreflightError
from tuning.journal.records import Journal, Record
from tuning.report import summary
from tuning.search.packing import Slots
from tuning.study import setup, study
from tuning.study.limits import Limits
from tuning.workers import executors
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

FINISHED = "20261121-103412-3f2a"


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
        journal.append("study", **opening)
        for record in records[1:]:
            journal.append(record.event, **record.fields)
    return folder / "trials.jsonl"


def test_going_on_with_a_finished_run_prints_it_again_and_changes_nothing(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, beside = finished.read_bytes(), sorted(finished.parent.iterdir())
    assert run.main([f"resume={FINISHED}", "runs_dir=my runs"]) == 0
    out, err = capsys.readouterr()
    assert "(trial t007)" in out
    assert f"the run {FINISHED} is finished" in err
    assert finished.read_bytes() == before
    assert sorted(finished.parent.iterdir()) == beside


def test_a_resumed_run_keeps_its_configuration_and_has_a_command_of_its_own(finished: Path) -> None:
    typed = [f"resume={FINISHED}", "runs_dir=my runs", "dashboard=true"]
    folder, resumed = setup.checked(load.load(typed))
    assert folder is not None
    assert folder.resolve() == finished.parent
    assert (resumed.space.fixed["dropout"], resumed.dashboard) == (0.2, True)
    assert shlex.split(setup.command_of(resumed)) == ["python", "-m", "tuning.run", *typed]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["name=one"], "name=one: runs/nli/one exists\n  try: resume=one, or another name"),
        (["runs_dir=file"], "runs_dir=file cannot be written: it is a file\n  allowed: a folder of yours"),
        (["runs_dir=file/below"], "file is a file"),
        (["runs_dir=/proc/nowhere"], "runs_dir=/proc/nowhere cannot be written: "),
        ([f"workload={MINE}", "workload.hiden=3"], "workload.hiden=3: the workload has no option hiden"),
        ([f"workload={MINE}", "workload.hidden=wide"], "workload.hidden=wide is not allowed"),
        (["card=cpu", "knobs.adapter_rank={low: 4, high: 64}"], "knobs.adapter_rank is a range"),
    ],
)
@pytest.mark.parametrize("validate", [True, False])
def test_what_can_be_known_before_ray_starts_is_refused_before(
    arguments: list[str], says: str, validate: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    Path("runs/nli/one").mkdir(parents=True)
    Path("runs/nli/one/trials.jsonl").touch()
    before = sorted(Path().rglob("*"))
    assert run.main([*arguments, *(["--validate"] if validate else [])]) == 2
    assert says in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before


def test_validate_says_what_would_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["card=cpu", "--validate"]) == 0
    err = capsys.readouterr().err
    assert "note      knobs.tf32=true is left out" in err
    assert err.endswith("note      the configuration is valid\n")


class Described(Worker):
    """A profiler that describes itself as it is told to, and has no process."""

    def __init__(self, facts: dict[str, object], text: str = "") -> None:
        self._facts, self._text = facts, text

    def describe(self, knobs: object) -> dict[str, object]:
        """Returns the facts, or raises as the real one does when its process died."""
        if self._text:
            raise PreflightError("the process died") from RuntimeError(self._text)
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
def test_what_a_workload_says_of_its_options_and_data_is_an_error_of_the_command_line(
    said: str, what: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        setup.described(Described({}, DIED + said), OPTIONS, {})
    assert (raised.value.what, raised.value.allowed) == (what, allowed)
    assert raised.value.remedy
    assert raised.value.exit_code == 2


def test_any_other_end_of_the_measuring_process_stays_what_it_is() -> None:
    with pytest.raises(PreflightError, match="the process died"):
        setup.described(Described({}, f"{DIED}ZeroDivisionError: division by zero"), OPTIONS, {})


@pytest.mark.parametrize(("train", "val", "split"), [(0, 5, "training"), (5, 0, "validation")])
def test_an_empty_split_is_an_error_of_the_command_line(train: int, val: int, split: str) -> None:
    with pytest.raises(ConfigError, match=f"the {split} split of the workload is empty"):
        setup.described(Described({"train_samples": train, "val_samples": val}), {}, {})


def opened(
    tmp_path: Path, *typed: str, started: float, baselines: dict[str, dict[str, float]] | None = None
) -> tuple[study._Study, Journal, io.StringIO]:
    """Returns a study of formulas behind its opening, its journal, and what it says."""
    _, complete = setup.checked(load.load(["card=cpu", *typed]))
    said = io.StringIO()
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    made = study._Study(complete, Terminal(out=io.StringIO(), err=said, env={}), journal, tmp_path, started)
    facts = {
        **{"device": {"name": "Example CPU", "type": "cpu", "memory_bytes": 2**34}, "objectives": {"error": "min"}},
        **{"train_samples": 100, "val_samples": 10, "workload_sha256": "w", "shapes_sha256": "s"},
        "baselines": baselines or {},
    }
    made.open(facts, setup.setting_of(complete))
    return made, journal, said


def test_a_joint_search_has_no_probe_stage(tmp_path: Path) -> None:
    made, journal, said = opened(tmp_path, "search.strategy=joint", "knobs.amp_dtype=fp32", started=time.monotonic())
    made.measure(FormulaProfiler())  # type: ignore[arg-type]
    assert {r["stage"] for r in journal.records if r.event == "stage"} == {"estimate"}
    assert "probe" not in said.getvalue()
    journal.close()


def test_too_little_time_is_said_at_the_start(tmp_path: Path) -> None:
    started = time.monotonic() - 14
    _, journal, said = opened(tmp_path, "search.max_time=60s", "budget.confirm.windows=5", started=started)
    journal.close()
    words = " ".join(said.getvalue().split())
    assert "warning search.max_time=1m is too short: start-up (14s), probes (24s) and confirming (about 1m)" in words
    assert "alone take 1m38s, and " in words
    assert "give it search.max_time=4m, or lower budget.probe.max_time_s and budget.confirm.windows" in words
    warned = said.getvalue()[said.getvalue().index("warning") :]
    assert max(map(len, warned.splitlines())) <= 80


@pytest.mark.parametrize("typed", [["search.max_time=10m"], ["search.max_time=null"]])
def test_enough_time_is_no_word_worth(tmp_path: Path, typed: list[str]) -> None:
    _, journal, said = opened(tmp_path, *typed, started=time.monotonic())
    journal.close()
    assert "warning" not in said.getvalue()


@pytest.mark.parametrize(
    ("device", "gpus", "slots", "dashboard", "executor", "profiler"),
    [
        ("cpu", 0, 1, False, "LocalExecutor", "kept"),
        ("cpu", 0, 2, False, "ray", "lent"),
        ("cpu", 0, 1, True, "ray", "ended"),
        ("cuda", 1, 1, False, "LocalExecutor", "kept"),
        ("cuda", 1, 2, False, "ray", "lent"),
        ("cuda", 2, 1, False, "ray", "ended"),
    ],
)
def test_ray_runs_the_trials_where_there_is_something_to_share_or_a_dashboard_to_show_it(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, slots: int, dashboard: bool, executor: str, profiler: str
) -> None:
    done: list[str] = []
    there = SimpleNamespace(lend=lambda: done.append("lent") or "door", end=lambda: done.append("ended"))  # type: ignore[func-returns-value]
    ray = SimpleNamespace(RayCluster=lambda **_: nullcontext(), RayExecutor=lambda *_: "ray")
    monkeypatch.setattr(executors, "_ray", lambda: ray)
    monkeypatch.setattr(study.doctor, "gpus", lambda: [None] * gpus)
    loaded = load.load(["workload=nli", f"dashboard={str(dashboard).lower()}"])
    loaded = loaded.model_copy(update={"card": loaded.card.on(device)})  # type: ignore[arg-type]
    with executors.executor(loaded, slots, there, WorkerConfig("nli")) as chosen:  # type: ignore[arg-type]
        assert (chosen if chosen == "ray" else type(chosen).__name__) == executor
    assert (done or ["kept"]) == [profiler]


@pytest.mark.parametrize(
    ("device", "gpus", "typed", "sure"),
    [
        ("cpu", 0, [], False),
        ("cpu", 0, ["concurrency=1"], True),
        ("cuda", 1, [], False),
        ("cuda", 1, ["concurrency=1"], True),
        ("cuda", 1, ["search.strategy=joint"], True),
        ("cuda", 1, ["search.strategy=joint", "concurrency=2"], False),
        ("cuda", 2, ["concurrency=1"], False),
    ],
)
def test_whether_ray_may_be_needed_is_known_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, typed: list[str], sure: bool
) -> None:
    monkeypatch.setattr(study.doctor, "cores", lambda: 4)
    monkeypatch.setattr(study.doctor, "gpus", lambda: [None] * gpus)
    loaded = load.load(["workload=nli", *typed])
    loaded = loaded.model_copy(update={"card": loaded.card.on(device)})  # type: ignore[arg-type]
    assert executors.one_at_a_time(loaded) is sure


def test_a_percentage_stands_in_the_rule_of_the_pick(tmp_path: Path) -> None:
    made, journal, _ = opened(tmp_path, "pick.tolerance=10%", started=time.monotonic())
    for trial, error, rate in (("t0", 2.0, 50.0), ("t1", 2.15, 60.0), ("t2", 2.3, 70.0)):
        values = {"error": error}
        journal.append("trial", trial=trial, config={}, outcome="ok", values=values, samples_per_s=rate)
    picked = made._pick()
    journal.close()
    assert picked is not None
    assert picked.best == "t1"
    assert picked.rule.startswith("of 3 the fastest whose error is within 0.2 of the best seen: 2.15 against 2")
    assert picked.rule.endswith("the tolerance is 10% of that best")


class Seeded(FormulaProfiler):
    """A profiler on which the errors of learning rates by fresh seeds are given; others do not come to their end."""

    def __init__(self, errors: dict[float, float]) -> None:
        super().__init__()
        self.errors = errors

    def train(self, knobs: Mapping[str, Scalar], samples: int, milestones: Sequence[int], seed: int) -> dict[str, Any]:
        """Returns the learning rate's error."""
        found = {**super().train(knobs, samples, milestones, seed), "train_s": 1.0}
        error = self.errors.get(float(knobs["learning_rate"]))
        return {**found, "values": {"error": error}} if error is not None else {**found, "outcome": "diverged"}


@pytest.mark.parametrize(
    ("errors", "best", "says"),
    [
        ({0.1: 0.25, 0.2: 0.255}, "t1", "of 2 confirmed on 3 fresh seeds the fastest whose mean error is within 0.01"),
        ({0.1: 0.25, 0.2: 0.31}, "t0", "of 2 the fastest whose error is within 0.01 of the best seen: 0.2 against 0.2"),
        ({0.2: 0.25}, "t1", "of 1 the fastest whose error is within 0.01 of the best seen"),
        ({}, "t1", "trained again, neither it nor another came to its end on every seed"),
    ],
)
def test_what_is_exported_is_measured_of_whom_the_rule_picks_once_confirmed(
    tmp_path: Path, errors: dict[float, float], best: str, says: str
) -> None:
    made, journal, said = opened(tmp_path, started=time.monotonic())
    profiler = Seeded(errors)
    for trial, learning_rate, error, rate, batch in (("t0", 0.1, 0.2, 10.0, 8), ("t1", 0.2, 0.26, 90.0, 64)):
        config = {"learning_rate": learning_rate, "batch_size": batch, "micro_batch_size": batch}
        own = {"outcome": "ok", "values": {"error": error}, "samples_per_s": rate}
        journal.append("trial", trial=trial, config=config, **own)
    made.confirm(profiler)  # type: ignore[arg-type]
    found = summary.from_records(journal.records)
    assert found.best is not None
    assert (found.best.trial, says in found.rule) == (best, True)
    windows = [r for r in journal.records if r.event == "window" and r["name"] == "best"]
    assert [r["config"]["learning_rate"] for r in windows] == [0.1 if best == "t0" else 0.2] * 5
    if errors:
        assert found.best.trained is not None
        assert found.best.quality["error"].mean == pytest.approx(errors[0.1 if best == "t0" else 0.2])
        assert len(found.best.quality["error"].by_seed) == 3
    assert ("no longer the pick" in " ".join(said.getvalue().split())) == (0.1 not in errors)
    before = len(journal.records)
    made.confirm(profiler)  # type: ignore[arg-type]
    assert len(journal.records) == before
    journal.close()


@pytest.mark.parametrize(("errors", "best"), [({0.1: 0.2, 0.2: 0.205}, "t0"), ({0.1: 0.2, 0.2: 0.203}, "t1")])
def test_the_pick_is_better_than_the_workloads_baseline_by_one_seed_and_confirmed(
    tmp_path: Path, errors: dict[float, float], best: str
) -> None:
    baselines = {"mean": {"error": 0.9}, "last": {"error": 0.204}, "none": {"error": float("nan")}}
    made, journal, _ = opened(tmp_path, started=time.monotonic(), baselines=baselines)
    for trial, learning_rate, error, rate in (("t0", 0.1, 0.2, 10.0), ("t1", 0.2, 0.205, 90.0)):
        config = {"learning_rate": learning_rate, "batch_size": int(rate), "micro_batch_size": int(rate)}
        own = {"outcome": "ok", "values": {"error": error}, "samples_per_s": rate}
        journal.append("trial", trial=trial, config=config, **own)
    picked = made._pick()
    assert picked is not None
    assert picked.best == "t0"
    assert "within 0.01 of the best seen and better than last (0.204): 0.2 against 0.2" in picked.rule
    made.confirm(Seeded(errors))  # type: ignore[arg-type]
    found = summary.from_records(journal.records)
    assert found.best is not None
    assert (found.best.trial, "better than last (0.204)" in found.rule) == (best, best == "t0")
    journal.close()


def slots_of(folder: Path, arguments: list[str], probe: dict[str, object] | None = None, device: str = "cpu") -> Slots:
    """Returns how a study with these arguments, on four cores, would let its trials share the card."""
    loaded = load.load(["workload=nli", *arguments])
    loaded = loaded.model_copy(update={"card": loaded.card.on(device)})  # type: ignore[arg-type]
    with Journal.open(folder / "trials.jsonl", create=True) as journal:
        if probe is not None:
            journal.append("probe", outcome="ok", samples_per_s=10.0, **probe)
        facts = {"device": {"memory_bytes": 24 * 2**30}, "parameters": {"total": 10**6}}
        return Limits(loaded, facts, journal, time.monotonic()).slots()


def test_trials_on_a_virtual_card_of_a_cpu_share_it_each_under_a_cap_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study.doctor, "cores", lambda: 4)
    found = slots_of(tmp_path, ["card=rtx4060"])
    cap = load.load(["card=rtx4060"]).card.cap_bytes
    assert cap is not None
    assert (found.count, found.threads) == (4, 1)
    assert cap - 4 < 4 * (found.cap_bytes(1) or 0) <= cap
    assert found.cap_bytes(4) == found.count * (found.slot_bytes or 0)


def test_without_a_card_trials_are_placed_by_free_memory_and_held_to_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study.doctor, "cores", lambda: 4)
    found = slots_of(tmp_path, ["card=cpu", "concurrency=2"])
    assert (found.count, found.threads, found.cap_bytes(1)) == (2, 2, None)
    assert found.slot_bytes is not None
    assert found.width(found.slot_bytes) == 2


def test_a_card_is_shared_where_the_probes_found_it_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study.doctor, "cores", lambda: 16)
    idle = {"config": {"num_workers": 2}, "telemetry": {"gpu_sm_frac": 0.4}, "peak_allocated_bytes": 3 * 2**30}
    busy = {**idle, "telemetry": {"gpu_sm_frac": 0.97}}
    counts = {}
    for name, probe, more in (("idle", idle, []), ("busy", busy, []), ("joint", idle, ["search.strategy=joint"])):
        (tmp_path / name).mkdir()
        found = slots_of(tmp_path / name, ["card=rtx3090", *more], probe, "cuda")
        counts[name] = found.count
        assert sum([found.cap_bytes(1) or 0] * found.count) <= 24 * 2**30
        assert found.enforced
    assert counts == {"idle": 2, "busy": 1, "joint": 1}


def test_what_others_hold_of_a_card_is_not_the_trials(tmp_path: Path) -> None:
    gib = 2**30
    for settings, free, usable in (
        (["card=rtx3090"], 30 * gib, load.load(["card=rtx3090"]).card.cap_bytes),
        (["card=rtx3090"], 10 * gib, 10 * gib),
        (["card=auto"], 10 * gib, 10 * gib),
        (["card=auto"], None, 24 * gib - load.load(["card=auto"]).card.reserve_bytes),
    ):
        loaded = load.load(["workload=nli", *settings])
        loaded = loaded.model_copy(update={"card": loaded.card.on("cuda")})
        with Journal.open(tmp_path / "trials.jsonl", create=True) as journal:
            own = Limits(loaded, {"device": {"memory_bytes": 24 * gib}}, journal, time.monotonic(), free)
            assert own.cap_bytes() == usable


def test_a_study_says_its_first_word_without_torch_or_ray() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import sys, tuning.study; print({'torch', 'ray', 'pandas'} & set(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert found.stdout == "set()\n"
