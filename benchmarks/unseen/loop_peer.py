"""An Optuna loop around a command, as people write it: python -m benchmarks.unseen.loop_peer TASK SEED S.

Each trial of TPE over speed and accuracy is a process that runs the plain script with its settings. S seconds are all
that it takes; a training under way then is ended. The last line is JSON: the pick.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import optuna

from benchmarks.peers import suggested
from benchmarks.unseen.task import KNOBS_OF_A_COMMAND, fastest, left_s, task


def main(folder: str, seed: int, seconds: float) -> dict[str, Any]:
    """Returns the pick, and how many trials there were and came to their end."""
    space = {name: task(folder).space[name] for name in KNOBS_OF_A_COMMAND}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(directions=["maximize", "maximize"], sampler=optuna.samplers.TPESampler(seed=seed))
    ended = list[tuple[float, float, dict[str, Any]]]()
    while left_s(seconds) > 0:
        trial = study.ask()
        settings = {name: suggested(trial, name, given) for name, given in space.items()}
        command = [sys.executable, f"{folder}/script.py", json.dumps({**settings, "seed": seed})]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=max(0.1, left_s(seconds))
            )
        except subprocess.TimeoutExpired:
            break
        if done.returncode:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        speed, accuracy = map(float, done.stdout.split()[-2:])
        study.tell(trial, [speed, accuracy])
        ended.append((speed, accuracy, settings))
    return {"pick": fastest(ended), "trials": {"ended": len(ended), "all": len(study.trials)}}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
