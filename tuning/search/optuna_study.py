"""A run as a study of Optuna: for optuna-dashboard, and for what decides its speed and its quality."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import cast

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage, JournalStorage, get_storage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection as Direction
from optuna.study import get_all_study_summaries
from optuna.trial import FrozenTrial, TrialState, create_trial

from tuning.config.errors import ConfigError
from tuning.config.lenient import mapping
from tuning.config.space import Choice, Parameter, Space
from tuning.journal.events import Importances, TrialRecord
from tuning.journal.run import History, Trial
from tuning.memory.oom import Outcome
from tuning.search.throughput import SAMPLES_PER_S

LEAST_TRIALS = 10
"""Fewer complete trials say nothing of importances."""
_MADE_FROM = "trial"
"""The attribute of Optuna's trial that has the id of ours."""


def mirrored(run: History, name: str, storage: BaseStorage | None = None) -> optuna.Study:
    """Returns Optuna's study of this name with every trial that has ended; those that it has already stay.

    Its objectives are those of the run, the speed last. Parameters are the knobs that are searched; a knob of no effect
    is left out, as is a micro-batch that was cut to its batch. Raises ConfigError if the storage has another study of
    this name.
    """
    study = run.study
    if study is None or not study.objectives:
        raise ConfigError(f"run {name} has no objectives yet", remedy="try again once its workload is loaded")
    space = Space.parse(mapping(study.config.get("knobs")), run.table)
    objectives = {**study.objectives, SAMPLES_PER_S: "max"}
    directions = [Direction.MAXIMIZE if mode == "max" else Direction.MINIMIZE for mode in objectives.values()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        found = optuna.create_study(storage=storage, study_name=name, directions=directions, load_if_exists=True)
        if found.directions != directions:
            what = f"the storage has a study {name} of other objectives"
            raise ConfigError(what, remedy="name another --storage, or delete that study")
        found.set_metric_names([*objectives])
    known = {trial.user_attrs.get(_MADE_FROM) for trial in found.get_trials(deepcopy=False)}
    for trial in run.trials.values():
        if trial.end is not None and not trial.is_open and trial.id not in known:
            found.add_trial(_frozen(trial, [*objectives], space))
    return found


def opened(url: str) -> BaseStorage:
    """Returns the storage of a file, which is made, or of a database's URL; raises ConfigError if it cannot be."""
    try:
        return get_storage(url) if "://" in url else JournalStorage(JournalFileBackend(url))
    except Exception as error:  # whatever a database's driver raises
        what = f"--storage {url} cannot be opened: {error}"
        raise ConfigError(what[:300], remedy="a file, or a URL such as sqlite:///optuna.db") from error


def trials_in(storage: BaseStorage, name: str) -> int:
    """Returns how many trials the study of this name has, 0 if there is none."""
    return next((one.n_trials for one in get_all_study_summaries(storage) if one.study_name == name), 0)


def importances_of(run: History) -> Importances:
    """Returns the importances of a run's searched knobs; empty while fewer than `LEAST_TRIALS` came to their end."""
    is_enough = sum(end.outcome == Outcome.OK for end in run.ended) >= LEAST_TRIALS
    return importances(mirrored(run, "run")) if is_enough else {}


def importances(study: optuna.Study) -> Importances:
    """Returns the importances by PED-ANOVA over the complete trials; empty for fewer than `LEAST_TRIALS` of them."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances  # a second: it brings sklearn

    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(complete) < LEAST_TRIALS:
        return {}
    found = {}
    for number, (name, direction) in enumerate(zip(study.metric_names or (), study.directions, strict=False)):
        sign = -1.0 if direction == Direction.MAXIMIZE else 1.0

        def target(trial: FrozenTrial, number: int = number, sign: float = sign) -> float:
            """Returns what is small where the objective is good, as PED-ANOVA takes it."""
            return sign * float(trial.values[number])

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the evaluator is new, and takes a target as something to lower
            shares = get_param_importances(study, evaluator=PedAnovaImportanceEvaluator(), target=target)
        found[name] = dict(sorted(shares.items(), key=lambda pair: -pair[1]))
    return found


def _frozen(trial: Trial, objectives: Sequence[str], space: Space) -> FrozenTrial:
    """Returns a trial that has ended as Optuna has it: failed without all values, whatever else happened."""
    end = cast(TrialRecord, trial.end)
    values = [end.samples_per_s if name == SAMPLES_PER_S else end.values.get(name) for name in objectives]
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    state = TrialState.COMPLETE if end.outcome == Outcome.OK and len(known) == len(values) else TrialState.FAIL
    state = TrialState.PRUNED if end.outcome in (Outcome.STOPPED, Outcome.CUT) else state
    searched = {n: p for n, p in space.parameters.items() if n in trial.config and trial.config[n] in p}
    facts = {name: getattr(end, name) for name in ("outcome", "seed", "samples", "wall_s", "peak_allocated_bytes")}
    facts |= {_MADE_FROM: trial.id, "named": trial.named, "message": end.message}
    return create_trial(
        state=state,
        values=known if state == TrialState.COMPLETE else None,
        params={n: trial.config[n] for n in searched},
        distributions={n: _distribution(p) for n, p in searched.items()},
        user_attrs={name: value for name, value in facts.items() if value not in (None, "")},
        intermediate_values=dict(trial.curve(objectives[0])) if state == TrialState.PRUNED else None,
        constraints={"memory": 1.0 if end.outcome in (Outcome.OOM, Outcome.HOST_OOM) else -1.0},
    )


def _distribution(parameter: Parameter) -> BaseDistribution:
    if isinstance(parameter, Choice):
        return CategoricalDistribution(parameter.values)
    if parameter.integer:
        return IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.log)
