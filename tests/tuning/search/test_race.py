"""The race: who may be the pick after fresh seeds, and who is trained on another; properties over any race."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.search.proposals import FAIRLY_SURE
from tuning.search.race import LEAST_SEEDS, SYSTEM, Finalist, Race
from tuning.search.rule import Baseline, Expected, Rule

TODAY = dict.fromkeys(range(1, 11), 0.0)
gains = st.lists(st.floats(-1, 1), max_size=5)


def entrant(name: str, per_s: float, fresh: list[float], expected: Expected, *, has_failed: bool = False) -> Finalist:
    """A finalist whose gains over a reference of quality 0 are these, on seeds 1, 2, ..."""
    by_seed = dict(enumerate(fresh, 1))
    return Finalist(name, per_s, expected, by_seed, by_seed, has_failed)


finalists = st.builds(
    lambda rows: [entrant(SYSTEM if n == 0 else f"t{n}", *row) for n, row in enumerate(rows)],
    st.lists(
        st.tuples(st.floats(10, 1000), gains, st.builds(Expected, st.floats(-1, 1), st.floats(0, 1))),
        min_size=1,
        max_size=6,
    ),
)
rules = st.builds(
    Rule,
    st.just("accuracy"),
    st.just("max"),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([None, Baseline("mean", -0.5)]),
    st.none(),
    st.sampled_from(["speed", "quality"]),
)


@given(finalists, rules, st.floats(0.01, 0.5), st.sets(st.integers(0, 5)))
def test_pick_is_admitted_and_nobody_faster_is(known: list[Finalist], rule: Rule, noise: float, failed: Any) -> None:
    known = [replace(one, has_failed=n in failed) for n, one in enumerate(known)]
    race, own = Race(known, 100.0, rule, noise, TODAY), {one.name: one for one in known}
    admitted, is_fresh = race.admitted, any(one.gains and not one.has_failed for one in known)
    assert all(race.is_admitted(name) for name in admitted)
    for name in admitted:
        assert name != SYSTEM
        assert not own[name].has_failed
        assert bool(own[name].gains) == is_fresh, "without a fresh seed nobody is, unless none has any"
        if is_fresh:
            error = race.spread / math.sqrt(len(own[name].gains))
            assert statistics.fmean(own[name].gains.values()) >= -rule.tolerance - error, "whatever the model says"
        assert race.expected(name).gain >= -rule.tolerance - 1e-9
    if rule.goal == "speed":
        able = [name for name in own if race.is_admitted(name) and name != SYSTEM and own[name].samples_per_s >= 100.0]
        sure = [own[name].samples_per_s for name in able if race.chance(name) >= FAIRLY_SURE]
        if sure:
            assert [own[name].samples_per_s for name in admitted] == sorted(sure, reverse=True)
        else:
            worth = {name: race.chance(name) * math.log(own[name].samples_per_s / 100.0) for name in able}
            assert [worth[name] for name in admitted] == sorted(worth.values())[-1:]
    else:
        assert all(own[name].samples_per_s >= 100.0 for name in admitted)
        assert not admitted or race.expected(admitted[0]).gain == max(race.expected(n).gain for n in admitted)


@settings(max_examples=50)
@given(finalists, rules, st.floats(0.01, 0.5), st.integers(1, 3), st.randoms(use_true_random=False))
def test_rounds_end_and_name_those_who_may_win(
    known: list[Finalist], rule: Rule, noise: float, top: int, luck: Any
) -> None:
    own, most = {one.name: one for one in known}, 5
    for _ in range(len(known) * most + 1):
        race = Race(list(own.values()), 100.0, rule, noise, TODAY)
        wanted = race.next_round(top, most)
        if not wanted:
            break
        assert len(wanted) == len(set(wanted)) <= top
        for name in wanted:
            assert name != SYSTEM
            assert len(own[name].gains) < most
            assert own[name].samples_per_s >= 100.0
            one = own[name]
            own[name] = entrant(
                name, one.samples_per_s, [*one.gains.values(), luck.uniform(-noise, noise)], one.expected
            )
    else:
        pytest.fail("each round adds a seed, and yet there is no end")


GOOD, BAD, OPEN = Expected(0.2, 0.1), Expected(-0.9, 0.1), Expected(0.0, 0.1)
SURE = [0.2] * LEAST_SEEDS


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        ([("a", 400, [], GOOD), ("b", 200, [], GOOD), ("c", 300, [], BAD)], ["a", "b"]),  # c is hopeless
        ([("a", 400, [], OPEN), ("b", 900, [], OPEN), ("c", 200, [], OPEN), ("d", 50, [], GOOD)], ["b", "a"]),
        ([("a", 400, SURE, GOOD), ("b", 300, [], GOOD)], []),  # settled: slower ones train no more
        ([("a", 400, SURE, GOOD), ("b", 500, [], OPEN)], ["b"]),
        ([("a", 400, SURE[:-1], GOOD), ("b", 300, [], GOOD)], ["a", "b"]),
        ([("a", 200, [0.0], OPEN), ("b", 800, [], OPEN), ("c", 900, [], OPEN)], ["a", "c"]),  # who has begun goes on
    ],
)
def test_round_has_those_who_promise_the_fastest_pick(known: list[Any], wanted: list[str]) -> None:
    race = Race([entrant(*row) for row in known], 100.0, Rule("accuracy", "max"), 0.05, TODAY)
    assert race.next_round(2, 5) == wanted


def test_seeds_below_the_baseline_rule_out_if_one_beats_it() -> None:
    rule = Rule("accuracy", "max", 1.0, Baseline("mean", 0.0))
    known = [entrant("a", 400, [-0.1] * 3, OPEN), entrant("b", 200, [0.1] * 3, GOOD)]
    assert Race(known, 100.0, rule, 0.05, TODAY).admitted == ["b"]
    assert Race(known[:1], 100.0, rule, 0.05, TODAY).admitted == ["a"], "nobody is better, the reference included"


@pytest.mark.parametrize(
    ("fresh", "is_allowed"), [([], True), ([0.0] * 3, True), ([-0.1] * 3, True), ([-1.0] * 3, False)]
)
def test_system_stands_unless_fresh_seeds_contradict(fresh: list[float], is_allowed: bool) -> None:
    race = Race([entrant(SYSTEM, 200, fresh, GOOD)], 100.0, Rule("accuracy", "max"), 0.1, TODAY)
    assert race.allows_system(SYSTEM) == is_allowed
    assert not race.admitted
    assert not Race([], 100.0, Rule("accuracy", "max"), 0.1, TODAY).allows_system(SYSTEM)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=6), st.floats(0.01, 1))
def test_spread_blends_the_noise_and_the_seeds(fresh: list[float], noise: float) -> None:
    spread = Race([entrant("a", 200, fresh, OPEN)], 100.0, Rule("accuracy", "max"), noise, TODAY).spread
    ends = sorted((noise * math.sqrt(2), statistics.stdev(fresh)))
    assert ends[0] - 1e-9 <= spread <= ends[1] + 1e-9
