"""One study, from a checked configuration to its exported pick: the stages in order, each a function of the records.

    preflight -> estimate -> probe -> search -> confirm -> export, report, summary

`trials.jsonl` is the only truth: a resumed study opens it and calls the same stages, which leave out what it holds.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import secrets
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from trainables import workload
from trainables.knobs import Scalar, kind_of
from tuning import atomic, doctor, export, report, summary, timeline, wording
from tuning.backends.laboratory import Laboratory
from tuning.backends.ray_tune import RayCluster, RayCrew
from tuning.backends.session import Setting
from tuning.config import StudyConfig, apply_card, from_resolved, resolved, with_workload_defaults, write_resolved
from tuning.errors import ConfigError, NoUsableTrial, PreflightError
from tuning.memory import calibration
from tuning.memory.known import Key, Known
from tuning.memory.prediction import Prediction
from tuning.memory.predictor import Request, predict_all
from tuning.policies import active, packing
from tuning.policies.pick import Pick, absolute
from tuning.policies.rivals import Ruling
from tuning.policies.rungs import milestones
from tuning.records import Journal, Record, is_finished, last, read, stage_done, trials
from tuning.resolve import option_fault, workload_said
from tuning.runs import JOURNAL, find_run, known_runs, versions
from tuning.space import Range
from tuning.stages import confirm, estimate, reuse
from tuning.stages.bench import Orders
from tuning.stages.confirm import Terms as ConfirmTerms
from tuning.stages.probe import ProbeStage, probed
from tuning.stages.search import SearchDesk, SearchTerms
from tuning.terminal import Terminal

PREDICT_S = 60.0
"""What predicting may take where nothing is kept from an earlier run; what is not predicted by then is measured."""
MOST_READ = 30
"""Earlier runs that are looked at for what can be taken over; a journal of 1,000 records takes 20 ms."""
RAM_FRAC = 0.8
"""Of the free RAM, what trials on a CPU without a card's cap may be predicted to take together."""


def run(config: StudyConfig, terminal: Terminal, started: float) -> Path:
    """Returns the folder of the finished study; `started` is the monotonic time at which its wall time began.

    Raises ConfigError before anything is written, PreflightError where the machine cannot run it, NoUsableTrial where
    nothing can be picked.
    """
    folder, config = checked(config)
    if folder is not None and is_finished(records := read(folder / JOURNAL)[0]):
        terminal.note(f"the run {folder.name} is finished, and nothing is left to do; this is what it found")
        terminal.summary(summary.from_records(records), folder)
        return folder
    cuda = config.card.device == "cuda"
    checks = doctor.preflight(config, config.card.device)
    terminal.checks(checks)
    doctor.require(checks)
    setting = _setting(config)
    with ExitStack() as stack:
        cluster = RayCluster(cores=doctor.cores(), gpus=len(doctor.gpus()) if cuda else 0, dashboard=config.dashboard)
        while_searching: AbstractContextManager[object] = cluster
        if config.dashboard:  # else Ray runs for the search alone: probes and confirmations have the machine for them
            while_searching = nullcontext(stack.enter_context(cluster))
            terminal.dashboard(cluster.dashboard_url, cluster.token_path)
        bench = stack.enter_context(Laboratory(setting))
        facts = _described(bench, config.workload.options, estimate.defaults(config.space))
        folder = folder or _new_folder(config)
        with Journal.open(folder / JOURNAL, create=True) as journal:
            for text in journal.warnings:
                terminal.warning(text)
            study = _Study(config, terminal, journal, folder, started)
            study.open(facts, setting)
            study.measure(bench)
            bench.end()
            study.search(RayCrew(setting, f"{config.workload.name}_trials"), while_searching)
            study.confirm(bench)
            study.publish()
    return folder


def checked(config: StudyConfig) -> tuple[Path | None, StudyConfig]:
    """Returns the folder of the run to go on with, if any, and the configuration as it will be run.

    Raises ConfigError for all that can be known without Ray; starts and writes nothing.
    """
    if config.resume is not None:
        return _resumed(config)
    reason = atomic.unwritable(Path(config.runs_dir))
    if reason:
        what = f"runs_dir={config.runs_dir} cannot be written: {reason}"
        raise ConfigError(what, allowed="a folder of yours", remedy="runs_dir=PATH, another one")
    if config.name is not None:
        _refuse_taken(config, _place(config, config.name))
    return None, _complete(config)


class _Study:
    """The stages over one journal."""

    def __init__(self, config: StudyConfig, terminal: Terminal, journal: Journal, folder: Path, started: float) -> None:
        self._config, self._terminal, self._journal, self._folder = config, terminal, journal, folder
        self._ram_bytes: int | None = None
        self._used_s = timeline.times(journal.records).wall_s  # by earlier sessions
        self._started = started

    def open(self, facts: Mapping[str, Any], setting: Setting) -> None:
        """Writes who we are and what we run, or that we go on."""
        if last(self._journal.records, "study") is None:
            fields = _study_fields(self._config, facts, setting, self._folder.name)
            self._journal.append("study", **fields, startup_s=time.monotonic() - self._started)
            write_resolved(self._config, self._folder / "config.yaml")
        else:
            startup_s = time.monotonic() - self._started
            self._journal.append("resume", command=_command(self._config), startup_s=startup_s)
            self._same_code(facts)
        self._facts = self._opening()
        for text in self._config.dropped:
            self._note(text)
        self._terminal.plan(self._config, self._facts, self._folder)
        shortage = self._shortage()
        if shortage:
            self._terminal.warning(shortage)

    def measure(self, bench: Laboratory) -> None:
        """Stages 1 and 2: what fits, and how fast the system knobs are."""
        cap_bytes = self._cap_bytes()
        self._recall()
        self._reuse()
        with self._stage("estimate") as needed:
            if needed:
                cuda = self._config.card.device == "cuda"
                first = estimate.EstimateStage(bench, self._config.space, self._journal, cap_bytes, cuda=cuda)
                first.run(self._predict if cuda else None)
        if self._config.search.strategy == "joint":
            return
        with self._stage("probe") as needed:
            if needed:
                learned = estimate.frontier(self._journal.records, cap_bytes)
                stage = ProbeStage(
                    bench,
                    self._config.space,
                    self._journal,
                    learned,
                    self._config.budget.probe,
                    self._config.search.seed,
                )
                stage.run(self._config.named, self._told)

    def search(self, crew: RayCrew, ray: AbstractContextManager[object]) -> None:
        """Stage 3: trials, until they are enough, time is up, or nothing is left to try; `ray` is what they run in."""
        with self._stage("search") as needed:
            if not needed:
                return
            slots = self._slots()
            desk = SearchDesk(
                self._journal,
                self._config.space,
                estimate.frontier(self._journal.records, slots.cap_bytes(slots.count) or self._cap_bytes()),
                self._terms(),
                self._orders(),
                self._told,
            )
            self._share()
            with ray:
                crew.run(desk, self._orders())
            self._remember()
            self._note(f"the search ended: {desk.stop_reason}")

    def confirm(self, bench: Laboratory) -> None:
        """Stage 4: measures the pick and the named configurations again, and trains the pick on other seeds."""
        picked = self._pick()
        if picked is None:
            failed = [t for t in trials(self._journal.records) if t.message]
            common = collections.Counter(f"{t.outcome}: {t.message}" for t in failed).most_common(1)
            raise NoUsableTrial(
                f"no trial reached its end in {self._folder}"
                + (f"; {common[0][1]} of them: {common[0][0][:200]}" if common else ""),
                remedy="mend what it names; the workload contract suite finds such faults in seconds"
                if common
                else "search.max_time=10m",
            )
        budget, told = self._config.budget.confirm, self._told
        configs = {t.id: dict(t.config) for t in trials(self._journal.records)}
        with self._stage("confirm") as needed:
            if not needed:
                return
            while True:
                first = self._fastest(bench, picked, configs)
                ruling = confirm.settle(bench, self._journal, first, self._orders(), self._confirm_terms(first), told)
                another = self._pick()
                if ruling is not None or another is None or self._failed(another.best):
                    break
                self._note(f"{first} did not come to its end when it was trained again, and is no longer the pick")
                picked = another
            best = first if ruling is None else ruling.best
            confirm.measure_windows(bench, self._journal, {**self._config.named, "best": configs[best]}, budget, told)
            self._append_pick(picked, first, ruling)

    def _fastest(self, bench: Laboratory, picked: Pick, configs: Mapping[str, dict[str, Scalar]]) -> str:
        """Returns the fastest of the pick and the next of the front, measured side by side where the budget asks."""
        budget, rivals = self._config.budget.confirm, self._rivals(picked)
        if len(rivals) == 1:
            return picked.best
        confirm.measure_windows(bench, self._journal, {t: configs[t] for t in rivals}, budget, self._told)
        return max(rivals, key=lambda t: confirm.median_rate(self._journal.records, t) or 0.0)

    def _failed(self, trial: str) -> bool:
        return any(
            r.event == "confirmed" and r["name"] == trial and r["outcome"] != "ok" for r in self._journal.records
        )

    def _confirm_terms(self, first: str) -> ConfirmTerms:
        objective, mode = next(iter(self._facts["objectives"].items()))
        seed, budget = self._config.search.seed, self._config.budget.confirm
        return ConfirmTerms(
            objective=objective,
            mode=mode,
            tolerance=self._tolerance(objective, mode),
            seeds=[seed + 1 + n for n in range(budget.seeds)],
            left_s=lambda: self._left_for_rivals_s(first),
        )

    def _left_for_rivals_s(self, first: str) -> float:
        """Returns what the trainings of rivals may still take: a share of the run, or what max_time leaves if more."""
        budget, limit_s = self._config.budget.confirm, self._config.search.max_time_s
        passed_s = time.monotonic() - self._started + self._used_s
        spent_s = confirm.spent_on_rivals_s(self._journal.records, first)
        share_s = budget.rivals_frac * (passed_s - spent_s) - spent_s
        if limit_s is None:
            return share_s
        return max(share_s, limit_s - passed_s - confirm.windows_s(budget, len(self._config.named) + 1))

    def _append_pick(self, picked: Pick, first: str, ruling: Ruling | None) -> None:
        """Writes the pick, by the rule over those that were confirmed; None where nothing came to its end again."""
        said = picked.rule if first == picked.best else f"{picked.rule}; {first} was faster when measured again"
        fields = {"knee": picked.knee, "front": list(picked.front), "searched_best": picked.best}
        if ruling is None:
            rule = f"{said}; trained again, neither it nor another came to its end on every seed"
            self._journal.append("pick", best=first, most_accurate=picked.most_accurate, rule=rule, **fields)
            return
        terms = self._confirm_terms(first)
        sign = 1.0 if terms.mode == "min" else -1.0
        confirmed = ruling.sentence(first, terms.objective, terms.mode, terms.tolerance, len(terms.seeds))
        self._journal.append(
            "pick",
            best=ruling.best,
            most_accurate=ruling.most_accurate,
            rule=f"{said}; {confirmed}" if len(ruling.means) == 1 else confirmed,
            confirmed={trial: sign * mean for trial, mean in ruling.means.items()},
            bar=sign * ruling.bar,
            bar_of=ruling.bar_of,
            difference=ruling.difference,
            half_width=ruling.half_width,
            **fields,
        )
        for record in self._journal.records:
            if record.event == "rival" and record["decision"] == "too long" and record["trial"] not in ruling.means:
                remedy = "a larger budget.confirm.rivals_frac has it trained"
                self._note(f"{record['trial']} {wording.rival(record.fields)}: {remedy}")
        if ruling.best != first:
            self._note(f"{ruling.best} takes the place of {first}, which the search had picked by one seed")

    def publish(self) -> None:
        """Stage 5: best.yaml, front.csv, report.html and the summary, all drawn from the records."""
        with self._stage("export"):
            found = summary.from_records(self._journal.records)
            paths = export.write_all(found, self._folder)
            report.write_report(found, self._folder / "report.html")
        self._journal.append("stop", reason="finished", resumable=False)
        found = summary.from_records(self._journal.records)
        self._terminal.summary(found, self._folder, paths)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _predict(self, configurations: Sequence[Mapping[str, Scalar]]) -> list[Prediction]:
        """Returns predictions for the card that is here.

        Not asked for on a CPU: there a measurement says all that a prediction does, and takes less than tracing. On
        CUDA only a prediction knows what the allocator keeps beside the tensors.
        """
        workload, device = self._config.workload, self._facts["device"]
        major, minor = device.get("capability") or (8, 6)
        requests = [
            Request(workload.ref, dict(workload.options), knobs, "cuda", (int(major), int(minor)))
            for knobs in configurations
        ]
        return predict_all(requests, timeout_s=PREDICT_S)

    def _recall(self) -> None:
        """Puts into the records, once, what earlier runs of this workload on this device learned about memory."""
        if not self._config.remember or any(r.event in ("known", "footprint") for r in self._journal.records):
            return
        store = Known()
        found = store.recall(self._memory_key())
        if found:
            self._journal.append("known", facts=found)
        for text in store.warnings:
            self._terminal.warning(text)

    def _reuse(self) -> None:
        """Puts into the records, once, what earlier runs in the same folder found, and says so."""
        begun = any(r.event in ("reused", "footprint", "probe", "trial_start") for r in self._journal.records)
        if not self._config.search.reuse or begun:
            return
        known = [f for f in reversed(known_runs(self._config.runs_dir)) if f.parent.name == self._folder.parent.name]
        found = reuse.recall(_journals(f for f in known if f.name != self._folder.name), self._facts.fields)
        if found is not None:
            self._journal.append("reused", **found)
            self._note(reuse.sentence(found))

    def _remember(self) -> None:
        """Keeps what this run learned about memory for the next."""
        if not self._config.remember:
            return
        store = Known()
        store.remember(self._memory_key(), estimate.facts(self._journal.records))
        for text in store.warnings:
            self._terminal.warning(text)

    def _memory_key(self) -> Key:
        start = estimate.defaults(self._config.space)
        return Key(
            device=str(self._facts["device"].get("name")),
            cap_bytes=self._config.card.cap_bytes,
            torch=self._facts["versions"]["torch"],
            cardtune=self._facts["versions"]["cardtune"],
            workload_sha256=str(self._facts["workload_sha256"]),
            options_sha256=Key.digest({**self._config.workload.options, "knobs": estimate.lesser(start)}),
        )

    @contextmanager
    def _stage(self, name: str) -> Iterator[bool]:
        """Marks a stage in the records; yields False where they hold its end already."""
        if stage_done(self._journal.records, name):
            yield False
            return
        self._journal.append("stage", stage=name, state="start")
        self._terminal.stage(name)
        begun = time.monotonic()
        yield True
        self._journal.append("stage", stage=name, state="end", wall_s=time.monotonic() - begun)

    def _orders(self) -> Orders:
        budget = self._config.budget
        samples = max(1, round(budget.train_epochs * int(self._facts["train_samples"])))
        first = max(1, round(samples * budget.rungs.first_frac))
        slots = self._slots()
        return Orders(
            samples=samples,
            milestones=(*milestones(first, samples, budget.rungs.eta), samples),
            shrink=self._config.search.strategy == "staged",
            concurrency=slots.count,
            threads=slots.threads,
            slot_bytes=slots.slot_bytes,
            idle_bytes=slots.idle_bytes,
            enforced=slots.enforced,
        )

    def _slots(self) -> packing.Slots:
        """Returns how the search trials share the card and the cores; on a card it takes the probes to say."""
        config, card_bytes, cores = self._config, self._cap_bytes(), doctor.cores()
        asked = config.concurrency if isinstance(config.concurrency, int) else None
        if config.card.device != "cuda":
            count = packing.on_cpu(cores, asked)
            enforced = config.card.cap_bytes is not None  # else it is the machine's own memory that is shared
            return packing.Slots(count, max(1, cores // count), card_bytes // count, enforced=enforced)
        fastest = max(
            (r for r in self._journal.records if r.event == "probe" and r["outcome"] == "ok"),
            key=lambda r: float(r["samples_per_s"]),
            default=None,
        )
        # Trials of the joint strategy measure speed themselves, and would measure their neighbours'.
        busy, needs, workers = None, list[int](), 0
        if fastest is not None and config.search.strategy == "staged":
            busy = (fastest.get("telemetry") or {}).get("gpu_sm_frac")
            needs = [int(r.get("peak_allocated_bytes") or 0) for r in self._journal.records if r.event == "probe"]
            workers = int(fastest["config"].get("num_workers") or 0)
        count = packing.on_card(card_bytes, [n for n in needs if n], busy, cores, workers, asked)
        idle_bytes = 4 * int((self._facts.get("parameters") or {}).get("total") or 0)  # a process keeps its model
        enforced = count > 1 or config.card.cap_bytes is not None
        return packing.Slots(
            count, max(1, cores // count), packing.share_bytes(card_bytes, count), idle_bytes, enforced
        )

    def _share(self) -> None:
        """Says how the trials share the card, where they do and it limits them."""
        slots = self._slots()
        if slots.count > 1 and slots.enforced and slots.slot_bytes is not None:
            gib = slots.slot_bytes / 2**30
            self._note(f"{slots.count} trials share the card, {gib:.2f} GiB each; a trial that needs more takes more")

    def _terms(self) -> SearchTerms:
        search = self._config.search
        deadline = None
        if search.max_time_s is not None:
            rate = max((p.samples_per_s for p in probed(self._journal.records)), default=0.0)
            reserve_s = 0.0
            if rate:
                named = len(self._config.named) + 1
                reserve_s = confirm.expected_s(self._config.budget.confirm, named, self._orders().samples, rate)
            deadline = self._started + search.max_time_s - self._used_s - reserve_s
        return SearchTerms(
            strategy=search.strategy,
            trials=search.trials,
            deadline=deadline,
            seed=search.seed,
            eta=self._config.budget.rungs.eta,
            objectives=self._facts["objectives"],
            patience=search.patience,
        )

    def _shortage(self) -> str:
        """Returns a sentence where search.max_time cannot hold even what comes beside the search, "" where it can."""
        limit_s, budget, done = self._config.search.max_time_s, self._config.budget, self._journal.records
        if limit_s is None or stage_done(done, "search"):
            return ""
        probing = self._config.search.strategy == "staged" and not stage_done(done, "probe")
        return wording.too_little_time(
            limit_s,
            passed_s=time.monotonic() - self._started + self._used_s,
            probing_s=budget.probe.max_time_s if probing else 0.0,
            confirming_s=confirm.expected_s(budget.confirm, len(self._config.named) + 1, 0, 1.0),
            trials=self._orders().concurrency,
        )

    def _pick(self) -> Pick | None:
        objective, mode = next(iter(self._facts["objectives"].items()))
        asked = self._config.pick.tolerance
        picked = confirm.choose(self._journal.records, objective, mode, self._tolerance(objective, mode))
        if picked is None or not isinstance(asked, str):
            return picked
        return dataclasses.replace(picked, rule=f"{picked.rule}; the tolerance is {asked} of that best")

    def _tolerance(self, objective: str, mode: str) -> float:
        """Returns what of the objective may be given up, in its own unit."""
        seen = [t.values.get(objective) for t in trials(self._journal.records) if t.outcome == "ok"]
        return absolute(self._config.pick.tolerance, [value for value in seen if value is not None], mode)

    def _rivals(self, picked: Pick) -> list[str]:
        """Returns the pick and the next fastest of the front, as many as the budget confirms."""
        rates = {t.id: t.samples_per_s or 0.0 for t in trials(self._journal.records)}
        others = sorted((t for t in picked.front if t != picked.best), key=lambda t: -rates[t])
        slower = [t for t in others if rates[t] <= rates[picked.best]]
        return (
            [picked.best, *slower[: self._config.budget.confirm.top - 1]]
            if self._config.pick.tolerance
            else [picked.best]
        )

    def _cap_bytes(self) -> int:
        """Returns what one trial that has the device to itself may take."""
        card = self._config.card
        if card.cap_bytes is not None:
            return card.cap_bytes
        if card.device == "cuda":
            device = self._facts["device"]
            reserve_bytes = card.reserve_bytes or calibration.context_bytes(str(device.get("name")))
            return int(device["memory_bytes"]) - reserve_bytes
        if self._ram_bytes is None:  # once: while trials run, less is free
            self._ram_bytes = int(psutil.virtual_memory().available * RAM_FRAC)
        return self._ram_bytes

    def _opening(self) -> Record:
        opening = last(self._journal.records, "study")
        if opening is None:
            raise RuntimeError(f"{self._journal.path} has no study record; open() writes it first")
        return opening

    def _told(self, record: Record) -> None:
        """Says what was written, and once for each knob that it was not honoured."""
        self._terminal.record(record)
        for text in active.disagreements(record.get("config") or {}, record.get("active") or {}):
            self._note(text)

    def _note(self, text: str) -> None:
        if not any(r.event == "note" and r["text"] == text for r in self._journal.records):
            self._journal.append("note", text=text)
            self._terminal.note(text)

    def _same_code(self, facts: Mapping[str, Any]) -> None:
        before = self._opening().get("workload_sha256")
        if before and before != facts["workload_sha256"]:
            self._note(
                "the workload's source has changed since this study began; its older trials ran the older source"
            )


def _journals(folders: Iterable[Path]) -> Iterator[tuple[str, list[Record]]]:
    """Yields runs by name with their records, at most the first `MOST_READ`; what cannot be read is passed over."""
    for folder in itertools.islice(folders, MOST_READ):
        with suppress(ConfigError):
            yield folder.name, read(folder / JOURNAL)[0]


def concurrency(config: StudyConfig) -> int:
    """Returns how many search trials run at once: as asked, else one a core up to four.

    On a card it is one as far as can be known before the probes, which may show room for more (`_Study._slots`).
    """
    if isinstance(config.concurrency, int):
        return config.concurrency
    return 1 if config.card.device == "cuda" else packing.on_cpu(doctor.cores())


def _resumed(config: StudyConfig) -> tuple[Path, StudyConfig]:
    folder = find_run(config.runs_dir, str(config.resume), asked=f"resume={config.resume}", option="runs_dir=PATH")
    records, _ = read(folder / JOURNAL)
    study = last(records, "study")
    if study is None:
        raise ConfigError(f"resume={config.resume}: {folder / JOURNAL} has no study record", remedy="start a new run")
    before = from_resolved(study["config"])
    asked = [o for o in config.overrides if o.split("=")[0] not in ("resume", "runs_dir", "dashboard")]
    if asked:
        raise ConfigError(
            f"{asked[0]} beside resume={config.resume}: a run goes on with the configuration it began with",
            allowed="resume=ID with dashboard=true or runs_dir=PATH",
            remedy="leave it out, or start a new run",
        )
    changes = {name: getattr(config, name) for name in ("resume", "runs_dir", "dashboard", "overrides")}
    return folder, before.model_copy(update=changes)


def _complete(config: StudyConfig) -> StudyConfig:
    """Returns the configuration with the workload's own defaults and the device settled."""
    if config.workload.ref not in workload.BUILT_IN:
        try:
            own = workload.load(config.workload.ref)
        except workload.WorkloadError as error:
            raise ConfigError(
                f"workload={config.workload.ref}: {error}", remedy="see the example in README.md"
            ) from error
        except Exception as error:  # whatever a user's file raises when it is imported
            said = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"workload={config.workload.ref} cannot be imported: {said}", remedy="-v says where"
            ) from error
        options = dict(getattr(own, "options", {}))
        config = with_workload_defaults(config, own.default_space, options)
    ranges = [n for n, p in config.space.parameters.items() if isinstance(p, Range) and kind_of(n) == "both"]
    if ranges and config.search.strategy == "staged":
        raise ConfigError(
            f"knobs.{ranges[0]} is a range, and the staged search probes each of its values",
            allowed="a list of values for adapter_rank and its like",
            remedy=f"knobs.{ranges[0]}=[8,16,32], or search.strategy=joint",
        )
    card = config.card
    if card.device != "cpu":  # a named card that is not here is emulated on what is
        card = card.on("cuda" if doctor.gpus() else "cpu")
    return apply_card(config, card)


def _described(bench: Laboratory, options: Mapping[str, Any], knobs: Mapping[str, Scalar]) -> dict[str, Any]:
    """Returns what the bench knows of device and workload; raises ConfigError where an option or its data are wrong."""
    try:
        facts = bench.describe(knobs)
    except PreflightError as error:
        said = workload_said(error.__cause__)
        if not said:
            raise
        raise option_fault(said, options) from error
    for split, count in (("training", facts["train_samples"]), ("validation", facts["val_samples"])):
        if count < 1:
            raise ConfigError(f"the {split} split of the workload is empty", remedy="other data, or more of it")
    return facts


def _setting(config: StudyConfig) -> Setting:
    device = config.card.device
    return Setting(
        workload=config.workload.ref,
        options=dict(config.workload.options),
        device=device,
        threads=doctor.cores(),
        cap_bytes=config.card.cap_bytes,
        seed=config.search.seed,
    )


def _new_folder(config: StudyConfig) -> Path:
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = _place(config, config.name or f"{now}-{secrets.token_hex(2)}")
    _refuse_taken(config, folder)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _place(config: StudyConfig, run_id: str) -> Path:
    return Path(config.runs_dir) / config.workload.name / run_id


def _refuse_taken(config: StudyConfig, folder: Path) -> None:
    if (folder / JOURNAL).exists():
        raise ConfigError(f"name={config.name}: {folder} exists", remedy=f"resume={config.name}, or another name")


def _study_fields(config: StudyConfig, facts: Mapping[str, Any], setting: Setting, run_id: str) -> dict[str, Any]:
    card = config.card
    virtual = card.emulated_on(int(facts["device"]["memory_bytes"]) if card.device == "cuda" else None)
    return {
        "id": run_id,
        "schema": 1,
        "workload": config.workload.ref,
        "workload_sha256": facts["workload_sha256"],
        "data_sha256": facts.get("data_sha256", ""),
        "shapes_sha256": facts.get("shapes_sha256", ""),
        "command": _command(config),
        "versions": versions(),
        "device": facts["device"],
        "card": {
            "name": card.name,
            "cap_bytes": card.cap_bytes,
            "virtual": virtual,
            "held_by": _held_by(config),
            "speed_of": facts["device"].get("name", card.device),
        },
        "seed": config.search.seed,
        "parameters": facts.get("parameters", {}),
        "objectives": facts["objectives"],
        "baselines": facts["baselines"],
        "train_samples": facts["train_samples"],
        "val_samples": facts["val_samples"],
        "horizon_samples": max(1, round(config.budget.train_epochs * int(facts["train_samples"]))),
        "concurrency": concurrency(config),
        "threads": setting.threads,
        "config": resolved(config),
    }


def _held_by(config: StudyConfig) -> str:
    """Returns what holds the trials to the card's bytes."""
    if config.card.cap_bytes is None:
        return "the device itself"
    if config.card.device == "cuda":
        return "the allocator's limit of a process"
    return "a count of live tensor bytes, and RLIMIT_DATA behind it"


def _command(config: StudyConfig) -> str:
    return shlex.join(["python", "-m", "tuning.run", *config.overrides])
