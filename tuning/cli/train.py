"""python -m tuning train --from best.yaml: the whole job with an exported configuration, checkpointed and resumable."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainables import checkpoint, garbage, own_loop
from trainables.batches import fork_workers, size_of
from trainables.knobs import use
from trainables.own_loop import OwnResident
from trainables.source import source_hash
from trainables.workload import WorkloadError
from tuning.cli.signals import Interrupted, StopSignals
from tuning.cli.terminal import console, line
from tuning.cli.training_job import FORCE, MODEL, RESULT, TrainingJob, telling, train
from tuning.config import atomic, best_file
from tuning.config.best_file import Best
from tuning.config.choices import available
from tuning.config.command_line import choose_workload, parse, value_of
from tuning.config.errors import ConfigError
from tuning.config.resolve import checked_options
from tuning.config.shareable import MASK, masked_items
from tuning.journal.runs import versions
from tuning.report import text
from tuning.workers import fingerprint, machine, nvml
from tuning.workers.device_facts import device_facts
from tuning.workers.dry_run import DRY_PLAN
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig


def parser() -> argparse.ArgumentParser:
    """Returns the arguments of the command."""
    made = argparse.ArgumentParser(
        prog="python -m tuning train",
        description="Trains with an exported configuration, unchanged.",
        epilog="python -m tuning train --from runs/nli/ID/best.yaml --epochs 3 --out trained",
        allow_abbrev=False,
    )
    made.add_argument("--from", dest="source", required=True, metavar="YAML", help="a best.yaml")
    said = "in place of an option of best.yaml; workload=FILE.py: where a file that was moved is now"
    made.add_argument("options", nargs="*", metavar="workload.NAME=VALUE", help=said)
    length = made.add_mutually_exclusive_group()
    length.add_argument(
        "--samples", metavar="N", help="training samples seen  [as many as best.yaml was measured with]"
    )
    length.add_argument("--epochs", metavar="X", help="the same in passes over the data")
    made.add_argument("--seed", metavar="N", help="weights and order of the samples  [of best.yaml]")
    made.add_argument("--out", type=Path, help="folder for model, result and checkpoint  [train/ beside best.yaml]")
    over = made.add_mutually_exclusive_group()
    over.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    over.add_argument("--force", action="store_true", help="train again over what is in --out")
    made.add_argument("--checkpoint-every", default="60", metavar="S", help="seconds  [60]")
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    made.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    return made


def main(argv: Sequence[str]) -> int:
    """Returns the exit code; the result stands in `result.json`, the trained weights in `model.safetensors`."""
    asked = parser().parse_intermixed_args(argv)
    numbers = {flag: _number(flag, getattr(asked, flag.strip("-").replace("-", "_"))) for flag in _NUMBERS}
    best = _with_options(best_file.read(Path(asked.source)), asked.options)
    if lost := next((name for name, value in best.options.items() if value == MASK), ""):
        what = f"{best.path}: workload.options.{lost} is a secret, which was not written down"
        raise ConfigError(what, remedy=f"workload.{lost}=<value>")
    messages = console(sys.stderr, os.environ)
    out = asked.out if asked.out is not None else best.path.parent / "train"
    device = _device(asked.device)
    _check_folder(out, resume=asked.resume, force=asked.force)
    shown = masked_items(argv)
    again = shlex.join(["python", "-m", "tuning", "train", *(a for a in shown if a not in ("--resume", "--force"))])
    again += FORCE if asked.force else ""
    fork_workers()
    ours, sys.argv = sys.argv, sys.argv[:1]  # a command line that their code reads is empty
    theirs = sys.stderr if asked.json else sys.stdout  # what their code prints is not part of the JSON
    try:
        with (
            contextlib.redirect_stdout(theirs),
            StopSignals() as signals,
            atomic.folder(out, "--out"),
            contextlib.ExitStack() as ends,
        ):
            ends.enter_context(_held(out))
            session = _session(best, device)
            ends.callback(session.peers.end)
            use(session.table)
            best = best_file.completed(best)
            source = source_hash(session.resident.workload)
            for warning in _warnings(best, session.setting.ranks, source):
                line(messages, f"warning: {warning}")
            samples, seed = _length(numbers, best, session), _seed(numbers, best)
            job = TrainingJob(
                best,
                samples,
                seed,
                out,
                numbers["--checkpoint-every"] or 0.0,
                device,
                session.setting.threads,
                again,
                _made_of(best, session, source),
            )
            if numbers["--samples"] is None and numbers["--epochs"] is None and best.samples is not None:
                line(messages, f"trains on {samples} samples, as {best.path.name} has it; --epochs N for a whole job")
            result = train(job, session, messages, signals, resume=asked.resume)
    except Interrupted as interrupted:
        typed = shlex.join(["python", "-m", "tuning", "train", *shown])
        line(messages, f"interrupted by {interrupted}")
        line(messages, interrupted.go_on or f"begin again with: {typed}")
        return 128 + interrupted.signum
    finally:
        sys.argv = ours
    if asked.json:
        print(json.dumps(result))
    else:
        result_on = console(sys.stdout, os.environ)
        model = str(job.out / MODEL) if result["model_sha256"] else "not written: run.prepare was shown none"
        for said in (*text.trained(result, best.measured, best.samples, best.path.name), f"model   {model}"):
            line(result_on, said)
    return 0


_NUMBERS: dict[str, tuple[float, float, str, str]] = {
    "--samples": (1, 10**12, "a whole number from 1 to 1e12", "10000"),
    "--epochs": (1e-9, 10_000, "a number above 0, at most 10000", "3"),
    "--seed": (0, 2**32 - 1, "a whole number from 0 to 4294967295", "0"),
    "--checkpoint-every": (1e-3, 86_400, "seconds, from 0.001 to 86400", "60"),
}
"""Of each number of the command line: the least and the most allowed, both in words, and an example."""


def _number(flag: str, text: str | None) -> float | None:
    """Returns the number of a flag, None where it was not given; raises ConfigError for one that is not allowed."""
    if text is None:
        return None
    least, most, allowed, example = _NUMBERS[flag]
    whole = allowed.startswith("a whole")
    if re.fullmatch(r"[0-9]{1,20}" if whole else r"[0-9]{0,20}\.?[0-9]{1,20}(?:[eE][+-]?[0-9]{1,4})?", text):
        number = int(text) if whole else float(text)
        if least <= number <= most:
            return number
    raise ConfigError(f"{flag} {text[:80]}", allowed=allowed, remedy=f"{flag} {example}")


def _device(asked: str) -> str:
    found = nvml.gpus()
    if asked == "cuda" and not found:
        raise ConfigError("--device cuda: there is no CUDA device here", allowed="auto, cpu", remedy="--device cpu")
    return asked if asked != "auto" else "cuda" if found else "cpu"


def _ranks(best: Best) -> int:
    return int(best.measured.get("devices_per_trial") or 1)


def _with_options(best: Best, typed: Sequence[str]) -> Best:
    """Returns the configuration with options of the workload, and the place of its file, as they were typed."""
    if wrong := next(
        (text for text in typed if not text.startswith(("workload.", "workload=")) or "=" not in text), ""
    ):
        what = f"{wrong}: train takes options of the workload and its place, knobs are those of {best.path}"
        raise ConfigError(what, allowed="workload.NAME=VALUE, workload=FILE.py", remedy="leave it out")
    given = parse(typed)
    options = {key.removeprefix("workload."): value_of(key, value) for key, value in given.values.items()}
    now = given.groups.get("workload")
    ref = best.ref if now is None else choose_workload(now, available("workload")).ref
    return dataclasses.replace(best, ref=ref, options={**best.options, **options})


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
            else "type it where the study was started, which has the module"
        )
        raise ConfigError(what[:400], remedy=f"{where}, or install what it needs") from error
    declared = dict(getattr(session.resident.workload, "options", {}))
    try:
        checked_options(best.options, declared, {})
    except ConfigError as error:
        raise ConfigError(f"{best.path}: {error.what}", allowed=error.allowed, remedy=error.remedy) from None
    return session


def _length(numbers: dict[str, float | None], best: Best, session: Session) -> int:
    """Returns the samples to train on: as asked, else as many as the configuration was measured with, else an epoch."""
    samples, epochs = numbers["--samples"] or best.samples, numbers["--epochs"]
    is_asked = epochs is None and samples is not None
    if is_asked and isinstance(session.resident, OwnResident):  # whose passes are known only once it runs
        return int(samples or 0)
    with telling(best):
        count = _pass_samples(best, session)
    if count == 0:
        raise ConfigError(f"{best.path}: the training split of {best.ref} is empty", remedy="put its data back")
    if is_asked:
        return int(samples or 0)
    wanted = round((epochs or 1.0) * count)
    if wanted < 1:
        what = f"--epochs {epochs:g} is not one of {count} samples"
        raise ConfigError(what, allowed=f">= {1 / count:.2g}", remedy="--epochs 1")
    return wanted


def _pass_samples(best: Best, session: Session) -> int:
    """Returns the samples of one pass over the data; a loop of one's own runs up to its first batch for that."""
    config = session.config(best.knobs)
    if not isinstance(session.resident, OwnResident):
        return size_of(session.contract.dataset(config, "train"))
    state = own_loop.prepare(session.resident, config, DRY_PLAN)
    own_loop.end(state)
    count = state.pass_samples
    del state
    garbage.collect()  # or what it held would be part of the training's peak
    return count


def _warnings(best: Best, ranks: int, source: str) -> Iterator[str]:
    """Yields what is otherwise than where the file was measured; `source` is the hash of the workload's code."""
    yield from best.warnings
    if ranks < (asked := _ranks(best)):
        yield f"measured with {asked} devices a trial; here one trains, with its own memory"
    then = best.provenance.get("workload_sha256")
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


def _seed(numbers: dict[str, float | None], best: Best) -> int:
    asked = numbers["--seed"]
    return int(asked) if asked is not None else int(_number("--seed", str(best.seed)) or 0)


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
            raise ConfigError(
                f"--out {out} is in use by another training", remedy="--out another folder, or wait for it"
            ) from None
        except OSError:  # not every file system holds folders
            pass
        yield
    finally:
        with contextlib.suppress(OSError):  # a loader's process may have it, too, and outlive this
            fcntl.flock(folder, fcntl.LOCK_UN)
        os.close(folder)
