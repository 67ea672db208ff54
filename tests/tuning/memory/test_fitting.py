"""What fits a card before there is one: the words, the largest micro-batch, and that a study says the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuning.memory.logs import KIB, MIB, prediction, step
from trainables.our_knobs import EVERY
from tuning.memory.fitting import MAX_MICRO_BATCH, TIGHT, Fit, Kernels, fit, needed_bytes
from tuning.memory.guard import MemoryGuard
from tuning.memory.peaks import peak_of
from tuning.memory.prediction import Confidence, Prediction
from tuning.memory.profile import MemoryProfile

GIB = 2**30
SIZES = (1, 4, 16, 64, 128)
PEAKS = [peak_of(step(m)) for m in SIZES]
kernels = pytest.mark.parametrize("kernels", ["cuda", "cpu"])
confidences = st.sampled_from(["traced", "workspaces modelled", "workspaces unseen", "fallback"])


@kernels
@settings(max_examples=25)
@given(st.integers(5 * MIB, GIB), confidences)
def test_a_study_says_the_same_of_every_size(kernels: Kernels, usable_bytes: int, confidence: Confidence) -> None:
    """What `estimate` calls no is what the guard of a study refuses, whose profile is of the same prediction."""
    known = replace(prediction(), confidence=confidence)
    guard = MemoryGuard(usable_bytes, {(): MemoryProfile.from_peaks(PEAKS, confidence, cuda=kernels == "cuda")}, EVERY)
    found = fit({}, known, SIZES, usable_bytes, kernels)
    assert [(c.verdict != "no", c.p_oom) for c in found.cells] == [
        (guard.judge((), m).fits, guard.p_oom((), m)) for m in SIZES
    ]
    assert all((c.verdict == "fits") is ((c.p_oom or 0.0) <= TIGHT) for c in found.cells)
    assert found.largest is not None
    for c in found.cells:
        # A capacity is known to half a percent, from above.
        assert (c.micro_batch <= found.largest) is (c.verdict != "no") or abs((c.p_oom or 0.0) - 0.5) < 0.5


@kernels
def test_a_cell_needs_capacity_on_a_card_live_bytes_on_the_cpu(kernels: Kernels) -> None:
    (found,) = fit({}, prediction(), [5], GIB, kernels).cells
    peak = peak_of(step(5))
    assert found.peak == peak
    wanted = peak.capacity_bytes if kernels == "cuda" else peak.live_bytes
    assert found.needed_bytes == needed_bytes(peak, kernels) == wanted
    assert found.share_frac == found.needed_bytes / GIB


@kernels
@settings(max_examples=20)
@given(st.integers(100 * MIB, GIB), confidences)
def test_the_largest_fits_and_one_more_does_not(kernels: Kernels, usable_bytes: int, confidence: Confidence) -> None:
    def around(micro_batches: list[int]) -> Fit:
        return fit({}, replace(prediction(), confidence=confidence), micro_batches, usable_bytes, kernels)

    found = around([1, 2])
    assert found.largest_cell.verdict in ("fits", "tight")
    assert around([1, 2, found.largest + 1]).cells[-1].verdict == "no"


def test_a_small_model_fits_with_the_largest_batch_there_is() -> None:
    assert fit({}, prediction(width_bytes=KIB, sample_bytes=1), [1], 8 * GIB, "cuda").largest == MAX_MICRO_BATCH


def test_what_cannot_be_derived_is_left_out() -> None:
    only = replace(prediction(), traces=(step(2),))
    found = fit({"amp_dtype": "fp32"}, only, [1, 2, 4], GIB, "cuda")
    assert ([c.micro_batch for c in found.cells], found.largest, found.largest_cell) == ([2], None, None)
    nothing = fit({}, Prediction("none", ("a custom operator",), ()), [1, 2], GIB, "cuda")
    assert (nothing.cells, nothing.largest, nothing.notes) == ((), None, ("a custom operator",))
    unlimited = fit({}, prediction(), [1, 2], None, "cuda")
    assert ([c.verdict for c in unlimited.cells], unlimited.largest) == (["", ""], None)
