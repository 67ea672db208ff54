"""What a probe knows: exact where the machine is; and its two ends."""

from __future__ import annotations

import pytest

from tuning.search.throughput import Probed
from tuning.search.timing import LEAST_FITTED, MicroStep, ends, estimate, once_a_batch

IN_A_BATCH = 4


def batches(seconds: list[float], works: list[float] | None = None, optimizer_s: float = 0.0) -> list[MicroStep]:
    """Returns micro-steps of these seconds, every fourth of which ends a batch."""
    works = works or [1.0] * len(seconds)
    pairs = enumerate(zip(works, seconds, strict=True), start=1)
    return [MicroStep(w, s, optimizer_s if number % IN_A_BATCH == 0 else None) for number, (w, s) in pairs]


def test_equal_steps_give_the_models_throughput_exactly() -> None:
    found = estimate(batches([0.1] * 12, optimizer_s=0.02), 1.0)
    assert found.micro_step_s == pytest.approx(0.1)
    assert found.optimizer_step_s == pytest.approx(0.02)
    probed = Probed({"batch_size": 30, "micro_batch_size": 8}, found.micro_step_s, found.optimizer_step_s, 0.0)
    for batch_size in (8, 30, 64):
        assert found.samples_per_s(batch_size, 8) == pytest.approx(probed.at_batch_size(batch_size))


def test_optimiser_step_is_an_ordinary_one_and_none_is_lost() -> None:
    steps = [MicroStep(1.0, 0.1, 0.3 if number else 9.9) for number in range(12)]
    found = estimate(steps, 1.0)
    assert found.optimizer_step_s == pytest.approx(0.3)
    assert found.samples_per_s(8, 8) == pytest.approx(8 / (0.1 + (11 * 0.3 + 9.9) / 12))


def test_the_mix_of_lengths_does_not_shift_the_mean() -> None:
    works = [3.0, 5.0, 4.0, 8.0, 6.0, 7.0, 3.0, 9.0, 5.0, 4.0, 6.0, 8.0]
    found = estimate(batches([0.02 + 0.01 * w for w in works], works), 4.0)
    assert found.micro_step_s == pytest.approx(0.06)


def test_no_line_is_fitted_to_few_steps_or_one_that_falls() -> None:
    few = [1.0, 2.0, 3.0, 4.0]
    assert estimate(batches([0.1 * w for w in few], few), 1.0).micro_step_s == pytest.approx(0.25)
    works = [float(number) for number in range(LEAST_FITTED)]
    falling = estimate(batches([1.0 - 0.01 * w for w in works], works), 100.0)
    assert falling.micro_step_s == pytest.approx(0.965)


@pytest.mark.parametrize(
    ("rate", "spent_s", "end"),
    [(100.0, 2.0, ""), (100.0, 2.6, ""), (100.0, 2.61, "time"), (74.0, 0.5, "cannot win"), (76.0, 0.5, "")],
)
def test_a_probe_ends_by_its_time_or_where_it_cannot_win(rate: float, spent_s: float, end: str) -> None:
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
