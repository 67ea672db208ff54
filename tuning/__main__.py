"""python -m tuning: everything beside the main job."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tuning import doctor, export, report, summary
from tuning.config import load
from tuning.errors import TuningError
from tuning.records import last, read
from tuning.runs import JOURNAL, find_run, known_runs
from tuning.terminal import Terminal

HELP = """\
  python -m tuning.run workload=nli                             find the fastest configuration (--help there)
  python -m tuning train --from runs/nli/ID/best.yaml           train the whole job with it
  python -m tuning list                                         runs, newest last
  python -m tuning show ID                                      the summary of a run
  python -m tuning report ID                                    best.yaml, front.csv and report.html once more
  python -m tuning doctor                                       what this machine has, to paste into an issue

exit codes: 0 done  1 no usable trial  2 wrong command line  3 this machine cannot  4 stopped early
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of one command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verbs: dict[str, Callable[[Sequence[str]], int]] = {
        "run": lambda rest: int(importlib.import_module("tuning.run").main(list(rest))),
        "train": _train,
        "list": _list,
        "show": _show,
        "report": _report,
        "doctor": _doctor,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    verb = verbs.get(arguments[0])
    if verb is None:
        print(f"error: there is no command {arguments[0]!r}\n\n{HELP}", end="", file=sys.stderr)
        return 2
    try:
        return verb(arguments[1:])
    except TuningError as error:
        Terminal().error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _train(arguments: Sequence[str]) -> int:
    importlib.import_module("tuning.backends")  # sets what torch reads when it is loaded
    return int(importlib.import_module("tuning.train").main(arguments))  # brings torch; the other verbs do without


def _list(arguments: Sequence[str]) -> int:
    asked = _parser("list", "Lists the runs.").parse_args(arguments)
    rows = []
    for folder in known_runs(asked.runs_dir):
        records, _ = read(folder / JOURNAL)
        study, stop = last(records, "study"), last(records, "stop")
        if study is not None:
            state = "finished" if stop is not None and not stop["resumable"] else "unfinished"
            trials = sum(1 for r in records if r.event == "trial")
            rows.append({"id": folder.name, "workload": study["workload"], "state": state, "trials": trials})
    if asked.json:
        print(json.dumps(rows))
    for row in [] if asked.json else rows:
        print(f"{row['id']}  {row['workload']}  {row['state']}  {row['trials']} trials")
    return 0


def _show(arguments: Sequence[str]) -> int:
    folder = _folder(_with_id("show", "Prints the summary of a run.").parse_args(arguments))
    records, warnings = read(folder / JOURNAL)
    terminal = Terminal()
    for text in warnings:
        terminal.warning(text)
    terminal.summary(summary.from_records(records), folder)
    return 0


def _report(arguments: Sequence[str]) -> int:
    folder = _folder(_with_id("report", "Writes best.yaml, front.csv and report.html again.").parse_args(arguments))
    records, _ = read(folder / JOURNAL)
    found = summary.from_records(records)
    paths = [*export.write_all(found, folder), report.write_report(found, folder / "report.html")]
    for path in paths:
        print(path)
    return 0


def _doctor(arguments: Sequence[str]) -> int:
    asked = _parser("doctor", "Says what this machine has.").parse_args(arguments)
    device = "cuda" if doctor.gpus() else "cpu"
    checks = doctor.preflight(load([f"runs_dir={asked.runs_dir}"]), device)
    if asked.json:
        print(json.dumps([vars(check) for check in checks]))
    else:
        for check in checks:
            print(f"{check.state:<5}{check.name}: {check.detail}" + (f"; {check.remedy}" if check.remedy else ""))
    return 3 if any(check.state == "FAIL" for check in checks) else 0


def _parser(verb: str, description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"python -m tuning {verb}", description=description)
    made.add_argument("--runs-dir", default="runs", help="where runs are  [runs]")
    made.add_argument("--json", action="store_true", help="JSON on stdout")
    return made


def _with_id(verb: str, description: str) -> argparse.ArgumentParser:
    made = _parser(verb, description)
    made.add_argument("id", help="a run's id, as `python -m tuning list` has it")
    return made


def _folder(asked: argparse.Namespace) -> Path:
    return find_run(str(asked.runs_dir), str(asked.id))


if __name__ == "__main__":
    sys.exit(main())
