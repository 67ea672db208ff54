"""Proposes configurations behind propose / observe, none of them twice; one live Optuna study holds what was seen.

The study is Optuna's. By default `search.proposals` chooses what is adopted next, from the candidates that are drawn
here; `tpe` is Optuna's TPE (multivariate, grouped), which also proposes where no speed is known, `random` draws. Each
draw is seeded by (seed, number of the proposal), so that a search rebuilt from its records goes on as the first would
have.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np
import optuna
from optuna.study import StudyDirection
from optuna.trial import TrialState

from trainables.knobs import Scalar
from tuning.config.cards import GIB_BYTES
from tuning.config.choices import SamplerName
from tuning.config.space import Choice, Parameter, Range, Space

Key = tuple[tuple[str, Scalar], ...]
Mode = Literal["min", "max"]

STARTUP_TRIALS = 6
"""Random proposals before Optuna's samplers take over; Optuna's 10 are most of a small search."""
ASKS, DRAWS = 4, 1_000
"""How often Optuna is asked for a configuration that nobody proposed, and random draws are made, before giving up."""
POOL, NEIGHBOURS = 400, 60
"""Candidates that are drawn from the whole space, and near each of a few good configurations."""
NEAR = 0.1
"""How far a neighbour's number is from the one it is near, as a standard deviation of the range's length."""


@dataclass(frozen=True)
class Observation:
    """How a proposal ended: its objectives, where it has all of them, and why it cannot be had.

    `overshoot_bytes` is by how much it was over the memory cap, 0 where it fits; `failed` that it diverged or crashed.
    """

    values: Mapping[str, float | None] = field(default_factory=dict)
    overshoot_bytes: int = 0
    failed: bool = False


@dataclass(frozen=True)
class Proposal:
    """A configuration to try: the number to observe it by, and the values of the searched knobs that have an effect."""

    number: int
    values: dict[str, Scalar]


class Sampler:
    """Proposes configurations of a space for `objectives`.

    A configuration that did not fit violates the constraint `memory` by the GiB over the cap, one that failed otherwise
    the constraint `failed`; both have the worst values seen, so that Optuna's samplers learn of them.
    """

    def __init__(
        self,
        space: Space,
        objectives: Mapping[str, Mode],
        seed: int,
        *,
        name: SamplerName = "known",
        initial: Sequence[Mapping[str, Scalar]] = (),
    ) -> None:
        """`initial` are proposed first; what they leave out is drawn."""
        self._space, self._objectives, self._seed, self._name = space, dict(objectives), seed, name
        requiring = space.table.requiring
        self._names = sorted(space.parameters, key=lambda knob: knob in requiring)  # after the knob that it needs
        self._initial = [dict(values) for values in initial]
        self._live: dict[int, optuna.Trial] = {}
        self._proposals = 0
        self._seen: set[Key] = set()
        self._rows: list[list[float]] = []  # of what came to values
        both = {"min": StudyDirection.MINIMIZE, "max": StudyDirection.MAXIMIZE}
        directions = [both[mode] for mode in self._objectives.values()]
        with _quiet():
            self._study = optuna.create_study(directions=directions, sampler=self._optuna())

    def propose(self) -> Proposal | None:
        """Returns a configuration that was not proposed before, or None when a finite space has no other."""
        draw = np.random.default_rng([self._seed, self._proposals, 1])
        values = self._next_initial(draw)
        if values is None:
            values = self._asked()
        if values is None:
            drawn = (self._drawn(draw, {}) for _ in range(DRAWS))
            values = next((found for found in drawn if _key(found) not in self._seen), None)
        return None if values is None else Proposal(self.adopt(values), values)

    def candidates(self, near: Sequence[Mapping[str, Scalar]]) -> list[dict[str, Scalar]]:
        """Returns configurations that were not proposed before, each once: drawn from the space, and near the given."""
        draw = np.random.default_rng([self._seed, self._proposals, 2])
        drawn = [self._drawn(draw, {}) for _ in range(POOL)]
        drawn += [self._neighbour(draw, values) for values in near for _ in range(NEIGHBOURS)]
        found = {_key(values): values for values in drawn}
        return [values for key, values in found.items() if key not in self._seen]

    def adopt(self, values: Mapping[str, Scalar]) -> int:
        """Returns the number of a configuration that is under way, as when a search goes on after a crash."""
        self._seen.add(_key(self._settled(values)))
        number, self._proposals = self._proposals, self._proposals + 1
        params = self._params(values)
        self._study.enqueue_trial(params)
        self._live[number] = trial = self._study.ask()
        for name in params:
            _suggest(trial, name, self._space.parameters[name])
        return number

    def observe(self, number: int, observation: Observation) -> None:
        """Takes how a proposal ended; raises KeyError for one that is not under way."""
        trial = self._live.pop(number)
        found = [observation.values.get(name) for name in self._objectives]
        row = [float(value) for value in found if value is not None and math.isfinite(value)]
        is_whole, fits = len(row) == len(found), observation.overshoot_bytes == 0
        if is_whole and fits and not observation.failed:
            self._rows.append(row)
        elif self._rows:
            signs = [1 if mode == "min" else -1 for mode in self._objectives.values()]
            row = [s * max(s * v for v in seen) for s, seen in zip(signs, zip(*self._rows, strict=True), strict=True)]
            is_whole = not fits or observation.failed
        trial.set_constraint("memory", -1.0 if fits else observation.overshoot_bytes / GIB_BYTES)
        trial.set_constraint("failed", 1.0 if observation.failed else -1.0)
        if is_whole:
            self._study.tell(trial, row)
        else:
            self._study.tell(trial, state=TrialState.PRUNED)

    def replay(self, values: Mapping[str, Scalar], observation: Observation) -> None:
        """Takes a configuration and how it ended from the records, as if it had been proposed and observed."""
        self.observe(self.adopt(values), observation)

    # -- where proposals come from -------------------------------------------------------------------------------------

    def _next_initial(self, draw: np.random.Generator) -> dict[str, Scalar] | None:
        while self._initial:
            values = self._drawn(draw, self._initial.pop(0))
            if _key(values) not in self._seen:
                return values
        return None

    def _asked(self) -> dict[str, Scalar] | None:
        """Returns what Optuna's sampler proposes, None where it repeats itself; nothing of it stays in the study."""
        asked, found = list[optuna.Trial](), None
        with _quiet():
            self._study.sampler = self._optuna()
        while found is None and len(asked) < ASKS:
            # Until it is told, a repeated proposal counts as under way, which keeps TPE away from its place.
            asked.append(trial := self._study.ask())
            values: dict[str, Scalar] = {}
            for name in self._names:
                if self._space.table.is_active(name, {**self._space.fixed, **values}):
                    values[name] = _suggest(trial, name, self._space.parameters[name])
            settled = self._settled(values)
            found = None if _key(settled) in self._seen else settled
        for trial in asked:
            self._study.tell(trial, state=TrialState.FAIL)
        return found

    def _optuna(self) -> optuna.samplers.BaseSampler:
        seed = int(np.random.SeedSequence([self._seed, self._proposals]).generate_state(1)[0])
        if self._name == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS, multivariate=True, group=True)

    def _neighbour(self, draw: np.random.Generator, near: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns a configuration with numbers a little moved, and one value of a list in three drawn anew."""
        start: dict[str, Scalar] = {}
        for name, parameter in self._space.parameters.items():
            if name not in near:
                continue
            if isinstance(parameter, Range):
                place = parameter.place(float(near[name])) + NEAR * float(draw.standard_normal())
                start[name] = parameter.at(min(1.0, max(0.0, place)))
            elif draw.random() > 1 / 3 and near[name] in parameter:
                start[name] = near[name]
        return self._drawn(draw, start)

    def _drawn(self, draw: np.random.Generator, start: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns `start` with what it lacks drawn."""
        values: dict[str, Scalar] = {}
        for name in self._names:
            if self._space.table.is_active(name, {**self._space.fixed, **values}):
                values[name] = start[name] if name in start else self._space.parameters[name].at(float(draw.random()))
        return self._settled(values)

    # -- values and what Optuna holds of them --------------------------------------------------------------------------

    def _settled(self, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns the searched knobs as they will run: without those of no effect, the micro-batch cut to the batch."""
        whole = self._space.complete(values)
        return {name: whole[name] for name in self._names if name in whole}

    def _params(self, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns the values that the space has; of a cut micro-batch, the least that is cut to it."""
        params: dict[str, Scalar] = {}
        for name in self._names:
            if name not in values:
                continue
            value, parameter = values[name], self._space.parameters[name]
            if name == "micro_batch_size" and isinstance(parameter, Choice):
                value = min((v for v in parameter.values if float(v) >= float(value)), key=float, default=value)
            if value in parameter:
                params[name] = int(value) if isinstance(parameter, Range) and parameter.integer else value
        return params


def _key(settled: Mapping[str, Scalar]) -> Key:
    return tuple(sorted(settled.items()))


def _suggest(trial: optuna.Trial, name: str, parameter: Parameter) -> Scalar:
    if isinstance(parameter, Choice):
        return cast(Scalar, trial.suggest_categorical(name, parameter.values))
    if parameter.integer:
        return trial.suggest_int(name, int(parameter.low), int(parameter.high), log=parameter.log)
    return trial.suggest_float(name, parameter.low, parameter.high, log=parameter.log)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Optuna from warning that `group` is experimental, and from logging that a study was created."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)
