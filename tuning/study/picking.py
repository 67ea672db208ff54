"""Stage 4: the search's pick, beside the named configurations, trained on fresh seeds; or what probes alone found."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from trainables.knobs import Scalar, kind_of, table
from tuning.config.errors import NoUsableTrial
from tuning.config.resolve import COMMAND_LINE
from tuning.config.schema import PLAIN, StudyConfig
from tuning.config.space import Space
from tuning.journal.records import Journal, Record, Trial, reopened, stage_done, trained_beside, trials
from tuning.memory import groups
from tuning.memory.oom import Outcome
from tuning.report import sentences
from tuning.report.format import differing, duration
from tuning.search.confirm import (
    LEAST_ROUNDS,
    Confirmed,
    ConfirmTerms,
    confirm,
    faster_in_turns,
    measure_windows,
    window_cost_s,
)
from tuning.search.endings import OVER_MEMORY
from tuning.search.rule import Rule
from tuning.search.selection import Pick, choose, far_from_best, fastest_probed, rule_of, sets_its_seed
from tuning.search.throughput import Probed, inside, place_of
from tuning.search.turns import MOST_OTHERS, alike, last_candidates, least_changed
from tuning.study.limits import Limits
from tuning.workers.worker import Worker

SMALLER = "a smaller knobs.batch_size, or a smaller model"
"""What helps where nothing fits, whose micro-batch was halved already."""


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
        told: Callable[[Record], None],
        note: Callable[[str, str], None],
    ) -> None:
        self._config, self._journal, self._limits, self._space = config, journal, limits, space
        self._named, self._told, self._note = named, told, note
        self._picked = choose(journal.records, self._rule())
        self._probed = self._of_probes() if self._picked is None else None
        self.has_any = self._picked is not None or self._probed is not None

    def run(self, profiler: Worker) -> None:
        """Writes the pick: by the rule over those that were confirmed, else the fastest that was probed."""
        if self._picked is None:
            self._pick_probed(profiler, self._probed or {})
            return
        text = far_from_best(self._journal.records, self._picked, self._rule())
        if text and not isinstance(self._config.pick.tolerance, str):
            self._note(text, "pick")
        found = confirm(profiler, self._journal, self._named, self._terms(), self._told)
        own = next(t for t in trials(self._journal.records) if t.id == found.best)
        if (faster := self._faster(own.config)) is not None:
            config, times = faster
            rate = times * float(own.samples_per_s or 0.0)
            self._told(self._journal.append("rated", trial=own.id, config=config, samples_per_s=rate))
        self._append_pick(self._picked, found)

    def _faster(self, config: Mapping[str, Scalar]) -> tuple[dict[str, Scalar], float] | None:
        """Returns a configuration with the system knobs of one that is named, which the space has and the rounds tell
        to be faster and in which nothing else differs, and how many times faster that is; None where there is none.
        """
        alike = dict[str, Mapping[str, Scalar]]()
        for name, own in self._named.items():
            apart = {*differing(config, own), *differing(own, config)}
            if all(kind_of(n) == "system" for n in apart) and inside(self._space, Probed(own, 0.0, 0.0, 0.0)):
                alike[name] = own
        found = faster_in_turns(self._journal.records, config, alike)
        if found is None:
            return None
        said = f"{found.of} was {found.ratio:.2f} times as fast as the pick in turns, and only system knobs differ"
        self._note(f"{said}: the pick has those of {found.of}", "")
        theirs, rows = alike[found.of], table()
        own = {n: theirs.get(n, rows.defaults[n]) for n in rows.system if n in config or n in theirs}
        return {**config, **own}, found.ratio

    def _of_probes(self) -> dict[str, Scalar] | None:
        """Returns what is trained today, else the defaults, with the fastest system knobs, where no trial of the search
        failed and time alone let none end.
        """
        records = self._journal.records
        if any(t.outcome not in (Outcome.CUT, Outcome.STOPPED, Outcome.REFUSED) for t in _of_search(records)):
            return None
        learned = groups.guard(records, self._limits.cap_bytes())
        before, typed = self._limits.before(), self._typed()
        start = {**groups.defaults(self._space), **(before or {}), **typed}  # of system knobs alone, what is held
        is_before = before is not None and not typed
        return fastest_probed(records, self._space, learned, start, is_before=is_before)

    def _typed(self) -> dict[str, Scalar]:
        """Returns the knobs that the command line fixes, as far as `before` has other values."""
        before, origins = self._limits.before() or {}, self._config.origins
        fixed = {n: v for n, v in self._config.space.fixed.items() if origins.get(f"knobs.{n}") == COMMAND_LINE}
        return {n: v for n, v in fixed.items() if before.get(n, v) != v}

    def _pick_probed(self, profiler: Worker, config: Mapping[str, Scalar]) -> None:
        """Measures the best of the probes in turns with the named configurations, and writes as the pick what is least
        changed of those that are fastest.
        """
        records, space, budget = self._journal.records, self._space, self._config.budget.confirm
        budget = budget.model_copy(update={"window_s": min(1.0, budget.window_s)})
        each_s = (1 + LEAST_ROUNDS) * (budget.window_s + window_cost_s(records))
        most = int(min(MOST_OTHERS, max(0.0, self._limits.left_s() / each_s - 1 - len(self._named))))
        learned = groups.guard(records, self._limits.cap_bytes())
        turns = last_candidates(records, space, learned, config, self._named, most)
        measure_windows(profiler, self._journal, turns, budget, self._told, self._limits.left_s)
        before = self._limits.before()
        today = before or self._named.get(PLAIN, config)
        picked, times = least_changed(self._journal.records, turns, alike(space, config, turns), today)
        if place_of(turns[picked]) != place_of(config):
            said = f"{picked} was {times:.2f} times as fast in turns as the fastest probe, and only system knobs differ"
            self._note(f"{said}: the pick has those of {picked}", "")
            theirs, rows = turns[picked], table()
            own = {n: theirs.get(n, rows.defaults[n]) for n in rows.system if n in config or n in theirs}
            config = space.complete({**config, **own})
        others = "as in before" if before else "at its default"
        others += "".join(f", {name}={value} as typed" for name, value in self._typed().items())
        rule = f"the fastest system knobs that were probed, every other knob {others}"
        if "micro_batch_size" not in table().system and not before:
            rule += f" (micro_batch_size={config.get('micro_batch_size', 'the batch')})"
        if before and config == self._space.complete({**groups.defaults(self._space), **before}):
            rule = "before as it is, as no probe was measured to be faster"
        rule += ": no trial of the search came to its end" if trials(self._journal.records) else ": nothing was trained"
        self._journal.append("pick", best="", config=dict(config), rule=rule, front=[])

    def _terms(self) -> ConfirmTerms:
        seed, budget = self._config.search.seed, self._config.budget.confirm
        until = time.monotonic() + self._limits.confirm_s()
        return ConfirmTerms(
            rule=self._rule(),
            seeds=[seed + 1 + n for n in range(budget.seeds)],
            budget=budget,
            samples=self._limits.plan().samples,
            left_s=lambda: until - time.monotonic(),
        )

    def _append_pick(self, picked: Pick, found: Confirmed) -> None:
        """Writes the pick, by the rule over those that were confirmed."""
        fields: dict[str, Any] = {"front": list(picked.front), "searched_best": picked.best}
        fields["repeats"] = found.repeats
        selection, rule = found.selection, self._rule()
        if selection is None:
            said = f"{picked.rule}; no training on fresh seeds came to its end"
            self._journal.append("pick", best=found.best, most_accurate=picked.most_accurate, rule=said, **fields)
            return
        sentence = selection.sentence(found.first, rule, is_fresh=not sets_its_seed(self._journal.records))
        is_tried = any(r.event == "confirmed" and r["name"] == found.first for r in self._journal.records)
        if len(selection.means) == 1:
            why = "was worse on fresh seeds or failed" if is_tried else "was trained on no fresh seed in the time left"
            instead = f"{found.best}, since {picked.best} {why}"
            begin = picked.rule if found.best == picked.best else instead
            sentence = f"{begin}; {sentence}"
        self._journal.append(
            "pick",
            best=found.best,
            most_accurate=selection.bar_of,
            rule=sentence,
            confirmed={trial: rule.sign * mean for trial, mean in selection.means.items()},
            bar=rule.sign * selection.bar,
            bar_of=selection.bar_of,
            difference=selection.difference,
            half_width=selection.half_width,
            **fields,
        )
        rivals = [r for r in reopened(self._journal.records) if r.event == "rival"]
        late = [r["trial"] for r in rivals if r["decision"] == "too long"]
        late = [trial for trial in dict.fromkeys(late) if trial not in selection.means]
        if late:
            them = "it" if len(late) == 1 else "them"
            text = f"{', '.join(late)} may change the pick, and no time was left for that"
            self._note(f"{text}: a larger search.max_time has {them} trained", "")
        earlier = [r for r in self._journal.records if r.event == "pick"][:-1]
        if earlier and earlier[-1].get("best") == found.best:
            self._note(f"{found.best} was the pick before, too", "")
        if found.best != found.first and is_tried:
            self._note(f"{found.best} takes the place of {found.first}, which the search had picked by one seed", "")

    def _rule(self) -> Rule:
        """Returns what is asked of the pick."""
        return cast(Rule, rule_of(self._journal.records, self._config.pick.tolerance))  # open() wrote a study record


def nothing_usable(records: Sequence[Record], folder: Path, limits: Limits, max_time_s: float | None) -> NoUsableTrial:
    """Returns the error for a study without a pick, with why most of its trials failed.

    Where none was begun, it is why proposals were refused or probes failed; else search.max_time was over before.
    """
    trained = [(t.outcome, t.message) for t in _of_search(records) if t.outcome != Outcome.REFUSED]
    refused = [(str(Outcome.REFUSED), str(r.get("reason") or "")) for r in records if r.event == "refused"]
    probes = [(str(r["outcome"]), str(r.get("message") or "")) for r in records if r.event == "probe"]
    said = f"no trial of the search reached its end in {folder}"
    for of, found in (
        ("them", trained),
        *(() if trained else (("the proposals", refused), ("the probes", probes))),
    ):
        failed = [(outcome, text) for outcome, text in found if text and outcome not in (Outcome.OK, Outcome.CUT)]
        for (outcome, text), count in collections.Counter(failed).most_common(1):
            can_go_on = trained and not stage_done(records, "search")
            go_on = f", and go on with {sentences.resume_command(folder)} force=true" if can_go_on else ""
            remedy = SMALLER if outcome in OVER_MEMORY else f"mend what it names{go_on}"
            return NoUsableTrial(f"{said}; {count} of {of}: {f'{outcome}: {text}'[:400]}", remedy=remedy)
    if trained or limits.left_s() > 0:
        return NoUsableTrial(said, remedy="search.max_time=10m")
    passed, limit = duration(limits.passed_s()), duration(max_time_s or 0.0)
    said = f"search.max_time={limit} was over before anything was measured: {passed} have passed"
    return NoUsableTrial(said, remedy="search.max_time=4m")


def _of_search(records: Sequence[Record]) -> list[Trial]:
    """Returns the trials that ended, without those trained beside the search."""
    beside = trained_beside(records)
    return [t for t in trials(records) if t.id not in beside]
