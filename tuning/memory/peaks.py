"""The peak of a trace: where it is, what is alive there, and what a card must have for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tuning.memory.allocator import minimal_capacity, replay
from tuning.memory.trace import Event, Peak, Trace

CAPACITY_TOLERANCE_FRAC = 0.005
"""The capacity is found to half a percent: each halving is a replay of the whole log."""


def peak_of(trace: Trace) -> Peak:
    """Returns the peak of a trace; the breakdown is of what is live, before the allocator rounds it."""
    index, live_bytes = highest(trace.events)
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
        capacity_bytes=minimal_capacity(trace.events, unlimited=native, tolerance_frac=CAPACITY_TOLERANCE_FRAC),
        breakdown={name: size for name, size in breakdown.most_common() if size},
        phase=next((name for at, name in reversed(trace.marks) if at <= index), "setup"),
        operator=trace.ops[births - 1] if 0 < births <= len(trace.ops) else "",
        alone_bytes=min(live_bytes, alone_bytes(trace)),
    )


def alone_bytes(trace: Trace) -> int:
    """Returns the most bytes live at once where a batch is one micro-step.

    The passes before the first optimiser step lack nothing of it but the optimiser's state; the step has all.
    """
    step = next((at for at, name in trace.marks if name == "optimizer"), len(trace.events))
    end = next((at for at, _ in trace.marks if at > step), len(trace.events))
    state_bytes = sum(size for own, size in trace.events if size > 0 and trace.categories.get(own) == "optimizer")
    return max(highest(trace.events[:step])[1] + state_bytes, highest(trace.events[:end])[1])


def alone(trace: Trace) -> Trace:
    """Returns the trace of a later batch of one micro-step: its passes and its step, with the optimiser's state.

    It is all up to the end of the first optimiser step, and the state that this step makes is there before.
    """
    step = next((at for at, name in trace.marks if name == "optimizer"), len(trace.events))
    end = next((at for at, _ in trace.marks if at > step), len(trace.events))
    events = trace.events[:end]
    births = [own for own, size in events if size >= 0]
    state = {own for own in births if trace.categories.get(own) == "optimizer"}
    named = sorted(zip(births, trace.ops, strict=False), key=lambda birth: birth[0] not in state)
    marks = tuple((at + sum(own in state for own, _ in events[at:]), name) for at, name in trace.marks if at < end)
    moved = tuple(sorted(events, key=lambda event: event[0] not in state))
    return Trace(trace.micro_batch, moved, trace.categories, marks, tuple(op for _, op in named))


def highest(events: Sequence[Event]) -> tuple[int, int]:
    """Returns the index of the first event at which the most bytes are live, and these; (-1, 0) without any."""
    sizes: dict[int, int] = {}
    live, most, found = 0, 0, -1
    for index, (ident, size) in enumerate(events):
        if size < 0:
            live -= sizes.pop(ident, 0)
            continue
        sizes[ident] = size
        live += size
        if live > most:
            most, found = live, index
    return found, most
