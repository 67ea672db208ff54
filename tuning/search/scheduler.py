"""Stage 3: trials that train. The scheduler proposes, judges at rungs, and writes each ending before anyone is told."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from trainables.knobs import Scalar
from tuning.config.choices import PLAIN, PrunerName, SamplerName
from tuning.config.space import Space
from tuning.journal import events
from tuning.journal.records import Journal
from tuning.journal.run import History
from tuning.memory.groups import batch_size_of, defaults, learn, need_of, peaks_are_whole, refused
from tuning.memory.guard import FitVerdict, MemoryGuard
from tuning.memory.oom import DEPENDENT, Outcome, others_would_crash
from tuning.search import endings
from tuning.search.proposals import LEAST_WORTH, Candidate, Known, Proposals, Seen
from tuning.search.protocols import Told, TrialPlan, TrialRequest, TrialState
from tuning.search.pruner import RULES, Decision
from tuning.search.rule import Rule
from tuning.search.sampler import Observation, Proposal, Sampler
from tuning.search.selection import rule_of
from tuning.search.throughput import FEW_RATIOS, SAMPLES_PER_S, Speeds, fastest, group_of, inside, probed

OUT_OF_TIME = "the search's share of search.max_time is spent"
NAN_IN_FP16 = "NaN or Inf under amp_dtype=fp16, whose largest number is 65,504; bf16 and fp32 reach further"


@dataclass(frozen=True)
class SearchTerms:
    """The limits of the search: its most trials and its last moment (seconds of `clock`), None for no limit; its seed.

    `reference` is what is trained today, called `reference_name`; it is trained first, as it stands and to its end, and
    what the others are compared with. None: the plain defaults of the space.
    """

    trials: int
    deadline: float | None
    seed: int
    objectives: Mapping[str, Literal["min", "max"]]
    sampler: SamplerName = "known"
    pruner: PrunerName = "reference"
    reference: Mapping[str, Scalar] | None = None
    reference_name: str = PLAIN
    clock: Callable[[], float] = time.monotonic


class TrialScheduler:
    """Hands out trials, decides at rungs, records endings. Everything it knows it can read back from the records.

    The first trial is the reference. Learning and "both" knobs are proposed; the system knobs are the fastest that were
    probed and fit. So the speed of a trial is known, and only what would be faster than the pick of now is trained.
    """

    def __init__(
        self,
        journal: Journal,
        space: Space,
        guard: MemoryGuard,
        terms: SearchTerms,
        plan: TrialPlan,
        told: Told,
    ) -> None:
        self._journal, self._space, self._guard = journal, space, guard
        self._terms, self._plan, self._told = terms, plan, told
        known = [p for p in probed(self._run.probes, space.table) if inside(space, p)]
        self._speeds = Speeds(known, space.table, is_alone=plan.concurrency == 1)
        searched = space.subset({"learning", "both"})
        self._names = tuple(searched.parameters)
        self._objective, mode = next(iter(terms.objectives.items()))
        self._default_rule = Rule(self._objective, mode)
        self._qualities = endings.Qualities()
        self._reference = space.whole(terms.reference or defaults(space))
        self._reference_id = next((t.id for t in self._run.begun if t.named), "")
        self._may_train_reference = True
        today = self._searched(self._reference)
        has_today = all(today[n] in searched.parameters[n] for n in today)
        # It is tried once more, with the fastest system knobs.
        initial = [today] if terms.sampler != "known" and has_today else []
        objectives = {SAMPLES_PER_S: "max", **terms.objectives}
        self._sampler = Sampler(searched, objectives, terms.seed, name=terms.sampler, initial=initial)
        self._proposals = Proposals(searched)
        self._trained: dict[str, events.TrialRecord] = {}
        """Each trial that came to its end, or was stopped and can be guessed."""
        self._ratios: dict[tuple[Scalar, ...], list[float]] = defaultdict(list)
        """By speed group: the speed that each of its trainings measured, over the speed that probes let expect."""
        self._numbers: dict[str, int] = {}
        self._live: dict[str, endings.Live] = {}
        self._expected: dict[str, dict[str, float]] = {}
        """By trial that is to begin: the speed expected of it and that of the pick of now, in samples/s."""
        self._beside = {t.id for t in self._run.begun if t.is_beside}
        self._again: list[TrialRequest] = []
        self._retries: list[dict[str, Scalar]] = []
        self._whole_s: list[float] = []
        self._crashes: dict[str, str] | None = {}
        """The message each trial of this session failed with, "" if others need not; None once any has come further."""
        self._are_dependent = False
        """Whether a training was seen to go on from an earlier one."""
        self._whole_peaks = peaks_are_whole(self._run)
        self._once_through = (self._run.study.train_samples if self._run.study else 0) or plan.samples
        self.stop_reason = ""
        """Why no other trial begins, "" while more may."""
        self.is_out_of_time = False
        self.has_nothing_better = False
        """It ended since nothing was worth a training: what fresh seeds say may change that."""
        self._restore()

    @property
    def _run(self) -> History:
        return self._journal.run

    @property
    def _refused(self) -> int:
        """Returns how many proposals were refused; a trial that waited and was refused is none."""
        return sum(refusal.stage == "search" and not refusal.trial for refusal in self._run.refused)

    # -- what the executor calls --------------------------------------------------------------------------------------

    def next_trial(self) -> TrialRequest | None:
        """Returns the next trial to run: one that was interrupted first, else a new proposal; None at the end.

        An interrupted trial is judged again: what was learned since may rule it out.
        """
        while self._again:
            pending = self._again.pop(0)
            if self._still_fits(pending):
                return self._begin(pending.trial, pending.knobs)
        found = self._proposed()
        return None if found is None else self._begin(found.trial, found.knobs)

    def _still_fits(self, pending: TrialRequest) -> bool:
        """Returns whether a trial that was interrupted may begin again; writes that it does not fit if it may not."""
        verdict = self._judged(pending.knobs)
        if verdict.fits:
            return True
        gone = self._refusal(pending.knobs, verdict, trial=pending.trial)
        if pending.trial in self._numbers:
            self._sampler.observe(self._numbers.pop(pending.trial), self._observation(gone))
        self._told(gone)
        return False

    def _proposed(self) -> TrialRequest | None:
        """Returns a new trial that fits; None if the search is over."""
        if (first := self._reference_trial()) is not None:
            return first
        while not self._is_over():
            proposal = self._proposal()
            if proposal is None:
                self.stop_reason = self.stop_reason or "every configuration of the space was tried"
                break
            knobs = self._knobs(proposal.values)
            verdict = self._judged(knobs)
            if verdict.fits:
                request = self._numbered(knobs)
                self._numbers[request.trial] = proposal.number
                self._expected[request.trial] = self._speeds_of_proposal
                return request
            gone = self._refusal(knobs, verdict)
            self._sampler.observe(proposal.number, self._observation(gone))
            self._told(gone)
        return None

    def goes_on(self, trial: str, state: TrialState | None = None) -> bool:
        """Returns whether a trial that runs, or is about to, has time left and is still judged to fit.

        A trial that has seen the whole training split has met the longest samples, and is not judged again.
        """
        live = self._live.get(trial)
        if live is None:
            return True
        self._write_retries(trial, live, state)
        samples = state.samples if state else 0
        if self._time_is_up():
            live.stopped_at, live.reason = samples, OUT_OF_TIME
            return False
        if samples >= self._once_through:
            return True
        verdict = self._judged((state.knobs if state else {}) or live.knobs)
        if verdict.action == "launch":
            return True
        live.is_ruled_out, live.reason = True, f"ruled out by what was learned since it began: {verdict.reason}"
        return False

    def at_rung(self, trial: str, state: TrialState) -> bool:
        """Returns whether the trial goes on; the rung is written first."""
        samples, values, live = state.samples, dict(state.values), self._live[trial]
        measured = state.measured_samples_per_s
        rate = self._speeds.judged(live.knobs, measured) or 0.0
        milestone = max(m for m in self._plan.milestones if m <= samples)
        self._crashes = None
        is_early = self._is_early(state)
        if not is_early:
            self._qualities.rung(trial, milestone, values.get(self._objective))
        decision = self._judge_at(milestone, trial, is_early=is_early)
        if decision.go_on and self._time_is_up():
            decision = Decision(False, OUT_OF_TIME)
        speeds = {SAMPLES_PER_S: rate, "measured_samples_per_s": measured}
        words = {"goes_on": decision.go_on, "reason": decision.reason}
        early = {"early": True} if is_early else {}
        record = self._journal.append(
            events.RungRecord, trial=trial, samples=samples, values=values, **speeds, **words, **early
        )
        if not decision.go_on:
            live.stopped_at, live.reason = samples, decision.reason
        self._told(record)
        return decision.go_on and self.goes_on(trial, state)

    def _judge_at(self, milestone: int, trial: str, *, is_early: bool) -> Decision:
        """Returns whether a trial goes on from a rung, by the rule that `search.pruner` names."""
        if trial in self._beside:
            return Decision(True, "the reference is trained to its end")
        if is_early:
            return Decision(True, f"its last phase has not begun at {milestone} samples")
        return RULES[self._terms.pruner](self._qualities.beside(trial, milestone, self._reference_id, self._rule()))

    def _rule(self) -> Rule:
        return rule_of(self._run) or self._default_rule

    def _is_early(self, state: TrialState) -> bool:
        """Returns whether the last round's last phase has not begun at a rung: what is judged is what it trains."""
        *earlier, _ = (state.active.get("phases") or {"": 1.0}).values()
        if not earlier:
            return False
        begun = state.samples - batch_size_of(state.knobs)  # where its last batch has: it has one phase
        rounds = state.active.get("phase_rounds", 1)
        return bool(begun < (rounds - 1 + sum(earlier)) / rounds * self._plan.samples)

    def widened(self, trial: str, state: TrialState) -> None:
        """Writes that a slot was too small, and teaches the guard: trials like it have a device to themselves.

        Nothing is taught where the trial needed less than its slot, as on a card that others have filled.
        """
        failed = dataclasses.replace(state, knobs=state.knobs or self._live[trial].knobs)
        needed_more = (state.wanted_bytes or 0) > (state.cap_bytes or math.inf)
        is_oom = state.outcome == Outcome.OOM and needed_more
        endings.begun_again(self._journal, self._guard, trial, failed, is_oom=is_oom)
        slot_mib = (state.cap_bytes or 0) / 2**20
        self.decided("widened", trial, f"it needs more than its slot of {slot_mib:.0f} MiB, and begins alone")

    def ended(self, trial: str, state: TrialState) -> None:
        """Writes the ending, then teaches sampler and guard."""
        live = self._live.pop(trial, endings.Live({}))
        self._write_retries(trial, live, state)
        knobs = dict(state.knobs or live.knobs)
        measured = {
            **events.known_fields(state, events.Trained),
            "outcome": live.outcome(state.outcome),
            "values": dict(state.values),
            "samples_per_s": self._speeds.judged(knobs, state.measured_samples_per_s),
        }
        end = self._journal.append(
            events.TrialRecord,
            trial=trial,
            config=knobs,
            stopped_at=live.stopped_at,
            reason=live.reason,
            seed=self._terms.seed,
            **measured,
        )
        learn(self._guard, end, whole=self._whole_peaks)
        self._are_dependent |= end.message.startswith(DEPENDENT)
        alike = endings.others_alike(end)
        if alike is False:
            self._crashes = None
        elif self._crashes is not None:
            self._crashes[trial] = end.message if alike else ""
        self._teach(end)
        self._told(end)
        self._say_halved(trial, live.knobs, knobs)
        self._retry(end)
        is_said = any(note.text == NAN_IN_FP16 for note in self._run.notes)
        if end.outcome == Outcome.DIVERGED and knobs.get("amp_dtype") == "fp16" and not is_said:
            self._told(self._journal.append(events.NoteRecord, text=NAN_IN_FP16))

    def _write_retries(self, trial: str, live: endings.Live, state: TrialState | None) -> None:
        """Writes and tells how earlier attempts ended as soon as that is known: a trial that is cut says no more."""
        retries = () if state is None else state.retries
        begun = live.retries if live.retries <= len(retries) else 0  # a new process has none of the attempts before it
        for failed in retries[begun:]:
            is_oom = failed.outcome == Outcome.OOM
            self._told(endings.begun_again(self._journal, self._guard, trial, failed, is_oom=is_oom))
        live.retries = len(retries) or live.retries

    def _say_halved(self, trial: str, begun: Mapping[str, Scalar], ended: Mapping[str, Scalar]) -> None:
        """Says where running out of memory has changed what a trial learned: by its micro-batch, where that matters."""
        size = "micro_batch_size"
        if size in self._space.table.kinds and begun.get(size, ended.get(size)) != ended.get(size):
            text = f"{trial} ran out of memory and went on with {size}={ended[size]} in place of {begun[size]}"
            self._told(self._journal.append(events.NoteRecord, text=f"{text}, which changes what is learned here"))

    def decided(self, event: str, trial: str, reason: str) -> None:
        """Writes what the executor did about a trial or its process, and why."""
        self._told(self._journal.append(events.DECISIONS[event], trial=trial, reason=reason))

    # -- proposals -----------------------------------------------------------------------------------------------------

    def _numbered(self, knobs: Mapping[str, Scalar]) -> TrialRequest:
        """Returns a new trial under the next id."""
        trial = f"t{1 + max((int(known[1:]) for known in self._run.trials), default=-1):03d}"
        return TrialRequest(trial, knobs, self._terms.seed)

    def _begin(self, trial: str, knobs: Mapping[str, Scalar]) -> TrialRequest:
        verdict = self._judged(knobs)
        applied = verdict.applied(knobs)
        attempts = len(self._run.trials[trial].starts) if trial in self._run.trials else 0
        speeds = self._expected.pop(trial, {})
        named = {"named": self._terms.reference_name, "beside": True} if trial in self._beside else speeds
        self._live[trial] = endings.Live(applied)
        self._journal.append(
            events.StartRecord,
            trial=trial,
            config=applied,
            attempt=attempts + 1,
            predicted_bytes=verdict.predicted_bytes,
            p_oom=verdict.p_oom,
            decision=verdict.action,
            decision_reason=verdict.reason,
            **named,
        )
        return TrialRequest(trial, applied, self._terms.seed, verdict.predicted_bytes)

    def _proposal(self) -> Proposal | None:
        """Returns what is trained in place of a trial that was ruled out, else what is of most worth."""
        self._speeds_of_proposal: dict[str, float] = {}
        if self._retries:
            values = self._retries.pop(0)
            return Proposal(self._sampler.adopt(values), values)
        if self._terms.sampler != "known" or not self._speeds.ranked(self._reference):
            return self._sampler.propose()
        known = self._known()
        good = [one for one in known.seen if one.gain is not None and known.rule.admits(one.gain)]
        near = sorted(good, key=lambda one: -one.samples_per_s)[:3]
        candidates = []
        for values in self._sampler.candidates([known.reference, *(one.values for one in near)]):
            per_s = self._expected_per_s(self._space.complete(values))
            if per_s:
                candidates.append(Candidate(values, per_s))
        found = self._proposals.choose(candidates, known)
        if found is None or found[1] < LEAST_WORTH:
            both = "faster and as good" if known.rule.goal == "speed" else "better and as fast"
            self.stop_reason = f"no untried configuration of the search space is likely to be both {both}"
            self.has_nothing_better = True
            return None
        chosen, pick_per_s = found[0], self._proposals.pick(known).samples_per_s
        self._speeds_of_proposal = {"expected_per_s": chosen.samples_per_s, "pick_per_s": pick_per_s}
        return Proposal(self._sampler.adopt(chosen.values), dict(chosen.values))

    def pick(self) -> str:
        """Returns the trial of the pick of now, the reference's if nothing faster is fairly sure to be as good."""
        found = self._proposals.pick(self._known())
        place = (found.values, found.samples_per_s)
        return next((trial for trial in self._trained if self._place(trial) == place), self._reference_id)

    def _known(self) -> Known:
        """Returns what the next trial is chosen by: reference, rule, and every training of the trials that began."""
        rule, again = self._rule(), self._trained_again()
        own, name = self._today(), self._terms.reference_name
        todays = [*([] if own is None else [own]), *again.get(name, [])]
        today = statistics.fmean(todays) if todays else None
        seen = [self._seen(trial, rule, own, today) for trial in self._trained]
        for trial, qualities in again.items():
            if trial in self._trained and today is not None:
                seen += [Seen(*self._place(trial), rule.gain(value, today)) for value in qualities]
        for trial, live in self._live.items():
            if trial not in self._beside:
                values = self._searched(live.knobs)
                seen.append(Seen(values, self._expected_per_s(live.knobs), 0.0, is_running=True))
        probed_per_s = (self._speeds.of(self._reference) or 0.0) * self._ratio(self._reference)
        today_per_s = max(self._expected_per_s(self._reference), probed_per_s)
        gains = [0.0] if today is None else [rule.gain(value, today) for value in todays]
        return Known(self._searched(self._reference), today_per_s, seen, rule, gains)

    def _trained_again(self) -> dict[str, list[float]]:
        """Returns the qualities on fresh seeds by the name of what was trained: they teach a search that goes on."""
        found: dict[str, list[float]] = defaultdict(list)
        for again in self._run.confirmed:
            value = again.values.get(self._objective)
            if again.is_ok and value is not None:
                found[again.name].append(value)
        return found

    def _seen(self, trial: str, rule: Rule, own: float | None, today: float | None) -> Seen:
        """Returns what a trial has shown by the search's seed; one that was stopped by what is expected of its end.

        `own` is the reference's quality by that seed, `today` its mean over all.
        """
        values, per_s = self._place(trial)
        whole = self._qualities.whole.get(trial)
        if whole is not None and today is not None:
            return Seen(values, per_s, rule.gain(whole, today))
        last = self._qualities.last_rung(trial)
        end = None if last is None else self._qualities.beside(trial, last, self._reference_id, rule).end
        if end is None or own is None or today is None:
            return Seen(values, per_s, None)
        apart = rule.gain(own, today) if rule.at_least is None else 0.0
        return Seen(values, per_s, end.gain + apart, error=max(end.error, 1e-12))

    def _place(self, trial: str) -> tuple[dict[str, Scalar], float]:
        """Returns the searched values of a trial that was trained, and its speed in samples/s as it is known by now."""
        end = self._trained[trial]
        return self._searched(end.config), self._expected_per_s(end.config) or end.samples_per_s or 0.0

    def _today(self) -> float | None:
        """Returns the reference's quality by the search's seed, of the first trial that ended if it has none."""
        whole = self._qualities.whole
        return whole.get(self._reference_id, next(iter(whole.values()), None))

    def _expected_per_s(self, knobs: Mapping[str, Scalar]) -> float:
        """Returns the speed that is expected of a trial with the fastest system knobs that fit, 0 if none do."""
        found = fastest(self._speeds, self._guard, knobs)
        return 0.0 if found is None else found.samples_per_s * self._ratio(knobs)

    def _ratio(self, knobs: Mapping[str, Scalar]) -> float:
        """Returns how many times as fast as its probe a configuration trains.

        A training lasts longer than a probe, whose speed varies by 14 % (docs/log/known_speeds.md). Trials side by side
        slow each other down: then only groups without a probe have a ratio.
        """
        if own := self._ratios.get(group_of(knobs, self._space.table)):
            return statistics.geometric_mean(own)
        others = [ratio for ratios in self._ratios.values() for ratio in ratios]
        return statistics.median(others) if len(others) >= FEW_RATIOS and self._plan.concurrency == 1 else 1.0

    @property
    def only_crashes(self) -> bool:
        """Returns whether those that began first failed alike, and none has come further: others would fail, too.

        Also if a training went on from an earlier one: then none can be trusted.
        """
        if self._are_dependent:
            return True
        crashed = self._crashes or {}
        first = list(itertools.takewhile(crashed.__contains__, self._run.trials))
        return others_would_crash([crashed[trial] for trial in first if crashed[trial]])

    def _is_over(self) -> bool:
        begun, most = len(self._run.trials.keys() - self._beside), self._terms.trials
        if self.stop_reason:
            return True
        if self.only_crashes:
            self.stop_reason = "" if self._live else "the first trials crashed"
            return True  # one that still runs may come further
        if begun + max(0, self._refused - most) >= most:  # what does not fit costs no time: as many more are proposed
            self.stop_reason = "the one trial was proposed" if most == 1 else f"all {most} trials were proposed"
        elif self._is_late() and begun + self._refused >= self._plan.concurrency:
            spent = f"its share of search.max_time was spent after {begun} of {most} trials"
            self.stop_reason, self.is_out_of_time = f"{spent}; confirming takes the rest", True
        return bool(self.stop_reason)

    def _is_late(self) -> bool:
        """Returns whether a trial begun now would be cut at the deadline more often than not: most stop half way."""
        deadline = self._terms.deadline
        typical_s = statistics.median(self._whole_s) if self._whole_s else 0.0
        return deadline is not None and self._terms.clock() + typical_s / 2 > deadline

    def _time_is_up(self) -> bool:
        """Returns whether running trials are cut: the deadline has passed, and a trial has come to its end."""
        deadline = self._terms.deadline
        return deadline is not None and bool(self._qualities.whole) and self._terms.clock() > deadline

    def _knobs(self, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        asked = self._space.complete(values)
        found = fastest(self._speeds, self._guard, asked)
        if found is None:  # no probe succeeded: the plain defaults, and the guard's judgement
            return self._space.complete({**defaults(self._space), **values})
        return {**asked, **found.system}

    def _reference_trial(self) -> TrialRequest | None:
        """Returns the trial of the reference as it stands, unless it has begun or does not fit."""
        if not self._may_train_reference or self._reference_id or self._is_over():
            return None
        verdict = self._judged(self._reference)
        if verdict.fits:
            request = self._numbered(self._reference)
            self._reference_id = request.trial
            self._beside.add(request.trial)
            return request
        self._may_train_reference = False
        said = f"{self._terms.reference_name} is not trained: {verdict.reason}"
        self._told(self._journal.append(events.NoteRecord, text=f"{said}; the first trial that ends stands in for it"))
        return None

    def _judged(self, knobs: Mapping[str, Scalar]) -> FitVerdict:
        """Returns what to do with a configuration.

        A micro-batch that changes what is learned is judged as proposed. (A trial that runs out of memory all the same
        goes on with half of it: see `_say_halved`.)
        """
        alters_nothing = "micro_batch_size" in self._space.table.system
        return self._guard.judge(*need_of(knobs, self._guard.table), shrink=self._plan.shrink and alters_nothing)

    def _refusal(self, knobs: Mapping[str, Scalar], verdict: FitVerdict, **more: str) -> events.RefusedRecord:
        return refused(self._journal, knobs, verdict, self._guard.cap_bytes, "search", **more)

    def _retry(self, end: events.TrialRecord) -> None:
        """Queues once more what was ruled out while it ran, where half of its micro-batch fits."""
        if end.outcome != Outcome.REFUSED or end.trial in self._beside or not self._judged(end.config).fits:
            return
        values = self._searched(end.config)
        starts = [start for trial in self._run.begun if trial.id != end.trial for start in trial.starts]
        if values not in self._retries and all(self._searched(start.config) != values for start in starts):
            self._retries.append(values)

    # -- what was learned ----------------------------------------------------------------------------------------------

    def _teach(self, end: events.TrialRecord) -> None:
        """Tells the sampler how a trial ended."""
        if end.outcome == Outcome.OK:
            self._whole_s.append(end.train_s + end.evaluate_s)
            self._speeds.learn(end.config, end.measured_samples_per_s)
            self._qualities.ended(end.trial, end.values.get(self._objective))
        self._learn_ratio(end)
        if end.trial in self._beside:
            return
        self._learn_speed(end)
        number = self._numbers.pop(end.trial, None)
        if number is not None:
            self._sampler.observe(number, self._observation(end))
        else:
            asked = self._run.trials[end.trial].config or end.config  # it may have gone on with other system knobs
            self._sampler.replay(self._searched(asked), self._observation(end))

    def _learn_speed(self, end: events.TrialRecord) -> None:
        """Takes the speed and the quality of a trial that ended, or was stopped and is guessed."""
        if end.outcome in endings.OVER_MEMORY or not end.samples_per_s:
            return  # the guard keeps others like it away
        if end.outcome in (Outcome.STOPPED, Outcome.CUT) and self._qualities.guess(end.trial) is None:
            return
        self._trained[end.trial] = end

    def _learn_ratio(self, end: events.TrialRecord) -> None:
        """Takes how many times as fast as probes let expect a training was that came to its end."""
        knobs, measured = end.config, end.measured_samples_per_s
        probed_per_s, expected = self._speeds.of(knobs), fastest(self._speeds, self._guard, knobs)
        if end.outcome != Outcome.OK or not measured or expected is None:
            return
        ratios = self._ratios[group_of(knobs, self._space.table)]
        if probed_per_s is None:  # a group without a probe; the recorded speed is as it would be without neighbours
            ratios.append((end.samples_per_s or measured) / expected.samples_per_s)
        elif self._plan.concurrency == 1:
            ratios.append(measured / probed_per_s)

    def _observation(self, end: events.TrialRecord | events.RefusedRecord) -> Observation:
        return endings.observation(end, self._objective, self._qualities, self._guard)

    def _searched(self, knobs: Mapping[str, Scalar]) -> dict[str, Scalar]:
        return {n: v for n, v in knobs.items() if n in self._names}

    def _restore(self) -> None:
        """Brings sampler, pruner and counters to where the records left them."""
        run = self._run
        again = {trial.id: trial.config for trial in run.unfinished}
        alike = {end.trial: endings.others_alike(end) for end in run.ended}
        if any(trial.rungs for trial in run.trials.values()) or False in alike.values():
            self._crashes = None
        else:  # what they failed of is mended: each begins again
            self._crashes = {trial: "" for trial, is_alike in alike.items() if is_alike is None}
            again = {end.trial: end.config for end in run.ended if alike[end.trial]} | again
        judged = alike.keys() - again.keys()
        latest = {trial.last.seq for trial in run.trials.values() if trial.last is not None and trial.id not in again}
        for event in run.events:
            match event:
                case events.RungRecord(early=False) if event.trial in judged:
                    milestone = max(m for m in self._plan.milestones if m <= event.samples)
                    self._qualities.rung(event.trial, milestone, event.values.get(self._objective))
                case events.TrialRecord() if event.seq in latest:  # else it began again
                    self._teach(event)  # the guard was made of these records
                    self._retry(event)
                case events.RefusedRecord(stage="search"):
                    self._sampler.replay(self._searched(event.config), self._observation(event))
        for name, knobs in again.items():
            if name not in self._beside:
                self._numbers[name] = self._sampler.adopt(self._searched(knobs))
            self._again.append(TrialRequest(name, knobs, self._terms.seed))
