"""The state of a run while it trains, and the count of the bytes that it holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainables import optim, precision
from trainables.knobs import Knobs
from trainables.live_bytes import LiveBytes, Sparse
from trainables.plan import Plan
from trainables.ranks import ALONE, Ranks
from trainables.resident import Resident
from trainables.stopwatch import Stopwatch, Window
from trainables.witness import StepPart, Witness
from trainables.workload import Config

WARM_STEPS = {"off": 1, "default": 2, "reduce-overhead": 3}
"""Steps of the warm-up, by mode of compile: one is watched, one compiles, one is recorded as a CUDA graph."""

LOSS = "the mean training loss"
"""The first words of `Diverged` if the loss, not an objective, is not finite."""


class Diverged(Exception):
    """The loss or an objective is not finite."""


class Undefined(Diverged):
    """An objective is NaN, although every loss seen was finite."""


def check_objectives(objectives: Iterable[str], values: Mapping[str, float], samples: int) -> None:
    """Raises Undefined if an objective is NaN, Diverged if it is infinite, which a metric that overflows may report."""
    for name in objectives:
        if not math.isfinite(values[name]):
            kind = Undefined if math.isnan(values[name]) else Diverged
            raise kind(f"{name} is {values[name]} after {samples} samples")


@dataclass(frozen=True)
class Evaluation:
    """Quality after `samples` training samples; `wall_s` are the seconds of measuring it."""

    samples: int
    values: dict[str, float]
    wall_s: float


class WarmUp:
    """The first window, not representative of a steady run: `WARM_STEPS`, and the steps that find the scale of fp16.

    A GradScaler begins at 65,536 and halves the scale at each step that it skips; skipped steps must not be timed.
    """

    def __init__(self, steps: int, knobs: Knobs, scaler: torch.amp.GradScaler) -> None:
        """Begins after `steps` optimiser steps of the run."""
        self._ends_at = steps + WARM_STEPS[knobs.compile]
        self._scaler, self._scale = scaler, scaler.get_scale()

    def ends(self, steps: int) -> bool:
        """Returns whether the warm-up ends with this optimiser step; waits for the device under fp16."""
        if steps != self._ends_at:
            return False
        scale = self._scaler.get_scale()
        if not 1.0 <= scale < self._scale:
            return True
        self._ends_at, self._scale = steps + 1, scale
        return False

    def is_over(self, steps: int) -> bool:
        """Returns whether the warm-up ended before this optimiser step."""
        return steps > self._ends_at


@dataclass(kw_only=True)
class RunState:
    """Progress and memory of a training, by our loop or a custom one; a session reads it while the run trains."""

    config: Config
    plan: Plan
    samples: int = 0
    steps: int = 0
    epoch: int = 0
    micro_batches_done: int = 0
    """Within the epoch."""
    ooms_before: int = 0
    first_step_at: float = 0.0
    """Unix seconds at which the first micro-batch was asked for; 0 before."""
    last_step_at: float = 0.0
    has_ended: bool = False
    """Whether a custom loop ended before its horizon with a report, as early stopping does."""
    meter: LiveBytes | None = field(default=None, repr=False)
    sparse: Sparse = field(default_factory=Sparse, repr=False)
    counts: bool = True
    """Whether the meter counts the current part of a step; the first optimiser step is counted in any case."""
    witness: Witness | None = field(default=None, repr=False)
    active: dict[str, Any] = field(default_factory=dict)
    """Facts about the first optimiser step (`witness.Witness.facts`); empty before its end."""
    marks: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """`resident.marks` of the model before its first step; empty if the model is not known."""
    evaluations: list[Evaluation] = field(default_factory=list)
    best_weights: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """The evaluations so far, and copies of the weights of the best, as whoever hears them keeps them."""
    average: optim.Average = field(default_factory=optim.Average, repr=False)

    @property
    def device(self) -> torch.device:
        """Returns the device trained on."""
        return torch.device(self.config.device)

    @property
    def capped(self) -> bool:
        """Returns whether the run is held to a cap."""
        return self.plan.cap_bytes is not None

    @property
    def counting(self) -> bool:
        """Returns whether the meter counts the live bytes of the current part of a step."""
        return self.meter is not None and (self.steps == 0 or self.counts)

    @property
    def live_bytes(self) -> int:
        """Returns the bytes of live tensors; on the CPU only those that were counted."""
        return self.meter.live_bytes if self.meter is not None else torch.cuda.memory_allocated(self.device)

    @property
    def lacked(self) -> bool:
        """Returns whether an allocation was refused in this training."""
        ooms = self.meter.wanted_bytes if self.meter else torch.cuda.memory_stats(self.device).get("num_ooms", 0)
        return bool(ooms > self.ooms_before)

    @property
    def peak_allocated_bytes(self) -> int:
        """Returns the most bytes of live tensors so far; on the CPU of the first optimiser step, unless capped."""
        return self.meter.peak_bytes if self.meter is not None else torch.cuda.max_memory_allocated(self.device)


@dataclass(kw_only=True)
class State(RunState):
    """Everything that a run of the contract's loop changes while it trains, and everything it needs to resume."""

    resident: Resident
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    batch_samples: int = 0
    """Samples of the batch whose optimiser step is next; 0 in the middle of a batch."""
    ranks: Ranks = field(default=ALONE, repr=False)
    """The processes that train together; this process is one of them."""
    evaluation_batch: int = 0
    """Samples of a validation batch, set after one of micro-batch size ran out of memory; 0 before."""


def prepare(resident: Resident, config: Config, plan: Plan) -> State:
    """Returns a run that has not begun: initial weights, a new optimiser, torch's generators seeded."""
    device = torch.device(config.device)
    if config.knobs.empty_cache and device.type == "cuda":
        torch.cuda.empty_cache()
    precision.forget_graphs()
    model = resident.model(config)
    precision.set_memory_format(model, config.knobs)
    optimizer = optim.prepared(resident.workload, model, config)
    torch.manual_seed(config.seed)
    state = State(
        resident=resident,
        config=config,
        plan=plan,
        model=model,
        optimizer=optimizer,
        scaler=precision.grad_scaler(config.knobs, device),
        marks=resident.marks,
        average=optim.Average(model.parameters() if config.knobs.ema_decay else (), config.knobs.ema_decay),
    )
    counted(state, resident.meter)
    if state.meter is not None:
        state.meter.adopt([*model.parameters(), *model.buffers(), *state.average.means])
    return state


def counted(state: RunState, meter: LiveBytes) -> None:
    """Starts counting the peak memory of a training: by CUDA's allocator, or on a CPU by the process's `meter`."""
    if state.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(state.device)
        state.ooms_before = torch.cuda.memory_stats(state.device).get("num_ooms", 0)
    else:
        state.meter = meter
        meter.begin(state.plan.cap_bytes)


def closed(watch: Stopwatch, loss_sum: Tensor | float | None, samples: int) -> Window:
    """Closes the window and returns it. Reads the loss, and so waits for a CUDA device.

    The loss is NaN if None is given, as by a custom loop that shows no loss. Raises Diverged if it is not finite.
    """
    if loss_sum is None:
        return watch.window(math.nan)
    loss = float(loss_sum) / max(1, watch.samples)
    if not math.isfinite(loss):
        raise Diverged(f"{LOSS} is {loss} after {samples} samples")
    return watch.window(loss)


@contextmanager
def watched(state: RunState, part: StepPart | None = None) -> Iterator[None]:
    """Lets the witness observe the block as a `part` of the first optimiser step, and counts live bytes on a CPU.

    Bytes are counted in the first optimiser step; under a cap also in every part that may need more than the parts
    counted before (`live_bytes.Sparse`). Nothing is compiled meanwhile.
    """
    meter = state.meter if state.counting else None
    witness = state.witness if part is not None else None
    with ExitStack() as stack:
        if meter is not None or witness is not None:
            # torch.compile must not see the block: under a dispatch mode it would mark functions as never to compile.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if meter is not None:
            meter.adopts = state.steps == 0  # the first step also meets what the workload keeps beside its model
            stack.enter_context(meter)
        if witness is not None and part is not None:
            stack.enter_context(witness.watching(part))
        yield
