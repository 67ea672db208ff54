"""Stage 4: the pick and its challengers trained on fresh seeds, the rule put to them again; windows taken in turns."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from trainables.knobs import Knobs, Scalar
from tuning.config.schema import BEFORE, ConfirmSection
from tuning.journal.records import Journal, Record, Trial, reopened, trained_beside, trials, windows
from tuning.memory.oom import Outcome
from tuning.search.challengers import Entrant, Selection, challengers, settle
from tuning.search.protocols import Profiler, Told
from tuning.search.rule import Rule
from tuning.search.selection import choose
from tuning.search.throughput import Speeds, probed
from tuning.search.timing import SETTLE_S
from tuning.stats.uncertainty import Gain, gain

SHARE = 0.3
"""The most that confirming may take of `search.max_time`."""
WINDOW_COST_S = 1.5
"""About what a window costs beside its own length: the first step, and starting workers."""
START_S = 8.0
"""About what a fresh process takes to load torch, data and model: 5 to 9 s for the built-in workloads on 2 cores."""
LEAST_ROUNDS = 3
"""Rounds of windows that are kept time for before anything is trained: below, an interval of gains says nothing."""
LEAST_WINDOW_S = 0.3
"""Windows are no shorter than this, however little time there is; then there are fewer rounds."""
WINDOW_STEPS = 3
"""The fewest optimiser steps that a window takes, the two that are dropped included (`workers.session`)."""
SLOWER = 2.0
"""So many times what it is expected to take may a training of `before` take: the pick's further seeds come after it."""
MORE = 1.15
"""A training's seconds over those of its samples alone: evaluation and set-up."""


@dataclass(frozen=True)
class ConfirmTerms:
    """By what the pick is confirmed: rule, fresh seeds, budget, samples of a training, and the seconds left for it."""

    rule: Rule
    seeds: Sequence[int]
    budget: ConfirmSection
    samples: int
    left_s: Callable[[], float]


@dataclass(frozen=True)
class Confirmed:
    """The pick by one seed, the selection over it and its challengers, and the best.

    The selection is None where none of them came to the end again. `repeats` is False where the best came to much less
    on its fresh seeds than in the search.
    """

    first: str
    selection: Selection | None
    best: str
    repeats: bool = True


def confirm(
    profiler: Profiler, journal: Journal, named: Mapping[str, Mapping[str, Scalar]], terms: ConfirmTerms, told: Told
) -> Confirmed:
    """Returns the best of the pick and its challengers, measured beside the `named`.

    Where several are admitted by their means, the fastest is whoever was in windows taken in turns; who came to much
    less than in the search is in none while another is admitted. What the records hold is not trained or measured
    again. Raises ValueError where no trial came to its end.
    """
    first = _picked([r for r in journal.records if r.event != "confirmed"], terms)
    trainings = _Trainings(profiler, journal, named, terms, told)
    selection = trainings.selected(first)
    best = _picked(journal.records, terms) if selection is None else selection.best  # not one that failed
    configs = {t.id: dict(t.config) for t in trials(journal.records)}
    if selection is not None and len(selection.admitted) > 1:
        own = {trial: configs[trial] for trial in selection.admitted}
        measure_windows(profiler, journal, {**own, **named, **own}, terms.budget, told, terms.left_s)
        if own.keys() <= {r["name"] for r in windows(journal.records)}:  # else some are too slow for the time left
            best = max(own, key=lambda trial: median_rate(journal.records, trial) or 0.0)
        selection = selection.of(best, entrants(journal.records, terms))
    else:
        own = {"best": configs[best]}  # before the named, which may be slow
        measure_windows(profiler, journal, {**own, **named, **own}, terms.budget, told, terms.left_s)
    repeats = next((one.repeats(terms.rule) for one in entrants(journal.records, terms) if one.id == best), True)
    return Confirmed(first, selection, best, repeats)


class _Trainings:
    """The trainings on fresh seeds: of the pick, its challengers, and `before` of the `named`; each is a record."""

    def __init__(
        self,
        profiler: Profiler,
        journal: Journal,
        named: Mapping[str, Mapping[str, Scalar]],
        terms: ConfirmTerms,
        told: Told,
    ) -> None:
        self._profiler, self._journal, self._named, self._terms, self._told = profiler, journal, named, terms, told

    def selected(self, first: str) -> Selection | None:
        """Returns the selection over those that were trained again, None where none of them came to its end.

        `first` is the pick by the search's seed. Where the best of them fails, comes to much less than in the search,
        or is no better than the baseline, the next is trained as long as there is time, and one left that may take its
        place.
        """
        journal, terms = self._journal, self._terms
        tried: list[str] = []
        while True:
            found, selection = _settled(journal.records, terms)
            collapsed = [one.id for one in found.values() if not one.repeats(terms.rule)]
            picked = _picked(journal.records, terms, collapsed)
            own = found[picked]
            if picked in tried or not (
                selection is None or own.by_seed or terms.rule.admits(own.searched, selection.bar)
            ):
                return selection
            is_steady = selection is not None and found[selection.best].repeats(terms.rule)
            if picked != first and is_steady and own.searched >= terms.rule.baseline_cost:  # no better than it, either
                return selection
            if tried:
                why = _why_not(found.get(tried[-1]), terms.rule)
                self._told(journal.append("note", text=f"{tried[-1]} {why}: {picked} is next"))
            tried.append(picked)
            self._train(picked)
            found, selection = _settled(journal.records, terms)
            if (
                selection is not None
                and found[selection.best].repeats(terms.rule)
                and selection.means[selection.best] < terms.rule.baseline_cost
            ):
                return selection

    def _train(self, first: str) -> None:
        """Trains the first pick and its challengers on the fresh seeds, seed by seed; what has failed once is left.

        So is `before`, as the search trained it, as far as time is left: the two are compared on the same seeds
        (docs/log/confirming.md). Its first seed comes ahead of their last where no challenger is given up for it.
        """
        journal, terms = self._journal, self._terms
        found = {one.id: one for one in entrants(journal.records, terms) if one.repeats(terms.rule)}
        if first not in found or found[first].failed:  # and so has everybody else
            return
        chosen = challengers(list(found.values()), first, terms.rule, terms.budget.top)
        each_s = [MORE * terms.samples / found[trial].samples_per_s for trial in chosen]
        before = _trained_before(journal.records) if BEFORE in self._named else None
        before_s = MORE * terms.samples / float(before.samples_per_s or math.inf) if before is not None else 0.0
        left_s, cost_s = terms.left_s(), window_cost_s(journal.records)
        done = [len(found[trial].by_seed) for trial in chosen]
        reserve_s = 0.0
        count, seeds = affordable(left_s, terms.budget, len(self._named), each_s, cost_s, done)
        if before is not None and before.id not in chosen and _lacks(journal.records, BEFORE, terms.seeds[0]):
            less = affordable(left_s - before_s, terms.budget, len(self._named), each_s, cost_s, done)
            if less[0] == count and less[1]:
                seeds, reserve_s = less[1], before_s
        if before is not None and before.id in chosen[:count]:
            before = None  # it is trained as they are
        spare_s = left_s - reserve_s - windows_s(terms.budget, len(self._named) + 1, cost_s)
        for place, trial in enumerate(chosen[1:], start=1):
            decision = "confirm" if place < count else "too long"
            needed_s = [one_s * max(0, terms.budget.seeds - n) for one_s, n in zip(each_s, done, strict=True)]
            expected = {"expected_s": needed_s[place], "left_s": max(0.0, spare_s - sum(needed_s[:place]))}
            if needed_s[place] and not any(
                r.event == "rival" and (r["trial"], r["decision"]) == (trial, decision) for r in journal.records
            ):
                self._told(journal.append("rival", trial=trial, decision=decision, **expected))
        configs = {t.id: dict(t.config) for t in trials(journal.records)}
        least_s = least_windows_s(left_s, terms.budget, len(self._named) + 1, cost_s)
        needed = dict(zip(chosen, each_s, strict=True))
        for number, seed in enumerate(terms.seeds[:seeds]):
            left = [needed[trial] for trial in chosen[:count] if seed not in found[trial].by_seed]
            # A machine slower than expected leaves out a seed of all alike, after the first.
            if left and seed != terms.seeds[0] and terms.left_s() < sum(left) + least_s:
                break
            for trial in chosen[:count]:
                if _lacks(journal.records, trial, seed):
                    self._train_again(trial, configs[trial], seed, terms.left_s() - least_s)
            own = next(one for one in entrants(journal.records, terms) if one.id == first)
            if before is None or own.failed or not own.repeats(terms.rule) or not _lacks(journal.records, BEFORE, seed):
                continue
            others_s = (seeds - 1 - number) * sum(each_s[:count])
            until_s = terms.left_s() - least_s - (0.0 if reserve_s and not number else others_s)
            if until_s >= before_s:
                self._train_again(BEFORE, before.config, seed, min(until_s, SLOWER * before_s))

    def _train_again(self, name: str, knobs: Mapping[str, Scalar], seed: int, left_s: float) -> None:
        journal, samples = self._journal, self._terms.samples
        found = self._profiler.train(knobs, samples, (samples,), seed, left_s)
        self._told(
            journal.append(
                "confirmed",
                name=name,
                config=dict(found.get("knobs", knobs)),
                seed=seed,
                outcome=found["outcome"],
                message=found["message"],
                values=found["values"],
                samples=found["samples"],
                samples_per_s=found["measured_samples_per_s"],
                train_s=found["train_s"],
                setup_s=found.get("setup_s", 0.0),
                evaluate_s=found["evaluate_s"],
                peak_allocated_bytes=found["peak_allocated_bytes"],
                **{n: found[n] for n in ("spans", "telemetry", "active", "has_ended") if n in found},
            )
        )


def _why_not(own: Entrant | None, rule: Rule) -> str:
    """Returns why a trial that was trained again is not the pick; `own` is None where it did not come to its end."""
    if own is None or own.failed or not own.by_seed:
        return "did not come to its end when it was trained again"
    if statistics.fmean(own.by_seed.values()) >= rule.baseline_cost:
        return f"is no better than the baseline {rule.baseline} on fresh seeds"
    return "came to much less on fresh seeds than in the search"


def _settled(records: Sequence[Record], terms: ConfirmTerms) -> tuple[dict[str, Entrant], Selection | None]:
    """Returns who ran to the end, by id, and the selection over them as far as they were trained again."""
    found = {one.id: one for one in entrants(records, terms)}
    return found, settle(list(found.values()), terms.rule)


def _picked(records: Sequence[Record], terms: ConfirmTerms, without: Collection[str] = ()) -> str:
    """Returns the pick by one seed; raises ValueError where no trial came to its end."""
    picked = choose(records, terms.rule, without)
    if picked is None:
        raise ValueError("nothing to confirm: no trial came to its end")
    return picked.best


def entrants(records: Sequence[Record], terms: ConfirmTerms) -> list[Entrant]:
    """Returns the trials that ran to their end as the rule sees them, quality as a cost."""
    objective, sign = terms.rule.objective, terms.rule.sign
    again: dict[str, list[Record]] = {}
    for record in records:
        if record.event == "confirmed" and record["seed"] in terms.seeds:
            again.setdefault(record["name"], []).append(record)
    found, beside = [], trained_beside(records)
    for trial in (one for one in trials(records) if one.id not in beside):
        value, own = trial.values.get(objective), again.get(trial.id, [])
        if trial.outcome == "ok" and trial.samples_per_s and value is not None:
            own = [r for r in own if r["outcome"] != Outcome.CUT]  # the time was over, which says nothing of it
            ended = [r for r in own if r["outcome"] == "ok" and r["values"].get(objective) is not None]
            by_seed = {int(r["seed"]): sign * float(r["values"][objective]) for r in ended}
            failed = len(ended) < len(own)
            found.append(Entrant(trial.id, trial.samples_per_s, sign * value, by_seed, failed))
    return found


def affordable(
    left_s: float,
    budget: ConfirmSection,
    named: int,
    training_s: Sequence[float],
    cost_s: float = WINDOW_COST_S,
    done: Sequence[int] = (),
) -> tuple[int, int]:
    """Returns how many of the challengers, and on how many seeds each, can be trained before the windows.

    `training_s` are the seconds of one training of each, the pick first, and `done` how many of them an earlier session
    has behind it. Fewer challengers go first, then fewer seeds; for one training the windows are fewer and shorter
    (`least_windows_s`). Where that is not enough, nothing is trained: (1, 0).
    """
    options = [(count, budget.seeds) for count in range(len(training_s), 0, -1)]
    options += [(1, seeds) for seeds in range(budget.seeds - 1, 0, -1)]
    spare_s = left_s - windows_s(budget, named + 1, cost_s)

    def needed_s(count: int, seeds: int) -> float:
        each = itertools.zip_longest(training_s[:count], done[:count], fillvalue=0)
        return sum(one_s * max(0, seeds - trained) for one_s, trained in each)

    found = next((o for o in options if needed_s(*o) <= spare_s), None)
    return found or (1, int(needed_s(1, 1) <= left_s - least_windows_s(left_s, budget, named + 1, cost_s)))


def expected_s(
    budget: ConfirmSection, configurations: int, horizon: int, samples_per_s: float, before_per_s: float = 0.0
) -> float:
    """Returns about how long the stage will take for the pick, and for one training of `before` where its speed is
    given, so that the search can leave it that much.
    """
    trainings_s = budget.seeds * MORE * horizon / max(samples_per_s, 1e-9)
    trainings_s += MORE * horizon / before_per_s if before_per_s else 0.0
    return START_S + trainings_s + windows_s(budget, configurations)


def windows_s(budget: ConfirmSection, configurations: int, cost_s: float = WINDOW_COST_S) -> float:
    """Returns about how long the windows of so many configurations take; `cost_s` is of one beside its own length."""
    return budget.windows * configurations * (budget.window_s + cost_s)


def least_windows_s(left_s: float, budget: ConfirmSection, configurations: int, cost_s: float) -> float:
    """Returns the seconds that are kept for windows before anything is trained: `LEAST_ROUNDS`, whole where that is no
    more than half of the time left, else as short as they may be.
    """
    whole_s, short_s = (LEAST_ROUNDS * configurations * (s + cost_s) for s in (budget.window_s, LEAST_WINDOW_S))
    return min(whole_s, max(short_s, left_s / 2))


def window_cost_s(records: Sequence[Record]) -> float:
    """Returns what a window costs beside its own length, by what the probes have taken beside theirs."""
    ended = [r for r in records if r.event == "probe" and r["outcome"] == "ok" and r.get("spans") and r.get("wall_s")]
    costs = [float(r["wall_s"]) - float(r["spans"]["wall_s"]) for r in ended]
    return SETTLE_S + statistics.fmean(costs) if costs else WINDOW_COST_S


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
    have, names = _missing(windows(journal.records), named, budget)
    if names:  # together with those of today alone
        today = [r for r in reopened(journal.records) if r.event == "window"]
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
                took_s += float(found.get("wall_s") or 0.0)
                told(journal.append("window", name=name, round=number, config=dict(named[name]), **found))
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

    What ran last in the process was something else, and the first time is slow. Left out with a note is who fails, and
    who would, by its probe, not come to `LEAST_ROUNDS`, or leave no time for a round of those before it.
    """
    speeds, costs_s = Speeds(probed(journal.records)), dict[str, float]()
    for name, knobs in named.items():
        rate = speeds.of(knobs)
        least_s = WINDOW_STEPS * Knobs.of(knobs).batch_size / rate if rate else 0.0
        if left_s() < max((1 + LEAST_ROUNDS) * least_s, least_s + sum(costs_s.values())):
            text = f"too little time is left to measure {name} in turns with the others"
            told(journal.append("note", text=f"{text}: a larger search.max_time has it"))
            continue
        found = profiler.window(knobs, 0.0, seed=seed)
        if (outcome := found.get("outcome", Outcome.OK)) != Outcome.OK:
            said = str(found.get("message") or "").partition("\n")[0][:160]
            told(journal.append("note", text=f"{name} is not measured in turns: {outcome}{f': {said}' * bool(said)}"))
            continue
        costs_s[name] = float(found.get("wall_s") or 0.0)
    return costs_s


def _missing(
    known: Sequence[Record], named: Mapping[str, Mapping[str, Scalar]], budget: ConfirmSection
) -> tuple[set[tuple[str, int]], list[str]]:
    """Returns the windows there are, by name and round, and the names that lack some."""
    have = {(r["name"], r["round"]) for r in known if r.get("config") == dict(named.get(r["name"], {}))}
    return have, [name for name in named if any((name, number) not in have for number in range(budget.windows))]


def median_rate(records: Sequence[Record], name: str) -> float | None:
    """Returns the median samples a second of a configuration's windows, or None where it has none."""
    rates = [r["samples_per_s"] for r in windows(records) if r["name"] == name and r["samples_per_s"]]
    return statistics.median(rates) if rates else None


def faster_in_turns(
    records: Sequence[Record], config: Mapping[str, Scalar], named: Mapping[str, Mapping[str, Scalar]]
) -> Gain | None:
    """Returns how the fastest of the `named` compares with a configuration; None where no rounds tell one faster."""
    found = windows(records)
    rates = {
        name: {r["round"]: r["samples_per_s"] for r in found if r.get("config") == own and r["samples_per_s"]}
        for name, own in {"": config, **named}.items()
    }
    rounds = {name: sorted(rates[""].keys() & rates[name].keys()) for name in named}
    gains = [gain(name, "", [(rates[name][n], rates[""][n]) for n in own]) for name, own in rounds.items()]
    told = [one for one in gains if one is not None and one.is_told and one.ratio > 1]
    return max(told, key=lambda one: one.ratio, default=None)


def _trained_before(records: Sequence[Record]) -> Trial | None:
    """Returns the trial of the search that trained `before` to its end, None without one."""
    own = {r["trial"] for r in records if r.event == "trial_start" and r.get("named") == BEFORE}
    return next((t for t in trials(records) if t.id in own and t.outcome == Outcome.OK and t.samples_per_s), None)


def _lacks(records: Sequence[Record], trial: str, seed: int) -> bool:
    """Returns whether a trial that has not failed is still to be trained on a seed."""
    since = reopened(records)[0].seq
    own = [r for r in records if r.event == "confirmed" and r["name"] == trial]
    # What was cut before the study got more time is made up for.
    own = [r for r in own if r["outcome"] != Outcome.CUT or r.seq >= since]
    return all(r["outcome"] == "ok" and r["seed"] != seed for r in own)
