"""What a study writes and says as it opens, measures and searches; by formulas."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.commands import MINE
from tests.tuning.study.formulas import FACTS, Learning, opened
from trainables.knobs import Scalar
from tuning.cli.terminal import Terminal
from tuning.config import load
from tuning.config.errors import ConfigError
from tuning.journal.events import NoteRecord, ProbeRecord, ResumeRecord, StartRecord, StudyRecord, Timed, TrialRecord
from tuning.journal.records import Journal
from tuning.report import report, summary, text
from tuning.search.protocols import TrialPlan
from tuning.study import setup, study
from tuning.workers.nodes import Node
from tuning.workers.worker_config import ChangedKnobs


def test_nodes_of_a_cluster_are_written_told_and_reported(tmp_path: Path) -> None:
    alike = [Node(name, f"10.0.0.{n}", 4.0) for n, name in enumerate("abc")]
    nodes = [*alike, Node("d", "10.0.0.9", 16.0, why="its cores are 16, and 8 on the machine of the run")]
    _, complete = setup.prepare_config(load.load(["card=cpu", "concurrency=1"]))
    users: Any = SimpleNamespace(nodes=nodes, training=alike)
    said = io.StringIO()
    with Journal.open(tmp_path / "trials.jsonl", create=True) as journal:
        terminal = Terminal(out=io.StringIO(), err=said, env={})
        made = study._Study(complete, terminal, journal, tmp_path, 0.0, users)
        made.open(FACTS, setup.setting_of(complete))
        assert journal.records[0]["concurrency"] == 3, "one on each that trains"
        assert [r.why == "" for r in journal.run.nodes] == [True, True, True, False]
        report.write_report(summary.of_run(journal.run), tmp_path / "report.html")
    why = "10.0.0.9 (d) is left out: its cores are 16"
    assert why in " ".join(said.getvalue().split())
    assert why in (tmp_path / "report.html").read_text()


ELSEWHERE = {
    **{"versions": {"torch": "1.0.0"}, "device": {"name": "Another CPU"}},
    **{"data_sha256": "e", "workload_sha256": "v"},
}


@pytest.mark.parametrize("force", [False, True])
def test_run_goes_on_elsewhere_only_by_force(tmp_path: Path, force: bool) -> None:
    made = opened(tmp_path)
    made.journal.rewrite(StudyRecord, **ELSEWHERE)
    made.journal.close()
    (tmp_path / "config.yaml").unlink()
    says = ["data has changed", "device name was Another CPU and is Example CPU"]
    says += ["the workload's source has changed", "torch was 1.0.0 and is"]
    if force:
        (record,) = opened(tmp_path, resume="one", force=True).run.resumes
        assert all(wanted in told for wanted, told in zip(says, sorted(record.changed), strict=True))
        assert (tmp_path / "config.yaml").exists(), "a run that was killed before it wrote that"
        return
    with pytest.raises(ConfigError, match="the run began elsewhere or otherwise") as raised:
        opened(tmp_path, resume="one")
    assert all(wanted in str(raised.value) for wanted in says)
    assert "force=true" in raised.value.remedy


class Compared(Learning):
    """A device that finds the micro-batch to change what is learned, unless the time cut it, and counts its calls."""

    def __init__(self, is_cut: bool = False, cap_bytes: int | None = None) -> None:
        super().__init__(cap_bytes=cap_bytes)
        self.asked, self.is_cut = 0, is_cut

    def kinds(self, knobs: Mapping[str, Scalar], changes: Mapping[str, Scalar]) -> ChangedKnobs:
        """Returns what a batch norm would show."""
        assert changes["micro_batch_size"]
        self.asked += 1
        if self.is_cut:
            return ChangedKnobs(outcome="cut", message="search.max_time was over")
        return ChangedKnobs(outcome="ok", changed={"micro_batch_size": "BatchNorm2d (down) gives other values"})


def test_what_changes_learning_is_measured_once(tmp_path: Path) -> None:
    made, profiler = opened(tmp_path, "search.trials=0"), Compared()
    made.study.measure_kinds(Compared(is_cut=True))
    assert made.study._space.table["micro_batch_size"].kind == "system"
    for _ in range(2):
        made.study.measure_kinds(profiler)
        assert made.study._space.table["micro_batch_size"].kind == "both"
    assert profiler.asked == 1
    because = "BatchNorm2d (down) gives other values"
    assert [note.startswith("micro_batch_size changes") and because in note for note in made.notes].count(True) == 1
    assert "BatchNorm2d" in made.said
    found = summary.of_run(made.run)
    assert (found.table["micro_batch_size"].kind, list(found.kinds)) == ("both", ["micro_batch_size"])
    assert {probe.config["micro_batch_size"] for probe in made.measure().run.probes if not probe.name} == {32}


def test_batch_in_one_piece_is_probed_first_and_cut_if_need_be(tmp_path: Path) -> None:
    """With batch norm a smaller micro-batch is another training, and mostly a slower one."""
    knobs = ("knobs.micro_batch_size=[32,64,256]", "knobs.batch_size=[256]", "knobs.num_workers=[0]")
    facts = replace(FACTS, asked=("batch_size", "micro_batch_size"), train_samples=1024)  # of a custom loop
    profiler = Compared(cap_bytes=10**9)
    made = opened(tmp_path, "search.trials=0", "card.memory_gib=1", *knobs, profiler=profiler, facts=facts)
    made.study.measure_kinds(profiler)
    probes = [(r.config["micro_batch_size"], r.outcome) for r in made.measure().run.probes if not r.name]
    assert (probes[0], probes[-1]) == ((256, "oom"), (64, "ok"))
    assert "a batch in one piece does not fit: micro_batch_size=64, which changes" in " ".join(made.notes)
    assert made.confirm().run.picks[0].config["micro_batch_size"] == 64


def test_knob_that_is_not_honoured_is_told_once(tmp_path: Path) -> None:
    class Deaf(Learning):
        """Another optimiser acts than was asked for."""

        def probe(self, *asked: Any) -> Timed:
            active = {"device": "cpu", "optimizer": "SGD", "optimizer_state_dtypes": []}
            return replace(super().probe(*asked), active=active)

    made = opened(tmp_path, "search.trials=0", "knobs.num_workers=0", profiler=Deaf()).measure()
    assert len(made.run.probes) > 2
    (note,) = [note for note in made.notes if "optimizer" in note and "was set" in note]
    assert "optimizer=adamw was set, but the first step showed" in note


def test_slots_that_would_leave_a_card_idle_are_fewer(tmp_path: Path) -> None:
    made = opened(tmp_path, "concurrency=5")
    for count in (5, 4):
        made.study._share(TrialPlan(64, (64,), False, count, 1, devices=4))
    (said,) = [note.text for note in made.run.notes if note.warns == "concurrency"]
    assert "idle, so 4 trials run at once" in said


def test_search_begins_only_if_a_training_can_end(tmp_path: Path) -> None:
    made = opened(tmp_path, "search.max_time=120s", "budget.train_epochs=1000", passed_s=100).search()
    (said,) = [note for note in made.notes if "are left for the search" in note]
    assert "search.max_time=" in said
    assert not made.run.begun


@pytest.mark.parametrize(
    ("epochs", "typed", "said", "warns"),
    [
        ("1.5", [], "as EPOCHS of ", False),
        ("1.5", ["search.max_time=null"], "as EPOCHS of ", False),
        ("9000.0", [], "the best settings for 9,000 epochs may differ: a larger search.max_time", True),
        ("None", [], "budget.train_epochs=N", False),
        ("None", ["search.trials=0"], "", False),  # nothing is trained
        ("None", ["search.max_time=2m"], "", False),  # nor if no time is left for it
    ],
)
def test_length_is_settled_and_told_when_a_search_begins(
    tmp_path: Path, epochs: str, typed: list[str], said: str, warns: bool
) -> None:
    (tmp_path / "timed.py").write_text(f"{MINE.read_text()}\nEPOCHS = {epochs}\n")
    passed_s = 105.0 if "search.max_time=2m" in typed else 0.0
    made = opened(tmp_path, f"workload={tmp_path / 'timed.py'}", *typed, passed_s=passed_s).measure()
    assert made.run.probes
    assert bool(made.run.study.horizon_samples) == bool(said)
    notes = [note for note in made.notes if "a trial trains on" in note]
    assert [said in note for note in notes] == [True] * bool(said)
    assert any(note in summary.of_run(made.run).warnings for note in notes) == warns


def test_warning_is_in_the_summary_as_long_as_it_holds(tmp_path: Path) -> None:
    made = opened(tmp_path)
    for said, warns in (("no", ""), ("one of 2", "probes"), ("two of 3", "probes"), ("not trained", "before")):
        made.journal.append(NoteRecord, text=said, warns=warns)
    found = summary.of_run(made.run)
    few = next(said for said in found.warnings if "10 samples" in said)
    assert found.warnings == (few, "two of 3", "not trained")
    printed = io.StringIO()
    Console(file=printed, width=80).print(*text.summary(found))
    assert "two of 3" in printed.getvalue()
    assert "one of 2" not in printed.getvalue()
    made.journal.append(StartRecord, trial="t000", config={}, named="before")
    assert summary.of_run(made.run).warnings == (few, "two of 3")


def test_notes_of_a_pick_that_was_replaced_are_not_told(tmp_path: Path) -> None:
    made = opened(tmp_path)
    made.journal.append(NoteRecord, text="of the machine")
    for said, pick in (("of the first", {}), ("of the second", {"pick": {"tolerance": 0.1}})):
        made.journal.append(ResumeRecord, **pick)
        with made.study._stage("confirm"):
            made.journal.append(NoteRecord, text=said)
    notes = [note for note in summary.of_run(made.run).notes if note.startswith("of ")]
    assert notes == ["of the machine", "of the second"]


@pytest.mark.parametrize(("outcome", "is_measured"), [("ok", False), ("cut", False), ("oom", True), ("crash", True)])
def test_plain_defaults_are_measured_if_before_cannot_be(tmp_path: Path, outcome: str, is_measured: bool) -> None:
    made = opened(tmp_path, f"workload={MINE}").measure()
    made.journal.append(ProbeRecord, name="before", config={}, outcome=outcome, samples_per_s=None)
    ended = {"outcome": "ok", "values": {"error": 0.2}, "samples_per_s": 9.0, "message": "", "seed": 0}
    made.journal.append(StartRecord, trial="t000", config=made.config.named["before"], named="before", beside=True)
    made.journal.append(TrialRecord, trial="t000", config=made.config.named["before"], **ended)
    made.study._settle_space()
    made.confirm()
    assert ("plain defaults" in {window.name for window in made.run.all_windows}) == is_measured
