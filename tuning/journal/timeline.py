"""The time that a run spent on each activity, from its events alone.

Every moment of the run is given to one activity. If several overlap, as trials packed on one device do, measured
work wins over preparation, so the parts add up to the run's time and nothing is counted twice. Moments are seconds of
the run (`journal.run`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tuning.journal.events import (
    ConfirmedRecord,
    Event,
    ProbeRecord,
    ResumeRecord,
    StageRecord,
    StartRecord,
    TrialRecord,
    WindowRecord,
)

Activity = Literal["training", "probing", "confirming", "startup", "waiting"]
_PRIORITY: tuple[Activity, ...] = ("training", "probing", "confirming", "startup")


Interval = tuple[Activity, float, float]
"""An activity, its start and its end in seconds since the run began."""


@dataclass(frozen=True)
class Times:
    """Seconds of the run by activity; they add up to `wall_s`, in which time between sessions does not count.

    `training_s` is the union of the trials' intervals, so two trials side by side count once; `evaluating_s` is the
    share of that union which the trials spent on validation. `confirming_s` is windows and trainings of the confirm
    stage. A session's time before its first record counts as start-up where that record (`study`, `resume`) has it as
    `startup_s`.
    """

    wall_s: float
    startup_s: float
    probing_s: float
    training_s: float
    evaluating_s: float
    confirming_s: float
    waiting_s: float


def times(events: Sequence[Event]) -> Times:
    """Returns where the time went; all zero without events."""
    wall_s = max((event.at_s for event in events), default=0.0)
    painted = _paint(list(_intervals(events)), wall_s)
    busy_s, evaluate_frac = painted["training"], _evaluate_frac(events)
    return Times(
        wall_s=wall_s,
        startup_s=painted["startup"],
        probing_s=painted["probing"],
        training_s=busy_s * (1 - evaluate_frac),
        evaluating_s=busy_s * evaluate_frac,
        confirming_s=painted["confirming"],
        waiting_s=max(0.0, wall_s - sum(painted.values())),
    )


def _steps(events: Sequence[Event]) -> dict[int, tuple[float, float]]:
    """Returns the first step and the end of each trial that had a step, by its record's number.

    It trained and was evaluated until its record was written, by durations: clocks of machines differ, and are set.
    """
    begun: dict[str, float] = {}
    steps: dict[int, tuple[float, float]] = {}
    for event in events:
        if isinstance(event, StartRecord):
            begun[event.trial] = event.at_s
        elif isinstance(event, TrialRecord) and (worked_s := event.train_s + event.evaluate_s):
            steps[event.seq] = max(event.at_s - worked_s, begun.get(event.trial, 0.0)), event.at_s
    return steps


def _intervals(events: Sequence[Event]) -> Iterator[Interval]:
    """Yields what happened when, in the order of the events; waiting is what is left between them."""
    steps = _steps(events)
    first_s = next((event.at_s for event in events), 0.0)
    yield "startup", 0.0, next((event.at_s for event in events if isinstance(event, StageRecord)), first_s)
    for event in events:
        at_s = event.at_s
        match event:
            case ResumeRecord():
                yield "startup", at_s - event.startup_s, at_s
            case ProbeRecord():
                yield "probing", at_s - event.wall_s, at_s
            case WindowRecord():
                yield "confirming", at_s - event.wall_s, at_s
            case ConfirmedRecord():
                yield "confirming", at_s - event.setup_s - event.train_s - event.evaluate_s, at_s
            case StageRecord(stage="estimate", state="end"):
                yield "startup", at_s - event.wall_s, at_s
            case StageRecord(stage="search", state="start"):  # until the first step: processes start, data are loaded
                yield "startup", at_s, min((first_s for first_s, _ in steps.values() if first_s > at_s), default=at_s)
            case TrialRecord() if event.seq in steps:
                first_s, last_s = steps[event.seq]
                yield "startup", first_s - event.setup_s, first_s
                yield "training", first_s, last_s
            case TrialRecord():  # it ended before its first step
                yield "startup", at_s - event.setup_s, at_s


def _paint(found: Sequence[Interval], end_s: float) -> Mapping[Activity, float]:
    """Seconds of each activity when every moment goes to the first of `_PRIORITY` that is under way."""
    total: dict[Activity, float] = dict.fromkeys(_PRIORITY, 0.0)
    under_way: dict[Activity, int] = dict.fromkeys(_PRIORITY, 0)
    changes: list[tuple[float, int, Activity]] = []
    for activity, *ends in found:
        start_s, stop_s = (min(max(at_s, 0.0), end_s) for at_s in ends)
        changes += [(start_s, 1, activity), (stop_s, -1, activity)] if start_s < stop_s else []
    before = 0.0
    for at_s, sign, changed in sorted(changes):
        first = next((a for a in _PRIORITY if under_way[a]), None)
        if first is not None:
            total[first] += at_s - before
        under_way[changed] += sign
        before = at_s
    return total


def _evaluate_frac(events: Sequence[Event]) -> float:
    trials = [event for event in events if isinstance(event, TrialRecord)]
    evaluate_s = sum(trial.evaluate_s for trial in trials)
    busy_s = evaluate_s + sum(trial.train_s for trial in trials)
    return evaluate_s / busy_s if busy_s else 0.0
