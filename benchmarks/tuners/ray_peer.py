"""The trainable of Ray Tune's own search: its OOM is raised, as a training loop does, or told as the worst result."""

from __future__ import annotations

import time
from typing import Any

import torch
from ray import tune

from benchmarks.tuners.contest import Contest
from tuning.workers.session import Session, Trial


class Peer(tune.Trainable):
    """One training at a time; the workload stays loaded from one to the next where the actor is reused."""

    def setup(self, config: dict[str, Any]) -> None:
        """Loads the workload."""
        self._contest, self._tells = Contest(**config["contest"][0]), bool(config["tells"][0])
        self._session = Session(self._contest.setting)
        self._session.warm({})
        self._trial: Trial | None = None
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Takes the next training."""
        self._end()
        self._begin(new_config)
        return True

    def cleanup(self) -> None:
        """Writes what was under way."""
        self._end()

    def _begin(self, config: dict[str, Any]) -> None:
        space = self._contest.space
        self._knobs = space.complete({name: config[name] for name in space.parameters})
        self._began, self._last = time.time(), dict[str, Any]()
        plan = self._contest.plan(judged=True)
        self._trial = self._session.trial(self._knobs, plan, self._contest.seed, shrink="")

    def _end(self) -> None:
        """Ends a training that the scheduler stopped at its last result."""
        if self._trial is not None:
            self._trial.end()
            self._trial = None
            self._contest.ended(self._knobs, {**self._last, "outcome": "stopped"}, self._began)

    def step(self) -> dict[str, Any]:
        """Returns the result at the next rung; of a training that failed, raises why or returns the worst there is."""
        assert self._trial is not None  # noqa: S101  (Tune steps no trial that has ended)
        found = self._last = self._trial.advance()
        if found["done"]:
            self._trial = None
            self._contest.ended(self._knobs, found, self._began)
        if found["outcome"] != "ok" and self._tells:
            return {"samples": 0, "samples_per_s": 0.0, "done": True, self._contest.quality: self._contest.worst}
        if found["outcome"] == "oom":
            raise torch.OutOfMemoryError(found["message"])
        if found["outcome"] != "ok":
            raise RuntimeError(found["message"])
        rate = found["measured_samples_per_s"]
        return {"samples": found["samples"], "samples_per_s": rate, "done": found["done"], **found["values"]}
