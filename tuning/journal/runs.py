"""The folders of runs, the run that an id means, and the versions that decide what a run does."""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tuning import __version__
from tuning.config.errors import ConfigError
from tuning.journal.events import StudyRecord

JOURNAL, ABLATION = "trials.jsonl", "ablation.jsonl"
LAST = "last"
"""In the place of an id, the run that began last."""
JOURNAL_SCHEMA = 2
"""The version of the records written here; a higher one is of a later version, a lower one of an earlier one."""


def known_runs(runs_dir: str) -> list[Path]:
    """Returns the folders of all runs, by the time at which they began, oldest first.

    Raises ConfigError for a folder that cannot be read.
    """
    try:
        folders = [path.parent for path in Path(runs_dir).glob(f"*/*/{JOURNAL}")]
    except OSError as error:
        what = f"runs in {runs_dir} cannot be read: {error.strerror or error}"
        raise ConfigError(what, remedy="--runs-dir PATH, a folder that you may read") from None
    return sorted(folders, key=lambda folder: (_began(folder), folder.name))


def find_run(runs_dir: str, run_id: str, *, asked: str = "", option: str = "--runs-dir PATH") -> Path:
    """Returns the folder of a run by its id or that folder, of the newest for "last"; raises ConfigError with the ids.

    `asked` is what was typed where it is not the id alone, `option` how another place is named there.
    """
    known = known_runs(runs_dir)
    for folder in known:
        if folder.name == run_id or folder == Path(run_id):
            return folder
    if run_id == LAST and known:
        return known[-1]
    if os.access(Path(run_id, JOURNAL), os.F_OK):
        return Path(run_id).resolve()  # from whose parents the commands are told that go on with it
    if os.access(Path(run_id, "probe.json"), os.F_OK):
        raise ConfigError(f"{run_id} is a probe's folder, not a run's", remedy="its answer: probe.json, probe.patch")
    latest = ", ".join(folder.name for folder in known[-3:])
    near = difflib.get_close_matches(run_id, [folder.name for folder in known], n=1)
    what = f"{asked or run_id}: no run of this id in {runs_dir}" + ", which has no runs" * (not known)
    remedy = f"did you mean {near[0]}?" if near else f"{option}, if it was written elsewhere"
    raise ConfigError(what, allowed=f"recent runs: {latest}" if latest else "", remedy=remedy)


def other_version(study: StudyRecord) -> str:
    """Returns "a later" or "an earlier" for the version that wrote this `study` record, "" where it is this one."""
    schema = JOURNAL_SCHEMA if study.schema is None else study.schema
    return "" if schema == JOURNAL_SCHEMA else "a later" if schema > JOURNAL_SCHEMA else "an earlier"


def require_known(study: StudyRecord | None, folder: Path) -> None:
    """Raises ConfigError where another version wrote the run in `folder`, by its `study` record, if it has one."""
    if study is not None and (when := other_version(study)):
        what = f"run {folder.name} was written by {when} version of cardtune"
        newer = "pip install --upgrade cardtune"
        remedy = newer if when == "a later" else "begin another run, or install that version"
        raise ConfigError(f"{what} (schema {study.schema})", allowed=f"schema {JOURNAL_SCHEMA}", remedy=remedy)


def versions() -> dict[str, str]:
    """Returns the versions that decide what a run does."""
    found = {"cardtune": __version__, "python": platform.python_version()}
    for name in ("torch", "ray", "optuna", "transformers", "peft"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def changes(pairs: Iterable[tuple[str, Any, Any]]) -> list[str]:
    """Returns in words what is otherwise now than then, of (name, then, now); what is not known is passed over."""
    changed = [(name, then, now) for name, then, now in pairs if then not in (None, "") and now != "" and then != now]
    return [
        f"{name} has changed" if name in ("data", "the workload's source") else f"{name} was {then} and is {now}"
        for name, then, now in changed
    ]


def _began(folder: Path) -> str:
    """Returns the ISO time of a journal's first line, "" if it cannot be told: a pipe would be waited for."""
    if not (folder / JOURNAL).is_file():
        return ""
    try:
        with (folder / JOURNAL).open(encoding="utf-8") as lines:
            return str(json.loads(lines.readline())["t"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
