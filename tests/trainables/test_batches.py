"""The plan of an epoch: every sample once, cuts that keep the batch."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.batches import plan_epoch, tensors_of, to_device
from trainables.knobs import Knobs

sizes = st.integers(1, 40)


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 200), batch=sizes, micro=sizes, bucketing=st.booleans())
def test_every_sample_once_and_shares_of_a_batch_add_up_to_one(
    count: int, batch: int, micro: int, bucketing: bool
) -> None:
    knobs = Knobs(batch_size=batch, micro_batch_size=micro, length_bucketing=bucketing)
    plan = plan_epoch(count, knobs, seed=3, epoch=0, lengths=[i % 7 for i in range(count)])
    assert sorted(i for m in plan for i in m.indices) == list(range(count))
    assert all(len(m.indices) <= min(micro, batch) for m in plan)
    shares, batches = 0.0, 0
    for m in plan:
        shares += m.share
        batches += m.ends_batch
    assert abs(shares - batches) < 1e-9
    assert batches == -(-count // batch)


@settings(max_examples=30, deadline=None)
@given(micro=sizes, bucketing=st.booleans())
def test_a_batch_holds_the_same_samples_however_it_is_cut(micro: int, bucketing: bool) -> None:
    lengths = [(i * 31) % 17 for i in range(100)]

    def batches(knobs: Knobs) -> list[set[int]]:
        groups: list[set[int]] = [set()]
        for m in plan_epoch(100, knobs, 0, 1, lengths):
            groups[-1] |= set(m.indices)
            if m.ends_batch:
                groups.append(set())
        return groups

    whole = Knobs(batch_size=16, micro_batch_size=16)
    assert batches(whole.with_(micro_batch_size=micro, length_bucketing=bucketing)) == batches(whole)


def test_bucketing_puts_like_lengths_together() -> None:
    lengths = [(i * 31) % 17 for i in range(64)]

    def padding(bucketing: bool) -> int:
        knobs = Knobs(batch_size=32, micro_batch_size=8, length_bucketing=bucketing)
        plan = plan_epoch(64, knobs, 0, 0, lengths)
        return sum(max(lengths[i] for i in m.indices) * len(m.indices) for m in plan)

    assert padding(True) < padding(False)


def test_epochs_differ_and_repeat() -> None:
    one, two = (plan_epoch(50, Knobs(), 0, e, None) for e in (0, 1))
    assert one != two
    assert one == plan_epoch(50, Knobs(), 0, 0, None)


def test_batches_of_any_nesting_reach_the_device() -> None:
    batch = {"a": torch.zeros(2), "b": (torch.ones(1), [torch.ones(3), "text"])}
    moved = to_device(batch, torch.device("meta"))
    assert {t.device.type for t in tensors_of(moved)} == {"meta"}
    assert moved["b"][1][1] == "text"
