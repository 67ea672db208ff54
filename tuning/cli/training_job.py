"""A whole training of an exported configuration: its checkpoints, its signals, its result, and what may end it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from safetensors.torch import save as save_tensors

from trainables import checkpoint, hook, loop, training
from trainables.files import SHARED, write_whole
from trainables.knob_columns import Seen
from trainables.plan import Plan
from trainables.reports import READY, Event
from trainables.stopwatch import Window
from trainables.workload import WorkloadError
from tuning.cli.live import TrainingBar
from tuning.cli.signals import Interrupted, StopSignals
from tuning.cli.terminal import line
from tuning.config.best_file import Best
from tuning.config.errors import ConfigError, PreflightError, StoppedEarly, TuningError
from tuning.config.lenient import finite
from tuning.config.resolve import option_fault
from tuning.journal.runs import changes
from tuning.memory import oom
from tuning.memory.oom import Outcome
from tuning.report.words import outcome as words
from tuning.search import runtime_check
from tuning.workers import user_code
from tuning.workers.session import Session
from tuning.workers.windows import speed

MODEL, RESULT = "model.safetensors", "result.json"


@dataclass(frozen=True)
class TrainCommand:
    """The typed options, checked as far as they can be without torch; lengths are None if none was.

    `typed` are the arguments, secrets masked.
    """

    out: Path
    device: str
    samples: int | None
    epochs: float | None
    seed: int
    checkpoint_s: float
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
    """The training to do: the configuration, for how many samples, and what was typed.

    `made_of` is what it rests on beside the configuration, by the words that a change is told in.
    """

    best: Best
    samples: int
    command: TrainCommand
    made_of: Mapping[str, str]

    @property
    def identity(self) -> str:
        """Returns a hash of the configuration; a checkpoint of another job does not have it."""
        own = [self.best.ref, dict(self.best.options), dict(self.best.knobs), self.samples, self.command.seed]
        return hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training, as `result.json` has it. `samples_per_s` is None if nothing was left to train."""

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


def train(job: TrainingJob, session: Session, messages: Console, signals: StopSignals) -> TrainingResult:
    """Returns the result after training to the end, going on from a checkpoint if asked.

    Raises Interrupted after a signal, with a checkpoint on the disk, and StoppedEarly on OOM and other errors.
    """
    state, out = _prepared(job, session, messages), job.command.out
    begun_at = state.samples
    os.environ[hook.OUT_FOLDER] = str(out.resolve())
    try:
        with TrainingBar(messages, job.samples, state.samples) as bar:
            windows, values = _run(job, session, state, signals, bar, messages)
    finally:
        del os.environ[hook.OUT_FOLDER]
    plain = session.table.defaults  # best.yaml holds every knob; one at its default asks for nothing
    asked = {name: value for name, value in job.best.knobs.items() if value != plain[name]}
    notes = [*runtime_check.disagreements(asked, state.active, session.table), getattr(state, "remark", "")]
    if len({id(model) for model in getattr(state, "prepared", ())}) > 1:
        notes.append(f"{MODEL} holds one model, the first that came with an optimiser: save others in train(run)")
    for said in filter(None, notes):
        line(messages, f"note: {said}")
    payload = _weights(state)
    result = TrainingResult(
        samples=state.samples,
        resumed_at=begun_at,
        ended_early=state.has_ended,
        seed=job.command.seed,
        values={name: finite(value) for name, value in values.items()},
        samples_per_s=speed(windows[1:] or windows).samples_per_s if windows else None,
        train_s=sum(w.wall_s for w in windows),
        peak_allocated_bytes=state.peak_allocated_bytes,
        loss=finite(windows[-1].loss) if windows else None,
        device=session.setting.device,
        threads=session.setting.threads,
        active=state.active,
        model_sha256=None if payload is None else hashlib.sha256(payload).hexdigest(),
    )
    try:
        if payload is not None:
            write_whole(out / MODEL, payload, mode=SHARED)
        write_whole(out / RESULT, json.dumps(asdict(result), indent=1).encode(), mode=SHARED)
    except OSError as error:
        raise error_of(error, job.best, job.command.go_on) from error
    checkpoint.clear(out)
    return result


def _weights(state: training.AnyState) -> bytes | None:
    """Returns what was trained as a safetensors file; None of a custom loop that never showed its model."""
    if state.model is None:
        return None
    trained = checkpoint.trained_tensors(state.model, state.marks)
    return save_tensors({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in trained.items()})


def _prepared(job: TrainingJob, session: Session, messages: Console) -> training.AnyState:
    """Returns the run before its first step, or where its checkpoint left it; a custom loop has none."""
    plan = Plan(samples=job.samples, milestones=(job.samples,), window_s=min(1.0, job.command.checkpoint_s))
    with telling(job.best):
        state = training.prepare(session.resident, session.config(job.best.knobs, job.command.seed), plan)
        if not isinstance(state, loop.State):
            return state
        session.contract.dataset(state.config, "train")
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


def _run(
    job: TrainingJob,
    session: Session,
    state: training.AnyState,
    signals: StopSignals,
    bar: TrainingBar,
    messages: Console,
) -> tuple[list[Window], dict[str, float]]:
    """Returns the windows and the last evaluation of training to the end; a signal ends it behind a whole window."""
    windows, values, command, best = list[Window](), dict[str, float](), job.command, job.best
    saved_at, has_begun = time.monotonic(), False
    lost = "" if isinstance(state, loop.State) else "a loop of its own keeps no checkpoint"

    def heard(event: Event) -> None:
        nonlocal values, saved_at, has_begun, lost
        if event == READY:
            saved_at, has_begun = time.monotonic(), True
            signals.at_once, signals.go_on = False, command.go_on
        if isinstance(event, loop.Evaluation):
            values = event.values
        if not isinstance(event, Window):
            return
        windows.append(event)
        bar.moved(state.samples, event.samples_per_s, event.loss)
        due = time.monotonic() - saved_at >= command.checkpoint_s and state.samples < job.samples
        if (due or signals.signum) and not lost and isinstance(state, loop.State):
            try:
                checkpoint.save(state, command.out, identity=job.identity, made_of=job.made_of)
            except checkpoint.CheckpointError as error:
                lost = str(error)
                line(messages, f"note: trains without checkpoints: {lost}")
            saved_at, signals.go_on = time.monotonic(), command.go_on
        of = f"{state.samples} of {job.samples} samples"
        if signals.signum and lost:
            raise Interrupted(signals.signum, f"; {of} are lost, for {lost}", f"begin again with: {command.again}")
        if signals.signum:
            raise Interrupted(signals.signum, f"; saved at {of}", f"resume with: {command.go_on}")

    try:
        session.run(state, heard)
        # Nothing was left to train where the checkpoint is of the last step.
        if not values and isinstance(state, loop.State):
            values = loop.evaluate(state, state.model).values
        return windows, values
    except TuningError:
        raise
    except Exception as error:  # whatever a user's code raises
        if signals.signum:  # it may be the signal's doing, as where a loader's worker has taken it
            last = "the last checkpoint stands" if checkpoint.exists(command.out) else "there is no checkpoint yet"
            said = f", and the step could not be finished ({type(error).__name__}); {last}"
            raise Interrupted(signals.signum, said, f"resume with: {command.go_on}") from error
        raise error_of(error, best, command.go_on if has_begun else "") from error


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
        remedy = failed.remedy or f"a lower learning_rate in {best.path.name}, and --force"
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
