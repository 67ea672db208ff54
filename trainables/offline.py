"""Imports of packages that would fetch something from a network as they are imported."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_hub_kernels() -> Iterator[None]:
    """Inside the block the package `kernels` cannot be imported, and bitsandbytes does not complain that it lacks it.

    On a CPU with bf16 instructions bitsandbytes 0.50 asks it for a kernel from a hub, as it is imported; peft imports
    bitsandbytes where that is installed. It has a kernel of its own besides.
    """
    own, logger = sys.modules.get("kernels"), logging.getLogger("bitsandbytes.backends.cpu.ops")
    was_there, level = "kernels" in sys.modules, logger.level
    sys.modules["kernels"] = None  # type: ignore[assignment]  # Python's way of saying that there is none
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        del sys.modules["kernels"]
        if was_there:
            sys.modules["kernels"] = own  # type: ignore[assignment]
