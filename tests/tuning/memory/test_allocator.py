"""The allocator: small cases worked out by hand, and what must hold for every log."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuning.memory.logs import KIB, MIB, logs
from tuning.memory.allocator import Replay, minimal_capacity, replay
from tuning.memory.expandable import ExpandableAllocator
from tuning.memory.native import GRAIN_BYTES, STEP_BYTES, CachingAllocator
from tuning.memory.prediction import Event

KINDS = [CachingAllocator, ExpandableAllocator]
both = pytest.mark.parametrize("expandable", [False, True])


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
        (
            [9 * MIB, 10 * MIB - 512],
            19 - GRAIN_BYTES / MIB,
            20,
        ),  # 1 MiB and 512 bytes are left over: split off, as more than 1 MiB
        ([10 * MIB], 10, 10),  # a segment of its own
        ([10 * MIB + 1], 10 + GRAIN_BYTES / MIB, 12),
        ([11 * MIB + 512 * KIB], 12, 12),  # half a MiB is too little to split off, and counts as allocated
        ([512, 5 * MIB], 5 + GRAIN_BYTES / MIB, 22),  # pools do not mix
    ],
)
def test_native_segments(sizes: list[int], allocated: float, reserved: float) -> None:
    assert peaks(replay(list(enumerate(sizes)))) == (allocated, reserved)


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ([1], GRAIN_BYTES / MIB, 2),
        ([MIB] * 3, 3, 4),
        ([MIB + 1], 1 + GRAIN_BYTES / MIB, 20),
        ([12 * MIB, 14 * MIB], 26, 40),  # 8 MiB of the first page are used on
        ([11 * MIB + 512 * KIB], 11.5, 20),  # what is over 512 bytes is split off
        ([45 * MIB], 45, 60),
    ],
)
def test_expandable_segments(sizes: list[int], allocated: float, reserved: float) -> None:
    assert peaks(replay(list(enumerate(sizes)), expandable=True)) == (allocated, reserved)


def test_a_freed_block_grows_where_segments_expand_and_does_not_where_they_are_native() -> None:
    events = [(0, 12 * MIB), (0, -1), (1, 14 * MIB)]
    assert peaks(replay(events)) == (14, 26)
    assert peaks(replay(events, expandable=True)) == (14, 20)
    assert peaks(replay([*events, (1, -1), (2, 50 * MIB)], expandable=True)) == (50, 60)


def test_the_best_fit_is_the_smallest_that_is_enough() -> None:
    holes = [(0, 40 * MIB), (1, 20 * MIB), (2, 30 * MIB), (0, -1), (1, -1), (2, -1)]
    assert peaks(replay([*holes, (3, 28 * MIB), (4, 18 * MIB), (5, 36 * MIB)])) == (90, 90)


def test_a_full_card_gets_back_what_is_cached_and_then_it_fits() -> None:
    events = [(0, 12 * MIB), (0, -1), (1, 14 * MIB)]
    assert replay(events, capacity_bytes=26 * MIB) == Replay(14 * MIB, 26 * MIB, 0)
    assert replay(events, capacity_bytes=14 * MIB) == Replay(14 * MIB, 14 * MIB, 1)
    assert replay(events, capacity_bytes=13 * MIB) == Replay(12 * MIB, 12 * MIB, 1, failed_at=2)
    assert minimal_capacity(events) == 14 * MIB


def test_a_segment_with_a_block_in_use_is_not_handed_back() -> None:
    events = [(0, 6 * MIB), (1, 2 * MIB), (0, -1), (2, 30 * MIB)]
    assert replay(events, capacity_bytes=49 * MIB).failed_at == 3
    assert minimal_capacity(events) == 50 * MIB


def test_expandable_pages_are_taken_back_one_by_one() -> None:
    events = [(0, 60 * MIB), (1, 4 * MIB), (0, -1), (2, 80 * MIB)]
    # 60 to 64 MiB are in use: the fourth page stays, and its last 16 MiB hold the third storage with four pages more.
    assert replay(events, expandable=True) == Replay(84 * MIB, 160 * MIB, 0)
    assert replay(events, expandable=True, capacity_bytes=100 * MIB) == Replay(84 * MIB, 100 * MIB, 1)
    assert replay(events, expandable=True, capacity_bytes=98 * MIB).failed_at == 3
    assert replay(events, capacity_bytes=100 * MIB).failed_at is None  # 20 MiB, and 80


def test_blocks_over_max_split_are_kept_whole_and_handed_back_first() -> None:
    big = [(0, 200 * MIB), (0, -1)]
    assert peaks(replay([*big, (1, 50 * MIB)], max_split_bytes=100 * MIB)) == (200, 250)
    assert peaks(replay([*big, (1, 50 * MIB)])) == (200, 200)
    assert peaks(replay([*big, (1, 190 * MIB)], max_split_bytes=100 * MIB)) == (200, 200)
    found = replay([*big, (1, 120 * MIB)], max_split_bytes=100 * MIB, capacity_bytes=200 * MIB)
    assert (found.failed_at, found.retries, found.peak_reserved_bytes) == (None, 0, 200 * MIB)


@pytest.mark.parametrize(
    ("size", "block"), [(1, 512), (2048, 2048), (2049, 2560), (4096, 4096), (4097, 5120), (5121, 6144)]
)
def test_rounding_to_divisions_of_a_power_of_two(size: int, block: int) -> None:
    assert CachingAllocator(roundup_divisions=4).rounded(size) == block


@both
@settings(max_examples=60, deadline=None)
@given(logs(), st.sampled_from([None, 60, 120]), st.sampled_from([None, 32]))
def test_blocks_never_overlap_and_sums_hold(
    expandable: bool, events: list[Event], capacity_mib: int | None, max_split_mib: int | None
) -> None:
    """After each event: allocated <= reserved <= capacity, blocks are disjoint, free ones included."""
    capacity = None if capacity_mib is None else capacity_mib * MIB
    allocator = KINDS[expandable](capacity, None if max_split_mib is None or expandable else max_split_mib * MIB)
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
            assert all(block.mapped for block in blocks)
            assert sorted(pool.blocks) == pool.keys
        free_bytes = sum(b.size for pool in (allocator.small, allocator.large) for b in pool.blocks.values())
        assert allocator.allocated_bytes == sum(block.size for block in allocator.live.values())
        assert allocator.allocated_bytes + free_bytes == allocator.reserved_bytes
        assert all(block.size >= asked[i] and not block.free for i, block in allocator.live.items())


@both
@settings(max_examples=60, deadline=None)
@given(logs())
def test_what_is_all_freed_can_all_be_handed_back(expandable: bool, events: list[Event]) -> None:
    allocator = KINDS[expandable]()
    for ident, size in events:
        if size < 0:
            allocator.free(ident)
        else:
            allocator.malloc(ident, size)
    for ident in list(allocator.live):
        allocator.free(ident)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


@both
@settings(max_examples=60, deadline=None)
@given(logs(), st.integers(0, 50))
def test_a_card_of_what_is_reserved_without_a_limit_is_like_one_without_a_limit(
    expandable: bool, events: list[Event], more_mib: int
) -> None:
    free = replay(events, expandable=expandable)
    assert replay(events, expandable=expandable, capacity_bytes=free.peak_reserved_bytes + more_mib * MIB) == free
    assert free.peak_allocated_bytes <= free.peak_reserved_bytes
    assert free.peak_reserved_bytes % STEP_BYTES == 0


@both
@settings(max_examples=60, deadline=None)
@given(logs())
def test_the_minimal_capacity_suffices_and_a_step_less_does_not(expandable: bool, events: list[Event]) -> None:
    free = replay(events, expandable=expandable)
    smallest = minimal_capacity(events, expandable=expandable)
    assert replay(events, expandable=expandable, capacity_bytes=smallest).failed_at is None
    assert smallest <= free.peak_reserved_bytes
    if smallest - STEP_BYTES >= free.peak_allocated_bytes:
        assert replay(events, expandable=expandable, capacity_bytes=smallest - STEP_BYTES).failed_at is not None
    roughly = minimal_capacity(events, expandable=expandable, tolerance_frac=0.1)
    assert smallest <= roughly <= smallest + 0.1 * free.peak_reserved_bytes + STEP_BYTES


@both
@settings(max_examples=40, deadline=None)
@given(logs(), st.integers(1, 8))
def test_births_twice_as_large_never_need_less(expandable: bool, events: list[Event], times: int) -> None:
    larger = [(ident, size * times if size > 0 else size) for ident, size in events]
    plain, grown = replay(events, expandable=expandable), replay(larger, expandable=expandable)
    most = max_live(events)
    assert plain.peak_allocated_bytes >= most
    assert grown.peak_allocated_bytes >= times * most


def max_live(events: list[Event]) -> int:
    sizes: dict[int, int] = {}
    most = 0
    for ident, size in events:
        if size < 0:
            sizes.pop(ident)
        else:
            sizes[ident] = size
        most = max(most, sum(sizes.values()))
    return most


def test_deaths_of_what_was_never_born_have_no_effect() -> None:
    assert replay([(7, -1), (1, 0), (1, -1), (7, -1)]) == Replay(0, 0, 0)
