"""python -m tuning: everything beside the main job."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tuning.cli.terminal import Terminal
from tuning.config.errors import TuningError, reader_has_gone
from tuning.config.load import load
from tuning.journal.records import Record, is_finished, last, read, trials
from tuning.journal.runs import JOURNAL, RECEIPTS, find_run, known_runs
from tuning.report import export, report, sentences, summary
from tuning.report.format import plain
from tuning.report.summary import Summary
from tuning.workers import doctor

HELP = """\
  python -m tuning.run workload=nli                             find the fastest configuration (--help there)
  python -m tuning train --from runs/nli/ID/best.yaml           train the whole job with it
  python -m tuning estimate workload=nli card=rtx4060           what fits a card, without one and without training
  python -m tuning list                                         runs, newest last
  python -m tuning show ID                                      the summary of a run
  python -m tuning ablate ID                                    what each optimisation bought here, in pairs
  python -m tuning report ID                                    best.yaml, front.csv and report.html once more
  python -m tuning doctor                                       what this machine has, to paste into an issue

exit codes: 0 done  1 no usable trial  2 wrong command line  3 this machine cannot  4 stopped early
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of one command."""
    try:
        code = _answered(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, and not when the interpreter ends: its reader may have gone
    except BrokenPipeError:
        return reader_has_gone()
    return code


def _answered(arguments: Sequence[str]) -> int:
    verbs: dict[str, Callable[[Sequence[str]], int]] = {
        "run": lambda rest: int(importlib.import_module("tuning.run").main(list(rest))),
        "train": _train,
        "ablate": _ablate,
        "estimate": _estimate,
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
        near = difflib.get_close_matches(arguments[0], verbs, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"error: there is no command {arguments[0]!r}{hint}\n\n{HELP}", end="", file=sys.stderr)
        return 2
    try:
        return verb(arguments[1:])
    except TuningError as error:
        Terminal().error(error)
        return error.exit_code
    except SystemExit as ended:  # argparse's, after its help or its error
        return ended.code if isinstance(ended.code, int) else 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _train(arguments: Sequence[str]) -> int:
    importlib.import_module("tuning.workers")  # sets what torch reads when it is loaded
    return int(importlib.import_module("tuning.cli.train").main(arguments))  # brings torch; the other verbs do without


def _ablate(arguments: Sequence[str]) -> int:
    importlib.import_module("tuning.workers")
    return int(importlib.import_module("tuning.cli.ablate").main(arguments))


def _estimate(arguments: Sequence[str]) -> int:
    return int(importlib.import_module("tuning.cli.estimate").main(arguments))


def _whole(folder: Path) -> list[Record]:
    """Returns the records of a run, and of its ablation where it has one."""
    records, warnings = read(folder / JOURNAL)
    for text in warnings:
        Terminal().warning(text)
    return records + (read(folder / RECEIPTS)[0] if (folder / RECEIPTS).is_file() else [])


def _list(arguments: Sequence[str]) -> int:
    asked = _parser("list", "Lists the runs, newest last.").parse_args(arguments)
    rows = []
    for folder in known_runs(asked.runs_dir):
        records, _ = read(folder / JOURNAL)
        study = last(records, "study")
        if study is not None:
            state = "finished" if is_finished(records) else "unfinished"
            ended = len(trials(records))
            row = {"id": folder.name, "workload": folder.parent.name, "state": state, "trials": ended}
            rows.append({**row, "began": study.t})
    if asked.json:
        print(json.dumps(rows))
        return 0
    if not rows:
        print(f"no runs in {asked.runs_dir}; another place is named with --runs-dir PATH", file=sys.stderr)
    widths = {key: max(len(str(row[key])) for row in rows) for key in ("id", "workload", "state")} if rows else {}
    for row in rows:
        cells = [f"{plain(row[key]):<{width}}" for key, width in widths.items()]
        print("  ".join([*cells, f"{row['trials']} trials"]))
    return 0


def _show(arguments: Sequence[str]) -> int:
    asked = _with_id("show", "Prints the summary of a run.").parse_args(arguments)
    folder = find_run(asked.runs_dir, asked.id)
    records, terminal = _whole(folder), Terminal()
    found = summary.from_records(records)
    if asked.json:
        print(json.dumps(_as_json(found, folder, is_finished(records))))
        return 0
    terminal.summary(found, folder)
    if found.best is not None and not is_finished(records):  # without a best, the summary says it
        terminal.resume_hint(sentences.resume_command(folder))
    return 0


def _as_json(found: Summary, folder: Path, finished: bool) -> dict[str, Any]:
    """Returns what `show` prints, and each trial, as plain values in the units of the records."""
    kept = ("id", "workload", "objectives", "baselines", "trial_counts", "probe_counts", "rule", "notes")
    named = {n.name: {**asdict(n), "samples_per_s": n.samples_per_s} for n in found.named.values()}
    return {
        **{name: getattr(found, name) for name in kept},
        "state": "finished" if finished else "unfinished",
        "folder": str(folder),
        "place": asdict(found.place),
        "named": named,
        "gains": [asdict(gain) for gain in found.gains],
        "receipts": [asdict(one) for one in found.ablation],
        "trials": [asdict(trial) for trial in found.trials],
        "times": asdict(found.times),
    }


def _report(arguments: Sequence[str]) -> int:
    asked = _with_id("report", "Writes best.yaml, front.csv and report.html again.").parse_args(arguments)
    folder = find_run(asked.runs_dir, asked.id)
    found = summary.from_records(_whole(folder))
    paths = [*export.write_all(found, folder), report.write_report(found, folder / "report.html")]
    if asked.json:
        print(json.dumps([str(path) for path in paths]))
    for path in [] if asked.json else paths:
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


if __name__ == "__main__":
    sys.exit(main())
