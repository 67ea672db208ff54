"""The allocator: small cases worked out by hand, and what must hold for every log."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuning.memory.logs import KIB, MIB, logs
from tuning.memory.allocator import GRAIN_BYTES, STEP_BYTES, CachingAllocator, Replay, minimal_capacity, replay
from tuning.memory.trace import EMPTIED, MAY_BE_LESS, Event


def peaks(found: Replay) -> tuple[float, float]:
    return found.peak_allocated_bytes / MIB, found.peak_reserved_bytes / MIB


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ([0], 0, 0),  # no bytes, no block
        ([1], GRAIN_BYTES / MIB, 2),
        ([513], 2 * GRAIN_BYTES / MIB, 2),
        ([MIB], 1, 2),  # the largest small one
        ([MIB, MIB, MIB], 3, 4),
        ([MIB + 1], 1 + GRAIN_BYTES / MIB, 20),  # the smallest large one
        ([5 * MIB] * 4, 20, 20),
        ([5 * MIB] * 5, 25, 40),
        ([9 * MIB, 9 * MIB + 512 * KIB], 18.5, 20),  # 1.5 MiB are left over, and split off
        ([9 * MIB, 10 * MIB - 512], 19 - GRAIN_BYTES / MIB, 20),  # more than 1 MiB is left over: split off
        ([10 * MIB], 10, 10),  # a segment of its own
        ([10 * MIB + 1], 10 + GRAIN_BYTES / MIB, 12),
        ([11 * MIB + 512 * KIB], 12, 12),  # half a MiB is too little to split off, and counts as allocated
        ([512, 5 * MIB], 5 + GRAIN_BYTES / MIB, 22),  # pools do not mix
    ],
)
def test_native_segments(sizes: list[int], allocated: float, reserved: float) -> None:
    assert peaks(replay(list(enumerate(sizes)))) == (allocated, reserved)


def test_the_best_fit_is_the_smallest_that_is_enough() -> None:
    holes = [(0, 40 * MIB), (1, 20 * MIB), (2, 30 * MIB), (0, -1), (1, -1), (2, -1)]
    assert peaks(replay([*holes, (3, 28 * MIB), (4, 18 * MIB), (5, 36 * MIB)])) == (90, 90)


def test_a_full_card_gets_back_what_is_cached_and_then_it_fits() -> None:
    events = [(0, 12 * MIB), (0, -1), (1, 14 * MIB)]
    assert replay(events, capacity_bytes=26 * MIB) == Replay(14 * MIB, 26 * MIB)
    assert replay(events, capacity_bytes=14 * MIB) == Replay(14 * MIB, 14 * MIB)
    assert replay(events, capacity_bytes=13 * MIB) == Replay(12 * MIB, 12 * MIB, failed_at=2)
    assert minimal_capacity(events) == 14 * MIB


def test_a_segment_with_a_block_in_use_is_not_handed_back() -> None:
    events = [(0, 6 * MIB), (1, 2 * MIB), (0, -1), (2, 30 * MIB)]
    assert replay(events, capacity_bytes=49 * MIB).failed_at == 3
    assert minimal_capacity(events) == 50 * MIB


@settings(max_examples=60)
@given(logs(), st.sampled_from([None, 60, 120]))
def test_blocks_never_overlap_and_sums_hold(events: list[Event], capacity_mib: int | None) -> None:
    """After each event: allocated <= reserved <= capacity, blocks are disjoint, free ones included."""
    capacity = None if capacity_mib is None else capacity_mib * MIB
    allocator = CachingAllocator(capacity)
    asked = {ident: size for ident, size in events if size > 0}
    for ident, size in events:
        if size < 0:
            allocator.free(ident)
        elif not allocator.malloc(ident, size):
            break
        assert allocator.reserved_bytes <= allocator.capacity_bytes
        for pool in (allocator.small, allocator.large):
            used = [block for block in allocator.live.values() if block.pool is pool]
            blocks = sorted([*used, *pool.blocks.values()], key=lambda block: block.address)
            assert all(one.address + one.size <= other.address for one, other in pairwise(blocks))
            assert sorted(pool.blocks) == pool.keys
        free_bytes = sum(b.size for pool in (allocator.small, allocator.large) for b in pool.blocks.values())
        assert allocator.allocated_bytes == sum(block.size for block in allocator.live.values())
        assert allocator.allocated_bytes + free_bytes == allocator.reserved_bytes
        assert all(block.size >= asked[i] and not block.free for i, block in allocator.live.items())


@settings(max_examples=60)
@given(logs())
def test_what_is_all_freed_can_all_be_handed_back(events: list[Event]) -> None:
    allocator = CachingAllocator()
    for ident, size in events:
        if size < 0:
            allocator.free(ident)
        else:
            allocator.malloc(ident, size)
    for ident in list(allocator.live):
        allocator.free(ident)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


@settings(max_examples=60)
@given(logs(), st.integers(0, 50))
def test_a_card_of_the_reserved_peak_is_like_one_without_limit(events: list[Event], more_mib: int) -> None:
    free = replay(events)
    assert replay(events, capacity_bytes=free.peak_reserved_bytes + more_mib * MIB) == free
    assert free.peak_allocated_bytes <= free.peak_reserved_bytes
    assert free.peak_reserved_bytes % STEP_BYTES == 0


@settings(max_examples=60)
@given(logs())
def test_the_minimal_capacity_suffices_and_a_step_less_does_not(events: list[Event]) -> None:
    free = replay(events)
    smallest = minimal_capacity(events)
    assert replay(events, capacity_bytes=smallest).failed_at is None
    assert smallest <= free.peak_reserved_bytes
    if smallest - STEP_BYTES >= free.peak_allocated_bytes:
        assert replay(events, capacity_bytes=smallest - STEP_BYTES).failed_at is not None
    roughly = minimal_capacity(events, tolerance_frac=0.1)
    assert smallest <= roughly <= smallest + 0.1 * free.peak_reserved_bytes + STEP_BYTES


def test_deaths_of_what_was_never_born_have_no_effect() -> None:
    assert replay([(7, -1), (1, 0), (1, -1), (7, -1)]) == Replay(0, 0)


def test_an_emptied_cache_gives_back_whole_segments_alone() -> None:
    events: list[Event] = [(0, 30 * MIB), (1, 5 * MIB), (2, 5 * MIB), (0, -1), (1, -1), EMPTIED, (3, 40 * MIB)]
    assert peaks(replay(events)) == (45, 60)  # without the mark 90: the 20 MiB of the other stay, half in use
    assert replay(events[:-2] + events[-1:]).peak_reserved_bytes == 90 * MIB


def test_a_workspace_that_may_be_less_is_halved_until_it_fits() -> None:
    events: list[Event] = [(0, 20 * MIB), MAY_BE_LESS, (1, 100 * MIB), (1, -1), (2, 30 * MIB)]
    assert peaks(replay(events, capacity_bytes=60 * MIB)) == (50, 50)  # 25 MiB are taken, in a segment of 26
    assert replay(events, capacity_bytes=40 * MIB).failed_at == 4, "the next one is whole again"
    assert replay(events).peak_reserved_bytes == 120 * MIB
    assert minimal_capacity(events) == 50 * MIB
