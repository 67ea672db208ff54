"""Stage 4: the answer, confirmed on fresh seeds beside the reference; or what probes alone found."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from trainables.knobs import Scalar
from tuning.config.choices import BEFORE, PLAIN
from tuning.config.errors import NoUsableTrial
from tuning.config.resolve import COMMAND_LINE
from tuning.config.schema import StudyConfig
from tuning.config.space import Space
from tuning.journal.events import Event, PickRecord
from tuning.journal.records import Journal
from tuning.journal.run import History
from tuning.memory import groups
from tuning.memory.oom import DEPENDENT, Outcome
from tuning.report import sentences
from tuning.report.format import difference, duration, plural, spoken, unlike
from tuning.search.confirm import (
    LEAST_ROUNDS,
    Confirmed,
    ConfirmTerms,
    confirm,
    measure_windows,
    rounds,
    train_again,
    train_reference,
    window_cost_s,
)
from tuning.search.endings import OVER_MEMORY
from tuning.search.proposals import FASTER
from tuning.search.race import SYSTEM
from tuning.search.rule import Rule
from tuning.search.selection import fastest_probed, rule_of, sets_its_seed, so_far
from tuning.search.throughput import place_of, system_only
from tuning.search.turns import MOST_OTHERS, alike, last_candidates, least_changed
from tuning.stats.uncertainty import Spread
from tuning.study.limits import Limits
from tuning.workers.worker import Worker

SMALLER = "a smaller knobs.batch_size, or a smaller model"
"""The remedy if nothing fits although its micro-batch was halved."""


class PickStage:
    """The pick that the records give, and its confirmation; `named` are the configurations it is measured beside.

    `told` gets each record that is written, `note` a sentence and the subject that it warns of.
    """

    def __init__(
        self,
        config: StudyConfig,
        journal: Journal,
        limits: Limits,
        space: Space,
        named: Mapping[str, Mapping[str, Scalar]],
        told: Callable[[Event], None],
        note: Callable[[str, str], None],
    ) -> None:
        self._config, self._journal, self._limits, self._space = config, journal, limits, space
        self._named, self._told, self._note = named, told, note
        self._picked = so_far(journal.run)
        self._is_trained = self._picked is not None or journal.run.reference is not None
        self._probed = None if self._is_trained else self._of_probes()
        self.has_any = self._is_trained or self._probed is not None

    def train_reference(self, profiler: Worker, most_seeds: int) -> None:
        """Trains the reference on so many fresh seeds, before the search, if it fits."""
        terms = self._terms()
        guard = groups.guard(self._journal.run, self._limits.cap_bytes())
        if guard.judge(*groups.need_of(terms.reference, guard.table)).fits:
            train_reference(profiler, self._journal, terms, self._told, most_seeds)

    def train_again(self, profiler: Worker, until: float) -> None:
        """Trains who may be the answer on a few fresh seeds, until a moment of the monotonic clock."""
        if self._is_trained:
            terms = dataclasses.replace(self._terms(), left_s=lambda: until - time.monotonic())
            train_again(profiler, self._journal, terms, self._told)

    def run(self, profiler: Worker) -> None:
        """Writes the pick: by the rule over those that were confirmed, else the fastest that was probed."""
        if not self._is_trained:
            self._pick_probed(profiler, self._probed or {})
            return
        terms = self._terms()
        named = {name: knobs for name, knobs in self._named.items() if name != terms.reference_name}
        self._append_pick(confirm(profiler, self._journal, named, terms, self._told), terms)

    def _of_probes(self) -> dict[str, Scalar] | None:
        """Returns what is trained today with the fastest system knobs, if no trial of the search failed and time alone
        let none end.
        """
        by_time = (Outcome.CUT, Outcome.STOPPED, Outcome.REFUSED)
        if any(end.outcome not in by_time for end in self._journal.run.searched):
            return None
        return self._with_fastest_system()

    def _with_fastest_system(self) -> dict[str, Scalar] | None:
        """Returns what is trained today, else the defaults, with the fastest system knobs that were probed."""
        run = self._journal.run
        learned = groups.guard(run, self._limits.cap_bytes())
        before, typed = self._limits.before(), self._typed()
        space = system_only(self._space, self._config.space.whole(before)) if before else self._space
        start = {**groups.defaults(space), **(before or {}), **typed}  # of system knobs alone, what is held
        return fastest_probed(run, self._space, learned, start, named=BEFORE if before and not typed else "")

    def _typed(self) -> dict[str, Scalar]:
        """Returns the knobs that the command line fixes, as far as `before` has other values."""
        before, origins = self._limits.before() or {}, self._config.origins
        fixed = {n: v for n, v in self._config.space.fixed.items() if origins.get(f"knobs.{n}") == COMMAND_LINE}
        return {n: v for n, v in fixed.items() if before.get(n, v) != v}

    def _pick_probed(self, profiler: Worker, config: Mapping[str, Scalar]) -> None:
        """Measures the best of the probes in turns with the named configurations, and writes as the pick what is least
        changed of those that are fastest.
        """
        run, space, budget = self._journal.run, self._space, self._config.budget.confirm
        budget = budget.model_copy(update={"window_s": min(1.0, budget.window_s)})
        each_s = (1 + LEAST_ROUNDS) * (budget.window_s + window_cost_s(run))
        most = int(min(MOST_OTHERS, max(0.0, self._limits.left_s() / each_s - 1 - len(self._named))))
        learned = groups.guard(run, self._limits.cap_bytes())
        turns = last_candidates(run, space, learned, config, self._named, most)
        measure_windows(profiler, self._journal, turns, budget, self._told, self._limits.left_s)
        before = self._limits.before()
        today = before or self._named.get(PLAIN, config)
        able = [n for n in alike(space, config, turns) if n == "best" or groups.fits(learned, turns[n])]
        picked, times = least_changed(run, turns, able, today)
        table = space.table
        if place_of(turns[picked], table) != place_of(config, table):
            theirs = turns[picked]
            faster = f"{times:.2f} times as fast as the fastest probe in alternating timings, so the pick has them"
            self._note(f"with {' '.join(unlike(theirs, config, table))} it was {faster}", "")
            own = {n: theirs.get(n, table.defaults[n]) for n in table.system if n in config or n in theirs}
            config = space.complete({**config, **own})
        others = "as in your settings" if before else "at its default"
        others += "".join(f", {name}={value} as typed" for name, value in self._typed().items())
        rule = f"the fastest system knobs that were probed, every other knob {others}"
        if "micro_batch_size" not in table.system and not before:
            rule += f" (micro_batch_size={config.get('micro_batch_size', 'the batch')})"
        if before and config == self._space.complete({**groups.defaults(self._space), **before}):
            rule = "your settings as they are, as no probe was measured to be faster"
        rule += ": no trial of the search came to its end" if run.ended else ": nothing was trained"
        name, _ = self._limits.reference()
        reference = name if name in turns else ""
        self._journal.append(PickRecord, best="", config=dict(config), reference=reference, rule=rule, front=[])

    def _terms(self) -> ConfirmTerms:
        seed, budget, limits = self._config.search.seed, self._config.budget.confirm, self._limits
        budget = budget.model_copy(update={"windows": rounds(self._journal.run, budget)})
        until = time.monotonic() + limits.confirm_s()
        name, reference = limits.reference()
        run, space = self._journal.run, self._config.space
        if run.reference is not None:
            reference = run.reference.config  # with the micro-batch that fitted
        elif self._picked is not None:  # it could not be trained here
            name = self._picked.most_accurate
            reference = next(end.config for end in run.ended if end.trial == name)
        learned = groups.guard(run, limits.cap_bytes())
        # Plain defaults that nobody named have no probe of that name: the probes began with them.
        named = name if name in self._config.named else ""
        system = fastest_probed(run, space, learned, reference, named=named)
        is_other = system is not None and limits.per_s(system) > FASTER * limits.per_s(reference)
        return ConfirmTerms(
            rule=cast(Rule, rule_of(run)),  # open() wrote a study record
            seeds=[seed + 1 + n for n in range(budget.seeds)],
            budget=budget,
            samples=limits.plan().samples,
            left_s=lambda: until - time.monotonic(),
            reference_name=name,
            reference=reference,
            system=system if is_other else None,
            space=space.subset({"learning", "both"}),
            per_s=limits.per_s,
        )

    def _append_pick(self, found: Confirmed, terms: ConfirmTerms) -> None:
        """Writes the pick, and what fresh seeds said of every configuration that was trained on them."""
        race, rule, known = found.race, terms.rule, {end.trial for end in self._journal.run.ended}
        trial = found.name if found.name in known else ""
        picked = self._picked
        self._journal.append(
            PickRecord,
            best=trial,
            config=dict(found.config),
            kind="system" if found.name == SYSTEM else "reference" if found.name == terms.reference_name else "faster",
            most_accurate=found.most_accurate if found.most_accurate in known else trial,
            best_at_speed=found.best_at_speed if found.best_at_speed in known else trial,
            reference=terms.reference_name,
            rule=self._sentence(found, terms),
            front=list(picked.front) if picked is not None else [],
            searched_best=picked.best if picked is not None else "",
            confirmed={name: statistics.fmean(one.qualities.values()) for name, one in race.trained.items()},
            gains={name: list(one.gains.values()) for name, one in race.trained.items()},
            spread=race.spread,
            spread_degrees=race.degrees if race.knows_spread else 1,
            tolerance=rule.tolerance,
            at_least=rule.at_least,
            goal=rule.goal,
        )
        earlier = self._journal.run.picks[:-1]
        if earlier and trial and earlier[-1].best == trial:
            self._note(f"{trial} was the pick before, too", "")

    def _sentence(self, found: Confirmed, terms: ConfirmTerms) -> str:
        """Returns in words why this configuration is the answer."""
        rule, race, reference, shown = terms.rule, found.race, terms.reference_name, spoken(terms.reference_name)
        tried = [name for name, one in race.trained.items() if name != SYSTEM and one.gains]
        again = f"{len(tried)} trained again" if tried else "the search"
        if found.name in (reference, SYSTEM):
            knobs = "unchanged" if found.name == reference else "with the fastest system knobs"
            who = f"none of {again}" if tried else "no trial of the search"
            why = f"{who} was both faster and as good" if self._journal.run.searched else "nothing else was trained"
            if not tried and set(race.trained) - {SYSTEM}:
                why = f"no time was left to train a trial and {shown} on the same fresh seed"
            return f"{shown}, {knobs}: {why}"
        own = race.trained.get(found.name)
        what = "the fastest" if rule.goal == "speed" else f"the best no slower than {shown}"
        alike = " (of equally fast ones the best)" * (rule.goal == "speed")
        said = f"of {again}, {what} with {rule.words}{alike}"
        if own is None or not own.gains:
            return f"{said}, by one seed, that of the search"
        gains, floor = list(own.gains.values()), shown if rule.at_least is None else f"{rule.at_least:g}"
        reach = Spread(race.spread, race.degrees).half_width(len(gains))
        fresh = "" if not sets_its_seed(self._journal.run) else ", though train(run) sets its seed itself"
        better = difference(statistics.fmean(gains), reach if race.knows_spread else None)
        return f"{said}: {better} beside {floor} on {plural(len(gains), 'fresh seed')}{fresh}"


def _begun_at(run: History) -> int:
    """Returns the number of the record with which this session began."""
    return run.resumes[-1].seq if run.resumes else 0


def require_independent(run: History, *messages: str) -> None:
    """Raises NoUsableTrial if a training went on from an earlier one, by what failed in this session.

    `messages` are of measurements that no record has.
    """
    made = [one for one in (*run.probes, *run.ended, *run.confirmed) if one.seq > _begun_at(run)]
    for text in (*messages, *(one.message for one in made)):
        if text.startswith(DEPENDENT):
            said = f"trainings depend on earlier ones, so that no result counts: {text[len(DEPENDENT) :].lstrip(': ')}"
            raise NoUsableTrial(said, remedy="mend what it names, and search anew")


def require_sound(run: History) -> None:
    """Raises NoUsableTrial if all probes of this session failed since the loop uses `run` in a wrong way."""
    probes = [probe for probe in run.probes if probe.seq > _begun_at(run) and probe.outcome != Outcome.CUT]
    if probes and all(probe.message.startswith("LoopError") for probe in probes):
        said = probes[-1].message.removeprefix("LoopError: ")
        raise NoUsableTrial(f"every probe found a mistake in the loop: {said}", remedy="mend it, and search anew")


def nothing_usable(run: History, folder: Path, limits: Limits, max_time_s: float | None) -> NoUsableTrial:
    """Returns the error for a study without a pick, with why most of its trials failed.

    If no trial began, it says why proposals were refused or probes failed; else search.max_time was over before.
    """
    trained = [(end.outcome, end.message) for end in run.ended if end.outcome != Outcome.REFUSED]
    refused = [(str(Outcome.REFUSED), refusal.reason) for refusal in run.refused]
    probes = [(probe.outcome, probe.message) for probe in run.probes]
    said = f"no trial of the search reached its end in {folder}"
    for of, found in (
        ("them", trained),
        *(() if trained else (("the proposals", refused), ("the probes", probes))),
    ):
        failed = [(outcome, text) for outcome, text in found if text and outcome not in (Outcome.OK, Outcome.CUT)]
        for (outcome, text), count in collections.Counter(failed).most_common(1):
            can_go_on = trained and not run.is_done("search")
            go_on = f", and go on with {sentences.resume_command(folder)} force=true" if can_go_on else ""
            remedy = SMALLER if outcome in OVER_MEMORY else f"mend what it names{go_on}"
            return NoUsableTrial(f"{said}; {count} of {of}: {f'{outcome}: {text}'[:400]}", remedy=remedy)
    if trained or limits.left_s() > 0:
        return NoUsableTrial(said, remedy="search.max_time=10m")
    passed, limit = duration(limits.passed_s()), duration(max_time_s or 0.0)
    said = f"search.max_time={limit} was over before anything was measured: {passed} have passed"
    return NoUsableTrial(said, remedy="search.max_time=4m")
