"""A study on Ray's dashboard: each trial and stage as a task, with the words of the terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from trainables.knobs import KnobTable
from tuning.journal import events
from tuning.report import words
from tuning.report.format import plain, unlike
from tuning.report.trial_views import SPEED

if TYPE_CHECKING:
    from tuning.workers.ray_board import RayBoard


def show(board: RayBoard, made: events.Event, objective: str, table: KnobTable) -> None:
    """Shows an event as it is written."""
    told = words.event(made, {}, table, objective)
    match made:
        case events.StageRecord(state="start"):
            board.runs("stage", f"stage {made.stage}")
        case events.StageRecord():
            board.says(f"stage {made.stage} has ended", "stage")
        case events.StartRecord():
            trial = plain(made.trial)
            board.runs(trial, f"{trial} runs  {' '.join(unlike(made.config, {}, table))}")
        case events.LostRecord() | events.WidenedRecord() | events.RefusedRecord() if (
            made.trial
        ):  # it waits for its turn, or never comes
            board.says("  ".join(told or ()), plain(made.trial))
        case events.TrialRecord():
            values = {**made.values, SPEED: made.samples_per_s}
            known = {re.sub(r"\W", "_", name): value for name, value in values.items() if value is not None}
            board.says("  ".join(told or ()), plain(made.trial), known)
        case _ if told is not None:
            board.says("  ".join(told))
