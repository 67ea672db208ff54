"""What to train next: coordinates, the process behind it, the gain it weighs, and the choice."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.config.space import Choice, Range, Space
from tuning.search.acquisition import expected_gains, expected_improvement, gains
from tuning.search.beginning import beginning
from tuning.search.coordinates import Coordinates
from tuning.search.curves import DOUBT, Curves, Line
from tuning.search.outlook import CONTENDERS, OVERHEAD_S, Outlook
from tuning.search.surrogate import WIDER, Surrogate
from tuning.search.throughput import Probed, Rates, ranked
from tuning.stats.pareto import hypervolume_2d

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


@given(st.floats(-3.0, 3.0), st.floats(0.01, 3.0))
def test_an_improvement_is_the_mean_of_what_is_over_zero(over: float, std: float) -> None:
    draws = over + std * np.random.default_rng(0).standard_normal(20_000)
    found = expected_improvement(np.array([over]), np.array([std]))[0]
    assert found == pytest.approx(np.maximum(draws, 0.0).mean(), abs=0.03 * std)
    assert found >= max(over, 0.0) - 1e-12


@given(st.floats(-30.0, 12.0), st.floats(0.01, 3.0))
def test_an_improvement_is_the_closed_form_far_out_too(over: float, std: float) -> None:
    closed = math.exp(-0.5 * over**2) / math.sqrt(2 * math.pi) + 0.5 * over * math.erfc(-over / math.sqrt(2))
    found = expected_improvement(np.array([over * std]), np.array([std]))[0]
    assert found == pytest.approx(closed * std, rel=1e-5)


@given(points, st.integers(1, 9), st.floats(-3.0, 12.0), st.floats(0.1, 3.0))
def test_an_expected_gain_is_the_mean_of_the_gains(
    front: list[tuple[int, int]], speed: int, mean: float, std: float
) -> None:
    shares = (np.arange(4000) + 0.5) / 4000
    qualities = mean + std * np.array([statistics.NormalDist().inv_cdf(share) for share in shares.tolist()])
    array = np.array(front, dtype=float)
    found = expected_gains(array, 0.0, np.array([float(speed)]), np.array([mean]), np.array([std]))[0]
    drawn = gains(array, 0.0, np.full(4000, float(speed)), qualities).mean()
    assert found == pytest.approx(drawn, rel=2e-3, abs=2e-3 * std)


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


def test_what_is_drawn_of_the_process_goes_through_what_it_drew_and_is_the_process_in_the_mean() -> None:
    draw = np.random.default_rng(0)
    seen = draw.random((10, 2))
    own = Surrogate(seen, np.sin(4 * seen[:, 0]) + seen[:, 1], np.zeros(10), 0)
    known, points = seen[:3] + 0.2, np.vstack([seen[:3] + 0.2, [[0.9, 0.1], [0.1, 0.9]]])
    drawn = list(own.drawn(known, points, draw.standard_normal((400, 3))))
    for one in drawn:
        assert one.means[:3] == pytest.approx(one.known, abs=1e-3), "a point that was drawn is known"
        assert one.stds[:3].max() < 0.1 * one.stds[3:].min()
    shares = np.array([one.share for one in drawn])
    means, stds = own.at(points)
    mean = shares @ np.array([one.means for one in drawn]) / shares.sum()
    assert mean == pytest.approx(means, abs=0.1 * stds.max())
    squares = shares @ np.array([(one.means - mean) ** 2 + (one.stds / WIDER) ** 2 for one in drawn]) / shares.sum()
    assert np.sqrt(squares) == pytest.approx(stds, rel=0.2)


@given(st.floats(-0.5, 1.5), st.floats(-1.0, 4.0), st.floats(0.01, 2.0))
def test_a_rung_adds_what_its_line_says_beyond_what_is_known_of_all(rung: float, mean: float, std: float) -> None:
    line = Line.through([(0.1 * n, 1.0 + 0.3 * n + 0.1 * (-1) ** n) for n in range(8)])
    all_std = line.end_std * math.sqrt(1 + 1 / line.count)
    told, told_std = line.refined(rung, np.array([line.end_mean, mean]), np.array([all_std, std]))
    own_std = line.std * math.sqrt(1 + 1 / line.count)
    assert (told[0], told_std[0]) == pytest.approx((line.end(rung)[0], own_std)), (
        "of one like all others the line says it"
    )
    lower, _ = line.refined(rung - 1.0, np.array([mean]), np.array([std]))
    assert lower[0] <= told[1] + 1e-9, "a worse rung promises no more, however bad it is"
    assert told_std[1] <= std + 1e-12, "to know the rung makes nobody less sure"
    nothing = Line.through([(0.5, end) for end in (1.0, 2.0, 3.0, 4.0)])
    same, same_std = nothing.refined(rung, np.array([mean]), np.array([std]))
    assert (same[0], same_std[0]) == (mean, std), "a rung that says nothing leaves what was expected"


def test_what_a_rung_says_is_known_after_four_trainings() -> None:
    curves = Curves()
    rung = (100, False)
    for gain in (0.1, 0.2, 0.3):
        curves.take({rung: 0.5}, 0.5 + gain)
    assert curves.lines() == {}
    assert curves.optimistic(rung, 0.5) is None
    curves.take({rung: 0.2}, 0.6)
    assert list(curves.lines()) == [rung]
    assert curves.optimistic(rung, 0.1) == pytest.approx(0.1 + 1.25 * 0.4)
    assert curves.optimistic((200, False), 0.1) is None
    assert curves.optimistic((100, True), 0.1) is None, "with a phase all is yet to be learned there"


@pytest.mark.parametrize(("slope", "count"), [(1.0, 40), (2.5, 40), (1.0, 4)])
def test_the_end_is_read_off_the_line_of_those_that_got_there(slope: float, count: int) -> None:
    pairs = [(0.1 * n, 3.0 + slope * 0.1 * n) for n in range(count)]
    line = Line.through(pairs)
    assert line.slope == pytest.approx(slope * count / (count + DOUBT))
    assert line.end(line.rung_mean)[0] == pytest.approx(statistics.fmean(end for _, end in pairs))
    assert line.std < statistics.stdev(end for _, end in pairs)


def test_far_from_the_rungs_that_are_known_the_end_is_not() -> None:
    line = Line.through([(0.810, 0.84), (0.812, 0.88), (0.811, 0.83), (0.813, 0.87)])
    assert line.end(0.8115)[1] == pytest.approx(line.std * math.sqrt(1.25))
    guess, std = line.end(0.83)
    assert guess - 2 * std < 0.88, "better than all that were seen, and as doubtful"


@pytest.mark.parametrize("ends", [(1.0, 2.0, 3.0, 4.0), (4.0, 3.0, 2.0, 1.0), (2.0, 2.0, 2.0, 2.0)])
def test_a_rung_that_says_nothing_leaves_the_mean_and_what_they_differ_by(ends: tuple[float, ...]) -> None:
    falling = len(set(ends)) > 1 and ends[0] > ends[-1]  # a better rung is never taken for a worse end
    line = Line.through([(0.1 * n if falling else 0.1 + 0.2, end) for n, end in enumerate(ends)])
    assert (line.slope, line.end(9.0)[0]) == (0.0, statistics.fmean(ends))
    assert line.std == pytest.approx(statistics.stdev(ends))


def taught(mode: Any = "max") -> Outlook:
    """A search that knows: the best learning rate is 1e-3, whatever the rest."""
    own, sign = Outlook(SPACE, NAMES, mode, 1000, 0), 1.0 if mode == "max" else -1.0
    for n, rate in enumerate((1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)):
        quality = sign * (0.9 - 0.2 * abs(math.log10(rate / 1e-3)))
        own.rung(f"t{n}", 500, quality - sign * 0.1)
        own.ended(f"t{n}", knobs(rate), 100.0, quality)
    return own


@pytest.mark.parametrize("mode", ["max", "min"])
def test_of_equals_in_quality_the_faster_is_chosen_and_of_equals_in_speed_the_better(mode: Any) -> None:
    own = taught(mode)
    assert own.choose([knobs(1.1e-3), knobs(1.2e-3)], [100.0, 400.0]) == 1
    assert own.choose([knobs(1.1e-4), knobs(9e-4), knobs(9e-3)], [120.0, 120.0, 120.0]) == 1


def test_nothing_is_chosen_where_too_little_is_known() -> None:
    fresh = Outlook(SPACE, NAMES, "max", 1000, 0)
    assert fresh.choose([knobs(1e-3), knobs(2e-3)], [100.0, 400.0]) == 0
    assert taught().choose([knobs(1e-3), knobs(2e-3)], [None, None]) == 0
    assert taught().choose([knobs(1e-3), knobs(1e-3, 64)], [None, 400.0]) == 1, "one of known speed"


def test_a_diverged_training_and_one_without_value_are_no_quality() -> None:
    own = taught()
    own.ended("lost", knobs(5e-3, 64), 100.0, None)
    own.rung("nan", 500, 0.99)
    own.ended("nan", knobs(1e-3, 64), 100.0, math.nan)
    assert own.choose([knobs(1.1e-3), knobs(1.2e-3)], [100.0, 400.0]) == 1


@pytest.mark.parametrize("mode", ["max", "min"])
def test_hopeless_is_what_an_optimist_gives_up_and_only_beside_one_as_fast(mode: Any) -> None:
    own, sign = taught(mode), 1.0 if mode == "max" else -1.0
    assert own.hopeless(knobs(1e-3), 500, sign * 0.7, 100.0).startswith(
        f"cannot reach the front: {sign * 0.825:.4g} at most"
    )
    assert own.hopeless(knobs(1e-3), 500, sign * 0.85, 100.0) == "", "may come to 0.975"
    assert own.hopeless(knobs(1e-3), 500, sign * 0.1, 101.0) == "", "nobody as fast came to its end"
    assert own.hopeless(knobs(1e-3), 250, sign * 0.1, 100.0) == "", "no training is known from there"
    assert own.hopeless(knobs(1e-3), 500, None, 100.0) == ""


def restless(at_rung: Callable[[float, float], float], mode: Any = "max") -> Outlook:
    """A search in which two trainings of a place differ by luck; `at_rung` gives what is seen half way, of the end."""
    own, draw, sign = Outlook(SPACE, NAMES, mode, 1000, 0), np.random.default_rng(0), 1.0 if mode == "max" else -1.0
    for n, rate in enumerate(np.geomspace(1e-4, 1e-2, 16)):
        quality = 0.9 - 0.2 * abs(math.log10(rate / 1e-3)) + 0.02 * float(draw.standard_normal())
        own.rung(f"t{n}", 500, sign * at_rung(quality, float(draw.random())))
        own.ended(f"t{n}", knobs(float(rate)), 100.0, sign * quality)
    return own


@pytest.mark.parametrize("mode", ["max", "min"])
def test_what_a_rung_would_stop_goes_on_where_that_is_worth_more_than_the_next(mode: Any) -> None:
    own, sign = restless(lambda quality, luck: luck, mode), 1.0 if mode == "max" else -1.0
    good, poor = knobs(1.05e-3), knobs(1e-4)

    def worth_more(outlook: Outlook, config: dict[str, Any], value: float, samples: int = 500) -> bool:
        return outlook.is_worth_more("live", config, samples, sign * value, 100.0, 100.0)

    assert not worth_more(own, good, 0.1), "nothing was chosen yet"
    own.choose([good], [100.0])
    assert worth_more(own, good, 0.1), "the rung says nothing, and half of it is paid for"
    assert not worth_more(own, poor, 0.9), "nor does it make a poor place a good one"
    assert not worth_more(own, good, 0.1, samples=250), "no training is known from there"
    assert not worth_more(own, good, math.nan)
    telling = restless(lambda quality, luck: quality - 0.1, mode)
    telling.choose([good], [100.0])
    assert worth_more(telling, good, 0.9)
    assert not worth_more(telling, good, 0.4), "where a rung tells the end, it is believed"
    assert not worth_more(telling, good, -9.0), "the worse the more"


def test_going_on_is_worth_less_at_a_slower_speed_of_its_own_and_beside_its_like() -> None:
    own, good = restless(lambda quality, luck: luck), knobs(1.05e-3)
    own.choose([good], [100.0])
    own.begun("live", good)
    assert own.is_worth_more("live", good, 500, 0.1, 100.0, 100.0), "it is not its own neighbour"
    assert not own.is_worth_more("live", good, 500, 0.1, 100.0, 20.0), "a try at a fifth of the speed takes five times"
    own.begun("other", good)
    assert not own.is_worth_more("live", good, 500, 0.1, 100.0, 100.0), "the other will tell"


def test_a_place_is_not_given_up_because_its_neighbour_was_lucky() -> None:
    own = restless(lambda quality, luck: quality)
    own.ended("lucky", knobs(1e-3), 100.0, 1.0)
    assert own.choose([knobs(2e-4), knobs(1.3e-3)], [100.0, 100.0]) == 1, "beside it is still the best place"
    assert own.choose([knobs(2e-4), knobs(1.3e-3)], [103.0, 100.0]) == 0, "but not at any price"


def test_the_fast_end_of_the_front_is_known_however_many_are_better() -> None:
    own = restless(lambda quality, luck: quality)
    for n, rate in enumerate(np.geomspace(8e-4, 1.2e-3, 2 * CONTENDERS)):
        own.ended(f"more{n}", knobs(float(rate), 64), 100.0, 0.88 + 0.002 * (5 * n % 12))
    own.ended("fast", knobs(2e-4, 16), 200.0, 0.872)
    own.choose([knobs(2e-4, 16)], [199.0])
    alike = own.offer
    own.choose([knobs(8e-4, 16)], [199.0])
    assert alike is not None
    assert own.offer is not None
    assert alike < 0.1 * own.offer, "what is known gains nothing"


def offered(own: Outlook, rate: float, speed: float) -> float:
    """Returns what a search expects of a configuration, a second."""
    own.choose([knobs(rate)], [speed])
    assert own.offer is not None
    return own.offer


def test_what_is_expected_of_the_next_trial_is_a_share_of_the_area_under_the_front() -> None:
    own = Outlook(SPACE, NAMES, "max", 1000, seed=0)
    assert own.choose([knobs(1e-3)], [100.0]) == 0
    assert own.expected is None, "too few trainings yet"
    for n, quality in enumerate((0.0, 0.5, 0.5, 1.0)):
        own.ended(f"t{n}", knobs(1e-4 * 10 ** (n / 2)), 100.0, quality)
    own.choose([knobs(1e-2), knobs(3e-3)], [50.0, 200.0])
    assert own.expected is not None
    assert own.offer is not None
    area = 100.0 * (1.0 - own._fit().floor)
    gains = {}
    for rate, speed in ((1e-2, 50.0), (3e-3, 200.0)):
        gains[speed] = offered(own, rate, speed) * (1000 / speed + OVERHEAD_S)
    own.choose([knobs(1e-2), knobs(3e-3)], [50.0, 200.0])
    most = max(gain / (1000 / speed + OVERHEAD_S) for speed, gain in gains.items())
    assert own.expected == pytest.approx((max(gains.values()) / area, most / area))
    assert own.choose([knobs(1e-2)], [None]) == 0
    assert own.expected == pytest.approx((max(gains.values()) / area, most / area)), "as of the last choice"


def test_what_ended_since_the_process_was_made_is_on_the_front_at_once() -> None:
    own = taught()
    for n in range(121):
        own.ended(f"n{n}", knobs(1e-4), 100.0, 0.7)
    before, process = offered(own, 1e-2, 200.0), own._fit().surrogate
    own.ended("fast", knobs(1e-3), 210.0, 1.0)
    assert own._fit().surrogate is process, "of 129 trials it knows 128"
    assert offered(own, 1e-2, 200.0) < 0.5 * before


def test_a_speed_that_was_said_anew_counts_at_once() -> None:
    own = taught()
    before = offered(own, 1e-3, 150.0)
    own.rated({"t3": 160.0}, {"t3": (160.0, 0.9)})
    assert offered(own, 1e-3, 150.0) < 0.1 * before, "what it would gain has been gained"


def test_a_stopped_training_counts_by_what_it_would_have_come_to() -> None:
    own = taught()
    for n in range(4):
        own.rung(f"s{n}", 500, 0.05)
        own.stopped(f"s{n}", knobs(1e-3, 64, "bf16"))
    alike, other = knobs(1.05e-3, 64, "bf16"), knobs(1.05e-3, 32, "fp32")
    assert own.choose([alike, other], [110.0, 110.0]) == 1


PROBED = [
    Probed({"amp_dtype": "fp32", "batch_size": 64, "micro_batch_size": 32}, 0.3, 0.01, 200.0),
    Probed({"amp_dtype": "bf16", "batch_size": 64, "micro_batch_size": 16}, 0.1, 0.01, 150.0),
]


def test_a_search_begins_with_the_defaults_and_with_the_fastest_that_was_probed() -> None:
    first, second = beginning(SPACE, NAMES, knobs(1e-3, 16), PROBED)
    assert first == knobs(1e-3, 16)
    assert (second["amp_dtype"], second["batch_size"]) == ("bf16", 64)
    assert second["learning_rate"] == pytest.approx(2e-3), "twice, for a batch four times as large"
    assert beginning(SPACE, NAMES, knobs(8e-3, 16), PROBED)[1]["learning_rate"] == 1e-2, "no further than the range"
    assert beginning(SPACE, NAMES, knobs(1e-3), []) == [knobs(1e-3)]
    assert beginning(SPACE, NAMES, knobs(1e-3, 64, "bf16"), PROBED) == [knobs(1e-3, 64, "bf16")]


def test_speeds_are_those_of_the_probes_and_unknown_where_nobody_probed() -> None:
    rates = Rates(PROBED, SPACE)
    for values in (knobs(1e-3, 64), knobs(2e-3, 64), knobs(1e-3, 64, "bf16")):
        assert list(rates.ranked(values)) == ranked(PROBED, values)
    assert not list(rates.ranked(knobs(1e-3, 16))), "the batch is smaller than what was measured"
    assert not list(Rates([], SPACE).ranked(knobs(1e-3)))


def test_a_phase_that_probes_did_not_run_costs_what_trials_with_it_took_over_those_without() -> None:
    space = Space({**SPACE.parameters, "encoder_frac": Choice((0.0, 0.25, 0.5))})
    rates, plain = Rates(PROBED, space), {**knobs(1e-3, 64), "micro_batch_size": 32}
    probed = rates.of(plain)
    assert probed is not None
    halves = {**plain, "encoder_frac": 0.5}
    rates.learn(halves, probed * 0.8 / 2)
    assert rates.of(halves) == probed, "nobody knows what the neighbours of the trial cost"
    rates.learn(plain, probed * 0.8)  # beside a neighbour a trial has four fifths of what the probe had
    assert rates.of(plain) == probed
    assert rates.of(halves) == pytest.approx(probed / 2)
    assert rates.of({**plain, "encoder_frac": 0.25}) == pytest.approx(probed / 1.5)
    found = next(rates.ranked({**knobs(1e-3, 64), "encoder_frac": 0.5}), None)
    assert found is not None
    assert found.samples_per_s == pytest.approx(probed / 2)


def test_a_named_configuration_outside_the_space_begins_no_search() -> None:
    wide = Probed({"amp_dtype": "fp16", "batch_size": 64, "micro_batch_size": 64}, 0.01, 0.01, 3000.0)
    assert beginning(SPACE, NAMES, knobs(1e-3, 16), [wide, *PROBED]) == beginning(SPACE, NAMES, knobs(1e-3, 16), PROBED)
    assert beginning(SPACE, NAMES, knobs(1e-3, 16), [wide]) == [knobs(1e-3, 16)]


def test_what_failed_is_kept_away_from_and_what_does_not_fit_is_not_chosen() -> None:
    own = taught()
    for n in range(3):
        own.failed(f"f{n}", knobs(1.2e-3 * (n + 1), 64, "bf16"))
    tempting, safe = knobs(1.3e-3, 64, "bf16"), knobs(1.3e-3, 32, "fp32")
    assert own.choose([tempting, safe], [150.0, 150.0]) == 1
    assert own.choose([safe, knobs(1e-3)], [150.0, None]) == 0
    assert own.choose([knobs(1e-3), safe], [None, 150.0]) == 1


def test_what_is_under_way_is_not_chosen_again_until_it_has_ended() -> None:
    own = taught()
    best, other = knobs(1.05e-3, 64), knobs(6e-4, 16, "bf16")
    assert own.choose([best, other], [150.0, 140.0]) == 0
    own.begun("live", best)
    assert own.choose([best, other], [150.0, 140.0]) == 1
    own.dropped("live")
    assert own.choose([best, other], [150.0, 140.0]) == 0


def test_of_a_thousand_trials_the_process_is_made_anew_at_every_fifteenth_and_the_same_after_a_resume() -> None:
    def search(*, chooses: bool) -> tuple[Outlook, set[int]]:
        draw, own, made = np.random.default_rng(0), taught(), set[int]()
        for n in range(1000):
            rate, speed = float(10 ** draw.uniform(-4, -2)), float(100 + 10 * draw.random())
            own.ended(f"n{n}", knobs(rate), speed, 0.9 - 0.2 * abs(math.log10(rate / 1e-3)))
            if chooses and n >= 960:
                own.choose([knobs(1e-3)], [100.0])
                made.add(id(own._fit().surrogate))
        for last in (111.0, 112.0):  # after the process was last made
            own.ended(f"fast{last}", knobs(1.1e-3), last, 0.88)
        return own, made

    own, made = search(chooses=True)
    assert len(made) <= 4
    again, _ = search(chooses=False)
    asked = [knobs(2e-3), knobs(1.2e-3), knobs(1e-3, 64)], [110.0, 113.0, 111.5]
    assert again.choose(*asked) == own.choose(*asked)
    assert again.offer == own.offer


def test_many_stopped_trials_before_the_first_whole_ones_are_no_trouble() -> None:
    own = Outlook(SPACE, NAMES, "max", 1000, 0)
    for n in range(200):
        own.rung(f"s{n}", 500, 0.1)
        own.stopped(f"s{n}", knobs(1e-3))
    for n in range(4):
        own.ended(f"w{n}", knobs(1e-3 * (n + 1)), 100.0, 0.5 + 0.1 * n)
    assert own.choose([knobs(1e-3), knobs(4e-3)], [100.0, 100.0]) == 1


def test_stopped_trials_that_promise_more_than_all_that_ended_leave_a_front_to_draw() -> None:
    own = Outlook(SPACE, NAMES, "max", 1000, 0)
    for n in range(4):
        own.rung(f"w{n}", 500, 0.1 * n)
        own.ended(f"w{n}", knobs(1e-3 * (n + 1)), 100.0, 0.1 + 0.1 * n)
    for n in range(200):
        own.rung(f"s{n}", 500, 0.9)
        own.stopped(f"s{n}", knobs(2e-3 + 1e-6 * n, 64))
    assert own.choose([knobs(1e-3), knobs(2.1e-3, 64)], [100.0, 100.0]) == 1


def test_where_hardly_anything_is_to_be_gained_it_is_what_may_gain_most_and_fits() -> None:
    own = taught()
    own.ended("all", knobs(1e-3), 1e6, 0.9)  # faster than anything can be, and as good as the best
    slow = [knobs(1e-4), knobs(2e-4), knobs(3e-4)]
    assert own.choose(slow, [1e-3, 1e-3, 1e-3]) == 2
    assert own.offer == pytest.approx(0.0, abs=1e-9)
    assert own.offer != 0.0
    assert own.choose(slow, [1e-3, 1e-3, None]) == 1
