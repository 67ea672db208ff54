"""What earlier runs found: taken over where it holds, left out where it does not, and never a trap."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fakes import FormulaProfiler
from trainables.knobs import Scalar
from tuning.config.schema import ProbeSection
from tuning.config.space import Space
from tuning.journal.records import Journal, Record, trials
from tuning.memory.groups import guard
from tuning.memory.measure import MemoryStage
from tuning.search import reuse
from tuning.search.probe import ProbeStage, probed
from tuning.search.protocols import TrialPlan
from tuning.search.scheduler import SearchTerms, TrialScheduler
from tuning.stats.pareto import hypervolume_2d

STUDY: dict[str, Any] = {
    **{"workload_sha256": "w", "shapes_sha256": "s", "data_sha256": "d", "horizon_samples": 800, "threads": 2},
    **{"device": {"name": "Example CPU"}, "card": {"cap_bytes": None}, "objectives": {"error": "min"}},
    **{"versions": {"torch": "2.13", "cardtune": "0.1"}, "config": {"workload": {"options": {"data": None, "n": 3}}}},
}
SPACE = Space.of(
    {
        "batch_size": [16, 64],
        "micro_batch_size": [4, 16, 64],
        "num_workers": [0, 2],
        "learning_rate": {"low": 1e-3, "high": 1.0, "log": True},
    }
)
ORDERS = TrialPlan(samples=800, milestones=(800,), shrink=True, concurrency=1, threads=1)


def run(
    *ended: tuple[str, float, float], study: Mapping[str, Any] = STUDY, speed: float = 100.0, **config: Scalar
) -> list[Record]:
    """The records of a run: trials as (outcome, learning rate, error), and a probe of this speed."""
    knobs = {"batch_size": 16, "micro_batch_size": 16, "num_workers": 2, **config}
    events: list[tuple[str, dict[str, Any]]] = [("study", dict(study))]
    events.append(("probe", {"name": None, "config": knobs, "outcome": "ok", "samples_per_s": speed}))
    for number, (outcome, rate, error) in enumerate(ended):
        own = {"config": {**knobs, "learning_rate": rate}, "outcome": outcome, "values": {"error": error}}
        events.append(("trial", {"trial": f"t{number}", **own, "samples_per_s": speed}))
    return [Record(n, "2026-11-21T10:00:00Z", event, fields) for n, (event, fields) in enumerate(events)]


def changed(**fields: Any) -> dict[str, Any]:
    return {**STUDY, **fields}


def test_the_same_workload_takes_over_probes_and_trials() -> None:
    found = reuse.recall([("one", run(("ok", 0.1, 0.2), ("stopped", 0.9, 2.0), ("oom", 0.5, 0.0)))], STUDY)
    assert found is not None
    assert [t["outcome"] for t in found["trials"]] == ["ok", "stopped"]
    assert [p["samples_per_s"] for p in found["probes"]] == [100.0]
    assert reuse.sentence(found).startswith("begins from 1 probes and 2 trials of one (search.reuse=false")


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (changed(data_sha256="e"), "data"),
        (changed(horizon_samples=400), "horizon_samples"),
        (changed(config={"workload": {"options": {"data": "/other", "n": 3}}}), "options"),
    ],
)
def test_other_data_and_another_horizon_leave_the_speeds_and_say_so(other: dict[str, Any], why: str) -> None:
    found = reuse.recall([("one", run(("ok", 0.1, 0.2), study=other))], STUDY)
    assert found is not None
    assert (len(found["probes"]), found["trials"]) == (1, [])
    assert found["left_out"]["one"].removesuffix("_sha256") == why
    assert f"what one learned is left out, as it differs in {why}" in reuse.sentence(found)


@pytest.mark.parametrize(
    "other",
    [
        changed(workload_sha256="v"),
        changed(shapes_sha256="t"),
        changed(device={"name": "Another"}),
        changed(versions={"torch": "2.14", "cardtune": "0.1"}),
        changed(card={"cap_bytes": 8}),
        changed(config={"workload": {"options": {"data": None, "n": 4}}}),
        changed(shapes_sha256=""),
        {},
    ],
)
def test_other_code_or_another_machine_takes_over_nothing(other: dict[str, Any]) -> None:
    assert reuse.recall([("one", run(("ok", 0.1, 0.2), study=other))], STUDY) is None
    assert reuse.recall([("one", run(("ok", 0.1, 0.2)))], other) is None


def test_what_was_confirmed_is_left_out_so_that_its_seeds_are_fresh_to_the_next_run() -> None:
    records = run(("ok", 0.1, 0.2), ("ok", 0.3, 0.5))
    for seed, error in ((1, 0.3), (2, 0.4)):
        fields = {"name": "t0", "seed": seed, "outcome": "ok", "values": {"error": error}}
        records.append(Record(90 + seed, "2026-11-21T10:00:00Z", "confirmed", fields))
    found = reuse.recall([("one", records)], STUDY)
    assert found is not None
    assert [t["values"]["error"] for t in found["trials"]] == [0.2, 0.5]


def test_what_was_picked_is_trained_first_wherever_it_lies_on_the_front() -> None:
    records = run(*[("ok", 0.1 * n, 0.1 * n) for n in range(1, 9)])
    records.append(Record(99, "2026-11-21T10:00:00Z", "pick", {"best": "t5"}))
    found = reuse.recall([("one", records)], STUDY)
    assert found is not None
    first = reuse.best_of(found["trials"], {"samples_per_s": "max", "error": "min"})
    assert first[0]["config"]["learning_rate"] == pytest.approx(0.6)
    assert first[1]["values"]["error"] == pytest.approx(0.1)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(
    ("now", "then", "doubted"),
    [
        (3.0, 1.0, True),  # said to be of the best, and is not
        (3.0, 3.0, False),  # fast, and as bad as it was
        (1.0, 1.0, False),
        (1.0, 3.0, False),
    ],
)
def test_a_trial_is_held_to_what_it_came_to_itself(mode: str, now: float, then: float, doubted: bool) -> None:
    sign = 1.0 if mode == "min" else -1.0
    ended = [{"outcome": "ok", "values": {"error": sign * value}} for value in (1.0, 1.5, 2.0, 2.5, 3.0)]
    text = reuse.refuted(ended, "error", mode, {"error": sign * now}, {"error": sign * then})
    assert bool(text) is doubted


class Office:
    """A search over formulas that begins from what earlier runs said."""

    def __init__(self, folder: Path, count: int, earlier: list[Record] | None = None, patience: int | None = None):
        folder.mkdir(exist_ok=True)
        self.profiler, self.journal = FormulaProfiler(), Journal.open(folder / "trials.jsonl", create=True)
        self.terms = SearchTerms("staged", count, None, 0, 2, {"error": "min"}, patience)
        if earlier is not None and not self.journal.records:
            found = reuse.recall([("earlier", earlier)], STUDY)
            assert found is not None
            self.journal.append("reused", **found)
        MemoryStage(self.profiler, SPACE, self.journal, None).run()
        learned = guard(self.journal.records, None)
        section = ProbeSection(max_time_s=0.2, probe_time_s=1, spread_frac=0.03)
        ProbeStage(self.profiler, SPACE, self.journal, learned, section, 0).run({}, lambda r: None)
        self.scheduler = self.resumed()

    def resumed(self, slots: int = 1, **terms: Any) -> TrialScheduler:
        """Returns a scheduler over the same records, on other terms."""
        learned, orders = guard(self.journal.records, None), dataclasses.replace(ORDERS, concurrency=slots)
        own = dataclasses.replace(self.terms, **terms)
        return TrialScheduler(self.journal, SPACE, learned, own, orders, lambda r: None)

    def work(self, limit: int = 1000) -> None:
        """Runs trials to their end, without rungs."""
        while limit and (request := self.scheduler.next_trial()) is not None:
            limit -= 1
            found = self.profiler.train(request.knobs, 800, (800,), 0)
            self.scheduler.ended(request.trial, {**found, "knobs": dict(request.knobs), "ooms": []})

    @property
    def configs(self) -> list[Mapping[str, Any]]:
        return [t.config for t in trials(self.journal.records)]

    def volume(self) -> float:
        """Returns the hypervolume of samples/s and error, to 0 and 5."""
        rows = [[-(t.samples_per_s or 0.0), t.values["error"] or 0.0] for t in trials(self.journal.records)]
        return hypervolume_2d(np.array(rows), (0.0, 5.0))


GOOD = [("ok", 10 ** (-3 + n / 4), abs(math.log(10 ** (-3 + n / 4) / 0.1))) for n in range(1, 12)]


def test_the_best_of_earlier_runs_is_tried_first_and_never_taken_on_trust(tmp_path: Path) -> None:
    office = Office(tmp_path / "a", 4, run(*GOOD))
    office.work()
    assert office.configs[0]["learning_rate"] == pytest.approx(0.1)
    assert {t.id for t in trials(office.journal.records)} == {"t000", "t001", "t002", "t003"}
    assert not any(r.event == "note" for r in office.journal.records)


def test_an_earlier_run_of_another_space_is_no_proposal(tmp_path: Path) -> None:
    assert Office(tmp_path / "a", 1, run(*GOOD, batch_size=32)).scheduler._best_before == []
    assert Office(tmp_path / "b", 1, run(*GOOD, dropout=0.3)).scheduler._best_before != []


LIES = [("ok", 10 ** (-0.9 + n / 20), 0.01 + 0.001 * n) for n in range(18)]
"""A run that says the best learning rates are those from 0.13 to 0.9, of which the last are in truth the worst."""


@pytest.mark.parametrize("lies", [LIES, [("ok", rate, 3.0 - error) for _, rate, error in GOOD]])
def test_an_earlier_run_that_was_wrong_costs_no_more_than_twice_the_trials(
    tmp_path: Path, lies: list[tuple[str, float, float]]
) -> None:
    clean, misled = Office(tmp_path / "clean", 12), Office(tmp_path / "misled", 24, run(*lies))
    clean.work()
    misled.work()
    assert misled.volume() >= 0.95 * clean.volume()


def test_lies_are_found_out_by_the_first_trial_and_said_once(tmp_path: Path) -> None:
    office = Office(tmp_path / "a", 3, run(*[("ok", 0.9, 0.01)] * 3, *LIES))
    office.work(1)
    notes = [r["text"] for r in office.journal.records if r.event == "note"]
    assert len(notes) == 1
    assert notes[0].startswith("one of the best of earlier runs came to error ")
    assert office.scheduler._sampler._prior == []
    office.journal.close()
    again = Office(tmp_path / "a", 3)
    assert again.scheduler._sampler._prior == []
    assert [r["text"] for r in again.journal.records if r.event == "note"] == notes


def test_a_sweep_begins_at_what_an_earlier_run_found_fastest_and_looks_elsewhere_too(tmp_path: Path) -> None:
    slow = run(speed=1e9, num_workers=0, micro_batch_size=4)
    office = Office(tmp_path / "a", 1, slow)
    first, second, *_ = office.profiler.probed
    assert (first["micro_batch_size"], first["num_workers"]) == (4, 0)
    assert second["micro_batch_size"] != 4
    best = max(probed(office.journal.records), key=lambda p: p.samples_per_s).knobs
    assert (best["micro_batch_size"], best["num_workers"]) == (64, 2)


SAID = re.compile(
    r"the last (\d+) trials left the front as it was \(search.patience=8\), and the next 8 are expected to add "
    r"less than 1% of the area under it"
)


def test_a_search_that_changes_nothing_any_more_ends_and_says_why(tmp_path: Path) -> None:
    office = Office(tmp_path / "a", 200, patience=8)
    office.work()
    ended = trials(office.journal.records)
    assert 8 < len(ended) < 200
    found = SAID.fullmatch(office.scheduler.stop_reason)
    assert found is not None
    assert int(found[1]) >= 8
    office.journal.close()
    again = Office(tmp_path / "a", 200, patience=8)
    again.work()
    assert len(trials(again.journal.records)) == len(ended)


def test_what_is_expected_is_read_back_from_the_records(tmp_path: Path) -> None:
    office = Office(tmp_path / "a", 200, patience=8)
    office.work(12)
    before = office.scheduler._foresight.expected
    assert before is not None
    office.journal.close()
    assert Office(tmp_path / "a", 200, patience=8).scheduler._foresight.expected == pytest.approx(before)


def test_a_search_waits_for_what_runs_before_it_ends(tmp_path: Path) -> None:
    office = Office(tmp_path / "a", 200, patience=8)
    running = office.scheduler.next_trial()
    assert running is not None
    office.work()
    assert 8 < len(trials(office.journal.records)) < 200
    assert office.scheduler.stop_reason == "", "what runs may change the front"
    found = office.profiler.train(running.knobs, 800, (800,), 0)
    office.scheduler.ended(running.trial, {**found, "knobs": dict(running.knobs), "ooms": []})
    office.work()
    assert SAID.fullmatch(office.scheduler.stop_reason)


@pytest.mark.parametrize(
    ("slots", "left_s", "more", "refused", "over"),
    [
        (1, None, 100, 0, False),  # 0.4 % by each of the next 8
        (1, None, 3, 0, False),
        (1, None, 2, 0, True),
        (1, None, 3, 1, True),  # what was refused was proposed
        (1, 120.0, 100, 0, False),  # 0.01 % a second
        (1, 60.0, 100, 0, True),
        (2, 60.0, 100, 0, False),
    ],
)
def test_what_an_idle_search_may_expect_is_counted_in_trials_slots_and_time(
    tmp_path: Path, slots: int, left_s: float | None, more: int, refused: int, over: bool
) -> None:
    office = Office(tmp_path / "a", 200, patience=8)
    office.work()
    for _ in range(refused):
        office.journal.append("refused", stage="search", config=dict(office.configs[0]), reason="no room")
    deadline = None if left_s is None else 1000.0 + left_s
    count = len(office.configs) + more
    scheduler = office.resumed(slots, trials=count, deadline=deadline, clock=lambda: 1000.0)
    scheduler._foresight.recall({"expected": [0.004, 0.0001]})
    assert (scheduler.next_trial() is None) is over
    assert ("expected to add less than 1%" in scheduler.stop_reason) is over
