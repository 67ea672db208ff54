"""The scheduler: what it proposes, whom it stops, what it writes, and how it goes on after a crash."""

from __future__ import annotations

import itertools
import math
import statistics
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FormulaProfiler
from trainables.knobs import Knobs
from tuning.config.schema import ProbeSection
from tuning.config.space import Space
from tuning.journal.records import Journal, trials, unfinished
from tuning.memory.groups import defaults, guard, key_of, micro_batch_of
from tuning.memory.guard import MemoryGuard
from tuning.memory.measure import MemoryStage
from tuning.memory.oom import GROWING
from tuning.search.foresight import Foresight, tries_of
from tuning.search.probe import ProbeStage
from tuning.search.protocols import TrialPlan, TrialRequest
from tuning.search.scheduler import SearchTerms, TrialScheduler
from tuning.search.throughput import Probed

SPACE = Space.of(
    {
        "batch_size": [16, 64],
        "micro_batch_size": [4, 16, 64],
        "num_workers": [0, 2],
        "learning_rate": {"low": 1e-3, "high": 1.0, "log": True},
    }
)
ORDERS = TrialPlan(samples=800, milestones=(200, 400, 800), shrink=True, concurrency=1, threads=1)


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
        tries_frac: float = 0.0,
        probe_s: float = 0.3,
    ) -> None:
        self.profiler = profiler or FormulaProfiler(cap_bytes)
        self.journal = Journal.open(folder / "trials.jsonl", create=True)
        MemoryStage(self.profiler, space, self.journal, cap_bytes).run()
        learned = guard(self.journal.records, cap_bytes)
        if strategy == "staged":
            section = ProbeSection(max_time_s=probe_s, probe_time_s=1, spread_frac=0.03)
            ProbeStage(self.profiler, space, self.journal, learned, section, 0).run(named or {}, lambda r: None)
        terms = SearchTerms(strategy, count, None, 0, 2, {"error": "min"}, tries_frac=tries_frac)
        self.scheduler = TrialScheduler(self.journal, space, learned, terms, ORDERS, lambda r: None)

    def result(self, request: TrialRequest, samples: int) -> dict[str, Any]:
        found = self.profiler.train(request.knobs, samples, (samples,), 0)
        return {**found, "samples": samples, "knobs": dict(request.knobs), "ooms": []}

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


def test_finds_the_learning_rate_and_stops_the_hopeless(tmp_path: Path) -> None:
    office = Office(tmp_path, count=30)
    office.work()
    ended = trials(office.journal.records)
    best = min((t for t in ended if t.outcome == "ok"), key=lambda t: t.values["error"] or 0.0)
    assert abs(math.log(best.config["learning_rate"] / 0.1)) < 0.7
    assert {t.outcome for t in ended} == {"ok", "stopped"}
    assert sum(t.outcome == "stopped" for t in ended) >= 8


def test_system_knobs_and_throughput_come_from_the_probes(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.work()
    for trial in trials(office.journal.records):
        batch = trial.config["batch_size"]
        assert (trial.config["micro_batch_size"], trial.config["num_workers"]) == (batch, 2)
        seconds = office.profiler.micro_step_s(trial.config) + 0.001
        assert trial.samples_per_s == pytest.approx(batch / seconds)


def test_joint_proposes_every_knob_and_judges_memory_as_proposed(tmp_path: Path) -> None:
    office = Office(tmp_path, strategy="joint", count=40, cap_bytes=400_000_000)
    begun = office.work()
    assert {a.knobs["num_workers"] for a in begun} == {0, 2}
    assert not any(a.knobs["micro_batch_size"] == 64 for a in begun)
    refused = [r for r in office.journal.records if r.event == "refused" and r["stage"] == "search"]
    assert refused
    assert len(begun) + len(refused) == 40


def test_a_lost_process_and_an_oom_are_endings_that_are_told(tmp_path: Path) -> None:
    office = Office(tmp_path)
    first, second = office.scheduler.next_trial(), office.scheduler.next_trial()
    assert first is not None
    assert second is not None
    office.scheduler.ended(first.trial, None)
    oom = {"outcome": "oom", "values": {}, "message": "no room", "knobs": dict(second.knobs), "samples": 0, "ooms": []}
    office.scheduler.ended(second.trial, oom)
    assert [t.outcome for t in trials(office.journal.records)] == ["killed", "oom"]
    states = [t.state.name for t in office.scheduler._sampler.trials]
    assert states == ["PRUNED", "PRUNED"]


def test_after_an_oom_the_next_trials_of_its_coupling_take_smaller_micro_batches(tmp_path: Path) -> None:
    office = Office(tmp_path, count=20)
    first = office.scheduler.next_trial()
    assert first is not None
    micro = Knobs.of(first.knobs).micro_batch_size
    found: Mapping[str, Any] = office.result(first, ORDERS.samples)
    shrunk = {**first.knobs, "micro_batch_size": micro // 2}
    office.scheduler.ended(
        first.trial, {**found, "knobs": shrunk, "ooms": [{"knobs": dict(first.knobs), "message": "full"}]}
    )
    assert [r["config"]["micro_batch_size"] for r in office.journal.records if r.event == "oom"] == [micro]


@pytest.mark.parametrize("after", [0, 1, 5, 11])
def test_a_crash_loses_no_finished_trial_and_runs_none_again(tmp_path: Path, after: int) -> None:
    office = Office(tmp_path)
    done = [a.trial for a in office.work(after)]
    interrupted = office.scheduler.next_trial()
    assert interrupted is not None
    office.scheduler.at_rung(interrupted.trial, office.result(interrupted, 200))
    office.journal.close()

    resumed = Office(tmp_path)
    begun = [a.trial for a in resumed.work()]
    assert begun[0] == interrupted.trial
    assert not set(begun) & set(done)
    assert len(trials(resumed.journal.records)) == 12


def test_trials_in_flight_at_a_crash_run_once_more_and_are_not_proposed_again(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.work(3)
    flying = [office.scheduler.next_trial(), office.scheduler.next_trial()]
    office.journal.close()
    begun = Office(tmp_path).work()
    assert [a.trial for a in begun[:2]] == [a.trial for a in flying if a is not None]
    every = [tuple(sorted(a.knobs.items())) for a in begun]
    assert len(every) == len(set(every)) == 9


def test_trials_keep_to_the_space_whatever_is_measured_beside_it(tmp_path: Path) -> None:
    office = Office(tmp_path, named={"after": {"batch_size": 64, "micro_batch_size": 64, "num_workers": 8}})
    assert all(a.knobs["num_workers"] in (0, 2) for a in office.work())


def test_a_trial_that_shrank_is_not_credited_with_the_speed_of_what_did_not_fit(tmp_path: Path) -> None:
    office = Office(tmp_path)
    first = office.scheduler.next_trial()
    assert first is not None
    shrunk = {**first.knobs, "micro_batch_size": 3}
    office.scheduler.ended(first.trial, {**office.result(first, 800), "knobs": shrunk, "measured_samples_per_s": 7.0})
    assert trials(office.journal.records)[0].samples_per_s == 7.0


@pytest.mark.parametrize("after", [5, 16])
def test_a_resumed_search_proposes_what_the_unbroken_one_does(tmp_path: Path, after: int) -> None:
    whole = [dict(a.knobs) for a in Office(_made(tmp_path / "a"), count=24).work()]
    broken = Office(_made(tmp_path / "b"), count=24)
    first = [dict(a.knobs) for a in broken.work(after)]
    broken.journal.close()
    rest = [dict(a.knobs) for a in Office(tmp_path / "b", count=24).work()]
    assert first + rest == whole


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


class Half(Office):
    """Where fp16 ends in NaN."""

    def finish(self, request: TrialRequest) -> None:
        if request.knobs["amp_dtype"] != "fp16":
            return super().finish(request)
        nan = {"outcome": "diverged", "message": "the mean training loss is nan", "values": {}}
        self.scheduler.ended(request.trial, {**self.result(request, 100), **nan})
        return None


@pytest.mark.parametrize("strategy", ["staged", "joint"])
def test_fp16_that_diverged_is_tried_at_once_with_another_type(tmp_path: Path, strategy: str) -> None:
    space = Space.of({**SPACE.as_raw(), "amp_dtype": ["fp16", "fp32", "bf16"]})
    office = Half(tmp_path, strategy=strategy, count=12, space=space)
    begun = office.work()
    assert len(begun) == 12
    for first, then in itertools.pairwise(begun):
        if first.knobs["amp_dtype"] == "fp16":
            learned = ("learning_rate", "batch_size")
            assert [then.knobs[n] for n in learned] == [first.knobs[n] for n in learned]
            assert then.knobs["amp_dtype"] == "bf16"
    notes = [r["text"] for r in office.journal.records if r.event == "note"]
    assert notes == ["NaN or Inf under amp_dtype=fp16, whose largest number is 65,504: tried again with bf16"]


def test_what_is_to_be_tried_instead_outlives_a_crash(tmp_path: Path) -> None:
    space = Space.of({**SPACE.as_raw(), "amp_dtype": ["fp16", "fp32"]})
    office = Half(tmp_path, count=12, space=space)
    while (last := office.work(limit=1)[0]).knobs["amp_dtype"] != "fp16":
        pass
    terms = SearchTerms("staged", 12, None, 0, 2, {"error": "min"})
    again = TrialScheduler(office.journal, space, guard(office.journal.records, None), terms, ORDERS, lambda r: None)
    then = again.next_trial()
    assert then is not None
    assert (then.knobs["amp_dtype"], then.knobs["learning_rate"]) == ("fp32", last.knobs["learning_rate"])


def test_every_decision_about_memory_is_written_with_its_reason_and_p_oom(tmp_path: Path) -> None:
    office = Office(tmp_path, strategy="joint", count=30, cap_bytes=400_000_000)
    office.work()
    started = [r for r in office.journal.records if r.event == "trial_start"]
    refused = [r for r in office.journal.records if r.event == "refused"]
    assert refused
    assert {r["decision"] for r in started} == {"launch"}
    assert max(r["p_oom"] for r in started) <= 0.5 < min(r["p_oom"] for r in refused)
    assert all("P(OOM)" in r["reason"] or "ran out of memory" in r["reason"] for r in refused)


def test_a_micro_batch_that_does_not_fit_is_halved_and_the_batch_kept(tmp_path: Path) -> None:
    office = Office(tmp_path, count=6)  # probed without a cap, as another card may have been
    office.scheduler._guard = MemoryGuard(300_000_000, office.scheduler._guard._profiles)
    begun = office.work()
    halved = [r for r in office.journal.records if r.event == "trial_start" and r["decision"] == "halve"]
    assert halved
    assert all(r["decision_reason"].startswith("micro-batch 16 in the place of 64, for which") for r in halved)
    assert {a.knobs["batch_size"] for a in begun} == {16, 64}
    assert {a.knobs["micro_batch_size"] for a in begun} == {16}


def test_an_interrupted_trial_that_new_knowledge_rules_out_is_refused_and_its_place_taken(tmp_path: Path) -> None:
    office = Office(tmp_path, strategy="joint", count=5)
    first = office.scheduler.next_trial()
    assert first is not None
    micro = min(Knobs.of(first.knobs).micro_batch_size, Knobs.of(first.knobs).batch_size)
    office.journal.append("oom", trial="t999", config={**first.knobs, "micro_batch_size": micro}, message="full")
    office.journal.close()

    resumed = Office(tmp_path, strategy="joint", count=5)
    begun = [a.trial for a in resumed.work()]
    assert first.trial not in begun
    gone = [r for r in resumed.journal.records if r.event == "refused" and r.get("trial")]
    assert [(r["trial"], r["p_oom"]) for r in gone] == [(first.trial, 1.0)]
    assert unfinished(resumed.journal.records) == []
    resumed.journal.close()
    assert Office(tmp_path, strategy="joint", count=5).work() == []


def test_a_resumed_search_knows_of_memory_what_the_unbroken_one_did_and_no_more(tmp_path: Path) -> None:
    office = Office(tmp_path, strategy="joint", count=12, cap_bytes=400_000_000)
    office.work(6)
    key = key_of({})
    said = [office.scheduler._guard.p_oom(key, m) for m in (16, 28, 30, 32, 64)]
    office.journal.close()
    resumed = Office(tmp_path, strategy="joint", count=12, cap_bytes=400_000_000)
    assert [resumed.scheduler._guard.p_oom(key, m) for m in (16, 28, 30, 32, 64)] == pytest.approx(said)


def test_what_the_backend_decided_and_why_a_trial_began_again_are_lines_of_the_records(tmp_path: Path) -> None:
    office = Office(tmp_path)
    first = office.scheduler.next_trial()
    assert first is not None
    assert first.need_bytes is not None, "what the executor places it by"
    office.scheduler.decided("retired", first.trial, "80.0 MiB were still held after the trial")
    again = {"knobs": dict(first.knobs), "outcome": "shm", "fault": "shared memory", "message": "Bus error"}
    office.scheduler.ended(first.trial, {**office.result(first, ORDERS.samples), "restarts": [again], "held_bytes": 7})
    retired, restart, trial = office.journal.records[-3:]
    assert (retired.event, retired["trial"], retired["reason"][:4]) == ("retired", first.trial, "80.0")
    assert (restart.event, restart["outcome"], restart["fault"]) == ("restart", "shm", "shared memory")
    assert (trial.event, trial["held_bytes"]) == ("trial", 7)


def test_a_leak_ends_a_trial_but_says_nothing_of_its_micro_batch(tmp_path: Path) -> None:
    office = Office(tmp_path, cap_bytes=10**9)
    first = office.scheduler.next_trial()
    assert first is not None
    leak = {"outcome": "oom", "fault": GROWING.name, "message": "live bytes grow", "values": {}, "ooms": []}
    office.scheduler.ended(first.trial, {**leak, "knobs": dict(first.knobs), "samples": 0})
    assert trials(office.journal.records)[-1].outcome == "oom"
    for learned in (office.scheduler._guard, guard(office.journal.records, 10**9)):
        assert learned.judge(key_of(first.knobs), micro_batch_of(first.knobs)).fits


@pytest.mark.parametrize("strategy", ["staged", "joint"])
def test_a_running_trial_that_new_knowledge_rules_out_is_stopped(tmp_path: Path, strategy: str) -> None:
    office = Office(tmp_path, strategy=strategy, count=8)
    office.scheduler._guard = MemoryGuard(None, office.scheduler._guard._profiles)
    first, second = office.scheduler.next_trial(), office.scheduler.next_trial()
    assert first is not None
    assert second is not None
    assert office.scheduler.goes_on(first.trial, {"samples": 100})
    oom = {"outcome": "oom", "values": {}, "message": "no room", "samples": 0, "knobs": dict(first.knobs)}
    office.scheduler.ended(second.trial, oom)
    assert office.scheduler.goes_on(first.trial, {"samples": 800})  # it has met every sample
    paused = {**office.result(first, 100), "values": {}, "paused": True}
    assert not office.scheduler.goes_on(first.trial, paused)
    office.scheduler.ended(first.trial, paused)
    record = next(r for r in office.journal.records if r.event == "trial" and r["trial"] == first.trial)
    assert record["outcome"] == "refused"
    assert record["reason"].startswith("ruled out by what was learned since it began: micro-batch")
    begun = office.work()
    again = [a for a in begun if a.knobs["learning_rate"] == first.knobs["learning_rate"]]
    assert [a.knobs["batch_size"] for a in again] == [first.knobs["batch_size"]] * (strategy == "staged")
    assert all(micro_batch_of(a.knobs) < micro_batch_of(first.knobs) for a in again)


def test_what_was_ruled_out_is_not_learned_as_fitting_and_is_tried_once_after_a_crash(tmp_path: Path) -> None:
    office = Office(tmp_path, strategy="joint", count=8)
    first, second = office.scheduler.next_trial(), office.scheduler.next_trial()
    assert first is not None
    assert second is not None
    oom = {"outcome": "oom", "values": {}, "message": "no room", "samples": 0, "knobs": dict(first.knobs)}
    office.scheduler.ended(second.trial, oom)
    assert not office.scheduler.goes_on(first.trial, {})
    office.scheduler.ended(first.trial, {"outcome": "refused", "values": {}, "message": ""})
    again = guard(office.journal.records, None)
    assert not again.judge(key_of(first.knobs), micro_batch_of(first.knobs)).fits
    office.journal.close()
    begun = Office(tmp_path, strategy="joint", count=8).work()
    assert first.knobs["learning_rate"] not in [a.knobs["learning_rate"] for a in begun]


def test_it_begins_with_the_defaults_and_the_fastest_and_trains_where_most_is_to_be_gained(tmp_path: Path) -> None:
    office = Office(tmp_path, count=24)
    begun = office.work()
    start = defaults(SPACE)
    assert all(begun[0].knobs[name] == start[name] for name in ("batch_size", "learning_rate"))
    ended = {t.id: t for t in trials(office.journal.records)}
    assert ended[begun[1].trial].samples_per_s == max(t.samples_per_s or 0.0 for t in ended.values())
    assert begun[1].knobs["batch_size"] == 64
    far = [abs(math.log(float(a.knobs["learning_rate"]) / 0.1)) for a in begun]
    assert statistics.median(far[12:]) < statistics.median(far[2:7])


class Curved(Office):
    """An office whose errors are as told: at the rungs and at the end of each trial."""

    def course(self, *errors: float) -> TrialRequest:
        """Runs the next trial through these errors, one a milestone, and returns it."""
        request = self.scheduler.next_trial()
        assert request is not None
        for milestone, error in zip(ORDERS.milestones, errors, strict=False):
            found = {**self.result(request, milestone), "values": {"error": error}}
            if milestone == ORDERS.samples or not self.scheduler.at_rung(request.trial, found):
                self.scheduler.ended(request.trial, found)
                break
        return request


def test_a_trial_that_cannot_reach_the_front_any_more_is_stopped_with_a_reason(tmp_path: Path) -> None:
    rate = {"low": 1e-3, "high": 1.0, "log": True}
    space = Space.of({"batch_size": 64, "micro_batch_size": [16, 64], "learning_rate": rate})
    office = Curved(tmp_path, count=40, space=space)
    for n in range(7):  # each better than those before, and 0.1 better at its end than at its first rung
        office.course(1.0 - 0.1 * n, 0.95 - 0.1 * n, 0.9 - 0.1 * n)
    office.course(0.45, 0.45, 0.45)  # second of eight at the first rung, where the best half goes on
    last = trials(office.journal.records)[-1]
    assert (last.outcome, last.samples) == ("stopped", 200)
    record = office.journal.records[-1]
    assert record["reason"].startswith("cannot reach the front: 0.325 at most from here, where one as fast came to 0.3")


class Restless(Office):
    """An office whose rungs say nothing: luck until the end, which is the learning rate's alone."""

    def result(self, request: TrialRequest, samples: int) -> dict[str, Any]:
        """Returns the formula's result; before the end its error is a draw of the trial and the rung."""
        found = super().result(request, samples)
        if samples < ORDERS.samples:
            found["values"] = {"error": zlib.crc32(f"{request.trial} {samples}".encode()) / 2**32}
        return found


def _rungs(office: Office) -> list[tuple[Any, ...]]:
    """Returns what was decided at rungs: of a trial that began again at each rung the last."""
    rungs = (r for r in office.journal.records if r.event == "rung")
    return list({(r["trial"], r["samples"]): (r["trial"], r["goes_on"], r["reason"]) for r in rungs}.values())


def test_a_trial_goes_on_against_its_place_where_the_rest_is_worth_more_and_says_so(tmp_path: Path) -> None:
    whole = Restless(_made(tmp_path / "a"), count=24)
    begun = [a.trial for a in whole.work()]
    rungs = [r for r in whole.journal.records if r.event == "rung"]
    kept = [r for r in rungs if r["goes_on"] and r["reason"].startswith("the rest of it is worth more a second")]
    ends = {r["trial"]: r for r in whole.journal.records if r.event == "trial"}
    assert kept
    assert all(ends[r["trial"]]["samples"] > r["samples"] for r in kept)
    stopped = [r for r in rungs if not r["goes_on"]]
    assert stopped
    assert all(ends[r["trial"]]["reason"] == r["reason"] for r in stopped)
    broken = Restless(_made(tmp_path / "b"), count=24)
    broken.work(begun.index(kept[0]["trial"]))
    interrupted = broken.scheduler.next_trial()
    assert interrupted is not None
    assert interrupted.trial == kept[0]["trial"]
    broken.journal.close()
    resumed = Restless(tmp_path / "b", count=24)
    resumed.work()
    assert _rungs(resumed) == _rungs(whole)


class Phased(FormulaProfiler):
    """A profiler on which a phase for the encoder needs a gigabyte more, and whoever learns best has one."""

    def peak_bytes(self, knobs: Mapping[str, Any], micro_batch: int) -> int:
        """Returns the formula's peak, and that."""
        return super().peak_bytes(knobs, micro_batch) + (10**9 if Knobs.of(knobs).encoder_frac else 0)

    def train(self, knobs: Mapping[str, Any], *rest: Any) -> dict[str, Any]:
        """Returns an error that falls with the phase's share."""
        found = super().train(knobs, *rest)
        return {**found, "values": {"error": found["values"]["error"] - Knobs.of(knobs).encoder_frac}}


def test_what_does_not_fit_is_not_proposed_for_what_it_might_add(tmp_path: Path) -> None:
    shares = {"encoder_frac": [0.0, 0.25, 0.5], "learning_rate": {"low": 1e-3, "high": 1.0, "log": True}}
    space = Space.of({"batch_size": [16, 64], "micro_batch_size": [4, 16, 64], **shares})
    office = Office(tmp_path, count=60, cap_bytes=500_000_000, space=space, profiler=Phased(500_000_000))
    office.work()
    modelled = [r for r in office.journal.records if r.event in ("trial_start", "refused")][20:]
    assert all(r["config"]["encoder_frac"] == 0.0 for r in modelled)
    assert all(t.outcome in ("ok", "stopped") for t in trials(office.journal.records))


WIDE = Space.of({**SPACE.as_raw(), "num_workers": [0, 1, 2, 3, 4], "ram_cache": [False, True]})


def _trying(folder: Path, count: int = 24) -> Office:
    """An office whose probes had no time, so that trials find the speed."""
    return Office(folder, count=count, space=WIDE, tries_frac=0.5, probe_s=1e-9)


def test_trials_find_the_system_knobs_that_probes_had_no_time_for(tmp_path: Path) -> None:
    office = _trying(tmp_path)
    begun = office.work()
    starts = [r for r in office.journal.records if r.event == "trial_start"]
    assert 2 <= sum(bool(r.get("tries")) for r in starts) <= 12
    probed = max(r["samples_per_s"] for r in office.journal.records if r.event == "probe")
    assert (begun[-1].knobs["num_workers"], begun[-1].knobs["micro_batch_size"]) == (4, begun[-1].knobs["batch_size"])
    assert max(t.samples_per_s or 0.0 for t in trials(office.journal.records)) > 1.2 * probed


def test_a_trial_of_the_front_is_given_the_knobs_that_another_tried(tmp_path: Path) -> None:
    office = _trying(tmp_path)
    office.work()
    rated = [r for r in office.journal.records if r.event == "rated"]
    ran = {r["trial"]: r for r in office.journal.records if r.event == "trial"}
    ended = {t.id: t for t in trials(office.journal.records)}
    assert rated
    for record in rated:
        own = ran[record["trial"]]
        assert own["outcome"] == "ok"
        changed = {n for n in own["config"] if own["config"][n] != record["config"][n]}
        assert changed <= {"num_workers", "micro_batch_size", "ram_cache"}
        assert record["samples_per_s"] > 1.03 * own["samples_per_s"]
        assert ended[record["trial"]].samples_per_s >= record["samples_per_s"]
    last = {r["trial"]: r for r in rated}
    for trial, record in last.items():
        batch, seconds = record["config"]["batch_size"], office.profiler.micro_step_s(record["config"]) + 0.001
        assert ended[trial].config == record["config"]
        assert ended[trial].values == ran[trial]["values"]
        assert record["samples_per_s"] == pytest.approx(batch / seconds, rel=0.02)


@pytest.mark.parametrize("after", [5, 9, 16])
def test_a_resumed_search_tries_what_the_unbroken_one_does(tmp_path: Path, after: int) -> None:
    whole = _trying(_made(tmp_path / "a"))
    expected = [dict(a.knobs) for a in whole.work()]
    broken = _trying(_made(tmp_path / "b"))
    first = [dict(a.knobs) for a in broken.work(after)]
    interrupted = broken.scheduler.next_trial()
    broken.journal.close()
    resumed = _trying(tmp_path / "b")
    rest = [dict(a.knobs) for a in resumed.work()]
    assert interrupted is not None
    assert first + rest == expected
    assert trials(resumed.journal.records) == trials(whole.journal.records)


def test_a_crash_between_a_trial_and_its_ratings_loses_none(tmp_path: Path) -> None:
    whole = _trying(_made(tmp_path / "whole"))
    whole.work()
    kinds = [record.event for record in whole.journal.records]
    firsts = [n for n in range(1, len(kinds)) if kinds[n] == "rated" and kinds[n - 1] == "trial"]
    assert firsts
    for number in [*firsts, *[n + 1 for n in firsts if kinds[n + 1] == "rated"]]:
        folder = _made(tmp_path / str(number))
        with Journal.open(folder / "trials.jsonl", create=True) as cut:
            for record in whole.journal.records[:number]:
                cut.append(record.event, **record.fields)
        resumed = _trying(folder)
        made_up = [(r.event, r.fields) for r in resumed.journal.records[number:]]
        assert made_up
        assert made_up == [(r.event, r.fields) for r in whole.journal.records[number : number + len(made_up)]]
        assert kinds[number + len(made_up)] != "rated"
        resumed.work()
        assert trials(resumed.journal.records) == trials(whole.journal.records)


def test_what_a_try_was_to_learn_is_trained_once_more_where_its_knobs_failed_it(tmp_path: Path) -> None:
    office = _trying(tmp_path)
    while not (starts := [r for r in office.journal.records if r.event == "trial_start"]) or not starts[-1].get(
        "tries"
    ):
        request = office.scheduler.next_trial()
        assert request is not None
        if not office.journal.records[-1].get("tries"):
            office.finish(request)
    office.scheduler.ended(starts[-1]["trial"], None)
    again = office.scheduler.next_trial()
    assert again is not None
    learned = ("learning_rate", "batch_size")
    assert [again.knobs[n] for n in learned] == [starts[-1]["config"][n] for n in learned]
    office.scheduler.ended(again.trial, None)
    then = office.scheduler.next_trial()
    assert then is not None
    assert then.knobs["learning_rate"] != again.knobs["learning_rate"]


def test_beside_neighbours_and_in_a_joint_search_nothing_is_tried(tmp_path: Path) -> None:
    joint = Office(_made(tmp_path / "joint"), strategy="joint", space=WIDE, tries_frac=0.5)
    joint.work()
    packed = _trying(_made(tmp_path / "packed"))
    orders = TrialPlan(ORDERS.samples, ORDERS.milestones, shrink=True, concurrency=2, threads=1)
    terms = SearchTerms("staged", 12, None, 0, 2, {"error": "min"}, tries_frac=0.5)
    packed.scheduler = TrialScheduler(
        packed.journal, WIDE, guard(packed.journal.records, None), terms, orders, lambda r: None
    )
    packed.work()
    for office in (joint, packed):
        assert not any(r.get("tries") for r in office.journal.records)
        assert not any(r.event == "rated" for r in office.journal.records)


class Lucky(Office):
    """Where whatever is tried seems twice as fast as it is, the first time."""

    def result(self, request: TrialRequest, samples: int) -> dict[str, Any]:
        found = super().result(request, samples)
        starts = (r for r in self.journal.records if r.event == "trial_start" and r["trial"] == request.trial)
        luck = 2.0 if any(r.get("tries") for r in starts) else 1.0
        return {**found, "measured_samples_per_s": luck * found["measured_samples_per_s"]}


def test_a_speed_that_was_luck_is_taken_back_where_it_was_said(tmp_path: Path) -> None:
    office = Lucky(tmp_path, count=60, space=WIDE, tries_frac=0.25, probe_s=1e-9)
    office.work()
    said: dict[str, list[float]] = {}
    for record in office.journal.records:
        if record.event in ("trial", "rated") and record["samples_per_s"]:
            said.setdefault(record["trial"], []).append(record["samples_per_s"])
    assert any(then < before / 1.03 for rates in said.values() for before, then in itertools.pairwise(rates))
    for trial in trials(office.journal.records):
        if trial.outcome == "ok":
            seconds = office.profiler.micro_step_s(trial.config) + 0.001
            assert (trial.samples_per_s or 0.0) < 1.8 * trial.config["batch_size"] / seconds


def test_a_rated_configuration_has_the_conditional_knobs_of_what_was_measured(tmp_path: Path) -> None:
    space = Space.of({**SPACE.as_raw(), "num_workers": 2, "prefetch_factor": [2, 8], "learning_rate": 0.1})
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    MemoryStage(FormulaProfiler(None), space, journal, None).run()
    plain = {"batch_size": 64, "micro_batch_size": 64, "num_workers": 2, "learning_rate": 0.1}  # prefetch as it comes
    slow = Probed({**plain, "micro_batch_size": 16}, 0.01, 0.001, 1.0)
    fast = Probed(plain, 0.01, 0.001, 1.0)
    tries = tries_of(space, [slow, fast], [], 0.25, 0)
    foresight = Foresight(space, ("batch_size",), tries, guard(journal.records, None), {"error": "min"}, 800, 0)
    ran = {**plain, "micro_batch_size": 16, "prefetch_factor": 8}
    foresight.begun("t000", ran, tries=True)
    ended = {"trial": "t000", "config": ran, "outcome": "ok", "samples_per_s": 100.0, "values": {"error": 0.1}}
    foresight.ended(journal.append("trial", **ended))
    (found,) = foresight.rated()
    assert found.config.get("prefetch_factor", 2) == 2
    assert found.config["micro_batch_size"] == 64
    assert found.samples_per_s == pytest.approx(64 / 0.011)


@pytest.mark.parametrize(("fits", "micro_batch"), [(64, 64), (16, 64), (8, 4), (0, 64)])
def test_a_trial_gets_the_knobs_that_are_fastest_at_what_fits(tmp_path: Path, fits: int, micro_batch: int) -> None:
    """What was tuned at 64 samples is 4 times as fast as the plain start at 4, and at 16 of them still as fast."""
    tuned = Probed({"batch_size": 64, "micro_batch_size": 64, "num_workers": 4}, 0.064, 0.0, 1000.0)
    plain = Probed({"batch_size": 64, "micro_batch_size": 4, "num_workers": 0}, 0.016, 0.0, 249.0)
    learned = MemoryGuard(10**9, {})
    learned.observe_oom(key_of({}), fits + 1)
    tries = tries_of(SPACE, [tuned, plain], [], 0.0, 0)
    foresight = Foresight(SPACE, ("batch_size",), tries, learned, {"error": "min"}, 800, 0)
    system = foresight.system({"batch_size": 128})
    assert system is not None
    assert system["micro_batch_size"] == micro_batch


@pytest.mark.parametrize(("objectives", "known"), [({"error": "min"}, True), ({"error": "min", "gap": "min"}, False)])
def test_of_two_qualities_it_is_not_said_what_a_trial_adds(
    tmp_path: Path, objectives: dict[str, Any], known: bool
) -> None:
    probes = [Probed({"batch_size": 64, "micro_batch_size": 64, "num_workers": 2}, 0.01, 0.001, 1.0)]
    tries = tries_of(SPACE, probes, [], 0.0, 0)
    foresight = Foresight(SPACE, ("batch_size",), tries, MemoryGuard(10**9, {}), objectives, 800, 0)
    foresight.recall({"offer": 1.0, "expected": [0.1, 0.01]})
    assert foresight.expected == ((0.1, 0.01) if known else None)
