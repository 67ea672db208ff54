"""python -m tuning export ID --to FRAMEWORK: what a run found, in the words of a framework."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tuning.cli.runs import runs_of, with_id
from tuning.cli.terminal import console, line
from tuning.config import best_file
from tuning.config.errors import ConfigError
from tuning.journal.runs import find_run
from tuning.report import summary
from tuning.report.frameworks import FRAMEWORKS, exported


def parser() -> argparse.ArgumentParser:
    """Returns the arguments of the command."""
    does = "Prints the best.yaml of a run in the words of a framework; stderr lists what it has no word for."
    made = with_id("export", does, as_json=False)
    made.epilog = (
        "transformers: arguments of TrainingArguments. lightning: of Trainer and DataLoader. accelerate: of "
        "Accelerator, DataLoader and their configurations. deepspeed: a configuration file. json: what best.yaml says."
    )
    made.add_argument("--to", required=True, choices=tuple(FRAMEWORKS), help="whose words")
    made.add_argument(
        "--python", action="store_true", help="as Python, with what is to be set by hand as comments  [JSON]"
    )
    return made


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code; raises ConfigError for an unknown run, and for one that has found nothing yet."""
    asked = parser().parse_args(arguments)
    folder = find_run(asked.runs_dir, asked.id)
    path = folder / "best.yaml"
    if not path.exists():
        remedy = f"python -m tuning report {folder.name}, once something was measured"
        raise ConfigError(f"run {folder.name} has no best.yaml", remedy=remedy)
    best = best_file.read(path)
    run = summary.of_run(*runs_of(folder))
    found = exported(best, asked.to, run.place, run.table)
    print(found.to_python(f"the best configuration of run {folder.name}") if asked.python else found.to_json())
    messages = console(sys.stderr, os.environ)
    for warning in best.warnings:
        line(messages, f"warning: {warning}")
    for said in () if asked.python else found.unsaid.values():  # else it is in the comments
        line(messages, f"set by hand: {said}")
    return 0
