"""A study in virtual time: what its executor does by itself, and that the scheduler decides as it does without one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sim.simulator import (
    OOM_S,
    SimulatedExecutor,
    SimulatedProfiler,
    SimulatedTrial,
    VirtualClock,
    VirtualJournal,
    samples_per_s,
)
from tests.fakes import FormulaProfiler
from tests.tuning.search.test_scheduler import ORDERS, SPACE, Office
from trainables.knobs import Knobs, Scalar
from tuning.config.schema import ProbeSection
from tuning.journal.records import trials
from tuning.memory.groups import guard
from tuning.memory.measure import MemoryStage
from tuning.memory.profile import Sizes
from tuning.search.probe import ProbeStage
from tuning.search.protocols import TrialPlan, TrialRequest
from tuning.search.scheduler import SearchTerms, TrialScheduler
from tuning.workers.placement import Share

KNOBS: Mapping[str, Scalar] = {"batch_size": 64, "micro_batch_size": 64, "learning_rate": 0.1}


class FormulaWorld:
    """The formulas of `FormulaProfiler` as a world; nothing is learned with a learning rate above 1."""

    def __init__(self) -> None:
        self.profiler = FormulaProfiler()

    def step_s(self, knobs: Mapping[str, Scalar]) -> tuple[float, float]:
        """Returns the formula's seconds."""
        return self.profiler.micro_step_s(knobs), 0.001

    def peak_bytes(self, knobs: Mapping[str, Scalar], micro_batch: int) -> int:
        """Returns the formula's peak."""
        return self.profiler.peak_bytes(knobs, micro_batch)

    def sizes(self, knobs: Mapping[str, Scalar]) -> Sizes:
        """Returns what the profiler's footprint has."""
        return Sizes.of(self.profiler.footprint(knobs, ()))

    def values(self, knobs: Mapping[str, Scalar], samples: int, seed: int) -> dict[str, float]:
        """Returns the formula's error."""
        if Knobs.of(knobs).learning_rate > 1.0:
            return {"error": float("nan")}
        found = self.profiler.train(knobs, samples, (samples,), 0)["values"]
        return {"error": float(found["error"])}

    def evaluate_s(self, knobs: Mapping[str, Scalar]) -> float:
        """Returns nothing: the profiler has none."""
        return 0.0


class Study:
    """Estimate, probes and search of the space of the scheduler's own tests, in virtual time."""

    def __init__(
        self, *, devices: int = 1, count: int = 12, cap_bytes: int | None = None, strategy: Any = "staged",
        deadline: float | None = None, slots: int = 1,
    ) -> None:  # fmt: skip
        self.clock, world = VirtualClock(), FormulaWorld()
        self.journal = VirtualJournal(self.clock)
        profiler = SimulatedProfiler(world, self.clock, cap_bytes)
        MemoryStage(profiler, SPACE, self.journal, cap_bytes, clock=self.clock).run()
        learned = guard(self.journal.records, cap_bytes)
        if strategy == "staged":
            section = ProbeSection(max_time_s=60.0, probe_time_s=1, spread_frac=0.03)
            ProbeStage(profiler, SPACE, self.journal, learned, section, 0, self.clock).run({}, lambda r: None)
        self.began_s = self.clock()
        ends = None if deadline is None else self.began_s + deadline
        terms = SearchTerms(strategy, count, ends, 0, 2, {"error": "min"}, clock=self.clock)
        share = None if cap_bytes is None else cap_bytes // slots
        orders = TrialPlan(800, (200, 400, 800), strategy == "staged", slots, 1, slot_bytes=share)
        self.scheduler = TrialScheduler(self.journal, SPACE, learned, terms, orders, lambda r: None)
        self.executor = SimulatedExecutor(world, self.clock, devices=devices, cap_bytes=cap_bytes)
        self.executor.run(self.scheduler, orders)

    @property
    def search_s(self) -> float:
        """The virtual seconds of the search."""
        return self.clock() - self.began_s

    def of(self, event: str) -> list[Any]:
        """Returns the records of an event."""
        return [r for r in self.journal.records if r.event == event]


def test_one_device_decides_as_a_plain_loop_over_the_desk(tmp_path: Path) -> None:
    office, study = Office(tmp_path, strategy="joint", count=25), Study(strategy="joint", count=25)
    office.work()
    own, plain = trials(study.journal.records), trials(office.journal.records)
    assert [(t.id, t.config, t.outcome, t.stopped_at) for t in own] == [
        (t.id, t.config, t.outcome, t.stopped_at) for t in plain
    ]


def test_the_same_study_is_the_same_to_the_letter() -> None:
    first, second = Study(devices=3), Study(devices=3)
    assert [(r.t, r.event, r.fields) for r in first.journal.records] == [
        (r.t, r.event, r.fields) for r in second.journal.records
    ]


@pytest.mark.parametrize("devices", [2, 5])
def test_devices_share_the_work_and_no_time_is_lost(devices: int) -> None:
    alone, study = Study(count=20), Study(count=20, devices=devices)
    assert len(trials(study.journal.records)) == 20
    busy_s = sum(t.train_s for t in trials(study.journal.records))
    longest_s = max(t.train_s for t in trials(study.journal.records))
    assert busy_s / devices <= study.search_s + 1e-9
    assert study.search_s <= busy_s / devices + longest_s  # the bound of any list schedule
    assert study.search_s < alone.search_s


def test_time_is_up_in_virtual_seconds() -> None:
    whole = Study(count=30)
    half = Study(count=30, deadline=whole.search_s / 2)
    assert "max_time" in half.scheduler.stop_reason
    assert half.search_s <= whole.search_s
    assert 1 <= len(trials(half.journal.records)) < 30


def test_a_trial_halves_its_micro_batch_until_it_fits_and_loses_the_time() -> None:
    world = FormulaWorld()
    trial = SimulatedTrial(world, KNOBS, (200, 800), 0, Share(300_000_000, 1, "all"))
    took_s, result = trial.advance()
    assert (result["knobs"]["micro_batch_size"], len(result["ooms"]), result["done"]) == (16, 2, False)
    assert took_s == pytest.approx(2 * OOM_S + 200 / samples_per_s(world, result["knobs"]))
    assert trial.advance()[1]["done"]


def test_a_trial_says_what_all_its_evaluations_took() -> None:
    world = FormulaWorld()
    world.evaluate_s = lambda knobs: 0.5  # type: ignore[method-assign]
    trial = SimulatedTrial(world, KNOBS, (200, 400, 800), 0, Share(None, 1, ""))
    assert [trial.advance()[1]["evaluate_s"] for _ in range(3)] == [0.5, 1.0, 1.5]


@pytest.mark.parametrize("shrink", ["", "loader"])
def test_a_trial_that_may_not_shrink_ends_in_its_oom(shrink: Any) -> None:
    _, result = SimulatedTrial(FormulaWorld(), KNOBS, (800,), 0, Share(300_000_000, 1, shrink)).advance()
    assert (result["outcome"], result["done"], result["samples"]) == ("oom", True, 0)
    assert result["knobs"]["micro_batch_size"] == 64


def test_what_does_not_become_a_number_diverges() -> None:
    knobs = {**KNOBS, "learning_rate": 2.0}
    _, result = SimulatedTrial(FormulaWorld(), knobs, (800,), 0, Share(None, 1, "")).advance()
    assert (result["outcome"], result["done"], result["values"]) == ("diverged", True, {"error": None})


class Wide:
    """A scheduler with two trials: the first is predicted to need little and needs more than half of the card."""

    def __init__(self) -> None:
        self.left = [
            TrialRequest("t0", {**KNOBS, "micro_batch_size": 32}, 0, 10),
            TrialRequest("t1", {"batch_size": 8}, 0, 10),
        ]
        self.said: list[tuple[str, str]] = []

    def next_trial(self) -> TrialRequest | None:
        """Returns the next one."""
        return self.left.pop(0) if self.left else None

    def at_rung(self, trial: str, result: object) -> bool:
        """Lets everyone go on."""
        return True

    def goes_on(self, trial: str, result: object) -> bool:
        """Lets everyone go on."""
        return True

    def ended(self, trial: str, result: Mapping[str, Any] | None) -> None:
        """Keeps how it ended."""
        self.said.append((trial, str((result or {})["outcome"])))

    def decided(self, event: str, trial: str, reason: str) -> None:
        """Keeps what was decided."""
        self.said.append((trial, event))


def test_a_trial_whose_share_is_too_small_begins_again_in_a_wider_one() -> None:
    scheduler = Wide()
    orders = TrialPlan(80, (80,), True, 2, 1, slot_bytes=250_000_000)
    SimulatedExecutor(FormulaWorld(), VirtualClock(), cap_bytes=500_000_000).run(scheduler, orders)
    assert scheduler.said == [("t1", "ok"), ("t0", "widened"), ("t0", "ok")]


def test_under_a_cap_nothing_is_launched_that_the_frontier_refuses() -> None:
    study = Study(cap_bytes=300_000_000, strategy="joint", count=30, devices=4)
    assert study.of("refused")
    assert not [t for t in trials(study.journal.records) if t.outcome == "oom"]
    assert len(study.of("refused")) + len(study.of("trial")) == 30


def test_a_crew_without_a_world_or_courses_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a world, or the courses"):
        SimulatedExecutor(None, VirtualClock())


def test_neither_torch_nor_ray_is_imported() -> None:
    code = (
        "import sys, benchmarks.sim.simulator, benchmarks.sim.recorded, benchmarks.sim.replay;"
        "sys.exit(bool({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_orders_of_the_plain_loop_are_those_of_the_study() -> None:
    assert (ORDERS.samples, ORDERS.milestones) == (800, (200, 400, 800))
