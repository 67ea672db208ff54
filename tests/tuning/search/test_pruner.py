"""The pruner: where the rungs are, and what is always true of who goes on."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning import run as run_command
from tuning.config.choices import PRUNERS, PrunerName
from tuning.search.pruner import LEAST_CURVES, RULES, Rung, milestones

gains = st.floats(-1e3, 1e3)
curves = st.lists(st.floats(-1.0, 1.0), min_size=LEAST_CURVES, max_size=9)


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


@given(gains | st.none(), st.lists(st.floats(-1.0, 1.0), max_size=LEAST_CURVES - 1), curves, st.floats(0, 1))
def test_nobody_stops_before_enough_is_known(
    gain: float | None, few: list[float], many: list[float], may: float
) -> None:
    by_reference = RULES["reference"]
    assert by_reference(Rung(100, gain, few, may)).go_on
    assert by_reference(Rung(100, None, many, may)).go_on
    assert all(RULES["none"](Rung(100, gain, later, may)).go_on for later in (few, many))


@given(curves, st.floats(0, 1), st.floats(0, 100))
def test_who_is_ahead_goes_on_and_who_is_far_behind_stops(later: list[float], may_lose: float, far: float) -> None:
    decide = RULES["reference"]
    assert decide(Rung(100, -min(later) + far, later, may_lose)).go_on, "as many as there are have lost less"
    assert decide(Rung(100, -may_lose - sum(later) / len(later) + far + 1e-6, later, may_lose)).go_on
    # The luck of two deviations, of a spread of 1 at most to either side, is less than 8.
    assert not decide(Rung(100, -may_lose - 10 - far, later, may_lose)).go_on


def test_every_name_has_a_rule_and_a_line_of_the_help() -> None:
    assert set(RULES) == set(PRUNERS) == set(get_args(PrunerName))
    for name, said in PRUNERS.items():
        assert f"{' ' * 26}{name}: {said}\n" in run_command.HELP
    assert max(map(len, run_command.HELP.splitlines())) <= 80
