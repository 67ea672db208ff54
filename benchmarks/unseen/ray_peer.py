"""Ray Tune as its pages have it, on the plain script of a task: python -m benchmarks.unseen.ray_peer TASK SEED S.

OptunaSearch over samples/s and accuracy, ASHA on accuracy; one thread a trial, two trials at once, in processes that
are kept from trial to trial. S seconds are all that it takes, imports included. The last line is JSON: the pick.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import ray
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from benchmarks.peers import tune_domain
from benchmarks.unseen.task import fastest, left_s, task

MARGIN_S, AT_ONCE = 3.0, 2
"""What Ray takes to end, and how many trials it has at once."""


def main(folder: str, seed: int, seconds: float) -> dict[str, Any]:
    """Returns the pick, and how many trials there were and came to their end."""

    def trial(config: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        task(folder).train(config, seed, lambda **found: tune.report(found))

    space = {name: tune_domain(given, tune) for name, given in task(folder).space.items()}
    ray.init(num_cpus=AT_ONCE, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as out:
        grid = tune.Tuner(
            trial,
            tune_config=tune.TuneConfig(
                search_alg=OptunaSearch(space, metric=["samples_per_s", "accuracy"], mode=["max", "max"], seed=seed),
                scheduler=ASHAScheduler("percent", "accuracy", "max", max_t=100, grace_period=25, reduction_factor=2),
                num_samples=-1,
                time_budget_s=left_s(seconds) - MARGIN_S,
                max_concurrent_trials=AT_ONCE,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(storage_path=out, verbose=0),
        ).fit()
        rows = [(grid[n].metrics or {}) for n in range(len(grid))]
    ended = [(m["samples_per_s"], m["accuracy"], m["config"]) for m in rows if m.get("percent", 0) >= 99]
    return {"pick": fastest(ended), "trials": {"ended": len(ended), "all": len(rows)}}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))))
