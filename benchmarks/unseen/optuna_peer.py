"""Optuna alone, on the plain script of a task: python -m benchmarks.unseen.optuna_peer TASK SEED S.

TPE over samples/s and accuracy, in one process, a training at a time with torch's own threads, as the plain script
trains; nothing is stopped early, as Optuna has no pruner for two objectives. S seconds are all that it takes, imports
included: a training under way then is left. The last line is JSON: the pick.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from types import FrameType
from typing import Any

import optuna

from benchmarks.peers import suggested
from benchmarks.unseen.task import fastest, left_s, task


class TimeIsUpError(Exception):
    """The seconds allowed are over."""


def time_is_up(number: int, frame: FrameType | None) -> None:
    """Raises TimeIsUpError in whatever runs, once more each second until somebody heeds it."""
    raise TimeIsUpError


def main(folder: str, seed: int, seconds: float) -> dict[str, Any]:
    """Returns the pick, and how many trials there were and came to their end."""
    plain = task(folder)

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        return plain.train({name: suggested(trial, name, given) for name, given in plain.space.items()}, seed)

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(directions=["maximize", "maximize"], sampler=optuna.samplers.TPESampler(seed=seed))
    signal.signal(signal.SIGALRM, time_is_up)
    signal.setitimer(signal.ITIMER_REAL, max(left_s(seconds), 0.1), 1.0)
    with contextlib.suppress(TimeIsUpError):
        study.optimize(objective)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    ended = [(*trial.values, trial.params) for trial in study.get_trials(states=[optuna.trial.TrialState.COMPLETE])]
    return {"pick": fastest(ended), "trials": {"ended": len(ended), "all": len(study.trials)}}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
