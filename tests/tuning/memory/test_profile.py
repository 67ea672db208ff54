"""The footprint's points: never below what was measured, never falling, and a line beyond the last."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.journal.events import FootprintRecord
from tuning.journal.format import Record
from tuning.memory.groups import profile_of
from tuning.memory.profile import MemoryProfile, Point
from tuning.memory.trace import Peak

MB = 10**6
FLOOR_BYTES = 80 * MB
floors = st.integers(0, 2 * 10**10)
measurements = st.lists(st.tuples(st.integers(1, 512), st.integers(0, 10**11)), min_size=1, max_size=6)


@settings(max_examples=60)
@given(st.integers(0, 10**10), st.integers(0, 10**9), st.sets(st.integers(1, 256), min_size=2, max_size=5))
def test_a_line_is_found_again_everywhere(fixed: int, slope: int, batches: set[int]) -> None:
    found = MemoryProfile.from_measured(0, [(m, fixed + slope * m) for m in batches])
    for m in (1, min(batches), min(batches) + 1, max(batches) * 4):
        assert found.peak(m) == pytest.approx(fixed + slope * m)


@settings(max_examples=200)
@given(
    st.integers(0, 10**10),
    st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**9)), min_size=1, max_size=4),
    st.sampled_from([(2, 4, 8), (2, 8), (8, 64), (5, 6, 7)]),
)
def test_below_the_first_point_a_convex_peak_is_nearly_found(
    floor: int, over: list[tuple[int, int]], batches: tuple[int, ...]
) -> None:
    def peak(m: int) -> int:
        return floor + max(fixed + slope * m for fixed, slope in over)

    found = MemoryProfile.from_measured(floor, [(m, peak(m)) for m in batches])
    first, slope = batches[0], (peak(batches[1]) - peak(batches[0])) / (batches[1] - batches[0])
    tiny = 1e-9 * peak(first)
    for m in range(1, first):
        said, chord = found.peak(m), floor + (peak(first) - floor) * m / first
        assert max(floor, chord) - tiny <= said <= max(chord, peak(m)) + tiny  # no more than it was, or than is needed
        assert peak(m) - said <= slope * (first - m) + tiny


@settings(max_examples=200)
@given(floors, st.lists(st.tuples(st.integers(2, 40), *[st.integers(0, 10**11)] * 2), min_size=1, max_size=4))
def test_below_the_first_point_it_rises_from_the_floor(floor_bytes: int, points: list[tuple[int, int, int]]) -> None:
    found = MemoryProfile(floor_bytes, tuple(Point(*p) for p in points))
    first = found.points[0]
    for at, value in ((found.peak, first.peak_bytes), (found.capacity, first.capacity_bytes)):
        said = [at(m) for m in range(1, first.micro_batch + 1)]
        tiny = 1e-9 * value
        assert said[-1] == value
        assert all(min(found.floor_bytes, value) - tiny <= p <= value + tiny for p in said)
        assert all(a <= b + tiny for a, b in itertools.pairwise(said))
    for m in range(1, first.micro_batch):
        assert found.capacity(m) >= found.peak(m) - 1e-9 * first.capacity_bytes


def test_the_smallest_micro_batch_needs_what_every_step_needs() -> None:
    pool = [(2, 35_468_640), (8, 46_775_648), (64, 152_517_984)]  # signals, fp32, hidden 64, an encoder's phase
    found = MemoryProfile.from_measured(993_144, pool)
    assert found.peak(1) / 2**20 == pytest.approx(32.0, abs=0.05)


@settings(max_examples=60)
@given(floors, measurements, st.floats(1.0, 1.5))
def test_never_below_a_measurement_or_falling(floor_bytes: int, measured: list[tuple[int, int]], spare: float) -> None:
    found = MemoryProfile.from_measured(floor_bytes, measured, spare)
    assert all(found.capacity(m) >= b for m, b in measured)
    peaks = [found.capacity(m) for m in range(1, 20)]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(peaks))


def test_one_size_leaves_what_is_unexplained_to_the_samples() -> None:
    found = MemoryProfile.from_measured(FLOOR_BYTES, [(2, 100 * MB), (2, 110 * MB)])
    assert [found.floor_bytes, *map(found.capacity, (1, 2, 3))] == [80 * MB, 95 * MB, 110 * MB, 125 * MB]


def test_a_predicted_card_holds_capacity_a_cpu_live_bytes() -> None:
    held = {"parameter": 60, "optimizer": 20}
    peaks = [Peak(m, 100 * m, 110 * m, 130 * m, 120 * m, held, "backward", "mm", 80 * m) for m in (1, 2)]
    card, cpu = (MemoryProfile.from_peaks(peaks, "traced", cuda=cuda) for cuda in (True, False))
    assert (card.peak(2), card.capacity(2), card.floor_bytes) == (220, 240, 80)
    assert (cpu.peak(2), cpu.capacity(2)) == (200, 200)
    alone, live = (MemoryProfile.from_peaks(peaks, "traced", cuda=cuda, alone=True) for cuda in (True, False))
    assert (alone.peak(2), alone.capacity(2), live.peak(2)) == (176, 192, 160)


@settings(max_examples=40)
@given(floors, measurements)
def test_it_survives_the_journal(floor_bytes: int, measured: list[tuple[int, int]]) -> None:
    found = MemoryProfile.from_measured(floor_bytes, measured, 1.1)
    record = FootprintRecord.read(Record(0, "", "footprint", found.as_raw()))
    assert profile_of(record) == found
