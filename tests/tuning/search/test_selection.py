"""The pick by one seed: fastest that is as good as the reference; and what the probes alone find."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.our_knobs import EVERY
from tuning.config.choices import Goal
from tuning.config.space import Space
from tuning.journal.events import ProbeRecord, StartRecord, StudyRecord, TrialRecord
from tuning.journal.records import Journal, Record
from tuning.journal.run import History
from tuning.memory.groups import need_of
from tuning.memory.guard import MemoryGuard
from tuning.search.rule import Baseline, Rule
from tuning.search.selection import choose, fastest_probe, fastest_probed, leader, pick, rule_of


def finished(*rows: tuple[float, float]) -> list[TrialRecord]:
    """Trials t0, t1, ... of (quality, samples a second)."""
    ended = [{"outcome": "ok", "values": {"accuracy": quality}, "samples_per_s": rate} for quality, rate in rows]
    return [TrialRecord.read(Record(n, "", "trial", {"trial": f"t{n}", **own})) for n, own in enumerate(ended)]


ROWS = ((0.92, 10.0), (0.915, 30.0), (0.91, 40.0), (0.90, 90.0))


@pytest.mark.parametrize(
    ("rows", "rule", "today", "best"),
    [
        (ROWS, Rule("accuracy", "max", 0.01), 0.915, "t2"),
        (ROWS, Rule("accuracy", "max", 0.01), None, "t2"),  # without a reference, of the best
        (ROWS, Rule("accuracy", "max"), 0.99, "t0"),  # nobody is as good: the most accurate
        (ROWS, Rule("accuracy", "max", at_least=0.90), 0.99, "t3"),
        (ROWS, Rule("accuracy", "max", 0.05, Baseline("majority", 0.91)), 0.92, "t1"),  # no better than untrained
        (ROWS, Rule("accuracy", "max", 0.05, Baseline("mean", 0.95)), 0.92, "t3"),  # nothing is: the tolerance alone
        (ROWS, Rule("accuracy", "max", goal="quality"), 0.90, "t1"),  # the best that is no slower than 20 a second
        (((0.90, 20.0), (0.91, 20.0), (0.91, 20.0)), Rule("accuracy", "max"), 0.8, "t1"),  # equally fast: the better
        (((math.nan, 99.0), (0.5, math.inf), (0.4, 1.0)), Rule("accuracy", "max"), 0.1, "t2"),
    ],
)
def test_pick_is_the_fastest_that_is_as_good(rows: Any, rule: Rule, today: float | None, best: str) -> None:
    found = pick(finished(*rows), rule, today, 20.0)
    assert found.best == best
    assert rule.words in found.rule


RULED = given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(1, 99)), min_size=1, max_size=12),
    st.floats(0, 0.5),
    st.sampled_from(["min", "max"]),
    st.none() | st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from(["speed", "quality"]),
)
"""Trials, and the parts of a rule by which they are judged."""


@settings(max_examples=50)
@RULED
def test_leader_is_found_by_twos(
    rows: list[tuple[float, float]], tolerance: float, mode: str, untrained: float | None, today: float, goal: Goal
) -> None:
    rule = Rule("accuracy", mode, tolerance, None if untrained is None else Baseline("mean", untrained), goal=goal)
    ended = finished(*rows)
    best = ended[0]
    for made in ended[1:]:
        found = pick([best, made], rule, today, 50.0)
        best = next(end for end in (best, made) if found is not None and end.trial == found.best)
    whole = pick(ended, rule, today, 50.0)
    assert rows[int(whole.best[1:])] == rows[int(best.trial[1:])]


@settings(max_examples=50)
@RULED
def test_nothing_as_good_is_faster_than_the_pick(
    rows: list[tuple[float, float]], tolerance: float, mode: str, untrained: float | None, today: float, goal: Goal
) -> None:
    rule = Rule("accuracy", mode, tolerance, None if untrained is None else Baseline("mean", untrained), goal=goal)
    found = pick(finished(*rows), rule, today, 50.0)
    quality, per_s = rows[int(found.best[1:])]
    able = [row for row in rows if rule.admits(rule.gain(row[0], today))]
    able = [row for row in able if rule.beats_baseline(row[0])] or able
    if goal == "quality":
        able = [row for row in able if row[1] >= 50.0]
        assert not able or not any(rule.is_better(row[0], quality) for row in able)
    else:
        assert not able or per_s == max(row[1] for row in able)
    assert not able or (quality, per_s) in able
    best = (min if mode == "min" else max)(own for own, _ in rows)
    assert rows[int(found.most_accurate[1:])][0] == best
    sign = 1 if mode == "min" else -1
    costs = [(sign * own, -rate) for own, rate in rows]
    beaten = [any(a <= cost and b <= slow and (a, b) != (cost, slow) for a, b in costs) for cost, slow in costs]
    assert sorted(found.front) == sorted(f"t{n}" for n, is_beaten in enumerate(beaten) if not is_beaten)


def test_rule_and_reference_are_read_from_the_records(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    assert rule_of(journal.run) is leader(journal.run) is None
    asked = {"tolerance": "10%", "at_least": None, "goal": "quality"}
    opening = {"objectives": {"error": "min"}, "baselines": {"mean": {"error": 9.0}}}
    journal.append(StudyRecord, **opening, config={"pick": asked})
    rule = rule_of(journal.run)
    assert rule == Rule("error", "min", 0.0, Baseline("mean", 9.0), None, "quality"), "no reference: 10% of nothing"
    journal.append(StartRecord, trial="t0", config={}, named="before", beside=True)
    for trial, outcome, error, rate in (
        ("t0", "ok", 2.0, 50.0),
        ("t1", "ok", 2.15, 60.0),
        ("t2", "stopped", 0.0, 99.0),
    ):
        journal.append(
            TrialRecord, trial=trial, config={}, outcome=outcome, values={"error": error}, samples_per_s=rate
        )
    rule, reference = rule_of(journal.run), journal.run.reference
    assert (rule.tolerance, reference and reference.trial) == (pytest.approx(0.2), "t0")
    best = leader(journal.run)
    assert best.trial == "t1", "of those that ran to their end, the reference left out"
    assert choose(History(r for r in journal.records if r.get("trial") != "t1"), rule) is None
    journal.append(StudyRecord, **opening, config={"pick": {"tolerance": 0.01}})
    older = rule_of(journal.run)
    assert (older.tolerance, older.at_least, older.goal) == (0.01, None, "speed")
    journal.close()


SPACE = Space.parse(
    {"batch_size": [16, 64], "micro_batch_size": [16, 64], "num_workers": [0, 2], "learning_rate": 0.1}, EVERY
)


def test_best_probe_learns_what_is_trained_today(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    today = {"batch_size": 32, "micro_batch_size": 16, "num_workers": 0, "learning_rate": 0.3}
    other = {**today, "batch_size": 64, "learning_rate": 0.1}
    ended = {"outcome": "ok", "optimizer_step_s": 0.0, "peak_allocated_bytes": 7}
    for name, config, rate in ((None, other, 800.0), (None, {**other, "num_workers": 2}, 1600.0)):
        journal.append(ProbeRecord, name=name, config=config, samples_per_s=rate, micro_step_s=16 / rate, **ended)
    journal.append(ProbeRecord, name="before", config=today, samples_per_s=800.0, micro_step_s=0.02, **ended)
    found = fastest_probe(journal.run)
    assert (found.name, found.config, found.samples_per_s) == ("", {**today, "num_workers": 2}, 1600)
    today["num_workers"] = 4
    journal.append(ProbeRecord, name="before", config=today, samples_per_s=3200.0, micro_step_s=0.005, **ended)
    found = fastest_probe(journal.run)
    assert (found.config, found.peak_allocated_bytes) == (today, 7), "which no probe is faster than"
    journal.close()


def test_probed_pick_has_no_micro_batch_that_ran_out_of_memory(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    fast = {"batch_size": 64, "micro_batch_size": 64, "num_workers": 2, "learning_rate": 0.1}
    slow = {**fast, "micro_batch_size": 16, "num_workers": 0}
    for knobs, rate in ((fast, 6400.0), (slow, 1000.0)):
        steps = {"micro_step_s": knobs["micro_batch_size"] / rate, "optimizer_step_s": 0.0, "samples_per_s": rate}
        journal.append(ProbeRecord, name=None, config=knobs, outcome="ok", **steps)
    tight = MemoryGuard(10**9, {}, EVERY)
    tight.observe_oom(*need_of(fast, EVERY))
    picked = fastest_probed(journal.run, SPACE, tight, slow)
    assert tight.judge(*need_of(picked, EVERY)).fits
    assert picked["num_workers"] == 2


FOUND = {"batch_size": 16, "micro_batch_size": 16, "num_workers": 2, "learning_rate": 0.1}
BEFORE = {**FOUND, "num_workers": 4}  # beside the space


@pytest.mark.parametrize(
    ("probes", "named", "workers"),
    [
        ([(900.0, "ok")], "before", 2),
        ([(1100.0, "ok")], "before", 4),
        ([], "before", 4),  # time was over before it was probed itself
        ([(None, "oom")], "before", 2),  # what does not run is no pick
        ([(1100.0, "ok")], "", 2),  # of a packaged workload `before` is nobody's
    ],
)
def test_today_stays_if_no_system_knobs_beat_it(
    tmp_path: Path, probes: list[tuple[float | None, str]], named: str, workers: int
) -> None:
    with Journal.open(tmp_path / "trials.jsonl", create=True) as journal:
        for name, knobs, rate, outcome in ((None, FOUND, 1000.0, "ok"), *(("before", BEFORE, *one) for one in probes)):
            steps = {"micro_step_s": 16 / rate, "optimizer_step_s": 0.0} if rate else {}
            journal.append(ProbeRecord, name=name, config=knobs, outcome=outcome, samples_per_s=rate, **steps)
    picked = fastest_probed(journal.run, SPACE, MemoryGuard(None, {}, EVERY), BEFORE, named=named)
    assert picked["num_workers"] == workers
