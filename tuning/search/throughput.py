"""From probes to the throughput of any trial: which system knobs suit it, and how fast it will train.

A probe measures the seconds of a micro-step and of an optimiser step apart. A batch of b samples cut into micro-batches
of m then takes ceil(b / m) micro-steps and one optimiser step, so one probe serves every batch size from m upwards.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trainables.knobs import NAMES, PHASE_KNOB, Knobs, Scalar, is_active, kind_of
from tuning.config.space import Choice as SpaceChoice
from tuning.config.space import Range, Space

COUPLING = tuple(n for n in NAMES if kind_of(n) == "both")
"""Knobs that change speed and learning: a probe answers only for trials that share their values."""
REMEMBERED = 256
"""Of so many trials a middle is taken, the newest: of 10,000 it would take longer than to propose one."""
SYSTEM = tuple(n for n in NAMES if kind_of(n) == "system")
_DEFAULTS = Knobs().as_dict()


@dataclass(frozen=True)
class Probed:
    """What one probe found: its knobs, the seconds of a micro-step and of an optimiser step, samples a second."""

    knobs: Mapping[str, Scalar]
    micro_step_s: float
    optimizer_step_s: float
    samples_per_s: float

    @cached_property
    def micro_batch_size(self) -> int:
        """Returns the samples of one of its micro-steps."""
        return min(int(self.knobs.get(name, _DEFAULTS[name])) for name in ("micro_batch_size", "batch_size"))

    @cached_property
    def system(self) -> Mapping[str, Scalar]:
        """Returns its system knobs, the micro-batch as it ran."""
        return {**{n: v for n, v in self.knobs.items() if n in SYSTEM}, "micro_batch_size": self.micro_batch_size}

    def at_batch_size(self, batch_size: int) -> float | None:
        """Returns samples a second at this batch size, or None where the batch is smaller than what was measured."""
        if batch_size < self.micro_batch_size:
            return None
        micro_steps = math.ceil(batch_size / self.micro_batch_size)
        return batch_size / (micro_steps * self.micro_step_s + self.optimizer_step_s)


@dataclass(frozen=True)
class Choice:
    """The system knobs for a trial and the samples a second they are expected to give."""

    system: Mapping[str, Scalar]
    samples_per_s: float


def ranked(probes: Sequence[Probed], trial: Mapping[str, Scalar]) -> list[Choice]:
    """Returns the probed system knobs for a trial of these knobs, the fastest first; of equals the first probed.

    There are none where no probe answers for it.
    """
    batch_size, coupling = Knobs.of(trial).batch_size, coupling_of(trial)
    found = []
    for probe in probes:
        rate = probe.at_batch_size(batch_size) if coupling_of(probe.knobs) == coupling else None
        if rate is not None:
            found.append(Choice(probe.system, rate))
    return sorted(found, key=lambda choice: -choice.samples_per_s)


def _rate_among(probes: Mapping[Any, Probed], trial: Mapping[str, Scalar]) -> float | None:
    probe = probes.get(place_of(trial))
    return None if probe is None else probe.at_batch_size(Knobs.of(trial).batch_size)


def place_of(knobs: Mapping[str, Scalar]) -> tuple[Any, ...]:
    """Returns what has to be equal for a probe to answer for exactly these knobs."""
    full = {**_DEFAULTS, **knobs}
    micro = min(int(full["micro_batch_size"]), int(full["batch_size"]))
    return _key({**full, "micro_batch_size": micro}, SYSTEM), coupling_of(full)


class Rates:
    """The samples a second of trials: what probes found, corrected for a phase that they did not run.

    Where the phase's share is searched, probes run without it. A share f then takes 1 + f * c as long a sample; c is
    the middle of what trials took over what probes said, against that ratio of trials without the phase, which tells
    what neighbours on the machine cost. Until one of each has ended, c is 0. What trials showed of knobs that nobody
    had probed (`search.tries`) counts beside the probes once it was put. `need_of` returns what the memory that a
    configuration needs depends on; by default no two places need the same.
    """

    def __init__(
        self,
        probes: Sequence[Probed],
        space: Space,
        need_of: Callable[[Mapping[str, Scalar]], Hashable] = place_of,
    ) -> None:
        self._probes, self._fixed, self._need_of = probes, space.fixed, need_of
        self._places = {place_of(probe.knobs): probe for probe in reversed(probes)}  # of equals the first
        self._put: dict[Any, Probed] = {}
        self._kept: dict[tuple[tuple[Scalar, ...], Scalar | None], list[Choice]] = {}
        self._plain: list[float] = []
        self._with: list[tuple[float, float]] = []  # share, ratio
        self._cost: float | None = None  # c, until a trial changes it

    @property
    def known(self) -> list[Probed]:
        """Returns what was probed, and what was put."""
        return [*self._probes, *self._put.values()]

    @property
    def plain(self) -> list[float]:
        """Returns what probes said over what trials without the phase took, the newest at last."""
        return self._plain

    def put(self, found: Probed) -> None:
        """Takes what trials showed of knobs that nobody had probed, in place of what was put there before."""
        coupling = coupling_of(found.knobs)
        self._put[place_of(found.knobs)] = found
        self._kept = {asked: choices for asked, choices in self._kept.items() if asked[0] != coupling}

    def is_probed(self, knobs: Mapping[str, Scalar]) -> bool:
        """Returns whether a probe answers for exactly these knobs."""
        return place_of(knobs) in self._places

    def ranked(self, values: Mapping[str, Scalar]) -> Iterator[Choice]:
        """Yields the system knobs known for a trial, and what it will have with them, the fastest first.

        Of those with which it needs the same memory the fastest are all that count.
        """
        whole = {**self._fixed, **values}
        key = (coupling_of(whole), whole.get("batch_size"))
        if key not in self._kept:
            of_each: dict[Hashable, Choice] = {}
            for choice in ranked(self.known, whole):
                of_each.setdefault(self._need_of({**whole, **choice.system}), choice)
            self._kept[key] = list(of_each.values())
        factor = self.factor(whole)
        return (Choice(found.system, found.samples_per_s * factor) for found in self._kept[key])

    def of(self, knobs: Mapping[str, Scalar]) -> float | None:
        """Returns what a trial of exactly these knobs has; None where nobody probed or tried them."""
        place = place_of(knobs)
        found = self._places.get(place) or self._put.get(place)
        rate = None if found is None else found.at_batch_size(Knobs.of(knobs).batch_size)
        return None if rate is None else rate * self.factor(knobs)

    def learn(self, knobs: Mapping[str, Scalar], measured: float | None) -> None:
        """Takes what a whole trial measured itself."""
        rate = _rate_among({**self._put, **self._places}, knobs) if measured else None
        if rate is None or not measured:
            return
        share, self._cost = float(knobs.get(PHASE_KNOB, 0.0)), None
        if share > 0:
            self._with.append((share, rate / measured))
        else:
            self._plain.append(rate / measured)

    def factor(self, knobs: Mapping[str, Scalar]) -> float:
        """Returns what the phase leaves of a configuration's speed, 1 where it has none."""
        share = float(knobs.get(PHASE_KNOB, 0.0))
        if not share or not self._with or not self._plain:
            return 1.0
        if self._cost is None:
            plain = statistics.median(self._plain[-REMEMBERED:])
            self._cost = statistics.median((ratio / plain - 1.0) / f for f, ratio in self._with[-REMEMBERED:])
        return 1.0 / max(0.1, 1.0 + share * self._cost)


def suits(space: Space, probe: Probed) -> bool:
    """Returns whether the space has the probe's "both" knobs, so that a trial can be made of them."""
    full = {**_DEFAULTS, **probe.knobs}
    for name in COUPLING:
        given = space.given(name)
        if isinstance(given, SpaceChoice):
            if full[name] not in given.values:
                return False
        elif isinstance(given, Range):
            if full[name] not in given:
                return False
        elif full[name] != given and is_active(name, full):
            return False
    return True


def inside(space: Space, probe: Probed) -> bool:
    """Returns whether the space allows the probe's system knobs: a configuration named beside it need not be."""
    full = {**_DEFAULTS, **probe.knobs}
    for name in SYSTEM:
        parameter = space.parameters.get(name)
        if parameter is None and name in space.fixed and full[name] != space.fixed[name]:
            return is_active(name, full) is False
        if isinstance(parameter, SpaceChoice) and full[name] not in parameter.values and is_active(name, full):
            return False
    return True


def coupling_of(knobs: Mapping[str, Scalar]) -> tuple[Scalar, ...]:
    """Returns the values of the knobs that tie a probe to a trial, defaults filled in."""
    return tuple(knobs.get(name, _DEFAULTS[name]) for name in COUPLING)


def neighbour(
    incumbent: Mapping[str, Scalar], alternatives: Mapping[str, Sequence[Scalar]], seen: Iterable[Mapping[str, Scalar]]
) -> dict[str, Scalar] | None:
    """Returns the incumbent with one knob changed, such as nobody measured yet; None when every neighbour was.

    Knobs are tried in the order of `alternatives`, and values nearest to the incumbent's first: memory grows in small
    steps, so the first configuration that does not fit comes late and cheaply.
    """
    done = {_key(values) for values in seen}
    for name, values in alternatives.items():
        current = incumbent.get(name)
        for value in sorted(values, key=lambda v: _distance(values, v, current)):
            candidate = {**incumbent, name: value}
            if _key(candidate) not in done:
                return candidate
    return None


def same(one: Mapping[str, Scalar], other: Mapping[str, Scalar]) -> bool:
    """Returns whether two configurations are the same, defaults filled in, knobs without effect left out."""
    return _key(one) == _key(other)


def _distance(values: Sequence[Scalar], value: Scalar, current: Scalar | None) -> int:
    ordered = list(values)
    return abs(ordered.index(value) - ordered.index(current)) if current in ordered else ordered.index(value)


def _key(values: Mapping[str, Scalar], names: Sequence[str] = NAMES) -> tuple[tuple[str, Scalar], ...]:
    full = {**_DEFAULTS, **values}
    # What has no effect, such as prefetch without workers, tells two configurations apart no more than its default.
    return tuple((name, full[name] if is_active(name, full) else _DEFAULTS[name]) for name in names)
