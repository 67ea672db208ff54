"""Two devices of one machine in Ray: each trial has one of them, and the two really run side by side."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.queues import KNOBS, Queue
from tuning.search.protocols import TrialPlan, TrialRequest
from tuning.workers import nvml
from tuning.workers.nodes import KindShare
from tuning.workers.ray_tune import RayCluster, RayExecutor, requested
from tuning.workers.slots import share_bytes
from tuning.workers.worker_config import WorkerConfig

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]
UUIDS = ("GPU-a000", "GPU-b000")
MEETING = '''
import os
from pathlib import Path

import torch
from tests.fakes import Sums


class Meeting(Sums):
    """Sums whose training goes on once the processes of two trials have come to their first step."""

    options = {**Sums.options, "place": ""}

    def dataset(self, config, split):
        self.place = Path(config.options["place"])
        return super().dataset(config, split)

    def loss(self, model, batch):
        (self.place / str(os.getpid())).touch()
        while len(list(self.place.iterdir())) < 2:
            os.sched_yield()
        return super().loss(model, batch)


WORKLOAD = Meeting()
'''


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[RayCluster]:
    """A Ray of two cores and two cards, which are named by UUID as `devices` has it; no card is here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(nvml.VISIBLE, ",".join(UUIDS))
        with RayCluster(cores=2, gpus=2, dashboard=False) as running:
            yield running


class Plain(Queue):
    """A scheduler whose trials have no knob of a workload's own."""

    def next_trial(self, kind: str = "") -> TrialRequest | None:
        """Returns the next one."""
        request = super().next_trial()
        return None if request is None else replace(request, knobs=KNOBS)


def test_two_trials_of_one_core_each_run_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "meeting.py").write_text(MEETING)
    (tmp_path / "place").mkdir()
    scheduler = Plain([("nowhere", None)] * 2)
    config = WorkerConfig(str(tmp_path / "meeting.py"), {"place": str(tmp_path / "place")}, threads=1)
    RayExecutor(config, "meeting_trials").run(scheduler, TrialPlan(64, (64,), False, 2, 1))
    found = [scheduler.found[f"t{n}"] for n in range(2)]
    assert {f["outcome"] for f in found} == {"ok"}, found
    assert {str(f["pid"]) for f in found} == {path.name for path in (tmp_path / "place").iterdir()}
    assert max(f["first_step_at"] for f in found) < min(f["returned_at"] for f in found)


class Slot:
    """What has a slot's share of a card, as the actor of a trial does."""

    def visible(self) -> str:
        """Returns the cards that CUDA would show."""
        return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize(("slots", "each"), [(2, 1), (3, 2)])
def test_the_slots_of_two_cards_have_one_of_them_each_by_uuid(slots: int, each: int) -> None:
    import ray  # here: it is to find the environment that ours is set to

    plan = TrialPlan(64, (64,), False, slots, 1, devices=2, cap_bytes=share_bytes(24 * 2**30, math.ceil(slots / 2)))
    resources: dict[str, Any] = requested(KindShare("", plan, WorkerConfig("mine.py", device="cuda")), None)
    actors = [ray.remote(num_cpus=0, num_gpus=resources["GPU"])(Slot).remote() for _ in range(slots)]
    seen = Counter(ray.get([actor.visible.remote() for actor in actors]))
    assert set(seen) == set(UUIDS), "both are used"
    assert max(seen.values()) <= each
