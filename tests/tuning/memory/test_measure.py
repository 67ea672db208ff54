"""The estimate stage: measured or predicted once per coupling, within its time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import FormulaProfiler
from trainables.knobs import Scalar
from trainables.our_knobs import EVERY
from tuning.config.space import Space
from tuning.journal.events import StudyRecord
from tuning.journal.records import Journal
from tuning.memory.groups import guard, key_of, memory_groups, micro_batches
from tuning.memory.measure import Footprint, MemoryStage
from tuning.memory.prediction import Prediction
from tuning.memory.trace import Trace

MB = 10**6
SPACE = Space.parse(
    {
        "micro_batch_size": [4, 16, 64],
        "amp_dtype": ["fp32", "bf16"],
        "dropout": 0.0,
        "learning_rate": {"low": 1e-3, "high": 1e-1, "log": True},
    },
    EVERY,
)
FP32 = key_of({"amp_dtype": "fp32", "dropout": 0.0}, EVERY)


class Bench(FormulaProfiler):
    """Remembers the sizes that were measured of each group; above `room_mb` it runs out of memory."""

    def __init__(self, room_mb: float = math.inf) -> None:
        super().__init__()
        self.room_mb = room_mb
        self.asked: list[tuple[int, ...]] = []
        self.dropouts: set[Scalar] = set()

    def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> Footprint:
        self.asked.append(tuple(micro_batches))
        self.dropouts.add(knobs["dropout"])
        found = super().footprint(knobs, micro_batches)
        fitting = itertools.takewhile(lambda pair: pair[1] <= self.room_mb * MB, found.measured)
        return replace(found, measured=tuple(fitting), message="no room")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal.open(tmp_path / "trials.jsonl", create=True)


def predicted(micro_batch: int, share: float = 1.0) -> Trace:
    """Returns a step of 60 + 20 MB and 30 MB at a sample, each times `share`."""
    sizes = [round(share * MB * size) for size in (60, 20, 30 * micro_batch)]
    events = [*enumerate(sizes), (2, -1)]
    kinds = {0: "parameter", 1: "optimizer", 2: "activation"}
    return Trace(micro_batch, tuple(events), kinds, ((0, "setup"), (2, "forward")), ("empty", "empty", "mm"))


def predict(confidence: Any, share: float = 1.0) -> Any:
    traces = () if confidence == "none" else (predicted(2, share), predicted(3, share))
    return lambda configurations: [Prediction(confidence, ("why",), traces) for _ in configurations]


@pytest.mark.parametrize(
    ("cap_mb", "room_mb", "device", "asked", "fits", "needs_mb"),
    [
        (1000, math.inf, "", [(64,)] * 2, {64: True}, {40: 500}),
        (400, math.inf, "", [(16,)] * 2, {16: True, 64: False}, {}),
        (720, math.inf, "card", [(64,)] * 2, {64: False}, {64: 740}),
        (720, 720, "cuda", [(64,), (32,)] * 2, {16: True, 64: False}, {}),
        (720, math.inf, "cpu", [(32,)] * 2, {32: True}, {}),
        (115, 115, "", [(1,)] * 2, {1: True, 2: False}, {1: 110}),
        (1000, 0, "", [(1,)] * 2, {1: False}, {}),
    ],
    ids=["the largest", "as the line says", "near the cap", "it ran out", "a CPU takes no risk", "one sample", "none"],
)
def test_a_group_is_measured_at_2_and_8_samples_and_then(
    journal: Journal, cap_mb: int, room_mb: float, device: str, asked: Any, fits: Any, needs_mb: dict[int, int]
) -> None:
    """By the formula n samples take 100 + 10 n MB. "card": a virtual one, on a CPU."""
    if device:
        cap_bytes = cap_mb * MB if device == "card" else None
        journal.append(StudyRecord, card={"cap_bytes": cap_bytes}, device={"type": device.replace("card", "cpu")})
    profiler = Bench(room_mb)
    MemoryStage(profiler, SPACE, journal, cap_mb * MB).run()
    assert sorted(profiler.asked) == sorted([(2, 8), (2, 8), *asked])
    assert profiler.dropouts == {0.0}, "the space's, not the knob's own default"
    learned = guard(journal.run, cap_mb * MB)
    assert {m: learned.judge(FP32, m).fits for m in fits} == fits
    for micro_batch, need_mb in needs_mb.items():
        assert learned.predicted_bytes(FP32, micro_batch) == pytest.approx(need_mb * MB, rel=0.02)
    if device == "cuda":
        assert guard(journal.run, 10**9).judge(FP32, 64).fits, "it failed under less than this"


def test_a_batch_of_one_micro_step_is_a_coupling_of_its_own() -> None:
    several, one = {"batch_size": 64, "micro_batch_size": 32}, {"batch_size": 32, "micro_batch_size": 32}
    assert key_of(several, EVERY) == key_of({}, EVERY) != key_of(one, EVERY)
    assert key_of({**one, "set_to_none": False}, EVERY) == key_of(several, EVERY), "zeros take the place of gradients"
    assert key_of({"batch_size": 16, "micro_batch_size": 32}, EVERY) == key_of(one, EVERY), (
        "a micro-step has no more than the batch"
    )
    for knobs in (several, one):
        assert key_of(dict(key_of(knobs, EVERY)), EVERY) == key_of(knobs, EVERY)


def test_when_its_time_is_up_the_rest_is_left_to_the_trials(journal: Journal) -> None:
    MemoryStage(Bench(), SPACE, journal, 10**9).run(limit_s=-1.0)
    assert [r.event for r in journal.records] == ["footprint", "note"]
    assert "1 of 2 memory groups" in journal.records[-1]["text"]
    bf16 = key_of({"amp_dtype": "bf16", "dropout": 0.0}, EVERY)
    assert guard(journal.run, 10**9).predicted_bytes(bf16, 64) is None


def test_a_prediction_is_corrected_by_one_measurement(journal: Journal) -> None:
    profiler = Bench()
    MemoryStage(profiler, SPACE, journal, 10**9).run(predict("traced", share=0.8))
    assert profiler.asked == [(2,), (2,)]
    record = journal.records[0]
    assert (record["source"], record["notes"], record["measured"]) == ("traced", ["why"], [[2, 120 * MB]])
    assert [p[:2] for p in record["points"]][:2] == [[1, 88 * MB], [2, 112 * MB]]
    learned = guard(journal.run, 10**9)
    assert learned.predicted_bytes(FP32, 2) == pytest.approx(120 * MB, rel=0.02)
    assert (learned.predicted_bytes(FP32, 16) or 0) > 0.8 * (80 + 480) * MB


def test_what_cannot_be_traced_is_measured(journal: Journal) -> None:
    profiler = Bench()
    MemoryStage(profiler, SPACE, journal, 10**9).run(predict("none"))
    assert {r["source"] for r in journal.records} == {"measured"}
    assert len(profiler.asked) == 4


def test_on_a_cuda_device_a_card_must_hold_more_than_the_peak(journal: Journal) -> None:
    MemoryStage(Bench(), SPACE, journal, 10**9, cuda=True).run()
    assert journal.records[0]["points"] == [[2, 120 * MB, 132 * MB], [8, 180 * MB, 198 * MB]]


@pytest.mark.parametrize(
    ("outcome", "fitting", "hangs_at"),
    [("timeout", (2, 8), (64,)), ("timeout", (), (2, 8)), ("timeout", (), (1,)), ("cut", (), (2, 8))],
)
def test_a_footprint_that_hung_says_nothing_of_the_memory(
    journal: Journal, outcome: str, fitting: tuple[int, ...], hangs_at: tuple[int, ...]
) -> None:
    class Slow(Bench):
        def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> Footprint:
            found = replace(super().footprint(knobs, micro_batches), message="no room")
            if tuple(micro_batches) == hangs_at:
                return replace(found, outcome=outcome, measured=())
            return replace(found, measured=tuple(pair for pair in found.measured if pair[0] in fitting))

    journal.append(StudyRecord, card={"cap_bytes": None}, device={"type": "cuda"})
    profiler = Slow()
    MemoryStage(profiler, SPACE, journal, 10**9, clock=lambda: 0.0).run()
    assert len(profiler.asked) == 2 * (1 + (hangs_at != (2, 8))), "asked once of each group"
    learned = guard(journal.run, 10**9)
    assert learned.judge(FP32, 64).fits
    assert [r.measured for r in journal.run.footprints] == [((2, 120 * MB), (8, 180 * MB))] * (2 if fitting else 0)


def test_of_a_range_its_ends_and_middle_are_measured() -> None:
    space = Space.parse({**SPACE.as_raw(), "hidden_size": {"low": 64, "high": 256}}, EVERY)
    assert sorted({c["hidden_size"] for c in memory_groups(space)}) == [64, 128, 256]


@pytest.mark.parametrize(
    ("given", "expected"),
    [([4, 12], [1, 2, 3, 4, 6, 12]), (8, [1, 2, 4, 8]), ({"low": 2, "high": 9}, [1, 2, 4, 9])],
)
def test_sizes_are_those_a_trial_can_come_to(given: Any, expected: list[int]) -> None:
    raw = {"micro_batch_size": given, "amp_dtype": ["fp32", "bf16"]}
    assert micro_batches(Space.parse(raw, EVERY)) == expected
