"""The probe stage on a profiler whose right answer is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FormulaProfiler, no_time
from trainables.knobs import Scalar
from trainables.our_knobs import EVERY
from tuning.config.schema import ProbeSection
from tuning.config.space import Choice, Space
from tuning.journal.events import ProbeRecord, StudyRecord, Timed
from tuning.journal.records import Journal
from tuning.journal.run import History
from tuning.memory.groups import guard, key_of, memory_groups
from tuning.memory.guard import GRADIENTS_HELD, MemoryGuard
from tuning.memory.measure import Footprint, MemoryStage
from tuning.search.probe import ProbeStage, left_out
from tuning.search.throughput import Speeds, fastest, inside, probed

BUDGET = ProbeSection(max_time_s=10.0, probe_time_s=1.0)
SPACE = Space.parse(
    {
        "batch_size": [16, 64],
        "micro_batch_size": [4, 16, 64],
        "num_workers": [0, 2],
        "activation_checkpointing": [False, True],
        "amp_dtype": ["fp32", "bf16"],
        "learning_rate": {"low": 1e-3, "high": 1e-1, "log": True},
    },
    EVERY,
)


def run(tmp_path: Path, cap_bytes: int | None = None, **named: dict[str, Scalar]) -> tuple[FormulaProfiler, Journal]:
    profiler = FormulaProfiler(cap_bytes)
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    MemoryStage(profiler, SPACE, journal, cap_bytes, clock=no_time).run()
    ProbeStage(profiler, SPACE, journal, guard(journal.run, cap_bytes), BUDGET, clock=no_time).run(
        named, lambda r: None
    )
    return profiler, journal


def test_finds_the_fastest_system_knobs_of_each_coupling_with_all_its_neighbours_and_probes_nothing_twice(
    tmp_path: Path,
) -> None:
    profiler, journal = run(tmp_path)
    asked = [tuple(sorted(k.items(), key=str)) for k in profiler.probed]
    assert len(asked) == len(set(asked)) < 2 * 3 * 2 * 2
    system = {n: p.values for n, p in SPACE.subset({"system"}).parameters.items() if isinstance(p, Choice)}
    for dtype in ("fp32", "bf16"):
        mine = [p for p in probed(journal.run.probes, EVERY) if p.knobs["amp_dtype"] == dtype]
        best = max(mine, key=lambda p: p.samples_per_s).knobs
        assert (best["micro_batch_size"], best["num_workers"]) == (64, 2)
        assert best["activation_checkpointing"] is False
        for name, values in system.items():
            assert all({**best, name: value} in [p.knobs for p in mine] for value in values)


def test_what_cannot_fit_is_refused_and_never_probed(tmp_path: Path) -> None:
    profiler, journal = run(tmp_path, cap_bytes=400_000_000)
    assert all(r.outcome == "ok" for r in journal.run.probes)
    refused = [r.config for r in journal.run.refused]
    assert {r["micro_batch_size"] for r in refused} == {64}
    assert not any(k["micro_batch_size"] == 64 and not k["activation_checkpointing"] for k in profiler.probed)


@pytest.mark.parametrize(("max_time_s", "lacking"), [(11.3, []), (3.5, ["channels_last"])])
def test_probes_are_so_short_that_each_value_has_one_beside_what_is_named_and_what_had_none_is_said(
    tmp_path: Path, max_time_s: float, lacking: list[str]
) -> None:
    class Clocked(FormulaProfiler):
        now_s = 0.0

        def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
            self.now_s += time_s
            return super().probe(knobs, time_s, best_samples_per_s)

    space = Space.parse(
        {"batch_size": 64, "micro_batch_size": 64, "num_workers": [0, 1, 2], "channels_last": [False, True]}, EVERY
    )
    journal, profiler = Journal.open(tmp_path / "trials.jsonl", create=True), Clocked()
    budget = ProbeSection(max_time_s=max_time_s, probe_time_s=3.0)
    ProbeStage(profiler, space, journal, guard(History(), None), budget, clock=lambda: profiler.now_s).run(
        {"before": {"batch_size": 64, "num_workers": 0}}, lambda r: None
    )
    assert left_out(journal.run, space) == lacking
    assert journal.records[-1]["name"] == "before"
    assert profiler.now_s <= max_time_s


def test_a_knob_that_is_idle_beside_the_fastest_others_is_not_said_to_lack_a_probe(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    for workers, rate in ((0, 200.0), (1, 100.0)):
        config = {"batch_size": 64, "micro_batch_size": 64, "num_workers": workers}
        found = {"outcome": "ok", "samples_per_s": rate, "micro_step_s": 64 / rate, "optimizer_step_s": 0.0}
        journal.append(ProbeRecord, name=None, config=config, **found)
    given = {"batch_size": 64, "num_workers": [0, 1], "prefetch_factor": [2, 4], "micro_batch_size": [64, 128]}
    assert left_out(journal.run, Space.parse(given, EVERY)) == [], "a micro-batch of 128 is the whole batch, too"
    assert left_out(journal.run, Space.parse({**given, "channels_last": [False, True]}, EVERY)) == ["channels_last"]


def test_named_configurations_are_measured_last_and_only_once(tmp_path: Path) -> None:
    before: dict[str, Scalar] = {"batch_size": 4, "micro_batch_size": 4}
    profiler, journal = run(tmp_path, before=before)
    assert profiler.probed[-1] == before
    journal.close()
    again = Journal.open(tmp_path / "trials.jsonl")
    ProbeStage(profiler, SPACE, again, guard(again.run, None), BUDGET, clock=no_time).run(
        {"before": before}, lambda r: None
    )
    assert sum(1 for r in again.run.probes if r.name == "before") == 1


class Broken(FormulaProfiler):
    """A profiler of code that raises, in all probes but the first `works`."""

    works, message = 0, "it broke"

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
        """Returns a crash, or the formula's speed."""
        found = super().probe(knobs, time_s, best_samples_per_s)
        if len(self.probed) <= self.works:
            return found
        return Timed(outcome="crash", message=self.message)


@pytest.mark.parametrize(("works", "message", "few"), [(0, "it broke", 4), (0, "LoopError: so", 2), (1, "it broke", 0)])
def test_where_the_first_three_probes_crash_no_others_are_tried_but_those_named(
    tmp_path: Path, works: int, message: str, few: int
) -> None:
    """One is enough where it says that `run` is used wrongly."""
    profiler, journal = Broken(), Journal.open(tmp_path / "trials.jsonl", create=True)
    profiler.works, profiler.message = works, message
    MemoryStage(profiler, SPACE, journal, None, clock=no_time).run()
    stage = ProbeStage(profiler, SPACE, journal, guard(journal.run, None), BUDGET, clock=no_time)
    stage.run({"before": {"batch_size": 16}}, lambda r: None)
    assert len(profiler.probed) == few if few else len(profiler.probed) > 4
    assert profiler.probed[-1] == {"batch_size": 16}


class Late(FormulaProfiler):
    """A profiler after search.max_time."""

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
        """Returns no speed."""
        return Timed(outcome="cut", message="no answer for 5 s", wall_s=5.0)


def test_what_the_time_cut_is_probed_once_there_is_more(tmp_path: Path) -> None:
    before: dict[str, Scalar] = {"batch_size": 4, "micro_batch_size": 4}
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    for profiler in (Late(), FormulaProfiler()):
        stage = ProbeStage(profiler, SPACE, journal, MemoryGuard(None, {}, EVERY), BUDGET, clock=no_time)
        stage.run({"before": before}, lambda r: None)
    ended = [r for r in journal.run.probes if r.outcome == "ok"]
    assert ended[0].config == journal.run.probes[0].config
    assert [r.config for r in ended if r.name == "before"] == [before]


@pytest.mark.parametrize("cap_bytes", [None, 10**12])
def test_footprints_are_measured_once_per_memory_coupling(tmp_path: Path, cap_bytes: int | None) -> None:
    _, journal = run(tmp_path, cap_bytes)
    prints = journal.run.footprints
    own = [r for r in prints if not r.coupling.get("activation_checkpointing")]
    assert [len(r.measured) for r in own] == [2] * 2, "all fits by far: no third size"
    bounded = [r for r in prints if r.coupling.get("activation_checkpointing")]
    assert [(r.source, r.measured) for r in bounded] == [("bound", ())] * 2
    assert [r.points for r in bounded] == [r.points for r in own[:2]]
    assert {str(r.coupling) for r in prints} == {str(c) for c in memory_groups(SPACE)}


def test_checkpointing_is_measured_where_a_micro_batch_needs_it(tmp_path: Path) -> None:
    profiler = FormulaProfiler(400_000_000)
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    MemoryStage(profiler, SPACE, journal, 400_000_000, clock=no_time).run()
    with_it = [r for r in journal.run.footprints if r.coupling["activation_checkpointing"]]
    without = [r for r in journal.run.footprints if not r.coupling["activation_checkpointing"]]
    assert any(one.points[0] < other.points[0] for one in with_it for other in without)
    assert max(len(r.measured) for r in without) == 3, "and a third size near the limit"


def test_a_phase_for_the_encoder_is_a_coupling_of_its_own() -> None:
    space = Space.parse({"encoder_frac": [0.0, 0.25, 0.5], "hidden_size": [64, 128], "batch_size": 16}, EVERY)
    found = memory_groups(space)
    assert [c["encoder_frac"] for c in found] == [0.0, 0.0, 0.25, 0.25]
    assert key_of({"encoder_frac": 0.5, "hidden_size": 64}, EVERY) == key_of(found[2], EVERY) != key_of(found[0], EVERY)
    (fixed,) = memory_groups(Space.parse({"encoder_frac": 0.5, "batch_size": 16}, EVERY))
    assert fixed["encoder_frac"] == 0.5
    ranged = memory_groups(Space.parse({"encoder_frac": {"low": 0.0, "high": 0.5}, "batch_size": 16}, EVERY))
    assert sorted(float(c["encoder_frac"]) > 0 for c in ranged) == [False, True]


def test_smaller_batches_have_a_probe_with_the_system_knobs_of_the_best_however_short_the_time(tmp_path: Path) -> None:
    profiler = Clocked()
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    raw = {"batch_size": [16, 32, 64], "micro_batch_size": [64, 32, 16], "num_workers": [0, 1, 2], "amp_dtype": "fp32"}
    space = Space.parse({**SPACE.as_raw(), **raw}, EVERY)
    budget = ProbeSection(max_time_s=8.0, probe_time_s=1.0)
    stage = ProbeStage(profiler, space, journal, guard(History(), None), budget, clock=lambda: sum(profiler.asked))
    stage.run({}, lambda r: None)
    found = probed(journal.run.probes, EVERY)
    best = max(found, key=lambda p: p.samples_per_s)
    same = {(p.micro_batch_size, p.knobs["num_workers"]) for p in found}
    assert best.micro_batch_size == 64
    assert {(size, best.knobs["num_workers"]) for size in (16, 32)} <= same


class Clocked(FormulaProfiler):
    """A profiler whose probes take as long as they are allowed to, on a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
        """Returns the formula's speed."""
        self.asked.append(time_s)
        return super().probe(knobs, time_s, best_samples_per_s)


@pytest.mark.parametrize("groups", [1, 2, 12, 48])
def test_the_stage_keeps_to_its_time_however_many_groups_there_are(tmp_path: Path, groups: int) -> None:
    profiler = Clocked()
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    widths = [128, *range(200, 200 + groups - 1)]
    space = Space.parse({**SPACE.as_raw(), "amp_dtype": "fp32", "hidden_size": widths if groups > 1 else 128}, EVERY)
    budget = ProbeSection(max_time_s=24.0, probe_time_s=3.0)
    stage = ProbeStage(profiler, space, journal, guard(History(), None), budget, clock=lambda: sum(profiler.asked))
    stage.run({}, lambda r: None)
    assert sum(profiler.asked) <= 24.0 + 1.5
    assert len(set(profiler.asked)) == 1, "all probes are equally long"
    found = probed(journal.run.probes, EVERY)
    learned = guard(journal.run, None)
    for width in widths:
        choice = fastest(Speeds(found, EVERY), learned, {"hidden_size": width, "batch_size": 64})
        assert choice is not None, "what was not probed is judged by its nearest"
        assert choice.system["num_workers"] == 2


class Bare(FormulaProfiler):
    """A profiler whose batches of one micro-step hold no gradients, 10 MB."""

    def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> Footprint:
        """Returns the formula's, of both kinds of batches."""
        alone = tuple((m, self.peak_bytes({"batch_size": m, "micro_batch_size": m}, m)) for m in micro_batches)
        return replace(super().footprint({}, micro_batches), measured_alone=alone)

    def peak_bytes(self, knobs: Mapping[str, Scalar], micro_batch: int) -> int:
        """Returns the formula's, less the gradients where none are held."""
        held = dict(key_of(knobs, EVERY))[GRADIENTS_HELD]
        return super().peak_bytes(knobs, micro_batch) - (not held) * 10_000_000


def alone(
    tmp_path: Path, cap_bytes: int, profiler: FormulaProfiler, **space: Any
) -> tuple[Space, Journal, MemoryGuard]:
    """Probes a space of one coupling, in which a batch of one micro-step can have 32 samples."""
    raw = {"batch_size": [16, 32, 64], "micro_batch_size": [8, 32, 64], "amp_dtype": "fp32", "num_workers": 0, **space}
    own = Space.parse({**SPACE.as_raw(), "activation_checkpointing": False, **raw}, EVERY)
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    journal.append(StudyRecord, card={"cap_bytes": cap_bytes}, device={"type": "cpu"})
    MemoryStage(profiler, own, journal, cap_bytes, clock=no_time).run()
    learned = guard(journal.run, cap_bytes)
    ProbeStage(profiler, own, journal, learned, BUDGET, clock=no_time).run({}, lambda r: None)
    return own, journal, learned


def sizes(journal: Journal) -> list[tuple[Any, Any]]:
    return [(r.config["batch_size"], r.config["micro_batch_size"]) for r in journal.run.probes]


def test_what_fits_only_as_a_whole_batch_is_probed_and_trained_as_one(tmp_path: Path) -> None:
    cap_bytes = 415_000_000  # 32 samples take 420 MB beside gradients, 410 without
    space, journal, learned = alone(tmp_path, cap_bytes, Bare(cap_bytes))
    assert sorted(sizes(journal)) == [(32, 32), (64, 8)], "each once"
    assert all(r.outcome == "ok" for r in journal.run.probes)
    speeds = Speeds(probed(journal.run.probes, EVERY), EVERY)
    at = {b: fastest(speeds, learned, {**space.fixed, "batch_size": b}) for b in (16, 32, 64)}
    assert {b: found.system["micro_batch_size"] for b, found in at.items() if found} == {16: 16, 32: 32, 64: 8}


def test_what_serves_one_batch_size_is_not_what_a_sweep_goes_on_from(tmp_path: Path) -> None:
    cap_bytes = 415_000_000
    _, journal, _ = alone(tmp_path, cap_bytes, Bare(cap_bytes), num_workers=[0, 1, 2])
    found = {
        (p.knobs["batch_size"], p.knobs["micro_batch_size"], p.knobs["num_workers"])
        for p in probed(journal.run.probes, EVERY)
    }
    assert {(64, 8, n) for n in (0, 1, 2)} <= found, "all batch sizes run these"
    assert (32, 32, 2) in found, "and with the best of them it is probed again"


def test_after_an_oom_beside_gradients_it_is_probed_without_them(tmp_path: Path) -> None:
    class Optimist(Bare):
        """Measures no footprint that tells the need of 32 samples."""

        def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> Footprint:
            found = super().footprint(knobs, micro_batches)
            low = [tuple((m, b - 30_000_000 * (m > 8)) for m, b in p) for p in (found.measured, found.measured_alone)]
            return replace(found, measured=low[0], measured_alone=low[1])

    cap_bytes = 415_000_000
    _, journal, _ = alone(tmp_path, cap_bytes, Optimist(cap_bytes))
    outcomes = [r.outcome for r in journal.run.probes]
    assert list(zip(sizes(journal), outcomes, strict=True)) == [((64, 32), "oom"), ((32, 32), "ok"), ((64, 8), "ok")]


def test_a_sweep_goes_on_after_an_interrupt_and_probes_nothing_twice(tmp_path: Path) -> None:
    cap_bytes = 415_000_000
    space, journal, _ = alone(tmp_path, cap_bytes, Bare(cap_bytes), num_workers=[0, 1, 2])
    count = len(sizes(journal))
    learned = guard(journal.run, cap_bytes)
    ProbeStage(Bare(cap_bytes), space, journal, learned, BUDGET, clock=no_time).run({}, lambda r: None)
    assert len(sizes(journal)) == count


class Lucky(FormulaProfiler):
    """A profiler without attention, whose probes of another kernel of attention happen to be faster."""

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
        """Returns the formula's speed, and that no attention ran."""
        found = super().probe(knobs, time_s, best_samples_per_s)
        luck = 1.0 if knobs["sdpa_backend"] == "auto" else 0.8
        step_s, rate = luck * (found.micro_step_s or 0.0), (found.samples_per_s or 0.0) / luck
        return replace(found, micro_step_s=step_s, samples_per_s=rate, active={"device": "cpu", "attention": {}})


def test_a_sweep_does_not_go_on_from_what_its_step_did_not_show(tmp_path: Path) -> None:
    searched = {"sdpa_backend": ["auto", "math"], "num_workers": [0, 2]}
    space = Space.parse({"batch_size": 16, "micro_batch_size": 16, **searched}, EVERY)
    profiler, journal = Lucky(), Journal.open(tmp_path / "trials.jsonl", create=True)
    learned = guard(journal.run, None)
    ProbeStage(profiler, space, journal, learned, BUDGET, clock=no_time).run({}, lambda r: None)
    asked = [(k["sdpa_backend"], k["num_workers"]) for k in profiler.probed]
    assert asked[:3] == [("auto", 0), ("math", 0), ("auto", 2)]
    known = [p for p in probed(journal.run.probes, EVERY) if inside(space, p)]
    best = fastest(Speeds(known, EVERY), learned, {"batch_size": 16})
    assert best is not None
    assert (best.system["sdpa_backend"], best.system["num_workers"]) == ("auto", 2)


def test_the_first_probe_has_the_largest_micro_batch_that_fits(tmp_path: Path) -> None:
    for cap_bytes, size in ((10**12, 32), (330_000_000, 8)):
        (folder := tmp_path / str(size)).mkdir()
        _, journal, _ = alone(folder, cap_bytes, Bare(cap_bytes))
        assert sizes(journal)[0] == (64, size)


def test_a_knob_of_the_optimizer_step_is_judged_by_that_step_alone(tmp_path: Path) -> None:
    """Its micro-step came out slower by more than the fused step saves, as on a machine whose pace changes."""

    class Drifting(FormulaProfiler):
        def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
            micro_step_s, optimizer_step_s = (0.012, 0.001) if knobs["fused_optimizer"] else (0.010, 0.002)
            steps = {"micro_step_s": micro_step_s, "optimizer_step_s": optimizer_step_s}
            rate = 64 / (micro_step_s + optimizer_step_s)
            return replace(super().probe(knobs, time_s, best_samples_per_s), **steps, samples_per_s=rate)

    types, both = ["fp32", "bf16"], [False, True]
    space = Space.parse({"batch_size": 64, "micro_batch_size": 64, "fused_optimizer": both, "amp_dtype": types}, EVERY)
    journal = Journal.open(tmp_path / "trials.jsonl", create=True)
    profiler = Drifting()
    ProbeStage(profiler, space, journal, guard(History(), None), BUDGET, clock=no_time).run({}, lambda r: None)
    first, other = ([p for p in probed(journal.run.probes, EVERY) if p.knobs["amp_dtype"] == own] for own in types)
    assert [p.knobs["fused_optimizer"] for p in first] == [False, True]
    assert other[0].knobs["fused_optimizer"] is True, "another group starts with it"
    assert Speeds(first, EVERY).ranked(first[0].knobs)[0].system["fused_optimizer"] is True, "and trials have it"
