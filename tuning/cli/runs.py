"""The verbs that read runs and the machine: list, show, compare, report, export, doctor. None of them loads torch."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from tuning.cli import replies
from tuning.cli.replies import CompareReply, DoctorReply, FilesReply, ListedRun, ListReply, RunReply, as_line
from tuning.cli.terminal import Terminal, console, line, show
from tuning.config import best_file
from tuning.config.errors import ConfigError
from tuning.config.load import load
from tuning.journal.records import read
from tuning.journal.run import History, unix_s
from tuning.journal.runs import ABLATION, JOURNAL, find_run, known_runs, other_version, require_known
from tuning.report import export, report, sentences, summary, tables
from tuning.report.format import fit, plain, plural, spoken, table, unlike
from tuning.report.frameworks import FRAMEWORKS, exported
from tuning.report.summary import Summary
from tuning.search.optuna_study import importances_of
from tuning.workers import doctor, machine_checks, nvml
from tuning.workers.own_workload import UserFile

ID_HELP = "a run's id, as `python -m tuning list` has it, last, or its folder"
"""Help for an argument that names a run."""


def list_runs(arguments: Sequence[str]) -> int:
    """Prints the runs, newest last, and returns the exit code."""
    asked = parser("list", "Lists the runs, newest last.").parse_args(arguments)
    rows = [row for folder in known_runs(asked.runs_dir) if (row := _row(folder))]
    if asked.json:
        print(as_line(ListReply(runs=rows)))
        return 0
    if not rows:
        print(f"no runs in {asked.runs_dir}; another place is named with --runs-dir PATH", file=sys.stderr)
    shown = [
        [*map(plain, (one.id, one.workload, one.day, one.state)), plural(one.trials, "trial"), one.found]
        for one in rows
    ]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    most = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    for cells in shown:
        print(fit("  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)), most))
    return 0


def _row(folder: Path) -> ListedRun | None:
    """Returns a run's line of the list; None without a study record."""
    row = ListedRun(id=folder.name, workload=folder.parent.name, state="unreadable")
    try:
        run = History(read(folder / JOURNAL)[0])
        found = _found(summary.of_run(run)) if run.study is not None and not other_version(run.study) else ""
    except (ConfigError, ArithmeticError, LookupError, TypeError, ValueError):  # whatever its records hold
        return row
    if run.study is None:
        return None
    state = "other version" if other_version(run.study) else "finished" if run.is_finished else "unfinished"
    day = datetime.fromtimestamp(unix_s(run.study.t)).strftime("%d %b %H:%M")
    return replace(row, state=state, trials=len(run.ended), began=run.study.t, day=day, found=found)


def _found(known: Summary) -> str:
    """Returns what a run gained over what is trained today, and by which settings; "" if it has nothing yet."""
    reference, best = known.reference, known.best
    if reference is None or best is None:
        return ""
    gain, changed = known.gain("best", reference.name), unlike(best.config, reference.config, known.table)
    if not changed:
        return f"keep {spoken(reference.name)}"
    perhaps = "perhaps " * (gain is not None and gain.low is not None and not gain.is_told)
    return " ".join([f"{perhaps}{gain.ratio:.2f}x {spoken(reference.name)} " if gain else "", *changed]).strip()


def runs_of(folder: Path) -> tuple[History, History]:
    """Returns what was run in a folder, and its ablation; raises ConfigError for another version's."""
    records, warnings = read(folder / JOURNAL)
    run = History(records)
    require_known(run.study, folder)
    for said in warnings:
        Terminal().warning(said)
    return run, History(read(folder / ABLATION)[0] if (folder / ABLATION).is_file() else [])


def show_run(arguments: Sequence[str]) -> int:
    """Prints the summary of a run and its trials, and returns the exit code."""
    asked = with_id("show", "Prints the summary of a run and its trials.").parse_args(arguments)
    folder = find_run(asked.runs_dir, asked.id)
    if asked.json:
        print(as_line(reply_of(folder)))
        return 0
    run, ablated = runs_of(folder)
    found, terminal = summary.of_run(run, ablated), Terminal()
    terminal.summary(found, folder)
    terminal.trials(found, importances_of(run))
    if found.best is not None and not found.provisional and not run.is_finished:  # else the summary says it
        terminal.resume_hint(sentences.resume_command(folder))
    return 0


def reply_of(folder: Path) -> RunReply:
    """Returns what the run in a folder found, for programs."""
    run, ablated = runs_of(folder)
    return replies.of_run(summary.of_run(run, ablated), folder, importances_of(run))


def compare_runs(arguments: Sequence[str]) -> int:
    """Prints the bests of runs side by side, and the knobs in which they differ; returns the exit code."""
    made = parser("compare", "Shows the bests of two or more runs side by side.")
    made.add_argument("first", metavar="ID", help=ID_HELP)
    made.add_argument("others", nargs="+", metavar="ID", help="the runs beside it")
    asked = made.parse_args(arguments)
    known = [summary.of_run(*runs_of(find_run(asked.runs_dir, run_id))) for run_id in (asked.first, *asked.others)]
    found = tables.compared(known)
    said = "not measured side by side: within an hour a machine's speed may drift"
    if len({one.workload for one in known}) > 1:
        said = "different workloads: their speeds and qualities are of different things"
    elif len({one.place.device for one in known}) > 1:
        said = "different devices: their speeds are of different machines"
    if asked.json:
        rows = {name: cells for name, *cells in found.rows}
        print(as_line(CompareReply(runs=[one.id for one in known], rows=rows, note=said)))
        return 0
    result = console(sys.stdout, os.environ)
    show(result, table(found.head, found.rows))
    line(result, said)
    return 0


def export_best(arguments: Sequence[str]) -> int:
    """Prints the best.yaml of a run in the words of a framework and returns the exit code."""
    does = "Prints the best.yaml of a run as settings of a framework; stderr lists what it has no setting for."
    made = with_id("export", does, as_json=False)
    made.epilog = (
        "transformers: arguments of TrainingArguments. lightning: of Trainer and DataLoader. accelerate: of "
        "Accelerator, DataLoader and their configurations. deepspeed: a configuration file. json: what best.yaml says."
    )
    made.add_argument("--to", required=True, choices=tuple(FRAMEWORKS), help="whose words")
    said = "as Python, with what is to be set by hand as comments  [JSON]"
    made.add_argument("--python", action="store_true", help=said)
    asked = made.parse_args(arguments)
    folder = find_run(asked.runs_dir, asked.id)
    if not (folder / "best.yaml").exists():
        remedy = f"python -m tuning report {folder.name}, once something was measured"
        raise ConfigError(f"run {folder.name} has no best.yaml", remedy=remedy)
    best, (run, _) = best_file.read(folder / "best.yaml"), runs_of(folder)
    found = exported(best, asked.to, summary.of_run(run).place, run.table)
    print(found.to_python(f"the best configuration of run {folder.name}") if asked.python else found.to_json())
    by_hand = () if asked.python else found.unsaid.values()  # else they are in the comments
    for text in [*(f"warning: {text}" for text in best.warnings), *(f"set by hand: {text}" for text in by_hand)]:
        line(console(sys.stderr, os.environ), text)
    return 0


def write_again(arguments: Sequence[str]) -> int:
    """Writes what a run exports once more and returns the exit code."""
    asked = with_id("report", "Writes best.yaml, front.csv and report.html again.").parse_args(arguments)
    folder = find_run(asked.runs_dir, asked.id)
    run, ablated = runs_of(folder)
    found, page = summary.of_run(run, ablated), folder / "report.html"
    paths = [*export.write_all(found, folder), report.write_report(found, page, importances_of(run))]
    print(as_line(FilesReply(files=list(map(str, paths)))) if asked.json else "\n".join(map(str, paths)))
    return 0


def check_machine(arguments: Sequence[str]) -> int:
    """Prints what this machine has and returns the exit code: 3 where something is missing."""
    made = parser("doctor", "Says what this machine has, and what a search needs that is missing here.")
    made.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="settings of a run, such as workload=nli card=rtx3090"
    )
    asked = made.parse_args(arguments)
    with UserFile() as file:
        config = load([*asked.settings, f"runs_dir={asked.runs_dir}"], file.table)
    doctor.choose_devices(config)
    cuda = config.card.device != "cpu" and bool(nvml.gpus())  # a card that is not here is emulated
    named = any(setting.startswith("workload=") for setting in asked.settings)
    packages = machine_checks.packages(config.workload.ref if named else None)
    config = config if cuda else config.model_copy(update={"card": config.card.unlisted()})
    checks = [*doctor.preflight(config, "cuda" if cuda else "cpu"), *packages, *machine_checks.found()]
    checks = list({check.name: check for check in checks}.values())  # the later knows more
    if asked.json:
        print(as_line(DoctorReply(checks=checks)))
    else:
        Terminal().findings(checks)
    return 3 if any(check.state == "FAIL" for check in checks) else 0


def parser(verb: str, description: str, *, as_json: bool = True) -> argparse.ArgumentParser:
    """Returns the arguments that every command on runs has, without `--json` where it is not `as_json`."""
    made = argparse.ArgumentParser(prog=f"python -m tuning {verb}", description=description)
    made.add_argument("--runs-dir", default="runs", help="where runs are  [runs]")
    if as_json:
        made.add_argument("--json", action="store_true", help="JSON on stdout")
    return made


def with_id(verb: str, description: str, *, as_json: bool = True) -> argparse.ArgumentParser:
    """Returns those of `parser`, and `id`, the run that a command is about."""
    made = parser(verb, description, as_json=as_json)
    made.add_argument("id", help=ID_HELP)
    return made
