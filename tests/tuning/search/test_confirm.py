"""The confirm stage: turns, no repeats after a resume, and the pick among what ran to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FormulaProfiler
from trainables.knobs import Scalar
from tuning.config.schema import ConfirmSection
from tuning.journal.records import Journal
from tuning.search.confirm import Terms, choose, expected_s, measure_windows, median_rate, settle, train_again
from tuning.search.protocols import TrialPlan
from tuning.search.rule import Rule

BUDGET = ConfirmSection(windows=5, window_s=0.1, seeds=2, top=1)
ORDERS = TrialPlan(100, (100,), True, 1, 1)
RULE = Rule("error", "min", 0.01)
NAMED = {"before": {"micro_batch_size": 4}, "after": {"micro_batch_size": 8}, "best": {"micro_batch_size": 32}}


def ignore(record: object) -> None:
    """Hears nothing."""


def test_every_round_has_one_window_of_each_and_the_order_turns(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    measure_windows(FormulaProfiler(), journal, NAMED, BUDGET, ignore)
    order = [(r["round"], r["name"]) for r in journal.records]
    assert len(order) == 15
    firsts = [next(name for number, name in order if number == n) for n in range(5)]
    assert firsts == ["before", "after", "best", "before", "after"]
    assert (median_rate(journal.records, "best") or 0) > (median_rate(journal.records, "before") or 0)


def test_a_resumed_stage_measures_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    journal = Journal.open(path, create=True)
    measure_windows(FormulaProfiler(), journal, {"before": NAMED["before"]}, BUDGET, ignore)
    train_again(FormulaProfiler(), journal, "best", NAMED["best"], ORDERS, [1], ignore)
    journal.close()
    again, profiler = Journal.open(path), FormulaProfiler()
    measure_windows(profiler, again, NAMED, BUDGET, ignore)
    train_again(profiler, again, "best", NAMED["best"], ORDERS, [1, 2], ignore)
    assert sum(1 for r in again.records if r.event == "window") == 15
    assert [r["seed"] for r in again.records if r.event == "confirmed"] == [1, 2]
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


def test_the_reserve_grows_with_every_part_of_the_stage() -> None:
    one = expected_s(BUDGET, 1, 1000, 100.0)
    assert one < expected_s(BUDGET, 3, 1000, 100.0)
    assert one < expected_s(BUDGET, 1, 2000, 100.0)
    assert one < expected_s(BUDGET, 1, 1000, 50.0)


class SeededBench(FormulaProfiler):
    """A profiler whose training of a learning rate has a quality of its own, and a noise that the seed decides."""

    def __init__(self, errors: dict[float, float], broken: float | None = None) -> None:
        super().__init__()
        self.errors, self.broken = errors, broken
        self.trained: list[tuple[float, int]] = []

    def train(self, knobs: Mapping[str, Scalar], samples: int, milestones: Sequence[int], seed: int) -> dict[str, Any]:
        """Returns the error of the learning rate, a little more for odd seeds."""
        rate = float(knobs["learning_rate"])
        self.trained.append((rate, seed))
        found = {**super().train(knobs, samples, milestones, seed), "train_s": 1.0}
        if rate == self.broken:
            return {**found, "outcome": "diverged", "values": {}}
        return {**found, "values": {"error": self.errors[rate] + 0.001 * (seed % 2)}}


SEARCHED = {"a": (0.1, 0.19, 10.0), "b": (0.2, 0.22, 70.0), "c": (0.3, 0.40, 90.0), "d": (0.4, 0.25, 5.0)}
"""Trials by id: learning rate, error with the search's seed, samples a second. By one seed `a` is picked."""


def searched(folder: Path) -> Journal:
    """A journal with the trials of a search."""
    journal = Journal.open(folder / "trials.jsonl", create=True)
    for trial, (learning_rate, error, rate) in SEARCHED.items():
        config, values = {"learning_rate": learning_rate, "micro_batch_size": int(rate)}, {"error": error}
        journal.append("trial", trial=trial, config=config, outcome="ok", values=values, samples_per_s=rate)
    return journal


def terms(left_s: float = 1000.0) -> Terms:
    return Terms(RULE, (1, 2, 3), lambda: left_s)


def test_the_rival_that_one_seed_shut_out_is_trained_on_the_same_seeds_and_takes_the_place(tmp_path: Path) -> None:
    journal, profiler = searched(tmp_path), SeededBench({0.1: 0.215, 0.2: 0.221})
    found = settle(profiler, journal, "a", ORDERS, terms(), ignore)
    assert found is not None
    assert (found.best, found.bar_of) == ("b", "a")
    assert profiler.trained == [(rate, seed) for rate in (0.1, 0.2) for seed in (1, 2, 3)]
    decided = [(r["trial"], r["decision"]) for r in journal.records if r.event == "rival"]
    assert decided == [("b", "confirm")]
    again = SeededBench({})
    assert settle(again, journal, "a", ORDERS, terms(), ignore) == found
    assert again.trained == []


@pytest.mark.parametrize("kept", range(1, 6))
def test_cut_off_anywhere_it_goes_on_with_the_seed_that_is_missing(tmp_path: Path, kept: int) -> None:
    journal, profiler = searched(tmp_path), SeededBench({0.1: 0.215, 0.2: 0.221})
    whole = settle(profiler, journal, "a", ORDERS, terms(), ignore)
    (tmp_path / "again").mkdir()
    cut = Journal.open(tmp_path / "again" / "trials.jsonl", create=True)
    for record in journal.records:
        if sum(1 for r in cut.records if r.event == "confirmed") < kept:
            cut.append(record.event, **record.fields)
    rest = SeededBench({0.1: 0.215, 0.2: 0.221})
    assert settle(rest, cut, "a", ORDERS, terms(), ignore) == whole
    assert profiler.trained[kept:] == rest.trained


def test_a_rival_is_not_begun_where_the_time_does_not_hold_all_its_seeds(tmp_path: Path) -> None:
    journal, profiler = searched(tmp_path), SeededBench({0.1: 0.215})
    found = settle(profiler, journal, "a", ORDERS, terms(left_s=0.4), ignore)  # three seeds take 3 / 7 s
    assert found is not None
    assert found.best == "a"
    record = journal.records[-1]
    assert (record.event, record["trial"], record["decision"], record["left_s"]) == ("rival", "b", "too long", 0.4)
    assert record["expected_s"] == pytest.approx(3 / 7)
    assert record["chance"] > 0.1


def test_a_rival_that_loses_on_its_first_seed_is_given_up(tmp_path: Path) -> None:
    journal, profiler = searched(tmp_path), SeededBench({0.1: 0.215, 0.2: 0.29})
    found = settle(profiler, journal, "a", ORDERS, terms(), ignore)
    assert found is not None
    assert found.best == "a"
    assert [seed for rate, seed in profiler.trained if rate == 0.2] == [1]
    assert [r["decision"] for r in journal.records if r.event == "rival"] == ["confirm", "given up"]


def test_a_pick_that_fails_on_a_fresh_seed_is_no_pick(tmp_path: Path) -> None:
    journal = searched(tmp_path)
    assert settle(SeededBench({}, broken=0.1), journal, "a", ORDERS, terms(), ignore) is None
    picked = choose(journal.records, RULE)
    assert picked is not None
    assert picked.best == "b"


def test_windows_of_an_earlier_pick_are_not_those_of_the_later(tmp_path: Path) -> None:
    journal, profiler = Journal.open(tmp_path / "trials.jsonl", create=True), FormulaProfiler()
    measure_windows(profiler, journal, {"best": {"micro_batch_size": 4}}, BUDGET, ignore)
    measure_windows(profiler, journal, {"best": {"micro_batch_size": 8}}, BUDGET, ignore)
    configs = [r["config"]["micro_batch_size"] for r in journal.records if r.event == "window"]
    assert configs == [4] * 5 + [8] * 5
