"""Optuna behind suggest / observe: proposes configurations, and learns from every way a trial can end.

What was observed is a list of finished Optuna trials, the only state. Each proposal comes from a study built anew of
that list and a sampler seeded by (seed, number), so a search rebuilt from the records goes on as the first would have
done, and a proposal that is thrown away leaves no trace. From 257 trials on the study holds a part of them, so that a
proposal takes as long after 10,000 trials as after 300.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import FrozenTrial, TrialState, create_trial

from trainables.knobs import TABLE, Scalar, is_active
from tuning.config.space import Choice, Parameter, Range, Space, values_of
from tuning.search.history import History
from tuning.stats.pareto import Mode

STARTUP_TRIALS = 6
"""Random proposals before the model takes over; Optuna's 10 are a third of a small search."""
ASKS = 4
"""How often the model is asked for a configuration nobody proposed, before one is drawn at random."""
ENUMERABLE = 10_000
"""Spaces up to this size are listed once, when the model repeats itself (0.4 s); larger ones are drawn from."""
DRAWS = 1_000
DRAWN, CHANGED = 32, 32
"""What a chooser is shown beside the model's proposal: some drawn, and observed ones with a knob or two changed."""
MANY, RESTED = 1_000, 4
"""With a chooser and more finished trials than `MANY`, TPE proposes one time of `RESTED` and rests else."""
REACH = 0.15
"""How far a changed number goes, as the deviation of its place in its range."""

OVER_MEMORY = ("oom", "host_oom", "refused")
"""Outcomes whose observation has to say by how many bytes they were over."""
_GIB = 2**30

Key = tuple[tuple[str, Scalar], ...]
Chooser = Callable[[Sequence[Mapping[str, Scalar]]], int]
"""Returns the index of one of some configurations; the first is the model's."""


@dataclass(frozen=True)
class Observation:
    """How a proposal ended: its outcome (`memory.oom.Outcome`), its objectives, and the bytes it was over the cap."""

    outcome: str
    values: Mapping[str, float | None] = field(default_factory=dict)
    overshoot_bytes: int = 0


@dataclass(frozen=True)
class Proposal:
    """A configuration to try: the number to observe it by, and the values of the searched knobs that have an effect."""

    number: int
    values: dict[str, Scalar]


class Sampler:
    """Proposes configurations of a space by TPE (multivariate, grouped, constrained), none of them twice.

    Optuna hears of `ok` as COMPLETE and of everything else as PRUNED: FAIL would teach it nothing. What did not fit
    violates the constraint `memory` by the GiB over the cap, what failed otherwise the constraint `failed`; a trial
    stopped at a rung violates none, and has no values: those of a low rung are not those of a whole trial.
    """

    def __init__(
        self,
        space: Space,
        objectives: Mapping[str, Mode],
        seed: int,
        initial: Sequence[Mapping[str, Scalar]] = (),
        prior: Sequence[tuple[Mapping[str, Scalar], Observation]] = (),
    ) -> None:
        """`initial` are proposed first; what they leave out is drawn. Raises ValueError for one outside the space.

        `prior` is what other searches observed: every second proposal of the model is made with it, and every other one
        without, so that a prior that is wrong takes half of the proposals at most.
        """
        self._space, self._objectives, self._seed = space, dict(objectives), seed
        # A knob that needs another comes after it.
        self._names = sorted(space.parameters, key=lambda name: TABLE[name].requires is not None)
        self._distributions = {name: _distribution(space.parameters[name]) for name in self._names}
        self._initial = [self._checked(values) for values in initial]
        self._finished: list[FrozenTrial] = []
        self._ended: list[dict[str, Any]] = []  # what of those ran to its end
        self._any_fitted = False
        self._history: History[FrozenTrial] = History([mode == "max" for mode in self._objectives.values()], seed)
        self._live: dict[int, FrozenTrial] = {}
        self._seen: set[Key] = set()
        self._left: dict[Key, dict[str, Scalar]] | None = None  # of a space that was listed, what is not in _seen
        self._prior = [self._frozen(self._params(values), observation) for values, observation in prior]

    @property
    def trials(self) -> tuple[FrozenTrial, ...]:
        """What was observed, in that order, as Optuna sees it."""
        return tuple(self._finished)

    def suggest(self, choose: Chooser | None = None) -> Proposal | None:
        """Returns a configuration not proposed or replayed before, or None when the whole finite space was.

        `choose` is asked where the model proposes: it is shown that proposal, random ones, and changes of what ended
        well, and chooses among them.
        """
        number = len(self._finished) + len(self._live)
        sources = (self._next_initial, functools.partial(self._model, choose=choose), self._unseen)
        values = next((found for source in sources if (found := source(number)) is not None), None)
        if values is None:
            return None
        return Proposal(self.adopt(values), values)

    def adopt(self, values: Mapping[str, Scalar]) -> int:
        """Returns the number of a configuration that is under way already, as when a search goes on after a crash."""
        number = len(self._finished) + len(self._live)
        self._see(self._key(values))
        params = self._params(values)
        running = create_trial(state=TrialState.RUNNING, params=params, distributions=self._only(params))
        self._live[number] = _Shared.of(running)
        return number

    def observe(self, number: int, observation: Observation) -> None:
        """Takes how a proposal ended. The first observation stands; raises KeyError for what was never proposed."""
        running = self._live.get(number)
        if running is None:
            if 0 <= number < len(self._finished) + len(self._live):
                return
            raise KeyError(f"proposal {number} was never made; there are {len(self._finished) + len(self._live)}")
        del self._live[number]
        self._finish(running.params, observation)

    def replay(self, values: Mapping[str, Scalar], observation: Observation) -> None:
        """Takes a configuration and how it ended from the records, as if it had been proposed and observed.

        A value the space no longer has is left out of what Optuna learns; the configuration counts as proposed.
        """
        self._see(self._key(values))
        self._finish(self._params(values), observation)

    def forget_prior(self) -> None:
        """Makes every proposal from here on without what other searches observed."""
        self._prior = []

    # -- proposals -----------------------------------------------------------------------------------------------------

    def _see(self, key: Key) -> None:
        self._seen.add(key)
        if self._left is not None:
            self._left.pop(key, None)

    def _next_initial(self, number: int) -> dict[str, Scalar] | None:
        while self._initial:
            given = self._initial.pop(0)
            with self._study(number) as study:
                study.enqueue_trial(given)
                values = self._ask(study)
            if self._key(values) not in self._seen:
                return values
        return None

    def _model(self, number: int, choose: Chooser | None = None) -> dict[str, Scalar] | None:
        if self._live and self._only_failed():
            return None
        if choose is not None and len(self._finished) > MANY and number % RESTED:
            shown = self._others(np.random.default_rng([self._seed, number, 1]))
            return shown[choose(shown)] if shown else None
        found = None
        with self._study(number) as study:
            for _ in range(ASKS):
                # A repeated proposal stays running in this study, and a running trial keeps TPE away from its place.
                values = self._ask(study)
                if self._key(values) not in self._seen:
                    found = values
                    break
        if found is None or choose is None or len(self._finished) < STARTUP_TRIALS:
            return found
        shown = [found, *self._others(np.random.default_rng([self._seed, number, 1]))]
        return shown[choose(shown)]

    def _only_failed(self) -> bool:
        """Returns whether as many ended as the model needs, all of them for want of memory or by failing.

        TPE takes the least bad of these for good, and proposes their like. With 1,000 devices, before the first trial
        had ended, 9,900 of 10,000 proposals were of one combination that does not fit. What runs was judged to fit.
        """
        return not self._any_fitted and len(self._finished) >= STARTUP_TRIALS and not self._prior

    def _others(self, draw: np.random.Generator) -> list[dict[str, Scalar]]:
        """Returns configurations not seen: some drawn, some that change one or two knobs of one that ran to its end."""
        found = [self._drawn(draw, {}, self._names) for _ in range(DRAWN)]
        for _ in range(CHANGED if self._ended else 0):
            start = self._ended[int(draw.integers(len(self._ended)))]
            changed = draw.choice(self._names, size=min(len(self._names), int(draw.integers(1, 3))), replace=False)
            found.append(self._drawn(draw, start, list(map(str, changed))))
        return [values for values in found if _key_of(values) not in self._seen]

    def _drawn(
        self, draw: np.random.Generator, start: Mapping[str, Scalar], changed: Sequence[str]
    ) -> dict[str, Scalar]:
        """Returns `start` with those knobs, and what it lacks, drawn; numbers of ranges near where they were."""
        values: dict[str, Scalar] = {}
        for name in self._names:
            if not is_active(name, {**self._space.fixed, **values}):
                continue
            parameter = self._space.parameters[name]
            if name not in start:
                values[name] = parameter.at(float(draw.random()))
            elif name not in changed:
                values[name] = start[name]
            elif isinstance(parameter, Choice):
                values[name] = parameter.at(float(draw.random()))
            else:
                place = parameter.place(float(start[name])) + REACH * float(draw.standard_normal())
                values[name] = parameter.at(min(max(place, 0.0), 1.0))
        return self._settled(values)

    def _unseen(self, number: int) -> dict[str, Scalar] | None:
        draw = np.random.default_rng([self._seed, number])
        if self._space.size() <= ENUMERABLE:
            if self._left is None:
                every = {self._key(values): values for values in self._listed()}
                self._left = {key: values for key, values in every.items() if key not in self._seen}
            place = int(draw.integers(len(self._left))) if self._left else 0
            return next(itertools.islice(self._left.values(), place, None), None)
        sampler = optuna.samplers.RandomSampler(seed=int(draw.integers(2**32)))
        with _quiet():
            study = optuna.create_study(sampler=sampler)
            drawn = (self._ask(study) for _ in range(DRAWS))
            return next((values for values in drawn if self._key(values) not in self._seen), None)

    def _listed(self) -> Iterator[dict[str, Scalar]]:
        choices = [values_of(self._space.parameters[name]) for name in self._names]
        for combination in itertools.product(*choices):
            yield self._settled(dict(zip(self._names, combination, strict=True)))

    def _ask(self, study: optuna.Study) -> dict[str, Scalar]:
        trial = study.ask()
        values: dict[str, Scalar] = {}
        for name in self._names:
            if is_active(name, {**self._space.fixed, **values}):
                values[name] = _draw(trial, name, self._space.parameters[name])
        return self._settled(values)

    @contextmanager
    def _study(self, number: int) -> Iterator[optuna.Study]:
        """Yields a study that holds what was observed and what is under way."""
        with _quiet():
            study = optuna.create_study(
                directions=["minimize" if mode == "min" else "maximize" for mode in self._objectives.values()],
                sampler=optuna.samplers.TPESampler(
                    n_startup_trials=STARTUP_TRIALS,
                    multivariate=True,
                    group=True,
                    seed=int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0]),
                ),
            )
            prior = self._prior if number % 2 == 0 else []
            study.add_trials([*prior, *self._history.modelled(self._finished, list(self._live.values()))])
            yield study

    # -- values and what Optuna holds of them --------------------------------------------------------------------------

    def _settled(self, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns the searched knobs as they will run: without those of no effect, the micro-batch cut to the batch."""
        whole = self._space.complete(values)
        return {name: whole[name] for name in self._names if name in whole}

    def _key(self, values: Mapping[str, Scalar]) -> Key:
        return _key_of(self._settled(values))

    def _params(self, values: Mapping[str, Scalar]) -> dict[str, Any]:
        """Returns the values as their distributions have them; of a cut micro-batch, the least that is cut to it."""
        params: dict[str, Any] = {}
        for name in self._names:
            if name not in values:
                continue
            value, parameter = values[name], self._space.parameters[name]
            if name == "micro_batch_size" and isinstance(parameter, Choice):
                value = min((v for v in parameter.values if float(v) >= float(value)), key=float, default=value)
            if _allows(parameter, value):
                params[name] = int(value) if isinstance(self._distributions[name], IntDistribution) else value
        return params

    def _only(self, params: Mapping[str, Any]) -> dict[str, BaseDistribution]:
        return {name: self._distributions[name] for name in params}

    def _finish(self, params: dict[str, Any], observation: Observation) -> None:
        self._finished.append(self._frozen(params, observation))
        if self._finished[-1].state == TrialState.COMPLETE:
            self._ended.append(params)
        self._any_fitted |= observation.outcome in ("ok", "stopped")
        self._history.add(len(self._finished) - 1, self._finished[-1].values)

    def _frozen(self, params: dict[str, Any], observation: Observation) -> FrozenTrial:
        outcome = observation.outcome
        values = [observation.values.get(name) for name in self._objectives]
        finite = [float(v) for v in values if v is not None and math.isfinite(v)]
        complete = outcome == "ok" and len(finite) == len(values)
        over = outcome in OVER_MEMORY
        failed = not (complete or over or outcome == "stopped")
        constraints = {"memory": max(observation.overshoot_bytes, 1) / _GIB if over else -1.0}
        constraints["failed"] = 1.0 if failed else -1.0
        trial = create_trial(
            state=TrialState.COMPLETE if complete else TrialState.PRUNED,
            values=finite if complete else None,
            params=params,
            distributions=self._only(params),
            constraints=constraints,
        )
        return _Shared.of(trial)

    def _checked(self, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        for name, value in values.items():
            if name not in self._space.parameters:
                raise ValueError(f"initial {name}={value}: not searched; searched are {', '.join(self._names)}")
            if not _allows(self._space.parameters[name], value):
                raise ValueError(f"initial {name}={value}: not in {self._space.parameters[name]}")
        return dict(values)


class _Shared(FrozenTrial):
    """A trial whose parts every study may share, since nobody changes them: a storage's deep copy of it is shallow.

    The deep copies were four fifths of a proposal's time. What was checked when it was made is not checked again by
    each study, which was a tenth of it.
    """

    @classmethod
    def of(cls, trial: FrozenTrial) -> _Shared:
        """Returns the trial as one of these."""
        own = cls.__new__(cls)
        own.__dict__.update(trial.__dict__)
        return own

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        own = _Shared.__new__(_Shared)
        own.__dict__.update(self.__dict__)
        return own

    def _validate(self) -> None:
        """Has been done by `create_trial`."""


def _key_of(settled: Mapping[str, Scalar]) -> Key:
    return tuple(sorted(settled.items()))


def _distribution(parameter: Parameter) -> BaseDistribution:
    if isinstance(parameter, Choice):
        return CategoricalDistribution(parameter.values)
    if parameter.integer:
        return IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.log)


def _draw(trial: optuna.Trial, name: str, parameter: Parameter) -> Scalar:
    if isinstance(parameter, Choice):
        return cast(Scalar, trial.suggest_categorical(name, parameter.values))
    if parameter.integer:
        return trial.suggest_int(name, int(parameter.low), int(parameter.high), log=parameter.log)
    return trial.suggest_float(name, parameter.low, parameter.high, log=parameter.log)


def _allows(parameter: Parameter, value: Scalar) -> bool:
    if isinstance(parameter, Range):
        return value in parameter
    return any(v == value and isinstance(v, bool) == isinstance(value, bool) for v in parameter.values)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Optuna from announcing each of our studies, and from warning that `group` is experimental."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)
