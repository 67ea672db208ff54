"""Where the time of a run went, from its events alone.

Every moment of the run is given to one activity. Where several overlap, as trials packed on one device do, measured
work wins over preparation, so the parts add up to the run's time and nothing is counted twice. Moments are seconds of
the run (`journal.run`).
"""

from __future__ import annotations

import itertools
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
from tuning.journal.run import unix_s

Activity = Literal["training", "probing", "confirming", "startup", "waiting"]
_PRIORITY: tuple[Activity, ...] = ("training", "probing", "confirming", "startup")


@dataclass(frozen=True)
class Interval:
    """One activity from `start_s` to `end_s`, seconds since the run began."""

    activity: Activity
    start_s: float
    end_s: float


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


def intervals(events: Sequence[Event]) -> list[Interval]:
    """Returns what happened when, in the order of the events; waiting is what is left between them."""
    steps = _steps(events)
    first_stage = next((e.at_s for e in events if isinstance(e, StageRecord)), events[0].at_s if events else 0.0)
    spans = [Interval("startup", 0.0, first_stage)]
    for event in events:
        spans += _of_event(event, steps)
    spans += _until_first_step(events, sorted(first_s for first_s, _ in steps.values()))
    return [i for i in spans if i.end_s > i.start_s]


def times(events: Sequence[Event]) -> Times:
    """Returns where the time went; all zero without events."""
    wall_s = max((event.at_s for event in events), default=0.0)
    painted = _paint(intervals(events), wall_s)
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
    """Returns the first step and the end of the last evaluation of each trial that had any, by its record's number.

    A worker stamps them by the clock, which may have been set since, or be another machine's: what cannot be is put
    right by `train_s` and `evaluate_s`, which no clock changes, and by when the trial began and was written.
    """
    begun: dict[str, float] = {}
    steps: dict[int, tuple[float, float]] = {}
    for event in events:
        if isinstance(event, StartRecord):
            begun[event.trial] = event.at_s
        if not isinstance(event, TrialRecord) or not event.first_step_at:
            continue
        room = max(0.0, event.at_s - begun.get(event.trial, 0.0))
        worked = event.train_s + event.evaluate_s
        span = max(event.last_step_at - event.first_step_at, worked)
        span = span if span <= room else min(worked, room)
        late = unix_s(event.t) - event.first_step_at - span
        late = late if 0 <= late <= room - span + 1e-6 else 0.0
        steps[event.seq] = event.at_s - late - span, event.at_s - late
    return steps


def _of_event(event: Event, steps: Mapping[int, tuple[float, float]]) -> Iterator[Interval]:
    at_s = event.at_s
    match event:
        case ResumeRecord():
            yield Interval("startup", at_s - event.startup_s, at_s)
        case ProbeRecord():
            yield Interval("probing", at_s - event.wall_s, at_s)
        case WindowRecord():
            yield Interval("confirming", at_s - event.wall_s, at_s)
        case ConfirmedRecord():
            yield Interval("confirming", at_s - event.setup_s - event.train_s - event.evaluate_s, at_s)
        case StageRecord(stage="estimate", state="end"):
            yield Interval("startup", at_s - event.wall_s, at_s)
        case TrialRecord() if event.seq in steps:
            first_s, last_s = steps[event.seq]
            yield Interval("startup", first_s - event.setup_s, first_s)
            yield Interval("training", first_s, last_s)
        case TrialRecord():  # it ended before its first step
            yield Interval("startup", at_s - event.setup_s, at_s)


def _until_first_step(events: Sequence[Event], first_steps: Sequence[float]) -> Iterator[Interval]:
    """From the start of a search to the first step of its first trial: processes start, data and model are loaded."""
    for event in events:
        match event:
            case StageRecord(stage="search", state="start", at_s=at_s):
                yield Interval("startup", at_s, next((step for step in first_steps if step > at_s), at_s))


def _paint(found: Sequence[Interval], end_s: float) -> Mapping[Activity, float]:
    """Seconds of each activity when every moment goes to the first of `_PRIORITY` that is under way."""
    cuts = sorted({0.0, end_s, *(min(max(t, 0.0), end_s) for i in found for t in (i.start_s, i.end_s))})
    total: dict[Activity, float] = dict.fromkeys(_PRIORITY, 0.0)
    for start, end in itertools.pairwise(cuts):
        middle = (start + end) / 2
        under_way = {i.activity for i in found if i.start_s <= middle < i.end_s}
        activity = next((a for a in _PRIORITY if a in under_way), None)
        if activity is not None:
            total[activity] += end - start
    return total


def _evaluate_frac(events: Sequence[Event]) -> float:
    trials = [event for event in events if isinstance(event, TrialRecord)]
    evaluate_s = sum(trial.evaluate_s for trial in trials)
    busy_s = evaluate_s + sum(trial.train_s for trial in trials)
    return evaluate_s / busy_s if busy_s else 0.0
