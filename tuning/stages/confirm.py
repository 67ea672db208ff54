"""Stage 4: the pick and the named configurations measured again, in turns; the pick trained on new seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Protocol

from trainables.knobs import Scalar
from tuning.policies.pick import Candidate, Pick, pick
from tuning.records import Journal, Record, trials
from tuning.stages.bench import Bench, Orders, Told

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


def choose(records: Sequence[Record], objective: str, mode: str, tolerance: float) -> Pick | None:
    """Returns the pick over the trials that ran to their end, or None where there is none."""
    finished = [
        t for t in trials(records) if t.outcome == "ok" and t.samples_per_s and t.values.get(objective) is not None
    ]
    candidates = [
        Candidate(t.id, {n: float(v) for n, v in t.values.items() if v is not None}, float(t.samples_per_s or 0.0))
        for t in finished
    ]
    return pick(candidates, objective, mode, tolerance) if candidates else None


def expected_s(budget: Budget, configurations: int, horizon: int, samples_per_s: float) -> float:
    """Returns about how long the stage will take, so that the search can leave it that much."""
    windows = budget.windows * configurations * (budget.window_s + SETTLE_S)
    return START_S + 1.15 * (windows + budget.seeds * horizon / max(samples_per_s, 1e-9) * 1.15)


def measure_windows(
    bench: Bench, journal: Journal, named: Mapping[str, Mapping[str, Scalar]], budget: Budget, told: Told
) -> None:
    """Measures `budget.windows` rounds; in each every configuration has one window, on the same batches.

    The order turns from round to round, so that a machine that slows down does so for all of them.
    """
    have = {(r["name"], r["round"]) for r in journal.records if r.event == "window"}
    names = [name for name in named if any((name, number) not in have for number in range(budget.windows))]
    for name in names:  # once unmeasured: what ran last in the process was something else, and the first time is slow
        bench.window(named[name], 0.0, seed=budget.windows)
    for number in range(budget.windows):
        turn = number % max(1, len(names))
        for name in names[turn:] + names[:turn]:
            if (name, number) not in have:
                found = bench.window(named[name], budget.window_s, seed=number)
                told(journal.append("window", name=name, round=number, config=dict(named[name]), **found))


def train_again(
    bench: Bench,
    journal: Journal,
    name: str,
    knobs: Mapping[str, Scalar],
    orders: Orders,
    seeds: Sequence[int],
    told: Told,
) -> None:
    """Trains the configuration on each seed; a seed that the records hold already is not trained again."""
    have = {(r["name"], r["seed"]) for r in journal.records if r.event == "confirmed"}
    for seed in seeds:
        if (name, seed) in have:
            continue
        found = bench.train(knobs, orders.samples, (orders.samples,), seed)
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
                evaluate_s=found["evaluate_s"],
                peak_allocated_bytes=found["peak_allocated_bytes"],
                **{n: found[n] for n in ("spans", "telemetry", "active") if n in found},
            )
        )


def median_rate(records: Sequence[Record], name: str) -> float | None:
    """Returns the median samples a second of a configuration's windows, or None where it has none."""
    rates = [r["samples_per_s"] for r in records if r.event == "window" and r["name"] == name and r["samples_per_s"]]
    return statistics.median(rates) if rates else None
