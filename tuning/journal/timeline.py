"""Where the time of a run went, from its records alone.

Every moment of the run is given to one activity. Where several overlap, as trials packed on one device do, measured
work wins over preparation, so the parts add up to the run's time and nothing is counted twice. Moments are seconds of
the run: time between sessions does not count, and a clock that is set changes nothing (`Record.mono`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from tuning.config.lenient import finite
from tuning.journal.records import Record

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


def intervals(records: Sequence[Record]) -> list[Interval]:
    """Returns what happened when, in the order of the records; waiting is what is left between them."""
    placed = moments(records)
    steps = _steps(placed)
    first_stage = next((at for record, at in placed if record.event == "stage"), placed[0][1] if placed else 0.0)
    found = [Interval("startup", 0.0, first_stage)]
    for number, (record, at) in enumerate(placed):
        found += _of_record(record, at, steps.get(number))
    found += _until_first_step(placed, sorted(first_s for first_s, _ in steps.values()))
    return [i for i in found if i.end_s > i.start_s]


def times(records: Sequence[Record]) -> Times:
    """Returns where the time went; all zero without records."""
    wall_s = max((at for _, at in moments(records)), default=0.0)
    painted = _paint(intervals(records), wall_s)
    busy_s, evaluate_frac = painted["training"], _evaluate_frac(records)
    return Times(
        wall_s=wall_s,
        startup_s=painted["startup"],
        probing_s=painted["probing"],
        training_s=busy_s * (1 - evaluate_frac),
        evaluating_s=busy_s * evaluate_frac,
        confirming_s=painted["confirming"],
        waiting_s=max(0.0, wall_s - sum(painted.values())),
    )


def moments(records: Sequence[Record]) -> list[tuple[Record, float]]:
    """Returns each record with the moment it was written, in seconds of the run."""
    found: list[tuple[Record, float]] = []
    origin = base = end = 0.0
    before = None
    for record in records:
        clock = _unix(record) if record.mono is None else record.mono
        is_older = before is not None and (record.mono is None) == (before.mono is None)
        set_back = is_older and record.mono is not None and before is not None and clock < (before.mono or 0.0)
        if not is_older or set_back or record.event == "resume":  # the line of a `resume` may have been damaged
            base, origin = end, clock - _number(record, "startup_s")
        at = base + max(0.0, clock - origin)
        end, before = max(end, at), record
        found.append((record, at))
    return found


def _steps(placed: Sequence[tuple[Record, float]]) -> dict[int, tuple[float, float]]:
    """Returns the first step and the end of the last evaluation of each trial that had any, by its record's place.

    A worker stamps them by the clock, which may have been set since, or be another machine's: what cannot be is put
    right by `train_s` and `evaluate_s`, which no clock changes, and by when the trial began and was written.
    """
    begun: dict[object, float] = {}
    found: dict[int, tuple[float, float]] = {}
    for number, (record, at) in enumerate(placed):
        if record.event == "trial_start":
            begun[record["trial"]] = at
        first = _number(record, "first_step_at")
        if record.event != "trial" or not first:
            continue
        room = max(0.0, at - begun.get(record["trial"], 0.0))
        worked = _number(record, "train_s") + _number(record, "evaluate_s")
        span = max(_number(record, "last_step_at") - first, worked)
        span = span if span <= room else min(worked, room)
        late = _unix(record) - first - span
        late = late if 0 <= late <= room - span + 1e-6 else 0.0
        found[number] = at - late - span, at - late
    return found


def _of_record(record: Record, at: float, steps: tuple[float, float] | None) -> Iterator[Interval]:
    if record.event == "resume":
        yield Interval("startup", at - _number(record, "startup_s"), at)
    elif record.event == "probe":
        yield Interval("probing", at - _number(record, "wall_s"), at)
    elif record.event == "window":
        yield Interval("confirming", at - _number(record, "wall_s"), at)
    elif record.event == "confirmed":
        spent = sum(_number(record, key) for key in ("setup_s", "train_s", "evaluate_s"))
        yield Interval("confirming", at - spent, at)
    elif record.event == "stage" and (record["stage"], record["state"]) == ("estimate", "end"):
        yield Interval("startup", at - _number(record, "wall_s"), at)
    elif record.event == "trial" and steps is not None:
        first_s, last_s = steps
        yield Interval("startup", first_s - _number(record, "setup_s"), first_s)
        yield Interval("training", first_s, last_s)
    elif record.event == "trial":  # it ended before its first step
        yield Interval("startup", at - _number(record, "setup_s"), at)


def _until_first_step(placed: Sequence[tuple[Record, float]], first_steps: Sequence[float]) -> Iterator[Interval]:
    """From the start of a search to the first step of its first trial: processes start, data and model are loaded."""
    for record, at in placed:
        if record.event == "stage" and (record["stage"], record["state"]) == ("search", "start"):
            yield Interval("startup", at, next((step for step in first_steps if step > at), at))


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


def _evaluate_frac(records: Sequence[Record]) -> float:
    trials = [r for r in records if r.event == "trial"]
    evaluate_s = sum(_number(r, "evaluate_s") for r in trials)
    busy_s = evaluate_s + sum(_number(r, "train_s") for r in trials)
    return evaluate_s / busy_s if busy_s else 0.0


def _number(record: Record, key: str) -> float:
    return finite(record.get(key)) or 0.0


def _unix(record: Record) -> float:
    return datetime.fromisoformat(record.t).timestamp()
