"""A garbage collection that is complete when the call returns.

`gc.collect()` returns at once while another thread collects. It may take seconds, since a collected DataLoader waits
for its processes, and memory left by one trial would be counted for the next.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping
from typing import Any

LONGEST_S = 20.0
"""A DataLoader waits 5 s for each of its processes."""


def collect() -> None:
    """Collects garbage; if another thread is collecting, waits for it first, at most `LONGEST_S`."""
    phases: list[str] = []
    this_thread, until = threading.get_ident(), time.monotonic() + LONGEST_S

    def record(phase: str, info: Mapping[str, Any]) -> None:
        if threading.get_ident() == this_thread:
            phases.append(phase)

    gc.callbacks.append(record)
    try:
        gc.collect()
        while not phases and time.monotonic() < until:
            time.sleep(0.01)
            gc.collect()
    finally:
        gc.callbacks.remove(record)
