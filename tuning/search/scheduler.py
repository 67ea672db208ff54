"""Stage 3: trials that train. The scheduler proposes, judges at rungs, and writes each ending before anyone is told."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trainables.knobs import Scalar
from tuning.config.space import Space
from tuning.journal.records import Journal, Record, last, trials, unfinished
from tuning.memory.groups import defaults, fits, learn, need_of, peaks_are_whole
from tuning.memory.guard import FitVerdict, MemoryGuard
from tuning.memory.oom import GROWING, Outcome, requested_bytes
from tuning.search import reuse, throughput
from tuning.search.beginning import beginning
from tuning.search.ending import Ending
from tuning.search.foresight import Foresight, Rated, tries_of
from tuning.search.patience import Patience
from tuning.search.probe import probed
from tuning.search.protocols import TrialPlan, TrialRequest
from tuning.search.pruner import Pruner
from tuning.search.replacing import Replacing
from tuning.search.sampler import OVER_MEMORY, Observation, Proposal, Sampler

SAMPLES_PER_S = "samples_per_s"
THROUGHPUT_TOLERANCE = 0.03
"""Two throughputs closer than this are equal at a rung: a probe's own interval is no narrower."""
Told = Callable[[Record], None]


@dataclass(frozen=True)
class SearchTerms:
    """What the search may do: its trials, its last moment (seconds of `clock`, None for no limit), its seed.

    After `patience` trials in a row that left the front as it was it may end (`search.ending`); None: it does not.
    `tries_frac` of the trials, where one runs at a time and the search is staged, try system knobs that nobody probed.
    """

    strategy: Literal["staged", "joint"]
    trials: int
    deadline: float | None
    seed: int
    eta: int
    objectives: Mapping[str, Literal["min", "max"]]
    patience: int | None = None
    tries_frac: float = 0.0
    clock: Callable[[], float] = time.monotonic


class TrialScheduler:
    """Hands out trials, decides at rungs, records endings. Everything it knows it can read back from the records.

    Staged: only learning and "both" knobs are proposed, the system knobs come from the probes, and so does the
    throughput. Joint: every knob is proposed in one space, and the throughput is what the trial measures itself.
    """

    def __init__(
        self, journal: Journal, space: Space, guard: MemoryGuard, terms: SearchTerms, orders: TrialPlan, told: Told
    ) -> None:
        self._journal, self._space, self._guard = journal, space, guard
        self._terms, self._orders, self._told = terms, orders, told
        self._staged = terms.strategy == "staged"
        self._probed = [p for p in probed(journal.records) if throughput.inside(space, p)]
        searched = space.subset({"learning", "both"}) if self._staged else space
        self._names = tuple(searched.parameters)
        objectives = {SAMPLES_PER_S: "max", **terms.objectives}
        start = defaults(space)
        earlier = reuse.earlier_trials(journal.records, space)
        self._earlier, self._believed = earlier, bool(earlier)
        self._best_before = [self._searched(t["config"]) for t in reuse.best_of(earlier, objectives)]
        first = beginning(
            space, self._names, start, self._probed if self._staged else [], functools.partial(fits, guard)
        )
        self._sampler = Sampler(
            searched,
            objectives,
            terms.seed,
            initial=[*self._best_before, *first],
            prior=[(self._searched(t["config"]), self._taken_over(t)) for t in earlier],
        )
        tolerances = {SAMPLES_PER_S: THROUGHPUT_TOLERANCE}
        self._rungs = Pruner(orders.milestones[:-1], terms.eta, objectives, terms.seed, tolerances=tolerances)
        self._again: list[TrialRequest] = []
        self._replacing = Replacing(journal, space, self._names, lambda knobs: self._judged(knobs).fits, told)
        self._numbers: dict[str, int] = {}
        self._live: dict[str, dict[str, Any]] = {}
        self._attempts: Counter[str] = Counter()
        known = self._probed if self._staged else []
        frac = terms.tries_frac if orders.concurrency == 1 else 0.0  # neighbours would be measured too
        tries = tries_of(space, known, journal.records, frac, terms.seed)
        self._foresight = Foresight(space, self._names, tries, guard, terms.objectives, orders.samples, terms.seed)
        idle = Patience(objectives, [tolerances.get(name, 0.0) for name in objectives])
        self._ending = Ending(terms.trials, terms.deadline, orders.concurrency, idle, terms.patience)
        self._whole_peaks = peaks_are_whole(journal.records)
        opening = last(journal.records, "study")
        self._once_through = int((opening.get("train_samples") if opening else None) or orders.samples)
        self._restore()

    @property
    def stop_reason(self) -> str:
        """Why no other trial begins, "" while more may."""
        return self._ending.reason

    # -- what the backend calls --------------------------------------------------------------------------------------

    def next_trial(self) -> TrialRequest | None:
        """Returns the next trial to run: an interrupted one first, else a new proposal that fits; None at the end.

        An interrupted one is judged again: what was learned since it began may rule it out.
        """
        while self._again:
            pending = self._again.pop(0)
            verdict = self._judged(pending.knobs)
            if verdict.fits:
                return self._begin(TrialRequest(pending.trial, verdict.applied(pending.knobs), pending.seed), verdict)
            refused = self._refusal(pending.knobs, verdict, trial=pending.trial)
            self._sampler.observe(self._numbers.pop(pending.trial), self._observation(refused))
            self._foresight.refused(pending.trial)
            self._told(refused)
        while not self._is_over():
            proposal, may_try = self._propose()
            if proposal is None:
                self._ending.reason = "every configuration of the space was tried"
                break
            trial = f"t{self._started:03d}"
            knobs = self._knobs(proposal.values)
            verdict = self._judged(knobs)
            if not verdict.fits:
                refused = self._refusal(knobs, verdict)
                self._sampler.observe(proposal.number, self._observation(refused))
                self._told(refused)
                self._refused += 1
                continue
            self._numbers[trial] = proposal.number
            self._started += 1
            tried = self._foresight.vary(verdict.applied(knobs)) if may_try else None
            if tried is not None:
                knobs, verdict = tried, self._judged(tried)
            return self._begin(TrialRequest(trial, verdict.applied(knobs), self._terms.seed), verdict, tries=tried)
        return None

    def goes_on(self, trial: str, result: Mapping[str, Any]) -> bool:
        """Returns whether a trial that runs, or is about to, is still judged to fit by what was learned meanwhile.

        One that has gone through the training split has met its longest samples, and is let be.
        """
        live = self._live.get(trial)
        if live is None or int(result.get("samples") or 0) >= self._once_through:
            return True
        verdict = self._judged(result.get("knobs") or live["knobs"])
        if verdict.action == "launch":
            return True
        live.update(ruled_out=True, reason=f"ruled out by what was learned since it began: {verdict.reason}")
        return False

    def at_rung(self, trial: str, result: Mapping[str, Any]) -> bool:
        """Returns whether the trial goes on; the rung is written first."""
        samples, values, knobs = int(result["samples"]), dict(result["values"]), self._live[trial]["knobs"]
        own = self._foresight.rate_of(knobs, result)
        rate = self._foresight.potential(knobs, own) or 0.0
        milestone = max(m for m in self._orders.milestones if m <= samples)
        place = self._rungs.decide(trial, milestone, {SAMPLES_PER_S: rate, **values})
        decision = self._foresight.decided(trial, place, knobs, milestone, values, own)
        speeds = {SAMPLES_PER_S: rate, "measured_samples_per_s": result.get("measured_samples_per_s")}
        words = {"goes_on": decision.go_on, "reason": decision.reason}
        record = self._journal.append("rung", trial=trial, samples=samples, values=values, **speeds, **words)
        self._foresight.rung(trial, milestone, values)
        if not decision.go_on:
            self._live[trial].update(stopped_at=samples, reason=decision.reason)
        self._told(record)
        return decision.go_on and self.goes_on(trial, result)

    def ended(self, trial: str, result: Mapping[str, Any] | None) -> None:
        """Writes the ending, then teaches sampler and guard. A lost process is the outcome `killed`."""
        live = self._live.pop(trial, {})
        found = dict(result or {"outcome": str(Outcome.KILLED), "values": {}, "message": "the process was lost"})
        for failed in found.get("ooms", []):
            self._journal.append("oom", trial=trial, config=failed["knobs"], **_why(failed))
            learn(self._guard, failed["knobs"], str(Outcome.OOM), 0)
        for failed in found.get("restarts", []):
            self._journal.append("restart", trial=trial, config=failed["knobs"], **_why(failed))
        outcome = str(found["outcome"])
        if outcome == Outcome.OK and "stopped_at" in live:
            outcome = str(Outcome.STOPPED)
        if live.get("ruled_out") and outcome == Outcome.OK:
            outcome = str(Outcome.REFUSED)
        knobs = dict(found.get("knobs") or live.get("knobs") or {})
        kept = ("samples", "spans", "telemetry", "train_s", "evaluate_s", "setup_s", "first_step_at", "last_step_at")
        more = ("returned_at", "peak_allocated_bytes", "message", "traceback", "measured_samples_per_s", "active")
        memory = ("cap_bytes", "fault", "wanted_bytes", "held_bytes", "retire")
        record = self._journal.append(
            "trial",
            trial=trial,
            config=knobs,
            outcome=outcome,
            stopped_at=live.get("stopped_at"),
            reason=live.get("reason", ""),
            values=dict(found["values"]),
            samples_per_s=self._foresight.rate_of(knobs, found),
            seed=self._terms.seed,
            **{n: found.get(n) for n in (*kept, *more, *memory) if n in found},
        )
        self._learn(record)
        self._told(record)
        self._rate_anew(self._foresight.rated())
        self._replacing.ended(record)

    def decided(self, event: str, trial: str, reason: str) -> None:
        """Writes what the backend did about a trial or its process, and why."""
        self._told(self._journal.append(event, trial=trial, reason=reason))

    def _rate_anew(self, rated: Sequence[Rated]) -> None:
        """Writes which trials are judged by other system knobs, or by another speed, since some were tried."""
        for found in rated:
            record = self._journal.append("rated", **dataclasses.asdict(found))
            self._foresight.take(found)
            self._told(record)

    # -- proposals ---------------------------------------------------------------------------------------------------

    def _begin(
        self, request: TrialRequest, verdict: FitVerdict, tries: Mapping[str, Scalar] | None = None
    ) -> TrialRequest:
        self._attempts[request.trial] += 1
        self._foresight.begun(request.trial, request.knobs, tries=tries is not None)
        self._replacing.begun(request.trial, tries=tries is not None)
        self._live[request.trial] = {"knobs": dict(request.knobs)}
        self._journal.append(
            "trial_start",
            trial=request.trial,
            config=dict(request.knobs),
            attempt=self._attempts[request.trial],
            predicted_bytes=verdict.predicted_bytes,
            p_oom=verdict.p_oom,
            decision=verdict.action,
            decision_reason=verdict.reason,
            **({} if tries is None else {"tries": True}),
            **self._foresight.known(),
        )
        return dataclasses.replace(request, need_bytes=verdict.predicted_bytes)

    def _propose(self) -> tuple[Proposal | None, bool]:
        """Returns what is trained in place of a trial that failed, else what the sampler suggests.

        With it comes whether it may try system knobs: what failed once is not risked again.
        """
        values = self._replacing.next()
        if values is not None:
            return Proposal(self._sampler.adopt(values), values), False
        return self._sampler.suggest(self._foresight.choose if self._staged else None), True

    def _is_over(self) -> bool:
        now = self._terms.clock()
        if self._ending.is_spent(self._started, self._refused, now):
            return True
        idle = self._ending.idle(self._foresight.expected, self._started + self._refused, now)
        if idle and not self._live:  # what runs may change the front yet; asked again once it has ended
            self._ending.reason = idle
        return bool(idle)

    def _knobs(self, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        asked = self._space.complete(values)
        if not self._staged:
            return asked
        system = self._foresight.system(asked)
        if system is None:  # no probe of this coupling succeeded: the plain defaults, and the guard's judgement
            return self._space.complete({**defaults(self._space), **values})
        return {**asked, **system}

    def _judged(self, knobs: Mapping[str, Scalar]) -> FitVerdict:
        """Returns what to do with a configuration.

        In the joint strategy the micro-batch is what is searched, so it is judged as proposed and never halved.
        """
        return self._guard.judge(*need_of(knobs), shrink=self._staged)

    def _refusal(self, knobs: Mapping[str, Scalar], verdict: FitVerdict, trial: str | None = None) -> Record:
        return self._journal.append(
            "refused",
            config=dict(knobs),
            predicted_bytes=verdict.predicted_bytes,
            cap_bytes=self._guard.cap_bytes,
            p_oom=verdict.p_oom,
            reason=verdict.reason,
            stage="search",
            **({} if trial is None else {"trial": trial}),
        )

    # -- what was learned --------------------------------------------------------------------------------------------

    def _learn(self, record: Record) -> None:
        peak = int(record.get("peak_allocated_bytes") or 0)
        if record.get("fault") != GROWING.name:  # a leak says nothing of the micro-batch
            learn(self._guard, record["config"], str(record["outcome"]), peak, self._whole_peaks)
        self._teach(record)

    def _teach(self, record: Record) -> None:
        """Tells the sampler how a trial ended."""
        if record["outcome"] == Outcome.OK:
            took = float(record.get("train_s") or 0) + float(record.get("evaluate_s") or 0)
            self._ending.took(took)
        self._doubt(record)
        self._foresight.ended(record)
        seen = self._observation(record)
        if record["outcome"] in (Outcome.OK, Outcome.STOPPED):
            self._ending.ended(seen.values, whole=record["outcome"] == Outcome.OK)
        number = self._numbers.pop(record["trial"], None)
        if number is not None:
            self._sampler.observe(number, seen)
        else:
            self._sampler.replay(self._searched(record["config"]), seen)

    def _taken_over(self, trial: Mapping[str, Any]) -> Observation:
        """Returns how a trial of an earlier run ended, at the speed that this run's probes give it."""
        config = self._space.complete(trial["config"])
        choices = throughput.ranked(self._probed, config) if self._staged else []
        fitting = (c.samples_per_s for c in choices if fits(self._guard, {**config, **c.system}))
        rate = next(fitting, trial["samples_per_s"])
        return Observation(trial["outcome"], {SAMPLES_PER_S: rate, **trial["values"]})

    def _doubt(self, record: Record) -> None:
        """Forgets what earlier runs learned once one of their best comes out as it cannot be; says so once."""
        if not self._believed or record["outcome"] != Outcome.OK:
            return
        own = self._searched(record["config"])
        if own not in self._best_before:
            return
        objective, mode = next(iter(self._terms.objectives.items()))
        before = next(t["values"] for t in self._earlier if self._searched(t["config"]) == own)
        text = reuse.refuted(self._earlier, objective, mode, record["values"], before)
        if text:
            self._believed = False
            self._sampler.forget_prior()
            if not any(r.event == "note" and r["text"] == text for r in self._journal.records):
                self._told(self._journal.append("note", text=text))

    def _searched(self, knobs: Mapping[str, Scalar]) -> dict[str, Scalar]:
        return {n: v for n, v in knobs.items() if n in self._names}

    def _observation(self, record: Record) -> Observation:
        outcome = str(Outcome.REFUSED) if record.event == "refused" else str(record["outcome"])
        rate = record.get("samples_per_s")
        if outcome in (Outcome.OK, Outcome.STOPPED):
            rate = self._foresight.potential(record["config"], rate)
        values = {SAMPLES_PER_S: rate, **dict(record.get("values") or {})}
        if outcome not in OVER_MEMORY:  # a judgement of memory costs more than all else that an ending does
            return Observation(outcome, values)
        verdict = self._guard.judge(*need_of(record["config"]))
        # A launched OOM was predicted to fit: what it asked for last is the least it was over.
        asked_bytes = requested_bytes(str(record.get("message") or "")) or 1
        return Observation(outcome, values, max(asked_bytes, self._guard.overshoot_bytes(verdict)))

    def _restore(self) -> None:
        """Brings sampler, rungs and counters to where the records left them."""
        records = self._journal.records
        self._attempts.update(r["trial"] for r in records if r.event == "trial_start")
        self._started = len(self._attempts)
        own = [r for r in records if r.event == "refused" and r["stage"] == "search"]
        self._refused = sum(1 for r in own if r.get("trial") is None)
        rates = {t.id: t.samples_per_s or 0.0 for t in trials(records)}
        unwritten: list[Rated] = []  # of the last trial that ended, where a crash came before its ratings
        for record in records:
            if record.event == "rung" and record["trial"] in rates:
                milestone = max(m for m in self._orders.milestones if m <= record["samples"])
                rate = record.get("samples_per_s", rates[record["trial"]])  # as it was judged; older records lack it
                values = {SAMPLES_PER_S: rate, **record["values"]}
                self._rungs.remember(record["trial"], milestone, values)
                self._foresight.rung(record["trial"], milestone, record["values"])
            elif record.event == "trial_start":
                tries = bool(record.get("tries"))
                self._foresight.begun(record["trial"], record["config"], tries=tries)
                self._foresight.recall(record.fields)
                self._replacing.begun(record["trial"], tries=tries)
            elif record.event == "rated":
                self._foresight.take(Rated(record["trial"], record["config"], record["samples_per_s"]))
                unwritten = [one for one in unwritten if one.trial != record["trial"]]
            elif record.event == "trial":
                self._teach(record)  # the guard was made of these records
                unwritten = self._foresight.rated()
                self._replacing.ended(record)
            elif record.event == "refused" and record["stage"] == "search":
                self._sampler.replay(self._searched(record["config"]), self._observation(record))
                if record.get("trial"):
                    self._foresight.refused(record["trial"])
        self._rate_anew(unwritten)
        for trial, knobs in unfinished(records):
            self._numbers[trial] = self._sampler.adopt(self._searched(knobs))
            self._again.append(TrialRequest(trial, knobs, self._terms.seed))


def _why(failed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns why a trial began again with other system knobs, as far as it is known."""
    return {n: failed[n] for n in ("message", "outcome", "fault", "wanted_bytes", "cap_bytes") if n in failed}
