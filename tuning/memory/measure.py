"""Stage 1: what every group of memory knobs needs, and so what fits the card before anything is trained."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainables.knobs import Scalar
from tuning.config.space import Choice, Space
from tuning.journal.events import FootprintRecord, NoteRecord, Pairs, WorkerAnswer
from tuning.journal.records import Journal
from tuning.journal.run import History
from tuning.memory.groups import (
    alone,
    defaults,
    footprints,
    key_of,
    memory_groups,
    micro_batches,
    peaks_are_whole,
    profile_of,
)
from tuning.memory.oom import Outcome
from tuning.memory.prediction import Prediction
from tuning.memory.profile import MemoryProfile

CHECKPOINTING = "activation_checkpointing"
FIRST = (2, 8)
"""Two sizes give the line of peak over micro-batch; small ones, so that measuring never is what does not fit."""
STEEPER = 1.25
"""How much more a larger size may need than the line so far says: its slope can still grow."""
CLOSE = 1.05
"""On CUDA and under a virtual card, sizes are measured up to where the line is so many times the cap: a step is lost.

On a plain CPU the host's memory would run out, so that no more is measured than is sure to fit.
"""
CUDA_SPARE = 1.10
"""A CUDA card must hold so many times the peak: +10.2 % in the mean over 160 replays of its allocator."""
LIMIT_S, ROOMY_S = 12.0, 5.0
"""The stage's seconds, and those if all fits by far; trials judge the groups that were not measured by then."""
NOTHING = (Outcome.CUT, Outcome.TIMEOUT)
"""Outcomes that say nothing of a group's memory: `search.max_time` was over, or a process hung."""
ROOMY = 8.0
"""All fits by far where the cap is so many times the largest need that is known."""

Group = Mapping[str, Scalar]
"""The memory knobs that a space asks for, and its minor knobs as it starts; `groups.key_of` has the others too."""
PredictGroups = Callable[[Sequence[Group]], Sequence[Prediction]]
"""Predicts configurations without running them, one prediction for each."""


@dataclass(frozen=True, kw_only=True)
class Footprint(WorkerAnswer):
    """The memory of a configuration: `measured` are pairs of a micro-batch and peak bytes, `measured_alone` those of
    batches of one micro-step; `message` is of the first that did not fit.
    """

    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    measured: Pairs = ()
    measured_alone: Pairs = ()

    @property
    def floor_bytes(self) -> int:
        """Returns the floor of a profile: what is alive at every moment of training."""
        return self.parameter_bytes + self.optimizer_bytes


class Footprints(Protocol):
    """Measures the memory of a configuration."""

    def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> Footprint:
        """Returns what was measured of these micro-batches, up to the first that did not fit."""
        ...


class MemoryStage:
    """Finds each group's footprint, on the longest samples of the training split, and writes what it found.

    With `predict`, the footprint is a prediction's, corrected by one measurement; where there is none, or it cannot be
    traced, it is a line through measurements. `cuda` says whether a card must hold more than the peak.
    """

    def __init__(
        self,
        profiler: Footprints,
        space: Space,
        journal: Journal,
        cap_bytes: int | None,
        *,
        cuda: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._profiler, self._space, self._journal, self._cap_bytes = profiler, space, journal, cap_bytes
        self._cuda, self._clock, self._table = cuda, clock, journal.run.table
        self._sizes = micro_batches(space)
        self._first = tuple(m for m in FIRST if m <= self._sizes[-1]) or (1,)

    def run(self, predict: PredictGroups | None = None, limit_s: float = LIMIT_S) -> None:
        """Measures until every group has a footprint or the time is up; known groups are left out.

        If all fits by far, the time is `ROOMY_S` at most: the rest then matters to nobody.
        """
        known = set(footprints(self._journal.run))
        todo: list[Group] = [c for c in memory_groups(self._space) if key_of(c, self._table) not in known]
        todo.sort(key=self._lighter)
        if predict is not None and todo:
            found = predict([self._knobs(c) for c in todo])
            todo = self._by_prediction(list(zip(todo, found, strict=True)), limit_s)
        started = self._clock()  # a prediction has a limit of its own
        took: dict[int, float] = {}
        for number, group in enumerate(todo):
            if self._bounded(group):
                continue
            begun, roomy = self._clock(), self._is_roomy()
            if took and begun > started + (min(limit_s, ROOMY_S) if roomy else limit_s):
                if not roomy:
                    text = f"measured {number} of {len(todo)} memory groups in {limit_s:g} s; trials tell the rest"
                    self._journal.append(NoteRecord, text=text)
                return
            self._measure(group, self._first)
            took[number] = self._clock() - begun
        for number, spent_s in took.items() if not self._is_roomy() else ():
            while (size := self._further(todo[number])) is not None:
                if self._clock() + spent_s * size / sum(self._first) >= started + limit_s:
                    break
                if not self._measure(todo[number], (size,)):
                    break

    def _is_roomy(self) -> bool:
        """Returns whether all that is known fits by far, at the largest micro-batch."""
        if self._cap_bytes is None:
            return True
        known = footprints(self._journal.run).values()
        return all(p.capacity(self._sizes[-1]) * ROOMY < self._cap_bytes for p in known)

    def _by_prediction(self, predicted: Sequence[tuple[Group, Prediction]], limit_s: float) -> list[Group]:
        """Returns the groups without a footprint, once those were written that a prediction and a measurement give.

        Groups of one model come one after the other: a large one takes seconds to load.
        """
        shaping = [name for name, row in self._table.items() if row.shapes_model]
        left, until = [], self._clock() + limit_s
        for group, prediction in sorted(predicted, key=lambda pair: [str(pair[0].get(name)) for name in shaping]):
            if self._clock() > until or not self._predicted(group, prediction):
                left.append(group)
        return sorted(left, key=self._lighter)

    def _predicted(self, group: Group, prediction: Prediction) -> bool:
        """Writes the footprint of a prediction and one measurement beside it; returns False where it has no peaks."""
        peaks = [p for m in self._sizes if (p := prediction.peak(m)) is not None]
        if not peaks:
            return False
        found = self._profiler.footprint(self._knobs(group), self._first[:1])
        profile = functools.partial(
            MemoryProfile.from_peaks, peaks, prediction.confidence, cuda=self._cuda, floor_bytes=found.floor_bytes
        )
        several, alone = profile(), profile(alone=True)
        self._write(group, several, found, alone, notes=list(prediction.notes))
        return True

    def _bounded(self, group: Group) -> bool:
        """Writes what is known of a group with checkpointing where that is enough; returns whether it is.

        It needs no more than without. If that fits at every micro-batch, nobody has to know how much less.
        """
        if not group.get(CHECKPOINTING) or not isinstance(self._space.parameters.get(CHECKPOINTING), Choice):
            return False
        if (footprint := _latest(self._journal.run, {**group, CHECKPOINTING: False})) is None:
            return False
        without = profile_of(footprint)
        if self._cap_bytes is not None and without.capacity(self._sizes[-1]) * STEEPER > self._cap_bytes:
            return False
        bound = dataclasses.replace(without, source="bound")
        self._write(group, bound, Footprint(outcome=str(Outcome.OK)), alone(footprint))
        return True

    def _measure(self, group: Group, sizes: Sequence[int]) -> bool:
        """Writes the line through what was measured of the group before and now; returns whether there was anything."""
        found = self._profiler.footprint(self._knobs(group), sizes)
        if found.outcome in NOTHING:
            return False
        before = _latest(self._journal.run, group)
        measured = [*(before.measured if before else ()), *found.measured]
        if not measured:  # not even the smallest fits: its need is at least the cap, which says nothing of less than it
            one = self._profiler.footprint(self._knobs(group), (1,)) if sizes[0] > 1 else found
            if one.outcome in NOTHING:
                return False
            measured = [*one.measured, (sizes[0] if one.measured else 1, (self._cap_bytes or 0) + 1)]
        pairs = [(m, b) for m, b in measured]
        bare = [(m, b) for m, b in (*(before.measured_alone if before else ()), *found.measured_alone)]
        spare = CUDA_SPARE if self._cuda else 1.0
        line = functools.partial(MemoryProfile.from_measured, found.floor_bytes, spare=spare)
        more = {"failed": before.failed} if before and before.failed else {}
        if before and len(found.measured) < len(sizes):
            more["failed"] = {"micro_batch": sizes[len(found.measured)], "cap_bytes": self._cap_bytes}
        both = dataclasses.replace(found, measured=tuple(pairs), measured_alone=tuple(bare))
        self._write(group, line(pairs), both, line(bare) if bare else None, **more)
        return True

    def _further(self, group: Group) -> int | None:
        """Returns the largest size of the space that is worth measuring too, None where there is none.

        The peak is the largest of several lines, so two small sizes can miss the steepest; and of a size close to the
        cap its own peak tells what no line can. If one ran out of memory it is the next smaller.
        """
        footprint = _latest(self._journal.run, group)
        if footprint is None or len(footprint.measured) < len(self._first):
            return None
        profile = profile_of(footprint)
        limit = CLOSE if peaks_are_whole(self._journal.run) else 1 / STEEPER
        cap_bytes = math.inf if self._cap_bytes is None else self._cap_bytes * limit
        done = max(m for m, _ in footprint.measured)
        failed = (footprint.failed or {"micro_batch": math.inf})["micro_batch"]
        return max((m for m in self._sizes if done < m < failed and profile.capacity(m) < cap_bytes), default=None)

    def _lighter(self, group: Group) -> tuple[float, ...]:
        """Returns the key that sorts the groups that need most first, so that the rest is known to need less."""
        moves = self._table.by_memory
        values = (group.get(n) for n in moves["group"])
        numbers = [-float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        switches = (-float(float(group.get(n) or 0) > 0) for n in moves["switch"])
        return (float(group.get(CHECKPOINTING) or 0), *switches, *numbers)

    def _knobs(self, group: Group) -> dict[str, Scalar]:
        """Returns what is run to measure a group: the space's own start, since dropout 0 and the like matter too."""
        return {**defaults(self._space), **group}

    def _write(
        self, group: Group, found: MemoryProfile, raw: Footprint, alone: MemoryProfile | None, **more: Any
    ) -> None:
        """Writes what was found of a group, and of its batches of one micro-step where that is known."""
        kept: dict[str, Any] = {n: getattr(raw, n) for n in ("measured", "measured_alone", "message")}
        if alone is not None:
            kept["points_alone"] = alone.as_raw()["points"]
        self._journal.append(FootprintRecord, coupling=dict(group), **found.as_raw(), **kept, **more)


def _latest(run: History, group: Group) -> FootprintRecord | None:
    key = key_of(group, run.table)
    return next((one for one in reversed(run.footprints) if key_of(one.coupling, run.table) == key), None)
