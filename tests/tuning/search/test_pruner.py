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
pairs = st.tuples(st.floats(-1.0, 1.0), st.floats(-1.0, 1.0))
curves = st.lists(pairs, min_size=LEAST_CURVES, max_size=9)


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


@given(gains | st.none(), st.lists(pairs, max_size=LEAST_CURVES - 1), curves, st.floats(0, 1))
def test_nobody_stops_before_enough_is_known(
    gain: float | None, few: list[tuple[float, float]], many: list[tuple[float, float]], may: float
) -> None:
    by_reference = RULES["reference"]
    assert by_reference(Rung(100, gain, few, may)).go_on
    assert by_reference(Rung(100, None, many, may)).go_on
    assert all(RULES["none"](Rung(100, gain, later, may)).go_on for later in (few, many))


@given(curves, st.floats(0, 1), st.floats(-2, 2))
def test_trial_stops_only_if_all_that_is_likely_is_behind(
    ended: list[tuple[float, float]], may_lose: float, gain: float
) -> None:
    rung = Rung(100, gain, ended, may_lose)
    assert rung.end.error >= 0
    if rung.end.gain >= -may_lose:
        assert RULES["reference"](rung).go_on


@pytest.mark.parametrize(
    ("ended", "gain", "goes_on"),
    [
        ([(-0.4, -0.4), (-0.2, -0.2), (0.0, 0.0), (0.1, 0.1)], -0.3, False),  # as at the rung, so at the end
        ([(-0.4, 0.01), (-0.2, -0.01), (0.0, 0.0), (0.1, 0.01)], -0.3, True),  # the rung says nothing
        ([(-0.1, -0.1), (-0.1, -0.1), (-0.1, -0.1), (-0.1, -0.1)], -0.1, False),
    ],
    ids=["tells", "tells nothing", "all alike"],
)
def test_trial_behind_stops_only_where_the_rung_tells(
    ended: list[tuple[float, float]], gain: float, goes_on: bool
) -> None:
    assert RULES["reference"](Rung(100, gain, ended)).go_on is goes_on


def test_every_name_has_a_rule_and_a_line_of_the_help() -> None:
    assert set(RULES) == set(PRUNERS) == set(get_args(PrunerName))
    for name, said in PRUNERS.items():
        assert f"{' ' * 26}{name}: {said}\n" in run_command.HELP
    assert max(map(len, run_command.HELP.splitlines())) <= 80
