"""How a loop of one's own is counted, timed and ended, by what it tells of its micro-batches, steps and reports."""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from trainables import batches, precision
from trainables.evaluation import Evaluation
from trainables.plan import evenly, steps_to
from trainables.ranks import ALONE, Ranks
from trainables.resident import marks
from trainables.state import RunState, WarmUp, check_objectives, closed, watched
from trainables.stopwatch import Stopwatch, Window
from trainables.witness import Witness
from trainables.workload import LoopError, OwnLoop

READY = "ready"
Event = Window | Evaluation | str
ONLY_BACKWARD = "gradients are averaged by run.backward(loss, optimizer), and this loop steps by lines of its own"
NO_STEP_AFTER = 256
"""Micro-batches without an optimiser step after which a loop is told that it lacks one."""
UNSAID_STEPS = 8
"""Steps of an optimiser by lines of their own after which `step` is missed: some loops call it behind several."""
NO_END_AFTER = 100_000
NO_END_AFTER_S = 60.0
"""A loop that asks for batches after the end of its run is ended after so many calls or seconds: it may never end."""


class Ended(BaseException):
    """Raised in `train(run)` where the run is over; what catches it ends nothing but itself."""


@dataclass(kw_only=True)
class OwnState(RunState):
    """How far a loop of one's own is, and what was seen of it."""

    workload: OwnLoop
    asked: set[str] = field(default_factory=set)
    """The knobs that were asked for so far, in this training or one before."""
    asked_here: set[str] = field(default_factory=set)
    """Those of this training."""
    pass_samples: int = 0
    """Samples of one pass over the data; 0 until they are known, by this training or one before."""
    drops_last: bool = False
    """Whether a pass leaves out its last, smaller batch."""
    own_size: int = 0
    """The batch size of their loader where no knob's was asked for, in this training or one before; else 0."""
    steps_told: int = 0
    """The steps of the whole run as their function was told them last; 0 where it never asked."""
    is_misled: bool = False
    """Whether it was told others than there are, before its data were known."""
    remark: str = ""
    """What was seen of it that is likely a mistake, once it has come to its end; "" for nothing."""
    noise_seed: int | None = None
    """What torch is seeded with once more behind the first micro-batch: the order of the samples is drawn by then."""
    rested_s: float = 0.0
    """Seconds between passes, in no window, without those of a report that was due: evaluations that none asked for."""
    dataset: Any = field(default=None, repr=False)
    """What their loader reads from, None where that is not known."""
    micro_steps: deque[tuple[int, bool]] = field(default_factory=lambda: deque(maxlen=1 << 16), repr=False)
    """Of each micro-step its samples, and whether an optimiser step followed."""
    prepared: list[nn.Module] = field(default_factory=list, repr=False)
    """The models that `run.prepare` was shown."""
    averages: bool = False
    """Whether its steps are those of `run.backward`, which averages gradients over several processes."""
    last_report: Mapping[str, float] = field(default_factory=dict, repr=False)
    """The objectives of the last report, due or not; empty before the first."""
    ranks: Ranks = field(default=ALONE, repr=False)
    """The processes that train it, of which this is one."""
    model: nn.Module | None = field(default=None, repr=False)
    optimizer: torch.optim.Optimizer | None = field(default=None, repr=False)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list, repr=False)
    """All that are known, of which that is the first."""


class Counted:
    """One training of a loop of one's own, counted, timed and ended; the loop of a framework tells it directly."""

    def __init__(self, state: OwnState, give: Callable[[Event], None]) -> None:
        self._state, self._give = state, give
        self._milestones = list(state.plan.milestones)
        self._watch = Stopwatch(state.device, each_step=state.plan.each_step)
        self._scaler = precision.grad_scaler(state.config.knobs, state.device)
        self._is_scaled = self._scaler.is_enabled()
        self._warm_up = WarmUp(state.steps, state.config.knobs, self._scaler)
        self._kept, self._watching = ExitStack(), ExitStack()
        self._is_watched = self._knows_data = False
        # Asked in every step: behind a step, whose data fill the caches, a call of a function takes 2 us or so.
        self._is_on_host, self._horizon = state.device.type == "cpu", state.plan.samples
        self._is_capped, self._window_s = state.capped, state.plan.window_s
        self._is_warm = False
        """Whether the warm-up was over behind a step."""
        self._parts = 0
        """The micro-batches of a step as they were told last; 0 where what they depend on may have changed."""
        self._has_cut = self._is_whole = self._cuts_by_name = False
        """Whether `loader` was called and the loader at hand is another, of whole batches; whether
        micro_batch_size was asked for by its name, too."""
        self._is_alone = True
        """Whether one process trains, which is known once the first batch is asked for."""
        self._loss_sum: Tensor | float | None = None
        self._since_step = self._unsaid = 0
        """Micro-batches and their own optimisers' steps since the last step that was told."""
        self._is_forward_over = self._has_stepped = self._is_closed = False
        self._is_due = self._one_pass = self._has_left = False
        self._asked_after_end = 0
        self.ends_with_pass = False
        """Whether the end of a pass ends a batch, too."""
        self._shown: list[torch.optim.Optimizer] = []
        """Those that `prepare` was shown."""
        self._optimizers: dict[torch.optim.Optimizer, bool] = {}
        """Those that `backward` was called with, and whether each has stepped since the scale of the loss changed."""
        self._is_ours = False
        """Whether the optimiser's step at hand is that of `backward`."""
        self._share = 1.0
        """The weight of the mean loss of this process's part of a micro-batch; 1 where there is one process."""
        self._schedules: list[LRScheduler] = []
        """Those that `backward` steps, each behind its optimiser."""
        self._schedules_at: dict[int, int | None] = {}
        """Where it left them, by their id."""
        self._rates: list[float] | None = None
        """The learning rates of what `prepare` was shown, behind the first step; empty once one of them has moved."""
        self._paused_at = self._closed_at = time.perf_counter()
        self._rests_since = 0.0
        """When a pass ended that another follows; 0 within a pass."""

    @property
    def seed(self) -> int:
        """The seed of the training; torch, NumPy and random are seeded with it already."""
        return self._state.config.seed

    @property
    def device(self) -> torch.device:
        """Where it is to run."""
        return self._state.device

    @property
    def samples(self) -> int:
        """The training samples of the whole run, at which it ends; those of a probe are without end."""
        return self._state.plan.samples

    @property
    def steps(self) -> int:
        """The optimiser steps of the whole run, for a schedule."""
        self._state.steps_told = self._steps()
        return self._state.steps_told

    @property
    def objectives(self) -> Mapping[str, str]:
        """The file's OBJECTIVES."""
        return self._state.workload.objectives

    @property
    def is_over(self) -> bool:
        """Whether the horizon is reached."""
        return self._state.samples >= self._horizon

    @property
    def is_done(self) -> bool:
        """Whether nothing more is trained: the horizon is reached, and the batch at hand has had its step."""
        return self.is_over and self._has_stepped

    # -- what a loop tells ---------------------------------------------------------------------------------------------

    def begin(self, loader: Any, samples: int | None = None) -> None:
        """The first batch is asked for: what came before is set-up; `samples` are those of a pass over the loader."""
        state = self._state
        self._unwatch()  # of a report that was due and did not come
        self._parts, size = 0, getattr(loader, "batch_size", None)
        self._is_whole = self._has_cut and size == state.config.knobs.batch_size != self._micro()
        if not state.first_step_at:
            state.pass_samples, state.dataset = samples or _pass_samples(loader), getattr(loader, "dataset", None)
            state.drops_last = bool(getattr(getattr(loader, "batch_sampler", None), "drop_last", False))
            if size == self._micro():  # or an earlier training made the loader
                state.asked_here |= state.asked & {"micro_batch_size"}
            state.own_size = 0 if state.asked_here & {"batch_size", "micro_batch_size"} else int(size or 0)
            self._knows_data = True
            state.is_misled = state.steps_told not in (0, self._steps())
            state.active["seed"] = torch.initial_seed()  # their function may have set another than the run's
            state.marks = {} if state.model is None else marks(state.model)
            self._give(READY)
            if state.epoch:  # a window that is to have other batches
                torch.manual_seed(self.seed + 1_000_003 * state.epoch)
            state.first_step_at = time.time()
            self._is_alone = state.ranks is ALONE
            if batches.starts_anew(loader):  # else what a first pass takes more is done once a training
                self.next_pass()
        if not self._watch.is_paused:
            self._loss_sum = None
        if self._rests_since:
            state.rested_s += time.perf_counter() - self._rests_since
            self._rests_since = 0.0
        self._watch.go_on()
        if self._has_left:
            self._has_left = False
            self._close_where_full()

    def next_pass(self) -> None:
        """A pass is over, or the first begins: what there is until the next batch is no part of a step."""
        self._watch.next_pass()

    def took(self, samples: int) -> None:
        """A micro-batch is there, and is computed on from here."""
        if self._watch.is_paused:
            self._watch.go_on()
        self._watch.lap("data_wait")
        self._count(None, None, samples)

    def rests(self) -> None:
        """What follows is a framework's own, such as an evaluation that none asked for: it is in no window."""
        if not self._watch.is_paused:
            self._watch.pause()

    def saw_loss(self, loss: Tensor) -> None:
        """Takes the mean loss of the micro-batch at hand, for its window: a loss that is not finite ends the run."""
        if not self._state.micro_steps:
            raise LoopError("a loss came before a batch: the loop goes over run.batches(loader)")
        count = self._state.micro_steps[-1][0]
        # Losses that are kept lie between the large tensors of each step, which fragments a CPU's heap.
        part = loss.item() * count if self._is_on_host else loss.detach().float() * count
        self._loss_sum = part if self._loss_sum is None else self._loss_sum + part

    def before_step(self, *_: Any) -> None:
        """The passes of a batch are over, and the optimiser's step begins."""
        if not self._is_forward_over:
            self._is_forward_over = True
            self._watch.lap("forward_backward")
            if self._state.witness is not None:
                self._state.witness.goes_on("optimizer")

    def step(self, *_: Any) -> None:
        """Says that an optimiser step was taken, by their own lines."""
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
        self._has_stepped, self._since_step, self._unsaid = True, 0, 0
        state.micro_steps[-1] = (state.micro_steps[-1][0], True)
        if state.steps == 1:
            self._see()
        if self._is_capped and state.meter is not None:
            state.sparse.stepped(state.steps, state.meter.live_bytes)
        samples = state.samples
        if samples >= self._horizon or (self._milestones and samples >= self._milestones[0]):
            self._watch.lap("optimizer")
            self._close()
        elif are_several:
            self._next_passes()

    def _next_passes(self) -> None:
        """One of several optimisers has stepped: the passes of the next follow, whose loss is its own."""
        self._watch.lap("optimizer")
        self._is_forward_over = False

    def passed(self) -> None:
        """The micro-batch is over; a window closes behind a whole batch."""
        state = self._state
        if self._is_watched:
            self._unwatch()
        if not self._is_forward_over:
            self.before_step()
        if self._is_closed:
            state.ranks.stepped()
            self._warm_up.ends(state.steps)  # a step that was skipped makes it longer here, too
            self._watch.restart()
        elif self._has_stepped:
            seconds = self._watch.lap("optimizer")
            if not self._is_alone:
                state.ranks.stepped()
            if seconds >= self._window_s or not self._is_warm:
                self._close_where_full()
        elif self._unsaid >= UNSAID_STEPS and not self._optimizers:  # else those of `backward` count the batches
            raise LoopError(
                f"lines of your own stepped the optimiser {self._unsaid} times, and run.step() was not called: call it "
                "behind each, or replace loss.backward(), step() and zero_grad() by run.backward(loss, optimizer)"
            )
        elif self._since_step >= NO_STEP_AFTER * self._accumulation or (self.is_over and not state.steps):
            raise LoopError(
                f"{self._since_step} micro-batches passed without an optimiser step: run.backward(loss, optimizer) "
                "steps by itself, and after an optimizer.step() of your own comes run.step()"
            )

    @property
    def evaluate_now(self) -> bool:
        """Whether a report is due: at rungs and at the end, never in a probe."""
        return self._is_due

    def report(self, **values: float) -> None:
        """Takes the objectives on validation data; what is not due counts where the loop ends by itself then.

        May end the run here.
        """
        found = {name: float(value) for name, value in values.items()}
        missing = [name for name in self.objectives if name not in found]
        if missing:
            raise LoopError(f"run.report has {sorted(found)}, without {', '.join(missing)} of OBJECTIVES")
        check_objectives(self.objectives, found, self._state.samples)
        self._state.last_report = found
        if self._is_due:
            self._is_due = False
            self._unwatch()
            self._give(Evaluation(self._state.samples, found, time.perf_counter() - self._paused_at))
            if not self._watch.is_paused:  # else what was trained since the milestone is in a window that goes on
                self._watch.restart()
                self._loss_sum = None

    # -- for whoever runs it -------------------------------------------------------------------------------------------

    def shows(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Takes the model and the optimisers of the run, to tell what the first step ran, with the first of them."""
        self._state.model, self._state.optimizer, self._state.optimizers = model, optimizers[0], list(optimizers)
        if self._state.meter is not None:
            self._state.meter.adopt([*model.parameters(), *model.buffers()])

    def kernels(self) -> AbstractContextManager[object]:
        """Returns the context in which their function is to run: the kernels that knobs choose."""
        return precision.kernels(self._state.config.knobs, self.device)

    def keep(self, context: AbstractContextManager[object]) -> None:
        """Enters a context that is left when the run is let go."""
        self._kept.enter_context(context)

    def finished(self) -> None:
        """Takes that their function has returned; raises WorkloadError where it has trained or reported too little.

        A training that ends before its horizon has come to what it reported last.
        """
        state = self._state
        names = ", ".join(f"{name}=..." for name in state.workload.objectives)
        if not state.first_step_at:
            raise LoopError(
                "train(run) returned without asking for run.batches(loader); with transformers' Trainer, without "
                "callbacks=[StudyCallback(run)], with Lightning's, without Trainer(**trainer_kwargs(run))"
            )
        if self._is_due and (self.is_over or not state.last_report):
            said = "train(run) returned without a report at its end"
            raise LoopError(f"{said}: if run.evaluate_now: run.report({names})")
        state.has_ended = not self.is_over
        if self.is_over or state.ranks.rank:  # the others report nothing
            return
        if not state.last_report or not state.steps:
            said = f"train(run) returned after {state.samples} of {self.samples} samples, without a report"
            raise LoopError(f"{said}: run.batches(loader) ends the loop; what stops early calls run.report({names})")
        if self._watch.steps and not self._is_closed:
            self._close()
        self._give(Evaluation(state.samples, dict(state.last_report), 0.0))

    def let_go(self) -> None:
        """Takes back what it did to their model, in the thread that did it."""
        self._unwatch()
        self._kept.close()
        self._loss_sum = None

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    def _asked(self) -> set[str]:
        """The knobs that this training has asked for; before its data are known, also those of one before."""
        return self._state.asked_here if self._knows_data else self._state.asked

    @property
    def _accumulation(self) -> int:
        return self._cut[0] if "micro_batch_size" in self._asked else 1

    def _steps(self) -> int:
        state, accumulation = self._state, self._accumulation
        micro = state.own_size or self._micro()
        whole = state.pass_samples // micro * micro if state.drops_last else state.pass_samples
        whole = whole or self.samples  # one pass, where none is known
        if self.ends_with_pass:
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
        """Ends a loop that counts steps of its own, and asks for more than the run has, for ever."""
        self._asked_after_end += 1
        if self._asked_after_end < NO_END_AFTER and time.perf_counter() - self._paused_at < NO_END_AFTER_S:
            return
        said = f"run.batches(loader) was asked for more {self._asked_after_end:,} times after the end of the run"
        if self._is_due:
            raise LoopError(f"{said}, where a report is due: if run.evaluate_now: run.report(...)")
        raise Ended(f"{said}: end the loop where run.progress is 1")

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
        if self._is_capped or state.steps == 0:
            self._observe(host, batch, count)

    def _observe(self, host: Any, batch: Any, count: int) -> None:
        state = self._state
        if state.steps == 0:
            if state.noise_seed is not None and state.micro_batches_done == 1:
                torch.manual_seed(state.noise_seed)
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
            gradients = [p.grad for p in parameters if p.grad is not None]  # born in parts that were not counted
            state.meter.adopt([*batches.tensors_of(batch), *gradients])
        self._watch_by(watched(state, "forward_backward"))

    def _watch_by(self, context: AbstractContextManager[object]) -> None:
        self._watching.enter_context(context)
        self._is_watched = True

    def _unwatch(self) -> None:
        """Ends what is watched, which is asked several times in each micro-step."""
        if self._is_watched:
            self._is_watched = False
            self._watching.close()

    def _close(self) -> None:
        """Closes the window, and says that a report is due where a milestone is reached."""
        state = self._state
        self._unwatch()
        state.last_step_at = time.time()
        window = closed(self._watch, self._loss_sum, state.samples)
        self._loss_sum = None
        self._is_closed = True
        self._watch_rates()
        self._give(window)
        self._paused_at = self._closed_at = time.perf_counter()
        if self._milestones and self._milestones[0] <= state.samples:
            self._milestones = [m for m in self._milestones if m > state.samples]
            self._is_due = state.ranks.rank == 0
            state.counts = state.capped and state.sparse.evaluation()
            if state.counts:
                self._watch_by(watched(state))

    def _watch_rates(self) -> None:
        """Remarks that an optimiser has a scheduler of theirs, as torch marks its `step`, and its rate is the same."""
        ours = [schedule.optimizer for schedule in self._schedules]
        known = dict.fromkeys(one for one in [*self._shown, *self._optimizers] if one not in ours)
        shown = [one for one in known if getattr(one.step, "_wrapped_by_lr_sched", False)]
        rates = [float(group["lr"]) for one in shown for group in one.param_groups]
        first, self._rates = self._rates, rates if self._rates in (None, rates) else []
        self._state.remark = (
            f"the {type(shown[0]).__name__} has a scheduler that run.prepare was not shown, and its learning rate was "
            "the same at the last step as at the first: unless that is meant, show it to run.prepare, or call its "
            "step(), and make it for run.steps steps, not for passes"
            if first and self._rates
            else ""
        )

    def _close_where_full(self) -> None:
        """Closes the window behind a step where it is long enough, or was the first one."""
        state = self._state
        self._is_warm = self._warm_up.is_over(state.steps)
        is_full = self._is_warm and self._watch.elapsed_s() >= self._window_s
        if self._warm_up.ends(state.steps) or is_full:
            self._close()
            self._watch.restart()

    def _pass_ends(self) -> None:
        """What follows is theirs, and in no window: the window ends here where it is long enough, or waits."""
        if self._is_closed:
            return
        self._rests_since = time.perf_counter()
        is_whole = self._has_stepped and self._warm_up.is_over(self._state.steps)
        self._watch.pause()
        if self.is_over or (is_whole and time.perf_counter() - self._closed_at >= self._state.plan.window_s):
            self._close()
            self._watch.restart()

    def _leaves(self) -> None:
        """Their loop breaks off a pass: the window waits. Nothing is handed over: what that raises would be lost."""
        self._unwatch()
        if not self._is_closed:
            self.before_step()  # a micro-step has its mark, whatever came of its batch
            if self._has_stepped:
                self._watch.lap("optimizer")
            self._watch.pause()
            self._has_left = self._has_stepped
        if self._one_pass:
            self._state.epoch += 1
            self._state.micro_batches_done = 0

    def _see(self) -> None:
        """Keeps what the first step was seen to run."""
        state = self._state
        sizes = [count for count, _ in state.micro_steps]
        found = {"device": self.device.type, "batch_size": sum(sizes), "micro_batch_size": max(sizes)}
        seen = state.witness.facts() if state.witness is not None else {}
        state.active |= found | {name: None if name in _NOT_WATCHED else value for name, value in seen.items()}
        state.witness = None


_NOT_WATCHED = ("loss_reads", "non_blocking", "side_stream")
"""Facts of parts of a step that a loop of one's own does not show: copies to the device, and reading the loss."""


def _pass_samples(loader: Any) -> int:
    """Returns the samples of a pass over a loader; raises LoopError where it does not know them."""
    # A loader that was given a batch sampler, as Accelerate's, has a sampler of its own that goes over all the data.
    within = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for source in (within, getattr(loader, "sampler", None), getattr(loader, "dataset", None)):
        if (count := batches.length_of(source)) is not None:
            return count
    count, size = batches.length_of(loader), getattr(loader, "batch_size", None)
    if count is None or not size:
        raise LoopError(
            f"a {type(loader).__name__} does not tell how many samples a pass has: run.batches(loader, samples=N) "
            "says it, or a length and a batch_size of the loader"
        )
    return count * int(size)
