"""Stage 2: the speed of system knobs, in seconds each, in one warm process that has the device to itself."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping

from trainables.knobs import Scalar
from tuning.config.schema import ProbeSection, StudyConfig
from tuning.config.space import Choice, Range, Space
from tuning.journal.events import ProbeRecord, RefusedRecord, known_fields
from tuning.journal.records import Journal
from tuning.journal.run import History
from tuning.memory.groups import batch_size_of, defaults, fits, learn, micro_batch_of, need_of, refused, uncut
from tuning.memory.guard import MOST_P_OOM_PROBE, FitVerdict, MemoryGuard
from tuning.memory.oom import CRASHED, DEPENDENT, Outcome, others_would_crash
from tuning.search.protocols import Probes, Told
from tuning.search.throughput import (
    Probed,
    averaged,
    group_of,
    inside,
    place_of,
    probed,
    without_slower_optimizers,
)

PASSES = 2
"""Passes over the knobs of a speed group: the second finds what only pays beside what the first has changed."""
PROBE_FRAC = 0.25
"""The most of what is left of search.max_time after start-up that is spent on probes."""
PROBES_ALONE_FRAC = 0.5
"""The same if nothing is trained; the best of them are then measured in turns.

With a quarter of a minute two of seven micro-batches were probed, and half of the minute was left.
"""
FIRST_FRAC = 0.5
"""Share of the time for the first group; what is found there is where the others start."""
NAMED_TIMES = 1.5
"""So many times a probe's time is kept for each named configuration: it loads in another way, and may be slow."""
AGAIN_ROUNDS, AGAIN_OTHERS = 2, 6
"""Rounds in which a few are probed once more, and how many beside the reference: one probe is off by 13 %."""
SHORTEST_FRAC = 1 / 3
"""The least share of `probe_time_s` that a probe has if there are many knobs and groups.

With 3 s each, nine of headpose's probes fitted 24 s, and half of its knobs were not tried.
"""


def probes_s(config: StudyConfig, left_s: float) -> float:
    """Returns the seconds that all probes may take if `left_s` are left of search.max_time, infinity for no limit."""
    if config.search.trials == 0 and math.isfinite(left_s):
        return max(1.0, PROBES_ALONE_FRAC * left_s)
    return min(config.budget.probe.max_time_s, max(1.0, PROBE_FRAC * left_s))


class ProbeStage:
    """Measures the system knobs by coordinate descent in each speed group, then the named configurations.

    From the best so far, each knob is changed alone, in the order of the space, nearest values first; a knob of the
    optimiser step is judged by that step alone. The group of the defaults has half of the time. Every other group then
    has one probe with the fastest system knobs known, and its own descent in an equal share of what is left. A group
    that the time does not reach is judged by its nearest (`throughput.Speeds`).
    """

    def __init__(
        self,
        profiler: Probes,
        space: Space,
        journal: Journal,
        guard: MemoryGuard,
        budget: ProbeSection,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._profiler, self._space, self._journal, self._guard = profiler, space, journal, guard
        self._budget, self._clock, self._table = budget, clock, space.table
        self._batch_size = reference_batch_size(space)
        self._groups = speed_groups(space)
        self._probe_s = budget.probe_time_s
        self._known: dict[tuple[Scalar, ...], ProbeRecord | RefusedRecord] = {}
        self._known |= {self._place(r.config): r for r in _ended(journal.run) if not r.name}
        self._known |= {self._place(r.config): r for r in journal.run.refused if r.stage == "probe"}

    def run(self, named: Mapping[str, Mapping[str, Scalar]], told: Told) -> None:
        """Measures until the stage's time is spent, then what is `named`; leaves out what the records hold."""
        self._told = told
        began = self._clock()
        have = {r.name for r in _ended(self._journal.run) if r.name}
        kept = len(named.keys() - have) * NAMED_TIMES
        self._probe_s = self._a_probe_s(kept)
        until = began + self._budget.max_time_s - kept * self._probe_s
        self._sweep(self._groups[0], until if len(self._groups) == 1 else began + FIRST_FRAC * (until - began))
        for group in self._groups[1:]:
            if self._clock() < until and not self._only_crash:
                self._at(self._start(group))
        for number, group in enumerate(self._groups[1:], start=1):
            share = (until - self._clock()) / (len(self._groups) - number)
            self._sweep(group, self._clock() + share)
        ends_at = began + self._budget.max_time_s
        for name, knobs in named.items():  # one step of a configuration tuned for a card can take 40 s on a CPU
            if name not in have and self._clock() < ends_at and not self._depend:
                told(self._measure(dict(knobs), self._probe_s, name=name))

    def again(self, reference: Mapping[str, Scalar], told: Told) -> None:
        """Probes the reference and the fastest once more, in turns: the mean of its probes counts."""
        until, known = self._clock() + self._budget.max_time_s, probed(self._journal.run.probes, self._table)
        able = averaged([p for p in known if inside(self._space, p)], self._table)
        able.sort(key=lambda p: -(p.at_batch_size(batch_size_of(p.knobs)) or 0.0))
        configs = (reference, *(p.knobs for p in able[:AGAIN_OTHERS]))
        turns = list({self._place(own): dict(own) for own in configs}.values())
        for number in range(AGAIN_ROUNDS):
            for config in turns[number % len(turns) :] + turns[: number % len(turns)]:
                if self._clock() + self._probe_s <= until and self._judged(config).fits:
                    told(self._measure(config, self._probe_s))

    def _a_probe_s(self, kept: float) -> float:
        """Returns how long a probe is, so that each value of a knob has one in the time, and `kept` more are there."""
        values = [len(_values(self._space, name)) - 1 for name in self._space.subset({"system"}).parameters]
        a_pass, others = 1 + sum(values) + len(self._smaller_batches()), len(self._groups) - 1
        wanted = kept + max(a_pass + others, a_pass / FIRST_FRAC if others else 0)
        whole_s = self._budget.probe_time_s
        return min(whole_s, max(SHORTEST_FRAC * whole_s, self._budget.max_time_s / wanted))

    def _sweep(self, group: Mapping[str, Scalar], until: float) -> None:
        """Descends in one group, then measures what it found at smaller batch sizes, as far as the time lasts.

        In headpose batches of 32 were else left with what the first few probes had found: 265 samples/s beside 622.
        """
        start = self._start(group)
        if self._place(start) not in self._known and (self._clock() >= until or self._only_crash) and self._known:
            return
        smaller = self._smaller_batches()
        best = self._descend(start, until - len(smaller) * self._probe_s)
        for size in smaller:
            if best is not None and size < best.micro_batch_size and self._clock() < until:
                self._at(self._clipped({**best.knobs, "micro_batch_size": size}))

    @property
    def _ends(self) -> list[ProbeRecord]:
        return [r for r in self._known.values() if isinstance(r, ProbeRecord)]

    @property
    def _depend(self) -> bool:
        """Returns whether a training was seen to go on from an earlier one, so that no other tells anything."""
        return any(r.message.startswith(DEPENDENT) for r in self._ends)

    @property
    def _only_crash(self) -> bool:
        """Returns whether all probes so far have crashed, and others would, too."""
        crashed = [r.message for r in self._ends if r.outcome in CRASHED]
        return self._depend or (len(crashed) == len(self._ends) and others_would_crash(crashed))

    def _smaller_batches(self) -> list[int]:
        """Returns the batch sizes of the space that a larger micro-batch than theirs does not answer for."""
        micro = [int(v) for v in _values(self._space, "micro_batch_size")]
        batches = [int(v) for v in _values(self._space, "batch_size")]
        return sorted({size for size in batches if size in micro and size < max(micro)}, reverse=True)

    def _descend(self, start: dict[str, Scalar], until: float) -> Probed | None:
        """Returns the fastest configuration found from the start on; None where none has a speed."""
        best = self._at(start)
        for _ in range(PASSES):
            before = best
            for name in self._space.subset({"system"}).parameters:
                current = start if best is None else best.knobs
                if not self._table.is_active(name, current):
                    continue
                for value in _nearest_first(_values(self._space, name), current.get(name)):
                    candidate = self._clipped({**(start if best is None else best.knobs), name: value})
                    if self._place(candidate) not in self._known and (self._clock() >= until or self._only_crash):
                        return best
                    found = self._at(candidate)
                    if found is not None and inside(self._space, found) and self._is_faster(found, best):
                        best = found
            if best is before:
                break
        return best

    def _at(self, knobs: dict[str, Scalar]) -> Probed | None:
        """Returns the speed of a configuration, measured unless the records hold it; None where it has none."""
        record = self._known.get(self._place(knobs))
        if record is None:
            asked = self._fitting(knobs)
            record = self._refuse(asked) or self._measure(asked, self._probe_s)
            is_oom = isinstance(record, ProbeRecord) and record.outcome == Outcome.OOM
            if is_oom and (alone := self._fitting(knobs)) != asked:
                self._told(record)
                record = self._measure(alone, self._probe_s)
            self._known[self._place(knobs)] = record
            self._told(record)
        return next(iter(probed([record] if isinstance(record, ProbeRecord) else [], self._table)), None)

    def _place(self, knobs: Mapping[str, Scalar]) -> tuple[Scalar, ...]:
        return place_of({**knobs, "batch_size": self._batch_size}, self._table)

    def _rank(self, found: Probed | None) -> tuple[bool, float]:
        """A probe that fits only as one micro-step serves that size alone: the best only if nothing else fits."""
        if found is None:
            return False, 0.0
        return found.knobs.get("batch_size") == self._batch_size, found.samples_per_s

    def _is_faster(self, found: Probed, best: Probed | None) -> bool:
        """Returns whether a probe is faster than the best so far, by the optimiser step alone where that is all that
        differs.
        """
        rank, best_rank = self._rank(found), self._rank(best)
        if best is None or rank[0] != best_rank[0]:
            return rank > best_rank
        left = without_slower_optimizers([best, found], self._table)
        return rank > best_rank if len(left) == 2 else left == [found]

    def _measure(self, knobs: dict[str, Scalar], time_s: float, name: str | None = None) -> ProbeRecord:
        group, known = group_of(knobs, self._table), probed(self._journal.run.probes, self._table)
        peers = [p for p in known if group_of(p.knobs, self._table) == group]
        size = int(knobs.get("batch_size", self._batch_size))
        fastest = max((rate for p in peers if (rate := p.at_batch_size(size)) is not None), default=0.0)
        p_oom = self._judged(knobs).p_oom
        found = self._profiler.probe(knobs, time_s, 0.0 if name else fastest)
        measured = {"cap_bytes": self._guard.cap_bytes, **known_fields(found)}
        record = self._journal.append(ProbeRecord, name=name, config=knobs, p_oom=p_oom, **measured)
        learn(self._guard, record)
        return record

    def _fitting(self, knobs: dict[str, Scalar]) -> dict[str, Scalar]:
        """Returns the knobs at a batch of one micro-step where the space has it and a trial would fit only as that."""
        micro_batch, given = micro_batch_of(knobs), self._space.given("batch_size")
        alone = {**knobs, "batch_size": micro_batch}
        has_it = micro_batch in given if isinstance(given, Range) else micro_batch in _values(self._space, "batch_size")
        if not has_it or fits(self._guard, knobs):
            return knobs
        return alone if self._judged(alone).fits else knobs

    def _judged(self, knobs: Mapping[str, Scalar]) -> FitVerdict:
        return self._guard.judge(*need_of(knobs, self._guard.table), threshold=MOST_P_OOM_PROBE)

    def _refuse(self, knobs: dict[str, Scalar]) -> RefusedRecord | None:
        verdict = self._judged(knobs)
        return None if verdict.fits else refused(self._journal, knobs, verdict, self._guard.cap_bytes, "probe")

    def _start(self, group: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns where a group's descent starts: the best known in the group, else in any, else the defaults with each
        batch in one piece, or in the largest that fit (docs/log/probes.md).
        """
        here = {**self._space.fixed, **group, "batch_size": self._batch_size}
        ends, table = [r for r in self._known.values() if isinstance(r, ProbeRecord)], self._table
        known = [p for p in probed(ends, table) if inside(self._space, p)]
        found = without_slower_optimizers(known, table)
        own = [p for p in found if group_of(p.knobs, table) == group_of(here, table)]
        best = None if group is self._groups[0] else max(own or found, key=self._rank, default=None)
        base = uncut(self._space, self._journal.run, self._guard) if best is None else best.knobs
        return self._clipped({**here, **{n: v for n, v in base.items() if n in table.system}})

    def _clipped(self, knobs: Mapping[str, Scalar]) -> dict[str, Scalar]:
        whole = {"learning_rate": self._table.defaults["learning_rate"], **knobs, "batch_size": self._batch_size}
        return {n: v for n, v in whole.items() if self._table.is_active(n, whole)}


def _ended(run: History) -> list[ProbeRecord]:
    """Returns the probes that there are; one that search.max_time cut says nothing, and is measured with more of it."""
    return [probe for probe in run.probes if probe.outcome != Outcome.CUT]


def speed_groups(space: Space) -> list[dict[str, Scalar]]:
    """Returns every combination of the searched "both" knobs, the fewer values differ from the defaults the sooner."""
    start = defaults(space)
    names = [n for n in space.table.both if isinstance(space.parameters.get(n), Choice)]
    values = [p.values for n in names if isinstance(p := space.parameters[n], Choice)]
    groups = [dict(zip(names, combination, strict=True)) for combination in itertools.product(*values)]
    return sorted(groups, key=lambda group: sum(start.get(n) != v for n, v in group.items()))


def reference_batch_size(space: Space) -> int:
    """Returns the batch size probes run at: the middle of the space's, but no less than its largest micro-batch."""
    batch, micro = ([int(v) for v in _values(space, n)] for n in ("batch_size", "micro_batch_size"))
    return max(batch[len(batch) // 2], min(max(micro), max(batch)))


def _values(space: Space, name: str) -> list[Scalar]:
    """Returns the values of a list, sorted where they are numbers; low, middle and high of a range."""
    given = space.given(name)
    if isinstance(given, Range):
        return list(given.spread())
    values = list(given.values) if isinstance(given, Choice) else [given]
    is_number = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return sorted(values, key=float) if is_number else values


def _nearest_first(values: list[Scalar], current: Scalar | None) -> list[Scalar]:
    """Returns the other values, nearest to the current one first: memory grows in small steps."""
    place = values.index(current) if current in values else 0
    return sorted((v for v in values if v != current), key=lambda v: abs(values.index(v) - place))
