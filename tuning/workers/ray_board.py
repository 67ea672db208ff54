"""A study in the list of Ray's dashboard: tasks of one actor, called as the terminal calls them.

Ray Tune's own tasks are called after the trainable, and an actor runs many trials: no page of the dashboard says which.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, cast

import ray
from ray.util.metrics import Gauge
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

MOST_LETTERS = 160
"""The most characters of a task's name: the dashboard shows it in one line."""
AT_ONCE = 1000
"""Tasks that may wait for their end at the same time: a stage, and a trial a slot."""


class RayBoard:
    """Tells the dashboard of the Ray that is joined; a board that fails, as with its node, shows nothing more."""

    def __init__(self, study: str) -> None:
        """`study` is what the actor is called, beside the study's trainables."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        remote = cast(Any, ray.remote)
        actor = remote(num_cpus=0, max_concurrency=AT_ONCE)(StudyActor)
        self._actor: Any = actor.options(scheduling_strategy=here).remote(study)

    def runs(self, key: str, name: str) -> None:
        """Shows a task that runs until another has its key, or one that is said ends it."""
        self._call("runs", name, key)

    def says(self, name: str, ends: str = "", values: Mapping[str, float] | None = None) -> None:
        """Shows a task that has ended, and ends the one of that key.

        The `values` of trial `ends` become Ray's metrics cardtune_NAME, for Prometheus.
        """
        self._call("says", name, ends, dict(values or {}))

    def _call(self, method: str, name: str, *given: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            getattr(self._actor, method).options(name=name[:MOST_LETTERS]).remote(*given)


class StudyActor:
    """The actor whose tasks they are."""

    def __init__(self, study: str) -> None:
        self._study = study
        self._running: dict[str, asyncio.Event] = {}
        self._gauges: dict[str, Gauge] = {}

    def __repr__(self) -> str:
        return self._study

    async def runs(self, key: str) -> None:
        """Returns when the task of this key is ended."""
        self._end(key)
        self._running[key] = asyncio.Event()
        await self._running[key].wait()

    async def says(self, ends: str, values: Mapping[str, float]) -> None:
        """Is there for its name; sets what Ray's agent hands to Prometheus."""
        self._end(ends)
        for name, value in values.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(f"cardtune_{name}", f"{name} of a trial", tag_keys=("trial",))
            self._gauges[name].set(value, {"trial": ends})

    def _end(self, key: str) -> None:
        if (event := self._running.pop(key, None)) is not None:
            event.set()
