"""One warm process's work, as plain values: measure a footprint, probe, begin a trial. No Ray here."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainables import garbage, kinds, loop, precision, sanity, training, workload, workload_files
from trainables.batches import size_of
from trainables.knobs import Knobs, Scalar
from trainables.live_bytes import parameter_bytes
from trainables.loop_ranks import LoopGroup
from trainables.optim import state_bytes
from trainables.own_loop import OwnResident
from trainables.plan import Plan
from trainables.ram_cache import CacheLimits
from trainables.ranks import LOST, Group, part_size
from trainables.resident import Resident
from trainables.source import source_hash
from trainables.stopwatch import Window
from tuning.memory import oom
from tuning.memory.oom import Outcome
from tuning.search import timing
from tuning.search.timing import SETTLE_S
from tuning.workers import dry_run, fingerprint, machine, user_code
from tuning.workers.device_facts import device_facts
from tuning.workers.device_memory import DeviceMemory, left_behind
from tuning.workers.peers import Peers
from tuning.workers.running_trial import Attempt, RunningTrial
from tuning.workers.windows import micro_steps, pass_samples_of, read_windows, speed, telemetry_of, works_of
from tuning.workers.worker_config import Following, Shrink, TrialOrder, WorkerConfig

RELOAD_S = 1.0
"""A data set that loads in less is loaded again, to see that it is the same each time."""
CACHE_FRAC = 0.7
"""Of the free RAM, what `ram_cache` may fill."""
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
        self._trial: RunningTrial
        self.telemetry = telemetry_of(setting.device, is_alone=setting.ranks * setting.slots == 1)
        self.peers = Peers(setting)
        self.memory = DeviceMemory(setting.device, self.resident.meter)
        self.memory.limit(setting.cap_bytes)

    @property
    def contract(self) -> Resident:
        """What is loaded of a workload that keeps the contract; raises WorkloadError for a loop of its own."""
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

    def describe(self, knobs: Mapping[str, Scalar] | None = None) -> dict[str, Any]:
        """Returns what only a process with torch can tell: device, the workload's contract, sizes of data and model.

        The model is that of `knobs`, which the measurements that follow find loaded.
        """
        if isinstance(self.resident, OwnResident):
            return dry_run.described(self, self.resident, knobs or {})
        config = self.config({})
        parameters = list(self.resident.model(self.config(knobs or {})).parameters())
        return {
            "parameters": {
                "total": sum(p.numel() for p in parameters),
                "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            },
            "device": device_facts(self.setting.device),
            "objectives": dict(self.resident.workload.objectives),
            "train_samples": size_of(self.resident.dataset(config, "train")),
            "val_samples": size_of(self.resident.dataset(config, "val")),
            "baselines": workload.baselines(self.resident.workload, config),
            "workload_sha256": source_hash(self.resident.workload),
            "data_sha256": fingerprint.of_data([self.resident.dataset(config, split) for split in ("train", "val")]),
        }

    def sanity_check(self, knobs: Mapping[str, Scalar]) -> dict[str, Any]:
        """Returns as `untrained` the objectives before any step, where the workload's hooks do what the loop asks of
        them; raises what is wrong.

        It is empty where they are not defined, and of a custom loop, which `describe` has tried whole. What the
        machine lacks, such as memory, is left to the measurements, which know what to do about it.
        """
        config = self.config(knobs)
        if isinstance(self.resident, OwnResident):  # it was tried whole to be described
            return {"untrained": {}}
        if self._loading_s < RELOAD_S:
            self._compare_reloaded(config)
        try:
            sanity.check(self.resident, config)
        except Exception as error:  # whatever a user's code raises
            if oom.classify(error) in (Outcome.CRASH, Outcome.DATA) or oom.fault(error) is oom.ENGINE:
                raise
            self.recover(error)
            return {"untrained": {}}
        return {"untrained": self._untrained(config)}

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

    def kinds(self, knobs: Mapping[str, Scalar], changes: Mapping[str, Scalar]) -> dict[str, Any]:
        """Returns `changed`: the knobs of `changes` that change what is learned, each with the reason in words.

        `message` says why that could not be measured, "" where it could: it may be of so small a batch alone. `untold`
        are those whose change cannot be told from the random numbers that a step draws.
        """
        changed, untold = dict[str, str](), list[str]()
        try:
            changed = kinds.differing(self.resident, self.config(knobs), changes, untold)
        except Exception as error:  # whatever a user's code raises; the measurements that follow tell it
            said = user_code.in_a_line(error)
            self.recover(error)
            return {"changed": changed, "message": said, "untold": untold}
        return {"changed": changed, "message": "", "untold": untold}

    def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> dict[str, Any]:
        """Returns parameter, gradient and optimiser bytes, and the measured peak for each micro-batch.

        The samples are the longest of the training split. `measured` stops at the first that does not fit;
        `measured_alone` are the peaks of batches of one micro-step.
        """
        config = self.config(knobs)
        sizes = dict.fromkeys(("parameter_bytes", "gradient_bytes", "optimizer_bytes"), 0)
        measured: list[tuple[int, int]] = []
        alone: list[tuple[int, int]] = []
        message = ""
        for micro_batch in micro_batches:
            try:
                if not sizes["parameter_bytes"]:  # the model alone may be too large
                    sizes = self._sizes(config)
                self._clear()
                ranks = self.setting.ranks
                peak_bytes, alone_bytes = loop.peaks(self.contract, config, part_size(micro_batch, ranks))
                if ranks > 1:  # DDP's buckets hold gradients all the time, beside those that are summed up
                    peak_bytes, alone_bytes = peak_bytes + sizes["gradient_bytes"], peak_bytes
                measured.append((micro_batch, peak_bytes))
                alone.append((micro_batch, alone_bytes))
            except Exception as error:  # whatever a user's code makes of it
                if oom.classify(error) not in (Outcome.OOM, Outcome.HOST_OOM):
                    raise
                message = str(error)
                self.recover(error)
                break
        return {
            **sizes,
            "measured": measured,
            "measured_alone": alone,
            "message": message,
        }

    def _sizes(self, config: workload.Config) -> dict[str, int]:
        model = self.contract.model(config)
        return {
            "parameter_bytes": parameter_bytes(model),
            "gradient_bytes": parameter_bytes(model, trainable_only=True),
            "optimizer_bytes": state_bytes(model, config.knobs),
        }

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float = 0.0) -> dict[str, Any]:
        """Returns the speed of the knobs: windows until `time_s` is spent.

        The first step is dropped. Stops sooner once the knobs cannot beat `best_samples_per_s` (`timing.ends`).
        """
        start = time.perf_counter()
        found: dict[str, Any] = {"windows": [], "samples_per_s": None}
        plan = dataclasses.replace(self._endless(PROBE_WINDOW_S), each_step=True)
        self._clear()
        with Attempt(self, found, plan.cap_bytes):
            ranks, own = self.setting.ranks, self.config(knobs).knobs
            if ranks > 1:  # a batch of one micro-step does not tell what gradients take to be averaged, once a batch
                knobs = {**knobs, "batch_size": max(own.batch_size, 2 * own.micro_batch_size)}
            state = self.prepared(knobs, plan, self.setting.seed)
            works, pass_samples = works_of(state), pass_samples_of(state)
            windows: list[Window] = []
            steps, starts_s, end = list[timing.MicroStep](), list[float](), ""
            for window in read_windows(state, self.telemetry, starts_s):
                windows.append(window)
                steps += micro_steps(window, works.before(state, window.micro_steps))
                if not steps:  # so far only an epoch's last batch, smaller than the others
                    continue
                known = timing.estimate(timing.once_a_batch(steps) if ranks > 1 else steps, works.mean)
                sizes = min(own.batch_size, works.samples), own.micro_batch_size
                whole = speed(windows, starts_s, pass_samples)
                known = dataclasses.replace(known, pass_s=whole["pass_s"], pass_samples=pass_samples)
                if works.varies:  # a micro-step has no size that the seconds could be of
                    known = timing.at_rate(whole["samples_per_s"], *sizes)
                rate = known.samples_per_s(*sizes)
                spent_s, window_s = time.perf_counter() - start, max(w.wall_s for w in windows)
                if end := timing.ends(rate, best_samples_per_s, spent_s=spent_s, window_s=window_s, time_s=time_s):
                    break
            if not steps:  # a custom loop ended by itself
                found.update(outcome=str(Outcome.NO_RESULT), message="train(run) ended before its speed was known")
            else:
                own_end = end or "the loop ended"
                found.update({**whole, **dataclasses.asdict(known)}, samples_per_s=rate, end=own_end)
            found.update(peak_allocated_bytes=state.peak_allocated_bytes, active=state.active)
            found["telemetry"] = self.telemetry.summary()
        found["wall_s"] = time.perf_counter() - start
        return found

    def window(self, knobs: Mapping[str, Scalar], window_s: float, seed: int) -> dict[str, Any]:
        """Returns the speed over at least `window_s`; `seed` chooses the batches.

        The first step and the half second after it are dropped: allocators and caches still hold another configuration,
        and windows that began at once came out 8 % below the same configuration's long training.
        """
        start = time.perf_counter()
        found: dict[str, Any] = {"samples_per_s": None}
        plan = self._endless(min(SETTLE_S, window_s))
        self._clear()
        with Attempt(self, found, plan.cap_bytes):
            # The model's seed stays the session's: a new one would rebuild the model, which the window is not about.
            state = self.prepared(knobs, plan, self.setting.seed, epoch=1 + seed)
            windows, starts_s, pass_samples = list[Window](), list[float](), pass_samples_of(state)
            for window in read_windows(state, self.telemetry, starts_s, dropped=2):
                windows.append(window)
                if sum(w.wall_s for w in windows) >= window_s:
                    break
            found.update(speed(windows, starts_s, pass_samples), active=state.active)
            found["peak_allocated_bytes"] = state.peak_allocated_bytes
            found["telemetry"] = self.telemetry.summary()
        found["wall_s"] = time.perf_counter() - start
        return found

    def prepared(self, knobs: Mapping[str, Scalar], plan: Plan, seed: int, epoch: int = 0) -> training.AnyState:
        """Returns a training that begins with that epoch; the processes of the other ranks are in it, too."""
        state = training.prepare(self.resident, self.config(knobs, seed), plan)
        state.epoch = epoch or state.epoch
        try:
            self.together(state)
        except BaseException:
            training.let_go(state)
            raise
        return state

    def together(self, state: training.AnyState) -> None:
        """Has the processes of the other ranks take part in a training from where it is; there may be none."""
        if self.peers:
            knobs, seed, silent_s = state.config.knobs.as_dict(), state.config.seed, state.config.loader_timeout_s
            threads, caches = torch.get_num_threads(), self._caches
            order = Following(knobs, seed, state.plan, state.epoch, threads, silent_s, caches)
            state.ranks = self.peers.group(order, self._group)

    @property
    def _group(self) -> type[Group]:
        return LoopGroup if isinstance(self.resident, OwnResident) else Group

    def follow(self, order: Following) -> dict[str, Any]:
        """Takes part in a training of several processes, until that of rank 0 ends it; returns how it fared."""
        found: dict[str, Any] = {}
        self._clear()
        self.use_threads(order.threads)
        self._caches = order.caches * order.count
        with Attempt(self, found, order.plan.cap_bytes):
            self.memory.limit(order.plan.cap_bytes)
            group = self._group(order.rank, order.count, order.rendezvous, torch.device(self.setting.device))
            try:
                try:
                    config = dataclasses.replace(self.config(order.knobs, order.seed), loader_timeout_s=order.silent_s)
                    state = training.prepare(self.resident, config, order.plan)
                except BaseException:
                    group.ready(is_so=False)
                    raise
                state.epoch, state.ranks = order.epoch, group
                for _ in training.train(state):
                    pass
                del state  # or its optimiser counts as what the process keeps
            finally:
                group.leave()
        if found["outcome"] != Outcome.OK:  # the others wait for this process, until it ends
            of_another = found["outcome"] == Outcome.CRASH and bool(LOST.search(found["message"]))
            return {**found, "retire": "a training of several processes was broken off", "of_another": of_another}
        return {**found, **self.settled(order.plan.cap_bytes)}

    def begin(self, order: TrialOrder) -> dict[str, Any]:
        """Takes the next trial, for one who is in another process and cannot hold it."""
        self._clear()
        if self.setting.device == "cuda":
            torch.cuda.empty_cache()
        self.use_threads(order.threads)
        self._trial = self.trial(order.knobs, order.plan, order.seed, shrink=order.shrink)
        return {}

    def advance(self, pause_after_s: float) -> dict[str, Any]:
        """Returns `RunningTrial.advance` of the trial that was begun."""
        return self._trial.advance(pause_after_s)

    def finish(self) -> dict[str, Any]:
        """Returns `RunningTrial.end` of the trial that was begun."""
        return self._trial.end()

    def trial(self, knobs: Mapping[str, Scalar], plan: Plan, seed: int, *, shrink: Shrink = "all") -> RunningTrial:
        """Returns a trial that has not begun; `shrink` lets it begin again with system knobs that need less memory.

        Those are half the micro-batch after an OOM, and fewer loader processes where those failed (`oom.retreat`); with
        "loader" only the latter, with "" none. A RAM cache that there is no room for is left out with any.
        """
        self._caches = 1  # others that have begun have taken theirs
        return RunningTrial(self, dict(knobs), plan, seed, shrink)

    def use_threads(self, count: int) -> None:
        """Gives torch's operators so many threads from here on."""
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)

    def train(self, knobs: Mapping[str, Scalar], plan: Plan, seed: int) -> dict[str, Any]:
        """Returns the result of a whole trial."""
        self.use_threads(self.setting.threads)
        trial = self.trial(knobs, plan, seed)
        while not (result := trial.advance())["done"]:
            pass
        return result

    def recover(self, error: BaseException) -> None:
        """Frees what a failed step holds: its frames and the allocator's cache; the next trial drops the gradients."""
        for link in oom.chain(error, contexts=True):
            traceback.clear_frames(link.__traceback__)
        garbage.collect()
        if self.setting.device == "cuda" and not oom.poisoned(error):
            torch.cuda.empty_cache()

    def settled(self, cap_bytes: int | None) -> dict[str, Any]:
        """Returns what the process holds now that a trial is over, and as `retire` why it should run no other, or "".

        What belongs to the process is its model; the rest has to be gone, after a collection at the latest.
        """
        precision.forget_graphs()  # whose pools are no bytes of the next trial
        own = self._clear()
        if isinstance(self.resident, OwnResident) and self.resident.kept_bytes is None:
            own = self.resident.kept_bytes = self.memory.held_bytes()
        reserved = self.memory.reserved_bytes()
        # By the tensors: what the allocator's segments have beside them is there from loading on.
        left = left_behind(own, self.memory.held_bytes(), self.memory.limit_bytes(cap_bytes))
        return {"own_bytes": own, "held_bytes": reserved, "retire": left}

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
