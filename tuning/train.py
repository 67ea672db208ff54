"""python -m tuning train --from best.yaml: the whole job with an exported configuration, checkpointed and resumable."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from safetensors.torch import save as save_tensors

from trainables import checkpoint, loop
from trainables.batches import size_of
from trainables.stopwatch import Window
from trainables.workload import WorkloadError
from tuning import doctor
from tuning.backends.session import Session, Setting
from tuning.errors import ConfigError, PreflightError, StoppedEarly, TuningError
from tuning.export import Best, read_best
from tuning.policies import oom

MODEL, RESULT = "model.safetensors", "result.json"
PLAIN_LINE_S = 5.0
"""Where there is no terminal to draw a bar on, a line this often."""


@dataclass(frozen=True)
class Job:
    """What to train: the configuration, how far, where to, and how often to write it down (seconds)."""

    best: Best
    samples: int
    seed: int
    out: Path
    checkpoint_s: float
    device: str
    threads: int

    @property
    def identity(self) -> str:
        """Returns a hash of everything that decides what is learned; a checkpoint of another job does not have it."""
        own = [self.best.ref, dict(self.best.options), dict(self.best.knobs), self.samples, self.seed]
        return hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode()).hexdigest()


def parser() -> argparse.ArgumentParser:
    """Returns the arguments of the command."""
    made = argparse.ArgumentParser(
        prog="python -m tuning train",
        description="Trains with an exported configuration, unchanged.",
        epilog="python -m tuning train --from runs/nli/ID/best.yaml --epochs 3 --out trained",
    )
    made.add_argument("--from", dest="source", required=True, metavar="YAML", help="a best.yaml")
    length = made.add_mutually_exclusive_group()
    length.add_argument("--samples", type=int, help="training samples seen  [as many as best.yaml was measured with]")
    length.add_argument("--epochs", type=float, help="the same in passes over the training split")
    made.add_argument("--seed", type=int, help="weights and order of the samples  [of best.yaml]")
    made.add_argument("--out", type=Path, help="folder for model, result and checkpoint  [train/ beside best.yaml]")
    made.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    made.add_argument("--force", action="store_true", help="train again over what is in --out")
    made.add_argument("--checkpoint-every", type=float, default=60.0, metavar="S", help="seconds  [60]")
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    made.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    return made


def main(argv: Sequence[str]) -> int:
    """Returns the exit code; the result stands in `result.json`, the trained weights in `model.safetensors`."""
    asked = parser().parse_args(argv)
    best = read_best(Path(asked.source))
    messages = Console(stderr=True, highlight=False)
    for warning in best.warnings:
        messages.print(f"warning: {warning}", markup=False)
    device = asked.device if asked.device != "auto" else "cuda" if doctor.gpus() else "cpu"
    session = _session(best, device)
    job = _job(asked, best, session, device)
    _check_folder(job.out, resume=asked.resume, force=asked.force)
    job.out.mkdir(parents=True, exist_ok=True)
    if asked.force:
        checkpoint.clear(job.out)
    result = train(job, session, messages, resume=asked.resume)
    if asked.json:
        print(json.dumps(result))
    else:
        _say(result, best, job)
    return 0


def train(job: Job, session: Session, messages: Console, *, resume: bool) -> dict[str, Any]:
    """Returns the result after training to the end, going on from a checkpoint if asked; raises StoppedEarly on OOM."""
    plan = loop.Plan(samples=job.samples, milestones=(job.samples,), window_s=min(1.0, job.checkpoint_s))
    try:
        state = loop.prepare(session.resident, session.config(job.best.knobs, job.seed), plan)
        session.resident.dataset(state.config, "train")
    except (WorkloadError, OSError, RuntimeError, MemoryError, ValueError) as error:
        raise PreflightError(
            f"{job.best.ref} cannot start: {error}"[:300], remedy="put its data and model back"
        ) from error
    if resume:
        try:
            checkpoint.load(state, job.out, identity=job.identity)
        except checkpoint.CheckpointError as error:
            raise ConfigError(f"--resume: {error}", remedy="--force to begin again") from None
    begun_at = state.samples
    windows: list[Window] = []
    values: dict[str, float] = {}
    saved = time.monotonic()
    with _progress(messages, job, state) as progress:
        try:
            for event in loop.train(state):
                if isinstance(event, loop.Evaluation):
                    values = event.values
                    continue
                windows.append(event)
                progress.moved(state.samples, event)
                if time.monotonic() - saved >= job.checkpoint_s and state.samples < job.samples:
                    checkpoint.save(state, job.out, identity=job.identity)
                    saved = time.monotonic()
        except (RuntimeError, MemoryError, OSError, loop.Diverged) as error:
            raise _ended(error, job) from error
    steady = windows[1:] or windows
    rates = [w.samples_per_s for w in steady]
    result = {
        "samples": state.samples,
        "resumed_at": begun_at,
        "seed": job.seed,
        "values": values,
        "samples_per_s": sum(w.samples for w in steady) / sum(w.wall_s for w in steady),
        "window_median_samples_per_s": statistics.median(rates),
        "train_s": sum(w.wall_s for w in windows),
        "peak_allocated_bytes": state.peak_allocated_bytes,
        "loss": windows[-1].loss,
        "device": job.device,
        "threads": job.threads,
    }
    payload = save_tensors({n: t.detach().cpu().contiguous() for n, t in checkpoint.trained_tensors(state).items()})
    checkpoint.write_atomic(job.out / MODEL, payload)
    result["model_sha256"] = hashlib.sha256(payload).hexdigest()
    checkpoint.write_atomic(job.out / RESULT, json.dumps(result, indent=1).encode())
    checkpoint.clear(job.out)
    return result


def _session(best: Best, device: str) -> Session:
    setting = Setting(best.ref, dict(best.options), device, doctor.cores(), None, best.seed)
    try:
        return Session(setting)
    except Exception as error:  # whatever a user's file raises when it is imported
        raise ConfigError(f"{best.path}: workload {error}", remedy="put the workload's file where it was") from error


def _job(asked: argparse.Namespace, best: Best, session: Session, device: str) -> Job:
    seed = best.seed if asked.seed is None else asked.seed
    if asked.checkpoint_every <= 0:
        raise ConfigError(f"--checkpoint-every {asked.checkpoint_every:g}", allowed="> 0 seconds")
    samples = asked.samples if asked.epochs is None else None
    if samples is None and asked.epochs is None:
        samples = best.samples
    if samples is None:
        epochs = 1.0 if asked.epochs is None else asked.epochs
        if not math.isfinite(epochs) or epochs <= 0:
            raise ConfigError(f"--epochs {epochs:g}", allowed="> 0")
        try:
            samples = round(epochs * size_of(session.resident.dataset(session.config(best.knobs), "train")))
        except WorkloadError as error:
            raise PreflightError(str(error)) from None
    if samples < 1:
        raise ConfigError(f"--samples {samples}", allowed=">= 1")
    out = asked.out if asked.out is not None else best.path.parent / "train"
    return Job(best, samples, seed, out, asked.checkpoint_every, device, doctor.cores())


def _check_folder(out: Path, *, resume: bool, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file", remedy="--out FOLDER")
    if force or not out.exists():
        return
    if checkpoint.exists(out) and not resume:
        raise ConfigError(f"{out} holds an unfinished run", remedy="--resume to go on, --force to begin again")
    if (out / RESULT).exists() and not (resume and checkpoint.exists(out)):
        raise ConfigError(f"{out} holds a finished run", remedy="--out another folder, or --force to train again")
    if resume and not checkpoint.exists(out):
        raise ConfigError(f"--resume: {out} holds no checkpoint", remedy="leave out --resume")


def _ended(error: BaseException, job: Job) -> TuningError:
    go_on = f"python -m tuning train --from {job.best.path} --out {job.out} --resume"
    outcome = oom.Outcome.DIVERGED if isinstance(error, loop.Diverged) else oom.classify(error)
    if outcome in (oom.Outcome.OOM, oom.Outcome.HOST_OOM):
        micro = int(job.best.knobs["micro_batch_size"])
        remedy = f"halve knobs.micro_batch_size ({micro}) in {job.best.path.name}" if micro > 1 else "a larger card"
        return StoppedEarly(f"out of memory: {error}"[:300], remedy=remedy)
    return StoppedEarly(f"{outcome}: {type(error).__name__}: {error}"[:300], remedy=go_on)


class _progress(contextlib.AbstractContextManager["_progress"]):
    """A bar with speed, loss and ETA on a terminal; a line every few seconds elsewhere."""

    def __init__(self, messages: Console, job: Job, state: loop.State) -> None:
        self._messages, self._job = messages, job
        self._drawn = messages.is_terminal and os.environ.get("TERM") != "dumb"
        self._said = time.monotonic()
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%  {task.fields[rate]}  {task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=messages, transient=True, refresh_per_second=4, disable=not self._drawn)
        self._task: TaskID = self._bar.add_task("", total=job.samples, completed=state.samples, rate="", loss="")

    def __enter__(self) -> _progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def moved(self, samples: int, window: Window) -> None:
        """Shows how far it is."""
        rate, loss = f"{window.samples_per_s:.1f} samples/s", f"loss {window.loss:.3f}"
        self._bar.update(self._task, completed=samples, rate=rate, loss=loss)
        if not self._drawn and time.monotonic() - self._said >= PLAIN_LINE_S:
            self._said = time.monotonic()
            self._messages.print(f"{samples}/{self._job.samples} samples  {rate}  {loss}", markup=False)


def _say(result: dict[str, Any], best: Best, job: Job) -> None:
    speed = result["samples_per_s"]
    said = best.measured["samples_per_s"]["median"]
    beside = f"  (best.yaml: {said:.1f}, {speed / said - 1:+.1%})" if said else ""
    lines = [f"{speed:.1f} samples/s{beside}"]
    for name, value in result["values"].items():
        known = best.measured["quality"].get(name)
        interval = known and known["interval"]
        beside = f"  (best.yaml: {known['mean']:.4f}, {interval[0]:.4f} .. {interval[1]:.4f})" if interval else ""
        lines.append(f"{name} {value:.4f}{beside}")
    lines.append(f"model   {job.out / MODEL}")
    print("\n".join(lines), file=sys.stdout)
