"""`run`, the argument of a custom loop: gives the values of knobs, counts, times and ends the loop, takes its reports.

`run` records which knobs the loop reads: searching a knob that the loop never reads would be without effect.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainables import batches, optim, own_checks, precision
from trainables.knobs import Options, asked_by
from trainables.loader_check import SHARES_A_FILE, Moving, open_file, settled
from trainables.near_names import nearest
from trainables.own_count import ONLY_BACKWARD, Counted
from trainables.reports import Ended
from trainables.workload import LoopError, blocks

_LOADER, _PREPARE, _BACKWARD = asked_by("loader"), asked_by("prepare"), asked_by("backward")
_AUTOCAST, _CLIP = asked_by("autocast"), asked_by("clip")
_BATCHES = (*asked_by("batches"), *asked_by("around"))
_DECLARE = "give it a value or values in SPACE"


class Run(Counted):
    """A training, as the user's loop sees it."""

    # -- values --------------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a knob; raises LoopError for an unknown name, with the most similar known one."""
        knobs = self._state.config.knobs
        values = knobs.as_dict()
        if name not in values:
            near = knobs.table.also_called.get(name) or nearest(name, values)
            raise LoopError(
                f"run[{name!r}]: there is no such knob: {f'did you mean run[{near!r}]?' if near else _DECLARE}"
            )
        self._ask(name)
        if name == "micro_batch_size":
            self._cuts_by_name = True
            return self._micro()  # `loader` cuts a batch evenly, so this may be less than the knob's value
        return values[name]

    @property
    def options(self) -> Options:
        """The file's OPTIONS, as workload.NAME=VALUE changes them."""
        return self._state.config.options

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._state.epoch

    @property
    def batch(self) -> int:
        """The number of the current batch, from 0: the same for each of its micro-batches, unlike that of enumerate."""
        before = self._state.steps + self._skipped
        return before - 1 if self._has_stepped else before + (self._since_step - 1) // self.accumulation

    @property
    def progress(self) -> float:
        """The share of the run that is done, 0 to 1."""
        return min(1.0, self._state.samples / self.samples)

    @property
    def rank(self) -> int:
        """The number of this process among `devices_per_trial`, from 0: only rank 0 should save files."""
        return self._state.ranks.rank

    @property
    def accumulation(self) -> int:
        """The micro-batches of one optimiser step; 1 if the loader was not made with `loader()`."""
        if not self._parts:
            if "micro_batch_size" in self._asked:
                self._ask("batch_size")
            if self._is_whole and not self._cuts_by_name:
                raise LoopError(
                    f"run.batches(loader) has whole batches of {self._state.config.knobs.batch_size}, and run.loader() "
                    f"made a loader of micro-batches of {self._micro()}: run.loader() is for the training loader; give "
                    "a loader for evaluation its own batch size"
                )
            self._parts = self._accumulation
        return self._parts

    @property
    def ends_batch(self) -> bool:
        """Whether the current micro-batch is the last before an optimiser step."""
        return self._has_stepped or self._since_step >= self.accumulation or self.is_over

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The GradScaler: enabled under fp16, without effect otherwise."""
        return self._scaler

    # -- what the user's loop calls ------------------------------------------------------------------------------------

    def loader(self) -> dict[str, Any]:
        """Returns the DataLoader arguments that knobs set; `batch_size` cuts a batch into equal micro-batches."""
        knobs, self._has_cut = self._ask(*_LOADER), True
        return {"batch_size": self._micro(), **batches.loading(knobs, self.device.type)}

    def prepare(self, model: nn.Module, *others: torch.optim.Optimizer | LRScheduler) -> Any:
        """Moves the model to the device and applies knobs to it, in place; returns all arguments, or only the model.

        `others` are its optimisers, and learning rate schedulers. `backward` steps a scheduler after each step of its
        optimiser. Raises LoopError for a scheduler that waits for a metric.
        """
        if self.is_done:
            raise LoopError(
                "run.prepare was called after the end of the run: train(run) is one training; a fold, or a second "
                "stage with a model of its own, is another call of train(run), by an option of the file"
            )
        if not isinstance(model, nn.Module) or not all(hasattr(other, "step") for other in others):
            kinds = ", ".join(type(one).__name__ for one in (model, *others))
            raise LoopError(f"run.prepare({kinds}): give one model, then its optimisers; call it again for each model")
        state, knobs = self._state, self._ask(*_PREPARE)
        optimizers = [other for other in others if not isinstance(other, LRScheduler)]
        self._schedules += [other for other in others if isinstance(other, LRScheduler)]
        if any(isinstance(schedule, ReduceLROnPlateau) for schedule in self._schedules):
            raise LoopError("run.prepare(..., ReduceLROnPlateau): it waits for a metric, so step it yourself")
        model = model.to(self.device)
        if knobs.channels_last:  # otherwise the user's own layout stays
            self.keep(precision.laid_out(model, knobs))
        self.keep(precision.checkpointed(blocks(state.workload, model), knobs.activation_checkpointing))
        if knobs.compile != "off":
            cast(Any, model).compile(mode=knobs.compile)  # in place: the user's variables still refer to the model
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
        """Yields epochs, from 0, until the horizon is reached; each call of `batches` is then one epoch."""
        self._one_pass = True
        while not self.is_over:
            before = self._state.samples
            yield self._state.epoch
            if self._state.samples == before:
                raise LoopError("an epoch of run.epochs() took no batch of run.batches(loader)")
        if self._is_due and not self._has_stepped:  # once more, for a loop that reports only after a step
            yield self._state.epoch

    def batches(self, loader: Iterable[Any], samples: int | None = None) -> Iterator[Any]:
        """Yields the loader's batches on the device, epoch after epoch, until the horizon is reached.

        `samples` is the size of an epoch, for a loader that does not know it. The work until the next batch is asked
        for is counted and timed. If the horizon lies within a batch, that batch is trained up to its optimiser step.
        """
        state, knobs = self._state, self._ask(*_BATCHES)
        transfer = None if self._is_on_host else batches.Transfer(knobs, self.device)  # on a CPU nothing moves
        source = getattr(loader, "iterable", loader)  # inside of tqdm
        if not self._one_pass:
            own_checks.require_epochs(source)
        self.begin(source, samples)
        dim: int | None = None
        turn = self._turn = object()
        self._open += 1
        if self.is_done:
            self._asks_after_end()
        while not self.is_done:
            before, is_asked = state.samples, not self._since_step
            if is_asked and not state.ranks.more(before):
                raise Ended
            state.ranks.same_order()
            shown = self._shown_data(source)
            counts = batches.SampleCounts(source, asked=self._asked_size(source))
            epoch, ends_at = iter(loader), self._last_batch_at(source)
            for whole in epoch:
                if not (self._is_alone or self._since_step or is_asked or state.ranks.more(state.samples)):
                    raise Ended
                is_asked = False
                self._watch.lap("data_wait")
                dim = batches.samples_dim(whole, self._asked_size(source)) if dim is None else dim
                size = counts.of(whole, state.samples - before, dim)
                if state.micro_batches_done >= ends_at:
                    self._ends_pass(source, size, state.samples - before)
                if state.hand is not None:
                    whole = state.hand(whole, dim, size)
                host = whole
                if not self._is_alone:
                    host, self._share = state.ranks.part_of(whole, dim, size)
                batch = host
                if transfer is not None:
                    batch = transfer(host)
                    self._watch.lap("transfer")
                if state.steps == 0 and not isinstance(epoch, Generator):  # a wrapper hides the workers of its loader
                    state.active |= batches.workers_seen(epoch, loader)
                self._count(host, batch, size)
                del whole, host
                try:
                    yield batch
                except GeneratorExit:  # the user's loop has left this epoch early
                    self._open -= 1
                    self._leaves()
                    raise
                if turn is not self._turn:
                    raise LoopError(own_checks.TWO_LOOPS)
                self.passed()
                if self._has_stepped and state.samples >= self._horizon:
                    break
            else:
                own_checks.require_count(source, samples, state.samples - before)
                if state.steps_told and state.pass_batches > 0:
                    own_checks.require_length(state.pass_batches, state.micro_batches_done)
            is_iterator = epoch is loader
            self._parts, self._weight = 0, 1.0
            del epoch  # its workers end before the code that follows the epoch
            if shown:
                own_checks.require_unchanged(
                    source,
                    shown,
                    "within an epoch",
                    "set it between epochs, or knobs.num_workers=0",
                )
            self.next_pass()
            if state.samples == before:
                what = "the loader of run.batches(loader) gave no batch in a whole epoch"
                raise LoopError(f"{what}{own_checks.USED_UP if is_iterator else ''}")
            if not self.is_done:
                state.epoch += 1
                state.micro_batches_done = 0
            if self._one_pass:  # user code follows, which is in no window
                self._pass_ends()
                break
        self._open -= 1
        self._paused_at = time.perf_counter()

    def _last_batch_at(self, loader: Any) -> float:
        """Returns the number of the micro-batch in an epoch with which its last batch begins; infinite if batches are
        not cut, or if the length of an epoch is not known.
        """
        parts = 1 if self._is_whole else self._accumulation
        if parts == 1 or not self._state.ends_passes:
            return math.inf
        return (len(loader) - 1) // parts * parts

    def _ends_pass(self, loader: Any, size: int, taken: int) -> None:
        """Takes a micro-batch of an epoch's last batch, after `taken` samples of the epoch: each part counts by its
        size, and there may be fewer of them.
        """
        state = self._state
        if not self._since_step:  # it begins
            self._parts = len(loader) - state.micro_batches_done
            self._rest = self._parts * size if state.drops_last else state.pass_samples - taken
        self._weight = size * self._parts / self._rest if self._rest >= size else 1.0

    def _shown_data(self, loader: Any) -> Mapping[str, object]:
        """Returns the attributes of data set and collate_fn that loader processes get, empty if there are none.

        Raises LoopError if processes that stay were given others.
        """
        if not getattr(loader, "num_workers", 0):
            return {}
        data = getattr(loader, "dataset", None)
        if getattr(loader, "worker_init_fn", None) is None and (name := open_file(data)):
            raise LoopError(f"{type(data).__name__}.{name} is open as loader processes start: {SHARES_A_FILE}")
        stays = getattr(loader, "persistent_workers", False)
        if stays and self._data is not None:
            own_checks.require_unchanged(
                loader, self._data, "between epochs", "knobs.persistent_workers=false starts them anew"
            )
        if stays and self._moving is not None and (name := self._moving.changed()):
            raise LoopError(f"{name} has changed: {own_checks.STALE}")
        self._data = own_checks.settings_of(loader)
        if stays:
            self._moving = self._moving or Moving(data, getattr(loader, "collate_fn", None))
        if stays and self._state.epoch < own_checks.CHECKED_EPOCHS:
            samples, self._samples = self._samples, settled(data)
            if None not in (samples, self._samples) and samples != self._samples:
                raise LoopError(own_checks.STALE)
        return self._data

    def autocast(self) -> AbstractContextManager[object]:
        """Returns the context of a forward pass: autocast to the knob amp_dtype."""
        return precision.autocast(self._ask(*_AUTOCAST), self.device)

    def backward(
        self,
        loss: Tensor,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        max_norm: float | None = None,
        again: bool = False,
    ) -> bool:
        """Adds the gradients of a mean loss; after a whole batch, steps the optimiser and clears its gradients.

        Returns whether it stepped. The batches of a loader made with `loader()` are micro-batches; those of any other
        loader are whole batches. Before a step, the norm of all gradients of the optimiser is clipped to `max_norm`, by
        default the knob max_grad_norm. With several optimisers, call it for each with its own loss: a loss gives
        gradients to its optimiser only; with `again`, an optimiser may step more than once on a batch. Schedulers given
        to `prepare` step with their optimiser.
        """
        stepped = optimizer or self._state.optimizer
        if isinstance(stepped, torch.optim.LBFGS):
            raise LoopError("LBFGS.step takes a closure, so step it by lines of your own, with run.step() after each")
        if stepped is None:
            raise LoopError("run.backward(loss) needs an optimiser: run.backward(loss, optimizer), or run.prepare")
        limit = self._max_norm if max_norm is None else float(max_norm)
        if not self._state.micro_steps:
            raise LoopError("run.backward is called outside of a loop over run.batches(loader)")
        accumulation, others = self._parts or self.accumulation, self._optimizers
        if (has_stepped := others.get(stepped)) is None:
            if others:  # losses of other optimisers may have left gradients in its weights before it was known
                stepped.zero_grad()
            others[stepped] = False
            if stepped not in self._state.optimizers:
                self._state.optimizers.append(stepped)
            if stepped not in self._shown and hasattr(stepped, "_optimizer_step_pre_hooks"):  # a wrapper may have none
                self._watch_steps(stepped)
        elif has_stepped:
            self._rescale()
        if self._called_at.get(stepped) == self._state.samples:
            own_checks.require_one_loss(stepped, accumulation, again=again)
        if stepped in self._pending and not own_checks.has_gradients(stepped):
            raise own_checks.cleared(stepped)
        inputs = None if len(others) == 1 else [p for g in stepped.param_groups for p in g["params"] if p.requires_grad]
        share = self._share * self._weight
        part = loss * (share / accumulation) if accumulation != 1 or share != 1.0 else loss
        (self._scaler.scale(part) if self._is_scaled else part).backward(inputs=inputs)
        self.saw_loss(loss)
        self._called_at[stepped] = self._state.samples
        waits, forgets = self._step_settings
        if waits:
            loss.detach().item()
        if not (self._has_stepped or self._since_step >= accumulation or self.is_over):
            if own_checks.has_gradients(stepped):
                self._pending.add(stepped)
            return False
        self._pending.discard(stepped)
        self._state.averages = True
        if not self._is_alone:
            self._state.ranks.average(stepped)
        if limit > 0:
            optim.hold_gradients(stepped, self._scaler, self._state.config.knobs, limit)
        self.before_step()
        self._is_ours = True
        if self._is_scaled:
            self._scaler.step(stepped)
            others[stepped] = True
            if len(others) == 1:  # gradients of another optimiser may be scaled by the present scale
                self._rescale()
        else:
            stepped.step()
        self._is_ours = False
        for schedule in self._schedules:
            if schedule.optimizer is stepped:
                self._advance(schedule)
        stepped.zero_grad(set_to_none=forgets)
        self.step()
        return True

    def _advance(self, schedule: LRScheduler) -> None:
        """Steps a scheduler that was given to `prepare`; raises LoopError if the user's code steps it, too."""
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
        """Whether each micro-batch waits for the device, and whether a step drops its gradients."""
        knobs = self._ask(*_BACKWARD)
        return knobs.sync_every_step, knobs.set_to_none and not precision.keeps_gradients(knobs)

    def _watch_steps(self, optimizer: torch.optim.Optimizer) -> None:
        self._kept.callback(optimizer.register_step_pre_hook(self._steps_by).remove)

    def _steps_by(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Is called before an optimiser steps; raises LoopError if user code steps one that `backward` steps."""
        if not self._is_ours:
            if self._state.ranks.count > 1:
                raise LoopError(f"devices_per_trial={self._state.ranks.count}: {ONLY_BACKWARD}")
            if optimizer in self._optimizers and (not self._has_stepped or not own_checks.has_gradients(optimizer)):
                raise LoopError(
                    f"run.backward steps the {type(optimizer).__name__} that it is given, after a whole batch, and so "
                    "do lines of your own: leave out its step() and zero_grad()"
                )
            self._unreported += bool(self._state.micro_steps)
        if not self._is_forward_over:
            self.before_step()

    def _asked_size(self, loader: Any) -> int | None:
        """Returns the samples that a full batch of the loader should have; None if that is not known."""
        asked, whole = self._asked, self._state.config.knobs.batch_size
        by_knob = self._micro() if "micro_batch_size" in asked else whole if "batch_size" in asked else None
        return getattr(loader, "batch_size", None) or by_knob

    def _rescale(self) -> None:
        self._scaler.update()
        self._optimizers.update(dict.fromkeys(self._optimizers, False))
