"""The start of `python -m tuning train`: folder, session, length, warnings, the training itself; and `profile`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from trainables import checkpoint, garbage, own_loop
from trainables.batches import fork_workers, size_of
from trainables.own_count import OwnResident
from trainables.source import source_hash
from trainables.workload import WorkloadError
from tuning.cli.replies import VERSION
from tuning.cli.signals import Interrupted, StopSignals
from tuning.cli.terminal import console, line, show
from tuning.cli.training_job import MODEL, RESULT, TrainCommand, TrainingJob, TrainingResult, telling, train
from tuning.config import atomic, best_file
from tuning.config.best_file import Best
from tuning.config.choices import available
from tuning.config.errors import ConfigError
from tuning.config.resolve import check_options
from tuning.journal.runs import versions
from tuning.report.format import duration, percent, plural, table
from tuning.workers import fingerprint, machine, nvml
from tuning.workers.device_facts import device_facts
from tuning.workers.dry_run import DRY_PLAN
from tuning.workers.operators import operators
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

ROWS, MOST_EVALUATIONS = 15, 10_000


def begin(best: Best, command: TrainCommand) -> int:
    """Returns the exit code; the result stands in `result.json`, the trained weights in `model.safetensors`."""
    messages = console(sys.stderr, os.environ)
    _check_folder(command.out, resume=command.resume, force=command.force)
    fork_workers()
    theirs = sys.stderr if command.as_json else sys.stdout  # what their code prints is not part of the JSON
    try:
        with (
            _unread_arguments(),
            contextlib.redirect_stdout(theirs),
            StopSignals() as signals,
            atomic.folder(command.out, "--out"),
            contextlib.ExitStack() as ends,
        ):
            ends.enter_context(_held(command.out))
            session = _session(best, command.device)
            ends.callback(session.peers.end)
            best = best_file.completed(best, session.table)
            job = _job(best, command, session, messages)
            result = train(job, session, messages, signals)
    except Interrupted as interrupted:
        line(messages, f"interrupted by {interrupted}")
        line(messages, interrupted.go_on or f"begin again with: {command.line()}")
        return 128 + interrupted.signum
    if command.as_json:
        print(json.dumps({"schema": VERSION, **asdict(result)}))
    else:
        _say(result, best, command.out, session)
    return 0


def show_operators(best: Best, device: str, steps: int, out: Path) -> int:
    """Returns 0 once the table of operators is printed and the trace is in `out`."""
    if out.is_dir():
        raise ConfigError(f"--out {out} is a folder", allowed="a file", remedy="--out trace.json.gz")
    fork_workers()
    with _unread_arguments(), atomic.folder(out.parent, "--out"), telling(best), contextlib.ExitStack() as ends:
        session = _session(best, device)
        ends.callback(session.peers.end)
        if getattr(session.resident.workload, "is_outside", False):
            raise ConfigError(f"{best.ref} is a command, whose operators are not seen", remedy="profile it by itself")
        window, rows = operators(session, best_file.completed(best, session.table).knobs, steps, out)
    on, speed = console(sys.stdout, os.environ), f"{window.samples_per_s:.1f} samples/s while profiled"
    line(on, f"{plural(window.steps, 'step')} of {best.ref} in {duration(window.wall_s)}, {speed}")
    cells = [(r.name, r.does, r.place, f"{r.calls / window.steps:.1f}", percent(r.frac)) for r in rows[:ROWS]]
    show(on, table(("operator", "what it does", "where", "calls a step", "of the time"), cells))
    line(on, f"trace   {out}: open it in https://ui.perfetto.dev or chrome://tracing")
    return 0


@contextlib.contextmanager
def _unread_arguments() -> Iterator[None]:
    ours, sys.argv = sys.argv, sys.argv[:1]  # their code finds none
    try:
        yield
    finally:
        sys.argv = ours


def _job(best: Best, command: TrainCommand, session: Session, messages: Console) -> TrainingJob:
    """Returns what to train; says what is otherwise than where the file was measured, and how long it trains."""
    is_outside = getattr(session.resident.workload, "is_outside", False)
    if is_outside and (command.keeps_best or command.merges):
        what = f"--keep best, --merge: {best.ref} is a command, which writes its own model"
        raise ConfigError(what, remedy="leave them out")
    source = source_hash(session.resident.workload)
    for warning in _warnings(best, session.setting.ranks, source):
        line(messages, f"warning: {warning}")
    samples, cadence = _length(best, command, session)
    if command.samples is None and command.epochs is None and best.samples is not None:
        line(messages, f"trains on {samples} samples, as {best.path.name} has it; --epochs N for a whole job")
    milestones = (*range(cadence, samples, cadence), samples)
    return TrainingJob(best, samples, milestones, command, _made_of(best, session, source))


def _say(result: TrainingResult, best: Best, out: Path, session: Session) -> None:
    model = f"{out / MODEL}" + f", after {result.weights_at} samples" * (result.weights_at != result.samples)
    if not result.model_sha256:
        is_outside = getattr(session.resident.workload, "is_outside", False)
        model = "written by the command" if is_outside else "not written: run.prepare was shown none"
    said = [*figures(result, best), f"model   {model}"]
    if not isinstance(session.resident, OwnResident):
        said.append(f"load    from tuning import load_model; model = load_model({str(out)!r})")
    for text in said:
        line(console(sys.stdout, os.environ), text)


def figures(result: TrainingResult, best: Best) -> Iterator[str]:
    """Yields each figure of a training beside what its file says was measured."""
    speed, now, file = best.measured.samples_per_s, result.samples_per_s, best.path.name
    said = speed.shown or speed.median
    if now:
        day = "" if best.provenance.created[:10] == datetime.now(UTC).date().isoformat() else ", another day"
        yield f"{now:.1f} samples/s" + (f"  ({file}{day}: {said:.1f}, {now / said - 1:+.1%})" if said else "")
    if result.ended_early:
        yield f"ended early, after {result.samples} samples"
    samples = best.measured.samples or best.samples
    after = "" if samples in (None, result.weights_at) else f" after {samples} samples"
    for objective, value in result.values.items():
        known = best.measured.quality.get(objective)
        ends = known.interval if known else None
        expected = f", another is expected within {ends[0]:.4f} to {ends[1]:.4f}" if ends and ends[0] < ends[1] else ""
        beside = f"  ({file}{after}: {known.mean:.4f}{expected})" if known else ""
        yield f"{objective} {'not finite' if value is None else f'{value:.4f}'}{beside}"


def _ranks(best: Best) -> int:
    return best.measured.devices_per_trial


def _session(best: Best, device: str) -> Session:
    here = len(nvml.gpus()) if device == "cuda" else machine.cores()
    ranks = _ranks(best) if _ranks(best) <= here else 1
    threads, options = max(1, machine.threads() // ranks), dict(best.options)
    setting = WorkerConfig(best.ref, options, device, threads, None, best.seed, hang_s=math.inf, ranks=ranks)
    try:
        session = Session(setting)
    except Exception as error:  # whatever a user's file raises when it is imported
        said = f"{'' if isinstance(error, WorkloadError) else f'{type(error).__name__}: '}{error}"
        what = f"{best.path}: workload.ref={best.ref}: {said}"
        is_file = best.ref.endswith(".py") or best.ref in available("workload")
        where = (
            "put the workload's file back, or workload=FILE.py says where it is now"
            if is_file
            else "type it where its run was started, which has the module"
        )
        raise ConfigError(what[:400], remedy=f"{where}, or install what it needs") from error
    declared = dict(getattr(session.resident.workload, "options", {}))
    try:
        check_options(best.options, declared, {})
    except ConfigError as error:
        raise ConfigError(f"{best.path}: {error.what}", allowed=error.allowed, remedy=error.remedy) from None
    return session


def _length(best: Best, command: TrainCommand, session: Session) -> tuple[int, int]:
    """Returns the samples to train on (as asked, as it was measured, or an epoch), and those between evaluations."""
    samples, epochs, every = command.samples or best.samples, command.epochs, command.evaluate_epochs
    is_asked = epochs is None and samples is not None
    if is_asked and every is None and isinstance(session.resident, OwnResident):  # passes are known once it runs
        return int(samples or 0), int(samples or 0)
    with telling(best):
        count = _pass_samples(best, session)
    if count == 0:
        raise ConfigError(f"{best.path}: the training split of {best.ref} is empty", remedy="put its data back")
    wanted = int(samples or 0) if is_asked else round((epochs or 1.0) * count)
    if wanted < 1:
        what = f"--epochs {epochs:g} is not one of {count} samples"
        raise ConfigError(what, allowed=f">= {1 / count:.2g}", remedy="--epochs 1")
    return wanted, wanted if every is None else max(1, round(every * count), wanted // MOST_EVALUATIONS)


def _pass_samples(best: Best, session: Session) -> int:
    """Returns the samples of one pass over the data; a custom loop runs up to its first batch for that."""
    config = session.config(best.knobs)
    if not isinstance(session.resident, OwnResident):
        return size_of(session.contract.dataset(config, "train"))
    state = own_loop.prepare(session.resident, config, DRY_PLAN)
    own_loop.train(state, lambda event: True)
    count = state.pass_samples
    del state
    garbage.collect()  # or what it held would be part of the training's peak
    return count


def _warnings(best: Best, ranks: int, source: str) -> Iterator[str]:
    """Yields what is otherwise than where the file was measured; `source` is the hash of the workload's code."""
    yield from best.warnings
    if ranks < (asked := _ranks(best)):
        yield f"measured with {asked} devices a trial; here one trains, with its own memory"
    then = best.provenance.workload_sha256
    if then and source and then != source:
        yield f"{best.ref}, or what it imports, has changed since {best.path.name} was measured"


def _made_of(best: Best, session: Session, source: str) -> dict[str, str]:
    """Returns what a checkpoint rests on beside its configuration; of a loop of its own, which keeps none, nothing."""
    if isinstance(session.resident, OwnResident):
        return {}
    with telling(best):
        config = session.config({**best.knobs, "ram_cache": False})  # which would hide that samples differ each time
        data = [session.contract.dataset(config, split) for split in ("train", "val")]
    own = versions()
    return {
        **{name: own[name] for name in ("cardtune", "torch")},
        "device": device_facts(session.setting.device)["name"],
        "data": fingerprint.of_data(data),
        "the workload's source": source,
    }


def _check_folder(out: Path, *, resume: bool, force: bool) -> None:
    try:
        is_file = out.exists() and not out.is_dir()
    except OSError as error:
        what = f"--out {out} cannot be read: {error.strerror or error}"
        raise ConfigError(what, allowed="a folder of yours", remedy="--out FOLDER") from None
    if is_file:
        raise ConfigError(f"--out {out} is a file", allowed="a folder of yours", remedy="--out FOLDER")
    unfinished = checkpoint.exists(out)
    if resume and not unfinished:
        raise ConfigError(f"--resume: {out} holds no checkpoint", remedy="leave out --resume")
    if resume or force:
        return
    if unfinished:
        raise ConfigError(f"{out} holds an unfinished run", remedy="--resume to go on, --force to begin again")
    if (out / RESULT).exists():
        raise ConfigError(f"{out} holds a finished run", remedy="--out another folder, or --force to train again")


@contextlib.contextmanager
def _held(out: Path) -> Iterator[None]:
    """Holds the folder against a second training into it; raises ConfigError where another process does."""
    folder = os.open(out, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"--out {out} is in use by another training"
            raise ConfigError(what, remedy="--out another folder, or wait for it") from None
        except OSError:  # not every file system holds folders
            pass
        yield
    finally:
        with contextlib.suppress(OSError):  # a loader's process may have it, too, and outlive this
            fcntl.flock(folder, fcntl.LOCK_UN)
        os.close(folder)
