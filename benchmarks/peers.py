"""Our spaces as other tuners take them."""

from __future__ import annotations

from typing import Any

import optuna

from tuning.config.space import Choice, Parameter


def tune_domain(parameter: Parameter, tune: Any) -> Any:
    """Returns a parameter as Ray Tune has it; `tune` is `ray.tune`, which not everybody who asks has imported."""
    if isinstance(parameter, Choice):
        return tune.choice(list(parameter.values))
    if parameter.integer:
        return (tune.lograndint if parameter.log else tune.randint)(int(parameter.low), int(parameter.high) + 1)
    return (tune.loguniform if parameter.log else tune.uniform)(parameter.low, parameter.high)


def suggested(trial: optuna.Trial, name: str, parameter: Parameter) -> Any:
    """Returns the value that an Optuna trial suggests for a parameter."""
    if isinstance(parameter, Choice):
        return trial.suggest_categorical(name, parameter.values)
    if parameter.integer:
        return trial.suggest_int(name, int(parameter.low), int(parameter.high), log=parameter.log)
    return trial.suggest_float(name, parameter.low, parameter.high, log=parameter.log)
