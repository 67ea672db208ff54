"""A training fed by its loader against the same one fed from batches in memory, as pairs in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch

from trainables import batches, loop
from trainables.knobs import Scalar
from trainables.plan import Plan
from trainables.stopwatch import Window
from trainables.workload import Batch
from tuning.workers.session import WINDOW_S, Session


class Fed(batches.Loader):
    """Delivers the batches of an epoch from a list that its first use fills: on the device, where one is named."""

    kept: ClassVar[dict[tuple[Any, ...], list[Batch]]] = {}
    device: ClassVar[torch.device | None] = None

    def epoch(self, plan: Sequence[batches.MicroBatch]) -> Iterator[Batch]:
        """Yields what the loader delivered when the same plan was first asked for."""
        key = tuple(tuple(m.indices) for m in plan)
        if key not in self.kept:
            delivered = super().epoch(plan)
            there = self.device
            self.kept[key] = [b if there is None else batches.to_device(b, there) for b in delivered]
        return iter(self.kept[key])


@contextmanager
def fed(device: torch.device | None = None) -> Iterator[None]:
    """Inside, the loop takes its batches from memory. It offers no such choice, as nobody but a benchmark wants it."""
    module: Any = batches
    plain, module.Loader = module.Loader, Fed
    Fed.device = device
    try:
        yield
    finally:
        module.Loader, Fed.device = plain, None


def samples_per_s(session: Session, knobs: Mapping[str, Scalar], samples: int) -> float:
    """Returns samples over seconds of a training, its first optimiser step left out."""
    state = loop.prepare(session.resident, session.config(knobs), Plan(samples=samples, window_s=WINDOW_S))
    start, before = 0.0, 0
    for event in loop.train(state):
        if isinstance(event, Window) and not before:
            start, before = time.perf_counter(), state.samples
    return (state.samples - before) / (time.perf_counter() - start)


def pairs(
    session: Session, knobs: Mapping[str, Scalar], samples: int, rounds: int, device: torch.device | None = None
) -> Iterator[dict[str, float]]:
    """Yields samples a second from the loader and from memory, a pair a round; which goes first changes each round.

    The first pair fills the list, and is not counted. With a `device`, memory is that device's.
    """
    for number in range(rounds + 1):
        found = {}
        for side in ("loader", "memory") if number % 2 else ("memory", "loader"):
            with fed(device) if side == "memory" else nullcontext():
                found[side] = samples_per_s(session, knobs, samples)
        if number:
            yield found
    Fed.kept.clear()
