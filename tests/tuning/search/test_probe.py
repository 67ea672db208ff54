"""The probe stage on a profiler whose right answer is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FormulaProfiler, no_time
from trainables.knobs import Scalar
from trainables.our_knobs import EVERY
from tuning.config.schema import ProbeSection
from tuning.config.space import Choice, Space
from tuning.journal.events import StudyRecord, Timed
from tuning.journal.records import Journal
from tuning.memory.groups import guard, key_of, memory_groups
from tuning.memory.guard import GRADIENTS_HELD, MemoryGuard
from tuning.memory.measure import Footprint, MemoryStage
from tuning.search.probe import ProbeStage
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


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty journal."""
    return Journal.open(tmp_path / "trials.jsonl", create=True)


def probe(
    journal: Journal,
    profiler: FormulaProfiler,
    space: Space = SPACE,
    budget: ProbeSection = BUDGET,
    clock: Callable[[], float] = no_time,
    **named: dict[str, Scalar],
) -> MemoryGuard:
    """Probes a space and what is named, and returns what is known of memory by now."""
    learned = guard(journal.run, profiler.cap_bytes)
    ProbeStage(profiler, space, journal, learned, budget, clock=clock).run(named, lambda record: None)
    return learned


def run(journal: Journal, cap_bytes: int | None = None) -> FormulaProfiler:
    """Returns the profiler that has measured memory and speed."""
    profiler = FormulaProfiler(cap_bytes)
    MemoryStage(profiler, SPACE, journal, cap_bytes, clock=no_time).run()
    probe(journal, profiler)
    return profiler


def test_finds_the_fastest_of_each_group_and_its_neighbours(journal: Journal) -> None:
    profiler = run(journal)
    asked = [tuple(sorted(k.items(), key=str)) for k in profiler.probed]
    assert len(asked) == len(set(asked)) < 2 * 3 * 2 * 2, "nothing twice"
    system = {n: p.values for n, p in SPACE.subset({"system"}).parameters.items() if isinstance(p, Choice)}
    for dtype in ("fp32", "bf16"):
        mine = [p for p in probed(journal.run.probes, EVERY) if p.knobs["amp_dtype"] == dtype]
        best = max(mine, key=lambda p: p.samples_per_s).knobs
        assert (best["micro_batch_size"], best["num_workers"]) == (64, 2)
        assert best["activation_checkpointing"] is False
        for name, values in system.items():
            assert all({**best, name: value} in [p.knobs for p in mine] for value in values)


def test_what_cannot_fit_is_refused_and_never_probed(journal: Journal) -> None:
    profiler = run(journal, cap_bytes=400_000_000)
    assert {r.outcome for r in journal.run.probes} == {"ok"}
    assert {r.config["micro_batch_size"] for r in journal.run.refused} == {64}
    assert not any(k["micro_batch_size"] == 64 and not k["activation_checkpointing"] for k in profiler.probed)


class Clocked(FormulaProfiler):
    """A profiler whose probes take as long as they are allowed to, on a clock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def now(self) -> float:
        """Returns the seconds that have passed."""
        return sum(self.asked)

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
        """Returns the formula's speed."""
        self.asked.append(time_s)
        return super().probe(knobs, time_s, best_samples_per_s)


@pytest.mark.parametrize(("max_time_s", "is_whole"), [(11.3, True), (3.5, False)])
def test_probes_are_so_short_that_each_value_has_one(journal: Journal, max_time_s: float, is_whole: bool) -> None:
    space = Space.parse(
        {"batch_size": 64, "micro_batch_size": 64, "num_workers": [0, 1, 2], "channels_last": [False, True]}, EVERY
    )
    profiler, budget = Clocked(), ProbeSection(max_time_s=max_time_s, probe_time_s=3.0)
    probe(journal, profiler, space, budget, profiler.now, before={"batch_size": 64, "num_workers": 0})
    assert ({p.config.get("channels_last") for p in journal.run.probes} >= {False, True}) is is_whole
    assert journal.run.probes[-1].name == "before"
    assert profiler.now() <= max_time_s


class Broken(FormulaProfiler):
    """A profiler of which all probes but the first `works` end otherwise."""

    def __init__(self, works: int, outcome: str, message: str = "") -> None:
        super().__init__()
        self.works, self.found = works, Timed(outcome=outcome, message=message)

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
        """Returns a crash, or the formula's speed."""
        found = super().probe(knobs, time_s, best_samples_per_s)
        return found if len(self.probed) <= self.works else self.found


@pytest.mark.parametrize(
    ("works", "message", "few"),
    [(0, "it broke", 4), (0, "LoopError: so", 2), (1, "it broke", 0), (1, "NotIndependent: so", 2)],
)
def test_first_probes_that_crash_end_all_but_those_named(journal: Journal, works: int, message: str, few: int) -> None:
    """Three do, or one that says that `run` is used wrongly; none is timed if trainings depend on each other."""
    profiler = Broken(works, "crash", message)
    probe(journal, profiler, before={"batch_size": 16})
    assert len(profiler.probed) == few if few else len(profiler.probed) > 4
    assert (profiler.probed[-1] == {"batch_size": 16}) == (not message.startswith("NotIndependent"))


def test_what_the_time_cut_is_probed_once_there_is_more(journal: Journal) -> None:
    before: dict[str, Scalar] = {"batch_size": 4, "micro_batch_size": 4}
    for profiler in (Broken(0, "cut"), FormulaProfiler()):
        probe(journal, profiler, before=before)
    ended = [r for r in journal.run.probes if r.outcome == "ok"]
    assert ended[0].config == journal.run.probes[0].config
    assert [r.config for r in ended if r.name == "before"] == [before]


@pytest.mark.parametrize("cap_bytes", [None, 10**12])
def test_footprints_are_measured_once_per_memory_group(journal: Journal, cap_bytes: int | None) -> None:
    run(journal, cap_bytes)
    prints = journal.run.footprints
    own = [r for r in prints if not r.coupling.get("activation_checkpointing")]
    assert [len(r.measured) for r in own] == [2] * 2, "all fits by far: no third size"
    bounded = [r for r in prints if r.coupling.get("activation_checkpointing")]
    assert [(r.source, r.measured) for r in bounded] == [("bound", ())] * 2
    assert [r.points for r in bounded] == [r.points for r in own[:2]]
    assert {str(r.coupling) for r in prints} == {str(c) for c in memory_groups(SPACE)}


def test_checkpointing_is_measured_if_a_micro_batch_needs_it(journal: Journal) -> None:
    run(journal, 400_000_000)
    with_it, without = (
        [r for r in journal.run.footprints if r.coupling["activation_checkpointing"] is own] for own in (True, False)
    )
    assert any(one.points[0] < other.points[0] for one in with_it for other in without)
    assert max(len(r.measured) for r in without) == 3, "and a third size near the limit"


def test_phase_for_the_encoder_is_a_memory_group() -> None:
    space = Space.parse({"encoder_frac": [0.0, 0.25, 0.5], "hidden_size": [64, 128], "batch_size": 16}, EVERY)
    found = memory_groups(space)
    assert [c["encoder_frac"] for c in found] == [0.0, 0.0, 0.25, 0.25]
    assert key_of({"encoder_frac": 0.5, "hidden_size": 64}, EVERY) == key_of(found[2], EVERY) != key_of(found[0], EVERY)
    (fixed,) = memory_groups(Space.parse({"encoder_frac": 0.5, "batch_size": 16}, EVERY))
    assert fixed["encoder_frac"] == 0.5
    ranged = memory_groups(Space.parse({"encoder_frac": {"low": 0.0, "high": 0.5}, "batch_size": 16}, EVERY))
    assert sorted(float(c["encoder_frac"]) > 0 for c in ranged) == [False, True]


def test_smaller_batches_are_probed_however_short_the_time(journal: Journal) -> None:
    raw = {"batch_size": [16, 32, 64], "micro_batch_size": [64, 32, 16], "num_workers": [0, 1, 2], "amp_dtype": "fp32"}
    profiler, budget = Clocked(), ProbeSection(max_time_s=8.0, probe_time_s=1.0)
    probe(journal, profiler, Space.parse({**SPACE.as_raw(), **raw}, EVERY), budget, profiler.now)
    found = probed(journal.run.probes, EVERY)
    best = max(found, key=lambda p: p.samples_per_s)
    same = {(p.micro_batch_size, p.knobs["num_workers"]) for p in found}
    assert best.micro_batch_size == 64
    assert {(size, best.knobs["num_workers"]) for size in (16, 32)} <= same


@pytest.mark.parametrize("groups", [1, 2, 12, 48])
def test_stage_keeps_to_its_time_with_any_number_of_groups(journal: Journal, groups: int) -> None:
    widths = [128, *range(200, 200 + groups - 1)]
    space = Space.parse({**SPACE.as_raw(), "amp_dtype": "fp32", "hidden_size": widths if groups > 1 else 128}, EVERY)
    profiler, budget = Clocked(), ProbeSection(max_time_s=24.0, probe_time_s=3.0)
    learned = probe(journal, profiler, space, budget, profiler.now)
    assert profiler.now() <= 24.0 + 1.5
    assert len(set(profiler.asked)) == 1, "all probes are equally long"
    speeds = Speeds(probed(journal.run.probes, EVERY), EVERY)
    for width in widths:
        choice = fastest(speeds, learned, {"hidden_size": width, "batch_size": 64})
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


CAP_BYTES = 415_000_000  # 32 samples take 420 MB beside gradients, 410 without


def alone(journal: Journal, profiler: FormulaProfiler, **space: Any) -> tuple[Space, MemoryGuard]:
    """Probes a space of one memory group, in which a batch of one micro-step can have 32 samples."""
    raw = {"batch_size": [16, 32, 64], "micro_batch_size": [8, 32, 64], "amp_dtype": "fp32", "num_workers": 0, **space}
    own = Space.parse({**SPACE.as_raw(), "activation_checkpointing": False, **raw}, EVERY)
    journal.append(StudyRecord, card={"cap_bytes": profiler.cap_bytes}, device={"type": "cpu"})
    MemoryStage(profiler, own, journal, profiler.cap_bytes, clock=no_time).run()
    return own, probe(journal, profiler, own)


def sizes(journal: Journal) -> list[tuple[Any, Any]]:
    return [(r.config["batch_size"], r.config["micro_batch_size"]) for r in journal.run.probes]


def test_what_fits_only_as_a_whole_batch_is_probed_as_one(journal: Journal) -> None:
    space, learned = alone(journal, Bare(CAP_BYTES))
    assert sorted(sizes(journal)) == [(32, 32), (64, 8)], "each once"
    assert all(r.outcome == "ok" for r in journal.run.probes)
    speeds = Speeds(probed(journal.run.probes, EVERY), EVERY)
    at = {b: fastest(speeds, learned, {**space.fixed, "batch_size": b}) for b in (16, 32, 64)}
    assert {b: found.system["micro_batch_size"] for b, found in at.items() if found} == {16: 16, 32: 32, 64: 8}


def test_sweep_goes_on_from_what_serves_all_batch_sizes(journal: Journal) -> None:
    alone(journal, Bare(CAP_BYTES), num_workers=[0, 1, 2])
    found = {
        (p.knobs["batch_size"], p.knobs["micro_batch_size"], p.knobs["num_workers"])
        for p in probed(journal.run.probes, EVERY)
    }
    assert {(64, 8, n) for n in (0, 1, 2)} <= found, "all batch sizes run these"
    assert (32, 32, 2) in found, "and with the best of them it is probed again"


def test_after_an_oom_beside_gradients_comes_one_without(journal: Journal) -> None:
    class Optimist(Bare):
        """Measures no footprint that tells the need of 32 samples."""

        def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> Footprint:
            found = super().footprint(knobs, micro_batches)
            low = [tuple((m, b - 30_000_000 * (m > 8)) for m, b in p) for p in (found.measured, found.measured_alone)]
            return replace(found, measured=low[0], measured_alone=low[1])

    alone(journal, Optimist(CAP_BYTES))
    outcomes = [r.outcome for r in journal.run.probes]
    assert list(zip(sizes(journal), outcomes, strict=True)) == [((64, 32), "oom"), ((32, 32), "ok"), ((64, 8), "ok")]


class Lucky(FormulaProfiler):
    """A profiler without attention, whose probes of another kernel of attention happen to be faster."""

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
        """Returns the formula's speed, and that no attention ran."""
        found = super().probe(knobs, time_s, best_samples_per_s)
        luck = 1.0 if knobs["sdpa_backend"] == "auto" else 0.8
        step_s, rate = luck * (found.micro_step_s or 0.0), (found.samples_per_s or 0.0) / luck
        return replace(found, micro_step_s=step_s, samples_per_s=rate, active={"device": "cpu", "attention": {}})


def test_sweep_goes_on_from_nothing_that_no_step_showed(journal: Journal) -> None:
    searched = {"sdpa_backend": ["auto", "math"], "num_workers": [0, 2]}
    space = Space.parse({"batch_size": 16, "micro_batch_size": 16, **searched}, EVERY)
    profiler = Lucky()
    learned = probe(journal, profiler, space)
    asked = [(k["sdpa_backend"], k["num_workers"]) for k in profiler.probed]
    assert asked[:3] == [("auto", 0), ("math", 0), ("auto", 2)]
    known = [p for p in probed(journal.run.probes, EVERY) if inside(space, p)]
    best = fastest(Speeds(known, EVERY), learned, {"batch_size": 16})
    assert (best.system["sdpa_backend"], best.system["num_workers"]) == ("auto", 2)


@pytest.mark.parametrize(("cap_bytes", "size"), [(10**12, 32), (330_000_000, 8)])
def test_first_probe_has_the_largest_micro_batch_that_fits(journal: Journal, cap_bytes: int, size: int) -> None:
    alone(journal, Bare(cap_bytes))
    assert sizes(journal)[0] == (64, size)


def test_knob_of_the_optimizer_step_is_judged_by_that_alone(journal: Journal) -> None:
    """Its micro-step came out slower by more than the fused step saves, as on a machine whose pace changes."""

    class Drifting(FormulaProfiler):
        def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
            micro_step_s, optimizer_step_s = (0.012, 0.001) if knobs["fused_optimizer"] else (0.010, 0.002)
            steps = {"micro_step_s": micro_step_s, "optimizer_step_s": optimizer_step_s}
            rate = 64 / (micro_step_s + optimizer_step_s)
            return replace(super().probe(knobs, time_s, best_samples_per_s), **steps, samples_per_s=rate)

    types, both = ["fp32", "bf16"], [False, True]
    space = Space.parse({"batch_size": 64, "micro_batch_size": 64, "fused_optimizer": both, "amp_dtype": types}, EVERY)
    probe(journal, Drifting(), space)
    first, other = ([p for p in probed(journal.run.probes, EVERY) if p.knobs["amp_dtype"] == own] for own in types)
    assert [p.knobs["fused_optimizer"] for p in first] == [False, True]
    assert other[0].knobs["fused_optimizer"] is True, "another group starts with it"
    assert Speeds(first, EVERY).ranked(first[0].knobs)[0].system["fused_optimizer"] is True, "and trials have it"
