"""The storages of a training step in the order of their lives, and the peak that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Event = tuple[int, int]
"""(storage id, bytes): it is born; (storage id, -1): it dies."""
EMPTIED: Event = (-1, -1)
"""A mark: here torch hands what it caches back to the card."""
MAY_BE_LESS: Event = (-2, -1)
"""A mark: if the card has no room for the storage that is born next, it is halved until it fits."""


@dataclass(frozen=True)
class Trace:
    """The storages of one training step at one micro-batch size, in the order in which they are born and die.

    `categories` names each storage's: parameter, buffer, gradient, optimizer, activation, temporary, workspace, batch.
    `marks` are (index into events, phase from there on), phases being setup, forward, backward and optimizer; `ops`
    names the operator of each birth, in the order of the births.
    """

    micro_batch: int
    events: tuple[Event, ...]
    categories: Mapping[int, str]
    marks: tuple[tuple[int, str], ...]
    ops: tuple[str, ...]


@dataclass(frozen=True)
class Peak:
    """The peak of a step at one micro-batch size, in bytes.

    `live_bytes`: the sum of the storages. `allocated_bytes`, `reserved_bytes`: what torch.cuda.max_memory_allocated()
    and max_memory_reserved() would say. `capacity_bytes`: the smallest card, context not counted, on which the step
    does not run out of memory.
    `alone_bytes`: the sum of the storages where a batch is one micro-step, so that none holds gradients of others.
    `breakdown`: category -> bytes at the peak, which sum to `live_bytes`; `phase` and `operator`: where it is.
    """

    micro_batch: int
    live_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    breakdown: Mapping[str, int]
    phase: str
    operator: str
    alone_bytes: int
