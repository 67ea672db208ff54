"""python -m tuning log: a run in Optuna's storage, TensorBoard, MLflow or W&B, while it goes on or afterwards."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from tuning.cli.runs import runs_of, with_id
from tuning.cli.terminal import console, line
from tuning.journal.runs import find_run
from tuning.report import summary, trackers
from tuning.report.format import plural

EACH_S = 5.0
"""So often a run that goes on is read again."""


def main(arguments: Sequence[str]) -> int:
    """Writes the trials that have ended, and returns the exit code."""
    made = with_id("log", "Writes a run to an experiment tracker: a run for each trial.", as_json=False)
    made.add_argument("--to", required=True, choices=tuple(trackers.TRACKERS), help="the tracker")
    said = "a folder, of Optuna a file or URL, of MLflow a tracking URI  [in the run's folder]"
    made.add_argument("--place", metavar="PLACE", help=said)
    made.add_argument("--follow", action="store_true", help="goes on until the run has ended, or Ctrl-C")
    asked = made.parse_args(arguments)
    folder = find_run(asked.runs_dir, asked.id)
    run, ablated = runs_of(folder)
    tracker = trackers.TRACKERS[asked.to](folder.name, folder, asked.place)
    result = console(sys.stdout, os.environ)
    line(result, f"to look at it: {tracker.place}")
    found = summary.of_run(run, ablated)
    written = trackers.write(tracker, run, found)
    while asked.follow and not run.is_finished:
        time.sleep(EACH_S)
        run, ablated = runs_of(folder)
        found = summary.of_run(run, ablated)
        written += trackers.write(tracker, run, found)
    tracker.end(trackers.whole(found))
    line(result, f"{plural(written, 'trial')} written")
    return 0
