"""python -m tuning optuna: a run as a study of Optuna, for its dashboard, and which knobs decide what."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence

from tuning.cli.replies import OptunaReply, as_line
from tuning.cli.runs import runs_of, with_id
from tuning.cli.terminal import console, line, show
from tuning.journal.runs import find_run
from tuning.report import tables
from tuning.report.format import table
from tuning.search import optuna_study

FILE = "optuna.log"
EACH_S = 2.0
"""So often a run that goes on is read again."""


def main(arguments: Sequence[str]) -> int:
    """Writes the trials that have ended, prints which knobs decide what, and returns the exit code."""
    made = with_id("optuna", "Writes a run as a study of Optuna, and says which knobs decide its speed and quality.")
    made.add_argument("--storage", metavar="FILE|URL", help=f"where the study is kept  [{FILE} in the run's folder]")
    made.add_argument("--follow", action="store_true", help="goes on until the run has ended, or Ctrl-C")
    asked = made.parse_args(arguments)
    folder = find_run(asked.runs_dir, asked.id)
    run, _ = runs_of(folder)
    place, name = asked.storage or str(folder / FILE), f"{folder.parent.name} {folder.name}"
    storage = optuna_study.opened(place)
    study = optuna_study.mirrored(run, name, storage)
    result, said = (console(stream, os.environ) for stream in (sys.stdout, sys.stderr))
    if not asked.json:
        line(result, f"to look at it: optuna-dashboard {shlex.quote(place)}")
    while asked.follow and not run.is_finished:
        time.sleep(EACH_S)
        run, _ = runs_of(folder)
        study = optuna_study.mirrored(run, name, storage)
    found = optuna_study.importances(study)
    if asked.json:
        print(as_line(OptunaReply(storage=place, study=name, importances=found)))
    elif (grid := tables.importances(found)) is not None:
        line(result, "importance of the searched knobs (PED-ANOVA, over the trials that came to their end):")
        show(result, table(grid.head, grid.rows))
    else:
        line(said, f"note: {optuna_study.LEAST_TRIALS} trials that came to their end are needed for importances")
    return 0
