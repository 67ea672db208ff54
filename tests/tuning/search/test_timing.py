"""What a probe knows: exact where the machine is, an interval that holds where it is not; and its two ends."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from tuning.search.throughput import Probed
from tuning.search.timing import LEAST_FITTED, LEAST_STEPS, PARTS, MicroStep, ends, estimate, once_a_batch
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


def test_the_interval_is_students_of_the_means_of_equal_parts() -> None:
    means = [0.10, 0.12, 0.09, 0.11, 0.13, 0.08]
    seconds = [mean + shift for mean in means for shift in (-0.03, 0.0, 0.03)]
    half_s = t_975(5) * statistics.stdev(means) / math.sqrt(6)
    assert estimate(batches(seconds), 1.0).spread_frac == pytest.approx(half_s / statistics.fmean(means))


def test_the_optimiser_step_counts_as_often_as_it_happens() -> None:
    steps = [MicroStep(1.0, 0.1, 0.2 if number % 2 else 0.4) for number in range(12)]
    found = estimate(steps, 1.0)
    assert found.optimizer_step_s == pytest.approx(0.3)
    assert found.samples_per_s(8, 8) == pytest.approx(8 / 0.4)
    assert found.spread_frac == pytest.approx(0.0, abs=1e-9), "each part has one of each"


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


@pytest.mark.parametrize("count", [1, 3, LEAST_STEPS - 1])
def test_of_few_steps_there_is_no_interval(count: int) -> None:
    assert estimate(batches([0.1] * count), 1.0).spread_frac is None


@pytest.mark.parametrize(("count", "likeness"), [(12, 0.0), (40, 0.0), (200, 0.6), (400, 0.9), (2000, 0.96)])
def test_the_interval_holds_the_mean_as_often_as_it_says(count: int, likeness: float) -> None:
    """Micro-steps of work that varies by 17 %, the rest of them by 5 %, in runs of up to a fortieth of the probe.

    `likeness` is the correlation of neighbouring steps; a run lasts (1 + likeness) / (1 - likeness) of them: 1, 4, 19
    and 49.
    """
    draw, held, trials = random.Random(0), 0, 300
    for _ in range(trials):
        noise, works, seconds = draw.gauss(0, 1), [], []
        for _ in range(count):
            noise = likeness * noise + math.sqrt(1 - likeness**2) * draw.gauss(0, 1)
            works.append(1 + 0.17 * draw.gauss(0, 1))
            seconds.append(0.1 * (works[-1] + 0.05 * noise))
        found = estimate(batches(seconds, works), 1.0)
        assert found.spread_frac is not None
        held += abs(found.micro_step_s - 0.1) <= found.spread_frac * found.micro_step_s
    assert 0.9 <= held / trials <= 0.99


def test_a_machine_that_slows_down_widens_the_interval() -> None:
    drift = [0.1 + 0.01 * number for number in range(2 * PARTS)]
    turns = [drift[n // 2 if n % 2 else -1 - n // 2] for n in range(2 * PARTS)]
    assert estimate(batches(drift), 1.0).spread_frac > 1.2 * estimate(batches(turns), 1.0).spread_frac


@pytest.mark.parametrize(
    ("rate", "spent_s", "end"),
    [(100.0, 2.0, ""), (100.0, 2.6, ""), (100.0, 2.61, "time"), (74.0, 0.5, "cannot win"), (76.0, 0.5, "")],
)
def test_a_probe_ends_by_its_time_or_where_it_cannot_win_and_never_for_being_narrow(
    rate: float, spent_s: float, end: str
) -> None:
    assert ends(rate, 100.0, spent_s=spent_s, window_s=0.4, time_s=3.0) == end


@pytest.mark.parametrize("accumulation", [2, 4])
def test_what_is_done_once_a_batch_is_told_from_the_micro_steps(accumulation: int) -> None:
    steps = [
        MicroStep(work, 0.01 * work + 0.05 * last, 0.002 if last else None)
        for number in range(64)
        for work, last in [(1.0 + number % 3, number % accumulation == accumulation - 1)]
    ]
    known = estimate(once_a_batch(steps), 2.0)
    assert known.micro_step_s == pytest.approx(0.02, rel=0.05)
    assert known.optimizer_step_s == pytest.approx(0.052, rel=0.05)
    for alike in (steps[:1], [s for s in steps if s.optimizer_s is not None]):
        assert once_a_batch(alike) == alike
