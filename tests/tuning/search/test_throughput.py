"""One probe for every batch size, and for every trial of its speed group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainables.knobs import KnobTable, Scalar
from trainables.our_knobs import EVERY
from tuning.config.space import Space
from tuning.journal.events import ProbeRecord
from tuning.journal.records import Record
from tuning.search.throughput import Probed, Speeds, inside, probed, suits

positive = st.floats(1e-4, 1.0)


def probe(micro_s: float = 0.01, optimizer_s: float = 0.002, **knobs: Scalar) -> Probed:
    return Probed({"batch_size": 64, "micro_batch_size": 8, **knobs}, micro_s, optimizer_s, 1.0)


def test_batch_takes_its_micro_steps_and_an_optimizer_step() -> None:
    assert probe().at_batch_size(8) == pytest.approx(8 / 0.012)
    assert probe().at_batch_size(20) == pytest.approx(20 / 0.032)  # three micro-steps, the last half empty
    assert probe().at_batch_size(7) is None, "smaller than what was measured"


def test_batch_in_one_piece_is_between_smaller_and_larger_ones() -> None:
    small, large = (probe(s, 0.001, micro_batch_size=m, num_workers=2) for m, s in ((16, 0.001), (64, 0.0025)))
    best, second = Speeds([small, large], EVERY).ranked({"batch_size": 32})
    assert (best.system["micro_batch_size"], best.system["num_workers"]) == (32, 2)
    assert best.samples_per_s == pytest.approx(32 / 0.0025)
    assert second.system["micro_batch_size"] == 16
    alone = Speeds([large, probe(num_workers=0)], EVERY).ranked({"batch_size": 32, "num_workers": 2})
    assert {(c.system["micro_batch_size"], c.system["num_workers"]) for c in alone} == {(32, 2), (8, 0)}
    assert max(c.samples_per_s for c in alone) == pytest.approx(32 / 0.0035), "a smaller micro-step takes no longer"
    assert [c.system["micro_batch_size"] for c in Speeds([small, large], EVERY).ranked({"batch_size": 64})] == [64, 16]


@pytest.mark.parametrize(("pass_samples", "workers"), [(640, 0), (64_000, 1)])
def test_a_short_pass_is_judged_with_what_starts_anew_in_each(pass_samples: int, workers: int) -> None:
    ended = {"outcome": "ok", "samples_per_s": 1.0, "optimizer_step_s": 0.0}
    config = {"batch_size": 64, "micro_batch_size": 64}
    plain = {**ended, "config": {**config, "num_workers": 0}, "micro_step_s": 0.02}
    forks = {**ended, "config": {**config, "num_workers": 1}, "micro_step_s": 0.01}
    forks |= {"pass_s": 0.25, "pass_samples": pass_samples}
    records = [ProbeRecord.read(Record(0, "", "probe", one)) for one in (plain, forks)]
    found = probed(records, EVERY)  # the first is of an older study
    best = Speeds(found, EVERY).ranked({"batch_size": 64})[0]
    assert best.system["num_workers"] == workers
    assert found[1].at_batch_size(64) == pytest.approx(64 / (0.01 + 0.25 * 64 / pass_samples))


@given(micro=positive, optimizer=positive, times=st.integers(1, 20))
def test_speed_never_falls_with_whole_micro_batches(micro: float, optimizer: float, times: int) -> None:
    found = probe(micro, optimizer)
    smaller, larger = found.at_batch_size(8 * times), found.at_batch_size(8 * (times + 1))
    assert smaller is not None
    assert larger is not None
    assert larger >= smaller * (1 - 1e-12)


def test_the_nearest_group_answers_for_one_that_nobody_probed() -> None:
    speeds = Speeds([probe(0.02, num_workers=0), probe(0.01, amp_dtype="bf16", hidden_size=64, num_workers=2)], EVERY)
    asked: dict[str, Scalar] = {"batch_size": 32}
    assert [c.system["num_workers"] for c in speeds.ranked(asked)] == [0]
    assert [c.system["num_workers"] for c in speeds.ranked({**asked, "amp_dtype": "fp16", "hidden_size": 64})] == [2]
    assert not Speeds([], EVERY).ranked(asked)


@pytest.mark.parametrize("turned", [False, True])
def test_of_groups_as_near_the_slowest_answers(turned: bool) -> None:
    narrow, wide = probe(0.01, amp_dtype="bf16", hidden_size=64), probe(0.08, amp_dtype="fp32", hidden_size=512)
    speeds = Speeds([wide, narrow] if turned else [narrow, wide], EVERY)
    (found,) = speeds.ranked({"batch_size": 8, "amp_dtype": "bf16", "hidden_size": 512})
    assert found.samples_per_s == pytest.approx(8 / 0.082)


def test_the_fastest_micro_batch_depends_on_the_batch() -> None:
    small = probe(0.01, 0.0, micro_batch_size=8)  # 800 samples/s
    large = probe(0.03, 0.0, micro_batch_size=32)  # 1067 samples/s, once a batch has 32
    speeds = Speeds([small, large], EVERY)
    at = {b: [c.system["micro_batch_size"] for c in speeds.ranked({"batch_size": b})] for b in (16, 32)}
    assert at == {16: [16, 8], 32: [32, 8]}


@pytest.mark.parametrize("is_told", [True, False])
def test_faster_of_two_optimizer_steps_is_taken(is_told: bool) -> None:
    lucky = probe(0.010, 0.002 if is_told else 0.0, fused_optimizer=False)
    steady, other_size = (probe(0.012, 0.001, fused_optimizer=True, micro_batch_size=m) for m in (8, 64))
    for probes in ([lucky, steady], [steady, lucky]):
        best = Speeds(probes, EVERY).ranked({"batch_size": 8})[0]
        assert best.system["fused_optimizer"] is is_told
    assert Speeds([lucky, steady], EVERY).of({**lucky.knobs, "batch_size": 8}) == lucky.at_batch_size(8), (
        "as it was measured"
    )
    assert not Speeds([lucky, other_size], EVERY).ranked({"batch_size": 8})[0].system["fused_optimizer"], (
        "of another size"
    )


def test_faster_micro_steps_are_kept_with_any_optimizer_step() -> None:
    alike = [probe(0.010, s, fused_optimizer=f, num_workers=0) for f, s in ((False, 0.0021), (True, 0.0020))]
    slow_step = [probe(0.010, s, fused_optimizer=f, num_workers=0) for f, s in ((False, 0.004), (True, 0.002))]
    loaded = probe(0.005, 0.0022, fused_optimizer=False, num_workers=2)
    for others in (alike, slow_step):
        assert Speeds([*others, loaded], EVERY).ranked({"batch_size": 8})[0].system["num_workers"] == 2
    little = probe(0.009, 0.0022, fused_optimizer=False, num_workers=2)
    assert Speeds([*alike, little], EVERY).ranked({"batch_size": 8})[0].system["num_workers"] == 2


def test_smaller_batch_has_the_system_knobs_of_a_larger_one() -> None:
    table = KnobTable(kinds={"micro_batch_size": "both"})
    slow, fast = (probe(s, 0.002, micro_batch_size=64, num_workers=n) for s, n in ((0.02, 0), (0.01, 2)))
    apart = probe(0.001, amp_dtype="bf16", micro_batch_size=16, num_workers=1)
    asked: dict[str, Scalar] = {"batch_size": 16, "micro_batch_size": 16}
    best, second = Speeds([slow, fast, apart], table).ranked(asked)
    assert (best.system["num_workers"], second.system["num_workers"]) == (2, 0)
    assert best.samples_per_s == pytest.approx(16 / (0.01 / 4 + 0.002)), "a sample costs what it does there"
    own = probe(0.004, micro_batch_size=16, num_workers=0)
    assert [c.system["num_workers"] for c in Speeds([fast, own], table).ranked(asked)] == [0], "its own probes stand"


def test_a_configuration_named_beside_the_space_is_not_of_it() -> None:
    space = Space.parse({"num_workers": [0, 2], "micro_batch_size": 8, "hidden_size": [64, 128]}, EVERY)
    assert inside(space, probe(num_workers=2, hidden_size=256))
    assert not suits(space, probe(num_workers=2, hidden_size=256))
    assert not inside(space, probe(num_workers=4))
    assert not inside(space, probe(micro_batch_size=16))


def test_a_knob_that_no_step_showed_makes_nothing_faster() -> None:
    space = Space.parse({"sdpa_backend": ["auto", "math"], "micro_batch_size": 8}, EVERY)
    config = {"batch_size": 64, "micro_batch_size": 8}
    timed = {"outcome": "ok", "micro_step_s": 0.1, "optimizer_step_s": 0.0, "samples_per_s": 80.0}

    def one(backend: str, attention: dict[str, int]) -> Probed:
        active = {"device": "cpu", "attention": attention}
        whole = {"config": {**config, "sdpa_backend": backend}, "active": active, **timed}
        (found,) = probed([ProbeRecord.read(Record(0, "", "probe", whole))], EVERY)
        return found

    assert inside(space, one("auto", {}))
    assert not inside(space, one("math", {}))
    assert inside(space, one("math", {"math": 2}))
    assert inside(Space.parse({"sdpa_backend": "math", "micro_batch_size": 8}, EVERY), one("math", {})), "it was given"
