"""python -m tuning train, and profile: reads what was typed without torch; `training_start` does the rest."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from trainables.knobs import LOOP
from tuning.config import best_file
from tuning.config.best_file import Best
from tuning.config.choices import available
from tuning.config.command_line import choose_workload, parse, value_of
from tuning.config.environment import OF_A_LAUNCHER, require_one_process
from tuning.config.errors import ConfigError
from tuning.config.shareable import is_masked, masked_items
from tuning.journal.runs import find_run
from tuning.workers import nvml


def _named(command: str, does: str, example: str) -> argparse.ArgumentParser:
    """Returns a command with the arguments that name a configuration and its device."""
    prog = f"python -m tuning {command}"
    made = argparse.ArgumentParser(prog=prog, description=does, allow_abbrev=False)
    made.epilog = f"{prog} last; {prog} --from best.yaml {example}"
    made.add_argument("--from", dest="source", metavar="YAML", help="a best.yaml, in place of ID")
    made.add_argument("--runs-dir", default="runs", help="where runs are  [runs]")
    said = "first a run's id, last for the newest; workload.NAME=VALUE in place of an option of its best.yaml; "
    said += "workload=FILE.py: where a file that was moved is now"
    made.add_argument("options", nargs="*", metavar="ID|workload.NAME=VALUE", help=said)
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return made


def parser() -> argparse.ArgumentParser:
    """Returns the arguments of the command."""
    made = _named("train", "Trains with an exported configuration, unchanged.", "--epochs 3 --out trained")
    length = made.add_mutually_exclusive_group()
    samples = _number("--samples", 1, 10**12, "a whole number from 1 to 1e12", "10000")
    said = "training samples seen  [as long as the trials of its run, which may be less than an epoch]"
    length.add_argument("--samples", type=samples, metavar="N", help=said)
    epochs = _number("--epochs", 1e-9, 10_000, "a number above 0, at most 10000", "3")
    length.add_argument("--epochs", type=epochs, metavar="X", help="the same in epochs")
    seed = _number("--seed", 0, 2**32 - 1, "a whole number from 0 to 4294967295", "0")
    made.add_argument("--seed", type=seed, metavar="N", help="weights and order of the samples  [of best.yaml]")
    every = _number("--evaluate-every", 1e-3, 10_000, "epochs, from 0.001 to 10000", "1")
    said = "epochs from one evaluation to the next  [1 with --keep best or --patience, else one at the end]"
    made.add_argument("--evaluate-every", type=every, metavar="X", help=said)
    said = "the weights to write, of the last step or of the best evaluation  [last]"
    made.add_argument("--keep", choices=("last", "best"), default="last", help=said)
    patience = _number("--patience", 1, 10_000, "a whole number from 1 to 10000", "3")
    made.add_argument("--patience", type=patience, metavar="N", help="end after N evaluations without a better one")
    made.add_argument("--merge", action="store_true", help="merge LoRA or DoRA into the model, and write all of it")
    made.add_argument("--out", type=Path, help="folder for model, result and checkpoint  [train/ beside best.yaml]")
    over = made.add_mutually_exclusive_group()
    over.add_argument(
        "--resume", action="store_true", help="go on from the checkpoint in --out (custom loops have none)"
    )
    over.add_argument("--force", action="store_true", help="train again over what is in --out")
    seconds = _number("--checkpoint-every", 1e-3, 86_400, "seconds, from 0.001 to 86400", "60")
    made.add_argument("--checkpoint-every", type=seconds, default="60", metavar="S", help="seconds  [60]")
    made.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    return made


def profile(argv: Sequence[str]) -> int:
    """Returns the exit code; the table of operators stands on stdout."""
    made = _named("profile", "Says which operators the time of a training's steps goes to.", "--steps 50")
    steps = _number("--steps", 1, 10_000, "a whole number from 1 to 10000", "20")
    made.add_argument("--steps", type=steps, default="20", metavar="N", help="steps of the optimiser  [20]")
    made.add_argument("--out", type=Path, help="file for the trace  [trace.json.gz beside best.yaml]")
    asked, best, device = _read(made, argv)
    from tuning.cli.training_start import show_operators

    return show_operators(best, device, asked.steps, asked.out or best.path.parent / "trace.json.gz")


def _read(made: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, Best, str]:
    """Returns what was typed, the configuration that it names, and the device."""
    asked = made.parse_intermixed_args(argv)
    require_one_process(os.environ)
    for name in OF_A_LAUNCHER:
        os.environ.pop(name, None)
    source, options = _source(asked.source, asked.options, asked.runs_dir)
    best = _with_options(best_file.read(source), options)
    if lost := next((name for name, value in best.options.items() if is_masked(value)), ""):
        what = f"{best.path}: workload.options.{lost} is a secret, which was not written down"
        raise ConfigError(what, remedy=f"workload.{lost}=<value>")
    return asked, best, _device(asked.device)


def main(argv: Sequence[str]) -> int:
    """Returns the exit code; the result stands in `result.json`, the trained weights in `model.safetensors`."""
    asked, best, device = _read(parser(), argv)
    from tuning.cli.training_job import TrainCommand  # brings torch: what is mistyped is said sooner
    from tuning.cli.training_start import begin

    command = TrainCommand(
        out=asked.out if asked.out is not None else best.path.parent / "train",
        device=device,
        samples=asked.samples,
        epochs=asked.epochs,
        seed=best.seed if asked.seed is None else asked.seed,
        checkpoint_s=asked.checkpoint_every,
        evaluate_epochs=asked.evaluate_every or (1.0 if asked.keep == "best" or asked.patience else None),
        keeps_best=asked.keep == "best",
        patience=asked.patience,
        merges=asked.merge,
        resume=asked.resume,
        force=asked.force,
        as_json=asked.json,
        typed=tuple(masked_items(argv)),
    )
    return begin(best, command)


def _source(path: str | None, options: Sequence[str], runs_dir: str) -> tuple[Path, Sequence[str]]:
    """Returns the best.yaml to train with, and what else was typed; raises ConfigError if none was named, or two."""
    named = [text for text in options if "=" not in text]
    if path is None and not named:
        raise ConfigError("no configuration was named", remedy="train last, train ID, or train --from best.yaml")
    if len(named) > (path is None):
        what = f"{named[-1]}: one configuration is trained, and {path or named[0]} was named"
        raise ConfigError(what, allowed="workload.NAME=VALUE, workload=FILE.py", remedy="leave it out")
    found = Path(path) if path is not None else find_run(runs_dir, named[0]) / "best.yaml"
    return found, [text for text in options if "=" in text]


def _number(flag: str, least: float, most: float, allowed: str, example: str) -> Callable[[str], float]:
    """Returns what reads the number of a flag, and raises ConfigError for one that is not allowed."""
    whole = allowed.startswith("a whole")
    form = r"[0-9]{1,20}" if whole else r"[0-9]{0,20}\.?[0-9]{1,20}(?:[eE][+-]?[0-9]{1,4})?"

    def read(text: str) -> float:
        number = (int(text) if whole else float(text)) if re.fullmatch(form, text) else math.nan
        if not least <= number <= most:
            raise ConfigError(f"{flag} {text[:80]}", allowed=allowed, remedy=f"{flag} {example}")
        return number

    return read


def _device(asked: str) -> str:
    found = nvml.gpus()
    if asked == "cuda" and not found:
        raise ConfigError("--device cuda: there is no CUDA device here", allowed="auto, cpu", remedy="--device cpu")
    return asked if asked != "auto" else "cuda" if found else "cpu"


def _with_options(best: Best, typed: Sequence[str]) -> Best:
    """Returns the configuration with options of the workload, and the place of its file, as they were typed."""
    if wrong := next((text for text in typed if not text.startswith(("workload.", "workload="))), ""):
        what = f"{wrong}: train takes options of the workload and its place, knobs are those of {best.path}"
        raise ConfigError(what, allowed="workload.NAME=VALUE, workload=FILE.py", remedy="leave it out")
    given = parse(typed)
    options = {key.removeprefix("workload."): value_of(key, value, LOOP) for key, value in given.values.items()}
    now = given.groups.get("workload")
    ref = best.ref if now is None else choose_workload(now, available("workload")).ref
    return dataclasses.replace(best, ref=ref, options={**best.options, **options})
