"""Writes `recorded_search/trials.jsonl`: a real study, run by Ray, cut to what its search decided from and decided.

    python tests/data/make_recorded_search.py runs/signals/ID/trials.jsonl

The study record says with which command, versions and device it was made. Left out are what no decision reads (spans,
telemetry, tracebacks) and what came after the search.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tuning.journal.records import Journal, read

KEPT = {
    "study": (
        *("workload", "command", "versions", "device", "card", "seed", "objectives", "train_samples"),
        *("horizon_samples", "concurrency", "threads", "config"),
    ),
    "stage": ("stage", "state"),
    "footprint": ("coupling", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "points", "source", "measured"),
    "known": ("facts",),
    "reused": ("runs", "probes", "trials", "left_out"),
    "probe": ("name", "config", "outcome", "samples_per_s", "micro_step_s", "optimizer_step_s", "peak_allocated_bytes"),
    "trial_start": ("trial", "config"),
    "refused": ("trial", "config", "stage"),
    "rung": ("trial", "samples", "values", "samples_per_s"),
    "widened": ("trial", "reason"),
    "oom": ("trial", "config", "message", "outcome", "fault", "wanted_bytes", "cap_bytes"),
    "trial": (
        *("trial", "config", "outcome", "stopped_at", "values", "samples", "samples_per_s", "train_s"),
        *("measured_samples_per_s", "evaluate_s", "peak_allocated_bytes", "cap_bytes", "fault", "message"),
    ),
}


class Copied(Journal):
    """A journal whose lines keep their time."""

    moment = ""

    def _stamp(self) -> str:
        return self.moment


def main() -> None:
    """Writes the cut run beside this file."""
    records, _ = read(Path(sys.argv[1]))
    path = Path(__file__).parent / "recorded_search" / "trials.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    with Copied.open(path, create=True) as journal:
        for record in records:
            if record.event == "stage" and record["stage"] == "confirm":
                break
            if record.event in KEPT:
                journal.moment = record.t
                fields = {n: record[n] for n in KEPT[record.event] if n in record.fields}
                if record.event == "study":  # where it was written is nobody's business
                    typed = [w for w in record["config"]["overrides"] if not w.startswith("runs_dir=")]
                    cut = {"named": {}, "origins": {}, "runs_dir": "runs", "overrides": typed}
                    fields["config"] = {**record["config"], **cut}
                    fields["command"] = " ".join(["python -m tuning.run", *typed])
                journal.append(record.event, **fields)
    path.with_name(f"{path.name}.lock").unlink()


if __name__ == "__main__":
    main()
