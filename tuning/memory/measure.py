"""Stage 1: what every coupling of memory knobs needs, and so what fits the card before anything is trained."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from trainables.knobs import PHASE_KNOB, Knobs, Scalar, is_active
from tuning.config.space import Choice, Range, Space
from tuning.journal.records import Journal, Record
from tuning.memory.groups import MEMORY_KNOBS, alone, footprints, key_of, peaks_are_whole
from tuning.memory.guard import MINOR_KNOBS
from tuning.memory.prediction import Prediction
from tuning.memory.profile import MemoryProfile, Sizes

CHECKPOINTING = "activation_checkpointing"
FIRST = (2, 8)
"""Two sizes give the line of peak over micro-batch; small ones, so that measuring never is what does not fit."""
REACH = 1.25
"""How much more a larger size may need than the line so far says: its slope can still grow."""
CLOSE = 1.05
"""Where nothing but a step is lost by it, sizes are measured up to where the line is so many times the cap.

That is on CUDA and under a virtual card: what is close to the cap has to be known. On a plain CPU it is the host's
memory that would run out, so that no more is measured than is sure to fit.
"""
CUDA_SPARE = 1.10
"""What a CUDA card must hold as a multiple of the peak: +10.2 % in the mean over 160 replays of its allocator."""
LIMIT_S, ROOMY_S = 12.0, 5.0
"""What the stage may take, and where all fits by far; what was not measured by then is judged by the trials."""
ROOMY = 8.0
"""All fits by far where the cap is so many times the largest need that is known."""

EDGE = 0.1
"""So much of a range at either end is its edge."""

Predict = Callable[[Sequence[Mapping[str, Scalar]]], Sequence[Prediction]]
"""Predicts configurations without running them, one prediction for each."""

_DEFAULTS = Knobs().as_dict()


class Footprints(Protocol):
    """What measures the memory of a configuration."""

    def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> dict[str, Any]:
        """Returns parameter, gradient and optimiser bytes and the measured peak by micro-batch."""
        ...


def couplings(space: Space) -> list[dict[str, Scalar]]:
    """Returns every combination of memory knobs the space can ask for; of a range its ends and its middle.

    Minor knobs are as the space starts. Those with a phase for the encoder come after those without, where the space
    has both.
    """
    names, start = (PHASE_KNOB, *MEMORY_KNOBS), defaults(space)
    minor = {n: start[n] for n in MINOR_KNOBS if n in start}
    phases = {None if v is None else float(v) > 0: v for v in reversed(_values(space, PHASE_KNOB))}
    values = [sorted(phases.values(), key=lambda v: v or 0), *(_values(space, name) for name in MEMORY_KNOBS)]
    combined = []
    for combination in itertools.product(*values):
        asked = {n: v for n, v in zip(names, combination, strict=True) if v is not None}
        combined.append({**minor, **{n: space.fixed[n] for n in names if n in space.fixed}, **asked})
    return combined


def micro_batches(space: Space) -> list[int]:
    """Returns the micro-batch sizes that a trial of the space can come to run, in rising order: halves included."""
    parameter = space.parameters.get("micro_batch_size", space.fixed.get("micro_batch_size", Knobs().micro_batch_size))
    if isinstance(parameter, Range):
        asked = [int(parameter.high)]
    else:
        asked = [int(v) for v in (parameter.values if isinstance(parameter, Choice) else (parameter,))]
    return sorted({size >> n for size in asked for n in range(size.bit_length())})


def defaults(space: Space) -> dict[str, Scalar]:
    """Returns a starting point: the fixed knobs, and for each searched one its own default where the space has it.

    Else it is the first of a list, the middle of a range; the middle too where the default is at the range's edge, for
    a range says where its author expects the best.
    """
    plain = Knobs().as_dict()
    start: dict[str, Scalar] = dict(space.fixed)
    for name, parameter in space.parameters.items():
        if isinstance(parameter, Choice):
            start[name] = plain[name] if plain[name] in parameter.values else parameter.values[0]
        else:
            place = parameter.place(float(plain[name]))
            start[name] = plain[name] if EDGE <= place <= 1 - EDGE else parameter.at(0.5)
    return {n: v for n, v in start.items() if is_active(n, start)}


class MemoryStage:
    """Finds each coupling's footprint, on the longest samples of the training split, and writes what it found.

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
        self._cuda, self._clock = cuda, clock
        self._sizes = micro_batches(space)
        self._first = tuple(m for m in FIRST if m <= self._sizes[-1]) or (1,)

    def run(self, predict: Predict | None = None, limit_s: float = LIMIT_S) -> None:
        """Measures until every coupling has a footprint or the time is up; what is known already is left out.

        Where all fits by far the time is `ROOMY_S` at most: what is left over then matters to nobody.
        """
        known = set(footprints(self._journal.records))
        todo = [c for c in couplings(self._space) if key_of(c) not in known]
        todo.sort(key=_lighter)
        if predict is not None and todo:
            found = predict([self._knobs(c) for c in todo])
            todo = [c for c, p in zip(todo, found, strict=True) if not self._predicted(c, p)]
        started = self._clock()  # a prediction has a limit of its own
        took: dict[int, float] = {}
        for number, coupling in enumerate(todo):
            if self._bounded(coupling):
                continue
            begun, roomy = self._clock(), self._is_roomy()
            if took and begun > started + (min(limit_s, ROOMY_S) if roomy else limit_s):
                text = f"the estimate measured {number} of {len(todo)} couplings in {limit_s:g} s; trials tell the rest"
                if not roomy:
                    self._journal.append("note", text=text)
                return
            self._measure(coupling, self._first)
            took[number] = self._clock() - begun
        for number, spent_s in took.items() if not self._is_roomy() else ():
            while (size := self._further(todo[number])) is not None:
                if self._clock() + spent_s * size / sum(self._first) >= started + limit_s:
                    break
                self._measure(todo[number], (size,))

    def _is_roomy(self) -> bool:
        """Returns whether all that is known fits by far, at the largest micro-batch."""
        if self._cap_bytes is None:
            return True
        prints = footprints(self._journal.records).values()
        return all(p.capacity(self._sizes[-1]) * ROOMY < self._cap_bytes for p in prints)

    def _predicted(self, coupling: Mapping[str, Scalar], prediction: Prediction) -> bool:
        """Writes the footprint of a prediction and one measurement beside it; returns False where it has no peaks."""
        peaks = [p for m in self._sizes if (p := prediction.peak(m)) is not None]
        if not peaks:
            return False
        found = self._profiler.footprint(self._knobs(coupling), self._first[:1])
        several, alone = (
            MemoryProfile.from_peaks(peaks, prediction.confidence, cuda=self._cuda, alone=alone).with_sizes(
                Sizes.of(found)
            )
            for alone in (False, True)
        )
        self._write(coupling, several, found, alone, notes=list(prediction.notes))
        return True

    def _bounded(self, coupling: Mapping[str, Scalar]) -> bool:
        """Writes what is known of a coupling with checkpointing where that is enough; returns whether it is.

        It needs no more than without. Where that fits at every micro-batch nobody has to know how much less.
        """
        if not coupling.get(CHECKPOINTING) or not isinstance(self._space.parameters.get(CHECKPOINTING), Choice):
            return False
        record = _latest(self._journal.records, {**coupling, CHECKPOINTING: False})
        if record is None:
            return False
        print_ = MemoryProfile.of(record.fields)
        if self._cap_bytes is not None and print_.capacity(self._sizes[-1]) * REACH > self._cap_bytes:
            return False
        bound = dataclasses.replace(print_, source="bound")
        self._write(coupling, bound, {"measured": [], "message": ""}, alone(record.fields))
        return True

    def _measure(self, coupling: Mapping[str, Scalar], sizes: Sequence[int]) -> None:
        """Writes the line through what was measured of the coupling before and now."""
        found = self._profiler.footprint(self._knobs(coupling), sizes)
        before = _latest(self._journal.records, coupling)
        measured = [*(before["measured"] if before else []), *found["measured"]]
        if not measured:  # not even the smallest fits: its need is at least the cap, which says nothing of less than it
            less = self._profiler.footprint(self._knobs(coupling), (1,))["measured"] if sizes[0] > 1 else []
            measured = [*less, (sizes[0] if less else 1, (self._cap_bytes or 0) + 1)]
        pairs = [(int(m), int(b)) for m, b in measured]
        sizes_, spare = Sizes.of(found), CUDA_SPARE if self._cuda else 1.0
        print_ = MemoryProfile.from_measured(sizes_, pairs, spare)
        own = [*(before.get("measured_alone", []) if before else []), *found.get("measured_alone", [])]
        bare = [(int(m), int(b)) for m, b in own]
        alone = MemoryProfile.from_measured(sizes_, bare, spare) if bare else None
        more = {"failed": before["failed"]} if before and before.get("failed") else {}
        if before and len(found["measured"]) < len(sizes):
            more["failed"] = {"micro_batch": sizes[len(found["measured"])], "cap_bytes": self._cap_bytes}
        self._write(coupling, print_, {**found, "measured": pairs, "measured_alone": bare}, alone, **more)

    def _further(self, coupling: Mapping[str, Scalar]) -> int | None:
        """Returns the largest size of the space that is worth measuring too, None where there is none.

        The peak is the largest of several lines, so two small sizes can miss the steepest; and of a size close to the
        cap its own peak tells what no line can. Where one ran out of memory it is the next smaller.
        """
        record = _latest(self._journal.records, coupling)
        if record is None or len(record["measured"]) < len(self._first):
            return None
        print_ = MemoryProfile.of(record.fields)
        limit = CLOSE if peaks_are_whole(self._journal.records) else 1 / REACH
        cap_bytes = math.inf if self._cap_bytes is None else self._cap_bytes * limit
        done = max(m for m, _ in record["measured"])
        failed = (record.get("failed") or {"micro_batch": math.inf})["micro_batch"]
        return max(
            (m for m in self._sizes if done < m < failed and print_.capacity(m) < cap_bytes),
            default=None,
        )

    def _knobs(self, coupling: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns what is run to measure a coupling: the space's own start, since dropout 0 and the like matter too."""
        return {**defaults(self._space), **coupling}

    def _write(
        self,
        coupling: Mapping[str, Scalar],
        found: MemoryProfile,
        raw: Mapping[str, Any],
        alone: MemoryProfile | None,
        **more: Any,
    ) -> None:
        """Writes what was found of a coupling, and of its batches of one micro-step where that is known."""
        kept = {"measured": raw["measured"], "message": raw["message"], **more}
        if alone is not None:
            kept.update(measured_alone=raw.get("measured_alone", []), points_alone=alone.as_raw()["points"])
        self._journal.append("footprint", coupling=dict(coupling), **found.as_raw(), **kept)


def _latest(records: Sequence[Record], coupling: Mapping[str, Scalar]) -> Record | None:
    wanted = key_of(coupling)
    own = (r for r in reversed(records) if r.event == "footprint" and key_of(r["coupling"]) == wanted)
    return next(own, None)


def _lighter(coupling: Mapping[str, Scalar]) -> tuple[float, ...]:
    """Returns what sorts the couplings that need most first, so that what is left over is known to need less."""
    values = (coupling.get(n) for n in MEMORY_KNOBS)
    numbers = [-float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    return (float(coupling.get(CHECKPOINTING) or 0), -float(float(coupling.get(PHASE_KNOB) or 0) > 0), *numbers)


def _values(space: Space, name: str) -> tuple[Scalar | None, ...]:
    parameter = space.parameters.get(name)
    if isinstance(parameter, Choice):
        return parameter.values
    if isinstance(parameter, Range):
        middle = math.sqrt(parameter.low * parameter.high)
        ends = (parameter.low, middle, parameter.high)
        return tuple(dict.fromkeys(round(v) if parameter.integer else v for v in ends))
    return (None,)
