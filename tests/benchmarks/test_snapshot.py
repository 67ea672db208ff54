"""Recordings of torch's allocator: by hand in its format of 2.11 to 2.13, and of our own model, there and back."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu_check.snapshot import compared, recorded
from tuning.memory.allocator import CachingAllocator, replay
from tuning.memory.trace import Event

MIB = 2**20


def entry(action: str, addr: int, size: int, stream: int = 0) -> dict[str, Any]:
    """An entry of a device's trace, as `torch.cuda.memory._snapshot` has it."""
    return {"action": action, "addr": addr, "size": size, "stream": stream, "time_us": 0, "frames": []}


def by_hand() -> list[dict[str, Any]]:
    return [
        entry("segment_alloc", 4096, 20 * MIB),
        entry("alloc", 4096, 3 * MIB),
        entry("alloc", 4096 + 3 * MIB, 2 * MIB),
        entry("free_requested", 4096, 3 * MIB),
        entry("free_completed", 4096, 3 * MIB),
        entry("alloc", 4096, 2 * MIB - 100),
        {"action": "oom", "size": 2**40, "stream": 0, "device_free": 0, "frames": []},
        {"action": "snapshot", "size": 0, "addr": 0, "stream": 0, "frames": []},
    ]


def test_births_and_deaths_in_their_order_with_an_address_used_twice() -> None:
    found = recorded({"device_traces": [by_hand()]})
    assert found.events == ((0, 3 * MIB), (1, 2 * MIB), (0, -1), (3, 2 * MIB - 100))
    assert (found.peak_reserved_bytes, found.streams, found.ooms) == (20 * MIB, 1, 1)
    assert compared(found)["error_frac"] == 0.0


def test_what_was_there_before_is_neither_counted_nor_freed() -> None:
    trace = [entry("free_requested", 64, MIB), entry("free_completed", 64, MIB), *by_hand()]
    segments = [{"device": 0, "total_size": 20 * MIB}, {"device": 0, "total_size": 2 * MIB}]
    found = recorded({"device_traces": [trace], "segments": segments})
    assert (found.begun_bytes, found.peak_reserved_bytes, found.strangers) == (2 * MIB, 22 * MIB, 1)
    assert compared(found)["real_reserved_bytes"] == 20 * MIB


def test_expandable_segments_are_mapped_and_unmapped() -> None:
    trace = [entry("segment_map", 0, 20 * MIB), entry("segment_map", 20 * MIB, 20 * MIB)]
    trace += [entry("alloc", 0, 30 * MIB), entry("segment_unmap", 0, 20 * MIB), entry("segment_map", 0, 2 * MIB)]
    assert recorded({"device_traces": [trace]}).peak_reserved_bytes == 40 * MIB


def test_streams_are_counted_since_the_model_knows_one() -> None:
    assert recorded({"device_traces": [[*by_hand(), entry("alloc", 9, 512, stream=7)]]}).streams == 2


@pytest.mark.parametrize("snapshot", [{}, {"device_traces": []}, {"device_traces": [[]]}])
def test_nothing_recorded_says_so(snapshot: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no trace of device 0; was _record_memory_history on"):
        recorded(snapshot)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40 * MIB)), max_size=80))
def test_what_the_model_records_of_itself_replays_to_the_same(asked: list[tuple[int, int]]) -> None:
    events, trace = _played(asked)
    if not trace:
        return
    found = recorded({"device_traces": [trace]})
    assert [size for _, size in found.events] == [size for _, size in events]
    whole = replay(events)
    assert found.peak_reserved_bytes == whole.peak_reserved_bytes
    assert compared(found)["model_allocated_bytes"] == whole.peak_allocated_bytes


def _played(asked: list[tuple[int, int]]) -> tuple[list[Event], list[dict[str, Any]]]:
    """Returns events, slot by slot in turns born and dead, and what an allocator that records itself makes of them."""
    allocator = CachingAllocator()
    events: list[Event] = []
    trace: list[dict[str, Any]] = []
    alive: dict[int, int] = {}
    for slot, size in asked:
        if slot in alive:
            ident = alive.pop(slot)
            address = allocator.live[ident].address
            trace += [entry("free_requested", address, 0), entry("free_completed", address, 0)]
            allocator.free(ident)
            events.append((ident, -1))
        elif size:
            before, ident = allocator.reserved_bytes, len(events)
            assert allocator.malloc(ident, size)
            if grown := allocator.reserved_bytes - before:
                trace.append(entry("segment_alloc", 0, grown))
            trace.append(entry("alloc", allocator.live[ident].address, size))
            alive[slot] = ident
            events.append((ident, size))
    return events, trace
