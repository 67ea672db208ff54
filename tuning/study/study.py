"""A study, from a checked configuration to its exported pick: the stages in order, each a function of the records.

    preflight -> estimate -> probe -> search -> confirm -> export, report, summary

`trials.jsonl` is the only truth: a resumed study opens it and calls the same stages, which leave out what it holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from trainables.knobs import KnobTable, Scalar
from tuning.cli.terminal import Terminal
from tuning.config.choices import BEFORE, PLAIN
from tuning.config.complete import fit_to_workload
from tuning.config.environment import require_one_process
from tuning.config.errors import ConfigError, NoUsableTrial, TuningError
from tuning.config.resolve import measured_beside, resolved, write_resolved
from tuning.config.schema import StudyConfig
from tuning.journal import events
from tuning.journal.records import Journal, read
from tuning.journal.run import History
from tuning.journal.runs import JOURNAL
from tuning.memory import groups
from tuning.memory import measure as estimate
from tuning.memory.oom import Outcome
from tuning.memory.prediction import Prediction
from tuning.memory.predictor import Request, default_cache, predict_all
from tuning.report import export, report, sentences, summary
from tuning.report.format import epochs, spoken
from tuning.search import optuna_study, runtime_check
from tuning.search.confirm import SHARE
from tuning.search.probe import ProbeStage
from tuning.search.protocols import TrialPlan
from tuning.search.scheduler import SearchTerms, TrialScheduler
from tuning.search.throughput import system_only
from tuning.study.limits import Limits
from tuning.study.picking import PickStage, nothing_usable, require_independent, require_sound
from tuning.study.setup import (
    cautions,
    command_of,
    comparable,
    describe_workload,
    differences,
    new_folder,
    prepare_config,
    reopens,
    setting_of,
    study_fields,
    switched_on,
)
from tuning.study.shown import show
from tuning.workers import doctor, executors, nvml
from tuning.workers.own_workload import UserFile
from tuning.workers.worker import Worker
from tuning.workers.worker_config import Description, WorkerConfig

if TYPE_CHECKING:
    from tuning.workers.nodes import Node
    from tuning.workers.ray_board import RayBoard
    from tuning.workers.ray_join import JoinedCluster


def run(config: StudyConfig, terminal: Terminal, started: float, file: UserFile) -> Path:
    """Returns the folder of the finished study; `started` is the monotonic time at which its wall time began.

    `file` reads that of a user's workload.

    Raises ConfigError before anything is written, PreflightError where the machine cannot run it, NoUsableTrial where
    nothing can be picked.
    """
    require_one_process(os.environ)
    file.begin(config, started)
    folder, config = prepare_config(config, file)
    earlier = History() if folder is None else History(read(folder / JOURNAL)[0])
    opening = earlier.study
    if folder is not None and opening is not None and earlier.is_finished and not reopens(config, opening):
        terminal.note(f"the run {folder.name} is finished, and nothing is left to do; this is what it found")
        terminal.summary(summary.of_run(earlier), folder)
        return folder
    checks = doctor.preflight(config, config.card.device)
    terminal.plan(config)
    terminal.checks(checks)
    doctor.require(checks)
    config = executors.as_ray_allows(config, terminal.warning)
    setting = setting_of(config)
    # Before any process of ours has a context; of the card that has least, where there are several.
    free_bytes = min(map(doctor.free_bytes, nvml.gpus())) if config.card.device == "cuda" else None
    with ExitStack() as stack:
        profiler = stack.enter_context(file.worker(setting))
        profiler.warn = terminal.warning
        profiler.deadline = started + (config.search.max_time_s or math.inf)
        profiler.start()
        terminal.watch(lambda: profiler.asked)
        terminal.doing("a process loads torch, data and model")
        executors.prepare(config)
        if config.dashboard:  # else Ray runs for the search alone: probes and confirmations have the machine for them
            cluster = stack.enter_context(executors.cluster(config))
            terminal.dashboard(cluster.dashboard_url, cluster.token_path)
        users = stack.enter_context(executors.joined(config)) if config.cluster else None
        start = groups.defaults(config.space)
        begun = time.monotonic()
        facts = describe_workload(profiler, config.workload.options, start)
        loaded, now = profiler.loaded_at, time.monotonic()
        parts = {"imports": begun - started, "data and model": loaded - begun, "first steps": now - loaded}
        config = fit_to_workload(config, facts.train_samples, facts.asked, facts.seen, averages=facts.averages)
        target, place = "", None
        if users is not None:
            terminal.doing("the nodes of the cluster load the workload, to be compared with this machine")
            limit_s = config.search.max_time_s or math.inf
            users.check(setting, facts, start, limit_s)
            target = users.choose_target(config.target if opening is None else opening.target or config.target)
        if users is not None and target != users.here:  # a node of that kind measures in this machine's place
            profiler.end()
            place = users.training[0]
            setting = dataclasses.replace(setting, threads=int(place.device["threads"]))
            profiler = stack.enter_context(users.worker(setting, terminal.warning))
            profiler.deadline = started + limit_s
            facts = describe_workload(profiler, config.workload.options, start)
        folder = folder or new_folder(config)
        with Journal.open(folder / JOURNAL, create=True) as journal:
            for text in journal.warnings:
                terminal.warning(text)
            if board := executors.board(config, folder.name):
                objective = next(iter(facts.objectives), "")
                journal.heard = functools.partial(_shown, board, objective, config.space.table)
            study = _Study(config, terminal, journal, folder, started, users, target, place)
            study.open(facts, setting, free_bytes, parts)
            study.measure_kinds(profiler)
            try:
                study.measure(profiler)
                study.search(profiler, setting)
                study.confirm(profiler)
                study.publish()
            except (KeyboardInterrupt, SystemExit, TuningError):  # SystemExit: who read our pipe has gone
                study.leave()
                raise
    return folder


def _shown(board: RayBoard, objective: str, table: KnobTable, made: events.Event) -> None:
    with contextlib.suppress(Exception):  # what is shown of a study never ends it
        show(board, made, objective, table)


class _Study:
    """The stages over one journal."""

    def __init__(
        self,
        config: StudyConfig,
        terminal: Terminal,
        journal: Journal,
        folder: Path,
        started: float,
        users: JoinedCluster | None = None,
        target: str = "",
        place: Node | None = None,
    ) -> None:
        self._config, self._terminal, self._journal, self._folder = config, terminal, journal, folder
        self._run = journal.run
        self._users, self._target, self._place = users, target, place
        self._started = started
        self._began = started - self._run.used_s  # of earlier sessions

    def open(
        self,
        facts: Description,
        setting: WorkerConfig,
        free_bytes: int | None = None,
        parts: Mapping[str, float] | None = None,
    ) -> None:
        """Writes who we are and what we run, or that we go on; `free_bytes` as `Limits` has it, `parts` of start-up."""
        began = self._began
        if self._run.study is None:
            nodes = len(self._users.training) if self._users is not None else 1
            fields = study_fields(self._config, facts, setting, self._folder.name, nodes)
            fields |= {"target": self._target} if self._users is not None else {}
            fields |= {"startup_s": time.monotonic() - self._started, "startup_parts": dict(parts or {})}
            self._journal.append(events.StudyRecord, **fields)
        else:
            startup_s = time.monotonic() - self._started
            changed = differences(self._opening(), facts, setting)
            if changed and not self._config.force:
                raise ConfigError(
                    f"resume={self._config.resume}: the run began elsewhere or otherwise: {'; '.join(changed)}",
                    remedy="a new run; or force=true, to mix what was measured then with what is measured now",
                )
            command, whole = command_of(self._config), resolved(self._config)
            more = {n: whole[n] for n in reopens(self._config, self._opening())}
            self._journal.append(events.ResumeRecord, command=command, startup_s=startup_s, changed=changed, **more)
            if more:
                self._journal.rewrite(events.StudyRecord, config={**self._opening().config, **more})
            for text in changed:
                self._note(f"{text}; what was measured before is of then")
        if not (self._folder / "config.yaml").exists():  # nor does it where a run was killed between the two
            write_resolved(self._config, self._folder / "config.yaml")
        self._facts, reopening = self._opening(), self._run.reopening()
        is_by_pick = reopening is not None and reopening.pick and not reopening.search
        if is_by_pick and self._run.is_done("search") and not self._run.is_done("confirm"):
            self._began = max(self._began, time.monotonic() - (1 - SHARE) * (self._config.search.max_time_s or 0.0))
        here: tuple[int | None, int, int | None, int | None]
        here = free_bytes, executors.devices(self._config), None, None
        if (node := self._place) is not None:  # the target is not this machine
            here = node.room_bytes, node.cards or 1, int(node.device["cores"]), int(node.device["threads"])
        self._limits = Limits(self._config, self._facts, self._journal, self._began, *here)
        self._terminal.opened(self._facts, self._folder, began, self._run)
        for found in self._users.nodes if self._users is not None else ():
            self._node(found)
        for text in sentences.left_out(self._config):
            self._note(text)
        for text in cautions(self._config, self._facts):
            self._note(text, warns=text)
        self._settle_space()

    def measure_kinds(self, profiler: Worker) -> None:
        """Finds out which system knobs change what is learned by this workload, and has them searched so."""
        if self._run.kinds is None:
            begun, start = time.monotonic(), groups.defaults(self._config.space)
            if self._opening().program:
                self._journal.append(events.KindsRecord, changed={}, message="", wall_s=0.0)
                self._note(
                    "a command shows no gradients: whether a system knob changes what is learned is not measured"
                )
                return self._take_kinds()
            self._terminal.doing("each system knob is changed for one batch, to check that its gradients stay the same")
            found = profiler.kinds({**start, **switched_on(self._config.space)}, comparable(self._config.space, start))
            wall_s, message = time.monotonic() - begun, found.message
            if found.outcome != Outcome.CUT:  # else a study that goes on measures it
                self._journal.append(events.KindsRecord, changed=found.changed, message=message, wall_s=wall_s)
            require_independent(self._run, message)
            if message:
                said = f"whether system knobs change what is learned was not measured: {message}"
                self._note(said, warns="kinds" if found.outcome != Outcome.CUT else "")
            if found.untold:
                said = f"whether {', '.join(found.untold)} changes what is learned here is not known, and taken not to"
                self._note(f"{said}: a step draws random numbers that change it as much", warns="kinds")
        self._take_kinds()
        for text in sentences.kinds(self._run.kinds.changed if self._run.kinds else {}):
            self._note(text)

    def _take_kinds(self) -> None:
        """Searches by the kinds of knobs that were measured, from here on."""
        space = dataclasses.replace(self._config.space, table=self._run.table)
        self._config = self._limits.config = self._config.model_copy(update={"space": space})
        self._settle_space()

    def _settle_space(self) -> None:
        self._space = self._config.space
        if self._config.search.trials == 0:  # what is learned stays as it is trained today
            self._space = system_only(self._space, self._today())
        self._named = dict(self._config.named)
        before = [probe for probe in self._run.probes if probe.name == BEFORE]
        has_failed = any(probe.outcome not in (Outcome.OK, Outcome.CUT) for probe in before)
        if has_failed or PLAIN in measured_beside(self._config):  # else there would be nothing to compare with
            self._named.setdefault(PLAIN, groups.plain_defaults(self._config.space))

    def measure(self, profiler: Worker) -> None:
        """Stages 1 and 2: what fits, and how fast the system knobs are."""
        cap_bytes, profiler.deadline = self._limits.cap_bytes(), self._limits.ends_at
        with self._stage("estimate") as needed:
            if needed and self._facts.asked is not None:
                self._note("the memory of a custom loop is not predicted: probes and trials measure it as they go")
            elif needed:
                cuda = self._config.card.device == "cuda"
                first = estimate.MemoryStage(profiler, self._space, self._journal, cap_bytes, cuda=cuda)
                limit_s = min(estimate.LIMIT_S, max(0.0, self._limits.left_s() / 5))
                alone = self._config.devices_per_trial == 1  # a prediction is of one process's micro-batches
                first.run(self._predict if cuda and alone else None, limit_s)
        with self._stage("probe") as needed:
            if needed:
                self._probe(profiler)
                require_independent(self._run)
                require_sound(self._run)
        config = self._config.workload
        if self._opening().horizon_samples and sum(isinstance(e, events.StudyRecord) for e in self._run.events) == 1:
            self._journal.rewrite(events.StudyRecord)  # without any, as after one flipped bit, nothing can be resumed
        if not self._opening().horizon_samples and not self._limits.idle():  # else more time may make it longer
            self._journal.rewrite(events.StudyRecord, horizon_samples=self._limits.horizon())
            seen = epochs(self._limits.horizon() / max(1, self._opening().train_samples))
            told, today = f"a trial trains on {self._limits.horizon():,} samples ({seen})", config.epochs
            if today is None:
                longer = "the best settings for a longer one may differ: budget.train_epochs=N sets its length"
                self._note(f"{told}, as the time allows; {longer}")
            elif self._limits.horizon() == round(today * self._opening().train_samples):
                self._note(f"{told}, as EPOCHS of {config.ref} says")
            else:
                whole = f"the best settings for {epochs(today)} may differ"
                longer = "a larger search.max_time allows longer trials"
                self._note(f"{told}, as the time allows; {whole}: {longer}", warns="length")

    def _probe(self, profiler: Worker) -> None:
        if not self._space.parameters:
            system = self._space.table.system
            asked = self._facts.asked or system
            able = [n for n in system if n in asked and n not in self._config.space.parameters]
            more = f"; {', '.join(able)} could be" if able else ""
            self._note(f"no system knob is searched, so that there is nothing to compare{more}")
        tried, size = None, "micro_batch_size"
        self._settle_space()  # by what is known of memory by now
        until = time.monotonic() + self._limits.probe_s()
        while tried != self._space:  # again where a batch held in one piece has not fitted
            tried = self._space
            left_s = max(until - time.monotonic(), 2 * self._config.budget.probe.probe_time_s)
            self._prober(profiler, left_s).run(self._config.named, self._told)
            self._settle_space()
        whole, held = groups.plain_defaults(self._config.space), self._space.fixed.get(size)
        searched = self._config.search.trials == 0 and size in self._config.space.parameters
        is_cut = held is not None and groups.micro_batch_of({**whole, size: held}) < groups.micro_batch_of(whole)
        if searched and is_cut and not self._limits.before():
            self._note(f"a batch in one piece does not fit: {size}={held}, which changes what is learned here")
        have = {probe.name for probe in self._run.probes if probe.outcome != Outcome.CUT}
        if missed := [spoken(name) for name in self._config.named if name not in have]:
            text = f"no time was left to measure {', '.join(missed)}: a larger search.max_time does"
            self._note(text, warns="named without a probe")
        if left := profiler.left_behind:
            kept = "does the module keep outputs or losses of every step, as in a list?"
            self._note(f"{left}: {kept} Each measurement has a new process", warns="left")
        if said := sentences.disturbed(self._run.probes):
            self._note(said, warns="probes")

    def _prober(self, profiler: Worker, time_s: float) -> ProbeStage:
        """Returns a probe stage over the current space that may take so many seconds."""
        learned = groups.guard(self._run, self._limits.cap_bytes())
        budget = self._config.budget.probe.model_copy(update={"max_time_s": time_s})
        return ProbeStage(profiler, self._space, self._journal, learned, budget)

    def search(self, profiler: Worker, setting: WorkerConfig) -> None:
        """Stage 3: trials, until they are enough, time is up, or nothing is left to try."""
        with self._stage("search") as needed:
            if not needed:
                return
            if idle := self._limits.idle():
                self._note(idle)
                return
            if long := self._limits.long():
                self._note(long)
            plan, terms = self._limits.plan(), self._limits.terms()
            self._share(plan)
            if self._is_here(plan) and (count := self._limits.reference_seeds()):
                profiler.deadline = self._limits.ends_at
                self._pick_stage().train_reference(profiler, count)
                require_independent(self._run)
            is_timed_again = False
            while True:
                before = len(self._run.begun)
                scheduler = self._run_trials(profiler, setting, plan, terms)
                if not self._goes_on(scheduler, plan, terms):
                    break
                profiler.deadline = self._limits.ends_at
                if not self._run.searched and not is_timed_again:
                    is_timed_again = True
                    self._terminal.doing("no trial is expected to be faster: the fastest probes are repeated in turns")
                    left_s = min(self._config.budget.probe.max_time_s, (terms.deadline or math.inf) - time.monotonic())
                    self._prober(profiler, left_s).again(self._limits.reference()[1], self._told)
                elif len(self._run.begun) == before:
                    break
                else:  # what looked good by one seed often is not: fresh seeds, and then the search again
                    self._pick_stage().train_again(profiler, terms.deadline or math.inf)
            require_independent(self._run)
            if scheduler.only_crashes:
                raise self._nothing_usable()
            self._note(f"the search ended: {scheduler.stop_reason}")
            if scheduler.is_out_of_time and (few := self._limits.few()):
                self._note(few, warns="few")

    def _run_trials(
        self, profiler: Worker, setting: WorkerConfig, plan: TrialPlan, terms: SearchTerms
    ) -> TrialScheduler:
        """Returns the scheduler after its trials."""
        scheduler = TrialScheduler(
            self._journal,
            self._config.space,
            groups.guard(self._run, plan.alone_bytes or self._limits.cap_bytes()),
            terms,
            plan.on_nodes(len(self._users.training) if self._users is not None else 1),
            self._told,
        )
        with executors.executor(self._config, plan, profiler, setting, self._users, self._node) as executor:
            executor.run(scheduler, plan)
        return scheduler

    def _goes_on(self, scheduler: TrialScheduler, plan: TrialPlan, terms: SearchTerms) -> bool:
        """Returns whether a search that found nothing more is to go on once fresh seeds have told more.

        Not where trials run in processes of their own: to start these again takes longer than most trials.
        """
        has_time = terms.deadline is not None and time.monotonic() < terms.deadline
        return scheduler.has_nothing_better and self._is_here(plan) and has_time and not scheduler.only_crashes

    def _is_here(self, plan: TrialPlan) -> bool:
        """Returns whether trials run one at a time, in the process that also probes."""
        return plan.concurrency == 1 and self._users is None and not self._config.dashboard

    def _pick_stage(self) -> PickStage:
        return PickStage(self._config, self._journal, self._limits, self._space, self._named, self._told, self._note)

    def confirm(self, profiler: Worker) -> None:
        """Stage 4: measures the pick and the named configurations again, and trains the pick on other seeds."""
        profiler.deadline = self._limits.ends_at
        stage = self._pick_stage()
        if not stage.has_any:
            raise self._nothing_usable()
        with self._stage("confirm") as needed:
            if needed:
                stage.run(profiler)

    def _nothing_usable(self) -> NoUsableTrial:
        return nothing_usable(self._run, self._folder, self._limits, self._config.search.max_time_s)

    def _today(self) -> dict[str, Scalar]:
        """Returns what is trained today, as far as it is known: `before`, else the plain defaults, as they fit."""
        space, run = self._config.space, self._run
        if before := self._limits.before():
            return space.whole(before)
        return groups.uncut(space, run, groups.guard(run, self._limits.cap_bytes()))

    def publish(self) -> None:
        """Stage 5: best.yaml, front.csv, report.html and the summary, all drawn from the records."""
        with self._stage("export"):
            found = summary.of_run(self._run)
            paths = export.write_all(found, self._folder)
            shares = optuna_study.importances_of(self._run)
            report.write_report(found, self._folder / "report.html", shares)
        self._journal.append(events.StopRecord, reason="finished", resumable=False)
        found = summary.of_run(self._run)
        self._terminal.summary(found, self._folder, paths)

    def leave(self) -> None:
        """Writes best.yaml and front.csv of what is known where the study ends early; nothing where nothing is."""
        found = summary.of_run(self._run)
        if found.best is None:
            return
        with contextlib.suppress(TuningError):  # such as a full disk, for which the study may have ended
            best, *_ = export.write_all(found, self._folder)
            state = export.status_of(found, found.best)
            self._terminal.left(f"{best} holds the best so far, {state}: {sentences.found_by(found, found.best)}")

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _predict(self, configurations: Sequence[Mapping[str, Scalar]]) -> list[Prediction]:
        """Returns predictions for the card that is here.

        Not asked for on a CPU: there a measurement says all that a prediction does, and takes less than tracing. On
        CUDA only a prediction knows what the allocator keeps beside the tensors.
        """
        workload, device = self._config.workload, self._facts.device
        major, minor = device.get("capability") or (8, 6)
        requests = [
            Request(workload.ref, dict(workload.options), knobs, "cuda", (int(major), int(minor)))
            for knobs in configurations
        ]
        table, limit_s = self._run.table, self._limits.predict_s()
        return predict_all(requests, table, cache=default_cache(), timeout_s=limit_s)

    @contextmanager
    def _stage(self, name: str) -> Iterator[bool]:
        """Marks a stage in the records; yields False where they hold its end already."""
        if self._run.is_done(name):
            yield False
            return
        self._journal.append(events.StageRecord, stage=name, state="start")
        self._terminal.stage(name)
        begun = time.monotonic()
        yield True
        if name in ("estimate", "probe") and self._limits.left_s() <= 0:
            return  # it was cut: with more time it goes on
        self._journal.append(events.StageRecord, stage=name, state="end", wall_s=time.monotonic() - begun)

    def _share(self, plan: TrialPlan) -> None:
        """Says how the trials share the card, where they do and it limits them, and where fewer run than was asked."""
        asked = self._config.concurrency
        if isinstance(asked, int) and plan.concurrency < asked:
            said = f"concurrency={asked}: equal slots would leave some of {plan.devices} cards idle"
            self._note(f"{said}, so {plan.concurrency} trials run at once, as many on each", warns="concurrency")
        if plan.cap_bytes is not None and plan.concurrency > plan.devices:
            gib = plan.cap_bytes / 2**30
            self._note(f"{plan.concurrency} trials run at once, {gib:.2f} GiB each; one that needs more runs alone")

    def _opening(self) -> events.StudyRecord:
        return cast(events.StudyRecord, self._run.study)  # open() wrote one

    def _told(self, made: events.Event) -> None:
        """Says what was written, and once for each knob that it was not honoured, whichever values were asked."""
        self._terminal.record(made)
        match made:
            case events.TrialRecord():
                self._say_ignored(made.trial, made)
                if made.remark:
                    self._note(made.remark, warns="remark")
            case events.NamedRecord():
                self._say_ignored(made.name, made)

    def _say_ignored(self, who: str, made: events.MeasuredRecord) -> None:
        asked = self._facts.asked
        config = {n: v for n, v in made.config.items() if asked is None or n in asked}
        for text in runtime_check.disagreements(config, made.active, self._run.table):
            knob, seen = text.partition("=")[0], text.partition(" was asked; ")[2]
            if not any(f"{knob}=" in note and note.endswith(seen) for note in self._notes()):
                self._note(f"{who}: {text}" if who else text)

    def _notes(self) -> list[str]:
        """Returns what was noted since the study was last given more to do."""
        return [note.text for note in self._run.notes if note.seq >= self._run.since()]

    def _node(self, node: Node) -> None:
        """Writes and says whether a node of the user's cluster runs trials."""
        said = {"address": node.address, "cores": node.cores, "device": dict(node.device), "kind": node.kind}
        made = self._journal.append(events.NodeRecord, node=node.name, **said, why=node.why)
        self._terminal.note(sentences.node(made))

    def _note(self, text: str, warns: str = "") -> None:
        """Writes and says a note; the last that `warns` of a subject is in the summary, too."""
        if text not in self._notes():
            self._journal.append(events.NoteRecord, text=text, **({"warns": warns} if warns else {}))
            self._terminal.note(text)
