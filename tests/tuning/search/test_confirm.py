"""The confirm stage: the answer is right, on the same seeds for all, within its time, and the same after a resume."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import FormulaProfiler
from trainables.knobs import Scalar
from trainables.our_knobs import EVERY
from tuning.config.schema import ConfirmSection
from tuning.config.space import Space
from tuning.journal.events import EVENTS, ProbeRecord, ResumeRecord, StartRecord, Timed, TrialRecord
from tuning.journal.records import Journal, Record
from tuning.search.confirm import (
    LEAST_ROUNDS,
    MORE,
    Confirmed,
    ConfirmTerms,
    confirm,
    measure_windows,
    median_rate,
    train_reference,
)
from tuning.search.protocols import TrialState
from tuning.search.race import LEAST_SEEDS, SYSTEM
from tuning.search.rule import Baseline, Rule

BUDGET = ConfirmSection(windows=5, window_s=0.1, seeds=4, top=2)
NAMED = {"before": {"micro_batch_size": 4}, "after": {"micro_batch_size": 8}, "best": {"micro_batch_size": 32}}
RULE = Rule("error", "min")
SPACE = Space.parse({"batch_size": [16, 32, 64, 128], "num_workers": [0, 2]}, EVERY)
SAMPLES = 320
TODAY: dict[str, Scalar] = {"batch_size": 16, "num_workers": 0}
SYSTEM_KNOBS: dict[str, Scalar] = {"batch_size": 16, "num_workers": 2}
Errors = Mapping[int, float]
"""Error by batch size; a trial's id is that of its batch, such as t64."""
FLAT: Errors = {16: 0.2, 32: 0.19, 64: 0.19, 128: 0.5}


def ignore(record: object) -> None:
    """Hears nothing."""


def endless() -> float:
    """Returns the seconds left where there is no limit."""
    return math.inf


def per_s(knobs: Mapping[str, Scalar]) -> float:
    """Returns a speed that grows with the batch; two workers double it."""
    return float(knobs["batch_size"]) * (2 if knobs["num_workers"] else 1)


class Bench(FormulaProfiler):
    """A device with a clock of its own, on which the error of a batch size is given, and seeds change it a little."""

    def __init__(
        self,
        errors: Errors,
        broken: Collection[int] = (),
        turns: Callable[[Mapping[str, Scalar]], float] = per_s,
        outcome: str = "diverged",
        alone: Callable[[Mapping[str, Scalar]], float] = per_s,
    ) -> None:
        super().__init__()
        self.per_s = alone
        self.errors, self.broken, self.turns, self.outcome = errors, broken, turns, outcome
        self.now, self.trained = 0.0, list[tuple[int, int, int]]()

    def train(
        self, knobs: Mapping[str, Scalar], samples: int, milestones: Sequence[int], seed: int, left_s: float = math.inf
    ) -> TrialState:
        """Returns the error of the batch size, with noise of a seed that is the same for all, and one of its own."""
        size = int(knobs["batch_size"])
        assert MORE * samples / self.per_s(knobs) <= left_s, "what cannot end is not begun"
        assert milestones[-1] == samples
        self.now += samples / self.per_s(knobs)
        self.trained.append((size, int(knobs["num_workers"]), seed))
        noise = 0.01 * math.sin(seed) + 0.001 * math.sin(seed * size)
        found = TrialState(
            outcome="ok",
            values={"error": self.errors[size] + noise},
            samples=samples,
            measured_samples_per_s=self.per_s(knobs),
            train_s=samples / self.per_s(knobs),
            peak_allocated_bytes=1,
        )
        return replace(found, outcome=self.outcome, values={}) if size in self.broken else found

    def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> Timed:
        """Returns the speed in turns, which drifts from round to round alike for all."""
        self.now += max(window_s, 0.1)
        rate = self.turns(knobs) * (1 - 0.05 * seed)
        return Timed(outcome="ok", samples_per_s=rate, wall_s=max(window_s, 0.1))


def searched(folder: Path, errors: Errors = FLAT) -> Journal:
    """Returns the records of a search, with one trial a batch size beside the reference."""
    folder.mkdir(exist_ok=True)
    journal = Journal.open(folder / "trials.jsonl", create=True)
    journal.append(StartRecord, trial="t000", config=TODAY, named="before", beside=True)
    for size, error in errors.items():
        config = TODAY if size == 16 else {"batch_size": size, "num_workers": 2}
        rest = {"outcome": "ok", "values": {"error": error}, "samples_per_s": per_s(config)}
        journal.append(TrialRecord, trial="t000" if size == 16 else f"t{size}", config=config, **rest)
    return journal


def settled(
    journal: Journal, bench: Bench, rule: Rule = RULE, limit_s: float = math.inf, system: bool = True, **other: Any
) -> Confirmed:
    """Returns the answer."""
    terms = terms_of(bench, rule, limit_s, system)
    return confirm(bench, journal, {"after": {"batch_size": 8, "num_workers": 0}}, replace(terms, **other), ignore)


def terms_of(bench: Bench, rule: Rule = RULE, limit_s: float = math.inf, system: bool = True) -> ConfirmTerms:
    """Returns what is asked of confirming."""
    return ConfirmTerms(
        rule=rule,
        seeds=range(1, BUDGET.seeds + 1),
        budget=BUDGET,
        samples=SAMPLES,
        left_s=lambda: limit_s - bench.now,
        reference_name="before",
        reference=TODAY,
        system=SYSTEM_KNOBS if system else None,
        space=SPACE.subset({"learning"}),
        per_s=per_s,
    )


@pytest.mark.parametrize(("broken", "trained"), [((), [1, 2, 3]), ((16,), [1])])
def test_reference_is_trained_before_the_search_on_seeds_that_confirming_uses_too(
    tmp_path: Path, broken: tuple[int, ...], trained: list[int]
) -> None:
    journal, bench = Journal.open(tmp_path / "trials.jsonl", create=True), Bench(FLAT, broken)
    for most in (2, 3):  # what was broken off goes on
        train_reference(bench, journal, terms_of(bench), ignore, most)
    assert [r["seed"] for r in of(journal, "confirmed") if r["name"] == "before"] == trained
    for record in searched(tmp_path / "other").records:
        journal.append(EVENTS[record.event], **record.fields)
    if not broken:
        assert settled(journal, bench).name == "t64"
        assert max(Counter(bench.trained).values()) == 1, "nothing is trained twice"


def of(journal: Journal, event: str) -> list[Record]:
    """Returns the records of an event."""
    return [r for r in journal.records if r.event == event]


CASES: Mapping[str, tuple[Errors, Errors, Rule, Collection[int], bool, str]] = {
    # by the search's seed, on fresh seeds, the rule, who fails there, is there a faster system, the answer
    "the fastest that is as good": (FLAT, FLAT, RULE, (), True, "t64"),
    "one seed was luck": ({**FLAT, 128: 0.1}, FLAT, RULE, (), True, "t64"),
    "all were luck": ({**FLAT, 128: 0.1}, {16: 0.2, 32: 0.4, 64: 0.4, 128: 0.4}, RULE, (), True, SYSTEM),
    "luck, and no faster system": (
        {**FLAT, 128: 0.1},
        {16: 0.2, 32: 0.4, 64: 0.4, 128: 0.4},
        RULE,
        (),
        False,
        "before",
    ),
    "nobody was good": ({16: 0.2, 32: 0.6, 64: 0.7, 128: 0.8}, {**FLAT}, RULE, (), True, SYSTEM),
    "one fails": (FLAT, FLAT, RULE, (64,), True, "t32"),
    "all fail": (FLAT, FLAT, RULE, (32, 64, 128), True, SYSTEM),
    "a loss within the tolerance": (
        {**FLAT, 128: 0.28},
        {**FLAT, 128: 0.28},
        Rule("error", "min", 0.1),
        (),
        True,
        "t128",
    ),
    "at_least is easier": (
        {**FLAT, 128: 0.25},
        {**FLAT, 128: 0.25},
        Rule("error", "min", at_least=0.3),
        (),
        True,
        "t128",
    ),
    "at_least is harder": (
        {16: 0.2, 32: 0.1, 64: 0.19, 128: 0.5},
        {16: 0.2, 32: 0.1, 64: 0.19, 128: 0.5},
        Rule("error", "min", at_least=0.15),
        *((), True, "t32"),
    ),
    "at_least is 0": (
        {16: 0.2, 32: -0.1, 64: 0.1, 128: 0.5},
        {16: 0.2, 32: -0.1, 64: 0.1, 128: 0.5},
        Rule("error", "min", at_least=0.0),
        *((), True, "t32"),
    ),
    "the best quality": (
        {16: 0.2, 32: 0.1, 64: 0.15, 128: 0.5},
        {16: 0.2, 32: 0.1, 64: 0.15, 128: 0.5},
        Rule("error", "min", goal="quality"),
        *((), True, "t32"),
    ),
    "below the baseline": (
        {**FLAT, 128: 0.25},
        {**FLAT, 128: 0.25},
        Rule("error", "min", 0.1, Baseline("mean", 0.22)),
        *((), True, "t64"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_answer_is_right_and_all_had_the_same_seeds(tmp_path: Path, case: str) -> None:
    by_one, fresh, rule, broken, system, answer = CASES[case]
    journal, bench = searched(tmp_path, by_one), Bench(fresh, broken)
    found = settled(journal, bench, rule, system=system)
    assert found.name == answer
    assert per_s(found.config) >= per_s(TODAY)
    assert max(Counter(bench.trained).values(), default=1) == 1, "nothing is trained twice"
    seeds: dict[str, list[int]] = {}
    for record in of(journal, "confirmed"):
        seeds.setdefault(record["name"], []).append(record["seed"])
    assert all(own == list(range(1, len(own) + 1)) for own in seeds.values())
    if rule.at_least is None:
        assert max(map(len, seeds.values())) == len(seeds["before"])
    else:
        assert "before" not in seeds
    if answer not in (SYSTEM, "before"):
        assert len(seeds[answer]) >= LEAST_SEEDS
        assert found.config["batch_size"] == int(answer[1:])
    told = {r["name"] for r in of(journal, "window")}
    assert {"before", "after"} <= told
    again = Bench({})
    assert settled(journal, again, rule, system=system).name == answer
    assert again.trained == []


@pytest.mark.parametrize("case", ["one seed was luck", "one fails", "all were luck", "the best quality"])
def test_broken_off_anywhere_it_goes_on_to_the_same_answer(tmp_path: Path, case: str) -> None:
    by_one, fresh, rule, broken, system, answer = CASES[case]
    journal, bench = searched(tmp_path, by_one), Bench(fresh, broken)
    settled(journal, bench, rule, system=system)
    records = list(journal.records)
    for kept in range(len(by_one) + 1, len(records), 3):
        folder = tmp_path / str(kept)
        folder.mkdir()
        cut, rest = Journal.open(folder / "trials.jsonl", create=True), Bench(fresh, broken)
        for record in records[:kept]:
            cut.append(EVENTS[record.event], **record.fields)
        done = sum(r.event == "confirmed" for r in records[:kept])
        assert settled(cut, rest, rule, system=system).name == answer
        assert not set(rest.trained) & set(bench.trained[:done]), "what was measured is not measured again"
        assert len(of(cut, "window")) == len(of(journal, "window"))
        cut.close()


@settings(deadline=None, max_examples=25)
@given(st.floats(0, 150), st.dictionaries(st.sampled_from([32, 64, 128]), st.floats(0.1, 0.3), min_size=1))
def test_time_is_kept_and_the_windows_have_theirs(
    tmp_path_factory: pytest.TempPathFactory, limit_s: float, errors: dict[int, float]
) -> None:
    whole = {16: 0.2, **errors}
    journal, bench = searched(tmp_path_factory.mktemp("limited"), whole), Bench(whole)
    found = settled(journal, bench, limit_s=limit_s)
    assert bench.now <= limit_s + 2.0, "all but a round of windows"
    rounds = {r["round"] for r in of(journal, "window")}
    assert not bench.trained or len(rounds) >= LEAST_ROUNDS
    confirmed = {(r["name"], r["seed"]) for r in of(journal, "confirmed")}
    shared = {name for name, seed in confirmed if name != "before" and ("before", seed) in confirmed}
    if shared and found.name not in (SYSTEM, "before"):
        assert found.name in shared, "one that was trained beside the reference comes first"
    journal.close()


TURNS: Mapping[str, tuple[Callable[[Mapping[str, Scalar]], float], Rule, str, int]] = {
    "as probed": (per_s, RULE, "t64", 2),
    "the reference is the fastest": (lambda own: 200.0 - per_s(own), RULE, "before", 0),
    "today's system knobs are faster": (
        lambda own: float(own["batch_size"]) / (1 + int(own["num_workers"])),
        RULE,
        "t64",
        0,
    ),
    "the best quality is not raced": (lambda own: 200.0 - per_s(own), Rule("error", "min", goal="quality"), "t64", 2),
}


@pytest.mark.parametrize("case", TURNS)
def test_windows_in_turns_tell_who_is_fastest(tmp_path: Path, case: str) -> None:
    turns, rule, answer, workers = TURNS[case]
    errors = {16: 0.2, 32: 0.19, 64: 0.15, 128: 0.5}
    found = settled(searched(tmp_path, errors), Bench(errors, turns=turns), rule)
    assert (found.name, found.config["num_workers"]) == (answer, workers)


def test_those_nearly_as_fast_take_turns(tmp_path: Path) -> None:
    def near(knobs: Mapping[str, Scalar]) -> float:
        return per_s(knobs) if knobs["batch_size"] == 16 else 100.0 + float(knobs["batch_size"]) / 16

    journal, errors = searched(tmp_path), {16: 0.2, 32: 0.5, 64: 0.19, 128: 0.19}
    bench = Bench(errors, turns=lambda own: 300.0 if own["batch_size"] == 64 else near(own), alone=near)
    found = settled(journal, bench, per_s=near)
    assert found.race.admitted == ["t128", "t64"]
    assert found.name == "t64"


def test_best_qualities_are_told_beside_the_pick(tmp_path: Path) -> None:
    errors = {16: 0.2, 32: 0.1, 64: 0.19, 128: 0.5}
    found = settled(searched(tmp_path, errors), Bench(errors))
    assert (found.name, found.best_at_speed, found.most_accurate) == ("t64", "t32", "t32")


def test_stand_in_of_a_reference_that_does_not_train_is_one(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    for size, error in ((32, 0.2), (64, 0.5)):
        config = {"batch_size": size, "num_workers": 2}
        own = {"outcome": "ok", "values": {"error": error}, "samples_per_s": per_s(config)}
        journal.append(TrialRecord, trial=f"t{size}", config=config, **own)
    stand_in = {"batch_size": 32, "num_workers": 2}
    bench = Bench({32: 0.2, 64: 0.5})
    found = settled(journal, bench, system=False, reference_name="t32", reference=stand_in)
    assert found.name == "t32"
    assert max(Counter(bench.trained).values()) == 1
    journal.close()


@pytest.mark.parametrize(("more", "is_trained"), [({}, False), ({"search": {"max_time": 480.0}}, True)])
def test_training_that_the_time_cut_is_made_up_for(tmp_path: Path, more: dict[str, Any], is_trained: bool) -> None:
    journal = searched(tmp_path)
    cut = settled(journal, Bench(FLAT, broken=FLAT, outcome="cut"))
    assert cut.name == "t64", "what was cut tells nothing of anybody, and the search decides"
    assert not cut.race.trained
    journal.append(ResumeRecord, **more)
    again = Bench(FLAT)
    found = settled(journal, again)
    assert found.name == "t64"
    assert (len({seed for size, _, seed in again.trained if size == 64}) >= LEAST_SEEDS) == is_trained


# -- windows -----------------------------------------------------------------------------------------------------------


def test_every_round_has_a_window_of_each_and_the_order_turns(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    measure_windows(FormulaProfiler(), journal, NAMED, BUDGET, ignore, endless)
    order = [(r["round"], r["name"]) for r in journal.records]
    assert len(order) == 15
    firsts = [next(name for number, name in order if number == n) for n in range(5)]
    assert firsts == ["before", "after", "best", "before", "after"]
    assert (median_rate(journal.run, "best") or 0) > (median_rate(journal.run, "before") or 0)


def test_what_fails_in_its_first_window_is_left_out_and_said(tmp_path: Path) -> None:
    class Failing(FormulaProfiler):
        def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> Timed:
            if knobs == NAMED["after"]:
                return Timed(outcome="oom", message="out of memory", wall_s=1.0)
            return super().window(knobs, window_s, seed)

    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    measure_windows(Failing(), journal, NAMED, BUDGET, ignore, endless)
    assert {r["name"] for r in of(journal, "window")} == {"before", "best"}
    assert [r["text"] for r in of(journal, "note")] == ["after is not measured in turns: oom: out of memory"]


def test_resumed_windows_are_only_those_missing(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    journal = Journal.open(path, create=True)
    measure_windows(FormulaProfiler(), journal, {"before": NAMED["before"]}, BUDGET, ignore, endless)
    journal.close()
    again, profiler = Journal.open(path), FormulaProfiler()
    measure_windows(profiler, again, NAMED, BUDGET, ignore, endless)
    assert len(of(again, "window")) == 15
    assert not any(knobs == NAMED["before"] for knobs in profiler.probed)


def test_new_pick_takes_turns_with_the_others_again(tmp_path: Path) -> None:
    journal, profiler = Journal.open(tmp_path / "trials.jsonl", create=True), FormulaProfiler()
    measure_windows(profiler, journal, NAMED, BUDGET, ignore, endless)
    journal.append(ResumeRecord, search={"trials": 20})
    measure_windows(profiler, journal, NAMED, BUDGET, ignore, endless)
    assert len(of(journal, "window")) == 15, "the pick is the same"
    measure_windows(profiler, journal, {**NAMED, "best": {"micro_batch_size": 16}}, BUDGET, ignore, endless)
    later = journal.records[16:]
    assert [(r["round"], r["name"]) for r in later] == [(r["round"], r["name"]) for r in journal.records[:15]]
    assert median_rate(journal.run, "best") == later[2]["samples_per_s"]


def test_with_little_time_there_are_fewer_windows(tmp_path: Path) -> None:
    clock = itertools.count(0, 2)  # every look at the clock takes two seconds
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    measure_windows(FormulaProfiler(), journal, NAMED, BUDGET, ignore, lambda: 18.0 - next(clock))
    assert 1 <= len({r["round"] for r in of(journal, "window")}) < BUDGET.windows


class Slow(FormulaProfiler):
    """A profiler on which a batch of `before` takes 40 s, one of any other 1 s, and a window three of them."""

    now = 0.0

    def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> Timed:
        """Returns the speed, and lets the time pass."""
        took_s = max(window_s, 3 * (40.0 if knobs["micro_batch_size"] == 4 else 1.0))
        self.now += took_s
        return replace(super().window(knobs, window_s, seed), wall_s=took_s)


def test_who_is_too_slow_takes_no_windows_from_the_others(tmp_path: Path) -> None:
    journal, profiler = Journal.open(tmp_path / "trials.jsonl", create=True), Slow()
    speed = {"samples_per_s": 32 / 40, "micro_step_s": 5.0, "optimizer_step_s": 0.0}
    knobs = NAMED["before"]
    journal.append(ProbeRecord, name="before", config={**knobs, "batch_size": 32}, outcome="ok", **speed)
    named = {**NAMED, "before": {**knobs, "batch_size": 32}}
    measure_windows(profiler, journal, named, BUDGET, ignore, lambda: 70.0 - profiler.now)
    assert {r["name"] for r in of(journal, "window")} == {"after", "best"}
    assert {r["round"] for r in of(journal, "window")} == set(range(5))
    (said,) = [r["text"] for r in of(journal, "note")]
    assert said.startswith("too little time is left to measure before")
    measure_windows(profiler, journal, named, BUDGET, ignore, lambda: 1e6 - profiler.now)
    assert {r["round"] for r in of(journal, "window") if r["name"] == "before"} == set(range(5))


def test_clock_is_looked_at_after_each_first_window(tmp_path: Path) -> None:
    journal, profiler = Journal.open(tmp_path / "trials.jsonl", create=True), Slow()
    measure_windows(profiler, journal, NAMED, BUDGET, ignore, lambda: 130.0 - profiler.now)
    assert profiler.probed == [NAMED["before"]], "no time is left for a round of it"
