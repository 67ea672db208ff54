"""Where runs are, and which of them an id means."""

from __future__ import annotations

from pathlib import Path

from tuning.errors import ConfigError

JOURNAL, RECEIPTS = "trials.jsonl", "receipts.jsonl"


def known_runs(runs_dir: str) -> list[Path]:
    """Returns the folders of all runs, oldest first."""
    return sorted((p.parent for p in Path(runs_dir).glob(f"*/*/{JOURNAL}")), key=lambda folder: folder.name)


def find_run(runs_dir: str, run_id: str) -> Path:
    """Returns the folder of a run by its id; raises ConfigError with the ids there are."""
    known = known_runs(runs_dir)
    for folder in known:
        if folder.name == run_id:
            return folder
    names = ", ".join(folder.name for folder in known[-3:]) or "none"
    raise ConfigError(
        f"resume={run_id}: no run of this id in {runs_dir}",
        allowed=f"the latest are {names}",
        remedy="runs_dir=PATH, if it was written elsewhere",
    )
