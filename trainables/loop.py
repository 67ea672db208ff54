"""The training loop of all workloads by the contract, for probes, trials, confirmations and full runs alike.

    state = prepare(resident, config, plan)
    train(state, hear)                   # hear(Window | Evaluation), see `reports`

    for each epoch:                                   batches.plan_epoch
        for each micro-batch:                         batches.Loader            data_wait
            move it to the device                                               transfer
            augment it there, if the loader did not
            loss = workload.loss(...) * its share of the batch; backward        forward_backward
            at the end of a batch: step, schedule, drop the gradients, average  optimizer
            report a Window when one is full, an Evaluation at a milestone

The loop never waits for the device inside a window: the loss is summed on the device and read when the window closes. A
loss that is not finite then raises Diverged.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainables import batches, optim, precision
from trainables.evaluation import Evaluation, evaluate
from trainables.knob_columns import Seen
from trainables.live_bytes import storage_bytes
from trainables.plan import Plan
from trainables.reports import READY, Hear, Report, reporting, unheard
from trainables.resident import Resident
from trainables.state import Diverged, State, WarmUp, closed, prepare, watched
from trainables.stopwatch import Stopwatch, Window
from trainables.validation import longest_first
from trainables.witness import Witness
from trainables.workload import Config, augment_of, blocks, collate_of, phase_rounds, phases

__all__ = [
    "GOLDEN_RATIO",
    "Diverged",
    "Evaluation",
    "Plan",
    "State",
    "Timetable",
    "Window",
    "evaluate",
    "peaks",
    "prepare",
    "rehearse",
    "train",
]

_NO_CAP = 1 << 62
"""A cap that is never reached: bytes are counted throughout the run, and nothing raises."""
GOLDEN_RATIO = 0.6180339887498949
"""The fractional parts of its multiples are spread evenly over [0, 1), however few of them there are."""


def train(state: State, hear: Hear = unheard) -> None:
    """Trains until the horizon is reached; reports a Window whenever one closes and an Evaluation at every milestone.

    The first window is the first optimiser step alone. It includes the start of workers, the first use of kernels, the
    byte counter and the witness: drop it to get a steady throughput. Under compile and fp16 it is longer (`WarmUp`).

    A training that `hear` ends stands between two steps; the state stays usable. Raises Diverged, and whatever the
    workload raises. After an out-of-memory error, gradients and activations are freed with the traceback's frames.
    """
    with reporting(hear) as report:
        report(READY)
        with state.ranks.training(state):
            _steps(state, report)


def _steps(state: State, report: Report) -> None:
    resident, config, plan, knobs = state.resident, state.config, state.plan, state.config.knobs
    workload, device = resident.workload, state.device
    dataset = resident.dataset(config, "train")
    lengths = resident.lengths(config, "train") if knobs.length_bucketing else None
    loader = batches.Loader(dataset, config, collate_of(workload), augment_of(workload))
    transfer = batches.Transfer(knobs, device)
    timetable = Timetable(phases(workload, config), plan, knobs.batch_size, phase_rounds(workload, config))
    milestones = [m for m in plan.milestones if m > state.samples]
    watch = Stopwatch(device, loader.seconds, each_step=plan.each_step)
    warm_up = WarmUp(state.steps, knobs, state.scaler)
    state.witness = Witness(state.model, state.optimizer, device)
    with precision.checkpointed(blocks(workload, state.model), knobs.activation_checkpointing):
        model = precision.compiled(state.model, knobs)
        model.train()
        evaluated_at = max((one.samples for one in state.evaluations), default=0)
        if state.ranks.rank == 0 and any(evaluated_at < m <= state.samples for m in plan.milestones):
            report(evaluate(state, model))  # the checkpoint was written before it
            model.train()
        loss_sum = torch.zeros((), device=device)
        state.first_step_at = state.first_step_at or time.time()
        watch.restart()
        if batches.starts_anew(loader.loader):  # otherwise only the first epoch of a training starts workers
            watch.next_pass()
        while state.samples < plan.samples:
            count = batches.size_of(dataset)
            before = state.epoch * count
            phase_at = functools.partial(timetable.phase, before)
            todo = batches.plan_epoch(count, knobs, config.seed, state.epoch, lengths, phase_at)
            todo = todo[state.micro_batches_done :]
            parts = state.ranks.parts(todo)
            loaded = loader.epoch(parts)
            begins = True
            for micro, part, host_batch in zip(todo, parts, loaded, strict=True):
                if begins and not state.ranks.more():
                    return
                begins = micro.ends_batch
                watch.lap("data_wait")
                with watched(state, "transfer"):
                    batch = transfer(host_batch)
                watch.lap("transfer")
                if state.witness is not None:
                    state.witness.micro_batch(len(micro.indices), batches.tensors_of(host_batch))
                loss = _micro_step(state, model, batch, micro, part.share)
                # The loss is weighted by `share`. Undo that to get a sum over samples; other ranks count like this one.
                loss_sum += loss * (len(micro.indices) / (part.share or 1.0))
                watch.lap("forward_backward")
                watch.samples += len(micro.indices)
                watch.micro_steps += 1
                if not micro.ends_batch:
                    continue
                _optimizer_step(state, timetable)
                state.ranks.stepped(state.samples)
                watch.steps += 1
                watch.lap("optimizer")
                state.steps += 1
                if state.witness is not None:
                    is_sorted = batches.sorted_by_length(todo, lengths)
                    seen = {"sorted_by_length": is_sorted, "phase_rounds": timetable.rounds}
                    _keep_facts(state, {**loader.seen(loaded), **seen})
                at_milestone = bool(milestones) and state.samples >= milestones[0]
                over = state.samples >= plan.samples
                warmed_up = warm_up.ends(state.steps)
                full = warm_up.is_over(state.steps) and watch.elapsed_s() >= plan.window_s
                if at_milestone or over or warmed_up or full:
                    state.last_step_at = time.time()
                    report(closed(watch, loss_sum, state.samples))
                    loss_sum.zero_()
                    if at_milestone:
                        milestones = [m for m in milestones if m > state.samples]
                        if state.ranks.rank == 0:
                            report(evaluate(state, model))
                        model.train()
                    watch.restart()
                if over:
                    return
            state.epoch += 1
            state.micro_batches_done = 0
            watch.next_pass()


def _micro_step(state: State, model: nn.Module, batch: Any, micro: batches.MicroBatch, share: float) -> Tensor:
    """Runs `_forward_backward` and returns its loss; counts the samples of all ranks."""
    state.counts = state.capped and state.sparse.part(state.steps, micro.phase, batches.tensors_of(batch))
    # A model compiled while operators are counted would stay uncompiled for good, so a watched step is not compiled.
    called = state.model if state.counting or state.witness is not None else model
    with state.ranks.micro_step(ends_batch=micro.ends_batch):
        loss = _forward_backward(state, called, batch, share, micro.phase)
    if state.config.knobs.sync_every_step:
        with watched(state, "sync"):
            loss.item()
    state.micro_batches_done += 1
    state.samples += len(micro.indices)
    state.batch_samples = round(len(micro.indices) / micro.share) if micro.ends_batch else 0
    return loss


def peaks(resident: Resident, config: Config, micro_batch: int) -> tuple[int, int]:
    """Returns two peaks of live bytes of training on the `micro_batch` longest samples of the training split.

    The first is for batches of several micro-steps, which hold gradients beside their activations. The second is for
    batches of one micro-step: its passes need the bytes of the very first passes and the optimiser's state, unless the
    optimiser's step needs more.
    """
    state = prepare(resident, config, Plan(samples=1_000_000, cap_bytes=_NO_CAP))
    peaks_bytes: list[int] = []
    rehearse(state, micro_batch, went=lambda: peaks_bytes.append(state.peak_allocated_bytes))
    passes, step, several = peaks_bytes
    moments = (t for values in state.optimizer.state.values() for t in values.values() if isinstance(t, Tensor))
    return several, min(several, max(passes + storage_bytes(moments), step))


def rehearse(
    state: State,
    micro_batch: int,
    transfer: Callable[[Any], Any] | None = None,
    went: Callable[[], None] = lambda: None,
) -> None:
    """Reaches the peak memory of a long run: forward and backward passes, an optimiser step, and passes once more.

    During the second passes the optimiser's state and the gradients of earlier micro-batches exist, as at the peak of a
    long run. The samples are the `micro_batch` longest of the training split. `transfer` moves a batch from the host;
    default: to the device. `went` is called after the first passes, after the step, and at the end.
    """
    resident, config = state.resident, state.config
    workload, augment = resident.workload, augment_of(resident.workload)
    dataset, lengths = resident.dataset(config, "train"), resident.lengths(config, "train")
    samples = [dataset[i] for i in longest_first(dataset, lengths)[:micro_batch]]
    keys = torch.arange(len(samples))
    move = transfer or functools.partial(batches.to_device, device=state.device)

    def batch(phase: str) -> Any:
        collated = collate_of(workload)(samples)
        if augment is not None:
            on_device = config.knobs.device_augmentation  # otherwise the loader augments, before the transfer
            collated = batches.Keyed(collated, keys) if on_device else augment(collated, keys, config, phase)
        return move(collated)

    names = list(phases(workload, config))
    with precision.checkpointed(blocks(workload, state.model), config.knobs.activation_checkpointing):
        state.model.train()
        for phase in names:
            _forward_backward(state, state.model, batch(phase), 1.0, phase)
        went()
        with watched(state):
            state.optimizer.step()  # not through the scaler, which skips a step whose fp16 gradients overflow
            if state.average.means:
                state.average.follow(1)
        went()
        for phase in names:
            _forward_backward(state, state.model, batch(phase), 1.0, phase)
        went()


def _forward_backward(state: State, model: nn.Module, batch: Any, share: float, phase: str) -> Tensor:
    """Adds the gradients; returns the micro-batch's mean loss times its share of the batch, detached."""
    knobs = state.config.knobs
    with watched(state, "forward_backward"):
        if state.meter is not None and state.counting:
            # Gradients may have been made in parts that were not counted.
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            state.meter.adopt([*batches.tensors_of(batch), *gradients])
        if isinstance(batch, batches.Keyed):
            augment = augment_of(state.resident.workload)
            if augment is not None:
                batch = augment(batch.batch, batch.keys, state.config, phase)
                if state.witness is not None:
                    state.witness.augmented()
        with precision.kernels(knobs, state.device):
            with precision.autocast(knobs, state.device):
                loss = state.ranks.loss(state.resident.workload, model, batch) * share
            if knobs.compile != "off" and state.active and "compiled_graphs" not in state.active:
                state.active["compiled_graphs"] = precision.compiled_graphs(loss)
            state.scaler.scale(loss).backward()
    return loss.detach()


class Timetable:
    """The phases of a run, which come in turns: the phase of each sample, and the progress within the phase.

    There are `rounds` of them, fewer if the shortest phase would be shorter than a batch.
    """

    def __init__(self, shares: Mapping[str, float], plan: Plan, batch_size: int, rounds: int = 1) -> None:
        self._plan, self._batch_size = plan, batch_size
        self.rounds = max(1, min(rounds, int(plan.samples * min(shares.values()) / batch_size)))
        self._ends: list[tuple[str, float, float]] = []
        begin = 0.0
        for name, share in shares.items():
            self._ends.append((name, begin, share))
            begin += share

    def phase(self, before: int, start: int) -> str:
        """Returns the phase of the batch that begins after `before` + `start` samples of the run."""
        if self._plan.mixed_phases:
            number = (before + start) // self._batch_size
            return self._at(number * GOLDEN_RATIO % 1.0)[0]
        return self._at(self._within(before + start))[0]

    def progress(self, samples: float) -> float:
        """Returns the progress within the current phase after `samples` of the run, 0 to 1."""
        done = self._within(samples)
        _, begin, share = self._at(done)
        return min(1.0, (done - begin) / share)

    def _within(self, samples: float) -> float:
        """Returns the share of the current round that is over after `samples` of the run."""
        done = samples / self._plan.samples * self.rounds
        return max(0.0, done - min(int(done + 1e-9), self.rounds - 1))

    def _at(self, done: float) -> tuple[str, float, float]:
        passed = [phase for phase in self._ends if phase[1] <= done + 1e-9]
        return passed[-1]


def _optimizer_step(state: State, timetable: Timetable) -> None:
    knobs = state.config.knobs
    # Progress at the middle of the step, in samples: so neither the first nor the last step has rate 0.
    progress = timetable.progress(state.samples - state.batch_samples / 2)
    share = optim.schedule(state.resident.workload, progress, state.config)
    for group in state.optimizer.param_groups:
        group["lr"] = share * group["peak_lr"]
    state.counts = state.capped and state.sparse.whole(state.steps)
    with watched(state, "optimizer"):
        optim.hold_gradients(state.optimizer, state.scaler, knobs)
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=knobs.set_to_none and not precision.keeps_gradients(knobs))
    if state.average.means:
        with watched(state, "average"):
            state.average.follow(state.steps + 1)
    if state.meter is not None:
        state.sparse.stepped(state.steps, state.meter.live_bytes)


def _keep_facts(state: State, loading: Seen) -> None:
    """Stores the witness's facts and those of `loading` in `state.active`; drops the witness."""
    if state.witness is not None:
        shares = phases(state.resident.workload, state.config)
        state.active = {**state.witness.facts(), **loading, "phases": shares}
        state.witness = None
        knobs = state.config.knobs
        if (knobs.compile != "off" or knobs.cudnn_benchmark) and state.device.type == "cuda":
            # The watched step may need more memory than others: it was not compiled, and cuDNN tried its workspaces.
            torch.cuda.reset_peak_memory_stats(state.device)
