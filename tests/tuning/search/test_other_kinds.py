"""Trials on another kind of device: which fit there, what they ran with, and that they tell their quality alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes import no_time
from tests.tuning.search.test_scheduler import ORDERS, SPACE, Bench, Office
from trainables.knobs import Knobs
from tuning.config.cards import Card
from tuning.config.schema import ProbeSection
from tuning.config.space import Space
from tuning.journal.device_kinds import OfKind
from tuning.journal.records import Journal, trials
from tuning.memory.groups import guard, need_of
from tuning.memory.measure import MemoryStage
from tuning.search.other_kinds import PATIENCE, OtherKind
from tuning.search.probe import ProbeStage
from tuning.search.scheduler import TrialScheduler

SMALL_BYTES = 300_000_000


def small(journal: Journal, cap_bytes: int | None = SMALL_BYTES, space: Space = SPACE) -> OtherKind:
    """Returns a kind with less memory, on which everything takes the same time; measured."""
    own, profiler = OfKind(journal, "small"), Bench(cap_bytes)
    MemoryStage(profiler, space, own, cap_bytes, clock=no_time).run()
    learned = guard(own.records, cap_bytes)
    section = ProbeSection(max_time_s=0.5, probe_time_s=0.1)
    ProbeStage(profiler, space, own, learned, section, clock=no_time).run({}, lambda r: None)
    return OtherKind(own, space, learned, Card("auto", device="cpu"), shrink=True)


class Two(Office):
    """An office whose trials run on the target and on a smaller kind."""

    def __init__(self, folder: Path, cap_bytes: int | None = SMALL_BYTES, **terms: Any) -> None:
        super().__init__(folder, **terms)
        self.journal.kind = "large"
        self.other = small(self.journal, cap_bytes)
        told = self.scheduler._terms
        learned = guard(self.journal.records, None)
        self.scheduler = TrialScheduler(self.journal, SPACE, learned, told, ORDERS, lambda r: None, [self.other])

    def of(self, event: str) -> list[Any]:
        """Returns the records of an event."""
        return [r for r in self.journal.records if r.event == event]


def test_trial_there_has_the_speed_of_the_target(tmp_path: Path) -> None:
    office = Two(tmp_path)
    begun = [office.next("small") for _ in range(4)]
    assert [bool(r.get("beside")) for r in office.of("trial_start")] == [True, False, False, False]
    for request in begun:
        assert request.kind == "small"
        assert office.other.guard.judge(*need_of(request.knobs)).action == "launch"
        assert Knobs.of(request.knobs).micro_batch_size < 64
        office.finish(request)
    ended = {t.id: t for t in trials(office.journal.records)}
    for record in office.of("trial"):
        assert record["kind"] == "small"
        assert not {"measured_samples_per_s", "peak_allocated_bytes"} & record.fields.keys()
        assert record["ran"]["config"] == dict(begun[int(record["trial"][1:])].knobs)
        config = ended[record["trial"]].config
        batch, micro = int(config["batch_size"]), int(config["micro_batch_size"])
        assert record["trial"] == "t000" or micro == batch, "as the target trains it"
        seconds = batch / micro * office.profiler.micro_step_s(config) + 0.001
        assert record["samples_per_s"] == pytest.approx(batch / seconds)
    for request in begun:
        same = {n: v for n, v in request.knobs.items() if n in ("learning_rate", "batch_size")}
        assert same.items() <= ended[request.trial].config.items()


def test_what_fits_no_other_kind_waits_and_only_so_many_do(tmp_path: Path) -> None:
    office = Two(tmp_path, cap_bytes=1, count=12, sampler="random")
    assert office.scheduler.next_trial("small") is None
    waiting = list(office.scheduler.waiting)
    assert waiting == [f"t{n:03d}" for n in range(PATIENCE)]
    assert office.scheduler.next_trial("small") is None
    assert office.scheduler.waiting == waiting, "no more are proposed for it"
    assert not office.of("refused")
    begun = [r.trial for r in office.work()]
    assert begun[:PATIENCE] == waiting
    assert len(begun) == 1 + 12
    assert {r["kind"] for r in office.of("trial")} == {"large"}


def test_running_out_of_memory_there_is_no_ending(tmp_path: Path) -> None:
    office = Two(tmp_path, cap_bytes=None)
    request = office.next("small")
    before = office.scheduler._guard.judge(*need_of(request.knobs))
    office.scheduler.ended(request.trial, {**office.result(request, 100), "outcome": "oom"})
    assert [(r["trial"], r.event) for r in office.of("moved")] == [(request.trial, "moved")]
    assert not office.of("trial")
    assert not office.of("oom")
    assert office.scheduler._guard.judge(*need_of(request.knobs)) == before
    assert office.other.judged(request.knobs).action != "launch"
    again = office.next("")
    assert (again.trial, again.kind) == (request.trial, "")
    office.finish(again)
    assert [r["kind"] for r in office.of("trial")] == ["large"]


def test_a_trial_whose_kind_is_gone_is_handed_out_once_more(tmp_path: Path) -> None:
    office = Two(tmp_path)
    request = office.next("small")
    office.scheduler.requeue(request.trial)
    assert office.next("").trial == request.trial


def test_a_study_that_goes_on_knows_what_ran_where(tmp_path: Path) -> None:
    office = Two(tmp_path)
    for kind in ("small", "", "small", ""):
        office.finish(office.next(kind))
    left = office.next("small")
    before = trials(office.journal.records)
    office.journal.close()
    with Journal.open(tmp_path / "trials.jsonl") as journal:
        learned, own = guard(journal.records, None), OfKind(journal, "small")
        other = OtherKind(own, SPACE, guard(own.records, SMALL_BYTES), Card("auto", device="cpu"), shrink=True)
        again = TrialScheduler(journal, SPACE, learned, office.scheduler._terms, ORDERS, lambda r: None, [other])
        assert trials(journal.records) == before
        assert again.waiting == [left.trial]
        first = again.next_trial("small")
        assert first is not None
        assert (first.trial, dict(first.knobs)) == (left.trial, dict(left.knobs))
        assert sum(r.event == "trial" for r in own.records) == 2
        assert all(r["measured_samples_per_s"] for r in own.records if r.event == "trial")


def test_a_type_that_a_kind_lacks_is_not_trained_there(tmp_path: Path) -> None:
    space = Space.of({**SPACE.as_raw(), "amp_dtype": ["bf16"]})
    with Journal.open(tmp_path / "trials.jsonl", create=True) as journal:
        old = OtherKind(
            OfKind(journal, "old"), space, guard([], None), Card("auto", capability=(7, 5), device="cuda"), shrink=True
        )
        config = {"batch_size": 16, "micro_batch_size": 16, "num_workers": 0, "learning_rate": 0.1}
        assert old.fits("t0", {**config, "amp_dtype": "fp16"})
        assert not old.fits("t0", {**config, "amp_dtype": "bf16"})
