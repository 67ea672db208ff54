"""A step on fake CUDA tensors, traced by us and by PyTorch's MemTracker; memory_check loads the shim before."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch.distributed._tools.mem_tracker import MemTracker

from trainables import loop
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.workload import Config, Workload
from tuning.memory.trace import Trace
from tuning.memory.tracing import recurrent, step, weightless
from tuning.memory.tracing.lifetimes import Lifetimes

MICRO_BATCH = 4


class Nothing:
    """What operators take inside themselves, left out: MemTracker does not know of it."""

    def transient_bytes(self, func: Any, args: Sequence[Any], result: Any) -> int:
        """Returns 0."""
        return 0

    def kept_bytes(self, func: Any, phase: str) -> int:
        """Returns 0."""
        return 0

    def corrected(self, func: Any, args: Sequence[Any], result: Any) -> Any:
        """Returns the result."""
        return result


def ours(workload: Workload, config: Config) -> Trace:
    """Returns the trace of a step, without a card's copy of the first weights."""
    lifetimes = Lifetimes("cuda", step.FAKE, Nothing())
    with step.patched(), recurrent.cudnn():
        state = _prepared(workload, config)
        lifetimes.adopt([*state.model.parameters(), *state.model.buffers()], "parameter")
        state.meter = cast(Any, lifetimes)
        loop.rehearse(state, MICRO_BATCH, step.to_card)
    return lifetimes.trace(MICRO_BATCH)


def theirs(workload: Workload, config: Config) -> int:
    """Returns the peak bytes that MemTracker saw in the same step."""
    tracker = MemTracker()
    with step.patched(), recurrent.cudnn():
        state = _prepared(workload, config)
        state.meter = None
        tracker.track_external(state.model, state.optimizer)
        state.optimizer.register_step_post_hook(lambda *_: tracker.reset_mod_stats())  # it follows one forward pass
        state.optimizer.register_step_post_hook(lambda *_: tracker.reset_mod_stats())  # one forward pass is behind it
        with step.FAKE, tracker:
            loop.rehearse(state, MICRO_BATCH, step.to_card)
    peak = tracker.get_tracker_snapshot("peak")
    return int(next(sizes["Total"] for device, sizes in peak.items() if device.type == "cuda"))


def _prepared(workload: Workload, config: Config) -> loop.State:
    resident = Resident(cast(Workload, weightless.Weightless(workload, step.FAKE)))
    with step.FAKE if torch.is_grad_enabled() else nullcontext():
        return loop.prepare(resident, config, Plan(samples=1_000_000))
