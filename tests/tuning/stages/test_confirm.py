"""The confirm stage: turns, no repeats after a resume, and the pick among what ran to its end."""

from __future__ import annotations

from pathlib import Path

from tests.fakes import FormulaBench
from tuning.records import Journal
from tuning.sections import ConfirmSection
from tuning.stages.bench import Orders
from tuning.stages.confirm import choose, expected_s, measure_windows, median_rate, train_again

BUDGET = ConfirmSection(windows=5, window_s=0.1, seeds=2, top=1)
ORDERS = Orders(100, (100,), True, 1, 1)
NAMED = {"before": {"micro_batch_size": 4}, "after": {"micro_batch_size": 8}, "best": {"micro_batch_size": 32}}


def ignore(record: object) -> None:
    """Hears nothing."""


def test_every_round_has_one_window_of_each_and_the_order_turns(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    measure_windows(FormulaBench(), journal, NAMED, BUDGET, ignore)
    order = [(r["round"], r["name"]) for r in journal.records]
    assert len(order) == 15
    firsts = [next(name for number, name in order if number == n) for n in range(5)]
    assert firsts == ["before", "after", "best", "before", "after"]
    assert (median_rate(journal.records, "best") or 0) > (median_rate(journal.records, "before") or 0)


def test_a_resumed_stage_measures_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    journal = Journal.open(path, create=True)
    measure_windows(FormulaBench(), journal, {"before": NAMED["before"]}, BUDGET, ignore)
    train_again(FormulaBench(), journal, "best", NAMED["best"], ORDERS, [1], ignore)
    journal.close()
    again, bench = Journal.open(path), FormulaBench()
    measure_windows(bench, again, NAMED, BUDGET, ignore)
    train_again(bench, again, "best", NAMED["best"], ORDERS, [1, 2], ignore)
    assert sum(1 for r in again.records if r.event == "window") == 15
    assert [r["seed"] for r in again.records if r.event == "confirmed"] == [1, 2]
    assert not any(knobs == NAMED["before"] for knobs in bench.probed)


def test_the_pick_is_among_trials_that_ran_to_their_end(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    for trial, outcome, error, rate in (("a", "ok", 0.20, 50.0), ("b", "stopped", 0.0, 99.0), ("c", "ok", 0.205, 60.0)):
        values = {"error": error}
        journal.append("trial", trial=trial, config={}, outcome=outcome, values=values, samples_per_s=rate)
    picked = choose(journal.records, "error", "min", 0.01)
    assert picked is not None
    assert (picked.best, picked.most_accurate) == ("c", "a")
    assert choose(journal.records[1:2], "error", "min", 0.01) is None


def test_the_reserve_grows_with_every_part_of_the_stage() -> None:
    one = expected_s(BUDGET, 1, 1000, 100.0)
    assert one < expected_s(BUDGET, 3, 1000, 100.0)
    assert one < expected_s(BUDGET, 1, 2000, 100.0)
    assert one < expected_s(BUDGET, 1, 1000, 50.0)
