"""The confirm stage: the answer is right, on the same seeds for all, within its time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from tuning.journal.events import EVENTS, ProbeRecord, ResumeRecord, RungRecord, StartRecord, Timed, TrialRecord
from tuning.journal.records import Journal
from tuning.search.confirm import (
    LEAST_ROUNDS,
    MORE,
    Confirmed,
    ConfirmTerms,
    confirm,
    measure_windows,
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
        """Returns the error of batch size and learning rate, with noise that a seed has for all, and of its own."""
        size = int(knobs["batch_size"])
        assert MORE * samples / self.per_s(knobs) <= left_s, "what cannot end is not begun"
        assert milestones[-1] == samples
        self.now += samples / self.per_s(knobs)
        self.trained.append((size, int(knobs["num_workers"]), seed))
        noise = 0.01 * math.sin(seed) + 0.001 * math.sin(seed * size)
        found = TrialState(
            outcome="ok",
            values={"error": self.errors[size] + float(knobs.get("learning_rate", 0.0)) + noise},
            samples=samples,
            measured_samples_per_s=self.per_s(knobs),
            train_s=samples / self.per_s(knobs),
            wall_s=samples / self.per_s(knobs),
            peak_allocated_bytes=1,
        )
        return replace(found, outcome=self.outcome, values={}) if size in self.broken else found

    def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> Timed:
        """Returns the speed in turns, which drifts from round to round alike for all."""
        self.now += max(window_s, 0.1)
        rate = self.turns(knobs) * (1 - 0.05 * seed)
        took_s = max(window_s, 0.1)
        return Timed(outcome="ok", samples_per_s=rate, wall_s=took_s, spans={"wall_s": took_s})


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
def test_reference_is_trained_first_on_seeds_of_confirming(
    tmp_path: Path, broken: tuple[int, ...], trained: list[int]
) -> None:
    journal, bench = Journal.open(tmp_path / "trials.jsonl", create=True), Bench(FLAT, broken)
    for most in (2, 3):  # what was broken off goes on
        train_reference(bench, journal, terms_of(bench), ignore, most)
    assert [r.seed for r in journal.run.confirmed if r.name == "before"] == trained
    for record in searched(tmp_path / "other").records:
        journal.append(EVENTS[record.event], **record.fields)
    if not broken:
        assert settled(journal, bench).name == "t64"
        assert max(Counter(bench.trained).values()) == 1, "nothing is trained twice"


@dataclass(frozen=True)
class Case:
    """The answer and its workers, if it is a trial; errors by the search's seed and on fresh ones (else the same).

    `broken` fail there; `turns` are speeds in turns; `system`: whether the reference has faster system knobs.
    """

    answer: str
    by_one: Errors = field(default_factory=lambda: FLAT)
    fresh: Errors | None = None
    rule: Rule = RULE
    broken: Collection[int] = ()
    system: bool = True
    turns: Callable[[Mapping[str, Scalar]], float] = per_s
    workers: int = 2
    window_s: float = 0.1


def against(knobs: Mapping[str, Scalar]) -> float:
    """Returns a speed in turns that falls as the speed alone grows."""
    return 200.0 - per_s(knobs)


def without_workers(knobs: Mapping[str, Scalar]) -> float:
    """Returns a speed in turns that workers halve."""
    return float(knobs["batch_size"]) / (1 + int(knobs["num_workers"]))


LUCKY, WORSE = {**FLAT, 128: 0.1}, {16: 0.2, 32: 0.4, 64: 0.4, 128: 0.4}
CASES = {
    "the fastest that is as good": Case("t64"),
    "one seed was luck": Case("t64", LUCKY, FLAT),
    "all were luck": Case(SYSTEM, LUCKY, WORSE),
    "luck, and no faster system": Case("before", LUCKY, WORSE, system=False),
    "nobody was good": Case(SYSTEM, {16: 0.2, 32: 0.6, 64: 0.7, 128: 0.8}, FLAT),
    "one fails": Case("t32", broken=(64,)),
    "all fail": Case(SYSTEM, broken=(32, 64, 128)),
    "a loss within the tolerance": Case("t128", {**FLAT, 128: 0.28}, rule=Rule("error", "min", 0.1)),
    "at_least is easier": Case("t128", {**FLAT, 128: 0.25}, rule=Rule("error", "min", at_least=0.3)),
    "at_least is harder": Case("t32", {**FLAT, 32: 0.1}, rule=Rule("error", "min", at_least=0.15)),
    "at_least is 0": Case("t32", {**FLAT, 32: -0.1}, rule=Rule("error", "min", at_least=0.0)),
    "the best quality": Case("t32", {**FLAT, 32: 0.1, 64: 0.15}, rule=Rule("error", "min", goal="quality")),
    "below the baseline": Case("t64", {**FLAT, 128: 0.25}, rule=Rule("error", "min", 0.1, Baseline("mean", 0.22))),
    "the reference is the fastest in turns": Case("before", turns=against, window_s=60.0),
    "short windows do not overrule trainings": Case("t64", turns=against),
    "today's system knobs are faster in turns": Case("t64", turns=without_workers, workers=0, window_s=60.0),
    "the best quality is not raced": Case(
        "t64", {**FLAT, 64: 0.15}, rule=Rule("error", "min", goal="quality"), turns=against
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_answer_is_right_and_all_had_the_same_seeds(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    journal, bench = searched(tmp_path, case.by_one), Bench(case.fresh or case.by_one, case.broken, case.turns)
    budget = BUDGET.model_copy(update={"window_s": case.window_s})
    found = settled(journal, bench, case.rule, system=case.system, budget=budget)
    assert found.name == case.answer
    assert per_s(found.config) >= per_s(TODAY)
    assert max(Counter(bench.trained).values(), default=1) == 1, "nothing is trained twice"
    seeds: dict[str, list[int]] = {}
    for record in journal.run.confirmed:
        seeds.setdefault(record.name, []).append(record.seed)
    assert all(own == list(range(1, len(own) + 1)) for own in seeds.values())
    if case.rule.at_least is None:
        assert max(map(len, seeds.values())) == len(seeds["before"])
    else:
        assert "before" not in seeds
    if case.answer not in (SYSTEM, "before"):
        assert len(seeds[case.answer]) >= LEAST_SEEDS
        assert (found.config["batch_size"], found.config["num_workers"]) == (int(case.answer[1:]), case.workers)
    assert {"before", "after"} <= {window.name for window in journal.run.windows}


@settings(max_examples=25)
@given(st.floats(0, 150), st.dictionaries(st.sampled_from([32, 64, 128]), st.floats(0.1, 0.3), min_size=1))
def test_time_is_kept_and_the_windows_have_theirs(
    tmp_path_factory: pytest.TempPathFactory, limit_s: float, errors: dict[int, float]
) -> None:
    whole = {16: 0.2, **errors}
    journal, bench = searched(tmp_path_factory.mktemp("limited"), whole), Bench(whole)
    found = settled(journal, bench, limit_s=limit_s)
    assert bench.now <= limit_s + 2.0, "all but a round of windows"
    assert not bench.trained or len({window.round for window in journal.run.windows}) >= LEAST_ROUNDS
    confirmed = {(r.name, r.seed) for r in journal.run.confirmed}
    shared = {name for name, seed in confirmed if name != "before" and ("before", seed) in confirmed}
    if shared and found.name not in (SYSTEM, "before"):
        assert found.name in shared, "one that was trained beside the reference comes first"
    journal.close()


def test_those_nearly_as_fast_take_turns(tmp_path: Path) -> None:
    def near(knobs: Mapping[str, Scalar]) -> float:
        return per_s(knobs) if knobs["batch_size"] == 16 else 100.0 + float(knobs["batch_size"]) / 16

    journal, errors = searched(tmp_path), {16: 0.2, 32: 0.5, 64: 0.19, 128: 0.19}
    bench = Bench(errors, turns=lambda own: 300.0 if own["batch_size"] == 64 else near(own), alone=near)
    found = settled(journal, bench, per_s=near)
    assert found.race.admitted == ["t128", "t64"]
    assert found.name == "t64"


def test_of_those_that_differ_in_the_learning_rate_the_best_is_picked(tmp_path: Path) -> None:
    journal = searched(tmp_path, {16: 0.2})
    for trial, rate in (("lucky", 0.05), ("good", 0.01)):
        config = {"batch_size": 64, "num_workers": 2, "learning_rate": rate}
        rest = {"outcome": "ok", "values": {"error": 0.1 + rate}, "samples_per_s": per_s(config)}
        journal.append(TrialRecord, trial=trial, config=config, **rest)
    luck = Bench({16: 0.2, 64: 0.1}, alone=lambda own: per_s(own) * (1.3 if own.get("learning_rate") == 0.05 else 1.0))
    assert settled(journal, luck).name == "good"


def test_reference_with_other_system_knobs_is_trained_however_few_the_seeds(tmp_path: Path) -> None:
    bench = Bench({16: 0.2, 32: 0.5, 64: 0.5, 128: 0.5})
    found = settled(searched(tmp_path, bench.errors), bench, seeds=(1,))
    assert found.name == SYSTEM
    assert (16, 2, 1) in bench.trained


@pytest.mark.parametrize(
    ("late_per_s", "picked", "system"), [(4.0, "before", False), (64.0, "t64", False), (4.0, "before", True)]
)
def test_pick_of_trainings_that_slow_down_is_by_whole_trainings(
    tmp_path: Path, late_per_s: float, picked: str, system: bool
) -> None:
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    for trial, config, late in (("t000", TODAY, 8.0), ("t64", {"batch_size": 64, "num_workers": 2}, late_per_s)):
        more = {"named": "before", "beside": True} if trial == "t000" else {}
        journal.append(StartRecord, trial=trial, config=config, **more)
        early, samples, values = 8 * per_s(config), SAMPLES, {"error": 0.2}
        journal.append(RungRecord, trial=trial, samples=32, values=values, measured_samples_per_s=early)
        whole = samples / (32 / early + (samples - 32) / late)
        rest = {"outcome": "ok", "values": values, "samples_per_s": per_s(config), "measured_samples_per_s": whole}
        journal.append(TrialRecord, trial=trial, config=config, samples=samples, **rest)
    cut = Bench(FLAT, broken=FLAT, outcome="cut")
    assert settled(journal, cut, system=system).name == picked
    journal.close()


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


def measured(
    journal: Journal, profiler: FormulaProfiler, left_s: Callable[[], float] = lambda: math.inf, **named: Any
) -> list[tuple[int, str]]:
    """Returns round and name of each window that is measured of these configurations, in order."""
    known = len(journal.run.all_windows)
    measure_windows(profiler, journal, {**NAMED, **named}, BUDGET, ignore, left_s)
    return [(window.round, window.name) for window in journal.run.all_windows[known:]]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty journal."""
    return Journal.open(tmp_path / "trials.jsonl", create=True)


def test_every_round_has_a_window_of_each_and_the_order_turns(journal: Journal) -> None:
    order = measured(journal, FormulaProfiler())
    assert len(order) == 15
    firsts = [next(name for number, name in order if number == n) for n in range(5)]
    assert firsts == ["before", "after", "best", "before", "after"]


def test_what_fails_in_its_first_window_is_left_out_and_said(journal: Journal) -> None:
    class Failing(FormulaProfiler):
        def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> Timed:
            if knobs == NAMED["after"]:
                return Timed(outcome="oom", message="out of memory", wall_s=1.0)
            return super().window(knobs, window_s, seed)

    assert {name for _, name in measured(journal, Failing())} == {"before", "best"}
    assert [note.text for note in journal.run.notes] == [
        "there are no alternating timings of after: oom: out of memory"
    ]


def test_new_pick_takes_turns_with_the_others_again(journal: Journal) -> None:
    profiler = FormulaProfiler()
    first = measured(journal, profiler)
    journal.append(ResumeRecord, search={"trials": 20})
    assert measured(journal, profiler) == [], "the pick is the same"
    assert measured(journal, profiler, best={"micro_batch_size": 16}) == first
    assert [w.config["micro_batch_size"] for w in journal.run.windows if w.name == "best"] == [16] * 5


class Slow(FormulaProfiler):
    """A profiler on which a batch of `before` takes 40 s, one of any other 1 s, and a window three of them."""

    now = 0.0

    def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> Timed:
        """Returns the speed, and lets the time pass."""
        took_s = max(window_s, 3 * (40.0 if knobs["micro_batch_size"] == 4 else 1.0))
        self.now += took_s
        return replace(super().window(knobs, window_s, seed), wall_s=took_s)


def test_who_is_too_slow_takes_no_windows_from_the_others(journal: Journal) -> None:
    profiler, before = Slow(), {**NAMED["before"], "batch_size": 32}
    speed = {"samples_per_s": 32 / 40, "micro_step_s": 5.0, "optimizer_step_s": 0.0}
    journal.append(ProbeRecord, name="before", config=before, outcome="ok", **speed)
    order = measured(journal, profiler, lambda: 70.0 - profiler.now, before=before)
    assert set(order) == {(number, name) for number in range(5) for name in ("after", "best")}
    (note,) = journal.run.notes
    assert note.text.startswith("too little time is left for alternating timings of before")
    order = measured(journal, profiler, lambda: 1e6 - profiler.now, before=before)
    assert {(number, "before") for number in range(5)} <= set(order)
