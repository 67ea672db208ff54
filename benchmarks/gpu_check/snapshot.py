"""What torch recorded of its own allocator, as events of ours: a real step's memory replayed through the model of it.

`torch.cuda.memory._record_memory_history()` and `_snapshot()` give what happened as `device_traces`, a list of entries
for each device: {"action", "addr", "size", "stream", ...}, the same from torch 2.11 to 2.13. `alloc` has the bytes that
were asked for, before rounding; `free_requested` and `free_completed` are apart where another stream still uses a
block; `segment_*` are what the allocator itself asked of the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuning.memory.allocator import replay
from tuning.memory.trace import Event

GAINED, LOST = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Recorded:
    """A recording: births and deaths in their order, and the most that the allocator had reserved at once.

    `begun_bytes` were reserved before the recording began; `streams` counts the streams that allocated, of which the
    model knows one; `strangers` the deaths of storages that were born before.
    """

    events: tuple[Event, ...]
    peak_reserved_bytes: int
    begun_bytes: int
    streams: int
    strangers: int
    ooms: int


def recorded(snapshot: Mapping[str, Any], device: int = 0) -> Recorded:
    """Returns the recording of a device; raises ValueError where the snapshot holds none."""
    traces = snapshot.get("device_traces") or []
    trace = traces[device] if device < len(traces) else []
    if not trace:
        raise ValueError(f"the snapshot has no trace of device {device}; was _record_memory_history on?")
    events: list[Event] = []
    alive: dict[int, int] = {}
    streams = {e["stream"] for e in trace if e["action"] == "alloc"}
    moved = sum(_sign(e) * e["size"] for e in trace if _sign(e))
    left = sum(s["total_size"] for s in snapshot.get("segments", ()) if s.get("device", device) == device)
    begun = max(0, left - moved) if snapshot.get("segments") is not None else 0
    reserved = peak = begun
    strangers = 0
    for entry in trace:
        action = entry["action"]
        if action == "alloc":
            alive[entry["addr"]] = len(events)
            events.append((alive[entry["addr"]], int(entry["size"])))
        elif action == "free_completed":  # from here on the block can be given away again
            ident = alive.pop(entry["addr"], None)
            if ident is None:
                strangers += 1
            else:
                events.append((ident, -1))
        reserved += _sign(entry) * entry.get("size", 0)
        peak = max(peak, reserved)
    ooms = sum(e["action"] == "oom" for e in trace)
    return Recorded(tuple(events), peak, begun, len(streams), strangers, ooms)


def compared(found: Recorded) -> dict[str, Any]:
    """Returns the reserved peak that the model of the allocator makes of the recording, beside the real one."""
    model = replay(found.events)
    real = found.peak_reserved_bytes - found.begun_bytes
    return {
        "events": len(found.events),
        "streams": found.streams,
        "strangers": found.strangers,
        "real_reserved_bytes": real,
        "model_reserved_bytes": model.peak_reserved_bytes,
        "model_allocated_bytes": model.peak_allocated_bytes,
        "error_frac": model.peak_reserved_bytes / real - 1 if real else None,
    }


def _sign(entry: Mapping[str, Any]) -> int:
    return (entry["action"] in GAINED) - (entry["action"] in LOST)
