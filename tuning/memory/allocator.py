"""What torch's allocator makes of a log of storages: the peak it reserves, and the smallest card that is enough."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tuning.memory.expandable import ExpandableAllocator
from tuning.memory.native import STEP_BYTES, CachingAllocator
from tuning.memory.trace import Event


@dataclass(frozen=True)
class Replay:
    """What the allocator did with a log; `failed_at` is the index of the event it ran out of memory at, or None.

    `retries` counts how often the card was full and cached segments were handed back.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    failed_at: int | None = None


def replay(
    events: Iterable[Event],
    *,
    capacity_bytes: int | None = None,
    expandable: bool = False,
    max_split_bytes: int | None = None,
    roundup_divisions: int = 1,
) -> Replay:
    """Returns what the allocator does with the events, up to where it runs out of memory on `capacity_bytes`.

    200,000 events take about half a second. Deaths of storages that were never born have no effect.
    """
    kind = ExpandableAllocator if expandable else CachingAllocator
    allocator = kind(capacity_bytes, max_split_bytes, roundup_divisions)
    malloc, free = allocator.malloc, allocator.free
    failed_at = None
    for index, (ident, size) in enumerate(events):
        if size < 0:
            free(ident)
        elif not malloc(ident, size):
            failed_at = index
            break
    return Replay(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.retries, failed_at)


def minimal_capacity(
    events: Sequence[Event],
    *,
    expandable: bool = False,
    unlimited: Replay | None = None,
    tolerance_frac: float = 0.0,
) -> int:
    """Returns the bytes of the smallest card on which the events do not run out of memory, by bisection.

    `unlimited` is their replay without a limit, where it is known. The result always suffices; with `tolerance_frac`,
    it may exceed the smallest by that share. In rare cases a smaller card suffices too: to hand segments back early
    can be lucky, so that what fits is not quite monotone in the capacity.
    """
    found = replay(events, expandable=expandable) if unlimited is None else unlimited
    low, high = -(-found.peak_allocated_bytes // STEP_BYTES), found.peak_reserved_bytes // STEP_BYTES
    slack = int(tolerance_frac * high)

    def fits(steps: int) -> bool:
        return replay(events, capacity_bytes=steps * STEP_BYTES, expandable=expandable).failed_at is None

    if low < high and fits(low):
        return low * STEP_BYTES
    while high - low > 1 + slack:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * STEP_BYTES
