"""How a trial ended, as its record has it and as the sampler is told of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from trainables.knobs import Scalar
from tuning.journal.events import OomRecord, RefusedRecord, RestartRecord, TrialRecord
from tuning.journal.records import Journal
from tuning.memory.groups import learn, need_of
from tuning.memory.guard import MemoryGuard
from tuning.memory.oom import CRASHED, UNDEFINED, Outcome
from tuning.search.protocols import TrialState
from tuning.search.pruner import Rung
from tuning.search.rule import Rule
from tuning.search.sampler import Observation
from tuning.search.throughput import SAMPLES_PER_S

OVER_MEMORY = (Outcome.OOM, Outcome.HOST_OOM, Outcome.REFUSED)


class Qualities:
    """The first quality of each trial at its rungs and at its end, by trial.

    From them comes what a stopped trial is guessed to have come to, and how a trial stands beside the reference.
    """

    def __init__(self) -> None:
        self._at_rungs: dict[str, dict[int, float]] = {}
        self.whole: dict[str, float] = {}
        """Final qualities, by trial that came to its end."""

    def rung(self, trial: str, samples: int, value: float | None) -> None:
        """Takes a quality on the way."""
        if value is not None and math.isfinite(value):
            self._at_rungs.setdefault(trial, {})[samples] = value

    def ended(self, trial: str, value: float | None) -> None:
        """Takes the end of a whole training."""
        if value is not None and math.isfinite(value):
            self.whole[trial] = value

    def guess(self, trial: str) -> float | None:
        """Returns what a stopped trial would have come to, None if nothing says.

        After its last rung it is expected to gain what the whole ones that passed that rung did, in the median.
        """
        own = self._at_rungs.get(trial)
        if not own:
            return None
        last = max(own)
        rungs = self._at_rungs
        gains = [end - rungs[t][last] for t, end in self.whole.items() if last in rungs.get(t, {})]
        return own[last] + statistics.median(gains) if gains else None

    def beside(self, trial: str, milestone: int, reference: str, rule: Rule) -> Rung:
        """Returns how a trial stands beside the reference at a rung, and how others did that came to their end."""
        here = {name: own[milestone] for name, own in self._at_rungs.items() if milestone in own}
        theirs, floor, own = here.get(reference), self.whole.get(reference), here.get(trial)
        gain = None if theirs is None or own is None else rule.gain(own, theirs)
        ended = [
            (rule.gain(here[one], theirs), rule.gain(end, floor))
            for one, end in self.whole.items()
            if theirs is not None and floor is not None and one != reference and one in here
        ]
        return Rung(milestone, gain, ended, rule.tolerance)

    def last_rung(self, trial: str) -> int | None:
        """Returns the last rung at which a trial was measured."""
        return max(self._at_rungs.get(trial, {}), default=None)


@dataclass
class Live:
    """A trial that runs: its knobs, and after how many samples, or why, it was stopped or ruled out."""

    knobs: Mapping[str, Scalar]
    stopped_at: int | None = None
    reason: str = ""
    is_ruled_out: bool = False
    retries: int = 0
    """Its earlier attempts that are written."""

    def outcome(self, result: str) -> str:
        """Returns how it ended: one that was cut or stopped, or ruled out, is no `ok`."""
        if self.stopped_at is not None and result in (Outcome.OK, Outcome.REFUSED):
            return str(Outcome.STOPPED if self.stopped_at else Outcome.CUT)  # it had not begun, and tells nothing
        return str(Outcome.REFUSED) if self.is_ruled_out and result == Outcome.OK else result


def others_alike(end: TrialRecord) -> bool | None:
    """Returns whether others are likely to fail as this trial did, by its record: it crashed, or a metric is NaN where
    the loss is finite. None where that is open: a loss diverges at its learning rate, and anything does under fp16.
    """
    if end.outcome != Outcome.DIVERGED:
        return end.outcome in CRASHED
    is_fp16 = end.config.get("amp_dtype") == "fp16"
    return True if end.fault == UNDEFINED.name and not is_fp16 else None


def begun_again(
    journal: Journal, guard: MemoryGuard, trial: str, failed: TrialState, *, is_oom: bool
) -> OomRecord | RestartRecord:
    """Writes with which knobs a trial failed before it began again; teaches the guard if it ran out of memory."""
    why = {n: getattr(failed, n) for n in ("message", "outcome", "fault", "wanted_bytes", "cap_bytes")}
    if not is_oom:
        return journal.append(RestartRecord, trial=trial, config=dict(failed.knobs), **why)
    record = journal.append(OomRecord, trial=trial, config=dict(failed.knobs), **why)
    learn(guard, record)
    return record


def observation(
    end: TrialRecord | RefusedRecord, objective: str, qualities: Qualities, guard: MemoryGuard
) -> Observation:
    """Returns what the sampler is told of a trial that ended, or of a configuration that was refused."""
    if isinstance(end, RefusedRecord) or end.outcome in OVER_MEMORY:
        verdict = guard.judge(*need_of(end.config, guard.table))
        # A launched OOM was predicted to fit: what its last step would have needed is the least.
        wanted_bytes = end.wanted_bytes if isinstance(end, TrialRecord) else None
        cap_bytes = end.cap_bytes or guard.cap_bytes
        least_bytes = wanted_bytes - cap_bytes if wanted_bytes and cap_bytes else 0
        return Observation(overshoot_bytes=max(1, least_bytes, guard.overshoot_bytes(verdict)))
    values = {SAMPLES_PER_S: end.samples_per_s, **end.values}
    if end.outcome in (Outcome.STOPPED, Outcome.CUT):
        values[objective] = qualities.guess(end.trial)
    return Observation(values, failed=end.outcome not in (Outcome.OK, Outcome.STOPPED, Outcome.CUT))
