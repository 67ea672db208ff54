"""A garbage collection that has taken place when it returns.

`gc.collect()` does nothing while another thread collects, and that may take seconds, as a DataLoader that is collected
waits for its processes. What a trial left behind would then count as what the next one needs.
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
    """Collects what nothing refers to; where another thread does, once it is done, or after `LONGEST_S`."""
    begun: list[str] = []
    us, until = threading.get_ident(), time.monotonic() + LONGEST_S

    def told(phase: str, info: Mapping[str, Any]) -> None:
        if threading.get_ident() == us:
            begun.append(phase)

    gc.callbacks.append(told)
    try:
        gc.collect()
        while not begun and time.monotonic() < until:
            time.sleep(0.01)
            gc.collect()
    finally:
        gc.callbacks.remove(told)
