"""What to train next: coordinates, the process behind it, the gain it weighs, and the choice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.pareto import hypervolume_2d
from tuning.policies.acquisition import expected_gains, gains
from tuning.policies.coordinates import Coordinates
from tuning.policies.curves import Curves
from tuning.policies.outlook import Outlook
from tuning.policies.surrogate import Surrogate
from tuning.space import Choice, Range, Space

SPACE = Space(
    {
        "learning_rate": Range(1e-4, 1e-2, log=True),
        "batch_size": Choice((16, 32, 64)),
        "amp_dtype": Choice(("fp32", "bf16")),
    }
)
NAMES = tuple(SPACE.parameters)
unit = st.floats(0.0, 1.0)
points = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=8)


def knobs(rate: float, batch: int = 32, dtype: str = "fp32") -> dict[str, Any]:
    return {"learning_rate": rate, "batch_size": batch, "amp_dtype": dtype}


def test_coordinates_are_places_and_two_words_are_one_apart() -> None:
    own = Coordinates(SPACE, NAMES)
    assert own.widths == [1, 1, 2]
    assert own.at(knobs(1e-3, 64)) == pytest.approx([0.5, 1.0, math.sqrt(0.5), 0.0])
    assert np.linalg.norm(own.at(knobs(1e-3)) - own.at(knobs(1e-3, dtype="bf16"))) == pytest.approx(1.0)


@given(unit)
def test_a_place_in_a_range_and_back(share: float) -> None:
    for parameter in (Range(1e-4, 1e-2, log=True), Range(0.0, 0.5), Range(1, 900, log=True, integer=True)):
        value = parameter.at(share)
        assert value in parameter
        slack = 0.5 if parameter.integer else 1e-4 * parameter.high
        assert float(parameter.at(parameter.place(float(value)))) == pytest.approx(float(value), abs=slack)


@given(points, st.integers(1, 9), st.integers(0, 9))
def test_a_gain_is_the_difference_of_two_areas(front: list[tuple[int, int]], speed: int, quality: int) -> None:
    array = np.array(front, dtype=float)
    before, after = -array, -np.vstack([array, [speed, quality]])
    found = gains(array, 0.0, np.array([float(speed)]), np.array([float(quality)]))
    assert found[0] == pytest.approx(hypervolume_2d(after, (0.0, 0.0)) - hypervolume_2d(before, (0.0, 0.0)))


@given(points, st.integers(1, 9), unit)
def test_what_is_sure_gains_what_it_gains_and_doubt_adds_hope(
    front: list[tuple[int, int]], speed: int, mean: float
) -> None:
    array, speeds, means = np.array(front, dtype=float), np.array([float(speed)]), np.array([9.0 * mean])
    sure = expected_gains(array, 0.0, speeds, means, np.array([0.0]))
    assert sure == pytest.approx(gains(array, 0.0, speeds, means))
    assert expected_gains(array, 0.0, speeds, means, np.array([1.0]))[0] >= sure[0] - 1e-9, "a gain is convex"


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_the_process_passes_near_what_was_seen_and_is_unsure_far_from_it(seed: int) -> None:
    draw = np.random.default_rng(seed)
    seen = draw.random((12, 2)) * 0.5
    values = np.sin(3 * seen[:, 0]) + seen[:, 1]
    own = Surrogate(seen, values, np.zeros(12), seed)
    means, stds = own.at(seen)
    assert np.abs(means - values).max() < 0.5 * values.std()
    _, far = own.at(np.array([[3.0, 3.0]]))
    assert far[0] > stds.max()
    again = Surrogate(seen, values, np.zeros(12), seed).at(seen)
    assert np.array_equal(again[0], means)


def test_the_process_takes_one_value_and_equal_values() -> None:
    one = Surrogate(np.array([[0.5]]), np.array([2.0]), np.array([0.0]), 0)
    assert one.at(np.array([[0.5]]))[0][0] == pytest.approx(2.0)
    same = Surrogate(np.array([[0.1], [0.9]]), np.array([2.0, 2.0]), np.zeros(2), 0)
    assert same.at(np.array([[0.4]]))[0][0] == pytest.approx(2.0)
    with pytest.raises(ValueError, match="0 points"):
        Surrogate(np.zeros((0, 1)), np.zeros(0), np.zeros(0), 0)


def test_gains_are_known_after_four_trainings_and_a_doubtful_value_says_so() -> None:
    curves = Curves()
    for gain in (0.1, 0.2, 0.3):
        curves.take({100: 0.5}, 0.5 + gain)
    assert curves.gains() == {}
    assert curves.optimistic(100, 0.5) is None
    curves.take({100: 0.2}, 0.6)
    gain, std = curves.gains()[100]
    assert gain == pytest.approx(0.25)
    assert std > 0.1
    assert curves.optimistic(100, 0.1) == pytest.approx(0.1 + 1.25 * 0.4)
    assert curves.optimistic(200, 0.1) is None


def taught(mode: Any = "max") -> Outlook:
    """A search that knows: the best learning rate is 1e-3, whatever the rest."""
    own, sign = Outlook(SPACE, NAMES, mode, 1000, 0), 1.0 if mode == "max" else -1.0
    for n, rate in enumerate((1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)):
        quality = sign * (0.9 - 0.2 * abs(math.log10(rate / 1e-3)))
        own.rung(f"t{n}", 500, quality - sign * 0.1)
        own.ended(f"t{n}", knobs(rate), 100.0, quality, whole=True)
    return own


@pytest.mark.parametrize("mode", ["max", "min"])
def test_of_equals_in_quality_the_faster_is_chosen_and_of_equals_in_speed_the_better(mode: Any) -> None:
    own = taught(mode)
    assert own.choose([knobs(1.1e-3), knobs(1.2e-3)], [100.0, 400.0], 9) == 1
    assert own.choose([knobs(1.1e-4), knobs(9e-4), knobs(9e-3)], [120.0, 120.0, 120.0], 9) == 1


def test_nothing_is_chosen_where_too_little_is_known() -> None:
    fresh = Outlook(SPACE, NAMES, "max", 1000, 0)
    assert fresh.choose([knobs(1e-3), knobs(2e-3)], [100.0, 400.0], 1) == 0
    assert taught().choose([knobs(1e-3), knobs(2e-3)], [None, None], 1) == 0
    assert taught().choose([knobs(1e-3), knobs(1e-3, 64)], [None, 400.0], 1) == 1, "one of known speed"


def test_a_diverged_training_and_one_without_value_are_no_quality() -> None:
    own = taught()
    own.ended("lost", knobs(5e-3, 64), 100.0, None, whole=True)
    own.rung("nan", 500, math.nan)
    own.ended("nan", knobs(1e-3, 64), 100.0, math.nan, whole=True)
    assert own.choose([knobs(1.1e-3), knobs(1.2e-3)], [100.0, 400.0], 9) == 1


@pytest.mark.parametrize("mode", ["max", "min"])
def test_hopeless_is_what_an_optimist_gives_up_and_only_beside_one_as_fast(mode: Any) -> None:
    own, sign = taught(mode), 1.0 if mode == "max" else -1.0
    assert own.hopeless(500, sign * 0.7, 100.0).startswith(f"cannot reach the front: {sign * 0.825:.4g} at most")
    assert own.hopeless(500, sign * 0.85, 100.0) == "", "may come to 0.975"
    assert own.hopeless(500, sign * 0.1, 101.0) == "", "nobody as fast came to its end"
    assert own.hopeless(250, sign * 0.1, 100.0) == "", "no training is known from there"
    assert own.hopeless(500, None, 100.0) == ""


def test_a_stopped_training_counts_by_what_it_would_have_come_to() -> None:
    own = taught()
    for n in range(4):
        own.rung(f"s{n}", 500, 0.05)
        own.ended(f"s{n}", knobs(1e-3, 64, "bf16"), 400.0, 0.05, whole=False)
    alike, other = knobs(1.05e-3, 64, "bf16"), knobs(1.05e-3, 32, "fp32")
    assert own.choose([alike, other], [110.0, 110.0], 9) == 1
