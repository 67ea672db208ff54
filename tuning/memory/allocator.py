"""A model of torch's caching allocator of CUDA memory, and what it makes of a log of storages.

The rules are those of c10/cuda/CUDACachingAllocator in torch 2.11 to 2.13, native segments, one stream. Sizes are
rounded up to 512 bytes. Up to 1 MiB is cut from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, and more gets
a segment of its own in steps of 2 MiB. The smallest free block that is large enough is taken, at the lowest address,
and split; free neighbours merge. When the card is full, segments without a block in use are handed back, and it is
tried once more.

Not modelled: streams and CUDA graphs (other pools), expandable segments, max_split_size_mb and
roundup_power2_divisions, garbage collection, which is off unless asked for, and the card's own rounding of what it
hands out. Addresses of segments grow with time, where a driver may reuse them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tuning.memory.trace import EMPTIED, MAY_BE_LESS, Event

MIB_BYTES = 2**20
GRAIN_BYTES = 512
SMALL_BYTES = 1 * MIB_BYTES
SMALL_SEGMENT_BYTES = 2 * MIB_BYTES
LARGE_SEGMENT_BYTES = 20 * MIB_BYTES
OWN_SEGMENT_BYTES = 10 * MIB_BYTES
STEP_BYTES = 2 * MIB_BYTES
"""Reserved memory is always a multiple of this."""

_ADDRESS_BITS = 56
_ENDLESS_BYTES = 1 << 50
"""More than any card has: the limit of no limit."""


@dataclass(frozen=True)
class Replay:
    """The allocator's answer to a log; `failed_at` is the index of the event at which it ran out of memory, or None."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    failed_at: int | None = None


def replay(events: Iterable[Event], *, capacity_bytes: int | None = None) -> Replay:
    """Returns what the allocator does with the events, up to where it runs out of memory on `capacity_bytes`.

    200,000 events take about half a second. Deaths of storages that were never born have no effect.
    """
    allocator = CachingAllocator(capacity_bytes)
    malloc, free = allocator.malloc, allocator.free
    failed_at = None
    may_be_less = False
    for index, (ident, size) in enumerate(events):
        if size >= 0:
            if not (malloc(ident, size) or (may_be_less and any(malloc(ident, size >> n) for n in range(1, 64)))):
                failed_at = index
                break
            may_be_less = False
        elif ident >= 0:
            free(ident)
        elif (ident, size) == EMPTIED:
            allocator.empty_cache()
        else:
            may_be_less = (ident, size) == MAY_BE_LESS
    return Replay(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, failed_at)


def minimal_capacity(events: Sequence[Event], *, unlimited: Replay | None = None, tolerance_frac: float = 0.0) -> int:
    """Returns the bytes of the smallest card on which the events do not run out of memory, by bisection.

    `unlimited` is their replay without a limit, where it is known. The result always suffices; with `tolerance_frac`,
    it may exceed the smallest by that share. In rare cases a smaller card suffices too: to hand segments back early
    can be lucky, so that what fits is not quite monotone in the capacity.
    """
    found = replay(events) if unlimited is None else unlimited
    low, high = -(-_least_bytes(events, found) // STEP_BYTES), found.peak_reserved_bytes // STEP_BYTES
    slack = int(tolerance_frac * high)

    def fits(steps: int) -> bool:
        return replay(events, capacity_bytes=steps * STEP_BYTES).failed_at is None

    if low < high and fits(low):
        return low * STEP_BYTES
    while high - low > 1 + slack:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high * STEP_BYTES


def _least_bytes(events: Sequence[Event], unlimited: Replay) -> int:
    """Returns the most that is allocated at once, less what need not be whole."""
    if MAY_BE_LESS not in events:
        return unlimited.peak_allocated_bytes
    may_be_less = {after[0] for mark, after in pairwise(events) if mark == MAY_BE_LESS}
    return replay(event for event in events if event[0] not in may_be_less).peak_allocated_bytes


class Block:
    """A piece of a segment, in use or free, between its neighbours."""

    __slots__ = ("address", "free", "next", "pool", "prev", "size")

    def __init__(self, pool: Pool, address: int, size: int) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.free = True
        self.prev: Block | None = None
        self.next: Block | None = None


class Pool:
    """Free blocks by size, then address."""

    __slots__ = ("blocks", "keys", "small")

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Takes in a free block."""
        key = block.size << _ADDRESS_BITS | block.address
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Takes out a block that is in it."""
        key = block.size << _ADDRESS_BITS | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]

    def take(self, size: int) -> Block | None:
        """Returns the smallest block of `size` bytes or more, taken out; None where there is none."""
        index = bisect_left(self.keys, size << _ADDRESS_BITS)
        return self.blocks.pop(self.keys.pop(index)) if index < len(self.keys) else None


class CachingAllocator:
    """The allocator on a card of `capacity_bytes`, context not counted; None is a card without end."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = _ENDLESS_BYTES if capacity_bytes is None else capacity_bytes
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.small, self.large = Pool(small=True), Pool(small=False)
        self.live: dict[int, Block] = {}
        self._top = 0

    def malloc(self, ident: int, size: int) -> bool:
        """Returns whether there is memory for storage `ident`, which then has it; no bytes need none."""
        if size <= 0:
            return True
        size = -(-size // GRAIN_BYTES) * GRAIN_BYTES
        pool = self.small if size <= SMALL_BYTES else self.large
        block = pool.take(size) or self._made(pool, size)
        if block is None:
            return False
        rest = block.size - size
        if rest >= GRAIN_BYTES if pool.small else rest > SMALL_BYTES:
            remainder = Block(pool, block.address + size, rest)
            remainder.prev, remainder.next = block, block.next
            if block.next is not None:
                block.next.prev = remainder
            block.next, block.size = remainder, size
            pool.add(remainder)
        block.free = False
        self.live[ident] = block
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return True

    def free(self, ident: int) -> None:
        """Takes back the block of a storage, and joins it with its free neighbours; no block, no effect."""
        block = self.live.pop(ident, None)
        if block is None:
            return
        self.allocated_bytes -= block.size
        block.free = True
        before, after, pool = block.prev, block.next, block.pool
        if before is not None and before.free:
            pool.remove(before)
            block.address = before.address
            block.size += before.size
            block.prev = before.prev
            if block.prev is not None:
                block.prev.next = block
        if after is not None and after.free:
            pool.remove(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.prev = block
        pool.add(block)

    def empty_cache(self) -> None:
        """Hands segments back to the card that have no block in use."""
        for pool in (self.large, self.small):
            for block in [pool.blocks[key] for key in pool.keys]:
                if block.prev is None and block.next is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _made(self, pool: Pool, size: int) -> Block | None:
        """Returns new memory from the card, after handing back what is cached where it is full; None: out of memory."""
        block = self._segment(pool, size)
        if block is None:
            self.empty_cache()
            block = self._segment(pool, size)
        return block

    def _segment(self, pool: Pool, size: int) -> Block | None:
        if pool.small:
            segment_bytes = SMALL_SEGMENT_BYTES
        else:
            own = size >= OWN_SEGMENT_BYTES
            segment_bytes = -(-size // STEP_BYTES) * STEP_BYTES if own else LARGE_SEGMENT_BYTES
        if self.reserved_bytes + segment_bytes > self.capacity_bytes:
            return None
        self.reserved_bytes += segment_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self._top += segment_bytes
        return Block(pool, self._top - segment_bytes, segment_bytes)
