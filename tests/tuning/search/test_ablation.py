"""Pairs of an ablation: one knob apart, both sides as a run takes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainables.knobs import Knobs, is_active
from tuning.search.ablation import BATCHES, pairs, settled

BEFORE = {"batch_size": 4, "micro_batch_size": 4, "num_workers": 4, "amp_dtype": "fp32", "learning_rate": 1e-3}
BEST = {
    **BEFORE,
    "batch_size": 32,
    "micro_batch_size": 16,
    "num_workers": 0,
    "amp_dtype": "bf16",
    "learning_rate": 2e-3,
}


def test_each_differing_knob_of_speed_has_a_pair_at_both_ends() -> None:
    found, idle = pairs(BEST, BEFORE)
    assert {p.label for p in found if p.base == "best"} == {
        "batch_size", "micro_batch_size", "batch_size + micro_batch_size", "num_workers", "amp_dtype",
    }  # fmt: skip
    # A micro-batch of 16 is cut to a batch of 4: nothing to measure there.
    assert set(idle) == {"before: micro_batch_size"}
    amp = next(p for p in found if p.label == "amp_dtype" and p.base == "before")
    assert amp.values() == ("bf16", "fp32")
    assert dict(amp.without) == settled(BEFORE)


values = st.fixed_dictionaries(
    {
        "batch_size": st.sampled_from([4, 16, 64]),
        "micro_batch_size": st.sampled_from([4, 16, 64]),
        "num_workers": st.sampled_from([0, 2]),
        "prefetch_factor": st.sampled_from([2, 4]),
        "persistent_workers": st.booleans(),
        "fused_optimizer": st.booleans(),
        "optimizer": st.sampled_from(["adamw", "adamw8bit"]),
    }
)


@given(best=values, before=values)
def test_sides_differ_in_the_named_knobs_and_what_hangs_on_them(best: dict, before: dict) -> None:
    for pair in pairs(best, before)[0]:
        one, other = Knobs.of(pair.with_).as_dict(), Knobs.of(pair.without).as_dict()
        for name in set(pair.with_) & set(pair.without) - set(pair.knobs):
            assert one[name] == other[name] or name in BATCHES  # the micro-batch is cut to the batch
        assert all(is_active(name, one) for name in pair.with_)
        assert pair.with_ != pair.without
