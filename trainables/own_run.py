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

import functools
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainables import batches, optim, precision
from trainables.knobs import asked_by, table
from trainables.near_names import nearest
from trainables.own_count import ONLY_BACKWARD, Counted, Ended
from trainables.workload import LoopError, blocks

_LOADER, _PREPARE, _BACKWARD = asked_by("loader"), asked_by("prepare"), asked_by("backward")
_AUTOCAST, _CLIP = asked_by("autocast"), asked_by("clip")
_BATCHES = (*asked_by("batches"), *asked_by("around"))
_DECLARE = "give it a value or values in SPACE"


class Run(Counted):
    """One training as their loop sees it."""

    # -- values --------------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a knob; raises LoopError for a name that is none, with the one most like it."""
        values = self._state.config.knobs.as_dict()
        if name not in values:
            near = table().also_called.get(name) or nearest(name, values)
            raise LoopError(
                f"run[{name!r}]: there is no such knob: {f'did you mean run[{near!r}]?' if near else _DECLARE}"
            )
        self._ask(name)
        if name == "micro_batch_size":
            self._cuts_by_name = True
            return self._micro()  # as `loader` cuts a batch: evenly
        return values[name]

    @property
    def options(self) -> Mapping[str, Any]:
        """The file's OPTIONS, as workload.NAME=VALUE changes them."""
        return self._state.config.options

    @property
    def epoch(self) -> int:
        """The pass over the data at hand, from 0."""
        return self._state.epoch

    @property
    def progress(self) -> float:
        """The share of the run that is done, 0 to 1."""
        return min(1.0, self._state.samples / self.samples)

    @property
    def rank(self) -> int:
        """Which of `devices_per_trial` processes this is, from 0: the first is to write what a training saves."""
        return self._state.ranks.rank

    @property
    def accumulation(self) -> int:
        """The micro-batches of one optimiser step: 1 where the loader's batches are not those of `loader()`."""
        if not self._parts:
            if "micro_batch_size" in self._asked:
                self._ask("batch_size")
            if self._is_whole and not self._cuts_by_name:
                raise LoopError(
                    f"run.batches(loader) has whole batches of {self._state.config.knobs.batch_size}, and run.loader() "
                    f"made a loader of micro-batches of {self._micro()}: run.loader() is for the training loader, and "
                    "one to evaluate on has a batch size of its own"
                )
            self._parts = self._accumulation
        return self._parts

    @property
    def ends_batch(self) -> bool:
        """Whether the micro-batch at hand is the last before an optimiser step."""
        return self._has_stepped or self._since_step >= self.accumulation or self.is_over

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """What scales the loss under fp16, and passes everything through otherwise."""
        return self._scaler

    # -- what their loop calls -----------------------------------------------------------------------------------------

    def loader(self) -> dict[str, Any]:
        """Returns the arguments of a DataLoader that knobs set; a batch is cut into equal micro-batches."""
        knobs, self._has_cut = self._ask(*_LOADER), True
        return {"batch_size": self._micro(), **batches.loading(knobs, self.device.type)}

    def prepare(self, model: nn.Module, *others: torch.optim.Optimizer | LRScheduler) -> Any:
        """Returns the model on the device as knobs say, and all else as it came; the model alone where it comes alone.

        The others are its optimisers, and schedulers of the learning rate, which `backward` then steps behind each step
        of their optimiser. Raises LoopError for a scheduler that waits for a metric.
        """
        state, knobs = self._state, self._ask(*_PREPARE)
        optimizers = [one for one in others if not isinstance(one, LRScheduler)]
        self._schedules += [one for one in others if isinstance(one, LRScheduler)]
        if any(isinstance(one, ReduceLROnPlateau) for one in self._schedules):
            raise LoopError("run.prepare(..., ReduceLROnPlateau): it waits for a metric, so step it yourself")
        model = model.to(self.device)
        if knobs.channels_last:  # else the layout that their own lines gave it holds
            self.keep(precision.laid_out(model, knobs))
        self.keep(precision.checkpointed(blocks(state.workload, model), knobs.activation_checkpointing))
        if knobs.compile != "off":
            cast(Any, model).compile(mode=knobs.compile)  # in place: their names of the model stay right
        if state.meter is not None:
            state.meter.adopt([*model.parameters(), *model.buffers()])
        for optimizer in optimizers:
            if optimizer not in self._shown:
                self._watch_steps(optimizer)
        self._shown += optimizers
        state.optimizers += optimizers
        state.prepared.append(model)
        if state.model is None or (state.optimizer is None and optimizers):
            state.model, state.optimizer = model, next(iter(optimizers), None)
        return (model, *others) if others else model

    def epochs(self) -> Iterator[int]:
        """Yields the passes until the horizon is reached; `batches` then makes one pass at a time."""
        self._one_pass = True
        while not self.is_over:
            before = self._state.samples
            yield self._state.epoch
            if self._state.samples == before:
                raise LoopError("a pass over run.epochs() took no batch of run.batches(loader)")
        if self._is_due and not self._has_stepped:  # once more, for a loop that reports behind its steps alone
            yield self._state.epoch

    def batches(self, loader: Iterable[Any], samples: int | None = None) -> Iterator[Any]:
        """Yields the loader's batches on the device, pass after pass, until the horizon is reached.

        `samples` are those of one pass, for a loader that does not know them. Counts and times what happens until the
        next batch is asked for. Where the horizon is within a batch of theirs, that batch is trained to its step.
        """
        state, knobs = self._state, self._ask(*_BATCHES)
        transfer = None if self._is_on_host else batches.Transfer(knobs, self.device)  # on a CPU nothing moves
        source = getattr(loader, "iterable", loader)  # what tqdm wraps
        self.begin(source, samples)
        dim: int | None = None
        if self.is_done:
            self._asks_after_end()
        while not self.is_done:
            before, is_asked = state.samples, not self._since_step
            if is_asked and not state.ranks.more(before):
                raise Ended
            state.ranks.same_order()
            own, counts = iter(loader), batches.SampleCounts(source)
            for whole in own:
                if not (self._is_alone or self._since_step or is_asked or state.ranks.more(state.samples)):
                    raise Ended
                is_asked = False
                self._watch.lap("data_wait")
                dim = batches.samples_dim(whole, self._asked_size(source)) if dim is None else dim
                size = counts.of(whole, state.samples - before, dim)
                host = whole
                if not self._is_alone:
                    host, self._share = state.ranks.part_of(whole, dim, size)
                batch = host
                if transfer is not None:
                    batch = transfer(host)
                    self._watch.lap("transfer")
                if state.steps == 0 and not isinstance(own, Generator):  # a wrapper hides the workers of its loader
                    state.active |= batches.workers_seen(own, loader)
                self._count(host, batch, size)
                del whole, host
                try:
                    yield batch
                except GeneratorExit:  # their loop has left this pass by itself
                    self._leaves()
                    raise
                self.passed()
                if self._has_stepped and state.samples >= self._horizon:
                    break
            del own  # its workers end before what follows the pass
            self.next_pass()
            if state.samples == before:
                raise LoopError("the loader of run.batches(loader) gave no batch in a whole pass")
            if not self.is_done:
                state.epoch += 1
                state.micro_batches_done = 0
            if self._one_pass:  # what follows is theirs, and in no window
                self._pass_ends()
                break
        self._paused_at = time.perf_counter()

    def autocast(self) -> AbstractContextManager[object]:
        """Returns the context of a forward pass, in the type of numbers that the knob amp_dtype says."""
        return precision.autocast(self._ask(*_AUTOCAST), self.device)

    def backward(
        self, loss: Tensor, optimizer: torch.optim.Optimizer | None = None, *, max_norm: float | None = None
    ) -> bool:
        """Adds the gradients of a mean loss, and after a whole batch steps, and drops the gradients; returns whether.

        The batches of a loader that `loader()` made are micro-batches; any other loader's are whole batches. `max_norm`
        is what the norm of all gradients of the optimiser is clipped to before it steps, by default the knob's. Where
        it is called with several optimisers, each with its own loss, a loss has gradients for its optimiser alone.
        Schedulers that `prepare` was shown step with their optimiser.
        """
        own = optimizer or self._state.optimizer
        if own is None:
            raise LoopError("run.backward(loss) needs an optimiser: run.backward(loss, optimizer), or run.prepare")
        limit = self._max_norm if max_norm is None else float(max_norm)
        if not self._state.micro_steps:
            raise LoopError("run.backward is called outside of a loop over run.batches(loader)")
        accumulation, others = self._parts or self.accumulation, self._optimizers
        if (has_stepped := others.get(own)) is None:
            if others:  # what the losses of others have left in its weights, while theirs alone was known
                own.zero_grad()
            others[own] = False
            if own not in self._state.optimizers:
                self._state.optimizers.append(own)
            if own not in self._shown and hasattr(own, "_optimizer_step_pre_hooks"):  # a wrapper may have none
                self._watch_steps(own)
        elif has_stepped:
            self._rescale()
        inputs = None if len(others) == 1 else [p for g in own.param_groups for p in g["params"] if p.requires_grad]
        part = loss * (self._share / accumulation) if accumulation != 1 or self._share != 1.0 else loss
        (self._scaler.scale(part) if self._is_scaled else part).backward(inputs=inputs)
        self.saw_loss(loss)
        waits, forgets = self._step_settings
        if waits:
            loss.detach().item()
        if not (self._has_stepped or self._since_step >= accumulation or self.is_over):
            return False
        self._state.averages = True
        if not self._is_alone:
            self._state.ranks.average(own)
        if limit > 0:
            optim.hold_gradients(own, self._scaler, self._state.config.knobs, limit)
        self.before_step()
        self._is_ours = True
        if self._is_scaled:
            self._scaler.step(own)
            others[own] = True
            if len(others) == 1:  # else gradients of another may wait at this scale
                self._rescale()
        else:
            own.step()
        self._is_ours = False
        for schedule in self._schedules:
            if schedule.optimizer is own:
                self._advance(schedule)
        own.zero_grad(set_to_none=forgets)
        self.step()
        return True

    def _advance(self, schedule: LRScheduler) -> None:
        """Steps a scheduler that `prepare` was shown; raises LoopError where their own lines step it, too."""
        at = getattr(schedule, "last_epoch", None)
        if at != self._schedules_at.get(id(schedule), at):
            raise LoopError(
                f"run.prepare was shown the {type(schedule).__name__}, so that run.backward steps it, and so do lines "
                "of your own: leave out its step(), or do not give it to run.prepare"
            )
        schedule.step()
        self._schedules_at[id(schedule)] = getattr(schedule, "last_epoch", None)

    @functools.cached_property
    def _max_norm(self) -> float:
        return float(self._ask(*_CLIP).max_grad_norm)

    @functools.cached_property
    def _step_settings(self) -> tuple[bool, bool]:
        """Whether a step waits for the device, and whether it drops its gradients."""
        knobs = self._ask(*_BACKWARD)
        return knobs.sync_every_step, knobs.set_to_none and not precision.keeps_gradients(knobs)

    def _watch_steps(self, optimizer: torch.optim.Optimizer) -> None:
        self._kept.callback(optimizer.register_step_pre_hook(self._steps_by).remove)

    def _steps_by(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimiser is about to step; raises LoopError where `backward` does that, and their own lines do too."""
        if not self._is_ours:
            if self._state.ranks.count > 1:
                raise LoopError(f"devices_per_trial={self._state.ranks.count}: {ONLY_BACKWARD}")
            if optimizer in self._optimizers and (not self._has_stepped or not _has_gradients(optimizer)):
                raise LoopError(
                    f"run.backward steps the {type(optimizer).__name__} that it is given, after a whole batch, and so "
                    "do lines of your own: leave out its step() and zero_grad()"
                )
            self._unsaid += bool(self._state.micro_steps)
        if not self._is_forward_over:
            self.before_step()

    def _asked_size(self, loader: Any) -> int | None:
        """Returns the samples that a whole batch of their loader should have, None where nothing tells."""
        asked, whole = self._asked, self._state.config.knobs.batch_size
        own = self._micro() if "micro_batch_size" in asked else whole if "batch_size" in asked else None
        return getattr(loader, "batch_size", None) or own

    def _rescale(self) -> None:
        self._scaler.update()
        self._optimizers.update(dict.fromkeys(self._optimizers, False))


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
