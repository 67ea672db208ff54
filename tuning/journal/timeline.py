"""The time that a run spent in each stage, from its events alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuning.journal.events import Event, ResumeRecord, StageRecord

STARTUP = "start-up"
"""In the place of a stage: the time of a session before its first stage."""


@dataclass(frozen=True)
class Times:
    """Seconds of the run, and of its stages, which add up to `wall_s`; time between sessions does not count."""

    wall_s: float
    stages: Mapping[str, float]


def times(events: Sequence[Event]) -> Times:
    """Returns where the time went; all zero without events.

    Each session begins with its start-up, which its first record (`study`, `resume`) has as `startup_s`.
    """
    stages: dict[str, float] = {}
    stage, since_s, end_s = STARTUP, 0.0, max((event.at_s for event in events), default=0.0)
    for event in events:
        match event:
            case ResumeRecord():
                begun_s, following = event.at_s - event.startup_s, STARTUP
            case StageRecord(state="start"):
                begun_s, following = event.at_s, event.stage
            case _:
                continue
        stages[stage] = stages.get(stage, 0.0) + max(0.0, begun_s - since_s)
        stage, since_s = following, max(since_s, begun_s)
    stages[stage] = stages.get(stage, 0.0) + end_s - since_s
    return Times(end_s, {name: seconds for name, seconds in stages.items() if seconds > 0})
