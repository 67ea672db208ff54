"""python -m tuning compare A B: the best of two runs side by side, and the knobs in which they differ."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from tuning.cli.runs import ID_HELP, parser, runs_of
from tuning.cli.terminal import console, line, show
from tuning.journal.runs import find_run
from tuning.report import summary, tables
from tuning.report.format import table


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code; raises ConfigError for an unknown run."""
    made = parser("compare", "Shows the best of two runs side by side.")
    made.add_argument("ids", nargs=2, metavar="ID", help=ID_HELP)
    asked = made.parse_args(arguments)
    first, second = (summary.of_run(*runs_of(find_run(asked.runs_dir, run_id))) for run_id in asked.ids)
    found = tables.compared(first, second)
    if asked.json:
        print(json.dumps({row[0]: list(row[1:]) for row in found.rows}))
        return 0
    result = console(sys.stdout, os.environ)
    show(result, table(found.head, found.rows))
    if first.workload != second.workload:
        line(result, "two workloads: their speeds and qualities are of different things")
    elif first.place.device != second.place.device:
        line(result, "two devices: their speeds are of different machines")
    else:
        line(result, "not measured side by side: within an hour a machine's speed may drift")
    return 0
