"""The caching allocator with expandable segments: one range of addresses for each pool, grown by pages at its end.

Pages are 2 MiB for small blocks and 20 MiB for large ones. They are put under the lowest addresses that have none, and
taken back, where whole pages are free, when the card is full. A free block counts for as much as it can grow to.
"""

from __future__ import annotations

from bisect import insort

from tuning.memory.native import ENDLESS_BYTES, GRAIN_BYTES, Block, CachingAllocator, Pool


class ExpandableAllocator(CachingAllocator):
    """The allocator under `expandable_segments:True`, on a card whose pages run out at `capacity_bytes`.

    A limit set by `per_process_memory_fraction` refuses a little earlier: it counts a whole segment where a page would
    do.
    """

    def __init__(
        self, capacity_bytes: int | None = None, max_split_bytes: int | None = None, roundup_divisions: int = 1
    ) -> None:
        super().__init__(capacity_bytes, max_split_bytes, roundup_divisions)
        for pool in (self.small, self.large):
            pool.unmapped.append(Block(pool, 0, ENDLESS_BYTES, mapped=False))

    def empty_cache(self) -> None:
        """Takes back the pages that lie in free blocks as a whole."""
        for pool in (self.large, self.small):
            for block in [pool.blocks[key] for key in pool.keys]:
                self._unmap(block)

    def _best(self, pool: Pool, size: int) -> int:
        """Returns the index of the block to take: not one that could grow, while a larger one could grow less."""
        index = pool.at_least(size)
        while index + 1 < len(pool.keys) and _growable(pool.block(index + 1)) < _growable(pool.block(index)):
            index += 1
        return index

    def _splits(self, pool: Pool, size: int, rest: int) -> bool:
        return rest >= GRAIN_BYTES

    def _grown(self, pool: Pool, size: int) -> Block | None:
        block = _room(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            after = block.next
            if after is None or not self._map(after, min(size - block.size, after.size)):
                return None
            block = after  # which has swallowed the one before
        pool.remove(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Puts pages under the first `size` bytes of a block and frees it; False where the card has too few."""
        pool = block.pool
        size = -(-size // pool.page_bytes) * pool.page_bytes
        if not self._reserve(size):
            return False
        pool.unmapped.remove(block)
        block.mapped = True
        if size < block.size:
            rest = Block(pool, block.address + size, block.size - size, mapped=False)
            _insert_after(block, rest)
            block.size = size
            insort(pool.unmapped, rest, key=_address)
        self._merge(block)
        pool.add(block)
        return True

    def _unmap(self, block: Block) -> None:
        pool, page = block.pool, block.pool.page_bytes
        first = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if first >= end:
            return
        pool.remove(block)
        if first > block.address:
            head = Block(pool, block.address, first - block.address)
            head.prev, head.next = block.prev, block
            if block.prev is not None:
                block.prev.next = head
            block.prev = head
            pool.add(head)
        if (rest := block.address + block.size - end) > 0:
            tail = Block(pool, end, rest)
            _insert_after(block, tail)
            pool.add(tail)
        block.address, block.size, block.mapped = first, end - first, False
        self.reserved_bytes -= block.size
        self._merge(block)
        insort(pool.unmapped, block, key=_address)


def _address(block: Block) -> int:
    return block.address


def _growable(block: Block) -> int:
    """Returns what a free block has, with the range without pages behind it."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _room(pool: Pool, size: int) -> Block:
    """Returns the first of the blocks, free or without pages, that together have `size` bytes at the lowest address."""
    for unmapped in pool.unmapped:
        before = unmapped.prev
        first = before if before is not None and before.free else unmapped
        room, block = 0, first
        while room < size:
            room += block.size
            if room >= size:
                return first
            if block.next is None or not block.next.free:
                break
            block = block.next
    raise AssertionError("the last range without pages has no end")


def _insert_after(block: Block, rest: Block) -> None:
    rest.prev, rest.next = block, block.next
    if block.next is not None:
        block.next.prev = rest
    block.next = rest
