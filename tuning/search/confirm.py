"""Stage 4: the pick and its rivals trained on new seeds, the rule put to them again; then windows taken in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from trainables.knobs import Scalar
from tuning.journal.records import Journal, Record, trials
from tuning.search import challengers
from tuning.search.challengers import Challenger, Selection, Standing
from tuning.search.pick import Candidate, Pick, pick
from tuning.search.protocols import Profiler, Told, TrialPlan
from tuning.search.rule import Rule

SETTLE_S = 1.5
"""About what a window costs beside its own length: the first step, and starting workers."""
START_S = 8.0
"""About what a fresh process takes to load torch, data and model: 5 to 9 s for the built-in workloads on 2 cores."""


class Budget(Protocol):
    """How the chosen configurations are measured again, as `sections.ConfirmSection` has it."""

    @property
    def windows(self) -> int:
        """Returns the rounds of windows."""
        ...

    @property
    def window_s(self) -> float:
        """Returns the seconds of a window."""
        ...

    @property
    def seeds(self) -> int:
        """Returns how often the pick is trained again."""
        ...


def choose(records: Sequence[Record], rule: Rule) -> Pick | None:
    """Returns the pick over the trials that ran to their end, or None where there is none.

    What failed when it was trained again is left out, as long as something else is there.
    """
    ended = [
        t for t in trials(records) if t.outcome == "ok" and t.samples_per_s and t.values.get(rule.objective) is not None
    ]
    failed = {r["name"] for r in records if r.event == "confirmed" and r["outcome"] != "ok"}
    finished = [t for t in ended if t.id not in failed] or ended
    candidates = [
        Candidate(t.id, {n: float(v) for n, v in t.values.items() if v is not None}, float(t.samples_per_s or 0.0))
        for t in finished
    ]
    return pick(candidates, rule) if candidates else None


def expected_s(budget: Budget, configurations: int, horizon: int, samples_per_s: float) -> float:
    """Returns about how long the stage will take, so that the search can leave it that much."""
    trainings_s = budget.seeds * horizon / max(samples_per_s, 1e-9) * 1.15
    return START_S + 1.15 * (windows_s(budget, configurations) + trainings_s)


def windows_s(budget: Budget, configurations: int) -> float:
    """Returns about how long the windows of so many configurations take."""
    return budget.windows * configurations * (budget.window_s + SETTLE_S)


def measure_windows(
    profiler: Profiler, journal: Journal, named: Mapping[str, Mapping[str, Scalar]], budget: Budget, told: Told
) -> None:
    """Measures `budget.windows` rounds; in each every configuration has one window, on the same batches.

    The order turns from round to round, so that a machine that slows down does so for all of them.
    """
    own = [r for r in journal.records if r.event == "window" and r.get("config") == dict(named.get(r["name"], {}))]
    have = {(r["name"], r["round"]) for r in own}
    names = [name for name in named if any((name, number) not in have for number in range(budget.windows))]
    for name in names:  # once unmeasured: what ran last in the process was something else, and the first time is slow
        profiler.window(named[name], 0.0, seed=budget.windows)
    for number in range(budget.windows):
        turn = number % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            if (name, number) not in have:
                found = profiler.window(named[name], budget.window_s, seed=number)
                told(journal.append("window", name=name, round=number, config=dict(named[name]), **found))


def train_again(
    profiler: Profiler,
    journal: Journal,
    name: str,
    knobs: Mapping[str, Scalar],
    orders: TrialPlan,
    seeds: Sequence[int],
    told: Told,
) -> None:
    """Trains the configuration on each seed; a seed that the records hold already is not trained again."""
    have = {(r["name"], r["seed"]) for r in journal.records if r.event == "confirmed"}
    for seed in seeds:
        if (name, seed) in have:
            continue
        found = profiler.train(knobs, orders.samples, (orders.samples,), seed)
        told(
            journal.append(
                "confirmed",
                name=name,
                config=dict(knobs),
                seed=seed,
                outcome=found["outcome"],
                message=found["message"],
                values=found["values"],
                samples=found["samples"],
                samples_per_s=found["measured_samples_per_s"],
                window_samples_per_s=found["window_samples_per_s"],
                train_s=found["train_s"],
                setup_s=found.get("setup_s", 0.0),
                evaluate_s=found["evaluate_s"],
                peak_allocated_bytes=found["peak_allocated_bytes"],
                **{n: found[n] for n in ("spans", "telemetry", "active") if n in found},
            )
        )


@dataclass(frozen=True)
class Terms:
    """By what the pick is made: the rule, the fresh seeds to train on, and the seconds that rivals may still take."""

    rule: Rule
    seeds: Sequence[int]
    left_s: Callable[[], float]


def settle(
    profiler: Profiler, journal: Journal, first: str, orders: TrialPlan, terms: Terms, told: Told
) -> Selection | None:
    """Trains the first pick on every seed, then its rivals; returns the selection, None where the first pick failed.

    Rivals are trained seed by seed, the most promising first, for as long as they could be within the tolerance and the
    time lasts. Every decision about one is a record; what the records hold already is not trained again.
    """
    configs = {t.id: dict(t.config) for t in trials(journal.records)}
    for seed in terms.seeds:
        if not any(one.id == first and one.failed for one in standings(journal.records, terms)):
            train_again(profiler, journal, first, configs[first], orders, [seed], told)
    while True:
        found = standings(journal.records, terms)
        selection = challengers.settle(found, first, terms.seeds, terms.rule)
        if selection is None:
            return None
        open_ = challengers.rivals(found, selection, terms.seeds, terms.rule, _seconds(journal.records, first))
        left_s = terms.left_s()
        for late in open_:
            if late.seconds > left_s:
                _decided(journal, late, "too long", left_s, told)
        for one in found:
            if one.by_seed and one.id not in (*selection.means, *(late.id for late in open_)):
                _decided(journal, Challenger(one.id, 0.0, 0.0), "given up", left_s, told)
        rival = next((one for one in open_ if one.seconds <= left_s), None)
        if rival is None:
            return selection
        _decided(journal, rival, "confirm", left_s, told)
        done = next(one for one in found if one.id == rival.id).by_seed
        seed = next(seed for seed in terms.seeds if seed not in done)
        train_again(profiler, journal, rival.id, configs[rival.id], orders, [seed], told)


def standings(records: Sequence[Record], terms: Terms) -> list[Standing]:
    """Returns the trials that ran to their end as the rule sees them, quality as a cost."""
    objective, sign = terms.rule.objective, terms.rule.sign
    again: dict[str, list[Record]] = {}
    for record in records:
        if record.event == "confirmed" and record["seed"] in terms.seeds:
            again.setdefault(record["name"], []).append(record)
    found = []
    for trial in trials(records):
        value = trial.values.get(objective)
        if trial.outcome != "ok" or not trial.samples_per_s or value is None:
            continue
        own = again.get(trial.id, [])
        by_seed = {
            int(r["seed"]): sign * float(r["values"][objective])
            for r in own
            if r["outcome"] == "ok" and r["values"].get(objective) is not None
        }
        rates = [float(r["samples_per_s"]) for r in own if r["samples_per_s"]]
        found.append(
            Standing(
                id=trial.id,
                samples_per_s=trial.samples_per_s,
                searched=sign * value,
                by_seed=by_seed,
                trained_per_s=statistics.median(rates) if rates else None,
                failed=len(by_seed) < len(own),
            )
        )
    return found


def spent_on_rivals_s(records: Sequence[Record], first: str) -> float:
    """Returns the seconds of trainings of others than the first pick."""
    return sum(_took_s(r) for r in records if r.event == "confirmed" and r["name"] != first)


def _seconds(records: Sequence[Record], first: str) -> dict[str, float]:
    """Returns about what one seed of each trial takes: as the first pick's did, as much longer as it is slower."""
    rates = {t.id: t.samples_per_s for t in trials(records) if t.samples_per_s}
    took = [_took_s(r) for r in records if r.event == "confirmed" and r["name"] == first]
    first_s = statistics.fmean(took) if took else 0.0
    return {trial: first_s * rates[first] / rate for trial, rate in rates.items()}


def _took_s(record: Record) -> float:
    return sum(float(record.get(key) or 0.0) for key in ("setup_s", "train_s", "evaluate_s"))


def _decided(journal: Journal, rival: Challenger, decision: str, left_s: float, told: Told) -> None:
    """Writes once for each rival and decision what is done about it, and from what."""
    known = ((r["trial"], r["decision"]) for r in journal.records if r.event == "rival")
    if (rival.id, decision) not in known:
        fields = {"chance": rival.chance, "expected_s": rival.seconds, "left_s": left_s}
        told(journal.append("rival", trial=rival.id, decision=decision, **fields))


def median_rate(records: Sequence[Record], name: str) -> float | None:
    """Returns the median samples a second of a configuration's windows, or None where it has none."""
    rates = [r["samples_per_s"] for r in records if r.event == "window" and r["name"] == name and r["samples_per_s"]]
    return statistics.median(rates) if rates else None
