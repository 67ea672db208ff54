"""What a probe knows: exact where the machine is, an interval that holds where it is not; and its three ends."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest

from tuning.search.probing import GROUPS, LEAST_FITTED, LEAST_S, MicroStep, Progress, ends, estimate
from tuning.search.throughput import Probed
from tuning.stats.uncertainty import t_975

IN_A_BATCH = 4


def batches(seconds: list[float], works: list[float] | None = None, optimizer_s: float = 0.0) -> list[MicroStep]:
    """Returns micro-steps of these seconds, every fourth of which ends a batch."""
    works = works or [1.0] * len(seconds)
    pairs = enumerate(zip(works, seconds, strict=True), start=1)
    return [MicroStep(w, s, optimizer_s if number % IN_A_BATCH == 0 else None) for number, (w, s) in pairs]


def test_equal_steps_are_known_exactly_and_give_the_models_throughput() -> None:
    found = estimate(batches([0.1] * 12, optimizer_s=0.02), 1.0)
    assert found.micro_step_s == pytest.approx(0.1)
    assert found.optimizer_step_s == pytest.approx(0.02)
    assert found.spread_frac == pytest.approx(0.0, abs=1e-12)
    probed = Probed({"batch_size": 30, "micro_batch_size": 8}, found.micro_step_s, found.optimizer_step_s, 0.0)
    for batch_size in (8, 30, 64):
        assert found.samples_per_s(batch_size, 8) == pytest.approx(probed.at_batch_size(batch_size))


def test_the_interval_of_independent_steps_is_students() -> None:
    seconds = [0.10, 0.12, 0.09, 0.11, 0.13, 0.08]
    half_s = t_975(5) * statistics.stdev(seconds) / math.sqrt(6)
    assert estimate(batches(seconds), 1.0).spread_frac == pytest.approx(half_s / statistics.fmean(seconds))


def test_the_optimiser_step_counts_as_often_as_it_happens() -> None:
    steps = [MicroStep(1.0, 0.1, 0.2 if number % 2 else 0.4) for number in range(6)]
    whole = [0.3 if number % 2 else 0.5 for number in range(6)]
    found = estimate(steps, 1.0)
    assert found.optimizer_step_s == pytest.approx(0.3)
    assert found.samples_per_s(8, 8) == pytest.approx(8 / 0.4)
    half_s = t_975(5) * statistics.stdev(whole) / math.sqrt(6)
    assert found.spread_frac == pytest.approx(half_s / 0.4)


def test_the_mix_of_lengths_is_no_part_of_the_interval_and_does_not_shift_the_mean() -> None:
    works = [3.0, 5.0, 4.0, 8.0, 6.0, 7.0, 3.0, 9.0, 5.0, 4.0, 6.0, 8.0]
    found = estimate(batches([0.02 + 0.01 * w for w in works], works), 4.0)
    assert found.micro_step_s == pytest.approx(0.06)
    assert found.spread_frac == pytest.approx(0.0, abs=1e-9)


def test_no_line_is_fitted_to_few_steps_nor_where_more_work_took_less_time() -> None:
    few = [1.0, 2.0, 3.0, 4.0]
    assert estimate(batches([0.1 * w for w in few], few), 1.0).micro_step_s == pytest.approx(0.25)
    works = [float(number) for number in range(LEAST_FITTED)]
    falling = estimate(batches([1.0 - 0.01 * w for w in works], works), 100.0)
    assert falling.micro_step_s == pytest.approx(0.965)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_below_three_degrees_of_freedom_there_is_no_interval(count: int) -> None:
    assert estimate(batches([0.1, 0.2, 0.3][:count]), 1.0).spread_frac == 1.0


def test_an_estimate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="one micro-step at least, got 0"):
        estimate([], 1.0)


@pytest.mark.parametrize(("count", "likeness", "least"), [(12, 0.0, 0.92), (40, 0.0, 0.92), (200, 0.6, 0.9)])
def test_the_interval_holds_the_mean_as_often_as_it_says(count: int, likeness: float, least: float) -> None:
    """Micro-steps of work that varies by 17 %, the rest of them by 5 %; those of the last case come in runs."""
    draw, held, runs = random.Random(0), 0, 500
    for _ in range(runs):
        noise, works, seconds = draw.gauss(0, 1), [], []
        for _ in range(count):
            noise = likeness * noise + math.sqrt(1 - likeness**2) * draw.gauss(0, 1)
            works.append(1 + 0.17 * draw.gauss(0, 1))
            seconds.append(0.1 * (works[-1] + 0.05 * noise))
        found = estimate(batches(seconds, works), 1.0)
        held += abs(found.micro_step_s - 0.1) <= found.spread_frac * found.micro_step_s
    assert least <= held / runs <= 0.98


def test_a_machine_that_slows_down_widens_the_interval() -> None:
    drift = [0.1 + 0.01 * number for number in range(GROUPS)]
    turns = [drift[(3 * number) % GROUPS] for number in range(GROUPS)]
    assert estimate(batches(drift), 1.0).spread_frac > 1.5 * estimate(batches(turns), 1.0).spread_frac


GOING = Progress(samples_per_s=100.0, spread_frac=0.05, spent_s=2.0, measured_s=1.6, longest_s=0.4)


@pytest.mark.parametrize(
    ("change", "best", "end"),
    [
        ({}, 0.0, ""),
        ({"spread_frac": 0.03}, 0.0, "interval"),
        ({"spread_frac": 0.03, "measured_s": LEAST_S / 2}, 0.0, ""),
        ({"spent_s": 1.0}, 104.0, ""),
        ({"spent_s": 1.2}, 104.0, "time"),
        ({"spent_s": 1.2}, 100.0, ""),
        ({}, 106.0, "cannot win"),
        ({"spread_frac": 0.02}, 106.0, "cannot win"),
        ({"spent_s": 0.6, "measured_s": LEAST_S / 2}, 106.0, ""),
        ({"measured_s": LEAST_S / 2, "spread_frac": 1.0}, 134.0, "cannot win"),
        ({"spent_s": 2.61}, 0.0, "time"),
        ({"spent_s": 0.5, "longest_s": 2.6}, 0.0, "time"),
        ({"spent_s": 9.0, "spread_frac": 0.01}, 0.0, "interval"),
    ],
)
def test_a_probe_ends_by_its_interval_when_it_cannot_win_and_before_its_time(
    change: dict[str, float], best: float, end: str
) -> None:
    assert ends(replace(GOING, **change), time_s=3.0, spread_frac=0.03, best_samples_per_s=best) == end
