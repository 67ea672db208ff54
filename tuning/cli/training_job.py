"""A whole training of an exported configuration: its course, its checkpoints, its result, and what may end it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rich.console import Console

from trainables import checkpoint, hook, loop, training
from trainables.evaluation import Evaluation
from trainables.files import SHARED, write_whole
from trainables.knob_columns import Options, Seen
from trainables.knobs import Scalar
from trainables.plan import Plan, evenly
from trainables.reports import Event
from trainables.stopwatch import Window
from trainables.workload import WorkloadError
from tuning.cli.live import TrainingBar
from tuning.cli.signals import Interrupted, StopSignals
from tuning.cli.terminal import line, show
from tuning.config.best_file import Best
from tuning.config.errors import ConfigError, PreflightError, StoppedEarly, TuningError
from tuning.config.lenient import finite, numbers
from tuning.config.resolve import option_fault
from tuning.config.shareable import masked
from tuning.journal.runs import changes
from tuning.memory import oom
from tuning.memory.oom import Outcome
from tuning.report.format import duration, epochs, labelled, plural, size
from tuning.report.words import outcome as words
from tuning.search import runtime_check
from tuning.workers import user_code
from tuning.workers.device_facts import device_facts
from tuning.workers.dry_run import parameters_of
from tuning.workers.session import Session
from tuning.workers.windows import pass_samples_of, speed

MODEL, RESULT = "model.safetensors", "result.json"
_LOAD = {
    "gpu_sm_frac": "gpu {:.0%}",
    "temperature_c": "{:.0f} C",
    "power_w": "{:.0f} W",
    "machine_cpu_frac": "cpu {:.0%}",
}


@dataclass(frozen=True)
class TrainCommand:
    """The typed options, checked as far as they can be without torch; lengths, patience are None if none was.

    Without `evaluate_epochs` it is evaluated at the end alone. `typed` are the arguments, secrets masked.
    """

    out: Path
    device: str
    samples: int | None
    epochs: float | None
    seed: int
    checkpoint_s: float
    evaluate_epochs: float | None
    keeps_best: bool
    patience: int | None
    merges: bool
    resume: bool
    force: bool
    as_json: bool
    typed: tuple[str, ...]

    def line(self, *without: str) -> str:
        """Returns the command, to be pasted into a shell."""
        return shlex.join(["python", "-m", "tuning", "train", *(a for a in self.typed if a not in without)])

    @property
    def again(self) -> str:
        """Returns the command that begins again."""
        return self.line("--resume")

    @property
    def go_on(self) -> str:
        """Returns the command that goes on from the checkpoint in `out`, or begins again if there is none."""
        return f"{self.line('--resume', '--force')} --resume" if checkpoint.exists(self.out) else self.again


@dataclass(frozen=True)
class TrainingJob:
    """The training to do: the configuration, for how many samples, evaluated after which, and what was typed.

    `made_of` is what it rests on beside the configuration, by the words that a change is told in.
    """

    best: Best
    samples: int
    milestones: tuple[int, ...]
    command: TrainCommand
    made_of: Mapping[str, str]

    @property
    def identity(self) -> str:
        """Returns a hash of all that decides how it goes; a checkpoint of another job does not have it."""
        own = [self.best.ref, dict(self.best.options), dict(self.best.knobs), self.samples, self.command.seed]
        own += [self.milestones, self.command.keeps_best, self.command.patience]
        return hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training, as `result.json` has it. `samples_per_s` is None if nothing was left to train.

    `values` are of the weights written, those after `weights_at` samples; `tuning.load_model` reads the last four.
    """

    samples: int
    resumed_at: int
    ended_early: bool
    seed: int
    values: Mapping[str, float | None]
    samples_per_s: float | None
    train_s: float
    peak_allocated_bytes: int
    loss: float | None
    device: str
    threads: int
    active: Seen
    model_sha256: str | None
    weights_at: int = 0
    evaluations: Sequence[Evaluation] = ()
    workload: str = ""
    options: Options = field(default_factory=dict)
    knobs: Mapping[str, Scalar] = field(default_factory=dict)
    is_merged: bool = False


def train(job: TrainingJob, session: Session, messages: Console, signals: StopSignals) -> TrainingResult:
    """Returns the result after training to the end, going on from a checkpoint if asked.

    Raises Interrupted after a signal, with a checkpoint on the disk, and StoppedEarly on OOM and other errors.
    """
    state, command, out = _prepared(job, session, messages), job.command, job.command.out
    begun_at = state.samples
    os.environ[hook.OUT_FOLDER] = str(out.resolve())
    try:
        with TrainingBar(messages, job.samples, begun_at) as bar:
            lost = "" if isinstance(state, loop.State) else "a loop of its own keeps no checkpoint"
            course = Course(job, session, state, signals, bar, messages, lost)
            session.run(state, course.hear)
    except TuningError:
        raise
    except Exception as error:  # whatever a user's code raises
        if signals.signum:  # it may be the signal's doing, as where a loader's worker has taken it
            last = "the last checkpoint stands" if checkpoint.exists(out) else "there is no checkpoint yet"
            said = f", and the step could not be finished ({type(error).__name__}); {last}"
            raise Interrupted(signals.signum, said, f"resume with: {command.go_on}") from error
        raise error_of(error, job.best, "" if signals.at_once else command.go_on) from error
    finally:
        del os.environ[hook.OUT_FOLDER]
    plain = session.table.defaults  # best.yaml holds every knob; one at its default asks for nothing
    asked = {name: value for name, value in job.best.knobs.items() if value != plain[name]}
    notes = [*runtime_check.disagreements(asked, state.active, session.table), getattr(state, "remark", "")]
    if len({id(model) for model in getattr(state, "prepared", ())}) > 1:
        notes.append(f"{MODEL} holds one model, the first that came with an optimiser: save others in train(run)")
    for said in filter(None, notes):
        line(messages, f"note: {said}")
    windows, written = course.windows, course.best if command.keeps_best else state.evaluations[-1]
    payload = checkpoint.exported(state, merges=command.merges)
    result = TrainingResult(
        samples=state.samples,
        resumed_at=begun_at,
        ended_early=state.has_ended or state.samples < job.samples,
        seed=command.seed,
        values={name: finite(value) for name, value in written.values.items()},
        samples_per_s=speed(windows[1:] or windows).samples_per_s if windows else None,
        train_s=sum(w.wall_s for w in windows),
        peak_allocated_bytes=state.peak_allocated_bytes,
        loss=finite(windows[-1].loss) if windows else None,
        device=session.setting.device,
        threads=session.setting.threads,
        active=state.active,
        model_sha256=None if payload is None else hashlib.sha256(payload).hexdigest(),
        weights_at=written.samples,
        evaluations=[replace(one, values=numbers(one.values)) for one in state.evaluations],
        workload=job.best.ref,
        options=masked(job.best.options),
        knobs=job.best.knobs,
        is_merged=command.merges,
    )
    try:
        if payload is not None:
            write_whole(out / MODEL, payload, mode=SHARED)
        write_whole(out / RESULT, json.dumps(asdict(result), indent=1).encode(), mode=SHARED)
    except OSError as error:
        raise error_of(error, job.best, command.go_on) from error
    checkpoint.clear(out)
    return result


def _prepared(job: TrainingJob, session: Session, messages: Console) -> training.AnyState:
    """Returns the run before its first step, or where its checkpoint left it; a custom loop has none."""
    plan = Plan(samples=job.samples, milestones=job.milestones, window_s=min(1.0, job.command.checkpoint_s))
    with telling(job.best):
        state = training.prepare(session.resident, session.config(job.best.knobs, job.command.seed), plan)
        if not isinstance(state, loop.State):
            return state
        session.contract.dataset(state.config, "train")
    _require_model(job, state)
    if not job.command.resume:
        checkpoint.clear(job.command.out)
        return state
    try:
        then = checkpoint.load(state, job.command.out, identity=job.identity)
    except checkpoint.CheckpointError as error:
        raise ConfigError(f"--resume: {error}", remedy="--force to begin again") from None
    for said in changes((name, then.get(name), now) for name, now in job.made_of.items()):
        line(messages, f"warning: {said}; what the checkpoint has learned is from before that; --force begins again")
    return state


def _require_model(job: TrainingJob, state: training.AnyState) -> None:
    asked, model, ref = job.command, state.model, job.best.ref
    if model is None and (asked.keeps_best or asked.merges):
        raise ConfigError(f"--keep best, --merge: {ref} shows no model (run.prepare)", remedy="leave them out")
    if model is not None and asked.merges and not any(hasattr(part, "merge_and_unload") for part in model.modules()):
        raise ConfigError(f"--merge: the model of {ref} has no adapters of peft's", remedy="leave it out")


@dataclass
class Course:
    """Hears a training: says how it goes, keeps the best weights and checkpoints, or is `lost` and says why."""

    job: TrainingJob
    session: Session
    state: training.AnyState
    signals: StopSignals
    bar: TrainingBar
    messages: Console
    lost: str
    windows: list[Window] = field(default_factory=list)
    saved_at: float = 0.0

    @property
    def best(self) -> Evaluation:
        """Returns the first of the best evaluations, by the workload's first objective."""
        name, better = next(iter(self.session.resident.workload.objectives.items()))
        return (max if better == "max" else min)(self.state.evaluations, key=lambda one: one.values[name])

    def hear(self, event: Event) -> bool:
        """Takes an event; returns whether the training is to end there."""
        if isinstance(event, Evaluation):
            return self._evaluated(event)
        if isinstance(event, Window):
            self._passed(event)
        else:
            _require_model(self.job, self.state)
            show(self.messages, labelled(_banner(self.job, self.session, self.state)))
            self.saved_at = time.monotonic()
            self.signals.at_once, self.signals.go_on = False, self.job.command.go_on
            self.session.telemetry.begin()
        return False

    def _evaluated(self, event: Evaluation) -> bool:
        """Keeps the weights of the best evaluation if asked; returns whether there were too many without a better."""
        job, state, asked = self.job, self.state, self.job.command
        state.evaluations.append(event)
        best = self.best
        behind = len(state.evaluations) - 1 - state.evaluations.index(best)
        if asked.keeps_best and not behind:
            state.best_weights = checkpoint.weights(state)
        if len(job.milestones) > 1:
            values = ", ".join(f"{name} {value:.4f}" for name, value in event.values.items())
            line(self.messages, f"after {event.samples} samples: {values}{'' if behind else ', the best so far'}")
        if is_over := asked.patience is not None and behind >= asked.patience and state.samples < job.samples:
            said = f"{plural(behind, 'evaluation')} brought nothing better than that after {best.samples}"
            line(self.messages, f"ends after {event.samples} of {job.samples} samples: {said}")
        self.session.telemetry.skip()
        return is_over

    def _passed(self, event: Window) -> None:
        """Shows a window, and writes the checkpoint that is due; raises Interrupted if a signal came."""
        job, state, signals = self.job, self.state, self.signals
        self.windows.append(event)
        self.session.telemetry.read()
        last = self.windows[1:][-60:]  # of a minute; the first step is not like the others
        left_s = (job.samples - state.samples) / rate if (rate := speed(last).samples_per_s) else None
        self.bar.moved(state.samples, left_s, lambda: self._figures(event))
        due = time.monotonic() - self.saved_at >= job.command.checkpoint_s and state.samples < job.samples
        if (due or signals.signum) and not self.lost and isinstance(state, loop.State):
            try:
                checkpoint.save(state, job.command.out, identity=job.identity, made_of=job.made_of)
            except checkpoint.CheckpointError as error:
                self.lost = str(error)
                line(self.messages, f"note: trains without checkpoints: {self.lost}")
            self.saved_at, signals.go_on = time.monotonic(), job.command.go_on
        if signals.signum:
            of, command = f"{state.samples} of {job.samples} samples", job.command
            if self.lost:
                again = f"begin again with: {command.again}"
                raise Interrupted(signals.signum, f"; {of} are lost, for {self.lost}", again)
            raise Interrupted(signals.signum, f"; saved at {of}", f"resume with: {command.go_on}")

    def _figures(self, window: Window) -> Sequence[str]:
        """Returns speed, loss, memory of the device and load of the machine since they were last asked for."""
        seen, loss = self.session.telemetry.summary(), [] if math.isnan(window.loss) else [f"loss {window.loss:.3f}"]
        memory = [f"{size(held)} in tensors of {size(of)} reserved" for held, of in self.session.memory.in_use()]
        self.session.telemetry.begin()
        load = [form.format(seen[name]) for name, form in _LOAD.items() if seen.get(name) is not None]
        return [f"{window.samples_per_s:.1f} samples/s", *loss, *memory, *load]


def _banner(job: TrainingJob, session: Session, state: training.AnyState) -> Iterator[tuple[str, str]]:
    """Yields what is trained, on what, for how long, each with its label."""
    facts, knobs, pass_samples = device_facts(session.setting.device), state.config.knobs, pass_samples_of(state)
    yield "device", f"{facts['name']}, {size(facts['memory_bytes'])}, {plural(session.setting.threads, 'thread')}"
    if counted := parameters_of(list(state.model.parameters()) if state.model is not None else []):
        yield "model", f"{counted['total']:,} parameters, {counted['trainable']:,} trained"
    over_data = f"{epochs(job.samples / pass_samples)} of {pass_samples:,}: " if pass_samples else ""
    yield "samples", f"{over_data}{job.samples:,}" + (f", from {state.samples:,} on" if state.samples else "")
    if isinstance(state, loop.State):  # a custom loop may have settings of its own
        parts, micro = evenly(knobs.batch_size, knobs.micro_batch_size)
        precision = "fp32" if knobs.amp_dtype == "fp32" else f"autocast to {knobs.amp_dtype}"
        yield "batch", f"{knobs.batch_size} samples as {parts} x {micro}, {precision}"
    then, file = job.best.measured, job.best.path.name
    if (rate := then.samples_per_s.shown or then.samples_per_s.median) and then.device == facts["name"]:
        yield "time", f"about {duration((job.samples - state.samples) / rate)}, at {rate:.1f} samples/s of {file}"


@contextlib.contextmanager
def telling(best: Best) -> Iterator[None]:
    """Turns what is raised inside, where data and model are loaded, into an error that says where to mend it."""
    try:
        yield
    except TuningError:
        raise
    except Exception as error:  # whatever a user's code raises
        raise error_of(error, best) from error


def error_of(error: Exception, best: Best, go_on: str = "") -> TuningError:
    """Returns what a person is told; `go_on` is the command that goes on with what has begun to train, "" before."""
    failed, fault = user_code.failed(error), oom.fault(error)
    outcome = Outcome.DIVERGED if isinstance(error, loop.Diverged) else fault.outcome
    if not go_on and (isinstance(error, WorkloadError) or outcome is Outcome.DATA):
        told = option_fault(failed.text, best.options)
        told.what = f"{best.path}: {told.what}"
        return told
    if outcome is Outcome.CRASH and (not go_on or failed.last_lines):
        return user_code.error_of(failed, best.ref)
    remedy = failed.remedy or go_on or "put back what it needs, or mend it"
    what = words(outcome)
    if fault is oom.CACHE:
        remedy = f"ram_cache: false in {best.path.name}"
    elif outcome in (Outcome.OOM, Outcome.HOST_OOM):
        what, remedy = "out of memory", _less_memory(best) if go_on else "a larger card, or --device cpu"
    elif outcome is Outcome.DIVERGED:
        other = ", or amp_dtype: fp32," if best.knobs.get("amp_dtype") == "fp16" else ","
        remedy = failed.remedy or f"a lower learning_rate in {best.path.name}{other} and --force"
    text = user_code.in_words(error) if outcome is Outcome.CRASH else failed.text
    said = f"{what}: {text}" if go_on else f"{best.ref} cannot start: {text}"
    return (StoppedEarly if go_on else PreflightError)(said[:300], remedy=remedy)


def _less_memory(best: Best) -> str:
    micro = int(best.knobs["micro_batch_size"])
    if micro < 2:
        return "a larger card"
    half = f"halve knobs.micro_batch_size ({micro}) in {best.path.name} and begin again with --force"
    is_learned = "micro_batch_size changes what is learned" in best.measured.says
    return f"a larger card; or {half}, which changes what is learned here" if is_learned else half
