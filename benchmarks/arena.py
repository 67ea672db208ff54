"""What every simulated search over a table gets, and the ways of searching: ours, TPE with constraints, random."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.moasha import Halving
from benchmarks.record_table import design
from benchmarks.sim.recorded import Table
from benchmarks.sim.replay import seconds
from benchmarks.sim.simulator import SimulatedExecutor, SimulatedProfiler, VirtualClock, VirtualJournal, samples_per_s
from trainables.knobs import Scalar
from tuning.config.schema import ProbeSection
from tuning.config.space import Space
from tuning.journal.records import Record, read
from tuning.memory.groups import guard, micro_batch_of
from tuning.memory.measure import MemoryStage
from tuning.search.probe import ProbeStage
from tuning.search.protocols import TrialPlan, TrialRequest
from tuning.search.pruner import milestones
from tuning.search.sampler import Observation, Sampler
from tuning.search.scheduler import SearchTerms, TrialScheduler
from tuning.stats.pareto import hypervolume_2d

ETA, FIRST_FRAC = 2, 0.25
TRAININGS = 40
"""The budget: so many whole trainings at the table's median speed."""
PROBE_FRAC = 0.15
"""What of it the probes may take, at 1 s each."""
FITS_FRAC = 2 / 3


@dataclass(frozen=True)
class Arena:
    """A table and what every search over it gets: a cap in bytes, virtual seconds, and the corners of a front."""

    name: str
    table: Table
    cap_bytes: int
    budget_s: float
    fastest: float
    worst: float
    span: float

    @property
    def objective(self) -> str:
        """The quality."""
        return next(iter(self.table.objectives))

    def point(self, knobs: Mapping[str, Scalar]) -> tuple[float, float]:
        """Returns speed and quality of a whole training as a front has them: both to be minimised, 0 is the worst."""
        quality = self.table.values(knobs, self.table.horizon, 0)[self.objective]
        return -samples_per_s(self.table, knobs) / self.fastest, -abs(quality - self.worst) / self.span

    def volume(self, points: Sequence[tuple[float, float]]) -> float:
        """Returns the hypervolume."""
        return hypervolume_2d(np.array(points).reshape(-1, 2), (0.0, 0.0))


def arena(path: Path) -> Arena:
    """Returns the arena of a table; cap and corners come from 400 configurations drawn from its space."""
    table = Table(read(path)[0])
    drawn = design(table.space, 400, 0)
    peaks = sorted(table.peak_bytes(k, micro_batch_of(k)) for k in drawn)
    speeds = [samples_per_s(table, k) for k in drawn]
    objective, mode = next(iter(table.objectives.items()))
    qualities = [table.values(k, table.horizon, 0)[objective] for k in drawn]
    worst, best = (max(qualities), min(qualities)) if mode == "min" else (min(qualities), max(qualities))
    budget_s = TRAININGS * table.horizon / statistics.median(speeds)
    cap_bytes = peaks[int(FITS_FRAC * len(peaks))]
    return Arena(path.stem, table, cap_bytes, budget_s, max(speeds), worst, abs(best - worst))


@dataclass
class Found:
    """What a search came to: (virtual seconds, speed, quality) of each whole training, and what it lost."""

    ends: list[tuple[float, float, float]]
    ooms: int
    trials: int
    proposed_s: float = 0.0

    def curve(self, own: Arena) -> list[tuple[float, float]]:
        """Returns the hypervolume after each whole training, with its moment."""
        points: list[tuple[float, float]] = []
        found: list[tuple[float, float]] = []
        for moment_s, speed, quality in sorted(self.ends):
            points.append((speed, quality))
            found.append((moment_s, own.volume(points)))
        return found

    def final(self, own: Arena, until_s: float = float("inf")) -> float:
        """Returns the hypervolume at a moment."""
        return max((v for at, v in self.curve(own) if at <= until_s), default=0.0)

    def reaches(self, own: Arena, volume: float) -> float | None:
        """Returns the moment at which a hypervolume is reached, None where it never is."""
        return next((at for at, v in self.curve(own) if v >= volume), None)


def orders(table: Table, *, shrink: bool) -> TrialPlan:
    """Returns one trial at a time on a device, judged at a quarter and half of the horizon."""
    first = max(1, round(table.horizon * FIRST_FRAC))
    steps = (*milestones(first, table.horizon, ETA), table.horizon)
    return TrialPlan(table.horizon, steps, shrink, concurrency=1, threads=1)


Mislead = Callable[[Sampler, Space], Sampler]


def ours(
    own: Arena,
    strategy: Any,
    seed: int,
    *,
    trials: int = 10_000,
    times: float | None = 1.0,
    devices: int = 1,
    mislead: Mislead | None = None,
    reused: Mapping[str, Any] | None = None,
) -> tuple[Found, VirtualJournal, SimulatedExecutor]:
    """Returns what our scheduler finds in so many budgets of virtual time, None for as long as its trials take.

    `mislead` changes its sampler, `reused` is what an earlier run is said to have found (`search.reuse`).
    """
    clock, table = VirtualClock(), own.table
    journal = VirtualJournal(clock)
    profiler = SimulatedProfiler(table, clock, own.cap_bytes)
    journal.append("study", card={"cap_bytes": own.cap_bytes}, device={"type": "cpu"}, objectives=table.objectives)
    MemoryStage(profiler, table.space, journal, own.cap_bytes, clock=clock).run()
    learned = guard(journal.records, own.cap_bytes)
    if reused is not None:
        journal.append("reused", **reused)
    if strategy == "staged":
        section = ProbeSection(
            max_time_s=(times or 1.0) * PROBE_FRAC * own.budget_s, probe_time_s=1.0, spread_frac=0.03
        )
        ProbeStage(profiler, table.space, journal, learned, section, seed, clock).run({}, lambda r: None)
    deadline = None if times is None else times * own.budget_s
    terms = SearchTerms(strategy, trials, deadline, seed, ETA, table.objectives, clock=clock)
    told = orders(table, shrink=strategy == "staged")
    scheduler = TrialScheduler(journal, table.space, learned, terms, told, lambda r: None)
    if mislead is not None:
        scheduler._sampler = mislead(scheduler._sampler, table.space)
    executor = SimulatedExecutor(table, clock, devices=devices, cap_bytes=own.cap_bytes)
    executor.run(scheduler, told)
    return found_in(own, journal.records), journal, executor


def found_in(own: Arena, records: Sequence[Record]) -> Found:
    """Returns what the records of a simulated search came to."""
    ended = [r for r in records if r.event == "trial"]
    whole = [(seconds(r), *own.point(r["config"])) for r in ended if r["outcome"] == "ok"]
    # A quality that was trained with other system knobs, at the speed of those that it would be exported with.
    whole += [(seconds(r), *own.point(r["config"])) for r in records if r.event == "rated"]
    ooms = sum(r.event == "oom" or (r.event == "trial" and r["outcome"] == "oom") for r in records)
    return Found(whole, ooms, len(ended))


class Peer:
    """A scheduler of one flat space without probes and guard: TPE and random draws train each proposal to its end.

    `moasha` draws at random too, and stops at our own rungs what Syne Tune's MOASHA stops.
    """

    def __init__(self, own: Arena, seed: int, clock: VirtualClock, kind: str) -> None:
        self._own, self._clock, self._kind, self.found = own, clock, kind, Found([], 0, 0)
        objectives = {"samples_per_s": "max", **own.table.objectives}
        self._sampler = Sampler(own.table.space, objectives, seed)
        self._drawn: Iterator[dict[str, Scalar]] = self._random(np.random.default_rng(seed))
        self._numbers: dict[str, int] = {}
        first, *_ = orders(own.table, shrink=False).milestones
        self._halving = Halving(objectives, first, own.table.horizon, ETA) if kind == "moasha" else None
        self._stopped: set[str] = set()

    def _random(self, draw: np.random.Generator) -> Iterator[dict[str, Scalar]]:
        while True:
            yield design(self._own.table.space, 1, int(draw.integers(2**31)))[0]

    def next_trial(self) -> TrialRequest | None:
        """Returns the next trial until the time is up."""
        if self._clock() >= self._own.budget_s:
            return None
        name = f"t{self.found.trials:03d}"
        self.found.trials += 1
        if self._kind != "tpe":
            return TrialRequest(name, next(self._drawn), 0)
        proposal = self._sampler.suggest()
        if proposal is None:
            return None
        self._numbers[name] = proposal.number
        return TrialRequest(name, self._own.table.space.complete(proposal.values), 0)

    def at_rung(self, trial: str, result: Mapping[str, Any]) -> bool:
        """Stops what MOASHA stops."""
        values = {"samples_per_s": result["measured_samples_per_s"], **result["values"]}
        if self._halving is None or self._halving.goes_on(trial, int(result["samples"]), values):
            return True
        self._stopped.add(trial)
        return False

    def goes_on(self, trial: str, result: Mapping[str, Any]) -> bool:
        """Never takes back what it launched."""
        return True

    def ended(self, trial: str, result: Mapping[str, Any] | None) -> None:
        """Keeps what came, and tells TPE: an OOM as a constraint violated by what was over the cap."""
        assert result is not None  # noqa: S101  (no process is lost here)
        ok = result["outcome"] == "ok" and trial not in self._stopped
        self.found.ooms += result["outcome"] == "oom"
        if ok:
            self.found.ends.append((self._clock(), *self._own.point(result["knobs"])))
        if trial in self._numbers:
            values = {"samples_per_s": result["measured_samples_per_s"], **result["values"]}
            over = max(1, int(result["peak_allocated_bytes"]) - self._own.cap_bytes)
            self._sampler.observe(self._numbers.pop(trial), Observation(str(result["outcome"]), values, over))

    def decided(self, event: str, trial: str, reason: str) -> None:
        """Hears of nothing."""


def peer(own: Arena, kind: str, seed: int) -> Found:
    """Returns what a search without probes and guard finds in the budget; with rungs where it has a use for them."""
    clock = VirtualClock()
    scheduler = Peer(own, seed, clock, kind)
    told = orders(own.table, shrink=False)
    if kind != "moasha":
        told = dataclasses.replace(told, milestones=())
    SimulatedExecutor(own.table, clock, cap_bytes=own.cap_bytes).run(scheduler, told)
    return scheduler.found
