"""The virtual card of a CPU: every storage from birth to death, and none that does not fit."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from trainables.live_bytes import LiveBytes, Sparse, storage_bytes
from trainables.witness import Witness
from tuning.memory.oom import requested_bytes


def test_a_storage_counts_once_from_its_birth_to_its_death() -> None:
    with LiveBytes() as meter:
        values = torch.zeros(1000)
        view = values.view(10, 100)
        view.add_(1)
        assert meter.live_bytes == 4000
        double = view * 2
        assert meter.live_bytes == 8000
        del values, double
        assert meter.live_bytes == 4000
    del view
    assert (meter.live_bytes, meter.peak_bytes) == (0, 8000)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["make", "drop", "view"]), st.integers(1, 500)), max_size=40))
def test_the_count_is_the_sum_of_what_lives(steps: list[tuple[str, int]]) -> None:
    alive: list[torch.Tensor] = []
    peak = 0
    with LiveBytes() as meter:
        for what, number in steps:
            if what == "make":
                alive.append(torch.empty(number))
            elif what == "view" and alive:
                alive.append(alive[number % len(alive)][:1])
            elif alive:
                alive.pop(number % len(alive))
            assert meter.live_bytes == storage_bytes(alive)
            peak = max(peak, storage_bytes(alive))
    assert meter.peak_bytes == peak


def test_what_would_pass_the_cap_is_gone_before_the_error() -> None:
    meter = LiveBytes(cap_bytes=10_000)
    with meter:
        kept = torch.zeros(1000)
        with pytest.raises(torch.OutOfMemoryError, match=r"15\.62 KiB: 3\.91 KiB live.* 9\.77 KiB too few") as e:
            kept.repeat(4)
        assert meter.live_bytes == meter.peak_bytes == 4000
        assert (meter.wanted_bytes, requested_bytes(str(e.value))) == (20_000, 15_995)
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(2000).split(1000)  # the error's traceback is all that remains of it
        assert meter.live_bytes == 4000
        assert torch.ones(1400).sum() == 1400, "what fits is made after an error as before"


def test_an_operator_with_several_results_leaves_none_of_them() -> None:
    meter = LiveBytes(cap_bytes=12_000)
    values = torch.zeros(1000)
    meter.adopt([values])
    # Two results of 3.91 KiB beside what was there, and the third would pass the cap.
    with meter, pytest.raises(torch.OutOfMemoryError, match=r"allocate 3\.91 KiB: 11\.72 KiB live"):
        torch._foreach_mul([values, values, values], 2.0)
    gc.collect()
    assert meter.live_bytes == 4000


def test_a_storage_that_is_resized_counts_at_its_new_size() -> None:
    with LiveBytes() as meter:
        target = torch.empty(0)
        torch.cat([torch.ones(10), torch.ones(10)], out=target)
        assert meter.live_bytes == 80
        target.resize_(100)
        assert meter.live_bytes == 400


def test_tensors_made_outside_count_when_adopted_or_first_used() -> None:
    table, weights = torch.zeros(1000), torch.zeros(10)
    meter = LiveBytes()
    meter.adopt([weights, weights])
    assert meter.live_bytes == 40
    with meter:
        table[:5] + 1
        assert meter.live_bytes == 40
        meter.adopts = True
        table[:5] + 1
        assert meter.live_bytes == 4040
    with pytest.raises(torch.OutOfMemoryError):
        LiveBytes(cap_bytes=100).adopt([table])


def test_the_hosts_own_work_is_not_counted() -> None:
    with LiveBytes(cap_bytes=100) as meter:
        with meter.uncounted():
            batch = torch.ones(1000)
        assert meter.live_bytes == 0
        assert batch.sum() == 1000


def test_sparse_gradients_count_as_their_two_parts() -> None:
    embedding = torch.nn.Embedding(100, 4, sparse=True)
    with LiveBytes() as meter:
        embedding(torch.tensor([1, 2])).sum().backward()
        assert meter.live_bytes >= storage_bytes([embedding.weight.grad._indices(), embedding.weight.grad._values()])


def test_a_meter_keeps_one_reference_to_each_storage() -> None:
    weights, meter = torch.zeros(10), LiveBytes()
    storage = weights.untyped_storage()
    for _ in range(50):
        meter.begin(None)
        meter.adopt([weights])
    assert weakref.getweakrefcount(storage) == 1
    assert meter.live_bytes == meter.peak_bytes == 40


def test_a_part_larger_in_some_dimension_than_before_is_counted() -> None:
    sparse = Sparse()
    shapes = [(8, 10), (8, 10), (8, 9), (8, 11), (9, 2), (8, 11), (9, 11), (9, 11)]
    seen = []
    for shape in shapes:
        seen.append(sparse.part(5, "", [torch.zeros(shape)]))
        sparse.stepped(5, 0)
    assert seen == [True, False, False, True, True, False, True, False]
    assert sparse.part(5, "other phase", [torch.zeros(8, 9)])
    sparse.stepped(5, 0)
    assert not sparse.part(5, "", [torch.zeros(9, 11)])
    assert sparse.part(5, "", [torch.zeros(9, 11)]), "gradients are there by the second micro-batch of a batch"
    assert sparse.part(10, "", [torch.zeros(1, 1)]), "every tenth step is counted whole"


@pytest.mark.parametrize(
    ("levels", "leaks"), [([5, 5, 5, 5], False), ([5, 6, 6, 7], False), ([5, 6, 7], True), ([9, 1, 2, 3], True)]
)
def test_bytes_that_rise_twice_are_a_leak_and_all_is_counted(levels: list[int], leaks: bool) -> None:
    sparse = Sparse()
    for number, level in enumerate(levels):
        sparse.stepped(10 * number, level)
        sparse.stepped(10 * number + 5, 100 * level)  # not counted whole: tells nothing
    assert sparse.always is sparse.whole(7) is leaks


def test_operators_of_higher_order_are_counted_and_seen() -> None:
    net, meter = nn.Linear(2, 2), LiveBytes()
    witness = Witness(net, torch.optim.SGD(net.parameters()), torch.device("cpu"))
    q = torch.randn(1, 1, 16, 16)
    with (
        torch.compiler.set_stance("force_eager"),  # as in a step that is watched
        meter,
        witness.watching("forward_backward"),
        pytest.warns(UserWarning, match="without torch.compile"),
    ):
        found = flex_attention(q, q, q)
    torch.testing.assert_close(found, nn.functional.scaled_dot_product_attention(q, q, q))
    assert meter.live_bytes >= q.nbytes
