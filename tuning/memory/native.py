"""A model of torch's caching allocator of CUDA memory, with segments of its native kind.

The rules are those of c10/cuda/CUDACachingAllocator in torch 2.11 to 2.13, for one stream. Sizes are rounded up to 512
bytes. Up to 1 MiB is cut from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, and more gets a segment of its
own in steps of 2 MiB. The smallest free block that is large enough is taken, at the lowest address, and split; free
neighbours merge. When the card is full, segments without a block in use are handed back, and it is tried once more.

Not modelled: streams and CUDA graphs (other pools), garbage collection, which is off unless asked for, and the card's
own rounding of what it hands out. Addresses of native segments grow with time, where a driver may reuse them.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MIB_BYTES = 2**20
GRAIN_BYTES = 512
SMALL_BYTES = 1 * MIB_BYTES
SMALL_SEGMENT_BYTES = 2 * MIB_BYTES
LARGE_SEGMENT_BYTES = 20 * MIB_BYTES
OWN_SEGMENT_BYTES = 10 * MIB_BYTES
STEP_BYTES = 2 * MIB_BYTES
"""What is reserved is always a multiple of this."""

_ADDRESS_BITS = 56
ENDLESS_BYTES = 1 << 50
"""More than any card has: the range of addresses of an expandable segment, the limit of no limit."""


class Block:
    """A piece of a segment, in use or free, between its neighbours; `mapped` is False where no page is under it."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "prev", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool, self.address, self.size, self.mapped = pool, address, size, mapped
        self.free = True
        self.prev: Block | None = None
        self.next: Block | None = None


class Pool:
    """Free blocks by size, then address; `page_bytes` is what an expandable segment of the pool grows by."""

    __slots__ = ("blocks", "keys", "page_bytes", "small", "unmapped")

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[Block] = []

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

    def at_least(self, size: int) -> int:
        """Returns the index of the first block of `size` bytes or more, len(keys) where there is none."""
        return bisect_left(self.keys, size << _ADDRESS_BITS)

    def block(self, index: int) -> Block:
        """Returns the block at an index of `keys`."""
        return self.blocks[self.keys[index]]


class CachingAllocator:
    """The native allocator on a card of `capacity_bytes`, context not counted; None is a card without end.

    `max_split_bytes` and `roundup_divisions` are torch's max_split_size_mb (in bytes) and roundup_power2_divisions.
    """

    def __init__(
        self, capacity_bytes: int | None = None, max_split_bytes: int | None = None, roundup_divisions: int = 1
    ) -> None:
        self.capacity_bytes = ENDLESS_BYTES if capacity_bytes is None else capacity_bytes
        self.max_split_bytes = ENDLESS_BYTES if max_split_bytes is None else max_split_bytes
        self.roundup_divisions = roundup_divisions
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.retries = 0
        self.small, self.large = Pool(small=True), Pool(small=False)
        self.live: dict[int, Block] = {}
        self._top = 0

    def rounded(self, size: int) -> int:
        """Returns the bytes of a block for `size` bytes."""
        divisions = self.roundup_divisions
        if divisions > 1 and size > GRAIN_BYTES * divisions:
            floor = 1 << (size.bit_length() - 1)
            step = floor // divisions
            return -(-size // step) * step
        return -(-size // GRAIN_BYTES) * GRAIN_BYTES or GRAIN_BYTES

    def malloc(self, ident: int, size: int) -> bool:
        """Returns whether there is memory for storage `ident`, which then has it; no bytes need none."""
        if size <= 0:
            return True
        size = self.rounded(size)
        pool = self.small if size <= SMALL_BYTES else self.large
        block = self._cached(pool, size) or self._made(pool, size)
        if block is None:
            return False
        rest = block.size - size
        if self._splits(pool, size, rest):
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
        self._merge(block)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Hands segments back to the card that have no block in use."""
        for pool in (self.large, self.small):
            for block in [pool.blocks[key] for key in pool.keys]:
                if block.prev is None and block.next is None:
                    self._hand_back(block)

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """Returns the free block that fits best, taken out of its pool; None where the pool has none."""
        index = self._best(pool, size)
        if index == len(pool.keys):
            return None
        found = pool.block(index)
        if size < self.max_split_bytes <= found.size:
            return None  # kept whole for those that need it
        if size >= self.max_split_bytes and found.size >= size + LARGE_SEGMENT_BYTES:
            return None
        del pool.blocks[pool.keys.pop(index)]
        return found

    def _best(self, pool: Pool, size: int) -> int:
        return pool.at_least(size)

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        if pool.small:
            return rest >= GRAIN_BYTES
        return rest > SMALL_BYTES and size < self.max_split_bytes

    def _made(self, pool: Pool, size: int) -> Block | None:
        """Returns new memory from the card, after handing back what is cached where it is full; None: out of memory."""
        block = self._grown(pool, size)
        if block is None and self._hand_back_oversize(pool, size):
            block = self._grown(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._grown(pool, size)
        return block

    def _grown(self, pool: Pool, size: int) -> Block | None:
        if pool.small:
            segment_bytes = SMALL_SEGMENT_BYTES
        else:
            own = size >= OWN_SEGMENT_BYTES
            segment_bytes = -(-size // STEP_BYTES) * STEP_BYTES if own else LARGE_SEGMENT_BYTES
        if not self._reserve(segment_bytes):
            return None
        self._top += segment_bytes
        return Block(pool, self._top - segment_bytes, segment_bytes)

    def _reserve(self, size: int) -> bool:
        if self.reserved_bytes + size > self.capacity_bytes:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _hand_back(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved_bytes -= block.size

    def _hand_back_oversize(self, pool: Pool, size: int) -> bool:
        """Returns whether cached blocks that are never split were handed back, enough for `size`."""
        if self.max_split_bytes == ENDLESS_BYTES:
            return False
        wanted = max(size, self.max_split_bytes)
        if (index := pool.at_least(wanted)) < len(pool.keys):
            self._hand_back(pool.block(index))
            return True
        released = 0
        while released < wanted and pool.keys and (last := pool.block(-1)).size >= self.max_split_bytes:
            released += last.size
            self._hand_back(last)
        return released >= wanted

    def _merge(self, block: Block) -> None:
        """Joins a block that is in no pool with its neighbours, where they are free and mapped as it is."""
        before = block.prev
        if before is not None and before.free and before.mapped == block.mapped:
            self._forget(before)
            block.address = before.address
            block.size += before.size
            block.prev = before.prev
            if block.prev is not None:
                block.prev.next = block
        after = block.next
        if after is not None and after.free and after.mapped == block.mapped:
            self._forget(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.prev = block

    def _forget(self, block: Block) -> None:
        if block.mapped:
            block.pool.remove(block)
        else:
            block.pool.unmapped.remove(block)
