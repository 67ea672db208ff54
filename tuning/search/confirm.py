"""Stage 4: who may be the answer is trained again beside the reference, on fresh seeds; then windows taken in turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainables.knobs import KnobTable, Scalar
from tuning.config.schema import ConfirmSection
from tuning.config.space import Space
from tuning.journal.events import Config, ConfirmedRecord, NoteRecord, Trained, WindowRecord, known_fields
from tuning.journal.records import Journal
from tuning.journal.run import History
from tuning.memory.groups import batch_size_of
from tuning.memory.oom import Outcome
from tuning.search.proposals import FASTER, Known, Proposals, Seen
from tuning.search.protocols import Profiler, Told
from tuning.search.race import LEAST_SEEDS, SYSTEM, Finalist, Race
from tuning.search.rule import Expected, Rule
from tuning.search.side_by_side import gain, is_as_fast
from tuning.search.slowing import slowing
from tuning.search.throughput import PROBES_DIFFER, Speeds, probed
from tuning.search.timing import SETTLE_S

SHARE = 0.3
"""The least that is kept for confirming of `search.max_time`; it has what the search leaves."""
WINDOW_COST_S = 1.5
"""About what a window costs beside its own length: the first step, and starting workers."""
START_S = 8.0
"""About what a fresh process takes to load torch, data and model: 5 to 9 s for the built-in workloads on 2 cores."""
LEAST_ROUNDS = 3
"""Rounds of windows that are kept time for before anything is trained: below, an interval of gains says nothing."""
TURNS = 4
"""Configurations that take turns as a rule: the pick, one nearly as fast or with old system knobs, the reference."""
LEAST_WINDOW_S = 0.3
"""Windows are no shorter than this, however little time there is; then there are fewer rounds."""
WINDOW_STEPS = 3
"""The fewest optimiser steps that a window takes, the two that are dropped included (`workers.session`)."""
MORE = 1.15
"""A training's seconds over those of its samples alone: evaluation and set-up."""
POINTS = 8
"""Evaluations of a training that is confirmed, from which the time to today's quality is read."""
EVALUATE_FRAC = 0.25
"""The share of a training's seconds that these evaluations may take: slow ones are fewer."""
NEARLY = 0.9
"""A configuration of this share of the pick's speed may be the faster one in turns."""
AS_FAST = 0.97
"""Two speeds in turns that are closer are equal: the better of the two is taken."""
OLD_SYSTEM = " with the reference's system knobs"
"""Added to the name of a trial that is measured with the system knobs of the reference."""
EARLIER_SYSTEM = " with today's system knobs"
"""The same in runs of before 30 November 2026."""


@dataclass(frozen=True)
class ConfirmTerms:
    """By what is confirmed: rule, fresh seeds, budget, samples of a training, and the seconds left for it.

    `reference` is what is trained today, as it stands, and `system` the same with the fastest system knobs, None if it
    has them. `space` has the searched knobs; `per_s` says how fast a configuration is expected to train, 0 if unknown.
    """

    rule: Rule
    seeds: Sequence[int]
    budget: ConfirmSection
    samples: int
    left_s: Callable[[], float]
    reference_name: str
    reference: Mapping[str, Scalar]
    system: Mapping[str, Scalar] | None
    space: Space
    per_s: Callable[[Mapping[str, Scalar]], float]


@dataclass(frozen=True)
class Confirmed:
    """The answer: its name (a trial, `SYSTEM`, or the reference's), the configuration to export, and the two others.

    `best_at_speed` is the best quality that is no slower than the reference, `most_accurate` the best of all; None if
    nothing was trained again, or it is the pick. `race` is what was known at the end.
    """

    name: str
    config: Mapping[str, Scalar]
    best_at_speed: str | None
    most_accurate: str | None
    race: Race


def train_again(profiler: Profiler, journal: Journal, terms: ConfirmTerms, told: Told) -> Race:
    """Returns the race after finalists and reference were trained on the same few fresh seeds, as a search goes on."""
    return _Trainings(profiler, journal, terms, told, reserve_s=0.0).run(LEAST_SEEDS)


def train_reference(profiler: Profiler, journal: Journal, terms: ConfirmTerms, told: Told, most_seeds: int) -> None:
    """Trains the reference on so many fresh seeds, before anything is compared with it: one seed of it misleads."""
    _Trainings(profiler, journal, terms, told, reserve_s=0.0).train_reference(most_seeds)


def confirm(
    profiler: Profiler, journal: Journal, named: Mapping[str, Mapping[str, Scalar]], terms: ConfirmTerms, told: Told
) -> Confirmed:
    """Returns the answer, measured beside the reference and the `named`.

    Finalists and reference are trained seed by seed on the same seeds until the pick is settled or the time is over;
    then the fastest that the rule admits is whoever was in windows taken in turns. Nothing that the
    records hold is trained or measured again.
    """
    reserve_s = windows_reserve_s(terms.left_s(), terms.budget, window_cost_s(journal.run))
    trainings = _Trainings(profiler, journal, terms, told, reserve_s)
    race = trainings.run(len(terms.seeds))
    configs = {t.trial: dict(t.config) for t in journal.run.ended}
    configs |= {SYSTEM: dict(terms.system or {}), terms.reference_name: dict(terms.reference)}
    admitted, is_speed = race.admitted, terms.rule.goal == "speed"
    at_speed, accurate = race.best_quality(race.reference_per_s / FASTER), race.best_quality()
    entrants = _entrants(race, configs, terms, journal.run.table)
    beside = {name: configs[name] for name in dict.fromkeys([at_speed, accurate]) if name and admitted[:1] != [name]}
    turns = {**entrants, terms.reference_name: configs[terms.reference_name]}
    others: dict[str, Mapping[str, Scalar]] = {**named, **beside}
    turns |= {name: dict(knobs) for name, knobs in others.items() if dict(knobs) not in turns.values()}
    # The last of them are left out if there is no time for a few short rounds of all.
    each_s = LEAST_ROUNDS * (LEAST_WINDOW_S + window_cost_s(journal.run))
    count = max(len(entrants) + 1, int(min(terms.left_s() / each_s, 100)))
    turns = dict(list(turns.items())[:count])
    if len(turns) > 1:
        measure_windows(profiler, journal, turns, terms.budget, told, terms.left_s)
    best = _fastest(journal.run, entrants, terms.reference, race) if is_speed else next(iter(entrants), "")
    name = best.removesuffix(OLD_SYSTEM) or terms.reference_name
    config = entrants.get(best, configs[terms.reference_name])
    at_speed, accurate = (None if other == name else other for other in (at_speed, accurate))
    return Confirmed(name, config, at_speed, accurate, race)


def _entrants(
    race: Race, configs: Mapping[str, dict[str, Scalar]], terms: ConfirmTerms, table: KnobTable
) -> dict[str, dict[str, Scalar]]:
    """Returns who may be the answer, by name: those admitted that are nearly as fast as the first, the first with
    the system knobs of today, and the reference with the fastest system knobs.
    """
    admitted = race.admitted
    system = {SYSTEM: configs[SYSTEM]} if terms.system is not None and race.allows_system(SYSTEM) else {}
    if not admitted:
        return system
    first = race.per_s(admitted[0])
    chosen = [name for name in admitted[:3] if race.per_s(name) >= NEARLY * first]
    found = {name: configs[name] for name in (chosen if terms.rule.goal == "speed" else admitted[:1])}
    # The micro-batch is that of its batch, and today's need not be.
    old = {n: v for n, v in terms.reference.items() if n in table.system and n != "micro_batch_size"}
    of_today = {**configs[admitted[0]], **old}
    of_today = {n: v for n, v in of_today.items() if table.is_active(n, of_today)}
    if all(table.whole(own) != table.whole(of_today) for own in found.values()):
        found[admitted[0] + OLD_SYSTEM] = of_today
    is_near = race.per_s(SYSTEM) * PROBES_DIFFER >= first  # by probes alone
    return found | (system if is_near and terms.rule.goal == "speed" else {})


def _fastest(run: History, entrants: Mapping[str, Mapping[str, Scalar]], reference: Config, race: Race) -> str:
    """Returns the fastest of the entrants beside the reference, the first if nothing is known; "" if that is faster.

    If several are equally fast, it is the one with the best expected quality, as it was trained. If trainings slow
    down, faster system knobs count only with a whole training: short timings see its beginning alone.
    """
    gains = {name: gain(run, name, "", own, reference) for name, own in entrants.items()}
    times = {name: own.ratio for name, own in gains.items() if own is not None}
    if not times:
        return "" if SYSTEM in entrants and slowing(run) else next(iter(entrants), "")
    equals = {n: [t for o, t in times.items() if is_as_fast(entrants[n], entrants[o], run.table)] for n in times}
    times = {name: statistics.geometric_mean(own) for name, own in equals.items()}
    fastest = max(times.values())
    alike = [name for name in times if times[name] >= AS_FAST * fastest]
    own = {name: name.removesuffix(OLD_SYSTEM) for name in alike}  # of which the trainings are
    best = max(alike, key=lambda name: (race.expected(own[name]).gain, own[name] == name, times[name]))
    return best if times[best] >= 1.0 else ""


class _Trainings:
    """The trainings on fresh seeds: of the finalists and of the reference; each is a record `confirmed`."""

    def __init__(self, profiler: Profiler, journal: Journal, terms: ConfirmTerms, told: Told, reserve_s: float) -> None:
        """`reserve_s` are the seconds that are left for windows."""
        self._profiler, self._journal, self._terms, self._told = profiler, journal, terms, told
        self._search = [t for t in journal.run.searched if t.outcome == Outcome.OK and t.samples_per_s]
        self._configs: dict[str, Mapping[str, Scalar]] = {t.trial: t.config for t in self._search}
        if terms.system is not None:
            self._configs[SYSTEM] = terms.system
        self._expected, self._noise = self._by_model()
        self._reserve_s = reserve_s
        trained = journal.run.reference
        self._reference_per_s = terms.per_s(terms.reference) or (trained and trained.samples_per_s) or 0.0

    def _by_model(self) -> tuple[dict[str, Expected], float]:
        """Returns what the search's trainings let expect of each finalist, and the noise between seeds.

        The reference's quality is the mean of its trainings in the search and before it: later ones count as pairs.
        """
        rule, names, name = self._terms.rule, self._terms.space.parameters, self._terms.reference_name
        run = self._journal.run
        values = {t.trial: t.values.get(rule.objective) for t in self._search}
        begun = min((trial.starts[0].seq for trial in run.begun), default=0)
        again = [r for r in run.confirmed if r.name == name and r.seq < begun and r.is_ok]
        todays = [r.values.get(rule.objective) for r in again]
        todays += [] if run.reference is None else [run.reference.values.get(rule.objective)]
        known_todays = [value for value in todays if value is not None]
        known_todays = known_todays or [value for value in values.values() if value is not None][:1]
        if not known_todays or not self._search:
            return {}, 0.0
        floor = statistics.fmean(known_todays)
        rows = [{n: v for n, v in t.config.items() if n in names} for t in self._search]
        seen = [
            Seen(row, float(t.samples_per_s or 0.0), None if (v := values[t.trial]) is None else rule.gain(v, floor))
            for row, t in zip(rows, self._search, strict=True)
        ]
        reference = {n: v for n, v in self._terms.reference.items() if n in names}
        known = Known(reference, 1.0, seen, rule, [rule.gain(value, floor) for value in known_todays])
        model = Proposals(self._terms.space)
        expected = dict(zip((t.trial for t in self._search), model.expected(rows, known), strict=True))
        return expected, model.noise(known)

    def run(self, most_seeds: int) -> Race:
        """Trains in rounds until the pick is settled, so many seeds are used, or the time is; returns what is known."""
        terms = self._terms
        while True:
            race = self.race()
            wanted = [*race.next_round(terms.budget.top, most_seeds), *self._for_quality(race)]
            is_trained = sum([self._train_next(name) for name in dict.fromkeys(wanted)])
            if not is_trained and terms.system is not None and not race.admitted and not race.is_settled(SYSTEM):
                is_trained = self._train_next(SYSTEM)
            if not is_trained:
                return self.race()

    def train_reference(self, most_seeds: int) -> None:
        """Trains the reference on so many fresh seeds; on no other once one training has failed or was cut."""
        name = self._terms.reference_name
        ended = [r for r in self._journal.run.confirmed if r.name == name]
        for seed in self._terms.seeds[:most_seeds]:
            if not all(r.is_ok for r in ended):
                return
            if all(r.seed != seed for r in ended):
                ended.append(self._train(name, self._terms.reference, seed, self._terms.left_s()))

    def _for_quality(self, race: Race) -> list[str]:
        """Returns the configuration of the best quality at no less than today's speed, while it lacks seeds.

        It is chosen by the search alone: by what is seen since, another would be expected to be best after each seed.
        """
        names = [t.trial for t in self._search if race.has(t.trial)]
        able = [name for name in names if race.per_s(name) >= self._reference_per_s / FASTER]
        nothing = Expected(-math.inf, 0.0)
        best = max(able, key=lambda name: self._expected.get(name, nothing).gain, default=None)
        return [best] if best is not None and not race.is_settled(best) else []

    def race(self) -> Race:
        """Returns the race as the records have it."""
        rule, reference = self._terms.rule, self._terms.reference_name
        ended = [r for r in self._journal.run.confirmed if r.seed in self._terms.seeds]
        tried = [r for r in ended if r.outcome != Outcome.CUT]
        quality: dict[str, dict[int, float]] = {}
        speed: dict[str, dict[int, float]] = {}
        for record in tried:
            value = record.values.get(rule.objective)
            if record.is_ok and value is not None:
                quality.setdefault(record.name, {})[record.seed] = value
                speed.setdefault(record.name, {})[record.seed] = record.samples_per_s or 0.0
        today, today_per_s = quality.get(reference, {}), speed.get(reference, {})
        searched, finalists = {t.trial: t.samples_per_s or 0.0 for t in self._search}, []
        for name, config in self._configs.items():
            own = quality.get(name, {})
            ratios = [
                rate / today_per_s[seed]
                for other, knobs in self._configs.items()
                if is_as_fast(config, knobs, self._journal.run.table)  # else the luckiest of equals is the fastest
                for seed, rate in speed.get(other, {}).items()
                if rate and today_per_s.get(seed)
            ] or self._whole_ratios(name)
            per_s = self._terms.per_s(config) or searched.get(name, 0.0)
            per_s = self._reference_per_s * statistics.geometric_mean(ratios) if ratios else per_s
            fresh = own if rule.at_least is not None else own.keys() & today.keys()
            gains = {n: rule.gain(own[n], today.get(n, 0.0)) for n in sorted(fresh)}
            expected = self._expected.get(name, Expected(0.0, self._noise))
            failed = any(r.name == name and not r.is_ok for r in tried)
            finalists.append(Finalist(name, per_s, expected, gains, own, failed))
        return Race(finalists, self._reference_per_s, rule, self._noise, today)

    def _whole_ratios(self, name: str) -> list[float]:
        """Returns the speed of a trial's whole training over the reference's, if probes saw only quick beginnings."""
        run = self._journal.run
        today = 0.0 if run.reference is None else run.reference.measured_samples_per_s or 0.0
        own = [t.measured_samples_per_s for t in self._search if t.trial == name and t.measured_samples_per_s]
        return [rate / today for rate in own] if today and slowing(run) else []

    def _train_next(self, name: str) -> bool:
        """Trains a finalist on its next seed, and the reference on the same; returns whether anything was trained."""
        reference, run = self._terms.reference_name, self._journal.run
        # What was cut before the study got more time is made up for.
        ended = [r for r in run.confirmed if r.outcome != Outcome.CUT or r.seq >= run.since()]
        tried = {(r.name, r.seed) for r in ended}
        wanted = {name: self._configs[name]}
        if self._terms.rule.at_least is None:
            wanted[reference] = self._terms.reference
        lacking = {seed: [one for one in wanted if (one, seed) not in tried] for seed in self._terms.seeds}
        seed = next((seed for seed, names in lacking.items() if names), None)
        if seed is None:
            return False
        todo = {one: wanted[one] for one in lacking[seed]}
        left_s = self._terms.left_s() - self._reserve_s
        costs_s = {one: self._training_s(knobs) for one, knobs in todo.items()}
        if sum(costs_s.values()) > left_s:
            if any(who != reference for who, _ in tried) or costs_s.get(name, math.inf) > left_s:
                return False
            todo = {name: wanted[name]}  # without a pair it has no gain, and its own quality is shown
        for one, knobs in todo.items():
            self._train(one, knobs, seed, self._terms.left_s() - self._reserve_s)
        return True

    def _training_s(self, knobs: Mapping[str, Scalar]) -> float:
        per_s = self._terms.per_s(knobs) or self._reference_per_s
        return start_s(self._journal.run) + MORE * self._terms.samples / per_s if per_s else 0.0

    def _train(self, name: str, knobs: Mapping[str, Scalar], seed: int, left_s: float) -> ConfirmedRecord:
        journal, samples = self._journal, self._terms.samples
        found = self._profiler.train(knobs, samples, self._milestones(), seed, left_s)
        config, measured = dict(found.knobs or knobs), known_fields(found, Trained)
        measured |= {"values": found.values, "curve": found.curve, "samples_per_s": found.measured_samples_per_s}
        again = journal.append(ConfirmedRecord, name=name, config=config, seed=seed, **measured)
        self._told(again)
        return again

    def _milestones(self) -> tuple[int, ...]:
        """Returns after how many samples a training is evaluated, the last its end."""
        samples, run = self._terms.samples, self._journal.run
        costs = [
            end.evaluate_s / max(1e-9, end.train_s) / (1 + len(run.trials[end.trial].rungs))
            for end in run.ended
            if end.outcome == Outcome.OK and end.train_s and end.evaluate_s
        ]
        points = POINTS if not costs else max(1, min(POINTS, int(EVALUATE_FRAC / max(1e-9, statistics.median(costs)))))
        return tuple(dict.fromkeys(max(1, round(samples * n / points)) for n in range(1, points + 1)))


def windows_s(budget: ConfirmSection, configurations: int, cost_s: float = WINDOW_COST_S) -> float:
    """Returns about how long the windows of so many configurations take; `cost_s` is of one beside its own length."""
    return budget.windows * configurations * (budget.window_s + cost_s)


def windows_reserve_s(left_s: float, budget: ConfirmSection, cost_s: float) -> float:
    """Returns the seconds that are kept for windows before anything is trained: `LEAST_ROUNDS` of `TURNS` whole ones,
    in a third of the time at most; at least those of two that are as short as they may be.
    """
    whole_s, short_s = (n * LEAST_ROUNDS * (s + cost_s) for n, s in ((TURNS, budget.window_s), (2, LEAST_WINDOW_S)))
    return min(whole_s, max(short_s, left_s / 3)) if budget.windows else 0.0


def rounds(run: History, budget: ConfirmSection) -> int:
    """Returns how many rounds of windows are measured: none of a command, whose start costs more than they tell."""
    return 0 if run.study is not None and run.study.program else budget.windows


def start_s(run: History) -> float:
    """Returns what a training costs beside its steps, if each is a process of its own; else 0."""
    return _started_s(run) or 0.0 if run.study is not None and run.study.program else 0.0


def window_cost_s(run: History) -> float:
    """Returns what a window costs beside its own length, by what the probes have taken beside theirs."""
    cost_s = _started_s(run)
    return WINDOW_COST_S if cost_s is None else SETTLE_S + cost_s


def _started_s(run: History) -> float | None:
    ended = [probe for probe in run.probes if probe.outcome == Outcome.OK and probe.spans and probe.wall_s]
    costs = [probe.wall_s - float(probe.spans["wall_s"]) for probe in ended]
    return statistics.fmean(costs) if costs else None


def measure_windows(
    profiler: Profiler,
    journal: Journal,
    named: Mapping[str, Mapping[str, Scalar]],
    budget: ConfirmSection,
    told: Told,
    left_s: Callable[[], float],
) -> None:
    """Measures up to `budget.windows` rounds; in each every configuration has one window, on the same batches.

    The order turns from round to round, so that a machine that slows down does so for all of them. Windows are as short
    as `LEAST_ROUNDS` of them need in the seconds that `left_s` returns, and no round is begun that cannot be ended; who
    is too slow for it is left out with a note.
    """
    have, names = _missing(journal.run.windows, named, budget)
    if names:  # together with those of today alone
        today = [window for window in journal.run.windows if window.seq >= journal.run.since()]
        have, names = _missing(today, named, budget)
    if not names or left_s() < len(names) * LEAST_WINDOW_S:
        return
    costs_s = _warmed(profiler, journal, {name: named[name] for name in names}, budget.windows, left_s, told)
    if not (names := list(costs_s)):
        return
    cost_s = SETTLE_S + statistics.fmean(costs_s.values())
    window_s = min(budget.window_s, max(LEAST_WINDOW_S, left_s() / (LEAST_ROUNDS * len(names)) - cost_s))
    round_s = len(names) * (window_s + cost_s)
    for number in range(budget.windows):
        if left_s() < round_s:
            break
        turn, took_s = number % len(names), 0.0
        for name in names[turn:] + names[:turn]:
            if (name, number) not in have:
                found = profiler.window(named[name], window_s, seed=number)
                took_s += found.wall_s
                config, measured = dict(named[name]), known_fields(found)
                told(journal.append(WindowRecord, name=name, round=number, config=config, **measured))
        round_s = took_s or round_s


def _warmed(
    profiler: Profiler,
    journal: Journal,
    named: Mapping[str, Mapping[str, Scalar]],
    seed: int,
    left_s: Callable[[], float],
    told: Told,
) -> dict[str, float]:
    """Returns the seconds of one window of each that is not measured, beside the window's own length.

    The first window after another configuration is slow, and is not counted. Left out with a note is who fails, and
    who would, by its probe, not come to `LEAST_ROUNDS`, or leave no time for a round of those before it.
    """
    run, costs_s = journal.run, dict[str, float]()
    speeds = Speeds(probed(run.probes, run.table), run.table)
    for name, knobs in named.items():
        rate = speeds.of(knobs)
        least_s = WINDOW_STEPS * batch_size_of(knobs) / rate if rate else 0.0
        if left_s() < max((1 + LEAST_ROUNDS) * least_s, least_s + sum(costs_s.values())):
            text = f"too little time is left for alternating timings of {name}"
            told(journal.append(NoteRecord, text=f"{text}: a larger search.max_time has it"))
            continue
        found = profiler.window(knobs, 0.0, seed=seed)
        if found.outcome != Outcome.OK:
            said = found.message.partition("\n")[0][:160]
            text = f"there are no alternating timings of {name}: {found.outcome}{f': {said}' * bool(said)}"
            told(journal.append(NoteRecord, text=text))
            continue
        costs_s[name] = found.wall_s
    return costs_s


def _missing(
    known: Sequence[WindowRecord], named: Mapping[str, Mapping[str, Scalar]], budget: ConfirmSection
) -> tuple[set[tuple[str, int]], list[str]]:
    """Returns the windows there are, by name and round, and the names that lack some."""
    have = {(window.name, window.round) for window in known if window.config == dict(named.get(window.name, {}))}
    return have, [name for name in named if any((name, number) not in have for number in range(budget.windows))]
