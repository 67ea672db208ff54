"""The estimate stage: measured or predicted once per coupling, within its time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
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
from tuning.memory.measure import MemoryStage
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


class CountingBench(FormulaProfiler):
    """Remembers what was measured."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[dict[str, Scalar], tuple[int, ...]]] = []

    def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> dict[str, Any]:
        """Returns the formula's."""
        self.asked.append((dict(knobs), tuple(micro_batches)))
        return super().footprint(knobs, micro_batches)


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


def test_a_coupling_is_measured_at_two_sizes_and_then_at_the_largest(journal: Journal) -> None:
    profiler = CountingBench()
    MemoryStage(profiler, SPACE, journal, 10**9).run()
    assert [sizes for _, sizes in profiler.asked] == [(2, 8), (2, 8), (64,), (64,)]
    assert all(knobs["dropout"] == 0.0 for knobs, _ in profiler.asked)  # the space's, not the knob's own default
    assert guard(journal.run, 10**9).predicted_bytes(FP32, 40) == pytest.approx(500 * MB, rel=0.02)


def test_what_the_line_says_is_too_large_is_not_measured(journal: Journal) -> None:
    profiler = CountingBench()
    MemoryStage(profiler, SPACE, journal, 400 * MB).run()  # 64 samples take 740 MB, 16 of them 260
    assert [sizes for _, sizes in profiler.asked[2:]] == [(16,), (16,)]
    learned = guard(journal.run, 400 * MB)
    assert [learned.judge(FP32, m).fits for m in (16, 64)] == [True, False]


def test_what_is_close_to_the_cap_is_measured_and_not_guessed(journal: Journal) -> None:
    profiler = CountingBench()
    journal.append(StudyRecord, card={"cap_bytes": 720 * MB}, device={"type": "cpu"})
    MemoryStage(profiler, SPACE, journal, 720 * MB).run()  # 64 samples take 740 MB: 3 % more than there are
    assert [sizes for _, sizes in profiler.asked[2:]] == [(64,), (64,)]
    learned = guard(journal.run, 720 * MB)
    assert learned.predicted_bytes(FP32, 64) == pytest.approx(740 * MB, rel=0.01)
    assert not learned.judge(FP32, 64).fits


def test_what_runs_out_of_memory_while_it_is_measured_is_known_not_to_fit(journal: Journal) -> None:
    class Card(CountingBench):
        def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> dict[str, Any]:
            found = super().footprint(knobs, micro_batches)
            fitting = itertools.takewhile(lambda pair: pair[1] <= 720 * MB, found["measured"])
            return {**found, "measured": list(fitting), "message": "no room"}

    journal.append(StudyRecord, card={"cap_bytes": None}, device={"type": "cuda"})
    profiler = Card()
    MemoryStage(profiler, SPACE, journal, 720 * MB).run()
    assert [sizes for _, sizes in profiler.asked[2:]] == [(64,), (32,)] * 2, "then the next smaller"
    learned = guard(journal.run, 720 * MB)
    assert [learned.judge(FP32, m).fits for m in (16, 64)] == [True, False]
    assert guard(journal.run, 10**9).judge(FP32, 64).fits, "it failed under less than this"


def test_on_a_plain_cpu_nothing_is_measured_that_may_not_fit(journal: Journal) -> None:
    profiler = CountingBench()
    journal.append(StudyRecord, card={"cap_bytes": None}, device={"type": "cpu"})
    MemoryStage(profiler, SPACE, journal, 720 * MB).run()
    assert [sizes for _, sizes in profiler.asked[2:]] == [(32,), (32,)]


def test_a_batch_of_one_micro_step_is_a_coupling_of_its_own() -> None:
    several, one = {"batch_size": 64, "micro_batch_size": 32}, {"batch_size": 32, "micro_batch_size": 32}
    assert key_of(several, EVERY) == key_of({}, EVERY) != key_of(one, EVERY)
    assert key_of({**one, "set_to_none": False}, EVERY) == key_of(several, EVERY), "zeros take the place of gradients"
    assert key_of({"batch_size": 16, "micro_batch_size": 32}, EVERY) == key_of(one, EVERY), (
        "a micro-step has no more than the batch"
    )
    for knobs in (several, one):
        assert key_of(dict(key_of(knobs, EVERY)), EVERY) == key_of(knobs, EVERY)


def test_when_its_time_is_up_it_says_so_and_leaves_the_rest_to_the_trials(journal: Journal) -> None:
    MemoryStage(CountingBench(), SPACE, journal, 10**9).run(limit_s=-1.0)
    assert [r.event for r in journal.records] == ["footprint", "note"]
    assert journal.records[-1]["text"].startswith("measured 1 of 2 memory groups")
    learned = guard(journal.run, 10**9)
    assert (
        learned.judge(key_of({"amp_dtype": "bf16", "dropout": 0.0}, EVERY), 64).reason
        == "nothing is known of this memory group"
    )


def test_a_prediction_is_corrected_by_one_measurement(journal: Journal) -> None:
    profiler = CountingBench()
    MemoryStage(profiler, SPACE, journal, 10**9).run(predict("traced", share=0.8))
    assert [sizes for _, sizes in profiler.asked] == [(2,), (2,)]
    record = journal.records[0]
    assert (record["source"], record["notes"], record["measured"]) == ("traced", ["why"], [[2, 120 * MB]])
    assert [p[:2] for p in record["points"]][:2] == [[1, 88 * MB], [2, 112 * MB]]
    learned = guard(journal.run, 10**9)
    assert learned.predicted_bytes(FP32, 2) == pytest.approx(120 * MB, rel=0.02)
    assert (learned.predicted_bytes(FP32, 16) or 0) > 0.8 * (80 + 480) * MB


def test_what_cannot_be_traced_is_measured(journal: Journal) -> None:
    profiler = CountingBench()
    MemoryStage(profiler, SPACE, journal, 10**9).run(predict("none"))
    assert {r["source"] for r in journal.records} == {"measured"}
    assert len(profiler.asked) == 4


def test_on_a_cuda_device_a_card_must_hold_more_than_the_peak(journal: Journal) -> None:
    MemoryStage(CountingBench(), SPACE, journal, 10**9, cuda=True).run()
    assert journal.records[0]["points"] == [[2, 120 * MB, 132 * MB], [8, 180 * MB, 198 * MB]]


def test_where_not_even_the_smallest_fits_nothing_does(journal: Journal) -> None:
    class Full(CountingBench):
        def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> dict[str, Any]:
            return {**super().footprint(knobs, micro_batches), "measured": [], "message": "no room"}

    MemoryStage(Full(), SPACE, journal, 10**9).run()
    learned = guard(journal.run, 10**9)
    assert not learned.judge(FP32, 1).fits


def test_where_only_one_sample_fits_that_is_measured_and_not_guessed(journal: Journal) -> None:
    class Small(CountingBench):
        def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> dict[str, Any]:
            found = super().footprint(knobs, micro_batches)
            fitting = itertools.takewhile(lambda pair: pair[1] <= 115 * MB, found["measured"])
            return {**found, "measured": list(fitting)}

    profiler = Small()
    MemoryStage(profiler, SPACE, journal, 115 * MB).run()  # 110 MB at one sample, 120 at two
    learned = guard(journal.run, 115 * MB)
    assert [sizes for _, sizes in profiler.asked[:2]] == [(2, 8), (1,)]
    assert learned.predicted_bytes(FP32, 1) == pytest.approx(110 * MB, rel=0.02)
    assert not learned.judge(FP32, 2).fits


@pytest.mark.parametrize(
    ("outcome", "fitting", "hangs_at"),
    [("timeout", (2, 8), (64,)), ("timeout", (), (2, 8)), ("timeout", (), (1,)), ("cut", (), (2, 8))],
)
def test_a_footprint_that_hung_or_had_no_time_says_nothing_of_the_memory(
    journal: Journal, outcome: str, fitting: tuple[int, ...], hangs_at: tuple[int, ...]
) -> None:
    class Slow(CountingBench):
        def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> dict[str, Any]:
            found = {**super().footprint(knobs, micro_batches), "message": "no room"}
            if tuple(micro_batches) == hangs_at:
                return {**found, "outcome": outcome, "measured": []}
            return {**found, "measured": [pair for pair in found["measured"] if pair[0] in fitting]}

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
