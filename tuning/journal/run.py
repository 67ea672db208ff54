"""A run as its records tell it so far: everybody asks this one value, which takes each record once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from trainables.knob_columns import Kind, Knob
from trainables.knobs import KnobTable
from trainables.our_knobs import EVERY, OURS
from tuning.config.lenient import finite
from tuning.journal import events
from tuning.journal.format import Record

QUEUED, RUNNING, REFUSED = "queued", "running", "refused"
Reopening = Literal["search", "pick"]
"""The settings that a study may be given more of: trials or time to search, or another quality to pick by."""


@dataclass
class Trial:
    """A trial of the search.

    | from | by | to |
    |---|---|---|
    | nothing, queued, or an ending that is made up for | `began` | running |
    | running | a rung | running |
    | running | `ended` | its outcome: ok, stopped, cut, refused, oom, failed, diverged, ... |
    | nothing, queued | `was_refused`, as it does not fit any more | refused |
    | cut, or stopped before it began again | `was_given_time`, a resumed study | queued |
    """

    id: str
    state: str = QUEUED
    starts: list[events.StartRecord] = field(default_factory=list)
    rungs: list[events.RungRecord] = field(default_factory=list)
    ends: list[events.TrialRecord] = field(default_factory=list)
    last: events.TrialRecord | events.RefusedRecord | None = None
    """Its latest ending, or that it was refused while it waited."""
    is_beside: bool = False
    """It is the reference, whose configuration the space lacks: it is not picked."""

    def began(self, start: events.StartRecord) -> None:
        """Takes that an attempt began."""
        self.starts.append(start)
        self.state = RUNNING
        self.is_beside = self.is_beside or start.beside

    def ended(self, end: events.TrialRecord) -> None:
        """Takes an ending: a later one replaces it."""
        self.ends.append(end)
        self.last, self.state = end, end.outcome

    def was_refused(self, refusal: events.RefusedRecord) -> None:
        """Takes that it waited and does not fit any more."""
        self.last, self.state = refusal, REFUSED

    def was_given_time(self) -> None:
        """Takes that the study has more time: a trial that the time has cut is to begin again."""
        if self.end is not None and self.state == self.end.outcome and is_cut(self.end):
            self.state = QUEUED

    @property
    def end(self) -> events.TrialRecord | None:
        """Returns its latest ending, None before it has any."""
        return self.ends[-1] if self.ends else None

    @property
    def is_open(self) -> bool:
        """Returns whether it runs, or is to begin again."""
        return bool(self.starts) and self.state in (QUEUED, RUNNING)

    @property
    def config(self) -> events.Config:
        """Returns the configuration with which it began last."""
        return self.starts[-1].config if self.starts else {}

    @property
    def named(self) -> str:
        """Returns the name of the reference if it is that, else ""."""
        return next((start.named for start in reversed(self.starts) if start.named), "")

    @property
    def values(self) -> events.Values:
        """Returns its qualities at its end; if the time stopped it between two rungs, those of its last rung."""
        known = {} if self.end is None else self.end.values
        is_missing = all(value is None for value in known.values())
        if self.end is None or self.end.outcome != "stopped" or not is_missing:
            return known
        return self.rungs[-1].values if self.rungs else {}

    def curve(self, objective: str) -> tuple[tuple[int, float], ...]:
        """Returns (samples seen, value of the objective) at every rung and its ends, in the order of samples."""
        seen = [(rung.samples, rung.values.get(objective)) for rung in self.rungs]
        seen += [(end.stopped_at or end.samples or 0, end.values.get(objective)) for end in self.ends]
        return tuple(sorted({samples: value for samples, value in seen if samples and value is not None}.items()))


def is_cut(end: events.TrialRecord) -> bool:
    """Returns whether the time alone ended a trial, or kept it from beginning again."""
    return end.outcome == "cut" or end.stopped_at == 0


class History:
    """The history of a run by its records, whole or cut off at any of them; `add` takes one more."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self._lists: dict[type[events.Event], list[Any]] = {}
        self.events: list[events.Event] = []
        self.study: events.StudyRecord | None = None
        """As it was written last."""
        self.kinds: events.KindsRecord | None = None
        self.stop: events.StopRecord | None = None
        self.ablation: events.AblationRecord | None = None
        self.resumes = self._list(events.ResumeRecord)
        self.stages = self._list(events.StageRecord)
        self.footprints = self._list(events.FootprintRecord)
        self.probes = self._list(events.ProbeRecord)
        self.refused = self._list(events.RefusedRecord)
        self.confirmed = self._list(events.ConfirmedRecord)
        self.all_windows = self._list(events.WindowRecord)
        self.picks = self._list(events.PickRecord)
        self.notes = self._list(events.NoteRecord)
        self.nodes = self._list(events.NodeRecord)
        self.trials: dict[str, Trial] = {}
        """By id, in the order in which they are first spoken of."""
        self.windows: list[events.WindowRecord] = []
        """The windows of the last session that took any, as each counts its rounds anew."""
        self.table: KnobTable = EVERY
        """The knobs of the study, with its workload's own and the kinds it measured; without a study all of ours."""
        self._clock = _Clock()
        self._ended: dict[str, Trial] = {}
        self._ends: list[events.TrialRecord] | None = None
        """What `ended` returns, None once that has changed: it is asked for some ten times a trial."""
        self._open: dict[str, Trial] = {}
        for record in records:
            self.add(record)

    def _list(self, kind: type[events.EventT]) -> list[events.EventT]:
        """Returns the list that takes each event of a kind."""
        return self._lists.setdefault(kind, [])

    def add(self, record: Record) -> events.Event:
        """Returns a record as the event that it is, now that it is taken."""
        event = events.read_event(record, self._clock.at_s(record))
        self._take(event)
        return event

    def before(self, seq: float = math.inf) -> History:
        """Returns the run as it was before the record of this number, as it is now without one.

        It stays so while another thread adds to this one.
        """
        earlier = History()
        for event in list(self.events):
            if event.seq < seq:
                earlier._take(event)
        return earlier

    def _take(self, event: events.Event) -> None:
        self.events.append(event)
        if (kept := self._lists.get(type(event))) is not None:
            kept.append(event)
        match event:
            case events.StudyRecord():
                self.study, self.table = event, _table(event, self.kinds)
            case events.KindsRecord():
                self.kinds, self.table = event, _table(self.study, event)
            case events.StopRecord():
                self.stop = event
            case events.AblationRecord():
                self.ablation = event
            case events.ResumeRecord(search=True):
                for trial in self.trials.values():
                    trial.was_given_time()
            case events.RefusedRecord() if event.trial:
                self._trial(event.trial).was_refused(event)
            case events.StartRecord():
                trial = self._trial(event.trial)
                if not trial.is_open:
                    self._open.pop(trial.id, None)
                self._open[trial.id] = trial
                trial.began(event)
            case events.RungRecord():
                self._trial(event.trial).rungs.append(event)
            case events.TrialRecord():
                self._ends = None
                self._ended[event.trial] = self._trial(event.trial)
                self._ended[event.trial].ended(event)
            case events.WindowRecord():
                if self.windows and self.windows[-1].seq < self.since():
                    self.windows = []
                self.windows.append(event)

    def _trial(self, name: str) -> Trial:
        return self.trials.setdefault(name, Trial(name))

    # -- the study -----------------------------------------------------------------------------------------------------

    @property
    def used_s(self) -> float:
        """Returns how long the run has taken, 0 without any record."""
        return max((event.at_s for event in self.events), default=0.0)

    def reopening(self, *by: Reopening) -> events.ResumeRecord | None:
        """Returns the record by which the study was last given more to do, of these kinds or any; None if it was not.

        By "search", more trials or more time; by "pick", another tolerance.
        """
        asked = by or ("search", "pick")
        return next((r for r in reversed(self.resumes) if any(getattr(r, name) for name in asked)), None)

    def since(self, *by: Reopening) -> int:
        """Returns the number of that record, 0 if there is none."""
        reopening = self.reopening(*by)
        return 0 if reopening is None else reopening.seq

    @property
    def stage(self) -> str:
        """Returns the stage that has begun last, "" before the first."""
        return self.stages[-1].stage if self.stages else ""

    def is_done(self, stage: str) -> bool:
        """Returns whether the stage has ended; from the search on since the study was last given more to do."""
        since = 0 if stage in ("estimate", "probe") else self.since("search") if stage == "search" else self.since()
        return any(one.stage == stage and one.state == "end" and one.seq >= since for one in self.stages)

    def began(self, stage: str) -> events.StageRecord | None:
        """Returns the beginning of a stage since the study was last given more to do, None before it."""
        since = self.since()
        return next((one for one in self.stages if one.stage == stage and one.seq >= since), None)

    def has_begun(self, stage: str, event: events.Event) -> bool:
        """Returns whether an event is of a stage, or after it, as it was begun last."""
        began = self.began(stage)
        return began is not None and event.seq >= began.seq

    @property
    def is_finished(self) -> bool:
        """Returns whether the study came to its end: it says so, or its last stage has ended."""
        stop = self.stop
        return self.is_done("export") or (stop is not None and stop.seq >= self.since() and not stop.resumable)

    @property
    def pick(self) -> events.PickRecord | None:
        """Returns the pick, None before there is one."""
        return self.picks[-1] if self.picks else None

    # -- trials --------------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> Sequence[events.TrialRecord]:
        """Returns each trial that ended, once, with its latest ending, in the order of the first endings."""
        if self._ends is None:
            self._ends = [end for trial in self._ended.values() if (end := trial.end) is not None]
        return self._ends

    @property
    def searched(self) -> list[events.TrialRecord]:
        """Returns those that ended without the reference, which is trained beside the search."""
        return [end for end in self.ended if not self.trials[end.trial].is_beside]

    @property
    def begun(self) -> list[Trial]:
        """Returns the trials that began, in that order."""
        return [trial for trial in self.trials.values() if trial.starts]

    @property
    def unfinished(self) -> list[Trial]:
        """Returns the trials that run, or are to begin again, in the order in which they began.

        A trial that the time has cut is among them once the study was given more.
        """
        return [trial for trial in self._open.values() if trial.is_open]

    @property
    def reference_name(self) -> str:
        """Returns the name of what the search trains as the reference, "" before it has begun."""
        return next((trial.named for trial in self.trials.values() if trial.named), "")

    @property
    def reference(self) -> events.TrialRecord | None:
        """Returns the search's training of the reference, what is trained today; None unless it came to its end."""
        return next((end for end in self.ended if self.trials[end.trial].named and end.outcome == "ok"), None)


def _table(study: events.StudyRecord | None, kinds: events.KindsRecord | None) -> KnobTable:
    if study is None or study.knobs is None:
        return EVERY
    ours = OURS.get(study.workload)
    try:
        own = ours.own if ours is not None else {n: Knob.of_raw(row) for n, row in study.knobs.items()}
        changed: dict[str, Kind] = {} if kinds is None else dict.fromkeys(kinds.changed, "both")
        return KnobTable(own, changed, ours.hooks if ours is not None else study.hooks)
    except (KeyError, TypeError, ValueError, AttributeError):
        return EVERY


class _Clock:
    """The moment of each record in seconds of the run: time between sessions does not count."""

    def __init__(self) -> None:
        self._origin = self._base = self._end = 0.0
        self._before: Record | None = None

    def at_s(self, record: Record) -> float:
        """Returns when the next record was written; a clock that is set changes nothing (`Record.mono`)."""
        clock = unix_s(record.t) if record.mono is None else record.mono
        before = self._before
        is_older = before is not None and (record.mono is None) == (before.mono is None)
        set_back = is_older and record.mono is not None and before is not None and clock < (before.mono or 0.0)
        # The line of a `resume` may have been damaged.
        if not is_older or set_back or record.event == events.ResumeRecord.event:
            self._base, self._origin = self._end, clock - (finite(record.get("startup_s")) or 0.0)
        at_s = self._base + max(0.0, clock - self._origin)
        self._end, self._before = max(self._end, at_s), record
        return at_s


def unix_s(t: str) -> float:
    """Returns an ISO time as seconds since 1970, 0 for what is no time."""
    try:
        return datetime.fromisoformat(t).timestamp()
    except (ValueError, OverflowError):
        return 0.0
