"""Trials that run with other system knobs than the fastest known ones, since those cannot change what is learned.

Probes end before it is known which couplings the front is made of, and so cannot have spent their time there. A trial
that tries another worker count learns as much as any other; what it costs is the time it is slower by, and what it
shows of the knobs holds for every trial of its coupling, before it and after.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainables.knobs import PHASE_KNOB, Knobs, Scalar
from tuning.config.space import Choice, Space
from tuning.search.acquisition import expected_improvement
from tuning.search.coordinates import Coordinates, Floats
from tuning.search.surrogate import Surrogate
from tuning.search.throughput import COUPLING, SYSTEM, Probed, Rates, coupling_of, place_of

PLAIN = 3
"""Trials of probed knobs that have to have ended first: they tell what a trial measures of what a probe says."""
RECENT = 32
"""Of those the newest count: a machine changes its pace within the hour."""
WORTH = 0.01
"""The least expected gain, in the logarithm of the speed, that makes a try worth more than `NEAR` ones."""
NEAR = 0.25
"""Without such a gain one change alone is tried, unless it is thought to be slower by more than this, as logarithm."""
IDLE = 16
"""So many tries of a coupling in a row that were no faster end them there: about one of every knob that may be changed.

Simulated mean final hypervolume of 8 seeds with 8, 16 and 32: temporal 0.500, 0.505, 0.505, signals 1.169 with each,
and where probes had little time 1.009, 1.017, 1.022.
"""
SETTLED = 4
"""So many trials with the same knobs tell their speed; from then on it counts like a probe's."""
CHANGED = 0.01
"""Of what is known of a speed, a smaller change than this is none."""
PAIRS = 32
"""Changes of two knobs that are considered beside every change of one."""
PENALTY = 0.1
"""Of a slope, in the logarithm of the speed: a tenth of what one measured change weighs."""
MODELLED = 96
"""What a guess is made of, those of the same coupling first: it is cubic in them."""

Fits = Callable[[Mapping[str, Scalar]], bool]


@dataclass(frozen=True)
class _Other:
    """A configuration with other system knobs."""

    knobs: dict[str, Scalar]
    is_one_change: bool


class Tries:
    """Which trial tries what, and what came of it. The same calls give the same tries.

    `frac` of the trials may be tries; `held` names by coupling the knobs that a probe's verdict said cannot help, and
    `failed` are configurations that a probe did not come to the end of.
    """

    def __init__(
        self,
        space: Space,
        rates: Rates,
        frac: float,
        seed: int,
        held: Mapping[tuple[Scalar, ...], Sequence[str]],
        failed: Sequence[Mapping[str, Scalar]],
    ) -> None:
        self.rates = rates
        """What probes and tries say of speed."""
        self._space, self._frac, self._seed, self._held = space, frac, seed, held
        self._names = [n for n in (*SYSTEM, *COUPLING) if n in space.parameters]
        self._coordinates = Coordinates(space, self._names)
        self._spent = {place_of(knobs) for knobs in failed}
        self._begun: set[str] = set()
        self._made: set[str] = set()
        self._idle: Counter[tuple[Scalar, ...]] = Counter()
        self._rests: dict[object, int] = {}  # what was known when nothing was worth a try beside a configuration
        self._seen: dict[object, list[Probed]] = {}

    def begun(self, trial: str, knobs: Mapping[str, Scalar], *, tries: bool) -> None:
        """Takes a trial that is under way, and whether it is a try; one that begins again is counted once."""
        self._begun.add(trial)
        if tries:
            self._made.add(trial)
            self._spent.add(place_of(knobs))

    def vary(self, knobs: Mapping[str, Scalar], fits: Fits) -> dict[str, Scalar] | None:
        """Returns the configuration with other system knobs, or None where it should run as it is.

        `fits` says whether one may run at its own micro-batch.
        """
        coupling = coupling_of(knobs)
        if knobs.get(PHASE_KNOB):  # what the phase costs would be taken for what the knobs do
            return None
        if len(self._made) >= self._frac * len(self._begun):
            return None
        if len(self.rates.plain) < PLAIN or self._idle[coupling] >= IDLE:
            return None
        known, here = self.rates.known, self.rates.of(knobs)
        place = place_of(knobs), Knobs.of(knobs).batch_size  # a larger batch has room for other micro-batches
        if here is None or self._rests.get(place) == len(known):
            return None
        unknown = [o for o in self._others(knobs) if self.rates.of(o.knobs) is None]
        unknown = [o for o in unknown if place_of(o.knobs) not in self._spent]
        fitting = [o for o in unknown if fits(o.knobs)]
        found = self._worthiest(fitting, math.log(here / self.rates.factor(knobs)), known, knobs)
        if found is None and len(fitting) == len(unknown):  # what does not fit may be found to, later
            self._rests[place] = len(known)
        return found

    def is_try(self, knobs: Mapping[str, Scalar]) -> bool:
        """Returns whether these are knobs that a trial, and no probe, is to tell the speed of."""
        return not self.rates.is_probed(knobs) and place_of(knobs) in self._spent

    def is_open(self, knobs: Mapping[str, Scalar]) -> bool:
        """Returns whether what a trial of these knobs measures is still to tell their speed."""
        is_settled = len(self._seen.get(place_of(knobs), ())) >= SETTLED
        return self.is_try(knobs) and not is_settled and not knobs.get(PHASE_KNOB)

    def was_made(self, trial: str) -> bool:
        """Returns whether the trial was begun as a try."""
        return trial in self._made

    def failed(self, knobs: Mapping[str, Scalar]) -> None:
        """Takes that a try did not come to a speed."""
        self._idle[coupling_of(knobs)] += 1

    def rate_of(self, knobs: Mapping[str, Scalar], measured: float | None) -> float | None:
        """Returns the samples a second of a try as it counts; None where nothing was measured or nothing can be told.

        What its neighbours cost is taken out: by what trials of probed knobs measured of what their probes said. It
        counts as slow as the deviation of that allows, so that luck alone changes nothing.
        """
        recent = self.rates.plain[-RECENT:]
        if not measured or not recent:
            return None
        return measured * statistics.median(recent) * math.exp(-_deviation(recent))

    def learn(self, knobs: Mapping[str, Scalar], measured: float | None) -> bool:
        """Takes what a try measured, and returns whether it changes what is known of other trials' speed.

        Of several trials with the same knobs it is the middle that counts, with an error that is less by their number.
        """
        rate, coupling = self.rate_of(knobs, measured), coupling_of(knobs)
        if rate is None:
            return False
        recent, batch_size = self.rates.plain[-RECENT:], Knobs.of(knobs).batch_size
        peers = [p for p in self.rates.known if coupling_of(p.knobs) == coupling]
        before = next((p for p in peers if place_of(p.knobs) == place_of(knobs)), None)
        others = (p.at_batch_size(batch_size) for p in peers if p is not before)
        best = max((rate for rate in others if rate), default=0.0)
        whole = rate * math.exp(_deviation(recent)) / self.rates.factor(knobs)
        seen = self._seen.setdefault(place_of(knobs), [])
        seen.append(_as_probe(knobs, whole, min((p.optimizer_step_s for p in peers), default=0.0)))
        error = math.exp(_deviation(recent) / math.sqrt(len(seen)))
        micro_s = math.exp(statistics.fmean(math.log(p.micro_step_s) for p in seen)) * error
        found = Probed(seen[0].knobs, micro_s, statistics.fmean(p.optimizer_step_s for p in seen), whole / error)
        here = found.at_batch_size(batch_size) or 0.0
        self.rates.put(found)
        self._idle[coupling] = 0 if here > best else self._idle[coupling] + (len(seen) == 1)
        there = (before.at_batch_size(batch_size) if before is not None else None) or 0.0
        was_best, is_changed = there > best, abs(here - there) > CHANGED * here
        return (here > best or was_best) and is_changed

    def _others(self, knobs: Mapping[str, Scalar]) -> Iterator[_Other]:
        """Yields the configuration with each searched system knob changed alone, and with some pairs of them."""
        held = self._held.get(coupling_of(knobs), ())
        values = {n: p.values for n in self._names if n in SYSTEM and isinstance(p := self._space.given(n), Choice)}
        alone = [{n: v} for n in values if n not in held for v in values[n] if v != knobs.get(n)]
        draw = np.random.default_rng([self._seed, len(self._begun)])
        pairs = (draw.choice(len(alone), size=2, replace=False) for _ in range(PAIRS if len(alone) > 1 else 0))
        seen = {place_of(knobs)}
        for changed in [*alone, *({**alone[int(a)], **alone[int(b)]} for a, b in pairs)]:
            found = self._space.complete({**knobs, **changed})
            if place_of(found) not in seen and coupling_of(found) == coupling_of(knobs):
                seen.add(place_of(found))
                yield _Other(found, is_one_change=len(changed) == 1)

    def _worthiest(
        self, others: Sequence[_Other], best: float, known: Sequence[Probed], knobs: Mapping[str, Scalar]
    ) -> dict[str, Scalar] | None:
        """Returns which is to be tried, or None: by the expected gain, less where a trial takes longer.

        Where nothing gains enough it is what differs in one knob alone and is thought to be the fastest: what is
        thought of a knob comes from other places, and may be wrong here.
        """
        if not others:
            return None
        coupling, batch_size = coupling_of(knobs), Knobs.of(knobs).batch_size
        own = sorted(known, key=lambda p: coupling_of(p.knobs) != coupling)[:MODELLED]
        points = np.array([self._coordinates.at(p.knobs) for p in own])
        speeds = np.array([math.log(p.at_batch_size(max(batch_size, p.micro_batch_size)) or 1e-9) for p in own])
        asked = np.array([self._coordinates.at(other.knobs) for other in others])
        trend = _additive(points, speeds)
        means, deviations = Surrogate(points, speeds - trend(points), np.zeros(len(own)), self._seed).at(asked)
        means = means + trend(asked)
        gains = expected_improvement(means - best, deviations)
        scores = np.where(gains >= WORTH, gains * np.exp(np.minimum(means - best, 0.0)), 0.0)
        if not scores.any():
            near = [other.is_one_change and mean > best - NEAR for other, mean in zip(others, means, strict=True)]
            scores = np.where(near, np.exp(means), 0.0)
        return others[int(np.argmax(scores))].knobs if scores.any() else None


def _additive(points: Floats, values: Floats) -> Callable[[Floats], Floats]:
    """Returns what every coordinate adds on its own, by least squares with a penalty that only holds what is unknown.

    What one change does to a logarithm of speed it mostly does beside others too. A process alone falls back on the
    mean of all that was seen wherever nobody looked, which lies far below the fastest.
    """
    centre, mean = points.mean(axis=0), float(values.mean())
    apart = points - centre
    slopes = np.linalg.solve(apart.T @ apart + PENALTY * np.eye(points.shape[1]), apart.T @ (values - mean))
    return lambda at: mean + (at - centre) @ slopes


def _deviation(ratios: Sequence[float]) -> float:
    """Returns the standard deviation of the logarithms, 0 of one alone."""
    return statistics.stdev(math.log(ratio) for ratio in ratios) if len(ratios) > 1 else 0.0


def _as_probe(knobs: Mapping[str, Scalar], rate: float, optimizer_step_s: float) -> Probed:
    """Returns the steps that give a configuration this speed; what is not the optimiser's is the micro-steps'."""
    own = Knobs.of(knobs)
    micro = min(own.micro_batch_size, own.batch_size)
    step_s = own.batch_size / rate
    optimizer_s = min(optimizer_step_s, step_s / 2)
    return Probed(dict(knobs), (step_s - optimizer_s) / math.ceil(own.batch_size / micro), optimizer_s, rate)
