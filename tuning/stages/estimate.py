"""Stage 1: what every coupling of memory knobs needs, and so what fits the card before anything is trained."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainables.knobs import Knobs, Scalar, is_active
from tuning.memory.footprint import Footprint, Sizes
from tuning.memory.frontier import GRADIENTS_HELD, Frontier
from tuning.memory.prediction import Prediction
from tuning.policies.oom import GROWING
from tuning.policies.throughput import PHASE_KNOB
from tuning.records import Journal, Record, last
from tuning.space import Choice, Range, Space
from tuning.stages.bench import Footprints

MEMORY_KNOBS = (
    *("architecture", "hidden_size", "adapter", "adapter_rank", "optimizer", "sequence_packing"),
    *("amp_dtype", "activation_checkpointing", "sdpa_backend"),
)
"""Knobs that change what a sample or a parameter needs; the micro-batch size multiplies it.

Others change it by a few per cent (fused_optimizer, channels_last, where augmentation runs), which the posterior's
sigma has to hold: with all of them a space of nine knobs would have hundreds of couplings to measure. Of `PHASE_KNOB`
all that counts is whether there is a phase for the encoder: with one `signals` needs 2.0 to 10.5 times as much, most at
the smallest micro-batch.
"""
LESSER_KNOBS = (
    *("fused_optimizer", "channels_last", "compile", "dropout", "augmentation"),
    *("device_augmentation", "inplace_augmentation", "set_to_none"),
)
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


def key_of(knobs: Mapping[str, Scalar]) -> tuple[tuple[str, Scalar], ...]:
    """Returns the memory coupling of a configuration, defaults filled in; the key of a coupling is the same again."""
    has_phase = float(knobs.get(PHASE_KNOB, _DEFAULTS[PHASE_KNOB])) > 0
    own = ((name, knobs.get(name, _DEFAULTS[name])) for name in MEMORY_KNOBS)
    return (*own, (PHASE_KNOB, has_phase), (GRADIENTS_HELD, bool(knobs.get(GRADIENTS_HELD, _holds_gradients(knobs)))))


def _holds_gradients(knobs: Mapping[str, Scalar]) -> bool:
    """Returns whether gradients of earlier micro-steps are alive in a micro-step; of a mere coupling, that they are."""
    full = {**_DEFAULTS, **knobs}
    if not full["set_to_none"] or not {"batch_size", "micro_batch_size"} & knobs.keys():
        return True
    return int(full["batch_size"]) > int(full["micro_batch_size"])


def micro_batch_of(knobs: Mapping[str, Scalar]) -> int:
    """Returns the samples of a configuration's micro-step: no more than its batch has."""
    return min(int(knobs.get(name, _DEFAULTS[name])) for name in ("micro_batch_size", "batch_size"))


def couplings(space: Space) -> list[dict[str, Scalar]]:
    """Returns every combination of memory knobs the space can ask for; of a range its ends and its middle.

    Those with a phase for the encoder come after those without, where the space has both.
    """
    names = (PHASE_KNOB, *MEMORY_KNOBS)
    phases = {None if v is None else float(v) > 0: v for v in reversed(_values(space, PHASE_KNOB))}
    values = [sorted(phases.values(), key=lambda v: v or 0), *(_values(space, name) for name in MEMORY_KNOBS)]
    combined = []
    for combination in itertools.product(*values):
        asked = {n: v for n, v in zip(names, combination, strict=True) if v is not None}
        combined.append({**{n: space.fixed[n] for n in names if n in space.fixed}, **asked})
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


def lesser(knobs: Mapping[str, Scalar]) -> dict[str, bool | str]:
    """Returns what else of a configuration changes its memory a little, numbers as whether they are more than 0."""
    full = Knobs.of(knobs).as_dict()
    return {n: v if isinstance(v := full[n], bool | str) else v > 0 for n in LESSER_KNOBS}


class EstimateStage:
    """Finds each coupling's footprint, on the longest samples of the training split, and writes what it found.

    With `predict`, the footprint is a prediction's, corrected by one measurement; where there is none, or it cannot be
    traced, it is a line through measurements. `cuda` says whether a card must hold more than the peak.
    """

    def __init__(
        self,
        bench: Footprints,
        space: Space,
        journal: Journal,
        cap_bytes: int | None,
        *,
        cuda: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bench, self._space, self._journal, self._cap_bytes = bench, space, journal, cap_bytes
        self._cuda, self._clock = cuda, clock
        self._sizes = micro_batches(space)
        self._first = tuple(m for m in FIRST if m <= self._sizes[-1]) or (1,)

    def run(self, predict: Predict | None = None, limit_s: float = LIMIT_S) -> None:
        """Measures until every coupling has a footprint or the time is up; what is known already is left out.

        Where all fits by far the time is `ROOMY_S` at most: what is left over then matters to nobody.
        """
        known = set(_footprints(self._journal.records))
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
        prints = _footprints(self._journal.records).values()
        return all(p.capacity(self._sizes[-1]).total_bytes * ROOMY < self._cap_bytes for p in prints)

    def _predicted(self, coupling: Mapping[str, Scalar], prediction: Prediction) -> bool:
        """Writes the footprint of a prediction and one measurement beside it; returns False where it has no peaks."""
        peaks = [p for m in self._sizes if (p := prediction.peak(m)) is not None]
        if not peaks:
            return False
        found = self._bench.footprint(self._knobs(coupling), self._first[:1])
        several, alone = (
            Footprint.from_peaks(peaks, prediction.confidence, cuda=self._cuda, alone=alone).with_sizes(Sizes.of(found))
            for alone in (False, True)
        )
        self._write(coupling, several, found, alone, notes=list(prediction.notes))
        return True

    def _bounded(self, coupling: Mapping[str, Scalar]) -> bool:
        """Writes what is known of a coupling with checkpointing where that is enough; returns whether it is.

        It needs no more than without. Where that fits at every micro-batch nobody has to know how much less; in
        another run somebody may, so it is kept from `facts`.
        """
        if not coupling.get(CHECKPOINTING) or not isinstance(self._space.parameters.get(CHECKPOINTING), Choice):
            return False
        record = _latest(self._journal.records, {**coupling, CHECKPOINTING: False})
        if record is None:
            return False
        print_ = Footprint.of(record.fields)
        if self._cap_bytes is not None and print_.capacity(self._sizes[-1]).total_bytes * REACH > self._cap_bytes:
            return False
        bound = dataclasses.replace(print_, source="bound")
        self._write(coupling, bound, {"measured": [], "message": ""}, _alone(record.fields))
        return True

    def _measure(self, coupling: Mapping[str, Scalar], sizes: Sequence[int]) -> None:
        """Writes the line through what was measured of the coupling before and now."""
        found = self._bench.footprint(self._knobs(coupling), sizes)
        before = _latest(self._journal.records, coupling)
        measured = [*(before["measured"] if before else []), *found["measured"]]
        if not measured:  # not even the smallest fits: its need is at least the cap, which says nothing of less than it
            less = self._bench.footprint(self._knobs(coupling), (1,))["measured"] if sizes[0] > 1 else []
            measured = [*less, (sizes[0] if less else 1, (self._cap_bytes or 0) + 1)]
        pairs = [(int(m), int(b)) for m, b in measured]
        sizes_, spare = Sizes.of(found), CUDA_SPARE if self._cuda else 1.0
        print_ = Footprint.from_measured(sizes_, pairs, spare)
        own = [*(before.get("measured_alone", []) if before else []), *found.get("measured_alone", [])]
        bare = [(int(m), int(b)) for m, b in own]
        alone = Footprint.from_measured(sizes_, bare, spare) if bare else None
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
        print_ = Footprint.of(record.fields)
        limit = CLOSE if peaks_are_whole(self._journal.records) else 1 / REACH
        cap_bytes = math.inf if self._cap_bytes is None else self._cap_bytes * limit
        done = max(m for m, _ in record["measured"])
        failed = (record.get("failed") or {"micro_batch": math.inf})["micro_batch"]
        return max(
            (m for m in self._sizes if done < m < failed and print_.capacity(m).total_bytes < cap_bytes),
            default=None,
        )

    def _knobs(self, coupling: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns what is run to measure a coupling: the space's own start, since dropout 0 and the like matter too."""
        return {**defaults(self._space), **coupling}

    def _write(
        self,
        coupling: Mapping[str, Scalar],
        found: Footprint,
        raw: Mapping[str, Any],
        alone: Footprint | None,
        **more: Any,
    ) -> None:
        """Writes what was found of a coupling, and of its batches of one micro-step where that is known."""
        kept = {"measured": raw["measured"], "message": raw["message"], **more}
        if alone is not None:
            kept.update(measured_alone=raw.get("measured_alone", []), points_alone=alone.as_raw()["points"])
        self._journal.append("footprint", coupling=dict(coupling), **found.as_raw(), **kept)


def frontier(records: Sequence[Record], cap_bytes: int | None) -> Frontier:
    """Returns the frontier as the records have it: footprints, what fitted, what ran out of memory."""
    learned = Frontier(cap_bytes, _footprints(records))
    whole = peaks_are_whole(records)
    for record in records:
        if record.event == "known":
            for fact in record["facts"]:
                _recall(learned, fact)
        elif record.event == "footprint":
            if failed := record.get("failed"):
                learned.observe_oom(key_of(record["coupling"]), int(failed["micro_batch"]), failed["cap_bytes"])
            _corrected(learned, record.fields)
        elif record.event in ("oom", "probe", "trial") and record.get("fault") == GROWING.name:
            continue  # a leak says nothing of the micro-batch
        elif record.event == "oom" or (record.event in ("probe", "trial") and record["outcome"] == "oom"):
            learned.observe_oom(key_of(record["config"]), micro_batch_of(record["config"]), record.get("cap_bytes"))
        elif record.event in ("probe", "trial"):
            peak_bytes = int(record.get("peak_allocated_bytes") or 0)
            learn(learned, record["config"], str(record["outcome"]), peak_bytes, whole and record.event == "trial")
    return learned


def learn(learned: Frontier, knobs: Mapping[str, Scalar], outcome: str, peak_bytes: int, whole: bool = False) -> None:
    """Adds one observation to the frontier; `whole`: the peak is that of the run from its first step to its last."""
    micro_batch = micro_batch_of(knobs)
    if outcome == "oom":
        learned.observe_oom(key_of(knobs), micro_batch)
    elif outcome in ("ok", "stopped") and peak_bytes > 0:
        learned.observe_fit(key_of(knobs), micro_batch, peak_bytes, whole=whole and outcome == "ok")


def peaks_are_whole(records: Sequence[Record]) -> bool:
    """Returns whether a trial's peak is of all its steps: on CUDA, and under a cap; else of its first step alone."""
    study = last(records, "study")
    if study is None:
        return False
    return study["card"].get("cap_bytes") is not None or study["device"].get("type") == "cuda"


def facts(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Returns what this run found out about memory, as `memory.known` keeps it for the next."""
    whole = peaks_are_whole(records)
    found: list[dict[str, Any]] = []
    for record in records:
        if record.event == "footprint":
            kept = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "points", "source", "measured")
            if all(n in record.fields for n in kept) and record["source"] != "bound":
                coupling = dict(key_of(record["coupling"]))
                alone = {n: record[n] for n in ("points_alone", "measured_alone") if n in record.fields}
                found.append({"kind": "footprint", "coupling": coupling, **{n: record[n] for n in kept}, **alone})
                if failed := record.get("failed"):
                    found.append({"kind": "oom", "coupling": coupling, **failed})
        elif record.event in ("oom", "probe", "trial") and record.get("fault") != GROWING.name:
            knobs = record["config"]
            outcome = "oom" if record.event == "oom" else str(record["outcome"])
            peak_bytes = int(record.get("peak_allocated_bytes") or 0)
            fact = {"coupling": dict(key_of(knobs)), "micro_batch": micro_batch_of(knobs)}
            if outcome == "oom":
                found.append({"kind": "oom", **fact, "cap_bytes": record.get("cap_bytes")})
            elif outcome in ("ok", "stopped") and peak_bytes > 0:
                is_whole = whole and outcome == "ok" and record.event == "trial"
                found.append({"kind": "peak" if is_whole else "fit", **fact, "peak_bytes": peak_bytes})
    return found


def _recall(learned: Frontier, fact: Mapping[str, Any]) -> None:
    key = key_of(fact["coupling"])
    if fact["kind"] == "footprint":
        _corrected(learned, fact)
    elif fact["kind"] == "oom":
        learned.observe_oom(key, int(fact["micro_batch"]), fact.get("cap_bytes"))
    elif fact["kind"] in ("peak", "fit") and GRADIENTS_HELD in fact["coupling"]:  # older facts do not say of which
        whole = fact["kind"] == "peak"
        learned.observe_fit(key, int(fact["micro_batch"]), int(fact["peak_bytes"]), whole=whole)


def _corrected(learned: Frontier, raw: Mapping[str, Any]) -> None:
    """Holds what was predicted of a coupling to what was measured of it."""
    if raw.get("source", "measured") == "measured":
        return
    for name, held in (("measured", True), ("measured_alone", False)):
        for micro_batch, peak_bytes in raw.get(name, []):
            key = key_of({**raw["coupling"], GRADIENTS_HELD: held})
            learned.observe_peak(key, int(micro_batch), int(peak_bytes))


def _alone(raw: Mapping[str, Any]) -> Footprint | None:
    """Returns the footprint of batches of one micro-step, None where nothing is known of them."""
    return Footprint.of({**raw, "points": raw["points_alone"]}) if raw.get("points_alone") else None


def _footprints(records: Sequence[Record]) -> dict[tuple[tuple[str, Scalar], ...], Footprint]:
    """Returns the latest footprint of each coupling, this run's own before one that was known."""
    known = [f for r in records if r.event == "known" for f in r["facts"] if f["kind"] == "footprint"]
    own = [r.fields for r in records if r.event == "footprint"]
    found = {key_of(raw["coupling"]): Footprint.of(raw) for raw in (*known, *own)}
    for raw in (*known, *own):
        alone = _alone(raw)
        if alone is not None:
            found[key_of({**raw["coupling"], GRADIENTS_HELD: False})] = alone
    return found


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
