"""The pruner: where the rungs are, and what is always true of who goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning import run as run_command
from tuning.config.choices import PRUNERS, PrunerName
from tuning.search.pruner import RULES, Decision, Pruner, milestones

Point = tuple[float, float]
points = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=25)


def run(rows: Sequence[Point], eta: int = 3, name: PrunerName = "rungs") -> list[Decision]:
    """Decides for each (speed, quality) in turn."""
    pruner = Pruner((100,), eta, name)
    return [pruner.decide(f"t{n}", 100, *map(float, row)) for n, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 243, 3), (1, 3, 9, 27, 81)),
        ((1, 1000, 10), (1, 10, 100)),
        ((7, 7, 2), ()),
        ((300, 1200, 3), (300, 900)),
    ],
)
def test_milestones(arguments: tuple[int, int, int], expected: tuple[int, ...]) -> None:
    assert milestones(*arguments) == expected


@settings(max_examples=60, deadline=None)
@given(points)
def test_the_front_goes_on_and_whoever_stops_is_beaten_and_in_the_lower_part(rows: list[Point]) -> None:
    decided = run(rows)
    for n, one in enumerate(decided):
        seen = rows[: n + 1]
        on_front = not any(s >= rows[n][0] and q >= rows[n][1] and (s, q) != rows[n] for s, q in seen)
        if on_front or n + 1 < 3:
            assert one.go_on
        if not one.go_on:
            assert any(speed >= rows[n][0] and quality > rows[n][1] for speed, quality in seen)
            assert sum(quality > rows[n][1] for _, quality in seen) >= math.ceil(len(seen) / 3)


def test_of_equally_fast_ones_the_best_part_goes_on() -> None:
    decided = run([(1, 9), (1, 8), (1, 7), (1, 10), (1, 6), (1, 5), (1, 9.5)])
    assert [one.go_on for one in decided] == [True, True, False, True, False, False, True]
    assert decided[5].reason == "place 6 of 6 at 100 samples, 2 go on"


def test_a_speed_within_what_a_probe_errs_by_is_no_reason_to_go_on() -> None:
    assert not run([(100, 3), (100, 2), (102, 1)])[2].go_on
    assert run([(100, 3), (100, 2), (110, 1)])[2] == Decision(
        True, "place 3 of 3 at 100 samples, 1 go on; nothing as fast is better"
    )


def test_every_name_has_a_rule_and_a_line_of_the_help() -> None:
    assert set(RULES) == set(PRUNERS) == set(get_args(PrunerName))
    for name, said in PRUNERS.items():
        assert f"{' ' * 26}{name}: {said}\n" in run_command.HELP
    assert max(map(len, run_command.HELP.splitlines())) <= 80


def test_by_none_nobody_stops() -> None:
    assert all(one.go_on for one in run([(9, 9), (8, 8), (7, 7), (1, 1)], name="none"))


def test_without_rungs_nobody_stops() -> None:
    pruner = Pruner((), 2)
    assert all(pruner.decide(f"t{n}", 100, 1.0, -float(n)).go_on for n in range(9))
