"""What is known of a trial before it has ended: its speed, whether it fits, what it may come to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainables.knobs import PHASE_KNOB, Scalar
from tuning.config.space import Space
from tuning.journal.records import Record
from tuning.memory.groups import fits, key_of, need_of
from tuning.memory.guard import MemoryGuard
from tuning.memory.oom import Outcome
from tuning.search.outlook import Outlook
from tuning.search.pruner import Decision
from tuning.search.throughput import SYSTEM, Choice, Probed, Rates, coupling_of
from tuning.search.tries import Tries
from tuning.stats.pareto import Mode, front

APART = 1.03
"""How many times faster or slower a trial has to be than was said for it to be said anew: two probes tell no less."""


@dataclass(frozen=True)
class Rated:
    """A trial that trained to its end, and the fastest configuration known that learns the same, with its speed."""

    trial: str
    config: Mapping[str, Scalar]
    samples_per_s: float


@dataclass
class _Whole:
    """A trial that trained to its end: its knobs, the speed it is judged by, its quality, the larger the better."""

    knobs: Mapping[str, Scalar]
    samples_per_s: float
    quality: float


def tries_of(space: Space, probes: Sequence[Probed], records: Sequence[Record], frac: float, seed: int) -> Tries:
    """Returns the tries of a search over what was probed; `records` say which system knobs were probed in vain.

    Without `probes`, as in a joint search, no speed is known before it is measured, and nothing is tried.
    """
    notes = (r for r in records if r.event == "note" and r.get("coupling") is not None)
    held = {coupling_of({**space.fixed, **r["coupling"]}): r["frozen"] for r in notes}
    failed = [r["config"] for r in records if r.event == "probe" and r["outcome"] != Outcome.OK]
    return Tries(space, Rates(probes, space, need_of), frac if probes else 0.0, seed, held, failed)


class Foresight:
    """Chooses what to train next, and says what can be given up, from probes, tries, footprints and trials."""

    def __init__(
        self,
        space: Space,
        names: Sequence[str],
        tries: Tries,
        guard: MemoryGuard,
        objectives: Mapping[str, Mode],
        samples: int,
        seed: int,
    ) -> None:
        self._space, self._guard = space, guard
        self._tries, self._rates = tries, tries.rates
        self._objective, mode = next(iter(objectives.items()))
        self._sign = 1.0 if mode == "max" else -1.0
        # By a second quality a trial may yet reach the front.
        self._may_give_up = bool(self._rates.known) and len(objectives) == 1
        self._outlook = Outlook(space, names, mode, samples, seed)
        self._whole: dict[str, _Whole] = {}
        self._unrated: list[str] = []

    def rate_of(self, knobs: Mapping[str, Scalar], result: Mapping[str, Any]) -> float | None:
        """Returns what a probe found for these very knobs, else what the trial measured beside its neighbours."""
        known, measured = self._rates.of(knobs), result.get("measured_samples_per_s")
        if known is not None:
            return known
        tried = self._tries.rate_of(knobs, measured) if self._tries.is_try(knobs) else None
        return measured if tried is None else tried

    def potential(self, knobs: Mapping[str, Scalar], own: float | None) -> float | None:
        """Returns the speed of what these knobs learn: with the fastest system knobs known, or its `own` if more.

        It is `own` for all but those that try, or were overtaken by what another tried.
        """
        best = self._with_fastest(knobs)
        return own if best is None else max(own or 0.0, best[1])

    def choose(self, candidates: Sequence[Mapping[str, Scalar]]) -> int:
        """Returns which of them is expected to add most to the front for its time, the speed of each being known."""
        speeds: dict[Any, float | None] = {}  # most candidates differ in nothing that speed or memory depends on

        def speed(values: Mapping[str, Scalar]) -> float | None:
            whole = {**self._space.fixed, **values}
            alike = coupling_of(whole), whole.get("batch_size"), key_of(whole), self._rates.factor(whole)
            if alike not in speeds:
                found = self._fastest(values)
                speeds[alike] = None if found is None else found[1] or None
            return speeds[alike]

        return self._outlook.choose(candidates, [speed(c) for c in candidates])

    def system(self, knobs: Mapping[str, Scalar]) -> Mapping[str, Scalar] | None:
        """Returns the system knobs known that are fastest at the micro-batch that fits; None where none are known."""
        found = self._fastest(knobs)
        return None if found is None else found[0].system

    def vary(self, knobs: Mapping[str, Scalar]) -> dict[str, Scalar] | None:
        """Returns the configuration with system knobs to try, None where the trial should run with the fastest."""
        return self._tries.vary(knobs, self._fits)

    def begun(self, trial: str, knobs: Mapping[str, Scalar], *, tries: bool) -> None:
        """Takes a trial that is under way, and whether it tries system knobs."""
        self._outlook.begun(trial, knobs)
        self._tries.begun(trial, knobs, tries=tries)

    def recall(self, record: Mapping[str, Any]) -> None:
        """Takes what `known` said when a recorded trial began."""
        expected = record.get("expected")
        self._outlook.offer = record.get("offer")
        self._outlook.expected = None if expected is None else (float(expected[0]), float(expected[1]))

    def rung(self, trial: str, milestone: int, values: Mapping[str, float | None]) -> None:
        """Takes what a trial came to on the way."""
        self._outlook.rung(trial, milestone, values.get(self._objective))

    def decided(
        self,
        trial: str,
        place: Decision,
        knobs: Mapping[str, Scalar],
        milestone: int,
        values: Mapping[str, float | None],
        own: float | None,
    ) -> Decision:
        """Returns whether a trial goes on from a rung that decided so by its `place`; it runs at its `own` samples/s.

        One that the rung would stop goes on where that is expected to add more a second than the next trial; one that
        the rung lets pass ends where it cannot come to the front any more.
        """
        if not self._may_give_up or place.on_front or place.spared:
            return place
        value, rate = values.get(self._objective), self.potential(knobs, own) or 0.0
        if not place.go_on:
            if not self._outlook.is_worth_more(trial, knobs, milestone, value, rate, own or rate):
                return place
            place = Decision(True, f"the rest of it is worth more a second than the next trial; {place.reason}")
        hopeless = self._outlook.hopeless(knobs, milestone, value, rate)
        return Decision(False, hopeless) if hopeless else place

    def known(self) -> dict[str, Any]:
        """Returns what the last choice left for a record, to be read back by `recall`; nothing before any choice.

        `offer` is what was expected of the trial chosen, in quality times samples/s, a second; `expected` as below.
        """
        known = {"offer": self._outlook.offer, "expected": self._outlook.expected}
        return {name: value for name, value in known.items() if value is not None}

    @property
    def expected(self) -> tuple[float, float] | None:
        """What a next trial is expected to add at most, and at most a second, as shares of the area under the front.

        As of the last choice; None before any, and where one may add to a second quality.
        """
        return self._outlook.expected if self._may_give_up else None

    def ended(self, record: Record) -> None:
        """Takes how a trial ended, from its record."""
        trial, knobs, outcome = record["trial"], record["config"], record["outcome"]
        measured = record.get("measured_samples_per_s")
        if self._tries.was_made(trial) and outcome not in (Outcome.OK, Outcome.STOPPED):
            self._tries.failed(knobs)
        is_anew = self._tries.was_made(trial)  # its own speed was said before it was learned from
        if outcome in (Outcome.OK, Outcome.STOPPED) and self._tries.is_open(knobs):
            everybody = self._tries.learn(knobs, measured)
            self._unrated, is_anew = list(self._whole) if everybody else [], is_anew or everybody
        elif outcome == Outcome.OK or (outcome == Outcome.STOPPED and not knobs.get(PHASE_KNOB)):
            self._rates.learn(knobs, measured)  # of one that was stopped the phase may be all that ran
        if outcome == Outcome.OK:
            value, rate = record["values"].get(self._objective), self.potential(knobs, record["samples_per_s"])
            self._outlook.ended(trial, knobs, rate, value)
            if value is not None and math.isfinite(value) and record["samples_per_s"]:
                self._whole[trial] = _Whole(knobs, record["samples_per_s"], self._sign * value)
                self._unrated += [trial] * is_anew
        elif outcome == Outcome.STOPPED:
            self._outlook.stopped(trial, knobs)
        elif outcome == Outcome.DIVERGED or (outcome == Outcome.CRASH and not self._tries.was_made(trial)):
            self._outlook.failed(trial, knobs)
        else:
            self._outlook.dropped(trial)

    def refused(self, trial: str) -> None:
        """Takes that a trial that was under way will not begin again."""
        self._outlook.dropped(trial)

    # -- what trials tried, for those that ran otherwise ---------------------------------------------------------------

    def rated(self) -> list[Rated]:
        """Returns whom to judge anew by what was tried: those it puts on the front, those it shows too high there.

        System knobs cannot change what is learned, so that the quality of one and the speed of the other go together.
        Returns nothing a second time, until something was tried anew.
        """
        open_ = {trial: self._whole[trial] for trial in self._unrated if trial in self._whole}
        self._unrated = []
        now = {trial: self._now(one) for trial, one in open_.items()}
        fallen = [trial for trial, one in open_.items() if now[trial] * APART < one.samples_per_s]
        if not fallen and all(self._outlook.is_beaten(now[t], one.quality) for t, one in open_.items()):
            return []
        rates = {trial: now.get(trial, one.samples_per_s) for trial, one in self._whole.items()}
        found = list[Rated]()
        while rates:  # until whoever is on the front fits with the knobs that put it there
            on_front = self._on_front(rates)
            risen = [t for t in on_front if rates[t] > APART * self._whole[t].samples_per_s]
            best = {t: self._with_fastest(self._whole[t].knobs) for t in risen}
            unfit = [t for t in risen if best[t] is None]
            if not unfit:
                self._outlook.rated(rates, {t: (rates[t], self._whole[t].quality) for t in on_front})
                found = [Rated(t, *b) for t in risen if (b := best[t]) is not None]
                break
            rates.update({t: self._whole[t].samples_per_s for t in unfit})
        said = {trial: one.samples_per_s for trial, one in self._whole.items()}
        # One that falls may have hidden another.
        while fallen and (there := [t for t in self._on_front(said) if t in fallen]):
            for trial in there:
                fallen.remove(trial)
                said[trial], own = now[trial], self._whole[trial].knobs
                config, speed = self._with_fastest(own) or (own, 0.0)
                found.append(Rated(trial, config if speed >= now[trial] else own, now[trial]))
        return found

    def _on_front(self, speeds: Mapping[str, float]) -> list[str]:
        """Returns the trials that came to their end and are on the front at these speeds."""
        points = [[-speed, -self._whole[trial].quality] for trial, speed in speeds.items()]
        names = list(speeds)
        return [names[int(i)] for i in front(np.array(points).reshape(-1, 2))]

    def take(self, rated: Rated) -> None:
        """Takes that a trial is judged by another configuration, or another speed, from here on."""
        if rated.trial in self._whole:
            quality = self._whole[rated.trial].quality
            self._whole[rated.trial] = _Whole(rated.config, rated.samples_per_s, quality)

    def _now(self, one: _Whole) -> float:
        """Returns the speed of a trial by what is known now, the fastest system knobs being its own."""
        best = self._with_fastest(one.knobs)
        own = self._rates.of(one.knobs) if self._tries.is_try(one.knobs) else one.samples_per_s
        return max(own or one.samples_per_s, best[1] if best else 0.0)

    def _with_fastest(self, knobs: Mapping[str, Scalar]) -> tuple[dict[str, Scalar], float] | None:
        """Returns the knobs with the fastest system knobs known that fit, and the speed; None where none do."""
        learned = {n: v for n, v in knobs.items() if n not in SYSTEM}  # what the others need is theirs too
        for choice in self._rates.ranked(knobs):
            if self._fitting(learned, choice) == choice.system["micro_batch_size"]:
                return self._space.complete({**learned, **choice.system}), choice.samples_per_s
        return None

    def _fastest(self, values: Mapping[str, Scalar]) -> tuple[Choice, float] | None:
        """Returns the system knobs known with the largest speed at the micro-batch that fits, and that speed at least.

        It is 0 where none of them fits. A smaller micro-step takes no longer, so that the speed falls with it at most.
        """
        best: tuple[Choice, float] | None = None
        for choice in self._rates.ranked(values):
            if best is not None and choice.samples_per_s <= best[1]:
                break
            share = self._fitting(values, choice) / int(choice.system["micro_batch_size"])
            if best is None or choice.samples_per_s * share > best[1]:
                best = choice, choice.samples_per_s * share
        return best

    def _fitting(self, values: Mapping[str, Scalar], choice: Choice) -> int:
        """Returns the micro-batch at which a trial would begin, 0 for none."""
        knobs = {**self._space.fixed, **values, **choice.system}
        return self._guard.fitting(*need_of(knobs))

    def _fits(self, knobs: Mapping[str, Scalar]) -> bool:
        return fits(self._guard, knobs)
