"""A recorded search run again: the scheduler of today over the trials of then, each taking as long as it did.

    again = replayed(records)
    assert decisions(again) == decisions(records)

What an executor does to the order of events is the record's: when a trial was asked for, when each came to a rung and
ended. What is decided is the scheduler's: which configuration is proposed, at which
micro-batch, who is refused, who is stopped.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from benchmarks.sim.simulator import SimulatedExecutor, VirtualClock, VirtualJournal
from tuning.config.load import from_resolved
from tuning.journal.records import Record, last
from tuning.memory import groups
from tuning.search.protocols import TrialPlan
from tuning.search.pruner import milestones
from tuning.search.scheduler import SearchTerms, TrialScheduler
from tuning.workers.placement import Placed, Share


class Strayed(ValueError):
    """The replayed search proposed what the recorded one did not, so there is no answer to it."""


def seconds(record: Record) -> float:
    """Returns when a record was written, in seconds since 1970."""
    return datetime.fromisoformat(record.t).timestamp()


def decisions(records: Sequence[Record]) -> list[tuple[Any, ...]]:
    """Returns what the search decided, in order: launched with which knobs, refused, kept or stopped at a rung."""
    found: list[tuple[Any, ...]] = []
    for record in _search(records):
        if record.event == "trial_start":
            found.append(("launched", record["trial"], tuple(sorted(record["config"].items()))))
        elif record.event == "refused":
            found.append(("refused", tuple(sorted(record["config"].items()))))
        elif record.event == "rung":
            found.append(("judged", record["trial"], record["samples"]))
        elif record.event in ("trial", "widened"):
            found.append((record.event, record["trial"], record.get("outcome"), record.get("stopped_at")))
    return found


def replayed(records: Sequence[Record]) -> list[Record]:
    """Returns the records up to the search, and those of the search run again.

    Raises ValueError where there is no search to replay, Strayed where the scheduler proposes what was not run.
    """
    study, own = last(records, "study"), _search(records)
    if study is None or not own:
        raise ValueError("the records hold no search")
    before = list(itertools.takewhile(lambda r: r.seq < own[0].seq, records))
    config = from_resolved(study["config"])
    clock = VirtualClock(seconds(own[0]))
    journal = VirtualJournal(clock, before)
    orders = _orders(study, config)
    cap_bytes = config.card.cap_bytes
    terms = SearchTerms(
        config.search.strategy,
        len({r["trial"] for r in own if r.event == "trial_start"}) + sum(r.event == "refused" for r in own),
        None,  # time that was up, or patience, is an end of the recorded proposals
        config.search.seed,
        config.budget.rungs.eta,
        study["objectives"],
        clock=clock,
    )
    learned = groups.guard(before, orders.slots.cap_bytes(orders.slots.count) or cap_bytes)
    scheduler = TrialScheduler(journal, config.space, learned, terms, orders, lambda record: None)
    told = _Told(own, clock)
    asks = [seconds(r) for r in own if r.event == "trial_start"]
    SimulatedExecutor(None, clock, cap_bytes=cap_bytes, courses=told.course, asks=asks).run(scheduler, orders)
    return journal.records


def _search(records: Sequence[Record]) -> list[Record]:
    """Returns the records of the search stage."""
    marks = [r.seq for r in records if r.event == "stage" and r["stage"] == "search"]
    if not marks:
        return []
    last_seq = marks[1] if len(marks) > 1 else records[-1].seq
    return [r for r in records if marks[0] < r.seq <= last_seq]


def _orders(study: Record, config: Any) -> TrialPlan:
    """Returns the orders of a study on a CPU; those of a card depend on its probes and are not recorded."""
    count, samples = int(study["concurrency"]), int(study["horizon_samples"])
    rungs, cap_bytes = config.budget.rungs, config.card.cap_bytes
    first = max(1, round(samples * rungs.first_frac))
    return TrialPlan(
        samples=samples,
        milestones=(*milestones(first, samples, rungs.eta), samples),
        shrink=config.search.strategy == "staged",
        concurrency=count,
        threads=max(1, int(study["threads"]) // count),
        slot_bytes=None if cap_bytes is None else cap_bytes // count,
        enforced=cap_bytes is not None,
    )


class _Told:
    """The results of recorded trials, each at its moment."""

    def __init__(self, records: Sequence[Record], clock: VirtualClock) -> None:
        self._clock = clock
        self._of: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            if record.event in ("trial_start", "rung", "oom", "restart", "widened", "trial"):
                self._of[record["trial"]].append(record)

    def course(self, placed: Placed, share: Share, orders: TrialPlan) -> _Course:
        """Returns the recorded course of a trial; raises Strayed where it was not run with these knobs."""
        trial, knobs = placed.request.trial, dict(placed.request.knobs)
        events = self._of.get(trial, [])
        begun = next((r for r in events if r.event == "trial_start"), None)
        if begun is None or dict(begun["config"]) != knobs:
            there = "it was not run" if begun is None else f"the record has {dict(begun['config'])}"
            raise Strayed(f"{trial} is proposed with {knobs}; {there}")
        return _Course(self._clock, trial, events, placed.attempt)


class _Course:
    """One attempt of a recorded trial (`rks.sim.simulator.Course`)."""

    def __init__(self, clock: VirtualClock, trial: str, events: Sequence[Record], attempt: int) -> None:
        self._clock, self._trial = clock, trial
        cuts = [n for n, r in enumerate(events) if r.event in ("widened", "trial")]
        start = cuts[attempt - 2] + 1 if attempt > 1 else 0
        own = events[start : cuts[attempt - 1] + 1] if attempt <= len(cuts) else []
        # Of one that was stopped the last rung is its end: whether it is one now is for the scheduler to say.
        ends = [r for r in own if r.event == "widened" or (r.event == "trial" and r["outcome"] != "stopped")]
        self._left = [*(r for r in own if r.event == "rung"), *ends]
        self._end = next((r for r in own if r.event == "trial"), None)
        failed = [r for r in own if r.event in ("oom", "restart")]
        self._again = {kind: [self._failed(r) for r in failed if r.event == kind] for kind in ("oom", "restart")}

    def advance(self) -> tuple[float, dict[str, Any]]:
        """Returns the seconds to the next recorded event of the trial, and the result there."""
        if not self._left:
            raise Strayed(f"{self._trial} goes on where the recorded trial was stopped")
        record = self._left.pop(0)
        wait_s = max(0.0, seconds(record) - self._clock())
        whole: Mapping[str, Any] = self._end.fields if self._end is not None else {}
        if record.event == "widened":
            return wait_s, {"done": True, "outcome": "oom", "values": {}, "message": "its share was too small"}
        result = {**whole, "knobs": dict(whole.get("config", {})), "ooms": self._again["oom"]}
        result |= {"restarts": self._again["restart"], "outcome": "ok", "done": False}
        if record.event == "rung":
            older = record.get("samples_per_s", whole.get("measured_samples_per_s"))
            rate = record.get("measured_samples_per_s", older)
            here = {"samples": record["samples"], "values": dict(record["values"]), "measured_samples_per_s": rate}
            return wait_s, {**result, **here}
        return wait_s, {**result, "outcome": record["outcome"], "done": True}

    @staticmethod
    def _failed(record: Record) -> dict[str, Any]:
        return {
            "knobs": dict(record["config"]),
            **{n: v for n, v in record.fields.items() if n not in ("trial", "config")},
        }
