"""The peak of a trace: where it is, what is alive there, and what a card must have for it."""

from __future__ import annotations

from collections import Counter

from tuning.memory.allocator import minimal_capacity, replay
from tuning.memory.trace import Peak, Trace

CAPACITY_TOLERANCE_FRAC = 0.005
"""The capacity is found to half a percent: each halving is a replay of the whole log."""


def peak_of(trace: Trace) -> Peak:
    """Returns the peak of a trace; the breakdown is of what is live, before the allocator rounds it."""
    index, live_bytes = highest(trace)
    native = replay(trace.events)
    alive: dict[int, int] = {}
    for ident, size in trace.events[: index + 1]:
        if size < 0:
            alive.pop(ident, None)
        else:
            alive[ident] = size
    breakdown: Counter[str] = Counter()
    for ident, size in alive.items():
        breakdown[trace.categories.get(ident, "temporary")] += size
    births = sum(size >= 0 for _, size in trace.events[: index + 1])
    return Peak(
        micro_batch=trace.micro_batch,
        live_bytes=live_bytes,
        allocated_bytes=native.peak_allocated_bytes,
        reserved_bytes=native.peak_reserved_bytes,
        expandable_bytes=replay(trace.events, expandable=True).peak_reserved_bytes,
        capacity_bytes=minimal_capacity(trace.events, unlimited=native, tolerance_frac=CAPACITY_TOLERANCE_FRAC),
        breakdown={name: size for name, size in breakdown.most_common() if size},
        phase=next((name for at, name in reversed(trace.marks) if at <= index), "setup"),
        operator=trace.ops[births - 1] if 0 < births <= len(trace.ops) else "",
    )


def highest(trace: Trace) -> tuple[int, int]:
    """Returns the index of the first event at which the most bytes are live, and these; (-1, 0) without any."""
    sizes: dict[int, int] = {}
    live, highest, found = 0, 0, -1
    for index, (ident, size) in enumerate(trace.events):
        if size < 0:
            live -= sizes.pop(ident, 0)
            continue
        sizes[ident] = size
        live += size
        if live > highest:
            highest, found = live, index
    return found, highest
