"""`run`, which a loop of one's own is given: the values of knobs, what counts, times and ends it, and what it reports.

    def train(run):
        loader = DataLoader(train_set, shuffle=True, **run.loader())
        model, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=run["learning_rate"]))
        for batch in run.batches(loader):
            with run.autocast():
                loss = loss_of(model, batch)
            run.backward(loss, optimizer)
            if run.evaluate_now:
                run.report(accuracy=evaluate(model))

What is asked of `run` is kept: a knob that is searched and never asked for would be a search of nothing.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainables import batches, optim, precision
from trainables.evaluation import Evaluation
from trainables.state import WARM_STEPS, Diverged, RunState, closed, watched
from trainables.stopwatch import Stopwatch, Window
from trainables.witness import Witness
from trainables.workload import OwnLoop, WorkloadError

READY = "ready"
Event = Window | Evaluation | str
NO_STEP_AFTER = 256
"""Micro-batches without an optimiser step after which a loop is told that it lacks one."""
_LOADER = ("micro_batch_size", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
_PREPARE = ("channels_last", "compile", "activation_checkpointing")
_BATCHES = ("non_blocking", "device_prefetch", "tf32", "cudnn_benchmark", "sdpa_backend", "empty_cache")
ASKED_BY: Mapping[str, tuple[str, ...]] = {
    "run.loader()": _LOADER,
    "run.prepare(model, optimizer)": _PREPARE,
    "run.batches(loader)": _BATCHES,
    "run.autocast()": ("amp_dtype",),
    "run.loader() and run.backward(loss, optimizer)": ("batch_size",),
    "run.backward(loss, optimizer)": ("set_to_none", "sync_every_step", "max_grad_norm"),
}
"""The knobs that a call of `run` asks for, by call; any other is asked for by its name, as in run["learning_rate"]."""


class Ended(BaseException):
    """Raised in `train(run)` where the run is over; what catches it ends nothing but itself."""


@dataclass(kw_only=True)
class OwnState(RunState):
    """How far a loop of one's own is, and what was seen of it."""

    workload: OwnLoop
    asked: set[str] = field(default_factory=set)
    """The knobs that were asked for so far, in this training or one before."""
    pass_samples: int = 0
    """Samples of one pass over the data; 0 until they are known."""
    dataset: Any = field(default=None, repr=False)
    """What their loader reads from, None where that is not known."""
    micro_steps: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=1 << 16), repr=False)
    """Of each micro-step its samples, and whether an optimiser step followed."""
    model: nn.Module | None = field(default=None, repr=False)
    optimizer: torch.optim.Optimizer | None = field(default=None, repr=False)


class Run:
    """One training as their loop sees it."""

    def __init__(self, state: OwnState, give: Callable[[Event], None]) -> None:
        self._state, self._give = state, give
        self._milestones = list(state.plan.milestones)
        self._watch = Stopwatch(state.device, each_step=state.plan.each_step)
        self._warm_at = state.steps + WARM_STEPS[state.config.knobs.compile]
        self._scaler = precision.grad_scaler(state.config.knobs, state.device)
        self._kept, self._watching = ExitStack(), ExitStack()
        self._loss_sum: Tensor | None = None
        self._since_step = 0
        self._is_forward_over = self._has_stepped = self._is_closed = False
        self._is_due = self._one_pass = False
        self._paused_at = time.perf_counter()

    # -- values --------------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a knob; raises WorkloadError for a name that is none."""
        values = self._state.config.knobs.as_dict()
        if name not in values:
            raise WorkloadError(f"run[{name!r}]: there is no such knob: give it a value or values in SPACE")
        self._state.asked.add(name)
        return values[name]

    @property
    def seed(self) -> int:
        """The seed of the training; torch, NumPy and random are seeded with it already."""
        return self._state.config.seed

    @property
    def device(self) -> torch.device:
        """Where it is to run."""
        return self._state.device

    @property
    def options(self) -> Mapping[str, Any]:
        """The file's OPTIONS, as workload.NAME=VALUE changes them."""
        return self._state.config.options

    @property
    def objectives(self) -> Mapping[str, str]:
        """The file's OBJECTIVES."""
        return self._state.workload.objectives

    @property
    def epoch(self) -> int:
        """The pass over the data at hand, from 0."""
        return self._state.epoch

    @property
    def samples(self) -> int:
        """The training samples of the whole run, at which it ends; those of a probe are without end."""
        return self._state.plan.samples

    @property
    def steps(self) -> int:
        """The optimiser steps of the whole run, for a schedule."""
        return math.ceil(self.samples / (self._accumulation * self._micro()))

    @property
    def progress(self) -> float:
        """The share of the run that is done, 0 to 1."""
        return min(1.0, self._state.samples / self.samples)

    @property
    def accumulation(self) -> int:
        """The micro-batches of one optimiser step: 1 where the loader's batches are not those of `loader()`."""
        if "micro_batch_size" in self._state.asked:
            self._ask("batch_size")
        return self._accumulation

    @property
    def ends_batch(self) -> bool:
        """Whether the micro-batch at hand is the last before an optimiser step."""
        return self._since_step >= self.accumulation or self.is_over

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """What scales the loss under fp16, and passes everything through otherwise."""
        return self._scaler

    # -- what their loop calls -----------------------------------------------------------------------------------------

    def loader(self) -> dict[str, Any]:
        """Returns the arguments of a DataLoader that knobs set; a batch is cut into equal micro-batches."""
        knobs = self._ask(*_LOADER)
        found: dict[str, Any] = {"batch_size": self._micro(), "num_workers": knobs.num_workers}
        found["pin_memory"] = knobs.pin_memory and self.device.type == "cuda"
        if knobs.num_workers:
            found |= {"prefetch_factor": knobs.prefetch_factor, "persistent_workers": knobs.persistent_workers}
        return found

    def prepare(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
        """Returns the model on the device as knobs say, and the optimisers; the model alone where it comes alone."""
        state, knobs = self._state, self._ask(*_PREPARE)
        model = model.to(self.device)
        precision.set_memory_format(model, knobs)
        blocks = [child for m in model.modules() if isinstance(m, nn.ModuleList) for child in m]
        self.keep(precision.checkpointed(blocks, knobs.activation_checkpointing))
        if knobs.compile != "off":
            torch.compiler.reset()  # the limit of recompilations is the process's
            cast(Any, model).compile(mode=knobs.compile)  # in place: their names of the model stay right
        if state.meter is not None:
            state.meter.adopt([*model.parameters(), *model.buffers()])
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self.before_step)
        if state.model is None:
            state.model, state.optimizer = model, next(iter(optimizers), None)
        return (model, *optimizers) if optimizers else model

    def epochs(self) -> Iterator[int]:
        """Yields the passes until the horizon is reached; `batches` then makes one pass at a time."""
        self._one_pass = True
        while not self.is_over:
            before = self._state.samples
            yield self._state.epoch
            if self._state.samples == before:
                raise WorkloadError("a pass over run.epochs() took no batch of run.batches(loader)")

    def batches(self, loader: Iterable[Any], samples: int | None = None) -> Iterator[Any]:
        """Yields the loader's batches on the device, pass after pass, until the horizon is reached.

        `samples` are those of one pass, for a loader that does not know them. Counts and times what happens until the
        next batch is asked for.
        """
        state, transfer = self._state, batches.Transfer(self._ask(*_BATCHES), self.device)
        self.begin(loader, samples)
        while not self.is_over:
            before = state.samples
            own = iter(loader)
            for host in own:
                self._watch.lap("data_wait")
                batch = _moved(host, transfer)
                self._watch.lap("transfer")
                if state.steps == 0:
                    state.active |= batches.workers_seen(own, loader)
                self._count(host, batch, batches.size_of_batch(host, getattr(loader, "batch_size", None)))
                del host
                yield batch
                self.passed()
                if self.is_over:
                    break
            del own  # its workers end before what follows the pass
            if state.samples == before:
                raise WorkloadError("the loader of run.batches(loader) gave no batch in a whole pass")
            if not self.is_over:
                state.epoch += 1
                state.micro_batches_done = 0
            if self._one_pass:  # what follows is theirs, and in no window
                if self._has_stepped and not self._is_closed and state.steps > self._warm_at:
                    self._close()
                break
        self._paused_at = time.perf_counter()

    def autocast(self) -> AbstractContextManager[object]:
        """Returns the context of a forward pass, in the type of numbers that the knob amp_dtype says."""
        return precision.autocast(self._ask("amp_dtype"), self.device)

    def backward(
        self, loss: Tensor, optimizer: torch.optim.Optimizer | None = None, *, max_norm: float | None = None
    ) -> bool:
        """Adds the gradients of a mean loss, and after a whole batch steps, and drops the gradients; returns whether.

        The batches of a loader that `loader()` made are micro-batches; any other loader's are whole batches. `max_norm`
        is what the norm of all gradients of the optimiser is clipped to before it steps, by default the knob's.
        """
        knobs, own = self._ask("set_to_none", "sync_every_step"), optimizer or self._state.optimizer
        if own is None:
            raise WorkloadError("run.backward(loss) needs an optimiser: run.backward(loss, optimizer), or run.prepare")
        limit = float(self._ask("max_grad_norm").max_grad_norm if max_norm is None else max_norm)
        self._scaler.scale(loss / self.accumulation).backward()
        seen = loss.detach() * (self._state.micro_steps[-1][0] if self._state.micro_steps else 1)
        self._loss_sum = seen if self._loss_sum is None else self._loss_sum + seen
        if knobs.sync_every_step:
            seen.item()
        if not self.ends_batch:
            return False
        if limit > 0:
            optim.hold_gradients(own, self._scaler, limit)
        self.before_step()
        self._scaler.step(own)
        self._scaler.update()
        own.zero_grad(set_to_none=knobs.set_to_none and not precision.keeps_gradients(knobs))
        self.step()
        return True

    def step(self) -> None:
        """Says that an optimiser step was taken, by their own lines."""
        state = self._state
        if self._has_stepped or not state.micro_steps:
            return  # one of several optimisers
        self.before_step()
        self._watching.close()
        state.steps += 1
        self._watch.steps += 1
        self._has_stepped, self._since_step = True, 0
        state.micro_steps[-1] = (state.micro_steps[-1][0], True)
        self._see()
        if state.meter is not None:
            state.sparse.stepped()
        if self.is_over or (self._milestones and state.samples >= self._milestones[0]):
            self._watch.lap("optimizer")
            self._close()

    @property
    def evaluate_now(self) -> bool:
        """Whether a report is due: at rungs and at the end, never in a probe."""
        return self._is_due

    def report(self, **values: float) -> None:
        """Takes the objectives on validation data; what is not due is left alone. May end the run here."""
        found = {name: float(value) for name, value in values.items()}
        missing = [name for name in self._state.workload.objectives if name not in found]
        if missing:
            raise WorkloadError(f"run.report has {sorted(found)}, without {', '.join(missing)} of OBJECTIVES")
        for name, value in found.items():
            if not math.isfinite(value):
                raise Diverged(f"{name} is {value} after {self._state.samples} samples")
        if self._is_due:
            self._is_due = False
            self._watching.close()
            self._give(Evaluation(self._state.samples, found, time.perf_counter() - self._paused_at))
            self._watch.restart()

    # -- for a framework's loop, in the place of `batches` -------------------------------------------------------------

    def begin(self, loader: Any, samples: int | None = None) -> None:
        """The first batch is asked for: what came before is set-up; `samples` are those of a pass over the loader."""
        state = self._state
        if not state.pass_samples:
            state.pass_samples, state.dataset = samples or _pass_samples(loader), getattr(loader, "dataset", None)
        if not state.first_step_at:
            self._give(READY)
            if state.epoch:  # a window that is to have other batches
                torch.manual_seed(self.seed + 1_000_003 * state.epoch)
            state.first_step_at = time.time()
        self._watch.restart()

    def took(self, samples: int) -> None:
        """A micro-batch is there, and is computed on from here."""
        self._watch.lap("data_wait")
        self._count(None, None, samples)

    def before_step(self, *_: Any) -> None:
        """The passes of a batch are over, and the optimiser's step begins."""
        if not self._is_forward_over:
            self._is_forward_over = True
            self._watch.lap("forward_backward")
            if self._state.witness is not None:
                self._state.witness.goes_on("optimizer")

    def passed(self) -> None:
        """The micro-batch is over; a window closes behind a whole batch."""
        state = self._state
        self._watching.close()
        self.before_step()
        if self._is_closed:
            self._watch.restart()
        elif self._has_stepped:
            self._watch.lap("optimizer")
            full = state.steps > self._warm_at and self._watch.elapsed_s() >= state.plan.window_s
            if state.steps == self._warm_at or full:
                self._close()
                self._watch.restart()
        elif self._since_step >= NO_STEP_AFTER * self._accumulation or (self.is_over and not state.steps):
            raise WorkloadError(
                f"{self._since_step} micro-batches passed without an optimiser step: run.backward(loss, optimizer) "
                "steps by itself, and after an optimizer.step() of your own comes run.step()"
            )
        elif self.is_over:  # in the middle of a batch of theirs
            self._close()

    @property
    def is_over(self) -> bool:
        """Whether the horizon is reached."""
        return self._state.samples >= self._state.plan.samples

    def shows(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Takes the model and the optimiser of the run, to tell what the first step ran."""
        self._state.model, self._state.optimizer = model, optimizer
        if self._state.meter is not None:
            self._state.meter.adopt([*model.parameters(), *model.buffers()])

    # -- for whoever runs it -------------------------------------------------------------------------------------------

    def kernels(self) -> AbstractContextManager[object]:
        """Returns the context in which their function is to run: the kernels that knobs choose."""
        return precision.kernels(self._state.config.knobs, self.device)

    def keep(self, context: AbstractContextManager[object]) -> None:
        """Enters a context that is left when the run is let go."""
        self._kept.enter_context(context)

    def finished(self) -> None:
        """Takes that their function has returned; raises WorkloadError where it has trained or reported too little."""
        state = self._state
        if not state.first_step_at:
            raise WorkloadError("train(run) returned without asking for run.batches(loader)")
        if not self.is_over:
            said = f"train(run) returned after {state.samples} of {self.samples} samples"
            raise WorkloadError(f"{said}: run.batches(loader) ends the loop by itself")
        if self._is_due:
            names = ", ".join(f"{name}=..." for name in state.workload.objectives)
            said = "train(run) returned without a report at its end"
            raise WorkloadError(f"{said}: if run.evaluate_now: run.report({names})")

    def let_go(self) -> None:
        """Takes back what it did to their model, in the thread that did it."""
        self._watching.close()
        self._kept.close()
        self._loss_sum = None

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    def _accumulation(self) -> int:
        if "micro_batch_size" not in self._state.asked:
            return 1
        return math.ceil(self._state.config.knobs.batch_size / self._micro())

    def _ask(self, *names: str) -> Any:
        self._state.asked.update(names)
        return self._state.config.knobs

    def _micro(self) -> int:
        """Returns the samples of a micro-batch where a batch is cut evenly."""
        knobs = self._state.config.knobs
        return math.ceil(knobs.batch_size / math.ceil(knobs.batch_size / knobs.micro_batch_size))

    def _count(self, host: Any, batch: Any, count: int) -> None:
        """A micro-batch begins; in a first step, and under a cap, torch's operators are watched until it is over."""
        state = self._state
        self._is_forward_over = self._has_stepped = self._is_closed = False
        state.samples += count
        state.micro_batches_done += 1
        self._since_step += 1
        state.micro_steps.append((count, False))
        self._watch.samples += count
        self._watch.micro_steps += 1
        if state.steps == 0:
            if state.witness is None and state.model is not None and state.optimizer is not None:
                state.witness = Witness(state.model, state.optimizer, self.device)
            if state.witness is not None:
                state.witness.micro_batch(count, batches.tensors_of(host))
        if state.meter is not None:
            state.counts = state.capped and state.sparse.part(state.steps, "", batches.tensors_of(batch))
        if state.witness is not None or state.counting:
            self._observe(batch)

    def _observe(self, batch: Any) -> None:
        state = self._state
        if state.meter is not None and state.counting:
            parameters = state.model.parameters() if state.model is not None else ()
            gradients = [p.grad for p in parameters if p.grad is not None]  # born in parts that were not counted
            state.meter.adopt([*batches.tensors_of(batch), *gradients])
        if state.model is not None:  # compiled under a counter of operators it would stay uncompiled for good
            self._watching.enter_context(precision.uncompiled(state.model))
        self._watching.enter_context(watched(state, "forward_backward"))

    def _close(self) -> None:
        """Closes the window, and says that a report is due where a milestone is reached."""
        state = self._state
        state.last_step_at = time.time()
        window = closed(self._watch, self._loss_sum, state.samples)
        self._loss_sum, self._is_closed = None, True
        self._give(window)
        self._paused_at = time.perf_counter()
        reached = [m for m in self._milestones if m <= state.samples]
        if reached:
            del self._milestones[: len(reached)]
            self._is_due = True
            state.counts = state.capped and state.sparse.evaluation()
            if state.counts:
                self._watching.enter_context(watched(state))

    def _see(self) -> None:
        """Keeps what the first step was seen to run."""
        state = self._state
        if state.steps != 1:
            return
        sizes = [count for count, _ in state.micro_steps]
        found = {"device": self.device.type, "batch_size": sum(sizes), "micro_batch_size": max(sizes)}
        found |= state.witness.facts() if state.witness is not None else {}
        state.active = {**state.active, **found}
        state.witness = None


def _moved(host: Any, transfer: batches.Transfer) -> Any:
    """Returns the batch on the device; one that is no tensor, tuple, list or dict by its own `to`."""
    if not isinstance(host, Tensor | tuple | list | dict) and hasattr(host, "to"):
        return host.to(transfer.device)
    return transfer(host)


def _pass_samples(loader: Any) -> int:
    """Returns the samples of a pass over a loader; raises WorkloadError where it does not know them."""
    for source in (getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        try:
            return len(source)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            continue
    try:
        return len(loader) * int(getattr(loader, "batch_size", None) or 1)
    except (TypeError, NotImplementedError):
        raise WorkloadError(
            f"a {type(loader).__name__} over data without a length: run.batches(loader, samples=N) says how many "
            "samples one pass has"
        ) from None
