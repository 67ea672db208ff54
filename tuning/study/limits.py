"""Limits on the device and the time that the trials of a study may take."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from typing import Any

from trainables.knobs import Scalar
from tuning.config.choices import BEFORE, PLAIN
from tuning.config.schema import PLANNED_TRIALS, StudyConfig
from tuning.journal.events import StudyRecord
from tuning.journal.records import Journal
from tuning.memory import groups
from tuning.memory.oom import Outcome
from tuning.report.format import duration, plural
from tuning.search import confirm
from tuning.search.probe import PROBE_FRAC, probes_s
from tuning.search.protocols import TrialPlan
from tuning.search.pruner import milestones
from tuning.search.race import LEAST_SEEDS
from tuning.search.scheduler import SearchTerms
from tuning.search.throughput import Probed, Speeds, group_of, probed, suits
from tuning.search.timeplan import TimePlan, planned
from tuning.workers import machine, slots

PREDICT_S = 60.0
"""The most that tracing the configurations of a space may take beside reading the data."""
RAM_FRAC = 0.8
"""The share of the free RAM that trials on a CPU without a card's cap may be predicted to take together."""
EXPORT_S = 3.0
"""Kept for what comes after the last measurement: the report and its figures, 1.1 s on two quiet cores."""
ENOUGH_TRIALS = 8
"""Trials that a study should have time for, where more time is asked for."""
FEWEST_STEPS = 50
"""The fewest optimiser steps, at the batch size that is the default, that are chosen by time.

Trials of 2 to 23 steps learned nothing (docs/log/newcomer.md).
"""
MOST_EPOCHS = 100
"""The most epochs that are chosen by time, where the file does not say how long it is trained today."""
LONG_S = 12 * 3600.0
"""A search without a limit that takes so long is worth a word before it begins."""
REFERENCE_FRAC = 1 / 6
"""The most of the search's time that training the reference takes, if the time chooses how long a trial is.

It is trained again to confirm, beside the pick, in a time of half of the search's.
"""


class Limits:
    """Bytes, cores, samples and seconds, from the configuration and what the records say so far.

    `facts` is the `study` record; `began` the monotonic time at which the study would have begun in one go, without
    the hours between its sessions; `free_bytes` what others left of each of the `devices`, None where that is unknown.
    `cores` and `threads` are those of the machine that has them, None for this one.
    """

    def __init__(
        self,
        config: StudyConfig,
        facts: StudyRecord,
        journal: Journal,
        began: float,
        free_bytes: int | None = None,
        devices: int = 1,
        cores: int | None = None,
        threads: int | None = None,
    ) -> None:
        self.config, self._facts, self._journal = config, facts, journal
        self._began, self._free_bytes, self._devices = began, free_bytes, devices
        self._cores, self._threads = cores, threads
        self._ram_bytes: int | None = None

    @property
    def ends_at(self) -> float:
        """Returns when measuring is over, on the monotonic clock: the report is to be written within search.max_time.

        Infinity without a limit.
        """
        limit_s = self.config.search.max_time_s
        return math.inf if limit_s is None else self._began + limit_s - EXPORT_S

    def left_s(self) -> float:
        """Returns the seconds until then."""
        return self.ends_at - time.monotonic()

    def probe_s(self) -> float:
        """Returns the seconds that all probes may take."""
        return probes_s(self.config, self.left_s())

    def predict_s(self) -> float:
        """Returns the seconds that predicting memory may take; what is not predicted by then is measured.

        The process that traces reads the data as the one that measures did: what that took is counted twice.
        """
        return min(PREDICT_S + 2 * self._facts.startup_s, max(1.0, PROBE_FRAC * self.left_s()))

    def passed_s(self) -> float:
        """Returns the seconds that the study has taken, earlier sessions included."""
        return time.monotonic() - self._began

    def cap_bytes(self) -> int:
        """Returns what one trial that has the device to itself may take."""
        card = self.config.card
        if card.device == "cuda":
            memory_bytes = int(self._facts.device["memory_bytes"])
            own = memory_bytes - card.reserve_bytes if card.cap_bytes is None else card.cap_bytes
            return own if self._free_bytes is None else min(own, self._free_bytes)
        if card.cap_bytes is not None:
            return card.cap_bytes
        if self._ram_bytes is None:  # once: while trials run, less is free
            free_bytes = machine.available_bytes() if self._free_bytes is None else self._free_bytes
            self._ram_bytes = int(free_bytes * RAM_FRAC) // self.config.devices_per_trial
        return self._ram_bytes

    def plan(self) -> TrialPlan:
        """Returns how every trial is run: its samples, rungs, and its slot. On a card it takes the probes to say."""
        config, budget, ranks = self.config, self.config.budget, self.config.devices_per_trial
        cores = max(1, (self._cores or machine.cores()) // ranks)
        samples = self.horizon()
        first = max(1, round(samples * budget.rungs.first_frac))
        asked = config.concurrency if isinstance(config.concurrency, int) else None
        card_bytes, cuda = self.cap_bytes(), config.card.device == "cuda"
        if cuda:
            count = slots.over_cards(asked, self._devices) if asked else self._devices * self._slots_a_card(cores)
        else:
            count = asked or 1  # two at once on two cores found no better picks (docs/log/sampler.md)
        a_device = math.ceil(count / self._devices)
        cap_bytes, alone_bytes = None, None
        if cuda and (a_device > 1 or config.card.cap_bytes is not None):
            model_bytes = 4 * int(self._facts.parameters.get("total") or 0)
            cap_bytes = slots.share_bytes(card_bytes, a_device)
            alone_bytes = slots.alone_bytes(card_bytes, a_device, model_bytes)
        elif not cuda and config.card.cap_bytes is not None:
            cap_bytes, alone_bytes = card_bytes // count, card_bytes
        # Else trials share the machine's own memory.
        room_bytes = card_bytes // count if not cuda and config.card.cap_bytes is None and count > 1 else None
        return TrialPlan(
            samples=samples,
            milestones=(*milestones(first, samples, budget.rungs.eta), samples),
            shrink=self._can_shrink(),
            concurrency=count,
            threads=max(1, min((self._threads or machine.threads()) // ranks, cores // count)),
            devices=self._devices,
            cap_bytes=cap_bytes,
            alone_bytes=alone_bytes,
            room_bytes=room_bytes,
            deadline=self._cut_at(),
        )

    def _can_shrink(self) -> bool:
        """Returns whether a smaller micro-batch changes anything: not if a custom loop never reads it."""
        asked = self._facts.asked
        return asked is None or "micro_batch_size" in asked

    def horizon(self) -> int:
        """Returns the samples of a trial that is never stopped, as the journal has it or the budget says.

        If that is "auto", all trials one after the other take the time of the search, by the speeds that were probed:
        in whole epochs, or a part of one if the data are many. Training the reference takes no more than
        `REFERENCE_FRAC` of it. No fewer than `FEWEST_STEPS`; then there are fewer trials. No more than the workload is
        trained today, if its file says that.
        """
        study = self._journal.run.study
        if study is not None and study.horizon_samples:
            return study.horizon_samples
        epochs, train_samples = self.config.budget.train_epochs, self._facts.train_samples
        if not isinstance(epochs, str):
            return max(1, round(epochs * train_samples))
        limit_s, rate, today = self.config.search.max_time_s, self._typical_per_s(), self.config.workload.epochs
        if self._facts.trains_whole and today is not None:
            return max(1, round(today * train_samples))
        if limit_s is None or not rate:
            return (
                max(1, round((today or 1.0) * train_samples)) if limit_s is None else self._at_most_today(train_samples)
            )
        search_s, asked = max(0.0, self.left_s() - confirm.SHARE * limit_s), self.config.search.trials
        planned = PLANNED_TRIALS if asked == "auto" else max(1, asked)
        start_s, per_s = confirm.start_s(self._journal.run), self.reference_per_s()
        of_reference = per_s * max(0.0, REFERENCE_FRAC * search_s - start_s) if per_s else math.inf
        seen = min(rate * max(0.0, search_s / planned - start_s), of_reference)
        if self._facts.program:  # no training is shorter than its start, or than an epoch, which a command ends with
            seen = max(seen, rate * start_s, train_samples)
        passes = min(today or MOST_EPOCHS, seen / train_samples)
        passes = math.floor(passes) if 1 <= passes != today else passes
        least = FEWEST_STEPS * groups.batch_size_of(groups.defaults(self.config.space))
        return self._at_most_today(max(least, round(passes * train_samples)))

    def _at_most_today(self, samples: int) -> int:
        """Returns the samples of a trial, no more than the file says that it is trained on today."""
        today = self.config.workload.epochs
        return samples if today is None else max(1, min(samples, round(today * self._facts.train_samples)))

    def _typical_per_s(self) -> float:
        """Returns a trial's speed: the geometric mean of the fastest probe of each speed group; 0 without any probe.

        If widths and depths are searched, the fastest group is many times as fast as most trials: with it five trials
        of 51 passes of one script came to their end in three minutes, with this mean 22 of 23.
        """
        groups, known = dict[Any, float](), self._probed()
        for probe in known:
            place = group_of(probe.knobs, self._journal.run.table)
            if suits(self.config.space, probe):
                groups[place] = max(groups.get(place, 0.0), probe.samples_per_s)
        if not groups:
            return max((probe.samples_per_s for probe in known), default=0.0)
        return statistics.geometric_mean(groups.values())

    def _probed(self) -> list[Probed]:
        return probed(self._journal.run.probes, self._journal.run.table)

    def time_plan(self) -> TimePlan:
        """Returns what the study plans to spend of its time."""
        return planned(self._journal.run, self.config, self.horizon(), self.reference_per_s())

    def long(self) -> str:
        """Returns that a search without a limit takes `LONG_S` and more, by the fastest speed probed; "" where not."""
        count, training_s = self.config.search.most_trials, self.time_plan().training_s
        whole_s = math.ceil(count / max(1, self.plan().concurrency)) * training_s
        if self.config.search.max_time_s is not None or whole_s < LONG_S:
            return ""
        said = f"{count} trials of {duration(training_s)} and more each may take {duration(whole_s)}"
        return f"{said}: search.max_time=8h has an answer by then, budget.train_epochs=N shorter trials"

    def idle(self) -> str:
        """Returns why nothing is trained, "" where the search begins: no trials, or no time for one."""
        if self.config.search.trials == 0:
            return "search.trials=0: nothing is trained; the pick has the fastest system knobs that were probed"
        training_s, limit_s, cut_at = self.time_plan().training_s, self.config.search.max_time_s, self._cut_at()
        if limit_s is None or cut_at is None or self._journal.run.begun:
            return ""
        left_s = max(0.0, cut_at - time.monotonic())
        if left_s > 0 and left_s >= training_s:
            return ""
        if not training_s:
            return f"search.max_time={duration(limit_s)} was over before a speed was known: nothing is trained"
        enough = math.ceil((self.passed_s() + ENOUGH_TRIALS * training_s) / (1 - confirm.SHARE) / 60)
        shorter = "" if self.config.budget.train_epochs == "auto" else ", and budget.train_epochs=auto shorter trials"
        return (
            f"a training takes about {duration(training_s)}, and {duration(left_s)} are left for the search: nothing "
            f"is trained; search.max_time={enough}m gives it the time{shorter}"
        )

    def few(self) -> str:
        """Returns that fewer trials have begun than were asked for, else `PLANNED_TRIALS`, and what time is enough."""
        search, run = self.config.search, self._journal.run
        begun = sum(not trial.is_beside for trial in run.begun)
        planned = PLANNED_TRIALS if search.trials == "auto" else search.trials
        if search.max_time_s is None or begun >= planned:
            return ""
        took = [end.setup_s + end.train_s + end.evaluate_s for end in run.ended]
        share_s = (1 - confirm.SHARE) * search.max_time_s / max(1, begun)
        each_s = statistics.fmean(took) / self.time_plan().slots if took else share_s
        enough = math.ceil((search.max_time_s + each_s * (planned - begun) / (1 - confirm.SHARE)) / 60)
        had = f"there was time for {plural(begun, 'trial')} beside the reference"
        return f"{had}; search.max_time={enough}m is enough for about {planned}"

    def _slots_a_card(self, cores: int) -> int:
        """Returns how many trials share a card, by what the probes say of the fastest configuration."""
        if self.config.devices_per_trial > 1:
            return 1
        probes = self._journal.run.probes
        fastest = max(
            (p for p in probes if p.outcome == Outcome.OK), key=lambda p: p.samples_per_s or 0.0, default=None
        )
        if fastest is None:
            return 1
        needs = [probe.peak_allocated_bytes for probe in probes if probe.peak_allocated_bytes]
        workers = int(fastest.config.get("num_workers") or 0)
        busy_frac = fastest.telemetry.get("gpu_sm_frac")
        return slots.on_card(self.cap_bytes(), needs, busy_frac, cores // self._devices, workers)

    def _cut_at(self) -> float | None:
        """Returns when trials that still run are cut: the rounds of confirming are to come before max_time is over."""
        if self.config.search.max_time_s is None:
            return None
        return self.ends_at - self.time_plan().least_rounds_s

    def terms(self) -> SearchTerms:
        """Returns what the search may do, and until when: confirming needs its time too."""
        search, (name, reference) = self.config.search, self.reference()
        return SearchTerms(
            trials=search.most_trials,
            deadline=self._search_ends_at(),
            seed=search.seed,
            objectives=self._facts.objectives,
            sampler=search.sampler,
            pruner=search.pruner,
            reference=reference,
            reference_name=name,
        )

    def _search_ends_at(self) -> float | None:
        """Returns when the search is to end, None without a limit."""
        if self.config.search.max_time_s is None:
            return None
        return self.ends_at - self.time_plan().confirm_s - confirm.start_s(self._journal.run)

    def reference(self) -> tuple[str, Mapping[str, Scalar]]:
        """Returns the reference's name and knobs: `before`, else the plain defaults as they fit."""
        config, run = self.config, self._journal.run
        for name in (BEFORE, PLAIN):  # a user's file that has no `before` names the plain defaults
            if name in config.named:
                return name, config.space.whole(config.named[name])
        return PLAIN, groups.uncut(config.space, run, groups.guard(run, self.cap_bytes()))

    def before(self) -> Mapping[str, Scalar] | None:
        """Returns the user's current settings, None if nobody named them."""
        return self.config.named.get(BEFORE)

    def reference_per_s(self) -> float:
        """Returns how fast the reference trains by what was probed, 0 if that is not known."""
        return self.per_s(self.reference()[1])

    def reference_seeds(self) -> int:
        """Returns on how many fresh seeds the reference is trained before the search: none if that takes long.

        All of its trainings take no more than `REFERENCE_FRAC` of the search's time, or of its trials without a limit.
        """
        per_s, ends_at, asked = self.reference_per_s(), self._search_ends_at(), self.config.search
        if not per_s or self.config.pick.at_least is not None:
            return 0
        trainings = float(asked.most_trials)
        if ends_at is not None:
            each_s = confirm.start_s(self._journal.run) + confirm.MORE * self.horizon() / per_s
            trainings = (ends_at - time.monotonic()) / each_s
        return max(0, min(LEAST_SEEDS, int(REFERENCE_FRAC * trainings) - 1))

    def per_s(self, knobs: Mapping[str, Scalar]) -> float:
        """Returns how fast a configuration trains by its own probe, else by those like it; 0 if nothing says."""
        speeds = Speeds(self._probed(), self._journal.run.table)
        known = speeds.ranked(knobs)
        return speeds.of(knobs) or (known[0].samples_per_s if known else 0.0)

    def confirm_s(self) -> float:
        """Returns the seconds that confirming may take from here on: what the search has left."""
        return math.inf if self.config.search.max_time_s is None else self.left_s()
