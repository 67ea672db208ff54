"""Counts, times and ends a custom loop, from what the loop reports: micro-batches, optimiser steps and objectives."""

from __future__ import annotations

import functools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from trainables import batches, precision
from trainables.evaluation import Evaluation
from trainables.knobs import Scalar
from trainables.live_bytes import LiveBytes
from trainables.loader_check import Moving
from trainables.own_checks import TWO_LOOPS, EarlierModels, FirstSamples, FirstValues, FirstWeights
from trainables.plan import evenly, steps_to
from trainables.ranks import ALONE, Ranks
from trainables.reports import READY, Ended, Event
from trainables.resident import marks
from trainables.state import RunState, WarmUp, check_objectives, closed, watched
from trainables.stopwatch import Stopwatch
from trainables.witness import Witness
from trainables.workload import LoopError, OwnLoop

ONLY_BACKWARD = "gradients are averaged by run.backward(loss, optimizer), and this loop steps its optimiser itself"
NO_STEP_AFTER = 256
"""Micro-batches without an optimiser step after which LoopError is raised."""
UNREPORTED_STEPS = 8
"""Steps by the user's own code after which a missing `run.step()` is an error: some loops call it once for several."""
NO_END_AFTER = 100_000
NO_END_AFTER_S = 60.0
"""Limits for a loop that asks for batches after the end of its run and may never stop: calls and seconds."""


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy and torch; loaders and their workers draw their seeds from these."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@dataclass(frozen=True)
class FirstReport:
    """The report of a training of these knobs that learned nothing, and the seconds that it took."""

    knobs: Mapping[str, Scalar]
    values: Mapping[str, float]
    seconds: float


class OwnResident:
    """An imported file with a custom loop; only its module stays loaded between trainings."""

    def __init__(self, workload: OwnLoop) -> None:
        self.workload = workload
        self.meter = LiveBytes()
        self.first_weights = FirstWeights()
        self.first_samples = FirstSamples()
        self.first_values = FirstValues(workload.train)
        self.earlier_models = EarlierModels()
        self.kept_bytes: int | None = None
        """Bytes that the module itself holds on the device: those left after its first training."""
        self.asked: set[str] = set()
        """The knobs that the function has read in any training so far."""
        self.first_report: FirstReport | None = None
        """What a training reports that learns nothing; None once it has been compared, or if it is not known."""
        self.moves = ""
        """Why samples change as the loop trains, which loader processes do not see; "" if they do not."""
        self.pass_samples, self.drops_last, self.own_size, self.pass_batches, self.ends_passes = 0, False, 0, 0, True
        """The data of the last training, as in `OwnState`."""
        self.rates: dict[tuple[Any, ...], float] | None = {}
        """For each batch size and rates of the optimisers: learning_rate of a complete training. None once equal rates
        came with two values of learning_rate; this is remarked once."""

    def held_bytes(self) -> int:
        """Returns the bytes that belong to the process and not to a training."""
        return self.kept_bytes or 0


@dataclass(kw_only=True)
class OwnState(RunState):
    """The progress of a custom loop, and what was observed of it."""

    resident: OwnResident = field(repr=False)
    asked_here: set[str] = field(default_factory=set)
    """The knobs that the loop has read in this training."""
    pass_samples: int = 0
    """Samples of one epoch; 0 until this training or an earlier one has shown them."""
    drops_last: bool = False
    """Whether an epoch leaves out its last, smaller batch."""
    own_size: int = 0
    """The batch size of the user's loader if the loop never asked for that of a knob; 0 otherwise."""
    pass_batches: int = 0
    """The batches of one epoch, if a batch sampler of the user's gives them various sizes, -1 if it has no length;
    otherwise 0."""
    ends_passes: bool = True
    """Whether a batch ends with its epoch; not if it is not known where that is."""
    steps_told: int = 0
    """The steps of the whole run as `run.steps` returned them last; 0 if it was never read."""
    is_misled: bool = False
    """Whether `run.steps` was read before the data were known, and returned a wrong number."""
    remark: str = ""
    """A likely mistake in the loop, in words, set once the run has ended; "" for none."""
    noise_seed: int | None = None
    """A second seed, set after the first micro-batch: the order of the samples has been drawn by then."""
    rested_s: float = 0.0
    """Seconds between epochs that are in no window: evaluations that were not due. Due reports are not included."""
    dataset: Any = field(default=None, repr=False)
    """The data set of the user's loader; None if it is not known."""
    worker_init: Callable[[int], None] | None = field(default=None, repr=False)
    """The worker_init_fn of that loader."""
    collate: Callable[[list[Any]], Any] | None = field(default=None, repr=False)
    """The collate_fn of that loader."""
    hand: Callable[[Any, int, int], Any] | None = field(default=None, repr=False)
    """Gets each micro-batch that run.batches has loaded, its sample dimension and size; returns what to train on."""
    micro_steps: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=1 << 16), repr=False)
    """For each micro-step: its samples, and whether an optimiser step followed."""
    prepared: list[nn.Module] = field(default_factory=list, repr=False)
    """The models that were given to `run.prepare`."""
    averages: bool = False
    """Whether `run.backward` takes the steps; it averages gradients over several processes."""
    last_report: Mapping[str, float] = field(default_factory=dict, repr=False)
    """The objectives of the last report, due or not; empty before the first."""
    ranks: Ranks = field(default=ALONE, repr=False)
    """The processes that train together; this process is one of them."""
    model: nn.Module | None = field(default=None, repr=False)
    optimizer: torch.optim.Optimizer | None = field(default=None, repr=False)
    levels: list[tuple[int, int]] = field(default_factory=list, repr=False)
    """For each window that closed: the samples so far, and the bytes of live tensors."""
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list, repr=False)
    """All known optimisers; `optimizer` is the first of them."""
    outside_bytes: int = 0
    """The most bytes that a program has held which trains in a process of its own; 0 if this process trains."""

    @property
    def peak_allocated_bytes(self) -> int:
        """Returns the most bytes of live tensors so far, or the most that a program has held."""
        return self.outside_bytes if self.workload.is_outside else super().peak_allocated_bytes

    def forget(self) -> None:
        """Forgets what the user's function has made and read, so that it can be started again; the data are known."""
        self.asked_here, self.steps_told, self.is_misled = set(), 0, False
        self.active, self.marks, self.dataset = {}, {}, None
        self.prepared, self.model, self.optimizer, self.optimizers = [], None, None, []

    @property
    def workload(self) -> OwnLoop:
        """Returns the file's function and what it declares."""
        return self.resident.workload

    @property
    def asked(self) -> set[str]:
        """Returns the knobs that the loop has read so far, in this training or an earlier one."""
        return self.resident.asked


class Counted:
    """Counts, times and ends one training of a custom loop; the integrations call its methods directly."""

    def __init__(self, state: OwnState, give: Callable[[Event], None]) -> None:
        self._state, self._give = state, give
        self._milestones = list(state.plan.milestones)
        each_step = state.plan.each_step
        self.outside_at = time.perf_counter()
        """When that happened which another process tells of, by its clock; no time passes in between."""
        if state.workload.is_outside:  # timed on its host, wherever it computes
            self._watch = Stopwatch(torch.device("cpu"), each_step=each_step, clock=lambda: self.outside_at)
        else:
            self._watch = Stopwatch(state.device, each_step=each_step)
        self._scaler = precision.grad_scaler(state.config.knobs, state.device)
        self._is_scaled = self._scaler.is_enabled()
        self._warm_up = WarmUp(state.steps, state.config.knobs, self._scaler)
        self._kept, self._watching = ExitStack(), ExitStack()
        self._is_watched = self._knows_data = False
        # These are read in every step. Function calls are slow there, about 2 us: the step's data fill the CPU caches.
        self._is_on_host, self._horizon = state.device.type == "cpu", state.plan.samples
        self._is_capped, self._window_s = state.capped, state.plan.window_s
        self._is_warm = False
        """Whether the warm-up had ended before the last step."""
        self._parts = 0
        """`accumulation` as it was returned last; 0 if it has to be computed again."""
        self._has_cut = self._is_whole = self._cuts_by_name = False
        """In turn: `loader` was called; the current loader is another one, with whole batches; micro_batch_size was
        also read by its name."""
        self._is_alone = True
        """Whether one process trains; known once the first batch is asked for."""
        self._loss_sum: Tensor | float | None = None
        self._since_step = self._unreported = 0
        """Micro-batches, and optimiser steps by the user's own lines, since the last call of `step`."""
        self._told_samples: int | None = None
        self._skipped = 0
        """Whole batches after which no optimiser stepped, before the last step."""
        self._is_forward_over = self._has_stepped = self._is_closed = False
        self._is_due = self._one_pass = self._has_left = False
        self._asked_after_end = 0
        self.ends_with_pass = False
        """Whether the end of an epoch also ends a batch."""
        self._shown: list[torch.optim.Optimizer] = []
        """The optimisers that were given to `prepare`."""
        self._optimizers: dict[torch.optim.Optimizer, bool] = {}
        """The optimisers given to `backward`, and whether each has stepped since the scale of the loss changed."""
        self._is_ours = False
        """Whether `backward` is taking the current optimiser step."""
        self._share = self._weight = 1.0
        """The weight of the mean loss of this process's part of a micro-batch, 1 if there is one process; and of a
        micro-batch in its batch, 1 if all are of one size."""
        self._rest = 0
        """The samples of an epoch's last batch."""
        self._called_at: dict[torch.optim.Optimizer, int] = {}
        """The samples that had been taken when `backward` added gradients last, for each optimiser."""
        self._pending: set[torch.optim.Optimizer] = set()
        """The optimisers that have gradients of a part of a batch."""
        self._turn: object = None
        """Marks the call of `batches` that was the last to begin."""
        self._open = 0
        """The calls of `batches` that have begun and were not left."""
        self._data: Mapping[str, object] | None = None
        """The attributes of the data set as loader processes were given it last; None if there are none."""
        self._moving: Moving | None = None
        """The numbers that samples depend on, as processes that stay were given them."""
        self._samples: list[bytes] | None = None
        """Digests of a few samples of it, as processes that stay were given it."""
        self._schedules: list[LRScheduler] = []
        """The schedulers that `backward` steps, each after its optimiser."""
        self._schedules_at: dict[int, int | None] = {}
        """`last_epoch` of each scheduler after the last step by `backward`, by its id."""
        self._rates: list[float] | None = None
        """The learning rates after the first step of optimisers given to `prepare`; empty once one has changed."""
        self._paused_at = self._closed_at = time.perf_counter()
        self._rests_since = 0.0
        """When the last epoch ended, if another follows; 0 within an epoch."""

    @property
    def seed(self) -> int:
        """The seed of the training; torch, NumPy and random are seeded with it already."""
        return self._state.config.seed

    @property
    def device(self) -> torch.device:
        """The device to train on."""
        return self._state.device

    @property
    def samples(self) -> int:
        """The training samples after which the run ends; a probe has no end."""
        return self._state.plan.samples

    @property
    def steps(self) -> int:
        """The optimiser steps of the whole run, for a schedule."""
        if self._state.pass_batches < 0:
            raise LoopError("run.steps is not known, as the batch sampler has no length: schedule by run.progress")
        self._state.steps_told = self._steps()
        return self._state.steps_told

    @property
    def objectives(self) -> Mapping[str, str]:
        """The file's OBJECTIVES."""
        return self._state.workload.objectives

    @property
    def searched(self) -> Mapping[str, Any]:
        """The file's SPACE."""
        return self._state.workload.default_space

    @property
    def pass_samples(self) -> int:
        """The samples of an epoch; 0 while that is not known."""
        return self._state.pass_samples

    @property
    def cap_bytes(self) -> int | None:
        """The most bytes that a training may hold on its device; None for no limit."""
        return self._state.plan.cap_bytes

    @property
    def is_over(self) -> bool:
        """Whether the horizon is reached."""
        return self._state.samples >= self._horizon

    @property
    def is_done(self) -> bool:
        """Whether training is complete: the horizon is reached, and the last batch has had its optimiser step."""
        return self.is_over and self._has_stepped

    @property
    def evaluates(self) -> bool:
        """Whether a report is due and no other batch has come: what runs now is an evaluation."""
        return self._is_due and self._has_stepped

    # -- what a loop reports -------------------------------------------------------------------------------------------

    def says_epoch(self, samples: int | None) -> None:
        """Takes the size of an epoch, for a framework whose loader does not know it; None if the loader does."""
        self._told_samples = samples

    def begin(self, loader: Any, samples: int | None = None) -> None:
        """Starts the clock: the first batch is asked for. `samples` is the size of an epoch, if the loader lacks it."""
        state = self._state
        self._unwatch()  # it is still on if a report was due and did not come
        self._parts, size = 0, getattr(loader, "batch_size", None)
        self._is_whole = self._has_cut and size == state.config.knobs.batch_size != self._micro()
        if not state.first_step_at:
            state.pass_samples = samples or self._told_samples or _pass_samples(loader)
            state.dataset = getattr(loader, "dataset", None)
            state.worker_init = getattr(loader, "worker_init_fn", None)
            state.collate = getattr(loader, "collate_fn", None)
            state.drops_last = bool(getattr(getattr(loader, "batch_sampler", None), "drop_last", False))
            if size == self._micro():  # or an earlier training made the loader
                state.asked_here |= state.asked & {"micro_batch_size"}
            state.own_size = 0 if state.asked_here & {"batch_size", "micro_batch_size"} else int(size or 0)
            sampler = batches.sampler_of(loader)
            state.pass_batches = 0 if sampler is None else batches.length_of(sampler) or -1
            state.ends_passes = sampler is None and batches.knows_its_length(loader)
            self._knows_data = True
            state.is_misled = state.steps_told not in (0, self._steps())
            state.active["seed"] = torch.initial_seed()  # the user's function may have set another seed than the run's
            state.marks = {} if state.model is None else marks(state.model)
            knobs = state.config.knobs
            own = tuple((name, knobs.as_dict()[name]) for name in sorted(knobs.table.own))
            state.resident.first_samples.require_equal(state.dataset, self.seed, own)
            if state.model is not None:
                sizes = knobs.batch_size, knobs.micro_batch_size
                state.resident.first_weights.require_equal(state.model, self.seed, own, state.optimizers, sizes)
            self._give(READY)
            if state.epoch:  # this window is to train on other batches
                torch.manual_seed(self.seed + 1_000_003 * state.epoch)
            state.first_step_at = time.time()
            self._is_alone = state.ranks is ALONE
            if batches.starts_anew(loader):  # otherwise only the first epoch of a training starts workers
                self.next_pass()
        if not self._watch.is_paused:
            self._loss_sum = None
        if self._rests_since:
            state.rested_s += time.perf_counter() - self._rests_since
            self._rests_since = 0.0
        self._watch.go_on()
        if self._has_left:
            self._has_left = False
            self._close_if_full()

    def next_pass(self) -> None:
        """Marks the start of an epoch: time until its first batch belongs to no step."""
        self._watch.next_pass()

    def took(self, samples: int) -> None:
        """Marks the arrival of a micro-batch of so many samples: computing starts here."""
        if self._watch.is_paused:
            self._watch.go_on()
        self._watch.lap("data_wait")
        self._count(None, None, samples)

    def stepped_outside(self, samples: int, waited_s: float, optimizer_s: float) -> None:
        """Marks that another process has trained a batch by now: it waited so long for its data, and then computed."""
        watch, now = self._watch, self.outside_at
        if watch.is_paused:
            watch.go_on()
        watch.lap("data_wait", min(now, watch.lapped_at + waited_s))
        self._count(None, None, samples)
        self._is_forward_over = True
        watch.lap("forward_backward", now - optimizer_s)
        self.step()
        self.passed()

    def goes_on(self) -> None:
        """Starts the clock again after `rests`."""
        if self._watch.is_paused:
            self._watch.go_on()

    def saw_outside(self, facts: Mapping[str, Any], peak_bytes: int, remark: str = "") -> None:
        """Takes facts of another process's first step, the most bytes that it has held, and a likely mistake."""
        self._state.active |= facts
        self._state.outside_bytes = peak_bytes
        self._state.remark = remark or self._state.remark

    def rests(self) -> None:
        """Pauses the clock for work of the framework, such as an evaluation that is not due."""
        if not self._watch.is_paused:
            self._watch.pause()

    def saw_loss(self, loss: Tensor) -> None:
        """Adds the mean loss of the current micro-batch to its window; a loss that is not finite ends the run."""
        if not self._state.micro_steps:
            raise LoopError("a loss came before a batch: the loop goes over run.batches(loader)")
        count = self._state.micro_steps[-1][0]
        # A number on the CPU: kept loss tensors would lie between the large tensors of each step and fragment the heap.
        part = loss.item() * count if self._is_on_host else loss.detach().float() * count
        self._loss_sum = part if self._loss_sum is None else self._loss_sum + part

    def before_step(self, *_: Any) -> None:
        """Marks the start of the optimiser's step: forward and backward passes of the batch are over."""
        if not self._is_forward_over:
            self._is_forward_over = True
            self._watch.lap("forward_backward")
            if self._state.witness is not None:
                self._state.witness.goes_on("optimizer")

    def step(self, *_: Any) -> None:
        """Reports an optimiser step that the user's own code has taken."""
        state, are_several = self._state, len(self._shown) > 1
        if self._has_stepped or not state.micro_steps:
            if self._has_stepped and are_several and not self._is_closed:
                self._next_passes()
            return
        if not self._is_forward_over:
            self.before_step()
        if self._is_watched and not are_several:
            self._unwatch()
        state.steps += 1
        self._watch.steps += 1
        if not self._is_alone:
            if state.ranks.count > 1 and not state.averages:
                raise LoopError(f"devices_per_trial={state.ranks.count}: {ONLY_BACKWARD}")
            if len(self._optimizers) <= 1:
                state.ranks.stepped()
        self._skipped += (self._since_step - 1) // (self._parts or 1)
        self._has_stepped, self._since_step, self._unreported = True, 0, 0
        state.micro_steps[-1] = (state.micro_steps[-1][0], True)
        if state.steps == 1:
            self._keep_facts()
        if self._is_capped and state.meter is not None:
            state.sparse.stepped(state.steps, state.meter.live_bytes)
        samples = state.samples
        if samples >= self._horizon or (self._milestones and samples >= self._milestones[0]):
            self._watch.lap("optimizer")
            self._close()
        elif are_several:
            self._next_passes()

    def _next_passes(self) -> None:
        """Marks the step of one of several optimisers: the passes for the next one follow, with its own loss."""
        self._watch.lap("optimizer")
        self._is_forward_over = False

    def passed(self) -> None:
        """Marks the end of a micro-batch; after a whole batch the window may close."""
        state = self._state
        if self._is_watched:
            self._unwatch()
        if not self._is_forward_over:
            self.before_step()
        if (self._called_at or self._is_on_host) and state.samples not in self._called_at.values() and state.lacked:
            raise torch.OutOfMemoryError("train(run) caught the error of a lack of memory, and left the batch out")
        if self._is_closed:
            state.ranks.stepped()
            self._warm_up.ends(state.steps)  # a skipped step prolongs the warm-up here, too
            self._watch.restart()
        elif self._has_stepped:
            seconds = self._watch.lap("optimizer")
            if not self._is_alone:
                state.ranks.stepped()
            if seconds >= self._window_s or not self._is_warm:
                self._close_if_full()
        elif self._unreported >= UNREPORTED_STEPS and not self._optimizers:  # with `backward`, its own steps count
            raise LoopError(
                f"your own code stepped the optimiser {self._unreported} times, and run.step() was not called: call it "
                "after each, or replace loss.backward(), step() and zero_grad() by run.backward(loss, optimizer)"
            )
        elif self._since_step >= NO_STEP_AFTER * self._accumulation or (self.is_over and not state.steps):
            raise LoopError(
                TWO_LOOPS
                if self._open > 1
                else f"{self._since_step} micro-batches passed without an optimiser step: run.backward(loss, "
                "optimizer) steps by itself, and after an optimizer.step() of your own comes run.step()"
            )

    @property
    def evaluate_now(self) -> bool:
        """Whether a report is due: at rungs and at the end, never in a probe."""
        return self._is_due

    def report(self, **values: float) -> None:
        """Reports the objectives on validation data. A report that is not due counts if the loop ends after it.

        The run may end here.
        """
        objectives = {name: float(value) for name, value in values.items()}
        missing = [name for name in self.objectives if name not in objectives]
        if missing:
            raise LoopError(f"run.report has {sorted(objectives)}, without {', '.join(missing)} of OBJECTIVES")
        check_objectives(self.objectives, objectives, self._state.samples)
        self._state.last_report = objectives
        if self._is_due:
            self._is_due = False
            self._unwatch()
            self._give(Evaluation(self._state.samples, objectives, time.perf_counter() - self._paused_at))
            if not self._watch.is_paused:  # a paused window continues: it holds what was trained since the milestone
                self._watch.restart()
                self._loss_sum = None

    # -- for the integrations and the driver of the run ----------------------------------------------------------------

    def shows(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Registers the model and its optimisers; the witness observes the first optimiser in the first step."""
        self._state.model, self._state.optimizer, self._state.optimizers = model, optimizers[0], list(optimizers)
        if self._state.meter is not None:
            self._state.meter.adopt([*model.parameters(), *model.buffers()])

    def kernels(self) -> AbstractContextManager[object]:
        """Returns the context for the user's function: it sets the kernels that knobs choose."""
        return precision.kernels(self._state.config.knobs, self.device)

    def keep(self, context: AbstractContextManager[object]) -> None:
        """Enters a context that `let_go` exits."""
        self._kept.enter_context(context)

    def finished(self) -> None:
        """Is called when the user's function has returned; raises WorkloadError if it trained or reported too little.

        If training ended before its horizon, the last report is its result.
        """
        state = self._state
        names = ", ".join(f"{name}=..." for name in state.workload.objectives)
        if not state.first_step_at:
            raise LoopError(
                "train(run) returned without asking for run.batches(loader); with transformers' Trainer, without "
                "callbacks=[StudyCallback(run)], with Lightning's, without Trainer(**trainer_kwargs(run))"
            )
        if self._is_due and (self.is_over or not state.last_report):
            what = "train(run) returned without a report at its end"
            raise LoopError(f"{what}: if run.evaluate_now: run.report({names})")
        state.has_ended = not self.is_over
        if self.is_over or state.ranks.rank:  # only rank 0 reports
            return
        if not state.last_report or not state.steps:
            what = f"train(run) returned after {state.samples} of {self.samples} samples, without a report"
            raise LoopError(f"{what}: run.batches(loader) ends the loop; what stops early calls run.report({names})")
        if self._watch.steps and not self._is_closed:
            self._close()
        self._give(Evaluation(state.samples, dict(state.last_report), 0.0))

    def let_go(self) -> None:
        """Undoes all changes to the user's model; to be called in the thread that made them."""
        self._unwatch()
        self._kept.close()
        self._loss_sum = None

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    def _asked(self) -> set[str]:
        """The knobs that this training has read; until its data are known, also those of earlier trainings."""
        return self._state.asked_here if self._knows_data else self._state.asked

    @property
    def _accumulation(self) -> int:
        return self._cut[0] if "micro_batch_size" in self._asked else 1

    def _steps(self) -> int:
        state, accumulation = self._state, self._accumulation
        if state.pass_batches > 0:
            return math.ceil(self.samples / state.pass_samples * state.pass_batches / accumulation)
        micro = state.own_size or self._micro()
        whole = state.pass_samples // micro * micro if state.drops_last else state.pass_samples
        whole = whole or self.samples  # one epoch, if its size is not known
        if self.ends_with_pass or state.ends_passes:
            return steps_to(self.samples, whole, micro, accumulation)
        return math.ceil(steps_to(self.samples, whole, micro, 1) / accumulation)

    def _micro(self) -> int:
        return self._cut[1]

    @functools.cached_property
    def _cut(self) -> tuple[int, int]:
        knobs = self._state.config.knobs
        return evenly(knobs.batch_size, knobs.micro_batch_size)

    def _ask(self, *names: str) -> Any:
        if "micro_batch_size" in names:
            self._parts = 0
        self._state.asked.update(names)
        self._state.asked_here.update(names)
        return self._state.config.knobs

    def _asks_after_end(self) -> None:
        """Ends a loop that keeps asking for batches after the end of the run, as a loop with its own step count may."""
        self._asked_after_end += 1
        if self._asked_after_end < NO_END_AFTER and time.perf_counter() - self._paused_at < NO_END_AFTER_S:
            return
        what = f"run.batches(loader) was asked for more {self._asked_after_end:,} times after the end of the run"
        if self._is_due:
            raise LoopError(f"{what}, while a report is due: if run.evaluate_now: run.report(...)")
        raise Ended(f"{what}: end the loop when run.progress is 1")

    def _count(self, host: Any, batch: Any, count: int) -> None:
        """Begins a micro-batch; in the first step, and under a cap, torch's operators are watched until it ends."""
        state = self._state
        self._is_forward_over = self._has_stepped = self._is_closed = False
        state.samples += count
        state.micro_batches_done += 1
        self._since_step += 1
        state.micro_steps.append((count, False))
        self._watch.samples += count
        self._watch.micro_steps += 1
        if self._is_capped or state.steps == 0:
            self._observe(host, batch, count)

    def _observe(self, host: Any, batch: Any, count: int) -> None:
        state = self._state
        if state.workload.is_outside:  # nothing is computed here, and watching takes a core for seconds at first
            return
        if state.steps == 0:
            if state.noise_seed is not None and state.micro_batches_done == 1:
                seed_everything(state.noise_seed)
            if state.witness is None and state.model is not None and state.optimizer is not None:
                state.witness = Witness(state.model, state.optimizer, self.device)
            if state.witness is not None:
                state.witness.micro_batch(count, batches.tensors_of(host))
        if state.meter is not None:
            state.counts = self._is_capped and state.sparse.part(state.steps, "", batches.tensors_of(batch))
        if state.witness is None and not state.counting:
            return
        if state.meter is not None and state.counting:
            parameters = state.model.parameters() if state.model is not None else ()
            gradients = [p.grad for p in parameters if p.grad is not None]  # made in parts that were not counted
            state.meter.adopt([*batches.tensors_of(batch), *gradients])
        self._watch_by(watched(state, "forward_backward"))

    def _watch_by(self, context: AbstractContextManager[object]) -> None:
        self._watching.enter_context(context)
        self._is_watched = True

    def _unwatch(self) -> None:
        """Stops watching; cheap if nothing is watched, since each micro-step calls it several times."""
        if self._is_watched:
            self._is_watched = False
            self._watching.close()

    def _close(self) -> None:
        """Closes the window, and marks a report as due if a milestone is reached."""
        state = self._state
        self._unwatch()
        state.last_step_at = time.time()
        window = closed(self._watch, self._loss_sum, state.samples)
        self._loss_sum = None
        self._is_closed = True
        self._watch_rates()
        state.levels.append((state.samples, state.live_bytes))
        self._give(window)
        self._paused_at = self._closed_at = time.perf_counter()
        if self._milestones and self._milestones[0] <= state.samples:
            self._milestones = [m for m in self._milestones if m > state.samples]
            self._is_due = state.ranks.rank == 0
            state.counts = state.capped and state.sparse.evaluation()
            if state.counts:
                self._watch_by(watched(state))

    def _watch_rates(self) -> None:
        """Sets a remark if a scheduler of the user's has not changed a rate yet; torch marks its optimiser's `step`."""
        ours = [schedule.optimizer for schedule in self._schedules]
        others = dict.fromkeys(optimizer for optimizer in [*self._shown, *self._optimizers] if optimizer not in ours)
        scheduled = [optimizer for optimizer in others if getattr(optimizer.step, "_wrapped_by_lr_sched", False)]
        rates = [float(group["lr"]) for optimizer in scheduled for group in optimizer.param_groups]
        first, self._rates = self._rates, rates if self._rates in (None, rates) else []
        self._state.remark = (
            f"the {type(scheduled[0]).__name__} has a scheduler that run.prepare was not shown, and its learning rate "
            "was the same at the last step as at the first: unless that is meant, show it to run.prepare, or call its "
            "step(), and make it for run.steps steps, not for epochs"
            if first and self._rates
            else ""
        )

    def _close_if_full(self) -> None:
        """Closes the window after a step if it is long enough, or if the warm-up ends with this step."""
        state = self._state
        self._is_warm = self._warm_up.is_over(state.steps)
        is_full = self._is_warm and self._watch.elapsed_s() >= self._window_s
        if self._warm_up.ends(state.steps) or is_full:
            self._close()
            self._watch.restart()

    def _pass_ends(self) -> None:
        """Closes the window at the end of an epoch if it is long enough, or pauses it: user code follows."""
        if self._is_closed:
            return
        self._rests_since = time.perf_counter()
        is_whole = self._has_stepped and self._warm_up.is_over(self._state.steps)
        self._watch.pause()
        if self.is_over or (is_whole and time.perf_counter() - self._closed_at >= self._state.plan.window_s):
            self._close()
            self._watch.restart()

    def _leaves(self) -> None:
        """Pauses the window: the user's loop has left an epoch early. An event handed over here could raise unseen."""
        self._unwatch()
        if not self._is_closed:
            self.before_step()  # every micro-step has a mark, also one whose batch was not trained on
            if self._has_stepped:
                self._watch.lap("optimizer")
            self._watch.pause()
            self._has_left = self._has_stepped
        if self._one_pass:
            self._state.epoch += 1
            self._state.micro_batches_done = 0

    def _keep_facts(self) -> None:
        """Stores the witness's facts about the first step in the state."""
        state = self._state
        sizes = [count for count, _ in state.micro_steps]
        counted = {"device": self.device.type, "batch_size": sum(sizes), "micro_batch_size": max(sizes)}
        facts = state.witness.facts() if state.witness is not None else {}
        state.active |= counted | {name: None if name in _NOT_WATCHED else value for name, value in facts.items()}
        state.witness = None


_NOT_WATCHED = ("loss_reads", "non_blocking", "side_stream", "averaged")
"""Facts that cannot be observed in a custom loop: copies to the device, reading the loss, averaging the weights."""


def _pass_samples(loader: Any) -> int:
    """Returns the samples of one epoch of a loader; raises LoopError if it does not know them."""
    # A loader with a batch sampler, as Accelerate's, also has a default sampler over all the data: not the one in use.
    within = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for source in (within, getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if (count := batches.length_of(source)) is not None:
            return count
    count, size = batches.length_of(loader), getattr(loader, "batch_size", None)
    if count is None or not size:
        raise LoopError(
            f"a {type(loader).__name__} does not tell how many samples an epoch has: run.batches(loader, samples=N) "
            "says it, or a length and a batch_size of the loader"
        )
    return count * int(size)
