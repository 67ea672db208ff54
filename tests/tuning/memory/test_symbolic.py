"""Two traces give every other: sizes, deaths, refusals; and what a prediction keeps on disk."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuning.memory.logs import KIB, MIB, prediction, step
from tuning.memory.peaks import peak_of
from tuning.memory.prediction import Prediction
from tuning.memory.symbolic import between
from tuning.memory.trace import Trace


@settings(max_examples=40)
@given(st.sampled_from([1, 2, 3, 5, 8, 64]), st.integers(1, 64), st.integers(1, 300))
def test_any_two_traces_give_the_one_at_any_size(size: int, more: int, micro_batch: int) -> None:
    assert between(step(size), step(size + more), micro_batch) == step(micro_batch)


def test_sizes_between_whole_bytes_are_rounded_up() -> None:
    def odd(micro_batch: int, size: int) -> Trace:
        return Trace(micro_batch, ((0, size), (0, -1)), {0: "activation"}, (), ("aten::mm",))

    growing = [between(odd(2, 10), odd(5, 14), m) for m in (1, 2, 3, 5, 6)]  # 4/3 of a byte for each sample
    assert [trace and trace.events for trace in growing] == [((0, size), (0, -1)) for size in (9, 10, 12, 14, 16)]
    shrinking = between(odd(1, 10), odd(2, 4), 9)
    assert shrinking is not None
    assert shrinking.events[0] == (0, 0)


def test_deaths_may_differ_in_order_and_ids_may_differ() -> None:
    other = step(3)
    renamed = replace(other, events=tuple((ident + 1000, size) for ident, size in other.events))
    *most, one, two = renamed.events
    found = between(step(2), replace(renamed, events=(*most, two, one)), 7)
    assert found is not None
    assert found.events == step(7).events


def test_logs_that_differ_are_no_case_of_each_other() -> None:
    one, other = step(2), step(3)
    assert between(one, replace(other, ops=(*other.ops[:-1], "aten::copy_")), 7) is None
    assert between(one, step(3, layers=5), 7) is None


def test_the_peak_moves_from_the_optimizer_to_the_backward_pass() -> None:
    small, large = peak_of(step(1, sample_bytes=64 * KIB)), peak_of(step(64))
    assert (small.phase, small.operator) == ("optimizer", "aten::_foreach_sqrt")
    assert small.live_bytes == 5 * 4 * 3 * MIB  # parameter, two moments, gradient and a root, four layers
    assert small.breakdown == {
        "optimizer": 24 * MIB,
        "parameter": 12 * MIB,
        "gradient": 12 * MIB,
        "temporary": 12 * MIB,
    }
    assert (large.phase, large.operator) == ("backward", "aten::mm")
    assert next(iter(large.breakdown)) == "activation"


@settings(max_examples=30)
@given(st.integers(1, 64), st.integers(1, 6))
def test_what_a_peak_holds_together(micro_batch: int, layers: int) -> None:
    peak = peak_of(step(micro_batch, layers))
    assert sum(peak.breakdown.values()) == peak.live_bytes <= peak.allocated_bytes <= peak.reserved_bytes
    assert peak.allocated_bytes <= peak.capacity_bytes <= peak.reserved_bytes


def test_a_prediction_answers_from_one_trace_only_for_its_size() -> None:
    two = prediction()
    assert two.peak(17) == peak_of(step(17))
    one = replace(two, traces=two.traces[:1])
    assert one.peak(2) == peak_of(step(2))
    assert one.peak(3) is None
    differing = replace(two, traces=(step(2), step(3, layers=5)))
    assert (differing.peak(3), differing.peak(4)) == (peak_of(step(3, layers=5)), None)
    assert Prediction("none", ("a custom operator",), ()).peak(1) is None


def test_a_prediction_survives_json() -> None:
    kept = prediction()
    text = kept.to_json()
    assert Prediction.from_json(text) == kept
    assert len(text) < 40 * sum(len(trace.events) for trace in kept.traces)
    nothing = Prediction("none", ("data-dependent shapes",), ())
    assert Prediction.from_json(nothing.to_json()) == nothing


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"confidence":"traced"}', '{"traces":[{}],"confidence":1,"notes":[]}']
)
def test_what_is_not_a_prediction_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a prediction"):
        Prediction.from_json(text)
