"""The confirm stage: turns, no repeats after a resume, and the pick among what ran to its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FormulaProfiler
from trainables.knobs import Scalar
from tuning.config.schema import ConfirmSection
from tuning.journal.records import Journal
from tuning.search.confirm import Confirmed, ConfirmTerms, affordable, confirm, measure_windows, median_rate
from tuning.search.rule import Baseline, Rule
from tuning.search.selection import choose

BUDGET = ConfirmSection(windows=5, window_s=0.1, seeds=3, top=3)
RULE = Rule("error", "min", 0.01)
NAMED = {"before": {"micro_batch_size": 4}, "after": {"micro_batch_size": 8}, "best": {"micro_batch_size": 32}}


def ignore(record: object) -> None:
    """Hears nothing."""


def endless() -> float:
    """Returns the seconds left where there is no limit."""
    return math.inf


def test_every_round_has_one_window_of_each_and_the_order_turns(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    measure_windows(FormulaProfiler(), journal, NAMED, BUDGET, ignore, endless)
    order = [(r["round"], r["name"]) for r in journal.records]
    assert len(order) == 15
    firsts = [next(name for number, name in order if number == n) for n in range(5)]
    assert firsts == ["before", "after", "best", "before", "after"]
    assert (median_rate(journal.records, "best") or 0) > (median_rate(journal.records, "before") or 0)


def test_what_fails_in_its_first_window_is_left_out_of_the_others_and_said(tmp_path: Path) -> None:
    class Failing(FormulaProfiler):
        def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> dict[str, Any]:
            if knobs == NAMED["after"]:
                return {"samples_per_s": None, "outcome": "oom", "message": "out of memory", "wall_s": 1.0}
            return super().window(knobs, window_s, seed)

    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    measure_windows(Failing(), journal, NAMED, BUDGET, ignore, endless)
    assert {r["name"] for r in journal.records if r.event == "window"} == {"before", "best"}
    (note,) = [r["text"] for r in journal.records if r.event == "note"]
    assert note == "after is not measured in turns: oom: out of memory"


def test_a_resumed_stage_measures_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    journal = Journal.open(path, create=True)
    measure_windows(FormulaProfiler(), journal, {"before": NAMED["before"]}, BUDGET, ignore, endless)
    journal.close()
    again, profiler = Journal.open(path), FormulaProfiler()
    measure_windows(profiler, again, NAMED, BUDGET, ignore, endless)
    assert sum(1 for r in again.records if r.event == "window") == 15
    assert not any(knobs == NAMED["before"] for knobs in profiler.probed)


def test_the_pick_is_among_trials_that_ran_to_their_end(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    for trial, outcome, error, rate in (("a", "ok", 0.20, 50.0), ("b", "stopped", 0.0, 99.0), ("c", "ok", 0.205, 60.0)):
        values = {"error": error}
        journal.append("trial", trial=trial, config={}, outcome=outcome, values=values, samples_per_s=rate)
    picked = choose(journal.records, RULE)
    assert picked is not None
    assert (picked.best, picked.most_accurate) == ("c", "a")
    assert choose(journal.records[1:2], RULE) is None


class SeededBench(FormulaProfiler):
    """A profiler whose training of a learning rate has a quality of its own, and a noise that the seed decides."""

    def __init__(self, errors: dict[float, float], broken: float | None = None) -> None:
        super().__init__()
        self.errors, self.broken = errors, broken
        self.trained: list[tuple[float, int]] = []

    def train(
        self, knobs: Mapping[str, Scalar], samples: int, milestones: Sequence[int], seed: int, left_s: float = math.inf
    ) -> dict[str, Any]:
        """Returns the error of the learning rate, a little more for odd seeds."""
        rate = float(knobs["learning_rate"])
        self.trained.append((rate, seed))
        found = {**super().train(knobs, samples, milestones, seed), "train_s": 1.0}
        if rate == self.broken:
            return {**found, "outcome": "diverged", "values": {}}
        return {**found, "values": {"error": self.errors[rate] + 0.001 * (seed % 2)}}


SEARCHED = {"a": (0.1, 0.19, 10.0), "b": (0.2, 0.209, 70.0), "c": (0.3, 0.40, 90.0), "d": (0.4, 0.25, 5.0)}
"""Trials by id: learning rate, error with the search's seed, samples a second. By one seed `a` is picked."""


def test_before_is_trained_on_the_picks_fresh_seeds_the_first_before_the_picks_others(tmp_path: Path) -> None:
    today = {"learning_rate": 0.4, "micro_batch_size": 5}
    for left_s, own, theirs in ((1000.0, [1, 2, 3], [1, 2, 3]), (40.0, [1, 2], [1]), (18.0, [1], [])):
        journal, bench = searched(_made(tmp_path / f"{left_s:g}")), SeededBench({0.1: 0.191, 0.4: 0.25})
        journal.append("trial_start", trial="d", named="before", beside=True)

        def left(bench: SeededBench = bench, left_s: float = left_s) -> float:
            return left_s - sum(11.5 if rate == 0.4 else 5.75 for rate, _ in bench.trained)

        terms = ConfirmTerms(RULE, (1, 2, 3), BUDGET.model_copy(update={"top": 1}), 50, left)
        found = confirm(bench, journal, {"before": today}, terms, ignore)
        again = [(r["name"], r["seed"]) for r in journal.records if r.event == "confirmed"]
        assert sorted(again) == [*(("a", seed) for seed in own), *(("before", seed) for seed in theirs)]
        assert found.best == "a", "it is measured beside, and changes no pick"
        assert not theirs or again.index(("before", 1)) == 1
    journal, bench = searched(_made(tmp_path / "failing")), SeededBench({0.2: 0.2, 0.4: 0.25}, broken=0.1)
    journal.append("trial_start", trial="d", named="before", beside=True)
    confirm(bench, journal, {"before": today}, ConfirmTerms(RULE, (1, 2, 3), terms.budget, 50, lambda: 60.0), ignore)
    assert [rate for rate, _ in bench.trained][:2] == [0.1, 0.2], "where the pick fails, the next comes before it"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def searched(folder: Path, trials: Mapping[str, tuple[float, float, float]] = SEARCHED) -> Journal:
    """A journal with the trials of a search."""
    journal = Journal.open(folder / "trials.jsonl", create=True)
    for trial, (learning_rate, error, rate) in trials.items():
        config, values = {"learning_rate": learning_rate, "micro_batch_size": int(rate)}, {"error": error}
        journal.append("trial", trial=trial, config=config, outcome="ok", values=values, samples_per_s=rate)
    return journal


def settled(
    journal: Journal, profiler: FormulaProfiler, left_s: float = 1000.0, budget: ConfirmSection = BUDGET
) -> Confirmed:
    terms = ConfirmTerms(RULE, (1, 2, 3), budget, samples=100, left_s=lambda: left_s)
    return confirm(profiler, journal, {"before": NAMED["before"]}, terms, ignore)


def test_the_challenger_that_one_seed_shut_out_is_trained_on_the_same_seeds_in_turn_and_takes_the_place(
    tmp_path: Path,
) -> None:
    journal, profiler = searched(tmp_path), SeededBench({0.1: 0.215, 0.2: 0.221, 0.3: 0.4})
    found = settled(journal, profiler)
    assert found.selection is not None
    assert (found.first, found.best, found.selection.bar_of) == ("a", "b", "a")
    assert profiler.trained == [(rate, seed) for seed in (1, 2, 3) for rate in (0.1, 0.2)]
    assert [(r["trial"], r["decision"]) for r in journal.records if r.event == "rival"] == [("b", "confirm")]
    again = SeededBench({})
    assert settled(journal, again) == found
    assert again.trained == []


class Turned(SeededBench):
    """By windows `a` is the fastest, whatever was measured minutes ago."""

    def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> dict[str, Any]:
        """Returns a speed that falls with the learning rate."""
        return {**super().window(knobs, window_s, seed), "samples_per_s": 1 / float(knobs.get("learning_rate", 1))}


def test_who_is_fastest_among_those_admitted_is_told_by_windows_in_the_same_rounds(tmp_path: Path) -> None:
    journal = searched(tmp_path)
    found = settled(journal, Turned({0.1: 0.215, 0.2: 0.221}))
    assert found.best == "a"
    windows = [(r["round"], r["name"]) for r in journal.records if r.event == "window"]
    assert {name for _, name in windows} == {"a", "b", "before"}
    assert windows[2] == (0, "before"), "what may be slow is last"
    assert all(sum(number == n for n, _ in windows) == 3 for number in range(5)), "one of each in every round"


@pytest.mark.parametrize("kept", range(1, 6))
def test_cut_off_anywhere_it_goes_on_with_what_is_missing(tmp_path: Path, kept: int) -> None:
    journal, profiler = searched(tmp_path), SeededBench({0.1: 0.215, 0.2: 0.221})
    whole = settled(journal, profiler)
    (tmp_path / "again").mkdir()
    cut = Journal.open(tmp_path / "again" / "trials.jsonl", create=True)
    for record in journal.records:
        if sum(1 for r in cut.records if r.event == "confirmed") < kept:
            cut.append(record.event, **record.fields)
    rest = SeededBench({0.1: 0.215, 0.2: 0.221})
    assert settled(cut, rest) == whole
    assert profiler.trained[kept:] == rest.trained


def test_a_pick_that_fails_on_a_fresh_seed_is_no_pick(tmp_path: Path) -> None:
    journal = searched(tmp_path)
    budget = BUDGET.model_copy(update={"top": 1})
    found = settled(journal, SeededBench({0.2: 0.22}, broken=0.1), budget=budget)
    assert (found.first, found.best) == ("a", "b")
    assert found.selection is not None
    assert list(found.selection.means) == ["b"]


@pytest.mark.parametrize(
    ("errors", "best", "repeats", "trained"),
    [
        ({0.1: 0.60, 0.4: 0.26}, "d", True, [0.1, 0.4]),  # the next that could be it holds
        ({0.1: 0.26, 0.4: 0.29}, "a", False, [0.1, 0.4]),  # it holds, and is worse
        ({0.1: 0.60, 0.4: 0.70, 0.3: 0.9}, "a", False, [0.1, 0.4, 0.3]),  # nothing holds
        ({0.1: 0.31, 0.4: 0.33}, "a", False, [0.1, 0.4]),  # nothing holds, and what is left was worse already
    ],
)
def test_where_the_pick_collapses_on_fresh_seeds_the_next_is_trained_that_may_take_its_place(
    tmp_path: Path, errors: dict[float, float], best: str, repeats: bool, trained: list[float]
) -> None:
    journal, profiler = Journal.open(tmp_path / "trials.jsonl", create=True), SeededBench(errors)
    for trial in (t for t in searched(_made(tmp_path / "all")).records if t["trial"] != "b"):
        journal.append(trial.event, **trial.fields)
    budget = BUDGET.model_copy(update={"top": 1})
    found = settled(journal, profiler, budget=budget)
    assert (found.best, found.repeats) == (best, repeats)
    assert list(dict.fromkeys(rate for rate, _ in profiler.trained)) == trained
    assert profiler.trained[0] == (0.1, 1)
    assert notes(journal)[:1] == ["a came to much less on fresh seeds than in the search: d is next"]
    assert {r["config"].get("learning_rate") for r in journal.records if r.event == "window"} == {
        None,
        SEARCHED[best][0],
    }
    again = SeededBench({})
    assert settled(journal, again, budget=budget) == found
    assert again.trained == []


@pytest.mark.parametrize(
    ("trials", "errors", "best"),
    [
        ({"a": (0.1, 0.10, 10.0), "b": (0.2, 0.19, 70.0)}, {0.1: 0.215, 0.2: 0.21}, "b"),
        (  # within the tolerance of b alone d is faster, and within that of the collapsed one there is b
            {"a": (0.1, 0.10, 70.0), "b": (0.3, 0.19, 10.0), "d": (0.4, 0.195, 50.0)},
            {0.1: 0.20, 0.3: 0.209, 0.4: 0.2185},
            "b",
        ),
        ({"a": (0.1, 0.10, 10.0), "b": (0.2, 0.15, 70.0)}, {0.1: 0.215, 0.2: 0.21}, "a"),  # both collapsed
    ],
)
def test_who_collapsed_takes_no_turns_while_a_steady_one_is_admitted(
    tmp_path: Path, trials: dict[str, tuple[float, float, float]], errors: dict[float, float], best: str
) -> None:
    journal = searched(tmp_path, trials)
    found = settled(journal, Turned(errors))
    assert (found.best, found.repeats) == (best, best != "a")
    assert found.selection is not None
    assert found.selection.best == best
    assert settled(journal, Turned({})) == found


def notes(journal: Journal) -> list[str]:
    """Returns what the study was told in words."""
    return [str(r["text"]) for r in journal.records if r.event == "note"]


BELOW = {"a": (0.1, 0.224, 69.0), "b": (0.2, 0.235, 103.0), "c": (0.3, 0.216, 18.0), "d": (0.4, 0.213, 0.05)}
"""As in temporal: a baseline of 0.225, than which `a` is a little better by one seed; `d` takes too long to confirm."""


def above_the_baseline(
    folder: Path, trials: Mapping[str, tuple[float, float, float]], left_s: Callable[[int], float]
) -> tuple[Confirmed, list[tuple[float, int]]]:
    """Returns what is confirmed where neither `a` nor `b` is better than the baseline on fresh seeds, and trainings.

    `left_s` returns the seconds left by how many trainings there were.
    """
    journal, profiler = searched(folder, trials), SeededBench({0.1: 0.236, 0.2: 0.234, 0.3: 0.215, 0.5: 0.236})
    rule = Rule("error", "min", 0.03, Baseline("last label", 0.225))
    terms = ConfirmTerms(rule, (1, 2, 3), BUDGET, samples=100, left_s=lambda: left_s(len(profiler.trained)))
    return confirm(profiler, journal, {"before": NAMED["before"]}, terms, ignore), profiler.trained


@pytest.mark.parametrize("later_s", [1000.0, 20.0])  # the second for fewer seeds than the others were trained on
def test_one_below_the_baseline_is_no_pick_while_one_above_it_is_left_to_train(tmp_path: Path, later_s: float) -> None:
    found, trained = above_the_baseline(tmp_path, BELOW, lambda count: 1000.0 if count < 6 else later_s)
    assert {rate for rate, _ in trained[:6]} == {0.1, 0.2}
    assert {rate for rate, _ in trained[6:]} == {0.3}
    assert (len(trained) == 9) == (later_s == 1000.0)
    written = (tmp_path / "trials.jsonl").read_text()
    assert "is no better than the baseline last label (0.225) on fresh seeds: c is next" in written
    assert (found.first, found.best, found.repeats) == ("a", "c", True)


def test_nothing_more_is_trained_where_no_other_was_better_than_the_baseline(tmp_path: Path) -> None:
    trials = {**{trial: BELOW[trial] for trial in "ab"}, "e": (0.5, 0.236, 60.0)}
    found, trained = above_the_baseline(tmp_path, {**trials, "d": (0.4, 0.226, 0.05)}, lambda _: 1000.0)
    assert {rate for rate, _ in trained} == {0.1, 0.2, 0.5}
    assert (found.first, found.best) == ("a", "b")


def test_a_resumed_study_trains_no_more_than_one_that_was_not_cut_off(tmp_path: Path) -> None:
    trials = {**{trial: BELOW[trial] for trial in "ab"}, "e": (0.5, 0.226, 60.0)}
    rule, budget = Rule("error", "min", 0.03, Baseline("last label", 0.225)), BUDGET.model_copy(update={"top": 2})
    terms = ConfirmTerms(rule, (1, 2, 3), budget, samples=100, left_s=lambda: 1000.0)
    journal, profiler = searched(tmp_path, trials), SeededBench({0.1: 0.236, 0.2: 0.234, 0.5: 0.215})
    found = confirm(profiler, journal, {"before": NAMED["before"]}, terms, ignore)
    count = len(profiler.trained)
    assert confirm(profiler, journal, {"before": NAMED["before"]}, terms, ignore) == found
    assert len(profiler.trained) == count


def test_a_collapse_with_no_time_left_stays_the_pick_and_says_so(tmp_path: Path) -> None:
    journal, profiler = searched(tmp_path), SeededBench({0.1: 0.60, 0.2: 0.21})
    budget, seeds = BUDGET.model_copy(update={"top": 1, "seeds": 1}), (1,)
    terms = ConfirmTerms(RULE, seeds, budget, samples=100, left_s=lambda: 0.0 if profiler.trained else 100.0)
    found = confirm(profiler, journal, {"before": NAMED["before"]}, terms, ignore)
    assert (found.best, found.repeats, profiler.trained) == ("a", False, [(0.1, 1)])


def test_what_failed_when_it_was_trained_again_is_no_pick_where_no_time_is_left_for_the_next(tmp_path: Path) -> None:
    journal, profiler = searched(tmp_path), SeededBench({}, broken=0.1)
    budget, seeds = BUDGET.model_copy(update={"top": 1, "seeds": 1}), (1,)
    terms = ConfirmTerms(RULE, seeds, budget, samples=100, left_s=lambda: 0.0 if profiler.trained else 100.0)
    found = confirm(profiler, journal, {"before": NAMED["before"]}, terms, ignore)
    assert (found.first, found.selection, profiler.trained) == ("a", None, [(0.1, 1)])
    assert found.best == "b"


def test_with_no_time_left_nothing_is_trained_or_measured_and_challengers_are_named(tmp_path: Path) -> None:
    journal, profiler = searched(tmp_path), SeededBench({0.1: 0.215, 0.2: 0.221})
    found = settled(journal, profiler, left_s=0.0)
    assert (found.best, found.selection) == ("a", None)
    assert profiler.trained == []
    assert [(r["trial"], r["decision"]) for r in journal.records if r.event == "rival"] == [("b", "too long")]
    assert not any(r.event == "window" for r in journal.records)


def test_with_little_time_left_the_windows_have_it_and_are_shorter(tmp_path: Path) -> None:
    journal, profiler = searched(tmp_path), SeededBench({0.1: 0.215})
    clock = iter(range(0, 1000, 2))  # every look at the clock takes two seconds
    terms = ConfirmTerms(RULE, (1, 2, 3), BUDGET, samples=100, left_s=lambda: 14.0 - next(clock))
    found = confirm(profiler, journal, {"before": NAMED["before"]}, terms, ignore)
    assert (found.best, profiler.trained) == ("a", [])
    rounds = {r["round"] for r in journal.records if r.event == "window"}
    assert 1 <= len(rounds) < BUDGET.windows


def test_a_training_that_the_time_cut_says_nothing_of_the_pick(tmp_path: Path) -> None:
    class Cut(SeededBench):
        """Every training after the first is cut."""

        def train(self, knobs: Mapping[str, Scalar], *rest: Any) -> dict[str, Any]:
            found = super().train(knobs, *rest)
            return found if len(self.trained) == 1 else {**found, "outcome": "cut", "values": {}}

    journal = searched(tmp_path)
    found = settled(journal, Cut({0.1: 0.215}), budget=BUDGET.model_copy(update={"top": 1}))
    assert found.best == "a"
    assert found.selection is not None
    assert found.selection.seeds == (1,)


@pytest.mark.parametrize(("more", "seeds"), [({}, ()), ({"search": {"max_time": 480.0}}, (1, 2, 3))])
def test_a_training_that_the_time_cut_is_made_up_for_once_there_is_more(
    tmp_path: Path, more: dict[str, Any], seeds: tuple[int, ...]
) -> None:
    class Cut(SeededBench):
        """Every training is cut."""

        def train(self, knobs: Mapping[str, Scalar], *rest: Any) -> dict[str, Any]:
            return {**super().train(knobs, *rest), "outcome": "cut", "values": {}}

    journal, budget = searched(tmp_path), BUDGET.model_copy(update={"top": 1})
    assert settled(journal, Cut({0.1: 0.2}), budget=budget).selection is None
    journal.append("resume", **more)
    again = SeededBench({0.1: 0.2})
    found = settled(journal, again, budget=budget).selection
    assert [seed for _, seed in again.trained] == list(seeds)
    assert (() if found is None else found.seeds) == seeds


@pytest.mark.parametrize(
    ("spare_s", "expected"),
    [(1000.0, (3, 3)), (17.9, (2, 3)), (11.9, (1, 3)), (5.9, (1, 2)), (3.9, (1, 1)), (0, (1, 1)), (-6, (1, 0))],
)
def test_challengers_go_before_seeds(spare_s: float, expected: tuple[int, int]) -> None:
    windows = 5 * 2 * (BUDGET.window_s + 1.5)
    assert affordable(windows + spare_s, BUDGET, 1, [2.0, 2.0, 2.0]) == expected


def test_what_an_earlier_session_has_trained_is_not_counted_again() -> None:
    windows = 5 * 2 * (BUDGET.window_s + 1.5)
    assert affordable(windows + 12.5, BUDGET, 1, [2.0, 2.0, 2.0], done=[3]) == (3, 3)
    assert affordable(windows + 12.5, BUDGET, 1, [2.0, 2.0, 2.0]) == (2, 3)


class Slow(FormulaProfiler):
    """A profiler on which a batch of `before` takes 40 s, one of any other 1 s, and a window three of them."""

    now = 0.0

    def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> dict[str, Any]:
        """Returns the speed, and lets the time pass."""
        took_s = max(window_s, 3 * (40.0 if knobs["micro_batch_size"] == 4 else 1.0))
        self.now += took_s
        return {**super().window(knobs, window_s, seed), "wall_s": took_s}


def test_a_configuration_too_slow_for_the_time_left_takes_no_windows_from_the_others(tmp_path: Path) -> None:
    journal, profiler = Journal.open(tmp_path / "trials.jsonl", create=True), Slow()
    speed = {"samples_per_s": 32 / 40, "micro_step_s": 5.0, "optimizer_step_s": 0.0}
    knobs = NAMED["before"]
    journal.append("probe", name="before", config={**knobs, "batch_size": 32}, outcome="ok", **speed)
    named = {**NAMED, "before": {**knobs, "batch_size": 32}}
    measure_windows(profiler, journal, named, BUDGET, ignore, lambda: 70.0 - profiler.now)
    assert {r["name"] for r in journal.records if r.event == "window"} == {"after", "best"}
    assert {r["round"] for r in journal.records if r.event == "window"} == set(range(5))
    (said,) = [r["text"] for r in journal.records if r.event == "note"]
    assert said.startswith("too little time is left to measure before")
    measure_windows(profiler, journal, named, BUDGET, ignore, lambda: 1e6 - profiler.now)
    assert {r["round"] for r in journal.records if r.event == "window" and r["name"] == "before"} == set(range(5))


def test_the_clock_is_looked_at_after_each_first_window(tmp_path: Path) -> None:
    journal, profiler = Journal.open(tmp_path / "trials.jsonl", create=True), Slow()
    measure_windows(profiler, journal, NAMED, BUDGET, ignore, lambda: 130.0 - profiler.now)
    assert profiler.probed == [NAMED["before"]], "no time is left for a round of it"


def test_a_rival_too_slow_for_windows_is_judged_by_the_speed_that_is_known(tmp_path: Path) -> None:
    journal = searched(tmp_path)
    config = next(r["config"] for r in journal.records if r["trial"] == "b")
    speed = {"samples_per_s": 1.0, "micro_step_s": 1000.0, "optimizer_step_s": 0.0}
    journal.append("probe", name=None, config=config, outcome="ok", **speed)
    found = settled(journal, SeededBench({0.1: 0.215, 0.2: 0.221}))
    assert {r["name"] for r in journal.records if r.event == "window"} == {"a", "before"}
    assert found.best == "b"


def test_a_new_pick_of_a_study_with_more_time_takes_turns_with_the_others_again(tmp_path: Path) -> None:
    journal, profiler = Journal.open(tmp_path / "trials.jsonl", create=True), FormulaProfiler()
    measure_windows(profiler, journal, NAMED, BUDGET, ignore, endless)
    journal.append("resume", search={"trials": 20})
    measure_windows(profiler, journal, NAMED, BUDGET, ignore, endless)
    assert sum(r.event == "window" for r in journal.records) == 15, "the pick is the same"
    measure_windows(profiler, journal, {**NAMED, "best": {"micro_batch_size": 16}}, BUDGET, ignore, endless)
    later = journal.records[16:]
    assert [(r["round"], r["name"]) for r in later] == [(r["round"], r["name"]) for r in journal.records[:15]]
    assert median_rate(journal.records, "best") == later[2]["samples_per_s"]
