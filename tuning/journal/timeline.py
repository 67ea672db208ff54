"""Where the wall clock of a run went, from its records alone.

Every moment of the run is given to one activity. Where several overlap, as trials packed on one device do, measured
work wins over preparation, so the parts add up to the wall time and nothing is counted twice.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from tuning.journal.records import Record

Activity = Literal["training", "probing", "confirming", "startup", "waiting"]
_PRIORITY: tuple[Activity, ...] = ("training", "probing", "confirming", "startup")


@dataclass(frozen=True)
class Interval:
    """One activity from `start_s` to `end_s`, seconds since the run began; `label` is the trial or configuration."""

    activity: Activity
    start_s: float
    end_s: float
    label: str = ""


@dataclass(frozen=True)
class Times:
    """Seconds of wall clock by activity; they add up to `wall_s`, in which time between sessions does not count.

    `training_s` is the union of the trials' intervals, so two trials side by side count once; `evaluating_s` is the
    share of that union which the trials spent on validation. `confirming_s` is windows and trainings of the confirm
    stage. `gap_s` is the median time from one trial's end to the next one's first step in the same slot; slots
    are not recorded, so each trial is put after the one that had ended most recently when it began. A session's time
    before its first record counts as start-up where that record (`study`, `resume`) has it as `startup_s`.
    """

    wall_s: float
    startup_s: float
    probing_s: float
    training_s: float
    evaluating_s: float
    confirming_s: float
    waiting_s: float
    gap_s: float | None

    @property
    def overhead_frac(self) -> float:
        """The share of the wall clock in which nothing was trained, evaluated or measured, 0 to 1."""
        measured = self.probing_s + self.training_s + self.evaluating_s + self.confirming_s
        return max(0.0, 1 - measured / self.wall_s) if self.wall_s > 0 else 0.0


def intervals(records: Sequence[Record]) -> list[Interval]:
    """Returns what happened when, in the order of the records; waiting is what is left between them."""
    if not records:
        return []
    origin = _began(records[0])
    found = [Interval("startup", 0.0, max(0.0, _first_stage(records) - origin), "start")]
    for record in records:
        end = _seconds(record) - origin
        found += [i for i in _of_record(record, origin, end) if i.end_s > i.start_s]
    return found + _crews(records, origin)


def _crews(records: Sequence[Record], origin: float) -> list[Interval]:
    """From the start of a search to the first step of its first trial: processes start, data and model are loaded."""
    steps = sorted(_number(r, "first_step_at") for r in records if r.event == "trial" and _number(r, "first_step_at"))
    begun = [_seconds(r) for r in records if r.event == "stage" and (r["stage"], r["state"]) == ("search", "start")]
    firsts = [(start, next((t for t in steps if t > start), start)) for start in begun]
    return [Interval("startup", a - origin, b - origin, "search") for a, b in firsts if b > a]


def times(records: Sequence[Record]) -> Times:
    """Returns where the time went; all zero without records."""
    if not records:
        return Times(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None)
    away = _away(records)
    origin = _began(records[0])
    end_s = max(_seconds(r) for r in records) - origin
    painted = _paint(intervals(records), end_s, away)
    wall_s = end_s - sum(b - a for a, b in away)
    busy_s, evaluate_frac = painted["training"], _evaluate_frac(records)
    return Times(
        wall_s=wall_s,
        startup_s=painted["startup"],
        probing_s=painted["probing"],
        training_s=busy_s * (1 - evaluate_frac),
        evaluating_s=busy_s * evaluate_frac,
        confirming_s=painted["confirming"],
        waiting_s=max(0.0, wall_s - sum(painted.values())),
        gap_s=_median_gap(records, away, origin),
    )


def _of_record(record: Record, origin: float, end: float) -> Iterator[Interval]:
    label = str(record.get("name") or record.get("trial") or "")
    if record.event == "resume":
        yield Interval("startup", end - _number(record, "startup_s"), end, "resume")
    elif record.event == "probe":
        yield Interval("probing", end - _number(record, "wall_s"), end, label)
    elif record.event == "window":
        yield Interval("confirming", end - _number(record, "wall_s"), end, label)
    elif record.event == "confirmed":
        spent = sum(_number(record, key) for key in ("setup_s", "train_s", "evaluate_s"))
        yield Interval("confirming", end - spent, end, label)
    elif record.event == "stage" and record.get("stage") == "estimate" and record.get("state") == "end":
        yield Interval("startup", end - _number(record, "wall_s"), end, "estimate")
    elif record.event == "trial":
        first, last = _busy(record)
        setup_s = _number(record, "setup_s")
        if first:
            yield Interval("startup", first - origin - setup_s, first - origin, label)
            yield Interval("training", first - origin, last - origin, label)
        else:  # it ended before its first step
            yield Interval("startup", end - setup_s, end, label)


def _busy(record: Record) -> tuple[float, float]:
    """From the first step to the end of the last evaluation, which follows the last step; unix seconds, 0 for none."""
    first, last = _number(record, "first_step_at"), _number(record, "last_step_at")
    if not first:
        return 0.0, 0.0
    return first, max(first, last, first + _number(record, "train_s") + _number(record, "evaluate_s"))


def _paint(found: Sequence[Interval], end_s: float, away: Sequence[tuple[float, float]]) -> Mapping[Activity, float]:
    """Seconds of each activity when every moment goes to the first of `_PRIORITY` that is under way."""
    edges = {0.0, end_s, *(t for span in away for t in span)}
    edges |= {min(max(t, 0.0), end_s) for i in found for t in (i.start_s, i.end_s)}
    cuts = sorted(edges)
    total: dict[Activity, float] = dict.fromkeys(_PRIORITY, 0.0)
    for start, end in itertools.pairwise(cuts):
        middle = (start + end) / 2
        if any(a <= middle < b for a, b in away):
            continue
        under_way = {i.activity for i in found if i.start_s <= middle < i.end_s}
        activity = next((a for a in _PRIORITY if a in under_way), None)
        if activity is not None:
            total[activity] += end - start
    return total


def _away(records: Sequence[Record]) -> list[tuple[float, float]]:
    """The spans between a session's last record and the start of the next session, seconds since the run began."""
    origin = _began(records[0])
    pairs = itertools.pairwise(records)
    return [(_seconds(a) - origin, max(_seconds(a), _began(b)) - origin) for a, b in pairs if b.event == "resume"]


def _first_stage(records: Sequence[Record]) -> float:
    return next((_seconds(r) for r in records if r.event == "stage"), _seconds(records[0]))


def _evaluate_frac(records: Sequence[Record]) -> float:
    trials = [r for r in records if r.event == "trial"]
    evaluate_s = sum(_number(r, "evaluate_s") for r in trials)
    busy_s = evaluate_s + sum(_number(r, "train_s") for r in trials)
    return evaluate_s / busy_s if busy_s else 0.0


def _median_gap(records: Sequence[Record], away: Sequence[tuple[float, float]], origin: float) -> float | None:
    spans = sorted(_busy_steps(r) for r in records if r.event == "trial" and _number(r, "first_step_at"))
    ends: list[float] = []
    gaps: list[float] = []
    for first, last in spans:
        free = [end for end in ends if end <= first]
        if free:
            latest = max(free)
            ends.remove(latest)
            if not any(latest - origin <= a and b <= first - origin for a, b in away):
                gaps.append(first - latest)
        ends.append(last)
    return statistics.median(gaps) if gaps else None


def _busy_steps(record: Record) -> tuple[float, float]:
    first = _number(record, "first_step_at")
    return first, max(first, _number(record, "last_step_at"), _number(record, "returned_at"))


def _number(record: Record, key: str) -> float:
    value = record.get(key)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else 0.0


def _began(record: Record) -> float:
    """When the session began that opened with this record: it starts Ray and loads the workload before it writes."""
    return _seconds(record) - _number(record, "startup_s")


def _seconds(record: Record) -> float:
    return datetime.fromisoformat(record.t).timestamp()
