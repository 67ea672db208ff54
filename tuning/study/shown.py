"""What a study writes, as Ray's dashboard shows it: each trial and stage as a task, with the words of the terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tuning.config.lenient import finite, mapping
from tuning.journal.records import Record
from tuning.report import text
from tuning.report.format import plain, unlike
from tuning.report.trial_views import SPEED

if TYPE_CHECKING:
    from tuning.workers.ray_board import RayBoard


def show(board: RayBoard, record: Record, objective: str) -> None:
    """Shows a record as it is written."""
    trial = plain(record.get("trial") or "")
    told = text.event(record, {}, objective)
    if record.event == "stage" and record["state"] == "start":
        board.runs("stage", f"stage {record['stage']}")
    elif record.event == "stage":
        board.says(f"stage {record['stage']} has ended", "stage")
    elif record.event == "trial_start":
        board.runs(trial, f"{trial} runs  {' '.join(unlike(record.get('config') or {}, {}))}")
    elif trial and record.event in ("lost", "widened", "refused"):  # it waits for its turn, or never comes
        board.says("  ".join(told or (record.event, trial)), trial)
    elif told is not None and record.event == "trial":
        values = {**mapping(record.get("values")), SPEED: record.get(SPEED)}
        known = {re.sub(r"\W", "_", k): v for k, value in values.items() if (v := finite(value)) is not None}
        board.says("  ".join(told), trial, known)
    elif told is not None:
        board.says("  ".join(told))
