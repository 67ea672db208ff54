"""The loop's own step (`trainables.loop.rehearse`), traced on fake tensors."""

from __future__ import annotations

import functools
import gc
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils as foreach

from trainables import garbage, loop
from trainables.batches import size_of, to_device
from trainables.knobs import Knobs
from trainables.plan import Plan
from trainables.resident import Resident
from trainables.workload import Batch, Config, OwnLoop, Workload, WorkloadError, table_of
from trainables.workload_files import load
from tuning.memory.prediction import Confidence, Prediction
from tuning.memory.trace import Trace
from tuning.memory.tracing import eight_bit, onednn, recurrent, weightless, workspaces
from tuning.memory.tracing.lifetimes import Insides, Lifetimes

FAKE = FakeTensorMode(allow_non_fake_inputs=True)
"""A process has one: a workload may keep tensors of one step for the next."""

SIZES = {"cuda": (2, 3), "cpu": (16, 32)}
"""Micro-batches traced; all others follow. oneDNN's workspaces are of whole pages: for 2 and 3 samples no line."""


@dataclass(frozen=True)
class Job:
    """A configuration to trace, and whose kernels; `insides` adds what oneDNN hides from a virtual card."""

    workload: Workload
    config: Config
    capability: tuple[int, int] = (8, 6)
    insides: bool = False

    @property
    def on_card(self) -> bool:
        """Returns whether CUDA's kernels are traced."""
        return self.config.device == "cuda"


@dataclass
class Traced:
    """Traces of one configuration, and what was met on the way."""

    traces: list[Trace] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)
    operators: set[str] = field(default_factory=set)


def answer(request: Mapping[str, Any], *, fallback: bool) -> Prediction:
    """Returns the prediction that a request as in `__main__` asks for, with `fallback` of the CPU's kernels."""
    device = "cpu" if fallback else request["kernels"]
    knobs = {name: value for name, value in request["knobs"].items() if name != "micro_batch_size"}
    workload = _workload(request["workload"])
    config = Config(Knobs.of(knobs, table_of(workload)), dict(request["options"]), device=device)
    job = Job(workload, config, tuple(request["capability"]))
    gc.freeze()  # what is imported by now need not be looked at after each trace: 0.8 s
    return predict(job)


@functools.cache
def _workload(ref: str) -> Workload:
    """Returns the workload, with the data that it has read, once a process."""
    found = load(ref)
    if isinstance(found, OwnLoop):
        raise WorkloadError(f"{ref} has a loop of its own, whose memory is measured and not predicted")
    return found


_RESIDENTS: list[tuple[Workload, Resident]] = []


def _resident(workload: Workload) -> Resident:
    """Returns the workload with its data and its samples' lengths, which are measured once; the last four stay."""
    for known, resident in _RESIDENTS:
        if known is workload:
            return resident
    resident = Resident(cast(Workload, weightless.Weightless(workload, FAKE)))
    _RESIDENTS[:] = [*_RESIDENTS[-3:], (workload, resident)]
    return resident


def predict(job: Job, micro_batches: Sequence[int] = ()) -> Prediction:
    """Returns the prediction for a configuration; one of confidence "none" where its step cannot be traced.

    CUDA's kernels need a process that has loaded the shim before torch. Traced is at `micro_batches`, else at `SIZES`.
    """
    traced = Traced()
    try:
        _trace_all(traced, job, micro_batches or SIZES[job.config.device])
    except Exception as error:
        # Whatever a workload's code or torch's fake kernels raise: the trial itself will tell what is wrong with it.
        return Prediction("none", (*sorted(traced.notes), reason(error)), ())
    if job.config.knobs.compile != "off":
        traced.notes.add("knobs.compile: the step was traced uncompiled; compiled it may need less")
    confidence: Confidence = "traced"
    unseen = sorted(op for op in traced.operators if workspaces.UNSEEN in op)
    if job.on_card and unseen:
        confidence = "workspaces unseen"
        traced.notes.add(f"workspaces that cuDNN chooses as it runs are not known: {', '.join(unseen)}")
    elif job.on_card and any(workspaces.OF_MODEL in op for op in traced.operators):
        confidence = "workspaces modelled"
    return Prediction(confidence, tuple(sorted(traced.notes)), tuple(traced.traces))


def _trace_all(traced: Traced, job: Job, micro_batches: Sequence[int]) -> None:
    if job.config.knobs.as_dict().get("optimizer") == "adamw8bit":
        eight_bit.stand_in()
    with weightless.any_tokenizer(traced.notes):
        available = size_of(job.workload.dataset(job.config, "train"))
        sizes = sorted({min(m, available) for m in micro_batches})
        first, kept = _trace(traced, job, sizes[0], [])
        if kept:  # made in the first step, found there by all others: traced again, as one of the others
            first, _ = _trace(traced, job, sizes[0], kept)
        traced.traces += [first, *(_trace(traced, job, size, kept)[0] for size in sizes[1:])]


def _trace(traced: Traced, job: Job, micro_batch: int, kept: Sequence[int]) -> tuple[Trace, list[int]]:
    """Returns the trace of a step, and the bytes of each storage that the workload keeps when the step is gone.

    `kept` are those that steps before it have left.
    """
    insides: Insides = onednn.OneDnn(FAKE, transient=job.insides)
    if job.on_card:
        insides = workspaces.Cuda(job.capability, times_convolutions=job.config.knobs.cudnn_benchmark)
    lifetimes = Lifetimes(job.config.device, FAKE, insides)
    lifetimes.hold(kept)
    trace = _traced_step(traced, job, micro_batch, lifetimes)
    garbage.collect()
    return trace, lifetimes.survivors()


def _traced_step(traced: Traced, job: Job, micro_batch: int, lifetimes: Lifetimes) -> Trace:
    resident, config = _resident(job.workload), job.config.with_knobs(micro_batch_size=micro_batch)
    with patched(), recurrent.cudnn() as kinds:
        with lifetimes if job.on_card else nullcontext():  # a card also holds the first weights that a trial copies
            state = loop.prepare(resident, config, Plan(samples=1_000_000))
        lifetimes.adopt(state.model.parameters(), "parameter")
        lifetimes.adopt(state.model.buffers(), "buffer")
        lifetimes.adopt(state.average.means, "parameter")
        _name_as_it_goes(lifetimes, state)
        state.meter = cast(Any, lifetimes)
        lifetimes.phase = "forward"
        loop.rehearse(state, micro_batch, to_card if job.on_card else lambda batch: batch)
        lifetimes.name((p.grad for p in state.model.parameters() if p.grad is not None), "gradient")
    traced.notes |= lifetimes.notes
    traced.operators |= lifetimes.operators | {f"cudnn {kind}" for kind in kinds}
    trace = lifetimes.trace(micro_batch)
    del state  # what still holds the model has the process searched for it, 0.2 s
    resident.drop_model()
    return trace


def to_card(batch: Batch) -> Batch:
    """Returns a batch of the host as fake tensors on CUDA."""
    with FAKE:
        return to_device(batch, torch.device("cuda"))


def _name_as_it_goes(lifetimes: Lifetimes, state: loop.State) -> None:
    """Lets the optimiser's step tell the tracer where it begins and ends, and which storages are its state."""

    def begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        lifetimes.phase = "optimizer"

    def ends(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        states = (value for of_one in optimizer.state.values() for value in of_one.values())
        lifetimes.name((value for value in states if isinstance(value, Tensor)), "optimizer")
        lifetimes.phase = "forward"

    state.optimizer.register_step_pre_hook(begins)
    state.optimizer.register_step_post_hook(ends)


@contextmanager
def patched() -> Iterator[None]:
    """Inside the block torch takes fake tensors for tensors where it looks at their class.

    Modules can be moved, which torch refuses on fake parameters; and AdamW takes its foreach kernels, which it
    otherwise keeps for plain tensors: one by one, the temporary copies of a step would not show.
    """
    tables: list[Any] = [optimizers._foreach_supported_types, foreach._foreach_supported_types]
    module = cast(Any, nn.Module)
    own = module._apply

    def apply(self: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
        tensors = [*self.parameters(), *self.buffers()]
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return cast(nn.Module, own(self, change, recurse))
        return weightless.moved(self, change)

    for table in tables:
        table.append(FakeTensor)
    module._apply = apply
    try:
        yield
    finally:
        module._apply = own
        for table in tables:
            table.remove(FakeTensor)


def reason(error: BaseException) -> str:
    """Returns one sentence on why a step could not be traced; operators that have no fake kernel are named."""
    func = getattr(error, "func", None)
    if func is None and error.args and isinstance(error.args[0], torch._ops.OpOverload):
        func = error.args[0]
    if isinstance(error, DynamicOutputShapeException):
        return f"{func}: the shape of its result depends on numbers, which fake tensors do not hold"
    if isinstance(error, DataDependentOutputException):
        return f"{func}: its result depends on numbers, which fake tensors do not hold"
    if isinstance(error, UnsupportedOperatorException):
        return f"{func}: it has no fake kernel"
    if met := re.match(r"Could not run '(.*?)' with arguments from the 'CUDA'|Cannot get CUDA generator", str(error)):
        said = "it has no fake for a card; estimate --kernels cpu traces the CPU's"
        return f"{met[1] or 'torch.Generator'}{_place(error)}: {said}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _place(error: BaseException) -> str:
    """Returns " (mine.py:33)" of the innermost line that is neither torch's nor ours, "" where there is none."""
    ours = ("torch", "trainables", "tuning")
    lines = [
        f" ({Path(frame.f_code.co_filename).name}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).split(".")[0] not in ours
    ]
    return lines[-1] if lines else ""
