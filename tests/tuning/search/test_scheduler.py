"""The scheduler: what it proposes, whom it stops, what it writes, and how it goes on after a crash."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FormulaProfiler, no_time
from trainables.knobs import Knobs, KnobTable
from trainables.our_knobs import EVERY
from tuning.config.schema import ProbeSection
from tuning.config.space import Space
from tuning.journal.events import (
    EVENTS,
    ConfirmedRecord,
    Event,
    OomRecord,
    ResumeRecord,
    StartRecord,
    StudyRecord,
    TrialRecord,
)
from tuning.journal.records import Journal
from tuning.memory import oom
from tuning.memory.groups import defaults, guard, key_of, micro_batch_of, need_of
from tuning.memory.guard import MemoryGuard
from tuning.memory.measure import MemoryStage
from tuning.report import summary
from tuning.search.probe import ProbeStage
from tuning.search.proposals import FASTER
from tuning.search.protocols import TrialPlan, TrialRequest, TrialState
from tuning.search.scheduler import NAN_IN_FP16, SearchTerms, TrialScheduler
from tuning.search.selection import leader
from tuning.search.throughput import Probed, Speeds, fastest

SPACE = Space.parse(
    {
        "batch_size": [16, 32, 64, 128, 256],
        "micro_batch_size": [4, 16, 64, 256],
        "num_workers": [0, 2],
        "learning_rate": {"low": 1e-3, "high": 1.0, "log": True},
    },
    EVERY,
)
ORDERS = TrialPlan(samples=800, milestones=(200, 400, 800), shrink=True, concurrency=1, threads=1)


class Bench(FormulaProfiler):
    """A device on which large batches are faster by far, and learn worse beyond 128."""

    def micro_step_s(self, knobs: Mapping[str, Any]) -> float:
        """Returns 40 ms more than the formula."""
        return 0.040 + super().micro_step_s(knobs)

    def train(self, knobs: Mapping[str, Any], samples: int, *rest: Any) -> TrialState:
        """Returns an error that the learning rate's distance from what suits the batch makes, and falls meanwhile."""
        size, rate = int(knobs["batch_size"]), float(knobs["learning_rate"])
        error = 0.2 * abs(math.log(rate / (0.015 * math.sqrt(size / 16)))) + 0.2 * max(0.0, math.log2(size / 128))
        return replace(super().train(knobs, samples, *rest), values={"error": error + 1.0 - samples / 800})


STUDY: Mapping[str, Any] = {"objectives": {"error": "min"}, "card": {}, "device": {}}


class Office:
    """A scheduler over a journal in a folder, a profiler of formulas, and a executor of one."""

    def __init__(
        self,
        folder: Path,
        *,
        strategy: Any = "staged",
        count: int = 12,
        cap_bytes: int | None = None,
        named: Any = None,
        space: Space = SPACE,
        profiler: FormulaProfiler | None = None,
        concurrency: int = 1,
        opening: Mapping[str, Any] | None = None,
        **terms: Any,
    ) -> None:
        self.profiler = profiler or Bench(cap_bytes)
        self.journal = Journal.open(folder / "trials.jsonl", create=True)
        if opening is not None and self.journal.run.study is None:
            self.journal.append(StudyRecord, **opening)
        MemoryStage(self.profiler, space, self.journal, cap_bytes, clock=no_time).run()
        learned = guard(self.journal.run, cap_bytes)
        if strategy == "staged":
            section = ProbeSection(max_time_s=0.5, probe_time_s=0.1)
            stage = ProbeStage(self.profiler, space, self.journal, learned, section, clock=no_time)
            stage.run(named or {}, lambda r: None)
        whole: dict[str, Any] = {"deadline": None, **terms}
        told = SearchTerms(strategy=strategy, trials=count, seed=0, objectives={"error": "min"}, **whole)
        plan = replace(ORDERS, concurrency=concurrency)
        self.scheduler = TrialScheduler(self.journal, space, learned, told, plan, lambda r: None)

    def next(self) -> TrialRequest:
        request = self.scheduler.next_trial()
        assert request is not None
        return request

    def result(self, request: TrialRequest, samples: int, **changed: Any) -> TrialState:
        return replace(self.profiler.train(request.knobs, samples, (samples,), 0), **changed)

    def work(self, limit: int = 1000) -> list[TrialRequest]:
        """Runs trials until the scheduler has no more, or `limit` have begun."""
        begun: list[TrialRequest] = []
        while len(begun) < limit and (request := self.scheduler.next_trial()) is not None:
            begun.append(request)
            self.finish(request)
        return begun

    def finish(self, request: TrialRequest) -> None:
        for milestone in ORDERS.milestones[:-1]:
            if not self.scheduler.at_rung(request.trial, self.result(request, milestone)):
                self.scheduler.ended(request.trial, self.result(request, milestone))
                return
        self.scheduler.ended(request.trial, self.result(request, ORDERS.samples))


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Office, list[TrialRequest]]:
    """A search of 30 trials that has ended, and the trials in the order in which they began."""
    office = Office(tmp_path_factory.mktemp("searched"), count=30, opening=STUDY)
    return office, office.work()


def test_search_finds_the_fastest_as_good_and_stops_the_rest(searched: tuple[Office, list[TrialRequest]]) -> None:
    office, _ = searched
    today, best = office.journal.run.reference, leader(office.journal.run)
    assert today is not None
    assert best is not None
    assert best.config["batch_size"] == 128, "larger ones learn worse"
    assert (best.values["error"] or 1.0) <= (today.values["error"] or 0.0)
    assert {t.outcome for t in office.journal.run.ended} == {"ok", "stopped"}
    assert office.scheduler.stop_reason.startswith("nothing faster than the pick of now")


def test_reference_is_first_as_it_stands_and_comes_to_its_end(searched: tuple[Office, list[TrialRequest]]) -> None:
    office, begun = searched
    first, *others = [r for r in office.journal.records if r.event == "trial_start"]
    assert begun[0].knobs == first["config"] == defaults(SPACE)
    assert (first["trial"], first["named"], first["beside"]) == ("t000", "plain defaults", True)
    assert not any(r.get("named") or r.get("beside") for r in others)
    assert office.journal.run.ended[0].outcome == "ok"


def test_only_what_would_be_faster_is_proposed_and_once(searched: tuple[Office, list[TrialRequest]]) -> None:
    office, begun = searched
    starts = [r for r in office.journal.records if r.event == "trial_start"][1:]
    assert all(r["expected_per_s"] >= FASTER * r["pick_per_s"] for r in starts)
    speeds = {t.trial: t.samples_per_s for t in office.journal.run.ended}
    assert all(r["expected_per_s"] == pytest.approx(speeds[r["trial"]]) for r in starts)
    assert len({tuple(sorted(a.knobs.items())) for a in begun}) == len(begun)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_training_alone_tells_the_speed_of_its_group_better_than_a_probe(tmp_path: Path, concurrency: int) -> None:
    office, times = Office(tmp_path, count=6, concurrency=concurrency), 0.5 if concurrency == 1 else 1.0
    train = office.profiler.train

    def slower(*order: Any) -> TrialState:
        found = train(*order)
        return replace(found, measured_samples_per_s=0.5 * (found.measured_samples_per_s or 0.0))

    office.profiler.train = slower  # type: ignore[method-assign]
    by_probes = office.scheduler._known().reference_per_s
    office.finish(office.next())
    assert office.scheduler._known().reference_per_s == pytest.approx(times * by_probes)
    office.work()
    known = office.scheduler._known()
    office.journal.close()
    again = Office(tmp_path, count=6, concurrency=concurrency)
    assert again.scheduler._known() == known, "a search that goes on knows the same"


def test_search_goes_on_below_what_fresh_seeds_refuted(tmp_path: Path) -> None:
    office = Office(tmp_path, count=30)
    office.work()
    assert office.scheduler.has_nothing_better
    ended = [t for t in office.journal.run.ended if t.outcome == "ok"]
    picked_per_s = office.scheduler._proposals.pick_per_s(office.scheduler._known())
    for seed in (1, 2, 3):
        for trial in ended:
            error = float(trial.values["error"] or 0.0) + (0.0 if trial.trial == "t000" else 1.0)
            name = "plain defaults" if trial.trial == "t000" else trial.trial
            office.journal.append(ConfirmedRecord, name=name, seed=seed, outcome="ok", values={"error": error})
    learned, terms = guard(office.journal.run, None), office.scheduler._terms
    after = TrialScheduler(office.journal, SPACE, learned, terms, ORDERS, lambda r: None)
    known = after._known()
    assert len(known.reference_gains) == 4, "one of the search, three fresh"
    assert after._proposals.pick_per_s(known) < picked_per_s, "what was refuted is no pick any more"


def test_system_knobs_and_speed_come_from_the_probes(searched: tuple[Office, list[TrialRequest]]) -> None:
    office, _ = searched
    for trial in office.journal.run.ended:
        batch = int(trial.config["batch_size"])
        assert trial.trial == "t000" or (trial.config["micro_batch_size"], trial.config["num_workers"]) == (batch, 2)
        steps = batch / int(trial.config["micro_batch_size"])
        seconds = steps * office.profiler.micro_step_s(trial.config) + 0.001
        assert trial.samples_per_s == pytest.approx(batch / seconds)


def test_joint_proposes_every_knob_and_judges_memory_as_proposed(tmp_path: Path) -> None:
    office = Office(tmp_path, strategy="joint", count=40, cap_bytes=400_000_000)
    begun = office.work()
    assert {a.knobs["num_workers"] for a in begun} == {0, 2}
    assert not any(a.knobs["micro_batch_size"] >= 64 for a in begun)
    started = [r for r in office.journal.records if r.event == "trial_start"]
    refused = office.journal.run.refused
    assert refused
    assert len(begun) == 1 + 40
    assert {r["decision"] for r in started} == {"launch"}
    assert max(r["p_oom"] for r in started) <= 0.5 < min(r.p_oom for r in refused)
    assert all(r.reason for r in refused)


def test_a_lost_process_and_an_oom_are_endings_that_are_told(tmp_path: Path) -> None:
    office = Office(tmp_path)
    first, second = office.next(), office.next()
    office.scheduler.ended(first.trial, TrialState(outcome="killed", message="the process was lost"))
    office.scheduler.ended(second.trial, TrialState(outcome="oom", message="no room", knobs=second.knobs))
    assert [t.outcome for t in office.journal.run.ended] == ["killed", "oom"]


@pytest.mark.parametrize(
    ("message", "outcomes", "begun"),
    [
        ("ValueError: a label is out of range", ["crash"] * 9, 3),
        ("ValueError: a label is out of range", ["crash", "data", "crash", "crash"], 3),
        ("LoopError: train(run) returned without a report", ["crash"] * 9, 1),
        ("ValueError: a label is out of range", ["crash", "crash", "oom", "crash", "crash", "crash"], 6),
        ("LoopError: run['width']: there is no such knob", ["ok", "crash", "crash", "crash"], 4),
    ],
)
def test_search_ends_if_its_first_trials_crash_until_mended(
    tmp_path: Path, message: str, outcomes: list[str], begun: int
) -> None:
    office = Office(tmp_path, count=20, sampler="random")
    for outcome in outcomes:
        if (request := office.scheduler.next_trial()) is None:
            break
        state = TrialState(outcome=outcome, values={"error": 0.5}, message=message)
        office.scheduler.ended(request.trial, state)
    assert len(office.journal.run.ended) == begun
    assert ("crashed" in office.scheduler.stop_reason) == (begun < len(outcomes))
    is_ended = office.scheduler.only_crashes
    assert is_ended == (begun < len(outcomes))
    office.journal.close()
    again = Office(tmp_path, count=begun, sampler="random")  # with the file mended
    if is_ended:
        assert [again.next().trial for _ in range(begun)] == [f"t{number:03d}" for number in range(begun)]


LOSS, METRIC = ("fp32", oom.DIVERGED.name), ("fp32", oom.UNDEFINED.name)


@pytest.mark.parametrize(
    ("ends", "begun"),
    [
        ([METRIC] * 9, 3),
        ([LOSS] * 9, 9),
        ([LOSS, METRIC, LOSS, METRIC, METRIC, METRIC], 5),
        ([("fp16", oom.UNDEFINED.name)] * 9, 9),
    ],
)
def test_search_ends_if_the_metric_of_its_first_trials_is_nan(
    tmp_path: Path, ends: list[tuple[str, str]], begun: int
) -> None:
    office = Office(tmp_path, count=20)
    for amp_dtype, fault in ends:
        if (request := office.scheduler.next_trial()) is None:
            break
        knobs = {**request.knobs, "amp_dtype": amp_dtype}
        found = TrialState(outcome="diverged", message="error is nan", fault=fault, knobs=knobs)
        office.scheduler.ended(request.trial, found)
    assert len(office.journal.run.ended) == begun
    assert office.scheduler.only_crashes == (begun < len(ends))
    office.journal.close()
    again = Office(tmp_path, count=20)  # with the file mended
    metric = [f"t{number:03d}" for number, end in enumerate(ends[:begun]) if end == METRIC]
    assert [again.next().trial for _ in range(len(metric) + 1)] == [*metric, f"t{begun:03d}"]


def crash(office: Office, *requests: TrialRequest) -> None:
    for one in requests:
        office.scheduler.ended(one.trial, TrialState(outcome="crash", message="ValueError: it broke"))


@pytest.mark.parametrize("passes", ["a rung", "its end", "nothing"])
def test_search_of_several_waits_for_a_trial_before_the_crashes(tmp_path: Path, passes: str) -> None:
    office = Office(tmp_path, count=20)
    first, *others = [office.next() for _ in range(4)]
    if passes == "a rung":
        assert office.scheduler.at_rung(first.trial, office.result(first, 200))
    crash(office, *others)
    later = office.next()
    assert not office.scheduler.only_crashes
    if passes == "nothing":
        crash(office, first)
        assert office.scheduler.next_trial() is None
        assert office.scheduler.only_crashes
        return
    office.finish(first)
    crash(office, later)
    assert office.scheduler.next_trial() is not None


def test_search_goes_on_if_one_beside_crashes_comes_further(tmp_path: Path) -> None:
    office = Office(tmp_path, count=20)
    *first, last = [office.next() for _ in range(4)]
    crash(office, *first)
    assert office.scheduler.next_trial() is None
    assert office.scheduler.at_rung(last.trial, office.result(last, 200))
    assert office.scheduler.next_trial() is not None


@pytest.mark.parametrize("ended", [True, False])
def test_what_ended_before_a_break_counts_beside_crashes(tmp_path: Path, ended: bool) -> None:
    office = Office(tmp_path, count=20)
    office.finish(office.next()) if ended else crash(office, office.next())
    office.journal.close()
    again = Office(tmp_path, count=20)
    for _ in range(3):
        crash(again, again.next())
    assert again.scheduler.only_crashes != ended


def test_oom_before_a_smaller_micro_batch_is_a_record(tmp_path: Path) -> None:
    office = Office(tmp_path, count=20)
    first = office.next()
    micro = Knobs.of(first.knobs, EVERY).micro_batch_size
    shrunk = {**first.knobs, "micro_batch_size": micro // 2}
    failed = TrialState(outcome="oom", message="full", knobs=first.knobs)
    office.scheduler.ended(first.trial, office.result(first, ORDERS.samples, knobs=shrunk, retries=(failed,)))
    assert [r["config"]["micro_batch_size"] for r in office.journal.records if r.event == "oom"] == [micro]


def test_slot_that_was_too_small_teaches_the_guard(tmp_path: Path) -> None:
    cap_bytes = 400_000_000
    office = Office(tmp_path, cap_bytes=cap_bytes)
    first = office.next()
    assert first.need_bytes is not None
    slot_bytes = first.need_bytes + 1_000_000  # it was expected to fit
    full = TrialState(outcome="oom", message="full", cap_bytes=slot_bytes)
    office.scheduler.widened(first.trial, replace(full, wanted_bytes=slot_bytes - 1))  # others had filled the card
    assert office.scheduler._guard.predicted_bytes(*need_of(first.knobs, EVERY)) == first.need_bytes
    office.scheduler.widened(first.trial, replace(full, wanted_bytes=slot_bytes + 1))
    slot = f"more than its slot of {slot_bytes / 2**20:.0f} MiB, and begins alone"
    assert [slot in str(r["reason"]) for r in office.journal.records if r.event == "widened"] == [True] * 2
    asked = need_of(first.knobs, EVERY)
    again = guard(office.journal.run, cap_bytes)
    for learned in (office.scheduler._guard, again):
        assert slot_bytes <= (learned.predicted_bytes(*asked) or 0) < cap_bytes, "the next of its like has no slot"
        assert learned.judge(*asked).fits, "and is launched"
    assert again.p_oom(*asked) == office.scheduler._guard.p_oom(*asked)
    office.scheduler.ended(first.trial, office.result(first, ORDERS.samples))
    assert [t.outcome for t in office.journal.run.ended] == ["ok"]


@pytest.mark.parametrize("after", [0, 5])
def test_crash_loses_no_trial_and_repeats_those_in_flight(tmp_path: Path, after: int) -> None:
    office = Office(tmp_path, sampler="random")
    done = [a.trial for a in office.work(after)]
    flying = [office.next(), office.next()]
    office.scheduler.at_rung(flying[0].trial, office.result(flying[0], 200))
    office.journal.close()
    resumed = Office(tmp_path, sampler="random")
    begun = resumed.work()
    assert [a.trial for a in begun[:2]] == [a.trial for a in flying]
    assert not {a.trial for a in begun} & set(done)
    every = [tuple(sorted(a.knobs.items())) for a in begun]
    assert len(every) == len(set(every)) == 13 - after, "and nothing is proposed again"
    assert len(resumed.journal.run.ended) == 13


TODAY: dict[str, Any] = {"learning_rate": 0.05, "batch_size": 24, "micro_batch_size": 24, "num_workers": 8}
"""Of which the space has no size."""
SEARCHES: Mapping[str, dict[str, Any]] = {
    "known": {"count": 12},
    "known beside before": {"count": 12, "reference": TODAY, "reference_name": "before"},
    "tpe": {"count": 16, "sampler": "tpe"},
    "random": {"count": 10, "sampler": "random"},
    "joint": {"count": 8, "strategy": "joint"},
    "joint by tpe": {"count": 8, "strategy": "joint", "sampler": "tpe"},
}


@pytest.mark.parametrize("case", SEARCHES)
def test_search_broken_off_proposes_what_the_unbroken_one_does(tmp_path: Path, case: str) -> None:
    terms = SEARCHES[case]
    whole = Office(_made(tmp_path / "whole"), **terms)
    expected = [dict(a.knobs) for a in whole.work()]
    records = list(whole.journal.records)
    at = [n for n, r in enumerate(records) if r.event in ("trial_start", "trial", "rung")]
    for kept in at[:: max(1, len(at) // 5)]:
        journal = Journal.open(_made(tmp_path / str(kept)) / "trials.jsonl", create=True)
        for record in records[: kept + 1]:
            journal.append(EVENTS[record.event], **record.fields)
        left = {trial.id for trial in journal.run.unfinished}
        ended = [r["trial"] for r in journal.records if r.event == "trial_start" and r["trial"] not in left]
        journal.close()
        rest = Office(tmp_path / str(kept), **terms)
        assert expected[: len(ended)] + [dict(a.knobs) for a in rest.work()] == expected
        assert rest.scheduler.stop_reason == whole.scheduler.stop_reason
        rest.journal.close()
    assert len({tuple(sorted(knobs.items())) for knobs in expected}) == len(expected)


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_other_samplers_propose_all_they_may_the_reference_first(tmp_path: Path, sampler: str) -> None:
    office = Office(tmp_path, count=9, sampler=sampler)
    first, second, *others = office.work()
    assert office.scheduler.stop_reason == "all 9 trials were proposed"
    assert len(others) == 8
    learned = ("batch_size", "learning_rate")
    assert [first.knobs[n] for n in learned] == [second.knobs[n] for n in learned]
    assert second.knobs["num_workers"] == 2, "with the fastest system knobs"


def test_what_is_trained_today_is_the_reference(tmp_path: Path) -> None:
    named = {"before": TODAY, "after": {"batch_size": 64, "micro_batch_size": 64, "num_workers": 8}}
    office = Office(tmp_path, named=named, reference=TODAY, reference_name="before", opening=STUDY)
    first, *others = office.work()
    start = next(r for r in office.journal.records if r.event == "trial_start")
    assert (first.knobs, start["named"], start["beside"]) == (TODAY, "before", True)
    assert all(a.knobs["num_workers"] in (0, 2) and a.knobs["batch_size"] != 24 for a in others), "of the space alone"
    best = leader(office.journal.run)
    assert best is not None
    assert best.trial != "t000", "it is none of the search's trials"


@pytest.mark.parametrize(("goal", "error"), [("speed", 0.08), ("quality", 0.02)])
def test_search_follows_the_goal_of_the_study(tmp_path: Path, goal: str, error: float) -> None:
    office = Office(tmp_path, count=20, opening={**STUDY, "config": {"pick": {"goal": goal}}})
    office.work()
    assert office.scheduler.stop_reason.startswith("nothing faster" if goal == "speed" else "all 20")
    best, today = leader(office.journal.run), office.journal.run.reference
    assert best is not None
    assert today is not None
    assert (best.values["error"] or 0.0) < error
    assert (best.samples_per_s or 0.0) >= (today.samples_per_s or 0.0)


def test_nothing_is_searched_beside_the_fastest_reference(tmp_path: Path) -> None:
    fast = {"learning_rate": 0.05, "batch_size": 256, "micro_batch_size": 256, "num_workers": 2}
    office = Office(tmp_path, reference=fast)
    assert [a.knobs for a in office.work()] == [fast]
    assert office.scheduler.stop_reason.startswith("nothing faster")


@pytest.mark.parametrize("why", ["does not fit", "crashes"])
def test_first_trial_that_ends_stands_in_for_a_lost_reference(tmp_path: Path, why: str) -> None:
    huge = {"learning_rate": 0.05, "batch_size": 512, "micro_batch_size": 512, "num_workers": 0}
    terms: dict[str, Any] = {"strategy": "joint", "count": 6, "cap_bytes": 3 * 10**9} if why == "does not fit" else {}
    office = Office(tmp_path, reference=huge if terms else None, **terms)
    if terms:
        begun = office.work()
        assert all(a.knobs["batch_size"] != 512 for a in begun)
        (note,) = [note.text for note in office.journal.run.notes]
        assert note.startswith("plain defaults is not trained: ")
        assert len(begun) == 6
    else:
        crash(office, office.next())
        office.work(6)
    assert office.journal.run.reference is None
    first = next(t for t in office.journal.run.ended if t.outcome == "ok")
    assert office.scheduler._today() == first.values["error"]


def test_two_at_once_are_different_and_faster_than_the_pick(tmp_path: Path) -> None:
    office, ended = Office(tmp_path, count=12, concurrency=2), 0
    running = [office.next(), office.next()]
    while running:
        office.finish(running.pop(0))
        ended += 1
        while len(running) < 2 and (request := office.scheduler.next_trial()) is not None:
            assert all(request.knobs != other.knobs for other in running)
            running.append(request)
    starts = [r for r in office.journal.records if r.event == "trial_start"][1:]
    assert ended == len(starts) + 1 >= 5
    assert all(r["expected_per_s"] >= FASTER * r["pick_per_s"] for r in starts)
    assert [bool(r.get("beside")) for r in starts] == [False] * len(starts)


@pytest.mark.parametrize("terms", [{"count": 1}, {"count": 1000, "deadline": 1.0}])
def test_reference_is_none_of_the_trials_and_leaves_room_for_one(tmp_path: Path, terms: dict[str, Any]) -> None:
    seconds = itertools.count()
    office = Office(tmp_path, reference=TODAY, clock=lambda: float(next(seconds)), **terms)
    assert [a.trial for a in office.work()] == ["t000", "t001"]
    assert office.scheduler.stop_reason.startswith(
        ("the one trial was", "its share of search.max_time was spent after 1 ")
    )


def test_reference_that_the_time_cut_is_trained_again(tmp_path: Path) -> None:
    office = Office(tmp_path, count=4, reference=TODAY)
    first = office.next()
    office.scheduler.ended(first.trial, office.result(first, 100, outcome="cut", values={}))
    office.journal.append(ResumeRecord, search={"max_time": 480.0})
    office.journal.close()
    again = Office(tmp_path, count=4, reference=TODAY)
    assert [a.trial for a in again.work()] == [f"t{n:03d}" for n in range(5)]
    starts = [r for r in again.journal.records if r.event == "trial_start"]
    assert [bool(r.get("beside")) for r in starts] == [True, True, False, False, False, False]
    assert again.journal.run.ended[0].outcome == "ok"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


class Half(Office):
    """Where fp16 ends in NaN."""

    def finish(self, request: TrialRequest) -> None:
        if request.knobs["amp_dtype"] != "fp16":
            return super().finish(request)
        message = "the mean training loss is nan"
        state = self.result(request, 100, outcome="diverged", message=message, values={})
        self.scheduler.ended(request.trial, state)
        return None


def test_that_fp16_ends_in_nan_is_said_once(tmp_path: Path) -> None:
    space = Space.parse({**SPACE.as_raw(), "amp_dtype": ["fp16", "fp32", "bf16"]}, EVERY)
    office = Half(tmp_path, count=12, space=space, sampler="random")
    assert len([request for request in office.work() if request.knobs["amp_dtype"] == "fp16"]) > 1
    assert [note.text for note in office.journal.run.notes] == [NAN_IN_FP16]


def test_micro_batch_that_does_not_fit_is_halved(tmp_path: Path) -> None:
    space = Space.parse({**SPACE.as_raw(), "micro_batch_size": 256}, EVERY)
    office = Office(tmp_path, count=6, space=space, sampler="random")  # probed without a cap, as on another card
    office.scheduler._guard = MemoryGuard(300_000_000, office.scheduler._guard._profiles, EVERY)
    begun = office.work()
    halved = [r for r in office.journal.records if r.event == "trial_start" and r["decision"] == "halve"]
    assert halved
    assert all(r["decision_reason"].startswith("micro-batch 16 in the place of ") for r in halved)
    assert len({a.knobs["batch_size"] for a in begun}) > 1
    assert {a.knobs["micro_batch_size"] for a in begun} == {16}


def test_interrupted_trial_that_is_ruled_out_is_replaced(tmp_path: Path) -> None:
    office = Office(tmp_path, strategy="joint", count=5)
    first = office.next()
    micro = min(Knobs.of(first.knobs, EVERY).micro_batch_size, Knobs.of(first.knobs, EVERY).batch_size)
    knobs = {**first.knobs, "micro_batch_size": micro}
    office.journal.append(OomRecord, trial="t999", config=knobs, outcome="oom", message="full")
    office.journal.close()

    resumed = Office(tmp_path, strategy="joint", count=5)
    begun = [a.trial for a in resumed.work()]
    assert first.trial not in begun
    gone = [r for r in resumed.journal.run.refused if r.trial]
    assert [(r.trial, r.p_oom) for r in gone] == [(first.trial, 1.0)]
    assert resumed.journal.run.unfinished == []
    resumed.journal.close()
    assert Office(tmp_path, strategy="joint", count=5).work() == []


def test_search_that_goes_on_gives_no_number_twice_and_counts_on(tmp_path: Path) -> None:
    office = Office(tmp_path, count=6, sampler="random")
    office.work(2)
    own = [(r.event, r.fields) for r in office.journal.records if r.get("trial") == "t001"]
    for event, fields in own:  # the lines of t002 were damaged, and are gone
        office.journal.append(EVENTS[event], **{**fields, "trial": "t003"})
    before = {t.trial: t for t in office.journal.run.ended}
    office.journal.close()
    resumed = Office(tmp_path, count=6, sampler="random")
    begun = [request.trial for request in resumed.work()]
    assert begun == ["t004", "t005", "t006", "t007"]
    assert {t.trial: t for t in resumed.journal.run.ended if t.trial in before} == before
    assert resumed.scheduler.stop_reason == "all 6 trials were proposed"


@dataclass(frozen=True)
class Elsewhere(Event, event="elsewhere"):
    """What earlier versions wrote of another kind of device."""


@dataclass(frozen=True)
class Moved(Event, event="moved"):
    """Likewise, of a trial that waited for one."""


def test_search_goes_on_from_a_journal_with_trials_on_another_kind_of_device(tmp_path: Path) -> None:
    office = Office(tmp_path, count=6, opening=STUDY)
    office.work(2)
    start, end = (
        next(r.fields for r in office.journal.records if r.event == event and r["trial"] == "t001")
        for event in ("trial_start", "trial")
    )
    there = {"kind": "old", "ran": {"config": {**end["config"], "num_workers": 0}, "measured_samples_per_s": 1e9}}
    of_device = ("measured_samples_per_s", "peak_allocated_bytes")
    append = office.journal.append
    append(Elsewhere, of="probe", kind="old", name="", outcome="ok", config=end["config"], samples_per_s=1e9)
    for trial in ("t002", "t003"):
        append(StartRecord, **{**start, **there, "trial": trial})
    append(TrialRecord, **{n: v for n, v in {**end, **there, "trial": "t002"}.items() if n not in of_device})
    append(Moved, trial="t003", reason="it does not fit old, and waits for another kind of device")
    office.journal.close()
    resumed = Office(tmp_path, count=6)
    assert resumed.work()[0].trial == "t003", "it had not ended"
    found = {view.trial: view for view in summary.of_run(resumed.journal.run).trials}
    assert found["t002"].values == found["t001"].values
    assert found["t002"].config == found["t001"].config, "as the target would train it"
    assert found["t003"].outcome in ("ok", "stopped")
    assert max(view.samples_per_s or 0.0 for view in found.values()) < 1e9, "nothing is taken from the other kind"


def test_what_was_asked_for_is_not_proposed_again(
    tmp_path: Path,
) -> None:
    space = Space.parse({"batch_size": 16, "micro_batch_size": 16, "num_workers": [0, 2], "learning_rate": 0.1}, EVERY)
    office = Office(tmp_path, strategy="joint", space=space)
    while (asked := office.next()).knobs["num_workers"] != 2:
        office.finish(asked)
    ran = {**asked.knobs, "num_workers": 0}
    office.scheduler.ended(asked.trial, office.result(asked, ORDERS.samples, knobs=ran))
    office.journal.close()
    begun = Office(tmp_path, strategy="joint", space=space).work()
    assert 2 not in [request.knobs["num_workers"] for request in begun]


def test_resumed_search_knows_of_memory_what_the_unbroken_did(tmp_path: Path) -> None:
    office = Office(tmp_path, strategy="joint", count=12, cap_bytes=400_000_000)
    office.work(6)
    key = key_of({}, EVERY)
    said = [office.scheduler._guard.p_oom(key, m) for m in (16, 28, 30, 32, 64)]
    office.journal.close()
    resumed = Office(tmp_path, strategy="joint", count=12, cap_bytes=400_000_000)
    assert [resumed.scheduler._guard.p_oom(key, m) for m in (16, 28, 30, 32, 64)] == pytest.approx(said)


def test_what_the_executor_decided_is_in_the_records(tmp_path: Path) -> None:
    office = Office(tmp_path)
    first = office.next()
    assert first.need_bytes is not None, "what the executor places it by"
    office.scheduler.decided("retired", first.trial, "80.0 MiB were still held after the trial")
    again = TrialState(outcome="shm", fault="shared memory", message="Bus error", knobs=first.knobs)
    office.scheduler.ended(first.trial, office.result(first, ORDERS.samples, retries=(again,), held_bytes=7))
    retired, restart, trial = office.journal.records[-3:]
    assert (retired.event, retired["trial"], retired["reason"][:4]) == ("retired", first.trial, "80.0")
    assert (restart.event, restart["outcome"], restart["fault"]) == ("restart", "shm", "shared memory")
    assert (trial.event, trial["held_bytes"]) == ("trial", 7)


@pytest.mark.parametrize("strategy", ["staged", "joint"])
def test_running_trial_that_new_knowledge_rules_out_is_stopped(tmp_path: Path, strategy: str) -> None:
    office = Office(tmp_path, strategy=strategy, count=8, sampler="random")
    office.scheduler._guard = MemoryGuard(None, office.scheduler._guard._profiles, EVERY)
    office.finish(office.next())
    first, second = sorted((office.next() for _ in range(2)), key=lambda a: -micro_batch_of(a.knobs))
    assert office.scheduler.goes_on(first.trial, TrialState(outcome="ok", samples=100))
    office.scheduler.ended(second.trial, TrialState(outcome="oom", message="no room", knobs=second.knobs))
    whole = TrialState(outcome="ok", samples=800)
    assert office.scheduler.goes_on(first.trial, whole), "it has met every sample"
    paused = office.result(first, 100, values={})
    assert not office.scheduler.goes_on(first.trial, paused)
    office.scheduler.ended(first.trial, paused)
    record = next(r for r in office.journal.records if r.event == "trial" and r["trial"] == first.trial)
    assert record["outcome"] == "refused"
    assert record["reason"].startswith("ruled out by what was learned since it began: micro-batch")
    begun = office.work()
    again = [a for a in begun if a.knobs["learning_rate"] == first.knobs["learning_rate"]]
    assert [a.knobs["batch_size"] for a in again] == [first.knobs["batch_size"]] * (strategy == "staged")
    assert all(micro_batch_of(a.knobs) < micro_batch_of(first.knobs) for a in again)


def test_what_was_ruled_out_is_not_learned_as_fitting(tmp_path: Path) -> None:
    office = Office(tmp_path, strategy="joint", count=8)
    first, second = office.next(), office.next()
    office.scheduler.ended(second.trial, TrialState(outcome="oom", message="no room", knobs=first.knobs))
    assert not office.scheduler.goes_on(first.trial)
    office.scheduler.ended(first.trial, TrialState(outcome="refused"))
    again = guard(office.journal.run, None)
    assert not again.judge(key_of(first.knobs, EVERY), micro_batch_of(first.knobs)).fits
    office.journal.close()
    begun = Office(tmp_path, strategy="joint", count=8).work()
    assert first.knobs["learning_rate"] not in [a.knobs["learning_rate"] for a in begun]


@pytest.mark.parametrize(("sampler", "most"), [("known", 0), ("tpe", 29)])
def test_what_does_not_fit_is_seldom_proposed(tmp_path: Path, sampler: str, most: int) -> None:
    office = Office(tmp_path, count=30, cap_bytes=300_000_000, sampler=sampler)
    office.work()
    refused = [r for r in office.journal.run.refused if r.stage == "search"]
    assert len(refused) <= most
    assert {t.outcome for t in office.journal.run.ended} <= {"ok", "stopped"}


@pytest.mark.parametrize(("fits", "micro_batch"), [(64, 64), (16, 64), (8, 4), (0, None)])
def test_a_trial_gets_the_knobs_that_are_fastest_at_what_fits(fits: int, micro_batch: int | None) -> None:
    """What was tuned at 64 samples is 4 times as fast as the plain start at 4, and at 16 of them still as fast."""
    tuned = Probed({"batch_size": 64, "micro_batch_size": 64, "num_workers": 4}, 0.064, 0.0, 1000.0)
    plain = Probed({"batch_size": 64, "micro_batch_size": 4, "num_workers": 0}, 0.016, 0.0, 249.0)
    learned = MemoryGuard(10**9, {}, EVERY)
    learned.observe_oom(key_of({}, EVERY), fits + 1)
    found = fastest(Speeds([tuned, plain], EVERY), learned, {"batch_size": 128})
    assert (None if found is None else found.system["micro_batch_size"]) == micro_batch


def test_deadline_cuts_a_trial_once_another_has_ended(tmp_path: Path) -> None:
    now = [0.0]
    office = Office(tmp_path, deadline=10.0, clock=lambda: now[0])
    first, second, third = (office.next() for _ in range(3))
    now[0] = 11.0
    assert office.scheduler.goes_on(first.trial, TrialState(outcome="ok", samples=100)), "nothing could be picked yet"
    office.scheduler.ended(first.trial, office.result(first, ORDERS.samples))
    paused = office.result(second, 100, values={})
    assert not office.scheduler.goes_on(second.trial, paused)
    office.scheduler.ended(second.trial, paused)
    better = office.result(third, 200, values={"error": 0.0})
    assert not office.scheduler.at_rung(third.trial, better)
    office.scheduler.ended(third.trial, better)
    assert office.scheduler.next_trial() is None
    assert [t.outcome for t in office.journal.run.ended] == ["ok", "stopped", "stopped"]
    reasons = [r["reason"] for r in office.journal.records if r.event == "trial"]
    assert reasons[1:] == ["the search's share of search.max_time is spent"] * 2
    assert office.scheduler.stop_reason.startswith("its share of search.max_time was spent after 2 of 12 trials")


@pytest.mark.parametrize(("encoder", "is_judged"), [(0.5, False), (0.25, True)])
def test_rung_judges_nobody_whose_last_phase_has_not_begun(tmp_path: Path, encoder: float, is_judged: bool) -> None:
    office = Office(tmp_path, sampler="random", count=20)
    office.work(5)
    phases = {"phases": {"encoder": encoder, "classifier": 1 - encoder}}
    late = office.next()
    state = office.result(late, 400, values={"error": 9.0}, active=phases)
    assert office.scheduler.at_rung(late.trial, state) != is_judged
    office.scheduler.ended(late.trial, office.result(late, ORDERS.samples))
    office.journal.close()
    again = Office(tmp_path, sampler="random", count=20)
    known = again.scheduler._qualities.guess(late.trial), again.scheduler._qualities._at_rungs.get(late.trial)
    assert (known == (None, None)) != is_judged, "nor is it remembered"


@pytest.mark.parametrize("pruner", ["reference", "none"])
def test_who_is_behind_the_reference_is_stopped(tmp_path: Path, pruner: str) -> None:
    poor = {"learning_rate": 0.3, "batch_size": 64, "micro_batch_size": 64}
    office = Office(tmp_path, sampler="random", count=16, pruner=pruner, reference=poor)
    office.work()
    ended = {t.trial: t for t in office.journal.run.ended}
    today = ended["t000"].values["error"] or 0.0
    if pruner == "none":
        assert {t.outcome for t in ended.values()} == {"ok"}
    else:
        rungs = [r for r in office.journal.records if r.event == "rung" and r["samples"] == 200]
        rungs = [r for r in rungs if "beside the reference" in r["reason"]]
        assert {r["goes_on"] for r in rungs} == {True, False}
        assert all(r["goes_on"] == (r["values"]["error"] - 0.75 <= today + 1e-9) for r in rungs)


def cut_off(folder: Path, **terms: Any) -> TrialRequest:
    """Returns the third trial of a search, which the time cut after its first rung; the study then got more time."""
    office = Office(folder, count=8, **terms)
    office.work(2)
    third = office.next()
    office.scheduler.at_rung(third.trial, office.result(third, 200))
    cut = office.result(third, 300, outcome="cut", values={}, message="search.max_time was over")
    office.scheduler.ended(third.trial, cut)
    office.journal.append(ResumeRecord, search={"max_time": 480.0})
    office.journal.close()
    return third


@pytest.mark.parametrize(("strategy", "kept"), [("staged", 1), ("joint", 3)])
def test_trial_that_the_time_cut_is_trained_again(tmp_path: Path, strategy: str, kept: int) -> None:
    terms: dict[str, Any] = {"strategy": strategy, "sampler": "known" if strategy == "staged" else "tpe"}
    third = cut_off(_made(tmp_path / "a"), **terms)
    whole = Office(tmp_path / "a", count=8, **terms)
    begun = whole.work()
    assert [a.trial for a in begun] == [third.trial, *(f"t{n:03d}" for n in range(3, 2 + len(begun)))]
    assert begun[0].knobs == third.knobs
    assert "cut" not in {t.outcome for t in whole.journal.run.ended}
    cut_off(_made(tmp_path / "b"), **terms)
    broken = Office(tmp_path / "b", count=8, **terms)
    first = broken.work(kept)
    broken.journal.close()
    rest = Office(tmp_path / "b", count=8, **terms).work()
    assert [a.knobs for a in first + rest] == [a.knobs for a in begun]


def test_a_search_of_which_nothing_fits_ends_at_its_deadline(tmp_path: Path) -> None:
    seconds = itertools.count()
    terms: dict[str, Any] = {"count": 50, "deadline": 5.0, "clock": lambda: float(next(seconds))}
    office = Office(tmp_path, strategy="joint", cap_bytes=50_000_000, sampler="random", **terms)
    assert office.work() == []
    refused = sum(r.stage == "search" for r in office.journal.run.refused)
    assert 0 < refused <= 10
    assert office.scheduler.stop_reason.startswith("its share of search.max_time was spent after 0 of 50 trials")


@pytest.mark.parametrize(("concurrency", "rate"), [(1, 7.0), (2, 14.0)])
def test_trial_that_nobody_probed_is_judged_by_its_own_speed(tmp_path: Path, concurrency: int, rate: float) -> None:
    """Where there are any: one trial after another has none, and a probe that was off would spoil all others."""
    office = Office(tmp_path, concurrency=concurrency)
    first, second = office.next(), office.next()
    found = office.result(first, 800)
    probed_per_s = found.measured_samples_per_s or 0.0
    office.scheduler.ended(first.trial, replace(found, measured_samples_per_s=probed_per_s / 2))
    unprobed = {**second.knobs, "micro_batch_size": 3}
    office.scheduler.ended(second.trial, office.result(second, 800, knobs=unprobed, measured_samples_per_s=7.0))
    rates = [t.samples_per_s for t in office.journal.run.ended]
    assert rates == [pytest.approx(probed_per_s), pytest.approx(rate)]


def test_micro_batch_that_changes_learning_is_searched(tmp_path: Path) -> None:
    space = replace(SPACE, table=KnobTable(EVERY.own, {"micro_batch_size": "both"}))
    office = Office(tmp_path, count=12, cap_bytes=400_000_000, space=space)
    probes = {r.config["micro_batch_size"] for r in office.journal.run.probes}
    first = office.next()
    half = {**first.knobs, "micro_batch_size": int(first.knobs["micro_batch_size"]) // 2}
    failed = TrialState(outcome="oom", message="full", knobs=first.knobs)
    office.scheduler.ended(first.trial, office.result(first, ORDERS.samples, knobs=half, retries=(failed,)))
    begun = office.work()
    records = office.journal.records
    said = [r["text"] for r in records if r.event == "note"]
    assert [text.endswith("which changes what is learned here") for text in said] == [True]
    assert first.trial in said[0]
    assert {r["decision"] for r in records if r.event == "trial_start"} == {"launch"}
    assert {4, 16} <= probes, "each is a speed group"
    searched = [r for r in records if r.event == "trial_start" or (r.event == "refused" and r["stage"] == "search")]
    assert len({r["config"]["micro_batch_size"] for r in searched}) > 1
    asked = {r["trial"]: r["config"] for r in records if r.event == "trial_start"}
    assert all(a.knobs == asked[a.trial] for a in begun)
