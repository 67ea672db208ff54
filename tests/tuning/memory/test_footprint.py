"""The footprint's line: exact where memory is linear, never below what was measured."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.memory.footprint import Footprint

MB = 10**6
sizes = st.tuples(*[st.integers(0, 10**10)] * 3)
measurements = st.lists(st.tuples(st.integers(1, 512), st.integers(0, 10**11)), min_size=1, max_size=6)


def test_the_parts_add_up() -> None:
    assert Footprint(400, 30, 60, 10, 7).peak_bytes(3) == 521


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 10**10), st.integers(0, 10**9), st.sets(st.integers(1, 256), min_size=2, max_size=5))
def test_a_line_is_found_again(parts: tuple[int, int, int], fixed: int, slope: int, batches: set[int]) -> None:
    true = Footprint(*parts, fixed, slope)
    assert Footprint.from_measured(*parts, [(m, true.peak_bytes(m)) for m in batches]) == true


@settings(max_examples=100, deadline=None)
@given(sizes, measurements)
def test_never_below_a_measurement_and_never_falling(
    parts: tuple[int, int, int], measured: list[tuple[int, int]]
) -> None:
    found = Footprint.from_measured(*parts, measured)
    assert all(found.peak_bytes(m) >= b for m, b in measured)
    peaks = [found.peak_bytes(m) for m in range(1, 20)]
    assert peaks == sorted(peaks)


def test_one_size_leaves_what_is_unexplained_to_the_samples() -> None:
    found = Footprint.from_measured(60 * MB, 10 * MB, 20 * MB, [(2, 100 * MB), (2, 110 * MB)])
    assert (found.fixed_bytes, found.bytes_per_sample) == (0, 10 * MB)
    assert found.peak_bytes(2) == 110 * MB


def test_a_peak_below_the_sizes_makes_fixed_negative() -> None:
    found = Footprint.from_measured(60, 10, 20, [(2, 70), (4, 80)])
    assert (found.fixed_bytes, found.bytes_per_sample) == (-30, 5)


@pytest.mark.parametrize("measured", [[], [(0, 5)], [(1, -5)]])
def test_measurements_are_checked(measured: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"micro-batch >= 1 and peak bytes >= 0, at least one, got \["):
        Footprint.from_measured(1, 1, 1, measured)
