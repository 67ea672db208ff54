"""The scheduler: what it proposes, whom it stops, what it writes. How it goes on is in `study/test_resume.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FormulaProfiler, no_time
from trainables.knobs import KnobTable
from trainables.our_knobs import EVERY
from tuning.config.schema import ProbeSection
from tuning.config.space import Space
from tuning.journal.events import ConfirmedRecord, OomRecord, ResumeRecord, StartRecord, StudyRecord
from tuning.journal.format import line_of
from tuning.journal.records import Journal
from tuning.memory import oom
from tuning.memory.groups import defaults, guard, key_of, micro_batch_of, need_of
from tuning.memory.guard import MemoryGuard
from tuning.memory.measure import MemoryStage
from tuning.search.probe import ProbeStage
from tuning.search.proposals import FASTER
from tuning.search.protocols import TrialPlan, TrialRequest, TrialState
from tuning.search.scheduler import NAN_IN_FP16, OUT_OF_TIME, SearchTerms, TrialScheduler
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
AS_PROPOSED = replace(SPACE, table=KnobTable(EVERY.own, {"micro_batch_size": "both"}))
"""The same if the micro-batch changes what is learned: it is searched, and judged as proposed."""
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
        count: int = 12,
        cap_bytes: int | None = None,
        space: Space = SPACE,
        profiler: FormulaProfiler | None = None,
        concurrency: int = 1,
        opening: Mapping[str, Any] | None = None,
        **terms: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.profiler = profiler or Bench(cap_bytes)
        self.journal = Journal.open(folder / "trials.jsonl", create=True)
        if opening is not None and self.journal.run.study is None:
            self.journal.append(StudyRecord, **opening)
        MemoryStage(self.profiler, space, self.journal, cap_bytes, clock=no_time).run()
        learned = guard(self.journal.run, cap_bytes)
        section = ProbeSection(max_time_s=0.5, probe_time_s=0.1)
        ProbeStage(self.profiler, space, self.journal, learned, section, clock=no_time).run({}, lambda r: None)
        whole: dict[str, Any] = {"deadline": None, **terms}
        told = SearchTerms(trials=count, seed=0, objectives={"error": "min"}, **whole)
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

    def end(self, request: TrialRequest, outcome: str, **more: Any) -> None:
        self.scheduler.ended(request.trial, replace(TrialState(outcome=outcome, knobs=request.knobs), **more))

    def starts(self) -> list[StartRecord]:
        """Returns how each attempt of a trial began."""
        return [start for trial in self.journal.run.begun for start in trial.starts]

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


def test_search_finds_the_fastest_as_good(searched: tuple[Office, list[TrialRequest]]) -> None:
    run, begun = searched[0].journal.run, searched[1]
    today, best = run.reference, leader(run)
    assert best.config["batch_size"] == 128, "larger ones learn worse"
    assert list(run.trials).index(best.trial) <= 12
    assert (best.values["error"] or 1.0) <= (today.values["error"] or 0.0)
    assert (today.trial, today.config, begun[0].knobs) == ("t000", defaults(SPACE), defaults(SPACE))
    assert run.trials["t000"].named == "plain defaults"
    assert [trial.id for trial in run.begun if trial.is_beside] == ["t000"]
    assert {end.outcome for end in run.ended} == {"ok", "stopped"}
    assert searched[0].scheduler.has_nothing_better


def test_trials_are_faster_than_the_pick_of_then(searched: tuple[Office, list[TrialRequest]]) -> None:
    office, begun = searched
    ended = {end.trial: end for end in office.journal.run.ended}
    for start in (r for r in office.journal.records if r.event == "trial_start" and r["trial"] != "t000"):
        assert start["expected_per_s"] >= FASTER * start["pick_per_s"]
        own = ended[start["trial"]]
        batch = int(own.config["batch_size"])
        assert (own.config["micro_batch_size"], own.config["num_workers"]) == (batch, 2), "the fastest that was probed"
        assert own.samples_per_s == pytest.approx(batch / (office.profiler.micro_step_s(own.config) + 0.001))
        assert own.samples_per_s == pytest.approx(start["expected_per_s"])
    assert len({tuple(sorted(a.knobs.items())) for a in begun}) == len(begun), "and nothing twice"


class Slow(Bench):
    """A device on which a training is half as fast as its probe."""

    def train(self, *order: Any) -> TrialState:
        """Returns the result with half the speed."""
        found = super().train(*order)
        return replace(found, measured_samples_per_s=0.5 * (found.measured_samples_per_s or 0.0))


@pytest.mark.parametrize(("concurrency", "times"), [(1, 0.5), (2, 1.0)])
def test_a_training_alone_corrects_the_speed_of_probes(tmp_path: Path, concurrency: int, times: float) -> None:
    rates = []
    for profiler in (Bench(), Slow()):
        office = Office(tmp_path / type(profiler).__name__, concurrency=concurrency, profiler=profiler)
        office.finish(office.next())
        office.next()
        rates.append(office.journal.records[-1]["pick_per_s"])
    assert rates[1] == pytest.approx(times * rates[0])


def test_search_goes_on_below_what_fresh_seeds_refuted(
    tmp_path: Path, searched: tuple[Office, list[TrialRequest]]
) -> None:
    (tmp_path / "trials.jsonl").write_bytes(b"".join(map(line_of, searched[0].journal.records)))
    office = Office(tmp_path, count=30)
    ended = [t for t in office.journal.run.ended if t.outcome == "ok"]
    for seed, trial in itertools.product((1, 2, 3), ended):
        name = "plain defaults" if trial.trial == "t000" else trial.trial
        error = float(trial.values["error"] or 0.0) + (trial.trial != "t000")
        office.journal.append(ConfirmedRecord, name=name, seed=seed, outcome="ok", values={"error": error})
    picked_per_s = max(trial.samples_per_s or 0.0 for trial in ended)
    office.journal.close()
    again = Office(tmp_path, count=30)
    again.next()
    (start,) = [r for r in again.journal.records[-1:] if r.event == "trial_start"]
    assert start["pick_per_s"] < picked_per_s, "what was refuted is no pick any more"


ERROR, MISUSE = (
    {"message": "ValueError: a label is out of range"},
    {"message": "LoopError: train(run) reported nothing"},
)
DEPENDENT = {"message": "NotIndependent: it begins with other weights"}
LOSS, METRIC = ({"fault": fault.name, "message": "it is nan"} for fault in (oom.DIVERGED, oom.UNDEFINED))


@pytest.mark.parametrize(
    ("ends", "begun", "again"),
    [
        # how the first trials end, how many begin, and which of them begin again once the file is mended
        ([("crash", ERROR)] * 9, 3, "012"),
        ([("crash", ERROR), ("data", ERROR), *[("crash", ERROR)] * 2], 3, "012"),
        ([("crash", MISUSE)] * 9, 1, "0"),
        ([*[("crash", ERROR)] * 2, ("oom", {}), *[("crash", ERROR)] * 3], 6, ""),
        ([("ok", {"values": {"error": 0.5}}), *[("crash", MISUSE)] * 3], 4, ""),
        ([("ok", {"values": {"error": 0.5}}), *[("crash", DEPENDENT)] * 3], 2, ""),
        ([("diverged", METRIC)] * 9, 3, "012"),
        ([("diverged", LOSS)] * 9, 9, ""),
        ([("diverged", own) for own in (LOSS, METRIC, LOSS, METRIC, METRIC, METRIC)], 5, "134"),
        ([("diverged", {**METRIC, "amp_dtype": "fp16"})] * 9, 9, ""),
    ],
)
def test_search_ends_if_its_first_trials_fail_alike(
    tmp_path: Path, ends: list[tuple[str, dict[str, Any]]], begun: int, again: str
) -> None:
    office = Office(tmp_path, count=20, sampler="random")
    for outcome, more in ends:
        if (request := office.scheduler.next_trial()) is None:
            break
        amp_dtype = {"amp_dtype": more.get("amp_dtype", "fp32")}
        own = {name: value for name, value in more.items() if name not in amp_dtype}
        office.end(request, outcome, **own, knobs={**request.knobs, **amp_dtype})
    assert len(office.journal.run.ended) == begun
    assert office.scheduler.only_crashes == (begun < len(ends)) == ("crashed" in office.scheduler.stop_reason)
    office.journal.close()
    mended = Office(tmp_path, count=20, sampler="random")
    wanted = [f"t{int(number):03d}" for number in again]
    assert [mended.next().trial for _ in range(len(wanted) + 1)] == [*wanted, f"t{begun:03d}"]


def crash(office: Office, *requests: TrialRequest) -> None:
    for one in requests:
        office.end(one, "crash", **ERROR)


@pytest.mark.parametrize("passes", ["a rung", "its end", "nothing"])
def test_search_of_several_waits_for_one_before_the_crashes(tmp_path: Path, passes: str) -> None:
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


def test_slot_that_was_too_small_teaches_the_guard(tmp_path: Path) -> None:
    cap_bytes = 400_000_000
    office = Office(tmp_path, cap_bytes=cap_bytes)
    first = office.next()
    asked = need_of(first.knobs, EVERY)
    assert first.need_bytes is not None
    slot_bytes = first.need_bytes + 1_000_000  # it was expected to fit
    full = TrialState(outcome="oom", message="full", cap_bytes=slot_bytes)
    office.scheduler.widened(first.trial, replace(full, wanted_bytes=slot_bytes - 1))  # others had filled the card
    assert guard(office.journal.run, cap_bytes).predicted_bytes(*asked) == first.need_bytes
    office.scheduler.widened(first.trial, replace(full, wanted_bytes=slot_bytes + 1))
    learned = guard(office.journal.run, cap_bytes)
    assert slot_bytes <= (learned.predicted_bytes(*asked) or 0) < cap_bytes, "the next of its like has no slot"
    assert learned.judge(*asked).fits, "and is launched"
    assert office.scheduler.goes_on(first.trial), "as it is itself"
    widened = [r for r in office.journal.records if r.event == "widened"]
    assert [f"its slot of {slot_bytes / 2**20:.0f} MiB" in str(r["reason"]) for r in widened] == [True] * 2
    office.scheduler.ended(first.trial, office.result(first, ORDERS.samples))
    assert [t.outcome for t in office.journal.run.ended] == ["ok"]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_other_samplers_propose_all_the_reference_first(tmp_path: Path, sampler: str) -> None:
    office = Office(tmp_path, count=9, sampler=sampler)
    first, second, *others = office.work()
    assert office.scheduler.stop_reason == "all 9 trials were proposed"
    assert len(others) == 8
    learned = ("batch_size", "learning_rate")
    assert [first.knobs[n] for n in learned] == [second.knobs[n] for n in learned]
    assert second.knobs["num_workers"] == 2, "with the fastest system knobs"


TODAY: dict[str, Any] = {"learning_rate": 0.05, "batch_size": 24, "micro_batch_size": 24, "num_workers": 8}
"""Of which the space has no size."""


def test_nothing_is_searched_beside_the_fastest_reference(tmp_path: Path) -> None:
    fast = {"learning_rate": 0.05, "batch_size": 256, "micro_batch_size": 256, "num_workers": 2}
    office = Office(tmp_path, reference=fast)
    assert [a.knobs for a in office.work()] == [fast]
    assert office.scheduler.has_nothing_better


def test_reference_that_does_not_fit_is_told_and_left_out(tmp_path: Path) -> None:
    huge = {"learning_rate": 0.05, "batch_size": 512, "micro_batch_size": 512, "num_workers": 0}
    office = Office(tmp_path, reference=huge, space=AS_PROPOSED, count=6, cap_bytes=3 * 10**9)
    begun = office.work()
    assert len(begun) == 6
    assert all(a.knobs["batch_size"] != 512 for a in begun)
    (note,) = [note.text for note in office.journal.run.notes]
    assert note.startswith("plain defaults is not trained: ")
    assert office.journal.run.reference is None


def test_first_trial_stands_in_for_a_reference_that_crashed(tmp_path: Path) -> None:
    office = Office(tmp_path, count=12)
    crash(office, office.next())
    office.work()
    assert office.journal.run.reference is None
    starts = [r for r in office.journal.records if r.event == "trial_start" and "pick_per_s" in r.fields]
    assert starts[-1]["pick_per_s"] > starts[0]["pick_per_s"], "others are as good as that"


@pytest.mark.parametrize("terms", [{"count": 1}, {"count": 1000, "deadline": 1.0}])
def test_reference_leaves_room_for_one_trial(tmp_path: Path, terms: dict[str, Any]) -> None:
    seconds = itertools.count()
    office = Office(tmp_path, reference=TODAY, clock=lambda: float(next(seconds)), **terms)
    assert [a.trial for a in office.work()] == ["t000", "t001"]
    assert office.scheduler.stop_reason.startswith(
        ("the one trial was", "its share of search.max_time was spent after 1 ")
    )


@pytest.mark.parametrize(("cut", "terms"), [(0, {}), (2, {}), (2, {"sampler": "tpe"})])
def test_trial_that_the_time_cut_is_trained_again(tmp_path: Path, cut: int, terms: dict[str, Any]) -> None:
    office = Office(tmp_path, count=8, reference=None if terms else TODAY, **terms)
    office.work(cut)
    last = office.next()
    office.scheduler.at_rung(last.trial, office.result(last, 200))
    office.end(last, "cut", samples=300)
    office.journal.append(ResumeRecord, search={"max_time": 480.0})
    office.journal.close()
    again = Office(tmp_path, count=8, reference=None if terms else TODAY, **terms)
    begun = again.work()
    assert [a.trial for a in begun] == [last.trial, *(f"t{n:03d}" for n in range(cut + 1, cut + len(begun)))]
    assert begun[0].knobs == last.knobs
    run = again.journal.run
    assert "cut" not in {t.outcome for t in run.ended}
    assert {trial.id for trial in run.begun if trial.is_beside} == {"t000"}
    assert run.reference is not None


def test_that_fp16_ends_in_nan_is_said_once(tmp_path: Path) -> None:
    office = Office(tmp_path)
    for amp_dtype in ("fp32", "fp16", "fp16"):
        request = office.next()
        office.end(request, "diverged", knobs={**request.knobs, "amp_dtype": amp_dtype})
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
    office = Office(tmp_path, space=AS_PROPOSED, count=5, sampler="random")
    office.finish(office.next())
    first = office.next()
    knobs = {**first.knobs, "micro_batch_size": micro_batch_of(first.knobs)}
    office.journal.append(OomRecord, trial="t999", config=knobs, outcome="oom", message="full")
    for left in (True, False):
        office.journal.close()
        office = Office(tmp_path, space=AS_PROPOSED, count=5, sampler="random")
        begun = [a.trial for a in office.work()]
        assert bool(begun) == left
        assert first.trial not in begun
        gone = [r for r in office.journal.run.refused if r.trial]
        assert [(r.trial, r.p_oom) for r in gone] == [(first.trial, 1.0)]
        assert office.journal.run.unfinished == []


def test_what_happened_to_a_trial_is_in_the_records(tmp_path: Path) -> None:
    office = Office(tmp_path)
    first = office.next()
    assert first.need_bytes is not None, "what the executor places it by"
    office.scheduler.decided("retired", first.trial, "80.0 MiB were still held after the trial")
    shared = TrialState(outcome="shm", fault="shared memory", message="Bus error", knobs=first.knobs)
    full = TrialState(outcome="oom", message="full", knobs=first.knobs)
    half = {**first.knobs, "micro_batch_size": micro_batch_of(first.knobs) // 2}
    ended = office.result(first, ORDERS.samples, knobs=half, retries=(full, shared), held_bytes=7)
    office.scheduler.ended(first.trial, ended)
    retired, oom_, restart, trial = office.journal.records[-4:]
    assert (retired.event, retired["trial"], retired["reason"][:4]) == ("retired", first.trial, "80.0")
    assert (oom_.event, oom_["config"], restart.event, restart["fault"]) == (
        "oom",
        first.knobs,
        "restart",
        "shared memory",
    )
    assert (trial.event, trial["config"], trial["held_bytes"]) == ("trial", half, 7)


def test_running_trial_that_new_knowledge_rules_out_is_stopped(tmp_path: Path) -> None:
    office = Office(tmp_path, count=8, sampler="random")
    office.scheduler._guard = MemoryGuard(None, office.scheduler._guard._profiles, EVERY)
    office.finish(office.next())
    first, second = sorted((office.next() for _ in range(2)), key=lambda a: -micro_batch_of(a.knobs))
    assert office.scheduler.goes_on(first.trial, TrialState(outcome="ok", samples=100))
    office.end(second, "oom", message="no room")
    assert office.scheduler.goes_on(first.trial, TrialState(outcome="ok", samples=800))  # it has met every sample
    paused = office.result(first, 100, values={})
    assert not office.scheduler.goes_on(first.trial, paused)
    office.scheduler.ended(first.trial, paused)
    record = next(r for r in office.journal.records if r.event == "trial" and r["trial"] == first.trial)
    assert record["outcome"] == "refused"
    assert record["reason"].startswith("ruled out by what was learned since it began: micro-batch")
    begun = office.work()
    again = [a for a in begun if a.knobs["learning_rate"] == first.knobs["learning_rate"]]
    assert [a.knobs["batch_size"] for a in again] == [first.knobs["batch_size"]]
    assert all(micro_batch_of(a.knobs) < micro_batch_of(first.knobs) for a in again)


def test_what_was_ruled_out_is_not_learned_as_fitting(tmp_path: Path) -> None:
    office = Office(tmp_path, space=AS_PROPOSED, count=8)
    first, second = office.next(), office.next()
    office.end(second, "oom", knobs=first.knobs)
    assert not office.scheduler.goes_on(first.trial)
    office.end(first, "refused")
    again = guard(office.journal.run, None)
    assert not again.judge(*need_of(first.knobs, EVERY)).fits


@pytest.mark.parametrize(("sampler", "most"), [("known", 0), ("tpe", 29)])
def test_what_does_not_fit_is_seldom_proposed(tmp_path: Path, sampler: str, most: int) -> None:
    office = Office(tmp_path, count=30, cap_bytes=300_000_000, sampler=sampler)
    office.work()
    refused = [r for r in office.journal.run.refused if r.stage == "search"]
    assert len(refused) <= most
    assert {t.outcome for t in office.journal.run.ended} <= {"ok", "stopped"}


@pytest.mark.parametrize(("fits", "micro_batch"), [(64, 64), (16, 64), (8, 4), (0, None)])
def test_trial_gets_the_knobs_that_are_fastest_at_what_fits(fits: int, micro_batch: int | None) -> None:
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
    office.finish(first)
    paused = office.result(second, 100, values={})
    assert not office.scheduler.goes_on(second.trial, paused)
    office.scheduler.ended(second.trial, paused)
    better = office.result(third, 200, values={"error": 0.0})
    assert not office.scheduler.at_rung(third.trial, better)
    office.scheduler.ended(third.trial, better)
    assert office.scheduler.next_trial() is None
    assert [(t.outcome, t.reason) for t in office.journal.run.ended[1:]] == [("stopped", OUT_OF_TIME)] * 2
    assert office.scheduler.stop_reason.startswith("its share of search.max_time was spent after 2 of 12 trials")


@pytest.mark.parametrize(
    ("encoder", "rounds", "is_judged"), [(0.5, 1, False), (0.25, 1, True), (0.25, 2, False), (0.0, 2, False)]
)
def test_rung_before_the_last_phase_judges_nobody(tmp_path: Path, encoder: float, rounds: int, is_judged: bool) -> None:
    active = {"phases": {"encoder": encoder, "classifier": 1 - encoder}, "phase_rounds": rounds}
    office = Office(tmp_path, sampler="random", count=20)
    for request in [office.next() for _ in range(8)]:
        office.scheduler.at_rung(request.trial, office.result(request, 400, active=active))
        office.scheduler.ended(request.trial, office.result(request, ORDERS.samples))
    for _ in range(2):
        late = office.next()
        poor = office.result(late, 400, values={"error": 9.0})
        assert office.scheduler.at_rung(late.trial, poor) != is_judged
        office.scheduler.ended(late.trial, poor)
        office.journal.close()
        office = Office(tmp_path, sampler="random", count=20)


@pytest.mark.parametrize("pruner", ["reference", "none"])
def test_who_is_behind_the_reference_is_stopped(tmp_path: Path, pruner: str) -> None:
    poor = {"learning_rate": 0.3, "batch_size": 64, "micro_batch_size": 64}
    office = Office(tmp_path, sampler="random", count=16, pruner=pruner, reference=poor)
    office.work()
    ended = {t.trial: t for t in office.journal.run.ended}
    today = ended["t000"].values["error"] or 0.0
    if pruner == "none":
        assert {t.outcome for t in ended.values()} == {"ok"}
        return
    rungs = [r for r in office.journal.records if r.event == "rung" and r["samples"] == 200]
    rungs = [r for r in rungs if "beside the reference" in r["reason"]]
    assert {r["goes_on"] for r in rungs} == {True, False}
    assert all(r["goes_on"] == (r["values"]["error"] - 0.75 <= today + 1e-9) for r in rungs)


def test_search_of_which_nothing_fits_ends_at_its_deadline(tmp_path: Path) -> None:
    seconds = itertools.count()
    terms: dict[str, Any] = {"count": 50, "deadline": 5.0, "clock": lambda: float(next(seconds))}
    office = Office(tmp_path, cap_bytes=50_000_000, sampler="random", **terms)
    assert office.work() == []
    assert 0 < sum(r.stage == "search" for r in office.journal.run.refused) <= 10
    assert office.scheduler.stop_reason.startswith("its share of search.max_time was spent after 0 of 50 trials")


@pytest.mark.parametrize(("concurrency", "rate"), [(1, 7.0), (2, 14.0)])
def test_trial_that_nobody_probed_is_judged_by_its_own_speed(tmp_path: Path, concurrency: int, rate: float) -> None:
    """By its neighbours', if there are any: one that was off would spoil all others."""
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
    office = Office(tmp_path, count=12, cap_bytes=400_000_000, space=AS_PROPOSED)
    first = office.next()
    half = {**first.knobs, "micro_batch_size": int(first.knobs["micro_batch_size"]) // 2}
    failed = TrialState(outcome="oom", message="full", knobs=first.knobs)
    office.scheduler.ended(first.trial, office.result(first, ORDERS.samples, knobs=half, retries=(failed,)))
    begun = office.work()
    (said,) = [note.text for note in office.journal.run.notes]
    assert first.trial in said
    assert said.endswith("which changes what is learned here")
    assert {4, 16} <= {r.config["micro_batch_size"] for r in office.journal.run.probes}, "each is a speed group"
    starts = {start.trial: start for start in office.starts()}
    assert {r["decision"] for r in office.journal.records if r.event == "trial_start"} == {"launch"}
    refused = [r.config for r in office.journal.run.refused if r.stage == "search"]
    assert len({config["micro_batch_size"] for config in (*(a.knobs for a in begun), *refused)}) > 1
    assert all(a.knobs == starts[a.trial].config for a in begun)
