"""The work of a warm process: measure a footprint, probe, begin a trial. No Ray here."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
import traceback
from collections.abc import Mapping, Sequence

import torch

from trainables import garbage, kinds, loop, own_checks, precision, sanity, training, workload, workload_files
from trainables.batches import size_of
from trainables.knobs import Knobs, Scalar
from trainables.live_bytes import parameter_bytes
from trainables.loop_ranks import LoopGroup
from trainables.optim import state_bytes
from trainables.own_count import OwnResident, OwnState
from trainables.plan import Plan
from trainables.ram_cache import CacheLimits
from trainables.ranks import LOST, Group, part_size
from trainables.reports import READY, Event, Hear
from trainables.resident import Resident
from trainables.source import source_hash
from trainables.state import State
from trainables.stopwatch import Window
from tuning.journal.events import Timed
from tuning.memory import oom
from tuning.memory.measure import Footprint
from tuning.memory.oom import Outcome
from tuning.search import timing
from tuning.search.protocols import TrialState
from tuning.search.timing import SETTLE_S
from tuning.workers import dry_run, fingerprint, machine, user_code
from tuning.workers.device_facts import device_facts
from tuning.workers.device_memory import DeviceMemory, left_behind
from tuning.workers.peers import Peers
from tuning.workers.running_trial import Attempt, RunningTrial, Tell, to_the_end
from tuning.workers.windows import (
    SeenWorks,
    WindowReader,
    Works,
    micro_steps,
    pass_samples_of,
    speed,
    telemetry_of,
)
from tuning.workers.worker_config import (
    ChangedKnobs,
    Description,
    Following,
    RankEnd,
    Settled,
    Shrink,
    TrialOrder,
    Untrained,
    WorkerConfig,
)

RELOAD_S = 1.0
"""A data set that loads in less is loaded again, to see that it is the same each time."""
CACHE_FRAC = 0.7
"""The share of the free RAM that `ram_cache` may fill."""
LOADER_S, LOADER_FRAC = 120.0, 0.75
"""How long a loader's process may be silent, at most that share of `hang_s`: before its parent is taken for hung."""
PROBE_WINDOW_S = 0.4
"""The length of a probe's window: after each it is asked whether another is worth its time."""


class Session:
    """A workload loaded once, ready for any number of measurements and trials in this process."""

    def __init__(self, setting: WorkerConfig) -> None:
        self.setting = setting
        torch.set_num_threads(setting.threads)
        self.resident = training.resident_of(workload_files.load(setting.workload))
        if isinstance(self.resident, Resident):
            self.resident.cache_limits = CacheLimits(self._free_for_cache, setting.cache_s)
        self.table = workload.table_of(self.resident.workload)
        self._settled = False
        self._caches = setting.slots
        self._loading_s = math.inf
        self.telemetry = telemetry_of(setting.device)
        self.peers = Peers(setting)
        self.memory = DeviceMemory(setting.device, self.resident.meter)
        self.memory.limit(setting.cap_bytes)

    @property
    def contract(self) -> Resident:
        """Returns the loaded workload of the contract; raises WorkloadError for a custom loop."""
        if isinstance(self.resident, OwnResident):
            said = "has a loop of its own, which shows no data and no model"
            raise workload.WorkloadError(f"{self.setting.workload} {said}")
        return self.resident

    def _free_for_cache(self) -> float:
        return CACHE_FRAC * machine.available_bytes() / (self._caches * self.setting.ranks)

    def config(self, knobs: Mapping[str, Scalar], seed: int | None = None) -> workload.Config:
        """Returns the configuration of these knobs under the session's setting."""
        own = self.setting
        options, rows = dict(own.options), self.table
        silent_s = min(LOADER_S, LOADER_FRAC * own.hang_s)
        return workload.Config(Knobs.of(knobs, rows), options, own.seed if seed is None else seed, own.device, silent_s)

    def warm(self, knobs: Mapping[str, Scalar]) -> None:
        """Loads data and model, so that the first trial finds them; what is loaded is left out of later collections."""
        self.peers.start()
        config, begun = self.config(knobs), time.perf_counter()
        if not isinstance(self.resident, OwnResident):  # of which the module is all that is loaded
            self.resident.dataset(config, "train")
            self._loading_s = time.perf_counter() - begun
            self.resident.model(config)
        garbage.collect()
        gc.freeze()  # a collection after an OOM would otherwise walk the libraries' objects: 0.1 s and more

    def describe(self, knobs: Mapping[str, Scalar] | None = None) -> Description:
        """Returns what only a process with torch can tell: device, the workload's contract, sizes of data and model.

        The model is that of `knobs`, which the measurements that follow find loaded.
        """
        if isinstance(self.resident, OwnResident):
            return dry_run.described(self, self.resident, knobs or {})
        config = self.config({})
        parameters = list(self.resident.model(self.config(knobs or {})).parameters())
        return Description(
            outcome=Outcome.OK,
            parameters=dry_run.parameters_of(parameters),
            device=device_facts(self.setting.device),
            objectives=dict(self.resident.workload.objectives),
            train_samples=size_of(self.resident.dataset(config, "train")),
            val_samples=size_of(self.resident.dataset(config, "val")),
            baselines=workload.baselines(self.resident.workload, config),
            workload_sha256=source_hash(self.resident.workload),
            data_sha256=fingerprint.of_data([self.resident.dataset(config, split) for split in ("train", "val")]),
        )

    def sanity_check(self, knobs: Mapping[str, Scalar]) -> Untrained:
        """Returns the objectives before any step if the workload's hooks do what the loop asks of them; raises what is
        wrong.

        There are none of a custom loop, which `describe` has tried whole. A lack of memory is
        left to the measurements, which know what to do about it.
        """
        config = self.config(knobs)
        if isinstance(self.resident, OwnResident):  # it was tried whole to be described
            return Untrained(outcome=Outcome.OK)
        if self._loading_s < RELOAD_S:
            self._compare_reloaded(config)
        try:
            sanity.check(self.resident, config)
        except Exception as error:  # whatever a user's code raises
            if oom.classify(error) in (Outcome.CRASH, Outcome.DATA) or oom.fault(error) is oom.ENGINE:
                raise
            self.recover(error)
            return Untrained(outcome=Outcome.OK)
        return Untrained(outcome=Outcome.OK, values=self._untrained(config))

    def _untrained(self, config: workload.Config) -> dict[str, float]:
        """Returns what the model reaches before any step, nothing where it cannot be evaluated untrained."""
        try:
            return sanity.untrained(self.contract, config.with_knobs(num_workers=0, ram_cache=False, compile="off"))
        except Exception as error:  # whatever a user's code raises: it did not in the step that was tried
            self.recover(error)
            return {}

    def _compare_reloaded(self, config: workload.Config) -> None:
        """Raises HookFailed where a second call of `dataset` returns other samples than the first."""
        first = self.contract.dataset(config, "train")
        again = self.contract.workload.dataset(config, "train")
        sizes = size_of(first), size_of(again)
        if sizes[0] != sizes[1]:
            said = f"returned {sizes[0]} samples, and then {sizes[1]}"
        elif fingerprint.of_data([first]) != fingerprint.of_data([again]):
            said = "returned other samples, or another order, at its second call"
        else:
            return
        said += ": it must return the same at every call, or trials are compared on different data (a seed is missing?)"
        raise workload.HookFailed("dataset(config, 'train')", said)

    def kinds(self, knobs: Mapping[str, Scalar], changes: Mapping[str, Scalar]) -> ChangedKnobs:
        """Returns which knobs of `changes` change what is learned; what it fails of may be the small batch alone."""
        changed, said, untold = dict[str, str](), "", list[str]()
        try:
            changed = kinds.differing(self.resident, self.config(knobs), changes, untold)
        except Exception as error:  # whatever a user's code raises; the measurements that follow tell it
            said = user_code.in_a_line(error)
            self.recover(error)
        return ChangedKnobs(outcome=Outcome.OK, changed=changed, message=said, untold=tuple(untold))

    def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> Footprint:
        """Returns the bytes that a configuration holds, and its peak for each micro-batch of the longest samples.

        It is measured up to the first that does not fit.
        """
        config, found = self.config(knobs), Footprint(outcome=Outcome.OK)
        for micro_batch in micro_batches:
            try:
                if not found.parameter_bytes:  # the model alone may be too large
                    found = self._sizes(config)
                self._clear()
                ranks = self.setting.ranks
                peak_bytes, alone_bytes = loop.peaks(self.contract, config, part_size(micro_batch, ranks))
                if ranks > 1:  # DDP's buckets hold gradients all the time, beside those that are summed up
                    peak_bytes, alone_bytes = peak_bytes + found.gradient_bytes, peak_bytes
                found = dataclasses.replace(
                    found,
                    measured=(*found.measured, (micro_batch, peak_bytes)),
                    measured_alone=(*found.measured_alone, (micro_batch, alone_bytes)),
                )
            except Exception as error:  # whatever a user's code makes of it
                if oom.classify(error) not in (Outcome.OOM, Outcome.HOST_OOM):
                    raise
                found = dataclasses.replace(found, message=str(error))
                self.recover(error)
                break
        return found

    def _sizes(self, config: workload.Config) -> Footprint:
        model = self.contract.model(config)
        return Footprint(
            outcome=Outcome.OK,
            parameter_bytes=parameter_bytes(model),
            gradient_bytes=parameter_bytes(model, trainable_only=True),
            optimizer_bytes=state_bytes(model, config.knobs),
        )

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float = 0.0) -> Timed:
        """Returns the speed of the knobs: windows until `time_s` is spent.

        The first step is dropped. Stops sooner once the knobs cannot beat `best_samples_per_s` (`timing.ends`).
        """
        start, found = time.perf_counter(), Timed(outcome=Outcome.OK)
        plan = dataclasses.replace(self._endless(PROBE_WINDOW_S), each_step=True)
        self._clear()
        with Attempt(self, plan.cap_bytes) as attempt:
            found = self._timed(knobs, plan, start, time_s, best_samples_per_s)
        found = dataclasses.replace(found, **attempt.failure, wall_s=time.perf_counter() - start)
        left = "" if attempt.is_poisoned else self.settled(plan.cap_bytes).retire
        return dataclasses.replace(found, retire=found.retire or left)

    def _timed(
        self, knobs: Mapping[str, Scalar], plan: Plan, start: float, time_s: float, best_samples_per_s: float
    ) -> Timed:
        """Returns what `probe` does; raises what the training raises."""
        ranks, own, found = self.setting.ranks, self.config(knobs).knobs, Timed(outcome=Outcome.OK)
        if ranks > 1:  # a batch of one micro-step does not tell what gradients take to be averaged, once a batch
            knobs = {**knobs, "batch_size": max(own.batch_size, 2 * own.micro_batch_size)}
        state = training.prepare(self.resident, self.config(knobs, self.setting.seed), plan)
        works = Works(state) if isinstance(state, State) else SeenWorks(state)
        is_outside = isinstance(state, OwnState) and state.workload.is_outside
        windows, steps, starts_s = list[Window](), list[timing.MicroStep](), list[float]()

        def take(window: Window) -> bool:
            nonlocal found
            windows.append(window)
            steps.extend(micro_steps(window, works.before(window.micro_steps)))
            if not steps:  # so far only an epoch's last batch, smaller than the others
                return False
            pass_samples = pass_samples_of(state)
            known = timing.estimate(timing.once_a_batch(steps) if ranks > 1 else steps, works.mean)
            sizes = min(own.batch_size, works.samples), own.micro_batch_size
            found = speed(windows, starts_s, pass_samples)
            known = dataclasses.replace(known, pass_s=found.pass_s, pass_samples=pass_samples)
            if works.varies or is_outside:  # a micro-step has no size that the seconds could be of
                known = timing.at_rate(found.samples_per_s or 0.0, *sizes)
            rate = known.samples_per_s(*sizes)
            spent_s, window_s = time.perf_counter() - start, max(w.wall_s for w in windows)
            end = timing.ends(rate, best_samples_per_s, spent_s=spent_s, window_s=window_s, time_s=time_s)
            known_s = dataclasses.asdict(known)
            found = dataclasses.replace(found, **known_s, samples_per_s=rate, end=end or "the loop ended")
            return bool(end)

        try:
            self.run(state, WindowReader(self.telemetry, take, starts_s))
        except torch.OutOfMemoryError as error:  # a probe has no end, and may train on more samples than a training
            if not (steps and isinstance(state, OwnState) and own_checks.growth(state.levels)):
                raise
            self.recover(error)
        if not steps:  # a custom loop ended by itself
            said = "train(run) ended before its speed was known"
            found = dataclasses.replace(found, outcome=Outcome.NO_RESULT, message=said)
        found = self._with_facts(found, state)
        grows = isinstance(state, OwnState) and own_checks.growth(state.levels)
        return dataclasses.replace(found, peak_allocated_bytes=None) if grows else found  # it is no knob's

    def _with_facts(self, found: Timed, state: training.AnyState) -> Timed:
        """Returns a speed with what else was measured of its training."""
        telemetry, peak_bytes = self.telemetry.summary(), state.peak_allocated_bytes
        return dataclasses.replace(found, peak_allocated_bytes=peak_bytes, active=state.active, telemetry=telemetry)

    def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> Timed:
        """Returns the speed over at least `window_s`; `seed` chooses the batches.

        The first step and the half second after it are dropped: allocators and caches still hold another configuration,
        and windows that began at once came out 8 % below the same configuration's long training.
        """
        start, found = time.perf_counter(), Timed(outcome=Outcome.OK)
        plan = self._endless(min(SETTLE_S, window_s))
        self._clear()
        with Attempt(self, plan.cap_bytes) as attempt:
            # The model's seed stays the session's: a new one would rebuild the model, which the window is not about.
            state = training.prepare(self.resident, self.config(knobs, self.setting.seed), plan)
            windows, starts_s = list[Window](), list[float]()

            def take(window: Window) -> bool:
                windows.append(window)
                return sum(w.wall_s for w in windows) >= window_s

            self.run(state, WindowReader(self.telemetry, take, starts_s, dropped=2), epoch=1 + seed)
            found = self._with_facts(speed(windows, starts_s, pass_samples_of(state)), state)
        return dataclasses.replace(found, **attempt.failure, wall_s=time.perf_counter() - start)

    def run(self, state: training.AnyState, hear: Hear, epoch: int = 0) -> None:
        """Runs a training from where it is, or from an epoch; the processes of the other ranks take part in it."""

        def heard(event: Event) -> bool | None:
            if event == READY:
                state.epoch = epoch or state.epoch
                self._gather(state)
            return hear(event)

        training.train(state, heard)

    def _gather(self, state: training.AnyState) -> None:
        if self.peers:
            knobs, seed, silent_s = state.config.knobs.as_dict(), state.config.seed, state.config.loader_timeout_s
            threads, caches = torch.get_num_threads(), self._caches
            order = Following(knobs, seed, state.plan, state.epoch, threads, silent_s, caches)
            state.ranks = self.peers.group(order, self._group)

    @property
    def _group(self) -> type[Group]:
        return LoopGroup if isinstance(self.resident, OwnResident) else Group

    def follow(self, order: Following) -> RankEnd:
        """Takes part in a training of several processes, until that of rank 0 ends it; returns how it fared."""
        self._clear()
        self.use_threads(order.threads)
        self._caches = order.caches * order.count
        with Attempt(self, order.plan.cap_bytes) as attempt:
            self.memory.limit(order.plan.cap_bytes)
            group = self._group(order.rank, order.count, order.rendezvous, torch.device(self.setting.device))
            try:
                self._follow(order, group)
            except BaseException:
                group.ready(is_so=False)
                raise
            finally:
                group.leave()
        found = dataclasses.replace(RankEnd(outcome=Outcome.OK, rank=order.rank), **attempt.failure)
        if found.outcome != Outcome.OK:  # the others wait for this process, until it ends
            of_another = found.outcome == Outcome.CRASH and bool(LOST.search(found.message))
            why = "a training of several processes was broken off"
            return dataclasses.replace(found, retire=why, of_another=of_another)
        return dataclasses.replace(found, retire=self.settled(order.plan.cap_bytes).retire)

    def _follow(self, order: Following, group: Group) -> None:
        config = dataclasses.replace(self.config(order.knobs, order.seed), loader_timeout_s=order.silent_s)
        state = training.prepare(self.resident, config, order.plan)
        state.ranks = group

        def heard(event: Event) -> None:
            if event == READY:
                state.epoch = order.epoch

        training.train(state, heard)

    def trial(self, order: TrialOrder, pause_after_s: float = math.inf, tell: Tell = to_the_end) -> TrialState:
        """Returns the last state of a trial (`RunningTrial.run`)."""
        self._clear()
        if self.setting.device == "cuda":
            torch.cuda.empty_cache()
        self.use_threads(order.threads)
        self._caches = 1  # others that have begun have taken theirs
        return RunningTrial(self, order, tell).run(pause_after_s)

    def require_own_report(self, found: TrialState) -> None:
        """Raises NotIndependent if what a training reports is kept for the next (`dry_run.require_own_report`)."""
        if isinstance(self.resident, OwnResident) and found.values and self.setting.ranks == 1:
            dry_run.require_own_report(self, self.resident, found)

    def train(self, knobs: Mapping[str, Scalar], plan: Plan, seed: int, shrink: Shrink = "all") -> TrialState:
        """Returns the result of a training, which tells of nothing in between."""
        return self.trial(TrialOrder("", knobs, seed, plan, self.setting.threads, shrink))

    def use_threads(self, count: int) -> None:
        """Gives torch's operators so many threads from here on."""
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)

    def recover(self, error: BaseException) -> None:
        """Frees what a failed step holds: its frames and the allocator's cache; the next trial drops the gradients."""
        for link in oom.chain(error, contexts=True):
            traceback.clear_frames(link.__traceback__)
        garbage.collect()
        if self.setting.device == "cuda" and not oom.poisoned(error):
            torch.cuda.empty_cache()

    def settled(self, cap_bytes: int | None) -> Settled:
        """Returns what the process holds now that a trial is over, and as `retire` why it should run no other.

        Only the model belongs to the process; the rest has to be gone, after a collection at the latest.
        """
        precision.forget_graphs()  # whose pools are no bytes of the next trial
        own = self._clear()
        if isinstance(self.resident, OwnResident) and self.resident.kept_bytes is None:
            own = self.resident.kept_bytes = self.memory.held_bytes()
        reserved = self.memory.reserved_bytes()
        # By the tensors: what the allocator's segments have beside them is there from loading on.
        left = left_behind(own, self.memory.held_bytes(), self.memory.limit_bytes(cap_bytes))
        return Settled(own, reserved, left)

    def _clear(self) -> int:
        """Returns the bytes of the model, after a collection where more is held.

        An optimiser is in a circle with its hooks: what a run held would otherwise be part of the next one's peak.
        """
        own = self.resident.held_bytes()
        if self.memory.held_bytes() > own:
            garbage.collect()
            if not self._settled:  # what torch imported at its first step: 118,000 objects, 65 ms a collection
                gc.freeze()  # no sooner: what a run still holds when it fails would never be collected
                self._settled = True
        return own

    def _endless(self, window_s: float) -> Plan:
        return Plan(samples=1_000_000_000, window_s=window_s, cap_bytes=self.setting.cap_bytes, mixed_phases=True)
