"""The pick: fastest within the tolerance, and the sentence that says so."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.config.space import Space
from tuning.journal.records import Journal, Trial
from tuning.memory.groups import need_of
from tuning.memory.guard import MemoryGuard
from tuning.search.rule import Baseline, Rule, absolute, best_baseline
from tuning.search.selection import fastest_probe, fastest_probed, pick


def finished(*rows: tuple[float, float]) -> list[Trial]:
    """Trials t0, t1, ... of (quality, samples a second)."""
    return [Trial(f"t{n}", {}, "ok", {"accuracy": quality}, rate) for n, (quality, rate) in enumerate(rows)]


def test_the_fastest_within_the_tolerance_is_best() -> None:
    found = pick(finished((0.92, 10), (0.915, 30), (0.91, 40), (0.90, 90)), Rule("accuracy", "max", 0.01))
    assert (found.best, found.most_accurate, found.front) == ("t2", "t0", ("t3", "t2", "t1", "t0"))
    assert found.rule == ("of 4 the fastest whose accuracy is within 0.01 of the best seen: 0.91 against 0.92")


MAJORITY = Baseline("majority class", 0.905)


def test_what_is_no_better_than_without_training_is_not_picked_for_its_speed() -> None:
    of = finished((0.92, 10), (0.915, 30), (0.905, 40), (0.90, 90))
    found = pick(of, Rule("accuracy", "max", 0.03, MAJORITY))
    assert found.best == "t1", "the majority class's own accuracy is not better than it"
    assert found.rule == (
        "of 4 the fastest whose accuracy is within 0.03 of the best seen and better than majority class (0.905): "
        "0.915 against 0.92"
    )
    assert "majority" not in pick(of, Rule("accuracy", "max", 0.005, MAJORITY)).rule, "nothing was left out for it"


def test_where_nothing_is_better_than_without_training_the_tolerance_decides_alone() -> None:
    rows = finished((0.905, 10), (0.89, 30), (0.80, 90))
    assert pick(rows, Rule("accuracy", "max", 0.03, MAJORITY)) == pick(rows, Rule("accuracy", "max", 0.03))


def test_the_baseline_is_the_best_of_those_known_of_the_objective() -> None:
    known = {"mean": {"mae": 9.0}, "last": {"mae": 7.0, "rmse": 1.0}, "null": {"mae": None}, "other": {"rmse": 0.5},
             "flat": 3.0, "nan": {"mae": math.nan}}  # fmt: skip
    assert best_baseline(known, "mae", "min") == Baseline("last", 7.0)
    assert best_baseline(known, "mae", "max") == Baseline("mean", 9.0)
    assert best_baseline(known, "accuracy", "max") is None
    assert best_baseline({}, "mae", "min") is None


def test_without_tolerance_the_most_accurate_is_best_and_ties_go_to_the_faster() -> None:
    found = pick(finished((0.9, 10), (0.9, 20), (0.8, 99), (0.9, 20)), Rule("accuracy", "max", 0.0))
    assert found.best == found.most_accurate == "t1"
    assert found.front == ("t2", "t1", "t3"), "equal ones are all on the front"


def test_equally_fast_ones_are_told_apart_by_quality() -> None:
    assert pick(finished((0.90, 20), (0.91, 20), (0.91, 20)), Rule("accuracy", "max", 0.05)).best == "t1"


def test_what_is_not_finite_is_left_out() -> None:
    found = pick(finished((math.nan, 99), (0.5, math.inf), (0.4, 1)), Rule("accuracy", "max", 0.1))
    assert (found.best, found.front) == ("t2", ("t2",))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(1, 99)), min_size=1, max_size=12),
    st.floats(0, 0.5),
    st.sampled_from(["min", "max"]),
    st.none() | st.floats(0, 1),
)
def test_nothing_faster_is_within_the_tolerance_and_better_than_without_training(
    rows: list[tuple[float, float]], tolerance: float, mode: str, untrained: float | None
) -> None:
    baseline = None if untrained is None else Baseline("mean", untrained)
    found = pick(finished(*rows), Rule("accuracy", mode, tolerance, baseline))
    sign = 1 if mode == "min" else -1
    least = min(sign * quality for quality, _ in rows)
    bar = math.inf if untrained is None or least >= sign * untrained - 1e-8 else sign * untrained - 1e-8
    within = [rate for quality, rate in rows if sign * quality - least <= tolerance and sign * quality < bar]
    chosen = rows[int(found.best[1:])]
    assert chosen[1] >= max(within)
    assert sign * chosen[0] < bar + 1e-8
    assert sign * chosen[0] - least <= tolerance + 1e-8
    assert rows[int(found.front[0][1:])][1] == max(rate for _, rate in rows)
    costs = [(sign * quality, -rate) for quality, rate in rows]
    beaten = [any(a <= cost and b <= slow and (a, b) != (cost, slow) for a, b in costs) for cost, slow in costs]
    assert sorted(found.front) == sorted(f"t{n}" for n, is_beaten in enumerate(beaten) if not is_beaten)


@given(st.lists(st.floats(-50, 50), min_size=1), st.floats(0, 100), st.sampled_from(["min", "max"]))
def test_a_percentage_is_a_share_of_the_best_quality_and_a_number_is_itself(
    qualities: list[float], share: float, mode: str
) -> None:
    best = min(qualities) if mode == "min" else max(qualities)
    found = absolute(f"{share}%", [*qualities, math.nan], mode)
    assert found == pytest.approx(abs(best) * share / 100)
    assert absolute(share, qualities, mode) == share
    assert absolute("2%", [], mode) == 0.0


SPACE = Space.of({"batch_size": [16, 64], "micro_batch_size": [16, 64], "num_workers": [0, 2], "learning_rate": 0.1})


def test_of_probes_alone_the_best_so_far_learns_what_is_trained_today(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    today = {"batch_size": 32, "micro_batch_size": 16, "num_workers": 0, "learning_rate": 0.3}
    other = {**today, "batch_size": 64, "learning_rate": 0.1}
    ended = {"outcome": "ok", "optimizer_step_s": 0.0, "peak_allocated_bytes": 7}
    for name, config, rate in ((None, other, 800.0), (None, {**other, "num_workers": 2}, 1600.0)):
        journal.append("probe", name=name, config=config, samples_per_s=rate, micro_step_s=16 / rate, **ended)
    journal.append("probe", name="before", config=today, samples_per_s=800.0, micro_step_s=0.02, **ended)
    for ref, learned in (("nli", other), ("mine.py", today)):  # a `before` of ours is what nobody trains today
        journal.append("study", config={"workload": {"ref": ref}})
        found = fastest_probe(journal.records)
        assert found is not None
        assert (found["name"], found["config"], found["samples_per_s"]) == (None, {**learned, "num_workers": 2}, 1600)
    journal.append("probe", name="before", config=today, samples_per_s=3200.0, micro_step_s=0.005, **ended)
    found = fastest_probe(journal.records)
    assert found is not None
    assert (found["config"], found["peak_allocated_bytes"]) == (today, 7), "which no probe is faster than"
    journal.close()


def test_of_probes_alone_a_micro_batch_that_ran_out_of_memory_is_not_picked(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    fast = {"batch_size": 64, "micro_batch_size": 64, "num_workers": 2, "learning_rate": 0.1}
    slow = {**fast, "micro_batch_size": 16, "num_workers": 0}
    for knobs, rate in ((fast, 6400.0), (slow, 1000.0)):
        steps = {"micro_step_s": knobs["micro_batch_size"] / rate, "optimizer_step_s": 0.0, "samples_per_s": rate}
        journal.append("probe", name=None, config=knobs, outcome="ok", **steps)
    tight = MemoryGuard(10**9, {})
    tight.observe_oom(*need_of(fast))
    picked = fastest_probed(journal.records, SPACE, tight, slow)
    assert picked is not None
    assert tight.judge(*need_of(picked)).fits
    assert picked["num_workers"] == 2


@pytest.mark.parametrize(("before_per_s", "workers"), [(900.0, 2), (1100.0, 4)], ids=["probed", "before"])
def test_what_is_trained_today_stays_where_no_system_knobs_beat_it(
    tmp_path: Path, before_per_s: float, workers: int
) -> None:
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    found = {"batch_size": 16, "micro_batch_size": 16, "num_workers": 2, "learning_rate": 0.1}
    before = {**found, "num_workers": 4}  # beside the space
    for name, knobs, rate in ((None, found, 1000.0), ("before", before, before_per_s)):
        steps = {"micro_step_s": 16 / rate, "optimizer_step_s": 0.0, "samples_per_s": rate}
        journal.append("probe", name=name, config=knobs, outcome="ok", **steps)
    guard = MemoryGuard(None, {})
    picked = fastest_probed(journal.records, SPACE, guard, before, is_before=True)
    assert picked is not None
    assert picked["num_workers"] == workers
    unmeasured = [r for r in journal.records if r.get("name") != "before"]
    stays = fastest_probed(unmeasured, SPACE, guard, before, is_before=True)
    assert stays is not None
    assert stays["num_workers"] == 4, "time was over before it was probed itself"
    journal.append("probe", name="before", config=before, outcome="oom", samples_per_s=None)
    failed = [r for r in journal.records if r.get("name") != "before" or r["outcome"] == "oom"]
    runs = fastest_probed(failed, SPACE, guard, before, is_before=True)
    assert runs is not None
    assert runs["num_workers"] == 2, "what does not run is no pick"
    plain = fastest_probed(journal.records, SPACE, guard, before)
    assert plain is not None
    assert plain["num_workers"] == 2, "of a packaged workload `before` is nobody's"
