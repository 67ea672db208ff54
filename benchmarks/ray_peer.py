"""Ray Tune as its documentation has it, on one of our workloads: OptunaSearch over speed and quality, ASHA on quality.

    python -m benchmarks.ray_peer workload=signals search.seed=0 search.max_time=240s

It gets the settings of `python -m tuning.run`: space, horizon, rungs, device and wall time, its imports included; one
trial a core, the workload kept loaded between trials (`reuse_actors`). An OOM is raised, which ends the trial. The last
line of stdout is JSON: the pick, by the rule of a study over what each trial saw itself.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from benchmarks.peers import tune_domain
from trainables.plan import Plan
from trainables.workload import table_of
from trainables.workload_files import load as load_workload
from tuning.config.load import load
from tuning.config.schema import StudyConfig
from tuning.config.space import Space
from tuning.journal.events import TrialRecord
from tuning.journal.format import Record
from tuning.search.pruner import milestones
from tuning.search.rule import Rule, absolute, best_baseline
from tuning.search.selection import pick
from tuning.study.setup import prepare_config
from tuning.workers import machine
from tuning.workers.ray_cluster import RayCluster
from tuning.workers.worker import Worker
from tuning.workers.worker_config import TrialOrder, WorkerConfig

MARGIN_S = 5.0
"""Of the time allowed: what Tune and Ray take to end."""


class Peer(tune.Trainable):
    """A training a trial; `percent` of the horizon is what ASHA counts by."""

    def setup(self, config: dict[str, Any]) -> None:
        """Loads the workload, then begins as every further trial does."""
        self._study: Mapping[str, Any] = config["study"][0]
        s = self._study
        self._worker = Worker(WorkerConfig(s["ref"], s["options"], s["device"], 1, s["cap_bytes"], s["seed"]))
        self._facts = self._worker.describe({})
        self._space = Space.parse(s["space"], table_of(load_workload(s["ref"])))
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Takes the next trial."""
        self._states.close()
        self._begin(new_config)
        return True

    def cleanup(self) -> None:
        """Ends the process."""
        self._worker.end()

    def _begin(self, config: dict[str, Any]) -> None:
        s = self._study
        self._horizon = max(1, round(s["epochs"] * self._facts.train_samples))
        first = max(1, round(s["first_frac"] * self._horizon))
        steps = (*milestones(first, self._horizon, s["eta"]), self._horizon)
        self._knobs = self._space.complete({name: config[name] for name in self._space.parameters})
        plan = Plan(self._horizon, steps, cap_bytes=s["cap_bytes"])
        self._states = self._worker.trial(TrialOrder("", self._knobs, s["seed"], plan, 1, ""))

    def step(self) -> dict[str, Any]:
        """Returns the result at the next rung; raises why a trial failed."""
        found = next(state for state in self._states if state.values or state.done)
        if found.outcome != "ok":
            error = torch.OutOfMemoryError if found.outcome == "oom" else RuntimeError
            raise error(found.message)
        return {
            "percent": 100.0 * found.samples / self._horizon,
            "samples_per_s": found.measured_samples_per_s,
            "done": found.done,
            "knobs": self._knobs,
            "horizon": self._horizon,
            "baselines": self._facts.baselines,
            **found.values,
        }


def searched(config: StudyConfig, objective: str, mode: str, seconds: float) -> list[dict[str, Any]]:
    """Returns the last result of each trial that came to its end within so many seconds."""
    rungs = config.budget.rungs
    study = {
        "ref": config.workload.ref,
        "options": dict(config.workload.options),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "cap_bytes": config.card.cap_bytes,
        "seed": config.search.seed,
        "space": {**config.space.as_raw()},
        "epochs": config.budget.train_epochs,
        "first_frac": rungs.first_frac,
        "eta": rungs.eta,
    }
    domains = {name: tune_domain(p, tune) for name, p in config.space.parameters.items()}
    search = OptunaSearch(domains, metric=["samples_per_s", objective], mode=["max", mode], seed=config.search.seed)
    asha = ASHAScheduler(
        "percent", objective, mode, max_t=100, grace_period=round(100 * rungs.first_frac), reduction_factor=rungs.eta
    )
    began, cores = time.monotonic(), machine.cores()
    with RayCluster(cores=cores, gpus=torch.cuda.device_count(), dashboard=False), tempfile.TemporaryDirectory() as out:
        grid = tune.Tuner(
            tune.with_resources(Peer, {"CPU": 1, "GPU": torch.cuda.device_count() / cores}),
            param_space={"study": [study]},
            tune_config=tune.TuneConfig(
                search_alg=search,
                scheduler=asha,
                num_samples=-1,
                time_budget_s=seconds - (time.monotonic() - began),
                max_concurrent_trials=cores,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                storage_path=out,
                verbose=0,
                # Left out, Tune asks every actor for a checkpoint at its end, and then reuses none of them.
                checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            ),
        ).fit()
        metrics = [grid[n].metrics or {} for n in range(len(grid))]
    return [m for m in metrics if m.get("percent", 0.0) >= 100.0]


def _ended(name: str, measured: Mapping[str, Any], objective: str) -> TrialRecord:
    """Returns a training as our own search would have it on record."""
    fields = {"trial": name, "config": measured["knobs"], "outcome": "ok", "samples_per_s": measured["samples_per_s"]}
    return TrialRecord.read(Record(0, "", "trial", {**fields, "values": {objective: measured[objective]}}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Searches, prints the pick; returns 1 where no trial came to its end."""
    began = time.monotonic()
    _, config = prepare_config(load(list(sys.argv[1:] if arguments is None else arguments)))
    ((objective, mode),) = load_workload(config.workload.ref).objectives.items()
    seconds = (config.search.max_time_s or 240.0) - (time.monotonic() - began) - MARGIN_S
    ended = searched(config, objective, mode, seconds)
    if not ended:
        return 1
    least = absolute(config.pick.tolerance, max((abs(m[objective]) for m in ended), default=None))
    rule = Rule(objective, mode, least, best_baseline(ended[0]["baselines"], objective, mode))
    own = {str(n): m for n, m in enumerate(ended)}
    ok = [_ended(name, measured, objective) for name, measured in own.items()]
    if (found := pick(ok, rule, None)) is None:
        return 1
    answer = {
        "ref": config.workload.ref,
        "options": dict(config.workload.options),
        "samples": ended[0]["horizon"],
        "pick": own[found.best]["knobs"],
        "trials": {"ok": len(ended)},
    }
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
