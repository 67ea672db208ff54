"""From probes to the speed of any trial: which system knobs suit it, and how fast it will train.

A probe measures the seconds of a micro-step, of an optimiser step and of a pass beside its steps apart. A batch of b
samples cut into micro-batches of m then takes ceil(b / m) micro-steps, one optimiser step and its share of the pass, so
one probe serves every batch size from m upwards.
A smaller batch in one piece is expected between the probes of smaller and larger micro-batches.
Configurations that share their "both" knobs are a speed group: a probe answers for the trials of its group.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from trainables.knobs import KnobTable, Scalar
from tuning.config.space import Range, Space, values_of
from tuning.journal.events import ProbeRecord
from tuning.memory.groups import batch_size_of, defaults, micro_batch_of, need_of
from tuning.memory.guard import MemoryGuard
from tuning.memory.oom import Outcome
from tuning.search.runtime_check import compare
from tuning.search.timing import Estimate

FEW_RATIOS = 3
PROBES_DIFFER = 1.3
"""By how many times two probes of one configuration may differ: 1.4 standard deviations of the ratio of micro-steps."""
LEAST_OPTIMIZER_FRAC = 0.01
"""A share of a micro-step: an optimiser step that took less costs nothing, or was not seen, as in some custom loops."""
SAMPLES_PER_S = "samples_per_s"
"""The objective that every study has beside those of its workload."""


@dataclass(frozen=True)
class Probed:
    """A probe's result: its knobs, the seconds of a micro-step and of an optimiser step, samples a second, and the
    seconds of a pass of so many samples beside its steps.

    `idle` are the knobs that had no effect: its first step was seen to run something else than they ask for, as with an
    attention kernel in a model without attention. Whatever its speed, they did not bring it.
    """

    knobs: Mapping[str, Scalar]
    micro_step_s: float
    optimizer_step_s: float
    samples_per_s: float
    idle: frozenset[str] = frozenset()
    pass_s: float = 0.0
    pass_samples: int = 0

    @property
    def estimate(self) -> Estimate:
        """Returns what its batches take."""
        return Estimate(self.micro_step_s, self.optimizer_step_s, self.pass_s, self.pass_samples)

    @cached_property
    def micro_batch_size(self) -> int:
        """Returns the samples of one of its micro-steps."""
        return micro_batch_of(self.knobs)

    def system(self, table: KnobTable) -> dict[str, Scalar]:
        """Returns its system knobs, the micro-batch as it ran."""
        whole = {**self.knobs, "micro_batch_size": self.micro_batch_size}
        return {n: v for n, v in whole.items() if n in table.system}

    def at_batch_size(self, batch_size: int) -> float | None:
        """Returns samples a second at this batch size, or None where the batch is smaller than what was measured."""
        if batch_size < self.micro_batch_size:
            return None
        return self.estimate.samples_per_s(batch_size, self.micro_batch_size)


@dataclass(frozen=True)
class SystemChoice:
    """System knobs for a trial and the samples a second they are expected to give."""

    system: Mapping[str, Scalar]
    samples_per_s: float


def _cut(probes: Sequence[Probed], batch_size: int, table: KnobTable) -> list[SystemChoice]:
    """Returns what a batch in one piece is expected to give where a larger micro-batch, cut to it, was probed.

    Its micro-step takes as long as a straight line between the next smaller and larger ones has it, without a smaller
    one as long as the larger.
    """
    alike: dict[frozenset[tuple[str, Scalar]], dict[int, Probed]] = {}
    for one in probes:
        others = frozenset((n, v) for n, v in one.system(table).items() if n != "micro_batch_size")
        alike.setdefault(others, {})[one.micro_batch_size] = one
    found = []
    for others, by_size in alike.items():
        sizes = sorted(by_size)
        if "micro_batch_size" not in table.system or batch_size in by_size or sizes[-1] < batch_size:
            continue
        larger = by_size[next(size for size in sizes if size > batch_size)]
        micro_step_s = float(np.interp(batch_size, sizes, [by_size[size].micro_step_s for size in sizes]))
        rate = replace(larger.estimate, micro_step_s=micro_step_s).samples_per_s(batch_size, batch_size)
        found.append(SystemChoice({**dict(others), "micro_batch_size": batch_size}, rate))
    return found


def without_slower_optimizers(probes: Sequence[Probed], table: KnobTable) -> list[Probed]:
    """Returns the probes without those whose optimiser step is clearly slower than that of another much like them.

    They differ in knobs that change nothing but that step. Its seconds, medians of a speed group, tell which is slower;
    those of micro-steps differ from probe to probe by more than such a knob saves (docs/log/probes.md). A probe
    is left out only if the other has its micro-batch, and a micro-step that is no longer.
    """
    names = [name for name in table.system if table[name].span == "optimizer"]
    steps_s: dict[tuple[Any, ...], list[float]] = {}
    keys = [(group_of(p.knobs, table), tuple(table.whole(p.knobs)[name] for name in names)) for p in probes]
    for probe, key in zip(probes, keys, strict=True):
        steps_s.setdefault(key, []).append(probe.optimizer_step_s)
    timed = [(p, key[0], statistics.median(steps_s[key])) for p, key in zip(probes, keys, strict=True)]
    return [
        probe
        for probe, group, step_s in timed
        if not any(
            step_s > PROBES_DIFFER * least_s
            and least_s >= LEAST_OPTIMIZER_FRAC * other.micro_step_s
            and other.micro_batch_size == probe.micro_batch_size
            and other.micro_step_s <= PROBES_DIFFER * probe.micro_step_s
            and other_group == group
            for other, other_group, least_s in timed
        )
    ]


def averaged(probes: Sequence[Probed], table: KnobTable) -> list[Probed]:
    """Returns each configuration once, such as `before`, which is probed by its name too; its seconds are the means.

    The faster of two noisy probes would flatter it, and the slower be what its trial is judged by.
    """
    alike: dict[tuple[Scalar, ...], list[Probed]] = {}
    for probe in probes:
        alike.setdefault(place_of(probe.knobs, table), []).append(probe)
    return [
        replace(
            own[0],
            micro_step_s=statistics.fmean(p.micro_step_s for p in own),
            optimizer_step_s=statistics.fmean(p.optimizer_step_s for p in own),
            pass_s=statistics.fmean(p.pass_s for p in own),
        )
        for own in alike.values()
    ]


_Groups = Mapping[tuple[Scalar, ...], Sequence[SystemChoice]]


class Speeds:
    """The speed of trials by their probes; `learn` takes what trials measured themselves."""

    def __init__(self, probes: Sequence[Probed], table: KnobTable, *, is_alone: bool = False) -> None:
        """`is_alone` says that one trial trains at a time, so that no neighbour costs it anything.

        Then only the shortness of probes remains, which takes `FEW_RATIOS` trials to tell from a probe that was off.
        """
        self.table, self._is_alone = table, is_alone
        self._groups: dict[tuple[Scalar, ...], list[Probed]] = {}
        known = averaged(probes, table)
        for probe in without_slower_optimizers(known, table):
            self._groups.setdefault(group_of(probe.knobs, table), []).append(probe)
        self._exact = {place_of(probe.knobs, table): probe for probe in known}
        self._ranked: dict[Any, list[SystemChoice]] = {}
        self._ratios: list[float] = []

    def ranked(self, knobs: Mapping[str, Scalar]) -> Sequence[SystemChoice]:
        """Returns the probed system knobs for a trial, the fastest first; none where nothing was probed.

        A group that nobody probed has those of the group that shares most of its values, and their speeds; of several
        that share as many, of the slowest, so that nothing unprobed is taken to be faster than what was.
        """
        batch_size, group = batch_size_of(knobs), group_of(knobs, self.table)
        if (group, batch_size) not in self._ranked:
            known = {**self._of_larger(group, batch_size), **self._known(batch_size)}
            ranked = {other: sorted(known[other], key=lambda choice: -choice.samples_per_s) for other in known}
            found = [(_differing(group, other), own[0].samples_per_s, own) for other, own in ranked.items() if own]
            self._ranked[group, batch_size] = min(found, key=lambda row: row[:2])[2] if found else []
        return self._ranked[group, batch_size]

    def _of_larger(self, group: tuple[Scalar, ...], batch_size: int) -> _Groups:
        """Returns the group as if it were probed, if a probed group differs in a larger micro-batch alone.

        It is needed if the micro-batch changes what is learned, and no probe has one as small as the batch: a sample is
        then taken to cost what it does there, so that the batch has the system knobs that are fastest there.
        """
        if "micro_batch_size" not in self.table.both or group in self._groups:
            return {}
        place = self.table.both.index("micro_batch_size")
        size, rest = int(group[place]), (group[:place], group[place + 1 :])
        larger = {
            int(g[place]): g for g in self._groups if (g[:place], g[place + 1 :]) == rest and int(g[place]) > size
        }
        if not larger:
            return {}
        found, nearest = [], min(larger)
        for probe in self._groups[larger[nearest]]:
            known = replace(probe.estimate, micro_step_s=size / nearest * probe.micro_step_s)
            found.append(SystemChoice(probe.system(self.table), known.samples_per_s(batch_size, size)))
        return {group: found}

    def _known(self, batch_size: int) -> _Groups:
        """Returns what the probes of each group say of a batch size; a group of which they say nothing is left out."""
        found = {}
        for group, probes in self._groups.items():
            rates = [(probe.system(self.table), probe.at_batch_size(batch_size)) for probe in probes]
            known = [SystemChoice(system, rate) for system, rate in rates if rate]
            found[group] = known + _cut(probes, batch_size, self.table)
        return {group: own for group, own in found.items() if own}

    def of(self, knobs: Mapping[str, Scalar]) -> float | None:
        """Returns what a probe found for exactly these knobs, at their batch size; None where nobody probed them."""
        probe = self._exact.get(place_of(knobs, self.table))
        return None if probe is None else probe.at_batch_size(batch_size_of(knobs))

    def learn(self, knobs: Mapping[str, Scalar], measured: float | None) -> None:
        """Takes the samples a second that a trial measured itself."""
        if measured and (known := self.of(knobs)):
            self._ratios.append(known / measured)

    def judged(self, knobs: Mapping[str, Scalar], measured: float | None) -> float | None:
        """Returns the speed that a trial is judged by: its probe's, else its own as it would be without neighbours.

        The factor is the median of probed over measured speed of the trials that have both.
        """
        known = self.of(knobs)
        if known is not None or not measured:
            return known or measured
        enough = len(self._ratios) >= (FEW_RATIOS if self._is_alone else 1)
        return measured * (statistics.median(self._ratios) if enough else 1.0)


def fastest(speeds: Speeds, guard: MemoryGuard, knobs: Mapping[str, Scalar]) -> SystemChoice | None:
    """Returns the probed system knobs with the largest speed at the micro-batch that fits; None where none does.

    A micro-batch that has to be cut is as much slower at the most: a smaller micro-step takes no longer.
    """
    best: SystemChoice | None = None
    for choice in speeds.ranked(knobs):
        if best is not None and choice.samples_per_s <= best.samples_per_s:
            break
        group, micro_batch = need_of({**knobs, **choice.system}, guard.table)
        share = guard.fitting(group, micro_batch) / micro_batch
        if share and (best is None or choice.samples_per_s * share > best.samples_per_s):
            best = SystemChoice(choice.system, choice.samples_per_s * share)
    return best


def system_only(space: Space, start: Mapping[str, Scalar]) -> Space:
    """Returns the space of the system knobs alone, every other knob fixed at `start`: nothing learned can change."""
    held = {n: start[n] for n in space.parameters if n in start and space.table[n].kind != "system"}
    return replace(space.subset({"system"}), fixed={**space.fixed, **held})


def probed(probes: Iterable[ProbeRecord], table: KnobTable) -> list[Probed]:
    """Returns the probes that succeeded, and say how long their steps take."""
    return [
        Probed(p.config, p.micro_step_s, p.optimizer_step_s, p.samples_per_s, _idle(p, table), p.pass_s, p.pass_samples)
        for p in probes
        if p.outcome == Outcome.OK and p.samples_per_s and p.micro_step_s is not None and p.optimizer_step_s is not None
    ]


def _idle(probe: ProbeRecord, table: KnobTable) -> frozenset[str]:
    rows = compare(probe.config, probe.active, table)
    return frozenset(row.knob for row in rows if row.agrees is False and row.knob != "micro_batch_size")  # cut evenly


def group_of(knobs: Mapping[str, Scalar], table: KnobTable) -> tuple[Scalar, ...]:
    """Returns the speed group: the values of the "both" knobs, defaults filled in, a micro-batch cut to its batch."""
    full = _whole(knobs, table)
    return tuple(full[name] for name in table.both)


def place_of(knobs: Mapping[str, Scalar], table: KnobTable) -> tuple[Scalar, ...]:
    """Returns what has to be equal for a probe to answer for exactly these knobs; those without effect are left out."""
    full = _whole(knobs, table)
    system = (full[n] if table.is_active(n, full) else table.defaults[n] for n in table.system)
    return (*system, *group_of(full, table))


def learned(knobs: Mapping[str, Scalar], table: KnobTable) -> dict[str, Scalar]:
    """Returns the knobs without system knobs, those that are not named at their defaults."""
    return {n: v for n, v in table.whole(knobs).items() if n not in table.system}


def _whole(knobs: Mapping[str, Scalar], table: KnobTable) -> dict[str, Scalar]:
    return {**table.defaults, **knobs, "micro_batch_size": micro_batch_of(knobs)}


def suits(space: Space, probe: Probed) -> bool:
    """Returns whether the space has the probe's "both" knobs, so that a trial can be made of them."""
    return _allows(space, probe, space.table.both)


def inside(space: Space, probe: Probed) -> bool:
    """Returns whether the space allows the probe's system knobs: a configuration named beside it need not be.

    A searched knob without effect (`Probed.idle`) is allowed only at the value that the space starts from.
    """
    start = defaults(space) if probe.idle else {}
    has_effect = all(probe.knobs.get(n) == start.get(n) for n in probe.idle if n in space.parameters)
    return has_effect and _allows(space, probe, space.table.system)


def _allows(space: Space, probe: Probed, names: Sequence[str]) -> bool:
    full = space.table.whole(probe.knobs)
    for name in names:
        given, is_system = space.given(name), space.table[name].kind == "system"
        if not space.table.is_active(name, full) or (is_system and name not in {**space.parameters, **space.fixed}):
            continue
        allowed = full[name] in given if isinstance(given, Range) else full[name] in values_of(given)
        if not allowed:
            return False
    return True


def _differing(one: tuple[Scalar, ...], other: tuple[Scalar, ...]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))
