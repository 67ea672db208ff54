"""Which memory group a configuration belongs to, and what the records say of what it needs."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from typing import Any

from trainables.knobs import LOOP, KnobTable, Scalar
from tuning.config.choices import PLAIN
from tuning.config.space import Choice, Range, Space
from tuning.journal import events
from tuning.journal.records import Journal
from tuning.journal.run import History
from tuning.memory.guard import GRADIENTS_HELD, FitVerdict, MemoryGroup, MemoryGuard
from tuning.memory.oom import Outcome
from tuning.memory.profile import MEASURED, MemoryProfile, Point

_NO_ROOM = (Outcome.OOM, Outcome.HOST_OOM, Outcome.KILLED)
_EDGE_FRAC = 0.1
"""So much of a range at either end is its edge."""


def key_of(knobs: Mapping[str, Scalar], table: KnobTable) -> MemoryGroup:
    """Returns the memory group of a configuration, defaults filled in; the key of a group is the same again.

    Each value of the knobs of memory "group" is measured; the micro-batch size multiplies what a sample needs. "minor"
    ones change it by a few per cent: with all of them a space of nine knobs would have hundreds of groups to measure.
    They are in the key, so that what ran is known of them alone, and the profile may be another's. A "switch"
    counts only as zero or above: with a phase for the encoder `signals` needs 2.0 to 10.5 times as much, most
    at the smallest micro-batch.
    """
    moves, default = table.by_memory, table.defaults
    own = [(name, knobs.get(name, default[name])) for name in moves["group"]]
    own += [(name, _whether(knobs.get(name, default[name]))) for name in (*moves["minor"], *moves["switch"])]
    return (*own, (GRADIENTS_HELD, bool(knobs.get(GRADIENTS_HELD, _holds_gradients(knobs)))))


def _whether(value: Scalar) -> Scalar:
    """Returns a number as whether it is more than 0: a dropout of 0.3 needs what one of 0.1 does."""
    return value if isinstance(value, bool | str) else value > 0


def _holds_gradients(knobs: Mapping[str, Scalar]) -> bool:
    """Returns whether gradients of earlier micro-steps are alive in a micro-step; of a mere group, that they are."""
    full = LOOP.whole(knobs)
    if not full["set_to_none"] or not {"batch_size", "micro_batch_size"} & knobs.keys():
        return True
    return int(full["batch_size"]) > int(full["micro_batch_size"])


def micro_batch_of(knobs: Mapping[str, Scalar]) -> int:
    """Returns the samples of a configuration's micro-step: no more than its batch has."""
    return min(int(knobs.get(name, LOOP.defaults[name])) for name in ("micro_batch_size", "batch_size"))


def batch_size_of(knobs: Mapping[str, Scalar]) -> int:
    """Returns the samples of a configuration's batch."""
    return int(knobs.get("batch_size", LOOP.defaults["batch_size"]))


def need_of(knobs: Mapping[str, Scalar], table: KnobTable) -> tuple[MemoryGroup, int]:
    """Returns the memory group and the micro-batch: all that the need of a configuration depends on."""
    return key_of(knobs, table), micro_batch_of(knobs)


# -- of a space -------------------------------------------------------------------------------------------------------


def memory_groups(space: Space) -> list[dict[str, Scalar]]:
    """Returns every combination of memory knobs the space can ask for; of a range its ends and its middle.

    Minor knobs are as the space starts. If the space has both, groups with a switch on, such as a phase for the
    encoder, come after those without.
    """
    moves, start = space.table.by_memory, defaults(space)
    names = (*moves["switch"], *moves["group"])
    minor = {n: start[n] for n in moves["minor"] if n in start}
    values = [_switched(_values(space, n)) if n in moves["switch"] else _values(space, n) for n in names]
    combined = []
    for combination in itertools.product(*values):
        asked = {n: v for n, v in zip(names, combination, strict=True) if v is not None}
        combined.append({**minor, **{n: space.fixed[n] for n in names if n in space.fixed}, **asked})
    return combined


def _switched(values: tuple[Scalar | None, ...]) -> tuple[Scalar | None, ...]:
    """Returns a value that is off and one that is on, as far as there are any."""
    found = {None if v is None else float(v) > 0: v for v in reversed(values)}
    return tuple(sorted(found.values(), key=lambda v: v or 0))


def micro_batches(space: Space) -> list[int]:
    """Returns the micro-batch sizes that a trial of the space can come to run, in rising order: halves included."""
    parameter = space.given("micro_batch_size")
    if isinstance(parameter, Range):
        asked = [int(parameter.high)]
    else:
        asked = [int(v) for v in (parameter.values if isinstance(parameter, Choice) else (parameter,))]
    return sorted({size >> n for size in asked for n in range(size.bit_length())})


def defaults(space: Space) -> dict[str, Scalar]:
    """Returns a starting point: the fixed knobs, and for each searched one its own default where the space has it.

    Without a default in the space it is the first of a list, the middle of a range; the middle too if the default is at
    the range's edge, for a range says where its author expects the best.
    """
    start: dict[str, Scalar] = dict(space.fixed)
    for name, parameter in space.parameters.items():
        default = space.table.defaults[name]
        if isinstance(parameter, Choice):
            start[name] = default if default in parameter.values else parameter.values[0]
        else:
            is_inside = _EDGE_FRAC <= parameter.place(float(default)) <= 1 - _EDGE_FRAC
            start[name] = default if is_inside else parameter.at(0.5)
    return {n: v for n, v in start.items() if space.table.is_active(n, start)}


def plain_defaults(space: Space) -> dict[str, Scalar]:
    """As `defaults`, and each batch in one pass, as plain PyTorch takes it, as far as the space has that."""
    start = defaults(space)
    sizes = _sizes(space, start)
    return {**start, "micro_batch_size": min(sizes[-1], batch_size_of(start))} if sizes else start


def uncut(space: Space, run: History, learned: MemoryGuard) -> dict[str, Scalar]:
    """As `plain_defaults`, with the largest micro-batch that was probed, or that fits as far as is known."""
    start = plain_defaults(space)
    if not (sizes := _sizes(space, start)):
        return start
    ends: dict[int, set[str]] = {}
    for probe in run.probes:
        if probe.name in ("", PLAIN):
            ends.setdefault(micro_batch_of(probe.config), set()).add(probe.outcome)
    failed = {size for size, outcomes in ends.items() if outcomes <= set(_NO_ROOM)}
    whole = batch_size_of(start)  # records have sizes as they ran
    fitting = [s for s in sizes if min(s, whole) not in failed and fits(learned, {**start, "micro_batch_size": s})]
    ran = [s for s in sizes if Outcome.OK in ends.get(min(s, whole), ())]
    return {**start, "micro_batch_size": max([*fitting, *ran], default=sizes[0])}


def _sizes(space: Space, knobs: Mapping[str, Scalar]) -> list[int]:
    """Returns the micro-batches that the space has for a batch in rising order, last the smallest that holds all of it,
    as far as there is one; none where the size is not searched.
    """
    parameter, batch = space.parameters.get("micro_batch_size"), batch_size_of(knobs)
    if isinstance(parameter, Range):
        largest = int(max(parameter.low, min(parameter.high, batch)))
        return sorted(size for n in range(largest.bit_length()) if (size := largest >> n) in parameter)
    values = sorted(int(value) for value in parameter.values) if parameter is not None else []
    return values[: bisect.bisect_left(values, batch) + 1]


def _values(space: Space, name: str) -> tuple[Scalar | None, ...]:
    parameter = space.parameters.get(name)
    if isinstance(parameter, Choice):
        return parameter.values
    if isinstance(parameter, Range):
        return parameter.spread()
    return (None,)


def refused(
    journal: Journal, knobs: Mapping[str, Scalar], verdict: FitVerdict, cap_bytes: int | None, stage: str, **more: Any
) -> events.RefusedRecord:
    """Returns the record that a stage did not launch a configuration, and why, now that it is written."""
    said = {"predicted_bytes": verdict.predicted_bytes, "cap_bytes": cap_bytes, "p_oom": verdict.p_oom}
    return journal.append(events.RefusedRecord, config=dict(knobs), **said, reason=verdict.reason, stage=stage, **more)


# -- of the records ---------------------------------------------------------------------------------------------------


def fits(learned: MemoryGuard, knobs: Mapping[str, Scalar]) -> bool:
    """Returns whether a trial of the configuration is expected to fit at its own micro-batch."""
    return learned.fitting(*need_of(knobs, learned.table)) == micro_batch_of(knobs)


def guard(run: History, cap_bytes: int | None) -> MemoryGuard:
    """Returns the guard as the records have it: footprints, what fitted, what ran out of memory."""
    learned = MemoryGuard(cap_bytes, footprints(run), run.table)
    whole = peaks_are_whole(run)
    for event in run.events:
        match event:
            case events.FootprintRecord(failed=failed):
                if failed:
                    group = key_of(event.coupling, run.table)
                    learned.observe_oom(group, int(failed["micro_batch"]), failed["cap_bytes"])
                _corrected(learned, event)
            case events.OomRecord() | events.ProbeRecord() | events.TrialRecord():
                learn(learned, event, whole=whole and isinstance(event, events.TrialRecord))
    return learned


def learn(learned: MemoryGuard, ended: events.MeasuredRecord, *, whole: bool = False) -> None:
    """Adds how a probe or a trial ended: outcome, peak, and the cap that it ran under.

    `whole`: the peak of one that came to its end is that of the run from its first step to its last.
    """
    if ended.outcome == Outcome.OOM:
        learned.observe_oom(*need_of(ended.config, learned.table), ended.cap_bytes)
    elif ended.outcome in (Outcome.OK, Outcome.STOPPED) and ended.peak_allocated_bytes:
        is_whole = whole and ended.outcome == Outcome.OK
        learned.observe_fit(*need_of(ended.config, learned.table), ended.peak_allocated_bytes, whole=is_whole)


def peaks_are_whole(run: History) -> bool:
    """Returns whether a trial's peak is of all its steps: on CUDA, and under a cap; else of its first step alone."""
    study = run.study
    return study is not None and (study.cap_bytes is not None or study.device.get("type") == "cuda")


def _corrected(learned: MemoryGuard, footprint: events.FootprintRecord) -> None:
    """Holds what was predicted of a group to what was measured of it."""
    if footprint.source == MEASURED:
        return
    for pairs, held in ((footprint.measured, True), (footprint.measured_alone, False)):
        group = key_of({**footprint.coupling, GRADIENTS_HELD: held}, learned.table)
        for micro_batch, peak_bytes in pairs:
            learned.observe_peak(group, micro_batch, peak_bytes)


def profile_of(footprint: events.FootprintRecord) -> MemoryProfile:
    """Returns the bytes of a group by micro-batch."""
    return _profile(footprint, footprint.points)


def alone(footprint: events.FootprintRecord) -> MemoryProfile | None:
    """Returns the footprint of batches of one micro-step, None if nothing is known of them."""
    return _profile(footprint, footprint.points_alone) if footprint.points_alone else None


def _profile(footprint: events.FootprintRecord, points: events.Pairs) -> MemoryProfile:
    return MemoryProfile(footprint.floor_bytes, tuple(Point(*point) for point in points), footprint.source)


def footprints(run: History) -> dict[MemoryGroup, MemoryProfile]:
    """Returns the latest footprint of each group."""
    latest = {key_of(footprint.coupling, run.table): profile_of(footprint) for footprint in run.footprints}
    for footprint in run.footprints:
        own_alone = alone(footprint)
        if own_alone is not None:
            latest[key_of({**footprint.coupling, GRADIENTS_HELD: False}, run.table)] = own_alone
    return latest
