"""The guard: monotone in the micro-batch, and never against what was seen to fit."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.our_knobs import EVERY
from tuning.memory.guard import GRADIENTS_HELD, MemoryGroup, MemoryGuard
from tuning.memory.need import MARGINS
from tuning.memory.profile import SOURCES, MemoryProfile, Point

MB = 10**6
FP32: MemoryGroup = (("amp_dtype", "fp32"),)
BF16: MemoryGroup = (("amp_dtype", "bf16"),)
FLOOR_BYTES = 80 * MB
PLAIN = MemoryProfile.from_measured(FLOOR_BYTES, [(m, (100 + 10 * m) * MB) for m in (2, 8)])

kinds, groups = st.sampled_from(["fit", "whole", "oom"]), st.sampled_from([FP32, BF16])
events = st.lists(st.tuples(kinds, groups, st.integers(1, 40), st.integers(0, 600 * MB)), max_size=8)
History = list[tuple[str, MemoryGroup, int, int]]
caps = st.none() | st.integers(0, 600 * MB)


def learned(cap_bytes: int | None, history: History) -> MemoryGuard:
    guard = MemoryGuard(cap_bytes, {FP32: PLAIN}, EVERY)
    for kind, group, micro_batch, peak_bytes in history:
        for m in range(1, 50, 6):
            guard.fitting(group, m)  # what was asked before something is observed is not kept after it
        if kind == "oom":
            guard.observe_oom(group, micro_batch)
        else:
            guard.observe_fit(group, micro_batch, peak_bytes, whole=kind == "whole")
    return guard


def largest(guard: MemoryGuard, group: MemoryGroup = FP32) -> int:
    return max((m for m in range(1, 100) if guard.judge(group, m).fits), default=0)


@settings(max_examples=25)
@given(caps, events)
def test_what_fits_fits_at_every_smaller_micro_batch(cap_bytes: int | None, history: History) -> None:
    guard = learned(cap_bytes, history)
    for group in (FP32, BF16):
        judged = [guard.judge(group, m) for m in range(1, 50)]
        launched = [guard.judge(group, m, shrink=True) for m in range(1, 50)]
        assert [guard.fitting(group, m) for m in range(1, 50)] == [v.micro_batch * v.fits for v in launched]
        assert [v.fits for v in judged] == sorted((v.fits for v in judged), reverse=True)
        p = [v.p_oom for v in judged if v.p_oom is not None and v.reason.startswith("predicted")]
        assert all(a <= b + 1e-9 for a, b in itertools.pairwise(p))


@settings(max_examples=25)
@given(caps, events)
def test_what_was_seen_is_respected(cap_bytes: int | None, history: History) -> None:
    guard = learned(cap_bytes, history)
    fitted = [(c, m) for kind, c, m, b in history if kind == "whole" and (cap_bytes is None or b <= cap_bytes)]
    assert all(guard.judge(group, m).action == "launch" for group, m in fitted)
    for kind, group, micro_batch, _ in history:
        if kind == "oom" and not any(c == group and m >= micro_batch for c, m in fitted):
            assert guard.judge(group, micro_batch).action == "refuse"


@settings(max_examples=25)
@given(caps, events, events, st.integers(1, 40))
def test_knowing_more_never_refuses_what_was_seen_to_fit(
    cap_bytes: int | None, before: History, after: History, micro_batch: int
) -> None:
    guard = learned(cap_bytes, [*before, ("whole", FP32, micro_batch, 0), *after])
    assert all(guard.judge(FP32, m).fits for m in range(1, micro_batch + 1))


@settings(max_examples=25)
@given(st.integers(0, 600 * MB), events, st.integers(1, 60), st.booleans())
def test_overshoot_is_positive_if_refused(cap_bytes: int, history: History, micro_batch: int, shrink: bool) -> None:
    guard = learned(cap_bytes, history)
    verdict = guard.judge(FP32, micro_batch, shrink=shrink)
    assert (guard.overshoot_bytes(verdict) > 0) is (verdict.action == "refuse")


@settings(max_examples=25)
@given(caps, events, st.integers(1, 64))
def test_halving_stops_at_the_largest_half_that_fits(cap_bytes: int | None, history: History, micro_batch: int) -> None:
    guard = learned(cap_bytes, history)
    halves = [micro_batch >> n for n in range(micro_batch.bit_length())]
    fitting = [m for m in halves if guard.judge(FP32, m).fits]
    verdict = guard.judge(FP32, micro_batch, shrink=True)
    action = "refuse" if not fitting else "launch" if fitting[0] == micro_batch else "halve"
    assert (verdict.action, verdict.micro_batch) == (action, fitting[0] if fitting else micro_batch)


@settings(max_examples=25)
@given(events, st.integers(0, 79 * MB), st.integers(1, 64))
def test_nothing_fits_below_parameters_and_optimizer_state(history: History, cap_bytes: int, micro_batch: int) -> None:
    guard = learned(cap_bytes, history)
    assert guard.p_oom(FP32, micro_batch) == 1.0
    assert (guard.predicted_bytes(FP32, micro_batch) or 0) >= 80 * MB


def test_a_bolder_threshold_launches_more() -> None:
    guard = MemoryGuard(200 * MB, {FP32: PLAIN}, EVERY)
    cautious, bold = (max(m for m in range(1, 64) if guard.judge(FP32, m, threshold=t).fits) for t in (0.02, 0.98))
    assert cautious < 10 <= bold


def test_overshoot_is_what_is_expected_over_the_cap() -> None:
    guard = MemoryGuard(200 * MB, {FP32: PLAIN}, EVERY)
    assert guard.overshoot_bytes(guard.judge(FP32, 20)) == pytest.approx(100 * MB, rel=0.15)
    guard.observe_oom(BF16, 4)
    assert guard.overshoot_bytes(guard.judge(BF16, 4)) == 1


def test_what_other_caps_showed_is_not_taken_for_this_one() -> None:
    shared = MemoryGuard(150 * MB, {FP32: PLAIN}, EVERY)
    shared.observe_fit(FP32, 16, 260 * MB)  # probed with the card to itself
    assert not shared.judge(FP32, 16).fits
    alone = MemoryGuard(400 * MB, {FP32: PLAIN}, EVERY)
    alone.observe_oom(FP32, 16, cap_bytes=150 * MB)
    assert alone.judge(FP32, 16).fits
    alone.observe_oom(FP32, 16, cap_bytes=400 * MB)
    assert not alone.judge(FP32, 16).fits


def test_an_oom_bounds_its_own_group_only() -> None:
    guard = MemoryGuard(None, {FP32: PLAIN, BF16: PLAIN}, EVERY)
    guard.observe_oom(FP32, 16)
    guard.observe_oom(FP32, 32)
    assert (largest(guard, FP32), largest(guard, BF16)) == (15, 99)


def test_a_short_runs_peak_moves_predictions_only_up() -> None:
    def after(peak_bytes: int, *, whole: bool) -> int:
        guard = MemoryGuard(400 * MB, {FP32: PLAIN}, EVERY)
        guard.observe_fit(FP32, 16, peak_bytes, whole=whole)
        return guard.predicted_bytes(FP32, 24) or 0

    plain = MemoryGuard(400 * MB, {FP32: PLAIN}, EVERY).predicted_bytes(FP32, 24) or 0
    assert after(230 * MB, whole=True) < plain < after(310 * MB, whole=True)
    assert plain * 0.99 < after(230 * MB, whole=False) < after(310 * MB, whole=False)


def test_a_group_nobody_predicted_is_judged_by_its_first_peak() -> None:
    guard = MemoryGuard(400 * MB, {}, EVERY)
    assert guard.judge(BF16, 64).fits
    guard.observe_fit(BF16, 8, 200 * MB)
    assert [guard.judge(BF16, m).fits for m in (8, 16, 32)] == [True, True, False]


@pytest.mark.parametrize("needs_mb", [{64: 64, 256: 256}, {64: 256, 256: 64}])
def test_a_value_between_others_is_judged_by_the_larger_need(needs_mb: dict[int, int]) -> None:
    """A width needs more where it is larger, the stride of a workload of one's own where it is smaller."""

    def at(width: int) -> MemoryGroup:
        return (("amp_dtype", "fp32"), ("hidden_size", width))

    known = {at(w): MemoryProfile(mb, (Point(8, mb * MB, mb * MB),)) for w, mb in needs_mb.items()}
    guard = MemoryGuard(255 * MB, known, EVERY)
    assert [guard.predicted_bytes(at(w), 8) for w in (65, 128, 255)] == [256 * MB] * 3
    assert not guard.judge(at(128), 8).fits
    assert MemoryGuard(257 * MB, known, EVERY).judge(at(128), 8).fits
    assert [guard.predicted_bytes(at(w), 8) for w in (32, 300)] == [None, None]
    assert guard.predicted_bytes((("amp_dtype", "bf16"), ("hidden_size", 128)), 8) is None


HELD: MemoryGroup = (("amp_dtype", "fp32"), (GRADIENTS_HELD, True))
BARE: MemoryGroup = (("amp_dtype", "fp32"), (GRADIENTS_HELD, False))
LESS = MemoryProfile.from_measured(FLOOR_BYTES, [(m, (90 + 10 * m) * MB) for m in (2, 8)])
BOTH = {HELD: PLAIN, BARE: LESS}


def test_a_batch_of_one_micro_step_has_a_footprint_of_its_own() -> None:
    guard = MemoryGuard(200 * MB, BOTH, EVERY)
    assert all((guard.p_oom(BARE, m) or 0) <= (guard.p_oom(HELD, m) or 0) for m in (2, 8, 12))
    assert largest(guard, BARE) > largest(guard, HELD)
    assert largest(MemoryGuard(200 * MB, {HELD: PLAIN}, EVERY), BARE) == largest(guard, HELD), "where nothing tells it"


def test_what_was_seen_of_one_holds_for_the_other_where_it_must() -> None:
    guard = MemoryGuard(200 * MB, BOTH, EVERY)
    guard.observe_oom(HELD, 6)
    assert largest(guard, HELD) == 5
    assert guard.judge(BARE, 6).fits, "it needs less"
    guard.observe_oom(BARE, 4)
    assert largest(guard, BARE) == 3
    assert largest(guard, HELD) <= 3, "it needs more"
    other = MemoryGuard(200 * MB, BOTH, EVERY)
    other.observe_fit(BARE, 40, 0, whole=True)
    assert (largest(other, BARE), largest(other, HELD) < 40) == (40, True)
    other.observe_fit(HELD, 50, 0, whole=True)
    assert largest(other, BARE) == 50


def test_what_may_begin_is_judged_anew_after_an_exact_need() -> None:
    guard = MemoryGuard(200 * MB, {FP32: PLAIN}, EVERY)
    assert guard.fitting(FP32, 8) == 8
    guard.observe_peak(FP32, 8, 380 * MB)
    assert guard.fitting(FP32, 8) == guard.judge(FP32, 8, shrink=True).micro_batch == 2


def test_half_of_a_whole_batch_holds_gradients() -> None:
    guard = MemoryGuard(200 * MB, BOTH, EVERY)
    guard.observe_oom(BARE, 16)
    guard.observe_oom(HELD, 8)
    for m in (16, 32):
        assert guard.judge(BARE, m, shrink=True).micro_batch == 4
        assert guard.fitting(BARE, m) == 4


def test_of_a_group_without_a_footprint_either_kind_tells() -> None:
    guard = MemoryGuard(200 * MB, {}, EVERY)
    guard.observe_fit(BARE, 4, 50 * MB)
    assert guard.predicted_bytes(HELD, 8) == guard.predicted_bytes(BARE, 8) is not None


# -- how sure it is ----------------------------------------------------------------------------------------------------


def of_source(source: str, cap_bytes: int) -> MemoryGuard:
    points = tuple(Point(m, (80 + 10 * m) * MB, (80 + 10 * m) * MB) for m in (2, 8))
    return MemoryGuard(cap_bytes, {FP32: MemoryProfile(FLOOR_BYTES, points, source)}, EVERY)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("micro_batch", [2, 5, 8, 30])
def test_p_oom_is_that_of_a_distribution_around_what_is_expected(source: str, micro_batch: int) -> None:
    expected = of_source(source, 10**12).predicted_bytes(FP32, micro_batch) or 0
    assert of_source(source, expected).p_oom(FP32, micro_batch) == pytest.approx(0.5, abs=1e-5)
    assert of_source(source, expected - 1000).judge(FP32, micro_batch).action == "refuse"
    assert of_source(source, expected + 1000).judge(FP32, micro_batch).action == "launch"
    known = source == "measured" and micro_batch <= 8
    margin = MARGINS["measured" if known else "extrapolated" if source == "measured" else source]
    far = round(expected * math.exp((6.3138 if margin.is_heavy else 1.6449) * margin.spread_frac))
    assert of_source(source, far).p_oom(FP32, micro_batch) == pytest.approx(0.05, abs=1e-3)


@given(st.sampled_from(SOURCES), st.integers(81 * MB, 900 * MB))
def test_the_limit_is_what_a_profile_may_say_at_most(source: str, cap_bytes: int) -> None:
    guard = of_source(source, cap_bytes)
    beyond = 9  # of a measured profile what is extrapolated
    profile = MemoryProfile(FLOOR_BYTES, (Point(2, 100 * MB, 100 * MB), Point(8, 160 * MB, 160 * MB)), source)
    tiny = 10 * (profile.capacity(beyond) <= (guard.limit_bytes(FP32) or 0)) - 5
    limit = (guard.limit_bytes(FP32) or 0) + tiny
    assert guard.judge(FP32, beyond).fits is (profile.capacity(beyond) <= limit)


@pytest.mark.parametrize("whole", [True, False])
@settings(max_examples=25)
@given(st.integers(90 * MB, 400 * MB), st.integers(1, 40), st.integers(1, 40))
def test_the_same_peak_told_again_says_nothing_new(whole: bool, peak_bytes: int, told_of: int, asked: int) -> None:
    def after(times: int) -> tuple[float | None, int | None]:
        guard = MemoryGuard(300 * MB, {FP32: PLAIN}, EVERY)
        for _ in range(times):
            guard.observe_fit(FP32, told_of, peak_bytes, whole=whole)
        guard._fitted.clear()
        return guard.p_oom(FP32, asked), guard.predicted_bytes(FP32, asked)

    assert after(1) == after(5) == after(40)


@settings(max_examples=25)
@given(st.permutations([("fit", 4, 150), ("whole", 8, 170), ("whole", 8, 190), ("oom", 30, 0), ("fit", 20, 290)]))
def test_the_order_of_what_is_told_does_not_matter(history: list[tuple[str, int, int]]) -> None:
    def said(told: list[tuple[str, int, int]]) -> list[float | None]:
        guard = learned(300 * MB, [(kind, FP32, m, mb * MB) for kind, m, mb in told])
        return [guard.p_oom(FP32, m) for m in range(1, 40)]

    assert said(history) == said(sorted(history))


def test_a_few_steps_that_fit_do_not_say_that_a_training_fits() -> None:
    guard = MemoryGuard(200 * MB, {FP32: PLAIN}, EVERY)
    assert not guard.judge(FP32, 11).fits
    guard.observe_fit(FP32, 11, 190 * MB)  # a probe, which met no long sample
    assert not guard.judge(FP32, 11).fits
    guard.observe_fit(FP32, 11, 195 * MB, whole=True)
    assert guard.judge(FP32, 11).fits
    guard.observe_fit(FP32, 4, 199 * MB)
    assert (guard.predicted_bytes(FP32, 4) or 0) >= 199 * MB


def test_what_ran_without_compile_vouches_for_nothing_with_it() -> None:
    def at(compiled: str) -> MemoryGroup:
        return (("amp_dtype", "fp32"), ("compile", compiled))

    guard = MemoryGuard(200 * MB, {at("off"): PLAIN}, EVERY)
    guard.observe_fit(at("off"), 12, 190 * MB, whole=True)
    assert guard.judge(at("off"), 12).fits
    assert guard.judge(at("reduce-overhead"), 12).reason.startswith("predicted"), "by the profile of the other"
    guard.observe_oom(at("reduce-overhead"), 8)
    assert not guard.judge(at("reduce-overhead"), 8).fits
    assert guard.judge(at("off"), 12).fits
    one, other = (MemoryGuard(170 * MB, {at("off"): PLAIN}, EVERY).p_oom(at(c), 6) or 0.0 for c in ("off", "default"))
    assert 0 < one < other < 0.5, "less is known of it"


def test_a_prediction_is_corrected_by_what_runs_needed() -> None:
    points = tuple(Point(m, (80 + 10 * m) * MB, (80 + 10 * m) * MB) for m in (1, 64))
    guard = MemoryGuard(10**12, {FP32: MemoryProfile(FLOOR_BYTES, points, "workspaces unseen")}, EVERY)
    before = guard.predicted_bytes(FP32, 64) or 0
    for m in (2, 16):
        guard.observe_peak(FP32, m, (80 + 15 * m) * MB)
    assert guard.predicted_bytes(FP32, 2) == pytest.approx(110 * MB, rel=1e-6)
    assert guard.predicted_bytes(FP32, 8) == pytest.approx(200 * MB, rel=0.05)
    assert before < (guard.predicted_bytes(FP32, 64) or 0) == pytest.approx(1040 * MB, rel=0.2)
    guard.observe_oom(FP32, 32, cap_bytes=700 * MB)
    assert (guard.predicted_bytes(FP32, 32) or 0) >= 700 * MB
