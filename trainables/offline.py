"""Imports packages that would otherwise access a network while they are imported."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_hub_kernels() -> Iterator[None]:
    """Blocks the import of the package `kernels` inside the block, and silences bitsandbytes' warning about that.

    On a CPU with bf16 instructions, bitsandbytes 0.50 fetches a kernel from a hub by `kernels` while it is imported,
    although it has its own. If bitsandbytes is installed, peft imports it.
    """
    package, logger = sys.modules.get("kernels"), logging.getLogger("bitsandbytes.backends.cpu.ops")
    was_there, level = "kernels" in sys.modules, logger.level
    sys.modules["kernels"] = None  # type: ignore[assignment]  # None makes Python's import fail
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        del sys.modules["kernels"]
        if was_there:
            sys.modules["kernels"] = package  # type: ignore[assignment]
