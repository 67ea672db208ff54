"""The model: what qualities are guessed, what the process draws, and whom it chooses."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.config.space import Space
from tuning.search.acquisition import Model, Qualities, expected_gains
from tuning.search.coordinates import Coordinates
from tuning.search.rule import Baseline
from tuning.search.surrogate import Surrogate

SPACE = Space.of({"learning_rate": {"low": 1e-4, "high": 1.0, "log": True}, "hidden_size": [32, 64, 128]})


def test_a_stopped_trial_is_expected_to_gain_what_whole_ones_did_in_the_median() -> None:
    found = Qualities("min")
    for trial, rung, end in (("a", 0.9, 0.5), ("b", 0.8, 0.7), ("c", 0.7, 0.4)):
        found.rung(trial, 100, rung)
        found.ended(trial, end)
    found.rung("d", 100, 0.6)
    found.stopped("d")
    found.rung("e", 50, 0.6)
    found.stopped("e")
    found.failed("f")
    found.ended("g", math.nan)
    expected = {"a": -0.5, "b": -0.7, "c": -0.4, "d": -0.3, "f": -0.7, "g": -0.7}
    assert found.known() == pytest.approx(expected), "e passed no rung that a whole one did; failed ones are the worst"


def test_the_process_goes_through_what_was_seen_and_is_unsure_elsewhere() -> None:
    points = np.linspace(0, 0.5, 9)[:, None]
    process = Surrogate(points, np.sin(4 * points[:, 0]), seed=0)
    drawn = process.samples(np.array([[0.25], [0.28], [1.0]]), 400)
    assert drawn.shape == (400, 3)
    assert drawn[:, :2].mean(axis=0) == pytest.approx(np.sin([1.0, 1.12]), abs=0.1)
    assert drawn[:, 2].std() > 2 * drawn[:, 0].std()
    assert np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1] > 0.5, "drawn jointly"


def test_the_gain_by_hand() -> None:
    drawn = np.array([[0.80, 0.50, 0.79, 0.60], [0.80, 0.50, 0.95, 0.88]])  # two trained, two candidates
    gains = expected_gains(drawn, np.array([10.0, 100.0]), np.array([30.0, 50.0]), 0.1, None)
    # At the bar 0.70 there is the trained one of 10; at 0.85 there is none.
    assert gains == pytest.approx([(20 + 30) / 2, (0 + 50) / 2])
    with_baseline = expected_gains(drawn, np.array([10.0, 100.0]), np.array([30.0, 50.0]), 0.1, 0.9)
    assert with_baseline == pytest.approx([(20 + 30) / 2, 0.0]), "above it in the second draw alone"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_a_gain_is_never_more_than_the_speed_and_falls_with_what_is_there(seed: int) -> None:
    draw = np.random.default_rng(seed)
    drawn, trained, speeds = draw.normal(size=(32, 9)), draw.uniform(1, 9, size=4), draw.uniform(1, 9, size=5)
    gains = expected_gains(drawn, trained, speeds, 0.3, None)
    assert (gains >= 0).all()
    assert (gains <= speeds).all()
    assert (expected_gains(drawn, trained + 1, speeds, 0.3, None) <= gains + 1e-12).all()


def model(tolerance: float = 0.05, baseline: Baseline | None = None) -> tuple[Model, Qualities]:
    """A model over a space whose wider networks are slower and whose best learning rate is 0.01."""
    qualities = Qualities("max")
    names = tuple(SPACE.parameters)
    made = Model(SPACE, names, qualities, lambda k: 6400 / float(k["hidden_size"]), 1000, 0, tolerance, baseline)
    return made, qualities


def quality(rate: float, width: int) -> float:
    return 0.9 - 0.2 * math.log10(rate / 0.01) ** 2 - (0.9 if width == 32 else 0.0)


def test_it_chooses_what_is_fast_and_good_enough() -> None:
    made, qualities = model()
    n = 0
    for width in (32, 64, 128):
        for rate in (1e-4, 1e-3, 1e-1, 1.0):
            knobs = {"learning_rate": rate, "hidden_size": width}
            made.begun(f"t{n}", knobs, 6400 / width)
            qualities.ended(f"t{n}", quality(rate, width))
            made.ended(f"t{n}", knobs, 6400 / width)
            n += 1
    asked = [{"learning_rate": r, "hidden_size": w} for w in (128, 64, 32) for r in (3e-4, 0.01, 0.3)]
    assert asked[made.choose(asked)] == {"learning_rate": 0.01, "hidden_size": 64}
    made.begun("live", {"learning_rate": 0.01, "hidden_size": 64}, 100.0)
    assert asked[made.choose(asked)] != {"learning_rate": 0.01, "hidden_size": 64}, "under way, it counts as trained"


def test_with_too_little_known_or_no_speed_it_leaves_the_choice_to_the_first() -> None:
    made, qualities = model()
    asked = [{"learning_rate": 0.01, "hidden_size": 64}] * 3
    assert made.choose(asked) == 0
    for n in range(9):
        made.ended(f"t{n}", {"learning_rate": 0.1, "hidden_size": 64}, 100.0)
        qualities.failed(f"t{n}")
    assert made.choose(asked) == 0


def test_coordinates_lie_in_the_unit_cube_and_words_are_apart() -> None:
    space = Space.of({"amp_dtype": ["fp32", "bf16", "fp16"], "hidden_size": [32, 64, 256]})
    places = Coordinates(space, ("amp_dtype", "hidden_size"))
    one, other = (places.at({"amp_dtype": dtype, "hidden_size": 64}) for dtype in ("fp32", "bf16"))
    assert one.tolist() == pytest.approx([math.sqrt(0.5), 0.0, 0.0, 0.5])
    assert np.linalg.norm(one - other) == pytest.approx(1.0)


def test_a_choice_after_a_thousand_trials_takes_a_fraction_of_a_second() -> None:
    made, qualities = model()
    draw = np.random.default_rng(0)
    for n in range(1000):
        knobs = {"learning_rate": float(10 ** draw.uniform(-4, 0)), "hidden_size": int(draw.choice([32, 64, 128]))}
        qualities.ended(f"t{n}", quality(knobs["learning_rate"], int(knobs["hidden_size"])))
        made.ended(f"t{n}", knobs, 100.0)
    asked = [{"learning_rate": float(10 ** draw.uniform(-4, 0)), "hidden_size": 64} for _ in range(65)]
    began = time.perf_counter()
    for _ in range(5):
        made.choose(asked)
    assert (time.perf_counter() - began) / 5 < 0.3
