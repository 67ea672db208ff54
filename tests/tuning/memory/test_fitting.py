"""What fits a card: verdicts, the largest micro-batch, and the levers where nothing does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuning.memory.logs import KIB, MIB, prediction, step
from trainables.knobs import Scalar
from tuning.memory.allocator import replay
from tuning.memory.fitting import MARGIN_FRAC, MOST, Kernels, cell, fit, largest_that_fits, needed_bytes, verdict
from tuning.memory.levers import Asked, Lever, chunked_cross_entropy, levers
from tuning.memory.peaks import peak_of
from tuning.memory.prediction import Confidence, Prediction, Trace

GIB = 2**30
kernels = pytest.mark.parametrize("kernels", ["cuda", "cpu"])


def test_verdicts() -> None:
    assert verdict(100, None, "traced") == ""
    assert [verdict(n, 1050, "traced") for n in (1000, 1001, 1050, 1051)] == ["fits", "tight", "tight", "no"]
    assert [verdict(n, 1050, "fallback") for n in (807, 808, 1050)] == ["fits", "tight", "tight"]


@kernels
def test_a_cell_needs_the_capacity_on_a_card_and_what_is_live_on_the_cpu(kernels: Kernels) -> None:
    found = cell(prediction(), 5, GIB, kernels)
    peak = peak_of(step(5))
    assert found is not None
    assert found.peak == peak
    assert (
        found.needed_bytes
        == needed_bytes(peak, kernels)
        == (peak.capacity_bytes if kernels == "cuda" else peak.live_bytes)
    )
    assert found.share_frac == found.needed_bytes / GIB


@kernels
@settings(max_examples=20, deadline=None)
@given(st.integers(10 * MIB, GIB), st.sampled_from(list(MARGIN_FRAC)))
def test_the_largest_fits_with_its_margin_and_one_more_does_not(
    kernels: Kernels, usable_bytes: int, confidence: Confidence
) -> None:
    known = replace(prediction(), confidence=confidence)
    largest = largest_that_fits(known, usable_bytes, kernels)
    assert largest is not None

    def fits(micro_batch: int) -> bool:
        limit = int(usable_bytes / (1 + MARGIN_FRAC[confidence]))
        if kernels == "cpu":
            return peak_of(step(micro_batch)).live_bytes <= limit
        return replay(step(micro_batch).events, capacity_bytes=limit).failed_at is None

    assert largest == 0 or fits(largest)
    assert not fits(largest + 1)


def test_a_small_model_fits_with_as_many_samples_as_a_batch_can_have() -> None:
    assert largest_that_fits(prediction(width_bytes=KIB, sample_bytes=1), 8 * GIB, "cuda") == MOST


def test_what_cannot_be_derived_is_left_out() -> None:
    only = replace(prediction(), traces=(step(2),))
    found = fit({"amp_dtype": "fp32"}, only, [1, 2, 4], GIB, "cuda")
    assert ([c.micro_batch for c in found.cells], found.largest, found.largest_cell) == ([2], None, None)
    nothing = fit({}, Prediction("none", ("a custom operator",), (), 0.1), [1, 2], GIB, "cuda")
    assert (nothing.cells, nothing.largest, nothing.notes) == ((), None, ("a custom operator",))
    unlimited = fit({}, prediction(), [1, 2], None, "cuda")
    assert ([c.verdict for c in unlimited.cells], unlimited.largest) == (["", ""], None)


def predicted(knobs: Mapping[str, Scalar]) -> Prediction:
    """Returns a model of six layers, in which each knob does what it is for."""
    width = 64 * MIB * int(knobs.get("hidden_size", 128)) // 128
    sample = 40 * MIB // (2 if knobs.get("amp_dtype") == "bf16" else 1)
    sample //= 4 if knobs.get("activation_checkpointing") else 1
    return prediction(
        layers=6, width_bytes=width // {"none": 1, "dora": 8, "lora": 10}[str(knobs["adapter"])], sample_bytes=sample
    )


def asked(usable_mib: int, micro_batch: int = 1, **knobs: Scalar) -> Asked:
    base: dict[str, Scalar] = {"adapter": "none", "amp_dtype": "fp32", "fused_optimizer": True, **knobs}
    return Asked(base, micro_batch, usable_mib * MIB, "cuda", ("adapter", "hidden_size"))


def names(found: list[Lever]) -> list[str]:
    return [lever.name for lever in found]


def test_levers_stop_at_the_first_that_is_enough() -> None:
    """At 16 samples activations take 3.8 GiB; at two the optimiser's step is the peak, with five times the weights."""
    found = levers(asked(2300, 16), predicted)
    assert [(lever.name, lever.knobs, lever.verdict) for lever in found] == [
        ("micro-batch of 2", {"micro_batch_size": 2}, "fits")
    ]
    assert names(levers(asked(2300, 16, fused_optimizer=False), predicted)) == ["micro-batch of 2"]


def test_levers_come_from_the_cheapest_to_the_dearest() -> None:
    found = levers(asked(700), predicted)  # five times 384 MiB of weights: only what shrinks them helps
    assert [(lever.name, lever.verdict) for lever in found] == [("dora adapters", "fits")]
    found = levers(asked(900, 8, adapter="lora"), predicted)
    assert names(found) == ["micro-batch of 2"]
    found = levers(asked(120, 1, adapter="dora"), predicted)
    assert found[-1].name.startswith("activation checkpointing + bf16 autocast + lora adapters + width of 64")
    assert found[-1].needed_bytes == min(lever.needed_bytes for lever in found if lever.needed_bytes is not None)
    assert found[-1].knobs["adapter"] == "lora"


def test_a_lever_that_saves_nothing_is_not_named() -> None:
    found = levers(asked(100, activation_checkpointing=True, amp_dtype="bf16"), predicted)
    assert "activation checkpointing" not in names(found)
    assert "AdamW of 8 bits" not in names(found)  # the formula knows nothing of it
    assert all(lever.knobs or lever.of_code for lever in found)


def test_nothing_is_said_of_a_step_that_cannot_be_predicted() -> None:
    assert levers(asked(100), lambda _: Prediction("none", (), (), 0.0)) == []


def loss_of(tokens: int, vocabulary: int) -> Trace:
    """Returns a loss over a large vocabulary: logits, their log-softmax, its gradient, that of the logits."""
    size = 4 * tokens * vocabulary
    events = ((0, size), (1, size), (2, size), (1, -1), (2, -1), (0, -1))
    ops = ("aten::mm", "aten::_log_softmax", "aten::_log_softmax_backward_data")
    return Trace(1, events, {0: "activation", 1: "activation", 2: "temporary"}, ((0, "forward"),), ops)


def test_cross_entropy_in_chunks_holds_a_part_of_the_log_softmax_at_a_time() -> None:
    trace = loss_of(1024, 32_000)
    whole, chunked = peak_of(trace).live_bytes, peak_of(chunked_cross_entropy(trace, 8)).live_bytes
    assert (whole, chunked) == (3 * 4 * 1024 * 32_000, round((1 + 2 / 8) * 4 * 1024 * 32_000))
    known = Prediction("traced", (), (trace, replace(trace, micro_batch=2)), 0.1)
    found = levers(asked(250), lambda _: known)
    assert [(lever.name, lever.of_code, lever.verdict) for lever in found] == [
        ("cross-entropy in 8 chunks", True, "fits")
    ]
