"""The frontier: monotone in the micro-batch, and never against what was seen to fit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.memory.footprint import Footprint
from tuning.memory.frontier import Coupling, Frontier

MB = 10**6
FP32: Coupling = (("amp_dtype", "fp32"),)
BF16: Coupling = (("amp_dtype", "bf16"),)
PLAIN = Footprint(60 * MB, 10 * MB, 20 * MB, 10 * MB, 10 * MB)  # 100 MB and 10 MB a sample

events = st.lists(
    st.tuples(st.booleans(), st.sampled_from([FP32, BF16]), st.integers(1, 40), st.integers(0, 600 * MB)), max_size=10
)


def learned(cap_bytes: int | None, history: list[tuple[bool, Coupling, int, int]]) -> Frontier:
    frontier = Frontier(cap_bytes, {FP32: PLAIN})
    for fitted, coupling, micro_batch, peak_bytes in history:
        if fitted:
            frontier.observe_fit(coupling, micro_batch, peak_bytes)
        else:
            frontier.observe_oom(coupling, micro_batch)
    return frontier


def largest(frontier: Frontier, coupling: Coupling = FP32) -> int:
    return max((m for m in range(1, 100) if frontier.judge(coupling, m).fits), default=0)


@settings(max_examples=100, deadline=None)
@given(st.none() | st.integers(0, 600 * MB), events)
def test_what_fits_fits_at_every_smaller_micro_batch(
    cap_bytes: int | None, history: list[tuple[bool, Coupling, int, int]]
) -> None:
    frontier = learned(cap_bytes, history)
    for coupling in (FP32, BF16):
        fits = [frontier.judge(coupling, m).fits for m in range(1, 60)]
        assert fits == sorted(fits, reverse=True)


@settings(max_examples=100, deadline=None)
@given(st.none() | st.integers(0, 600 * MB), events)
def test_what_was_seen_is_respected(cap_bytes: int | None, history: list[tuple[bool, Coupling, int, int]]) -> None:
    frontier = learned(cap_bytes, history)
    for fitted, coupling, micro_batch, _ in history:
        if fitted:
            assert frontier.judge(coupling, micro_batch).fits
        elif not any(f and c == coupling and m >= micro_batch for f, c, m, _ in history):
            assert not frontier.judge(coupling, micro_batch).fits


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 600 * MB), events, st.integers(1, 60))
def test_overshoot_is_positive_exactly_where_refused(
    cap_bytes: int, history: list[tuple[bool, Coupling, int, int]], micro_batch: int
) -> None:
    frontier = learned(cap_bytes, history)
    verdict = frontier.judge(FP32, micro_batch)
    assert (frontier.overshoot_bytes(verdict) > 0) is (not verdict.fits)


def test_the_margin_is_five_percent_of_the_prediction() -> None:
    assert largest(Frontier(210 * MB, {FP32: PLAIN})) == 10
    assert largest(Frontier(210 * MB - 1, {FP32: PLAIN})) == 9
    verdict = Frontier(2**30, {FP32: PLAIN}).judge(FP32, 200)
    assert (verdict.fits, verdict.predicted_bytes) == (False, 2100 * MB)
    assert verdict.reason == "predicted peak 1.96 GiB + 5 % is over the cap of 1.00 GiB"


def test_overshoot_counts_the_margin() -> None:
    frontier = Frontier(200 * MB, {FP32: PLAIN})
    assert frontier.overshoot_bytes(frontier.judge(FP32, 20)) == 115 * MB
    frontier.observe_oom(BF16, 4)
    assert frontier.overshoot_bytes(frontier.judge(BF16, 4)) == 1


def test_an_oom_bounds_its_own_coupling_only() -> None:
    frontier = Frontier(None, {FP32: PLAIN, BF16: PLAIN})
    frontier.observe_oom(FP32, 16)
    frontier.observe_oom(FP32, 32)
    assert frontier.judge(FP32, 16).reason == "micro-batch 16 ran out of memory before"
    assert (largest(frontier, FP32), largest(frontier, BF16)) == (15, 99)


def test_a_peak_above_its_prediction_raises_the_others() -> None:
    frontier = Frontier(400 * MB, {FP32: PLAIN})
    assert largest(frontier) == 28
    frontier.observe_fit(FP32, 10, 100 * MB)  # below the prediction: short samples, nothing learned
    assert largest(frontier) == 28
    frontier.observe_fit(FP32, 2, 150 * MB)  # 1.25 times the prediction
    assert frontier.judge(FP32, 20).predicted_bytes == 375 * MB
    assert largest(frontier) == 20


@pytest.mark.parametrize(("cap_bytes", "reason"), [(None, "there is no cap"), (10**12, "is under the cap")])
def test_reasons_of_what_fits(cap_bytes: int | None, reason: str) -> None:
    frontier = Frontier(cap_bytes, {FP32: PLAIN})
    assert frontier.judge(FP32, 1).reason.endswith(reason)
    assert frontier.judge(BF16, 1).reason == "nothing is known of this coupling"
    frontier.observe_fit(BF16, 8, 0)
    assert frontier.judge(BF16, 4).reason == "micro-batch 8 fitted before"
