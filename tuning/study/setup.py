"""A study before it starts: what it resumes, its folder, what its process is told, its first record."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainables.knobs import Options, Scalar
from tuning.config import atomic
from tuning.config.cards import GIB_BYTES
from tuning.config.complete import Machine, complete
from tuning.config.errors import ConfigError, UserCodeError
from tuning.config.load import BESIDE_RESUME, EXTENDABLE, PICK
from tuning.config.resolve import from_resolved, option_fault, resolved, workload_said
from tuning.config.schema import SearchSection, StudyConfig
from tuning.config.shareable import is_masked, masked_items
from tuning.config.space import Choice, Space, largest, shown
from tuning.journal.events import StudyRecord, WorkloadFacts, known_fields
from tuning.journal.records import read
from tuning.journal.run import History
from tuning.journal.runs import JOURNAL, JOURNAL_SCHEMA, LAST, changes, find_run, known_runs, require_known, versions
from tuning.memory.groups import defaults
from tuning.report.named import SHARES, last_word
from tuning.workers import doctor, executors, machine, nvml, slots
from tuning.workers.own_workload import UserFile
from tuning.workers.worker import Worker
from tuning.workers.worker_config import Description, WorkerConfig

FEW_VALIDATION = 50
"""Below so many validation samples a study says that their quality tells little."""
CACHE_TIME_FRAC, CACHE_UNTIL_S = 0.05, 6000.0
"""The share of a study's time that filling one RAM cache may take; without a limit as if that were 100 minutes."""
UNTRAINED = "untrained model"
"""The baseline that every workload has: its own model before any step."""


def prepare_config(config: StudyConfig, file: UserFile | None = None) -> tuple[Path | None, StudyConfig]:
    """Returns the folder of the run to resume, if any, and the configuration as it will be run.

    `file` reads that of a user's workload.

    Raises ConfigError for all that can be known without Ray; starts and writes nothing.
    """
    if file is None:
        with UserFile() as own:
            return prepare_config(config, own)
    folder = None
    if config.resume is not None:
        folder, config = _resumed(config)
        doctor.choose_devices(config)
    else:
        config = _begun(config, file)
    if config.target and not config.cluster:
        what = f"target={config.target} names a kind of device of a cluster, and there is none"
        raise ConfigError(what, remedy="leave it out, or cluster=ADDRESS")
    if config.cluster and config.dashboard:
        what = f"dashboard=true starts one, and the Ray cluster at cluster={config.cluster} has its own"
        raise ConfigError(what, remedy="leave out dashboard=true, or cluster=null")
    if config.devices_per_trial > 1:
        _check_devices_per_trial(config)
    return folder, config


def _check_devices_per_trial(config: StudyConfig) -> None:
    asked, cuda = config.devices_per_trial, config.card.device == "cuda"
    here = len(nvml.gpus()) if cuda else machine.cores()
    what = f"devices_per_trial={asked}"
    if config.cluster:
        said = f"{what} beside cluster={config.cluster}: a trial of several devices is of this machine alone"
        raise ConfigError(said, remedy="leave one of them out")
    if asked > here:
        unit = ("card" if cuda else "core") + "s" * (here != 1)
        raise ConfigError(f"{what}, and there are {here} {unit} for them", allowed=f"1 to {here}", remedy="fewer")
    most = here // asked
    if isinstance(config.concurrency, int) and config.concurrency > most:
        said = f"{what} and concurrency={config.concurrency} take {asked * config.concurrency} of {here}"
        raise ConfigError(said, allowed=f"concurrency=1 to {most}", remedy=f"concurrency={most}")


def _begun(config: StudyConfig, file: UserFile) -> StudyConfig:
    """Returns the configuration of a new run."""
    reason = atomic.unwritable(Path(config.runs_dir))
    if reason:
        what = f"runs_dir={config.runs_dir} cannot be written: {reason}"
        raise ConfigError(what, allowed="a folder of yours", remedy="runs_dir=PATH, another one")
    if config.name is not None:
        _refuse_taken(config, _place(config, config.name))
    doctor.choose_devices(config)
    declarations = None if config.workload.is_packaged else file.declared(config.workload.ref)
    return complete(config, _machine(), declarations)


def _machine() -> Machine:
    gpus = nvml.gpus()
    known = [gpu.capability for gpu in gpus if gpu.capability is not None]
    return Machine(machine.cores(), len(gpus), min(known, default=None))


def concurrency(config: StudyConfig) -> int:
    """Returns how many search trials run at once: as asked and as cards take them, else one.

    On cards it is one each as far as can be known before the probes, which may show room for more (`Limits.plan`).
    """
    asked, devices = config.concurrency, executors.devices(config)  # of a CPU one
    return slots.over_cards(asked, devices) if isinstance(asked, int) else devices


def _resumed(config: StudyConfig) -> tuple[Path, StudyConfig]:
    folder = find_run(config.runs_dir, str(config.resume), asked=f"resume={config.resume}", option="runs_dir=PATH")
    run = History(read(folder / JOURNAL)[0])
    study = run.study
    if study is None:
        raise ConfigError(f"resume={config.resume}: {folder / JOURNAL} has no study record", remedy="start a new run")
    require_known(study, folder)
    before = from_resolved(study.config, run.table)
    options = {**before.workload.options, **{n: v for n, v in config.secrets.items() if n in before.workload.options}}
    lacking = [n for n, v in options.items() if is_masked(v)]
    if lacking:
        what = f"resume={config.resume}: workload.{lacking[0]} is a secret, which was not written down"
        raise ConfigError(what, remedy=f"give it again, beside resume: workload.{lacking[0]}=<value>")
    typed = {o.split("=")[0] for o in config.overrides}
    kept = {"devices"} - typed | (set() if "cluster" in typed else {"cluster", "insecure_cluster"} - typed)
    changes = {name: getattr(config, name) for name in (*BESIDE_RESUME, "overrides") if name not in kept}
    workload = before.workload.model_copy(update={"options": options})
    changes |= {"workload": workload, "search": _with_more(before.search, config)}
    asked = {field: getattr(config.pick, field) for key, field in PICK.items() if key in typed}
    changes["pick"] = before.pick.model_copy(update=asked)
    return folder, before.model_copy(update=changes)


def _with_more(before: SearchSection, config: StudyConfig) -> SearchSection:
    """Returns how long the study is to search, with what was typed beside resume; raises ConfigError for less."""
    typed = [key for key in (o.partition("=")[0] for o in config.overrides) if key in EXTENDABLE]
    names = [name for name, _ in map(EXTENDABLE.__getitem__, typed)]
    after = before.model_copy(update={name: getattr(config.search, name) for name in names})
    for key in typed:
        old, new = (getattr(search, EXTENDABLE[key][1]) for search in (before, after))
        if old is None or (new is not None and new <= old):
            had = "no limit" if old is None else f"{old:g}{' s' * (key == 'search.max_time')}"
            raise ConfigError(
                f"{key}={shown(new)} beside resume={config.resume}: the run has {had}",
                allowed="more than it has",
                remedy="leave it out" if old is None else f"{key}={2 * old:g}",
            )
    return after


def reopens(config: StudyConfig, study: StudyRecord) -> list[str]:
    """Returns the parts of a resumed study that differ from its `study` record: "search" if it has more trials or time,
    "pick" if it asks for another quality.
    """
    before = from_resolved(study.config, config.space.table)
    return [name for name in ("search", "pick") if getattr(config, name) != getattr(before, name)]


def describe_workload(profiler: Worker, options: Options, knobs: Mapping[str, Scalar]) -> Description:
    """Returns what the worker knows of device and workload, the untrained model among the baselines.

    Raises ConfigError if an option or data are wrong.
    """
    try:
        facts = profiler.describe(knobs)
    except UserCodeError as error:
        said = workload_said(error.traceback)
        if not said:
            raise
        raise option_fault(said, options) from error
    for split, count in (("training", facts.train_samples), ("validation", facts.val_samples)):
        if count is not None and count < 1:
            raise ConfigError(f"the {split} split of the workload is empty", remedy="other data, or more of it")
    reached = profiler.sanity_check(knobs).values or facts.untrained
    return replace(facts, baselines={**facts.baselines, **({UNTRAINED: reached} if reached else {})})


def cautions(config: StudyConfig, study: StudyRecord) -> Iterator[str]:
    """Yields sentences about data and cores that are too few for what is asked, and seeds that are not the run's."""
    train, val = study.train_samples, study.val_samples
    if val is not None and val < FEW_VALIDATION:
        yield (
            f"the validation split has {val} sample{'s' * (val != 1)}: one of them more or less moves a share by "
            f"{1 / val:.0%}, so that qualities can hardly be told apart"
        )
    if study.reseeds and study.program:
        yield "the command has no {seed}: if it sets one by itself, trainings on other seeds tell nothing"
    elif study.reseeds:
        yield "train(run) sets a seed of its own, so that trainings on other seeds tell nothing: use run.seed"
    if study.silent_passes > 1:  # a report behind the first may have been about to come
        names = ", ".join(f"{name}=..." for name in study.objectives)
        yield (
            f"train(run) was tried for {study.silent_passes} passes over its data and reported nothing: a training "
            f"whose end is not reported has no result; in the loop, if run.evaluate_now: run.report({names})"
        )
    objective, given_up = next(iter(study.objectives), ""), config.pick.tolerance
    if isinstance(given_up, float) and given_up >= 0.5 and last_word(objective) in SHARES:
        yield f"pick.tolerance={given_up:g} gives up half of {objective} or more, which is 0 to 1: a hundredth is 0.01"
    for name, knobs in config.named.items():
        if (size := int(knobs.get("batch_size", 0))) > train:
            yield f"{name} has batches of {size}, and there are {train} training samples: batches are of {train}"
    cards = nvml.gpus() if config.card.device == "cuda" else []
    if len({(gpu.name, gpu.memory_bytes // GIB_BYTES) for gpu in cards}) > 1:
        names = ", ".join(f"{gpu.name} ({gpu.memory_bytes / GIB_BYTES:.0f} GiB)" for gpu in cards)
        yield f"cards that differ are used as the least of them: {names}; devices=N leaves the others out"
    allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    if allocator and config.card.device == "cuda":
        yield f"PYTORCH_ALLOC_CONF={allocator} is obeyed; memory is predicted as if it were not set"
    workers = largest(config.space.given("num_workers"))
    for key, asked in (("knobs.num_workers", workers), ("concurrency", config.concurrency)):
        if isinstance(asked, int | float) and asked > 2 * machine.cores():
            yield f"{key} goes to {asked:g}, and this machine has {machine.cores()} cores"


def comparable(space: Space, start: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Returns the searched system knobs that could change what is learned, each with a value unlike that of `start`.

    The micro-batch is always among them, as running out of memory halves it. Knobs that only load, copy or time are
    not, except for the largest number of loader processes, each of which may read all of a stream.
    """
    rows = space.table
    altered: dict[str, Scalar] = {"micro_batch_size": 1}
    for name, parameter in space.subset({"system"}).parameters.items():
        acts = rows[name].span in ("compute", "augment") or name in ("ram_cache", "num_workers") or name in rows.own
        if acts and isinstance(parameter, Choice) and name not in altered:
            others = [v for v in parameter.values if v != start.get(name, rows.defaults[name])]
            altered[name] = max(others, key=float) if name == "num_workers" else others[0]
    return altered


def switched_on(space: Space) -> dict[str, Scalar]:
    """Returns the searched knobs that can switch on a part of the work, at their largest values."""
    switches = [n for n in space.table.by_memory["switch"] if space.table[n].kind == "both"]
    choices = {n: p for n in switches if isinstance(p := space.parameters.get(n), Choice)}
    return {n: max(p.values, key=float) for n, p in choices.items()}


def setting_of(config: StudyConfig) -> WorkerConfig:
    """Returns what every process of the study must know."""
    device = config.card.device
    return WorkerConfig(
        workload=config.workload.ref,
        options=dict(config.workload.options),
        device=device,
        threads=max(1, machine.threads() // config.devices_per_trial),
        cap_bytes=config.card.cap_bytes,
        seed=config.search.seed,
        hang_s=config.search.hang_time_s,
        cache_s=CACHE_TIME_FRAC * (config.search.max_time_s or CACHE_UNTIL_S),
        slots=concurrency(config),
        folder=str(Path.cwd()),
        ranks=config.devices_per_trial,
        start=defaults(config.space),  # with the table's own a model in four bits would be loaded in 32 at first
    )


def new_folder(config: StudyConfig) -> Path:
    """Makes the folder of a new run and returns it; raises ConfigError if its name is taken."""
    now = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = _place(config, config.name or f"{now}-{secrets.token_hex(2)}")
    _refuse_taken(config, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        what = f"{folder} cannot be made: {error.strerror}"
        raise ConfigError(what, allowed="a folder of yours", remedy="runs_dir=PATH, another one") from error
    return folder


def _place(config: StudyConfig, run_id: str) -> Path:
    return Path(config.runs_dir) / config.workload.name / run_id


def _refuse_taken(config: StudyConfig, folder: Path) -> None:
    if folder.name == LAST:
        raise ConfigError(f"name={LAST} means the newest run", remedy="another name")
    taken = next((path for path in known_runs(config.runs_dir) if path.name == folder.name), None)
    if taken is not None:  # of another workload too: `show` and `resume` are given the name alone
        raise ConfigError(f"name={folder.name}: {taken} exists", remedy=f"resume={folder.name}, or another name")


def differences(study: StudyRecord, facts: Description, setting: WorkerConfig) -> list[str]:
    """Returns how machine, data and code differ from the study's beginning, as far as its record has them, in words."""
    here, now = facts.device, versions()
    pairs: list[tuple[str, Any, Any]] = [
        *((name, study.versions.get(name), now.get(name)) for name in ("cardtune", "torch")),
        *((f"device {n}", study.device.get(n), here.get(n)) for n in ("type", "name", "memory_bytes", "cores")),
        ("threads", study.threads, setting.threads),
        ("cap_bytes", study.cap_bytes, setting.cap_bytes),
        ("data", study.data_sha256, facts.data_sha256),
        ("the workload's source", study.workload_sha256, facts.workload_sha256),
    ]
    return changes(pairs)


def study_fields(
    config: StudyConfig, facts: Description, setting: WorkerConfig, run_id: str, nodes: int
) -> dict[str, object]:
    """Returns the fields of the `study` record: what is run, with which knobs, where, on what data and code."""
    card = config.card
    virtual = card.emulated_on(int(facts.device["memory_bytes"]) if card.device == "cuda" else None)
    return {
        "id": run_id,
        "schema": JOURNAL_SCHEMA,
        "workload": config.workload.ref,
        "command": command_of(config),
        "versions": versions(),
        "card": {"name": card.name, "cap_bytes": card.cap_bytes, "virtual": virtual},
        "seed": config.search.seed,
        **known_fields(facts, WorkloadFacts),
        "horizon_samples": _horizon(config, facts.train_samples),
        "concurrency": nodes * concurrency(config),
        "threads": setting.threads,
        "knobs": config.space.table.as_raw(),
        "hooks": list(config.space.table.hooks),
        "config": resolved(config),
    }


def _horizon(config: StudyConfig, train_samples: int) -> int | None:
    """Returns the samples of a trial that is never stopped, None if the probes are to say (`Limits.horizon`)."""
    epochs = config.budget.train_epochs
    return None if isinstance(epochs, str) else max(1, round(epochs * train_samples))


def command_of(config: StudyConfig) -> str:
    """Returns the command that was typed, to be typed again."""
    return shlex.join(["python", "-m", "tuning.run", *masked_items(config.overrides)])
