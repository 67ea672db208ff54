"""Stage 2: the speed of system knobs, in seconds each, in one warm process that has the device to itself."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence

from trainables.knobs import Knobs, Scalar, is_active
from tuning.config.schema import ProbeSection
from tuning.config.space import Choice, Range, Space
from tuning.journal.records import Journal, Record
from tuning.memory.groups import defaults, fits, learn, micro_batch_of, need_of
from tuning.memory.guard import PROBE_COSTS, FitVerdict, MemoryGuard
from tuning.search import reuse
from tuning.search.bottleneck import frozen, frozen_sentence, judge
from tuning.search.protocols import Probes
from tuning.search.sampler import Observation, Sampler
from tuning.search.throughput import COUPLING, SYSTEM, Probed, coupling_of, inside, neighbour, same

IDLE = 4
"""With every neighbour of the best tried, so many probes in a row that were no faster end a coupling's sweep."""
A_SWEEP = 4
"""Probes at least that a sweep's time is to hold: those without a rival take all they are given on a restless machine.

With 8 couplings in 24 s each had one probe of 2.8 s; of 1.5 s it has two.
"""
Told = Callable[[Record], None]
"""Hears of every probe as it is written."""


def probed(records: Sequence[Record]) -> list[Probed]:
    """Returns the probes that succeeded, as the throughput model takes them."""
    return [
        Probed(r["config"], r["micro_step_s"], r["optimizer_step_s"], r["samples_per_s"])
        for r in records
        if r.event == "probe" and r["outcome"] == "ok"
    ]


class ProbeStage:
    """Searches the system knobs for each coupling of the "both" knobs, then measures the named configurations.

    From the best so far, each knob is changed alone, until no neighbour is left; then Optuna proposes, until nothing is
    faster any more or the time is spent. Each coupling gets an equal share of the time, the first starting from the
    space's defaults, the others from the best system knobs found so far. What the verdict on the best names as a remedy
    is changed first (the RAM cache where it waits for data); what it cannot gain by is left as it is
    (`search.bottleneck`).
    """

    def __init__(
        self,
        profiler: Probes,
        space: Space,
        journal: Journal,
        guard: MemoryGuard,
        budget: ProbeSection,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._profiler, self._space, self._journal, self._guard = profiler, space, journal, guard
        self._budget, self._seed, self._clock = budget, seed, clock
        self._batch_size = reference_batch_size(space)
        self._earlier = reuse.probes(journal.records, space)

    def run(self, named: Mapping[str, Mapping[str, Scalar]], told: Told) -> None:
        """Measures until the stage's time is spent, then what is `named`; leaves out what the records hold."""
        deadline = self._clock() + self._budget.max_time_s
        pairs = list(speed_couplings(self._space))
        for number, coupling in enumerate(pairs):
            share = (deadline - self._clock()) / (len(pairs) - number)
            self._sweep(coupling, self._clock() + share, told)
        have = {r["name"] for r in self._journal.records if r.event == "probe" and r["name"]}
        for name, knobs in named.items():  # one step of a configuration tuned for a card can take 40 s on a CPU
            if name not in have:
                told(self._measure(dict(knobs), self._budget.probe_time_s, name=name))

    def _sweep(self, coupling: Mapping[str, Scalar], until: float, told: Told) -> None:
        system = self._space.subset({"system"})
        sampler = self._sampler(system, coupling)
        held: dict[str, Scalar | None] = {}
        while self._clock() < until or not self._under(coupling):
            over = [r for r in self._under(coupling) if not self._fits_alone(r)]
            seen = [{**r["config"], "batch_size": self._batch_size} for r in over]
            incumbent = self._incumbent(coupling)
            if (now_held := {n: incumbent.get(n) for n in self._frozen(coupling, told)}) != held:
                held = now_held
                system = _without(self._space.subset({"system"}), held)
                sampler = self._sampler(system, coupling)
            alternatives = {n: p.values for n, p in system.parameters.items() if isinstance(p, Choice)}
            order = [n for n in self._promising(coupling) if n in alternatives]
            usable = {n: alternatives[n] for n in dict.fromkeys([*order, *alternatives]) if is_active(n, incumbent)}
            candidate = neighbour(incumbent, usable, seen) if seen else incumbent
            if len(seen) == 1 and not same(start := self._start(coupling), seen[0]):
                candidate = start  # what an earlier run found fastest need not be
            number = None
            if candidate is None:  # every neighbour of the best is slower
                proposal = None if self._settled(coupling) else sampler.suggest()
                if proposal is None:
                    return
                number = proposal.number
                candidate = {**incumbent, **proposal.values}
            candidate = self._fitting(self._clipped({**candidate, **coupling}))
            record = self._refuse(candidate) or self._measure(candidate, self.time_s(until - self._clock()))
            told(record)
            if number is None:
                sampler.replay(_only(system, candidate), self._observation(record))
            else:
                sampler.observe(number, self._observation(record))

    def _settled(self, coupling: Mapping[str, Scalar]) -> bool:
        """Returns whether the last `IDLE` probes under the coupling found nothing faster than those before them."""
        own = (r for r in self._under(coupling) if r["config"]["batch_size"] == self._batch_size)
        rates = [float(r.get("samples_per_s") or 0.0) for r in own]
        before, last = rates[:-IDLE], rates[-IDLE:]
        return bool(before) and max(last) < max(before) * (1 + self._budget.spread_frac)

    def _sampler(self, system: Space, coupling: Mapping[str, Scalar]) -> Sampler:
        """Returns a sampler of these knobs that knows what was measured under the coupling."""
        sampler = Sampler(system, {"samples_per_s": "max"}, self._seed)
        for record in self._under(coupling):
            sampler.replay(_only(system, record["config"]), self._observation(record))
        return sampler

    def _frozen(self, coupling: Mapping[str, Scalar], told: Told) -> list[str]:
        """Returns the knobs that cannot help the best under the coupling; says so of those nobody has varied yet."""
        records = self._journal.records
        record = self._record_of(self._best(coupling))
        if record is None:
            return []
        searched = self._space.subset({"system"}).parameters
        found = frozen(record.get("spans") or {}, record.get("telemetry"), record["config"], searched)
        names = sorted({name for one in found for name in one.knobs})
        notes = (r for r in records if r.event == "note" and r.get("coupling") == coupling)
        told_of = {name for note in notes for name in note["frozen"]}
        tried = {n for n in names if len({r["config"].get(n) for r in self._under(coupling)}) > 1}
        if set(names) - told_of - tried:
            where = ", ".join(f"{n}={v}" for n, v in coupling.items())
            text = f"{where}: " * bool(where) + frozen_sentence(found)
            told(self._journal.append("note", text=text, coupling=dict(coupling), frozen=names))
        return names

    def _promising(self, coupling: Mapping[str, Scalar]) -> list[str]:
        """Returns the knobs that the verdict on what a sweep starts from names as remedies: they are changed first."""
        record = self._record_of(self._best(coupling) or self._best(None))
        verdict = judge(record.get("spans") or {}, record.get("telemetry"), record["config"]) if record else None
        return [remedy.partition("=")[0] for remedy in verdict.remedies] if verdict else []

    def _record_of(self, best: Probed | None) -> Record | None:
        probes = (r for r in self._journal.records if r.event == "probe")
        return next((r for r in probes if best is not None and r["config"] is best.knobs), None)

    def _observation(self, record: Record) -> Observation:
        verdict = self._judged(record["config"])
        outcome = "refused" if record.event == "refused" else str(record["outcome"])
        overshoot_bytes = max(1, self._guard.overshoot_bytes(verdict))
        return Observation(outcome, {"samples_per_s": record.get("samples_per_s")}, overshoot_bytes)

    def _under(self, coupling: Mapping[str, Scalar]) -> list[Record]:
        """Returns what was probed or refused under the coupling, the named configurations left out."""
        wanted = coupling_of({**self._space.fixed, **coupling})
        return [
            r
            for r in self._journal.records
            if ((r.event == "probe" and not r["name"]) or (r.event == "refused" and r["stage"] == "probe"))
            and coupling_of(r["config"]) == wanted
        ]

    def time_s(self, left_s: float) -> float:
        """Returns what a probe may take where a sweep has so many seconds left: `probe_time_s`, or down to half."""
        whole_s = self._budget.probe_time_s
        return min(whole_s, max(whole_s / 2, left_s / A_SWEEP))

    def _measure(self, knobs: dict[str, Scalar], time_s: float, name: str | None = None) -> Record:
        size = int(knobs.get("batch_size", self._batch_size))
        rivals = [] if name else [rate for p in self._rivals(knobs) if (rate := p.at_batch_size(size)) is not None]
        p_oom = self._judged(knobs).p_oom
        found = self._profiler.probe(knobs, time_s, self._budget.spread_frac, max(rivals, default=0.0))
        record = self._journal.append("probe", name=name, config=knobs, p_oom=p_oom, **found)
        learn(self._guard, knobs, str(found["outcome"]), int(found.get("peak_allocated_bytes") or 0))
        return record

    def _fitting(self, knobs: dict[str, Scalar]) -> dict[str, Scalar]:
        """Returns the knobs at a batch of one micro-step where the space has it and a trial would fit only as that."""
        micro_batch, given = micro_batch_of(knobs), self._space.given("batch_size")
        alone = {**knobs, "batch_size": micro_batch}
        has_it = micro_batch in given if isinstance(given, Range) else micro_batch in _values(self._space, "batch_size")
        if not has_it or fits(self._guard, knobs):
            return knobs
        return alone if self._judged(alone).fits else knobs

    def _fits_alone(self, record: Record) -> bool:
        """Returns whether a probe ran out of memory that is to be made again as a batch of one micro-step."""
        return bool(record.get("outcome") == "oom" and self._fitting(record["config"]) != record["config"])

    def _judged(self, knobs: Mapping[str, Scalar]) -> FitVerdict:
        return self._guard.judge(*need_of(knobs), costs=PROBE_COSTS)

    def _refuse(self, knobs: dict[str, Scalar]) -> Record | None:
        verdict = self._judged(knobs)
        if verdict.fits:
            return None
        return self._journal.append(
            "refused",
            config=knobs,
            predicted_bytes=verdict.predicted_bytes,
            cap_bytes=self._guard.cap_bytes,
            p_oom=verdict.p_oom,
            reason=verdict.reason,
            stage="probe",
        )

    def _rivals(self, knobs: Mapping[str, Scalar]) -> list[Probed]:
        return [p for p in probed(self._journal.records) if coupling_of(p.knobs) == coupling_of(knobs)]

    def _incumbent(self, coupling: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns the best so far under this coupling, else of earlier runs, else under any, else the defaults."""
        here = {**self._space.fixed, **coupling}
        before = (p for p in self._earlier if coupling_of(p.knobs) == coupling_of(here))
        best = self._best(coupling) or next(before, None) or self._best(None)
        base = defaults(self._space) if best is None else dict(best.knobs)
        system = {n: v for n, v in base.items() if n in SYSTEM}
        return self._clipped({**here, **system})

    def _start(self, coupling: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns where a sweep starts that knows of no earlier run; where it does know of none, what it began with."""
        if not self._earlier:
            return self._clipped(dict(self._under(coupling)[0]["config"]))
        system = {n: v for n, v in defaults(self._space).items() if n in SYSTEM}
        return self._clipped({**self._space.fixed, **coupling, **system})

    def _best(self, coupling: Mapping[str, Scalar] | None) -> Probed | None:
        """Returns the fastest probe inside the space, under the coupling or, for None, under any.

        What fits only as a whole batch serves that batch size alone, and is the best only where nothing else fits.
        """
        found = [p for p in probed(self._journal.records) if inside(self._space, p)]
        if coupling is not None:
            here = coupling_of({**self._space.fixed, **coupling})
            found = [p for p in found if coupling_of(p.knobs) == here]
        found = [p for p in found if p.knobs.get("batch_size") == self._batch_size] or found
        return max(found, key=lambda p: p.samples_per_s, default=None)

    def _clipped(self, knobs: dict[str, Scalar]) -> dict[str, Scalar]:
        knobs = {"learning_rate": Knobs().learning_rate, **knobs, "batch_size": self._batch_size}
        return {n: v for n, v in knobs.items() if is_active(n, knobs)}


def _without(space: Space, held: Mapping[str, Scalar | None]) -> Space:
    """Returns the space with the held knobs at their values; None is that of a knob without effect."""
    searched = {n: p for n, p in space.parameters.items() if n not in held}
    return Space(searched, {**space.fixed, **{n: v for n, v in held.items() if v is not None}})


def _only(space: Space, knobs: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {n: knobs[n] for n in space.parameters if n in knobs}


def speed_couplings(space: Space) -> list[dict[str, Scalar]]:
    """Returns every combination of the searched "both" knobs."""
    names = [n for n in COUPLING if isinstance(space.parameters.get(n), Choice)]
    values = [p.values for n in names if isinstance(p := space.parameters[n], Choice)]
    return [dict(zip(names, combination, strict=True)) for combination in itertools.product(*values)]


def reference_batch_size(space: Space) -> int:
    """Returns the batch size probes run at: the middle of the space's, but no less than its largest micro-batch."""
    batch = _values(space, "batch_size")
    return max(batch[len(batch) // 2], min(max(_values(space, "micro_batch_size")), max(batch)))


def _values(space: Space, name: str) -> list[int]:
    parameter = space.parameters.get(name, space.fixed.get(name, Knobs().as_dict()[name]))
    if isinstance(parameter, Choice):
        return sorted(int(v) for v in parameter.values)
    if isinstance(parameter, Range):
        return [int(parameter.low), round(math.sqrt(parameter.low * parameter.high)), int(parameter.high)]
    return [int(parameter)]
