"""One probe for every batch size, and the walk over neighbours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainables.knobs import Knobs, Scalar
from tuning.config.space import Space
from tuning.search.throughput import Probed, Rates, neighbour, ranked

positive = st.floats(1e-4, 1.0)


def probe(micro_s: float = 0.01, optimizer_s: float = 0.002, **knobs: Scalar) -> Probed:
    return Probed({"batch_size": 64, "micro_batch_size": 8, **knobs}, micro_s, optimizer_s, 1.0)


def test_a_batch_of_one_micro_batch_takes_one_micro_step_and_one_optimizer_step() -> None:
    assert probe().at_batch_size(8) == pytest.approx(8 / 0.012)
    assert probe().at_batch_size(20) == pytest.approx(20 / 0.032)  # three micro-steps, the last half empty


def test_nothing_is_said_of_batches_smaller_than_what_was_measured() -> None:
    assert probe().at_batch_size(7) is None


@given(micro=positive, optimizer=positive, times=st.integers(1, 20))
def test_speed_never_falls_with_whole_micro_batches(micro: float, optimizer: float, times: int) -> None:
    found = probe(micro, optimizer)
    smaller, larger = found.at_batch_size(8 * times), found.at_batch_size(8 * (times + 1))
    assert smaller is not None
    assert larger is not None
    assert larger >= smaller * (1 - 1e-12)


def test_only_probes_that_share_the_coupling_answer() -> None:
    slow, fast = probe(0.02, num_workers=0), probe(0.01, amp_dtype="bf16", num_workers=2)
    assert [choice.system["num_workers"] for choice in ranked([slow, fast], {"batch_size": 32})] == [0]
    assert ranked([fast], {"batch_size": 32}) == []


def test_the_fastest_micro_batch_depends_on_the_batch() -> None:
    small = probe(0.01, 0.0, micro_batch_size=8)  # 800 samples/s
    large = probe(0.03, 0.0, micro_batch_size=32)  # 1067 samples/s, once a batch has 32
    at = {b: ranked([small, large], {"batch_size": b}) for b in (16, 32)}
    assert {b: [c.system["micro_batch_size"] for c in found] for b, found in at.items()} == {16: [8], 32: [32, 8]}


def test_of_those_that_need_the_same_memory_the_fastest_is_ranked_also_after_a_try() -> None:
    probes = [probe(0.01 * s, num_workers=w, micro_batch_size=m) for s, w, m in [(2, 0, 8), (1, 2, 8), (6, 4, 16)]]
    rates = Rates(probes, Space({}, {}), lambda knobs: knobs["micro_batch_size"])
    asked: dict[str, Scalar] = {"batch_size": 32}
    in_fp16 = {**asked, "amp_dtype": "fp16"}

    def found(values: dict[str, Scalar]) -> list[tuple[Scalar, Scalar]]:
        return [(c.system["micro_batch_size"], c.system["num_workers"]) for c in rates.ranked(values)]

    assert found(asked) == [(8, 2), (16, 4)]
    assert found(in_fp16) == []
    rates.put(probe(0.01, num_workers=6, micro_batch_size=16))
    assert found(asked) == [(16, 6), (8, 2)]
    assert found(in_fp16) == [], "another coupling"
    rates.put(probe(0.01, num_workers=1, amp_dtype="fp16"))
    assert found(in_fp16) == [(8, 1)]


def test_neighbours_change_one_knob_and_end() -> None:
    alternatives: dict[str, tuple[Scalar, ...]] = {"micro_batch_size": (4, 8, 16), "ram_cache": (False, True)}
    incumbent: dict[str, Scalar] = {"micro_batch_size": 8, "ram_cache": False}
    seen: list[dict[str, Scalar]] = [incumbent]
    while (candidate := neighbour(incumbent, alternatives, seen)) is not None:
        assert sum(candidate[n] != incumbent[n] for n in alternatives) == 1
        seen.append(candidate)
    assert len(seen) == 4


def test_prefetch_without_workers_is_the_same_configuration() -> None:
    incumbent: dict[str, Scalar] = {"num_workers": 0, "prefetch_factor": 2}
    assert neighbour(incumbent, {"prefetch_factor": (2, 4)}, [incumbent]) is None


def test_defaults_count_as_given() -> None:
    assert neighbour({}, {"ram_cache": (False,)}, [Knobs().as_dict()]) is None
