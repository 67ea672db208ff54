"""The tuners: ours, Ray Tune with OptunaSearch and ASHA, Optuna's TPE with a constraint, and random draws.

Each trains with the same loop (`workers.session`) under the same virtual card, one training at a time on one core.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import optuna
from optuna.study import StudyDirection

from benchmarks.moasha import Halving
from benchmarks.peers import suggested, tune_domain
from benchmarks.record_table import design
from benchmarks.tuners.contest import ETA, Contest
from trainables.knobs import Scalar
from tuning.config.load import load
from tuning.journal.records import Journal, trials
from tuning.memory.groups import guard
from tuning.memory.measure import MemoryStage
from tuning.memory.oom import requested_bytes
from tuning.search.probe import ProbeStage
from tuning.search.protocols import TrialPlan, TrialRequest
from tuning.search.scheduler import SearchTerms, TrialScheduler
from tuning.workers.session import Session


def ours(contest: Contest, strategy: Any) -> dict[str, Any]:
    """Runs the stages of a study up to the end of its search, with the probe budget of `quick`.

    Its trials run as a study's do where one runs at a time: in the process that probed, without Ray.
    """
    from tuning.workers.local_executor import LocalExecutor
    from tuning.workers.worker import Worker

    space, setting, cap_bytes = contest.space, contest.setting, contest.cap_bytes
    section = load([f"workload={contest.workload}", "card=cpu"]).budget.probe
    until = time.monotonic() + contest.left_s
    with tempfile.TemporaryDirectory() as folder, Worker(setting) as profiler:
        journal = Journal.open(Path(folder) / "trials.jsonl", create=True)
        facts = profiler.describe({})
        journal.append("study", card={"name": "virtual", "cap_bytes": cap_bytes}, **facts)
        contest.wrote("ready")
        MemoryStage(profiler, space, journal, cap_bytes).run()
        learned = guard(journal.records, cap_bytes)
        contest.wrote("estimated")
        if strategy == "staged":
            ProbeStage(profiler, space, journal, learned, section, contest.seed).run({}, lambda r: None)
            contest.wrote("probed", probes=[r["wall_s"] for r in journal.records if r.event == "probe"])
        objectives = dict(facts["objectives"])
        terms = SearchTerms(strategy, 10_000, until, contest.seed, ETA, objectives)
        steps = (*contest.milestones, contest.samples)
        orders = TrialPlan(contest.samples, steps, strategy == "staged", 1, 1, slot_bytes=cap_bytes)
        scheduler = _Written(contest, journal, space, learned, terms, orders, lambda r: None)
        LocalExecutor(profiler).run(scheduler, orders)
        probe_ooms = sum(r.event == "probe" and r["outcome"] == "oom" for r in journal.records)
        refused = sum(r.event == "refused" for r in journal.records)
        journal.close()
    return {"probe_ooms": probe_ooms, "refused": refused, "stopped_because": scheduler.stop_reason}


class _Written(TrialScheduler):
    """Our scheduler, which also writes every ending where the others write theirs."""

    def __init__(self, contest: Contest, journal: Journal, *rest: Any) -> None:
        super().__init__(journal, *rest)
        self._contest, self._began = contest, 0.0

    def next_trial(self) -> TrialRequest | None:
        """Notes when it was asked."""
        self._began = time.time()
        return super().next_trial()

    def ended(self, trial: str, result: Mapping[str, Any] | None) -> None:
        """Writes it, and which trainings turned out to be faster with system knobs that this one tried."""
        before = len(self._journal.records)
        super().ended(trial, result)
        record = next(r for r in reversed(self._journal.records) if r.event == "trial")
        found = {**(result or {}), "outcome": record["outcome"], "measured_samples_per_s": record["samples_per_s"]}
        for failed in (result or {}).get("ooms", []):
            self._contest.wrote("oom", knobs=failed["knobs"])
        self._contest.ended(record["config"], found, self._began)
        values = {t.id: dict(t.values) for t in trials(self._journal.records)}
        for rated in (r for r in self._journal.records[before:] if r.event == "rated"):
            own = {"knobs": rated["config"], "samples_per_s": rated["samples_per_s"]}
            self._contest.wrote("faster", outcome="ok", values=values[rated["trial"]], **own)


def ray(contest: Contest, *, reuse: bool = True, tells: bool = False) -> dict[str, Any]:
    """Runs Ray Tune as its documentation has it: OptunaSearch over both objectives, ASHA on the quality.

    The settings: one trial at a time, reduction factor and grace period as our own rungs have them, results at each
    rung, actors reused or not; all else as it comes. An OOM that is raised ends its trial as an error: the actor is
    replaced and OptunaSearch hears of a failure, from which it learns nothing. Where the trainable `tells` it, as no
    speed and the worst quality, the actor lives on and the search learns of it: the best setting we found for it.
    """
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.optuna import OptunaSearch

    from benchmarks.tuners.ray_peer import Peer
    from tuning.workers.ray_tune import RayCluster

    objectives = contest.objectives
    search = OptunaSearch(
        {name: tune_domain(p, tune) for name, p in contest.space.parameters.items()},
        metric=list(objectives),
        mode=list(objectives.values()),
        seed=contest.seed,
    )
    asha = ASHAScheduler(
        time_attr="samples",
        metric=contest.quality,
        mode=objectives[contest.quality],
        max_t=contest.samples,
        grace_period=contest.milestones[0],
        reduction_factor=ETA,
    )
    with RayCluster(cores=1, gpus=0, dashboard=False), tempfile.TemporaryDirectory() as folder:
        contest.wrote("ray")
        tuner = tune.Tuner(
            tune.with_resources(Peer, {"CPU": 1}),
            param_space={"contest": [asdict(contest)], "tells": [tells]},
            tune_config=tune.TuneConfig(
                search_alg=search,
                scheduler=asha,
                num_samples=-1,
                time_budget_s=contest.left_s,
                max_concurrent_trials=1,
                reuse_actors=reuse,
            ),
            run_config=tune.RunConfig(
                storage_path=folder,
                verbose=0,
                # Left out, Tune asks every actor for a checkpoint at its end, and then reuses none of them.
                checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
            ),
        )
        tuner.fit()
    return {}


def tpe(contest: Contest) -> dict[str, Any]:
    """Asks Optuna's TPE in one warm process, without Ray; an OOM is told as a constraint, violated by its size."""
    sampler = optuna.samplers.TPESampler(seed=contest.seed, multivariate=True, group=True)
    directions = [
        StudyDirection.MAXIMIZE if m == "max" else StudyDirection.MINIMIZE for m in contest.objectives.values()
    ]
    study = optuna.create_study(directions=directions, sampler=sampler)
    space, worst = contest.space, dict.fromkeys(contest.objectives, 0.0)

    def asked(train: Train) -> None:
        trial = study.ask()
        found = train(space.complete({name: suggested(trial, name, p) for name, p in space.parameters.items()}))
        ok = found["outcome"] == "ok"
        over = requested_bytes(found["message"]) or 1
        trial.set_constraint("memory", -1.0 if ok else over / contest.cap_bytes)
        values = {"samples_per_s": found["measured_samples_per_s"], **found["values"]} if ok else worst
        study.tell(trial, [values[n] for n in contest.objectives])

    return _in_process(contest, asked)


def random(contest: Contest) -> dict[str, Any]:
    """Draws configurations in one warm process, without Ray."""
    draw = np.random.default_rng(contest.seed)

    def asked(train: Train) -> None:
        train(design(contest.space, 1, int(draw.integers(2**31)))[0])

    return _in_process(contest, asked)


def moasha(contest: Contest) -> dict[str, Any]:
    """Draws configurations in one warm process, and stops at our own rungs what Syne Tune's MOASHA stops."""
    draw, numbers = np.random.default_rng(contest.seed), itertools.count()
    halving = Halving(contest.objectives, contest.milestones[0], contest.samples, ETA)

    def asked(train: Train) -> None:
        name = f"t{next(numbers):03d}"

        def goes_on(found: Mapping[str, Any]) -> bool:
            values = {"samples_per_s": found["measured_samples_per_s"], **found["values"]}
            return halving.goes_on(name, int(found["samples"]), values)

        train(design(contest.space, 1, int(draw.integers(2**31)))[0], goes_on)

    return _in_process(contest, asked, judged=True)


class Train(Protocol):
    """Trains a configuration and writes how it ended; `goes_on` is asked at every rung."""

    def __call__(
        self, knobs: Mapping[str, Scalar], goes_on: Callable[[Mapping[str, Any]], bool] = ..., /
    ) -> dict[str, Any]:
        """Returns the result."""
        ...


def _in_process(contest: Contest, asked: Callable[[Train], None], *, judged: bool = False) -> dict[str, Any]:
    session = Session(contest.setting)
    session.warm({})
    contest.wrote("ready")
    plan = contest.plan(judged=judged)

    def train(
        knobs: Mapping[str, Scalar], goes_on: Callable[[Mapping[str, Any]], bool] = lambda found: True
    ) -> dict[str, Any]:
        began, trial = time.time(), session.trial(knobs, plan, contest.seed, shrink="")
        found = trial.advance()
        while not found["done"] and goes_on(found):
            found = trial.advance()
        if not found["done"]:
            trial.end()
            found = {**found, "outcome": "stopped"}
        contest.ended(knobs, found, began)
        return found

    while contest.left_s > 0:
        asked(train)
    return {}


WAYS: Mapping[str, Callable[[Contest], dict[str, Any]]] = {
    "staged": lambda contest: ours(contest, "staged"),
    "joint": lambda contest: ours(contest, "joint"),
    "ray": ray,
    "ray, new actors": lambda contest: ray(contest, reuse=False),
    "ray, OOMs told": lambda contest: ray(contest, tells=True),
    "tpe": tpe,
    "random": random,
    "moasha": moasha,
}
"""Every tuner by its name in the table."""
