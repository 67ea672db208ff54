"""One whole training of an exported configuration: its checkpoints, its signals, its result, and what may end it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors.torch import save as save_tensors

from trainables import checkpoint, loop, training
from trainables.files import SHARED, write_whole
from trainables.knobs import table
from trainables.plan import Plan
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
from tuning.search import runtime_check
from tuning.workers import user_code
from tuning.workers.session import Session

MODEL, RESULT = "model.safetensors", "result.json"
FORCE = " --force"


@dataclass(frozen=True)
class TrainingJob:
    """What to train: the configuration, how far, where to, and how often to write it down (seconds)."""

    best: Best
    samples: int
    seed: int
    out: Path
    checkpoint_s: float
    device: str
    threads: int
    again: str
    """The command without --resume, to be pasted into a shell."""
    made_of: Mapping[str, str]
    """What it rests on beside the configuration, by the words that a change is told in."""

    @property
    def go_on(self) -> str:
        """Returns the command that goes on from the checkpoint in `out`, or that begins again where there is none."""
        return f"{self.again.removesuffix(FORCE)} --resume" if checkpoint.exists(self.out) else self.again

    @property
    def identity(self) -> str:
        """Returns a hash of the configuration; a checkpoint of another job does not have it."""
        own = [self.best.ref, dict(self.best.options), dict(self.best.knobs), self.samples, self.seed]
        return hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()


def train(
    job: TrainingJob, session: Session, messages: Console, signals: StopSignals, *, resume: bool
) -> dict[str, Any]:
    """Returns the result after training to the end, going on from a checkpoint if asked.

    Raises Interrupted after a signal, with a checkpoint on the disk, and StoppedEarly on OOM and other errors.
    """
    state = _prepared(job, session, messages, resume=resume)
    with telling(job.best):
        session.together(state)
    begun_at = state.samples
    with TrainingBar(messages, job.samples, state.samples) as bar:
        windows, values = _run(job, state, signals, bar, messages)
    plain = table().defaults  # best.yaml holds every knob; one at its default asks for nothing
    asked = {name: value for name, value in job.best.knobs.items() if value != plain[name]}
    for said in runtime_check.disagreements(asked, state.active):
        line(messages, f"note: {said}")
    if said := getattr(state, "remark", ""):
        line(messages, f"note: {said}")
    if len({id(model) for model in getattr(state, "prepared", ())}) > 1:
        line(
            messages, f"note: {MODEL} holds one model, the first that came with an optimiser: save others in train(run)"
        )
    steady = windows[1:] or windows
    wall_s = sum(w.wall_s for w in steady)
    result = {
        "samples": state.samples,
        "resumed_at": begun_at,
        "ended_early": state.has_ended,
        "seed": job.seed,
        "values": {name: finite(value) for name, value in values.items()},
        "samples_per_s": sum(w.samples for w in steady) / wall_s if wall_s else None,
        "train_s": sum(w.wall_s for w in windows),
        "peak_allocated_bytes": state.peak_allocated_bytes,
        "loss": finite(windows[-1].loss) if windows else None,
        "device": job.device,
        "threads": job.threads,
        "active": state.active,
    }
    payload = _weights(state)
    result["model_sha256"] = None if payload is None else hashlib.sha256(payload).hexdigest()
    try:
        if payload is not None:
            write_whole(job.out / MODEL, payload, mode=SHARED)
        write_whole(job.out / RESULT, json.dumps(result, indent=1).encode(), mode=SHARED)
    except OSError as error:
        raise _ended(error, job) from error
    checkpoint.clear(job.out)
    return result


def _weights(state: training.AnyState) -> bytes | None:
    """Returns what was trained as a safetensors file; None of a loop of one's own that never showed its model."""
    if state.model is None:
        return None
    trained = checkpoint.trained_tensors(state.model, state.marks)
    return save_tensors({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in trained.items()})


def _prepared(job: TrainingJob, session: Session, messages: Console, *, resume: bool) -> training.AnyState:
    """Returns the run before its first step, or where its checkpoint left it; a loop of one's own has none."""
    plan = Plan(samples=job.samples, milestones=(job.samples,), window_s=min(1.0, job.checkpoint_s))
    with telling(job.best):
        state = training.prepare(session.resident, session.config(job.best.knobs, job.seed), plan)
        if not isinstance(state, loop.State):
            return state
        session.contract.dataset(state.config, "train")
    if not resume:
        checkpoint.clear(job.out)
        return state
    try:
        then = checkpoint.load(state, job.out, identity=job.identity)
    except checkpoint.CheckpointError as error:
        raise ConfigError(f"--resume: {error}", remedy="--force to begin again") from None
    for said in changes((name, then.get(name), now) for name, now in job.made_of.items()):
        line(messages, f"warning: {said}; what the checkpoint has learned is from before that; --force begins again")
    return state


def _run(
    job: TrainingJob, state: training.AnyState, signals: StopSignals, bar: TrainingBar, messages: Console
) -> tuple[list[Window], dict[str, float]]:
    """Returns the windows and the last evaluation of training to the end; a signal ends it behind a whole window."""
    windows: list[Window] = []
    values: dict[str, float] = {}
    saved, keeps = time.monotonic(), isinstance(state, loop.State)
    lost = "a loop of its own keeps no checkpoint"
    signals.at_once, signals.go_on = False, job.go_on
    try:
        for event in training.train(state):
            if isinstance(event, loop.Evaluation):
                values = event.values
                continue
            windows.append(event)
            bar.moved(state.samples, event.samples_per_s, event.loss)
            due = time.monotonic() - saved >= job.checkpoint_s and state.samples < job.samples
            if (due or signals.signum) and keeps and isinstance(state, loop.State):
                try:
                    checkpoint.save(state, job.out, identity=job.identity, made_of=job.made_of)
                except checkpoint.CheckpointError as error:
                    keeps, lost = False, str(error)
                    line(messages, f"note: trains without checkpoints: {lost}")
                saved = time.monotonic()
                signals.go_on = job.go_on
            if signals.signum and not keeps:
                said = f"; {state.samples} of {job.samples} samples are lost, for {lost}"
                raise Interrupted(signals.signum, said, f"begin again with: {job.again}")
            if signals.signum:
                said = f"; saved at {state.samples} of {job.samples} samples"
                raise Interrupted(signals.signum, said, f"resume with: {job.go_on}")
        # Nothing was left to train where the checkpoint is of the last step.
        if not values and isinstance(state, loop.State):
            values = loop.evaluate(state, state.model).values
        return windows, values
    except Exception as error:  # whatever a user's code raises
        if signals.signum:  # it may be the signal's doing, as where a loader's worker has taken it
            last = "the last checkpoint stands" if checkpoint.exists(job.out) else "there is no checkpoint yet"
            said = f", and the step could not be finished ({type(error).__name__}); {last}"
            raise Interrupted(signals.signum, said, f"resume with: {job.go_on}") from error
        raise _ended(error, job) from error


@contextlib.contextmanager
def telling(best: Best) -> Iterator[None]:
    """Turns what is raised inside, where data and model are loaded, into an error that says where to mend it."""
    try:
        yield
    except TuningError:
        raise
    except Exception as error:  # whatever a user's code raises
        outcome = oom.classify(error)
        if isinstance(error, WorkloadError) or outcome is oom.Outcome.DATA:
            fault = option_fault(user_code.in_words(error).removeprefix(f"{type(error).__name__}: "), best.options)
            fault.what = f"{best.path}: {fault.what}"
            raise fault from error
        if outcome is oom.Outcome.CRASH:
            raise user_code.error_of(user_code.failed(error), best.ref) from error
        short = outcome in (oom.Outcome.OOM, oom.Outcome.HOST_OOM)
        if oom.fault(error) is oom.CACHE:
            raise PreflightError(str(error)[:300], remedy=f"ram_cache: false in {best.path.name}") from error
        remedy = "a larger card, or --device cpu" if short else "put back what it needs, or mend it"
        raise PreflightError(f"{best.ref} cannot start: {error}"[:300], remedy=remedy) from error


def _ended(error: BaseException, job: TrainingJob) -> TuningError:
    outcome = oom.Outcome.DIVERGED if isinstance(error, loop.Diverged) else oom.classify(error)
    if oom.fault(error) is oom.CACHE:
        return StoppedEarly(str(error)[:300], remedy=f"ram_cache: false in {job.best.path.name}")
    if outcome in (oom.Outcome.OOM, oom.Outcome.HOST_OOM):
        micro = int(job.best.knobs["micro_batch_size"])
        half = f"halve knobs.micro_batch_size ({micro}) in {job.best.path.name} and begin again with --force"
        remedy = half if micro > 1 else "a larger card"
        if "micro_batch_size changes what is learned" in str(job.best.measured.get("says")):
            remedy = f"a larger card; or {remedy}, which changes what is learned here"
        return StoppedEarly(f"out of memory: {error}"[:300], remedy=remedy)
    if outcome is oom.Outcome.CRASH and user_code.frames(error):
        return user_code.error_of(user_code.failed(error), job.best.ref)
    again = (
        f"a lower learning_rate in {job.best.path.name}, and --force" if outcome is oom.Outcome.DIVERGED else job.go_on
    )
    said = str(error) if outcome is oom.Outcome.DIVERGED else user_code.in_words(error)
    return StoppedEarly(f"{outcome}: {said}"[:300], remedy=user_code.remedy(error) or again)
