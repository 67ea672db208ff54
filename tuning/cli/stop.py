"""python -m tuning stop ID: ends a run in order, as Ctrl-C where it was started does; it leaves the best so far."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from tuning.cli.runs import with_id
from tuning.config.errors import ConfigError, StoppedEarly
from tuning.journal.records import IN_ANOTHER_CONTAINER, writer_of
from tuning.journal.runs import JOURNAL, find_run
from tuning.report.sentences import resume_command

WAIT_S = 60.0
"""So long a run may take to end; a training step is not broken off, and Ray's processes take their time."""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code once the run has ended.

    Raises ConfigError where nobody here runs it, and StoppedEarly where it goes on after `WAIT_S`.
    """
    made = with_id("stop", "Ends a run of this machine in order; it leaves the best so far.", as_json=False)
    asked = made.parse_args(arguments)
    folder = find_run(asked.runs_dir, asked.id)
    pid = writer_of(folder / JOURNAL)
    if pid is None:
        what = f"run {folder.name} is not running on this machine"
        raise ConfigError(what, remedy=f"python -m tuning report {folder.name}, for the best that it has")
    if pid == IN_ANOTHER_CONTAINER:
        raise ConfigError(f"run {folder.name} is of another container", remedy="stop it there, or Ctrl-C where it runs")
    try:
        os.kill(pid, signal.SIGINT)
    except ProcessLookupError:
        pass  # it has just ended
    except PermissionError:
        what = f"run {folder.name} is of another user, as process {pid}"
        raise ConfigError(what, remedy="stop it as that user") from None
    until = time.monotonic() + WAIT_S
    while writer_of(folder / JOURNAL) is not None:
        if time.monotonic() > until:
            what = f"run {folder.name} was asked to end and still does so, as process {pid}"
            raise StoppedEarly(what, remedy=f"wait for it; kill {pid} once more ends it at once")
        time.sleep(0.1)
    best = folder / "best.yaml"
    print(f"stopped {folder.name}; " + (f"{best} holds the best so far" if best.is_file() else "nothing was measured"))
    print(f"resume with: {resume_command(folder)}")
    return 0
