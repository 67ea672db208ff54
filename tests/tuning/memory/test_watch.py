"""Memory over time: a sound loop is never stopped, a leak is before it dies, thrashing is at once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuning.memory.oom import GROWING, THRASHING
from tuning.memory.watch import LEFT_BYTES, Reading, alarm, left_behind

CAP = 1000 * 2**20
MIB = 2**20


def leak(start: int, growth: int, windows: int) -> list[Reading]:
    """Returns windows that each end with `growth` MiB more, below a peak of twice the start."""
    return [Reading((start + n * growth) * MIB, (2 * start + n * growth) * MIB) for n in range(windows)]


def test_a_leak_is_stopped_two_windows_before_it_would_pass_the_cap() -> None:
    stopped = next(n for n in range(1, 200) if alarm(leak(100, 10, n), CAP))
    last = leak(100, 10, stopped)[-1]
    assert CAP - 20 * MIB < last.peak_bytes < CAP
    found = alarm(leak(100, 10, stopped), CAP)
    assert found is not None
    assert found.fault is GROWING
    assert found.reason == "live bytes grow by 10.00 MiB a window, from 990.0 to the cap of 1000.0 MiB"


@pytest.mark.parametrize(
    "readings",
    [
        leak(480, 10, 4),  # too few windows to tell
        leak(100, 10, 50),  # far from the cap
        [Reading(500 * MIB, 999 * MIB)] * 50,  # full, and steady
        [Reading((500 + n % 3) * MIB, 999 * MIB) for n in range(50)],  # batches of unlike length
        [Reading((500 + n // 5) * MIB, 999 * MIB) for n in range(50)],  # grows, and pauses
        [Reading(499 * MIB + n * 1024, 999 * MIB) for n in range(50)],  # 1 KiB a window: a metric's list
        [Reading((500 + n) * MIB, (999 if n == 4 else 990) * MIB) for n in range(3)],
        [],
    ],
)
def test_what_is_no_leak_is_left_alone(readings: list[Reading]) -> None:
    assert alarm(readings, CAP) is None


@given(st.lists(st.integers(0, 40), min_size=5, max_size=60), st.integers(0, 800))
def test_levels_by_chance_stop_nothing_unless_the_last_four_rose_evenly(noise: list[int], level: int) -> None:
    readings = [Reading((level + n) * MIB, (level + 40) * MIB) for n in noise]
    found = alarm(readings, CAP)
    if found is not None:
        last = noise[-5:]
        assert all(b > a for a, b in itertools.pairwise(last))
        assert level + 40 + 2 * (last[-1] - last[0]) / 4 > 999


def test_an_allocator_that_empties_its_cache_window_after_window_is_stopped() -> None:
    retries = [0, 0, 3, 3, 7, 9]
    readings = [Reading(1, 1, 900 * MIB, r) for r in retries]
    alarms = [alarm(readings[: n + 1], CAP) for n in range(len(readings))]
    assert [a is not None for a in alarms] == [False, False, False, False, False, True]
    assert alarms[-1] is not None
    assert alarms[-1].fault is THRASHING
    assert alarms[-1].reason == "the allocator emptied its cache 6 times in 2 windows to find room"
    assert alarm(readings, None) is not None, "it waits for the device, cap or none"


def test_reserved_bytes_that_creep_to_the_cap_are_stopped_and_a_smaller_micro_batch_may_do() -> None:
    readings = [Reading(100 * MIB, 500 * MIB, (941 + 12 * n) * MIB) for n in range(5)]
    found = alarm(readings, CAP)
    assert found is not None
    assert found.fault is THRASHING
    assert "reserved bytes grow by 12.00 MiB a window, from 989.0" in found.reason
    assert alarm(readings[:4], CAP) is None
    assert alarm(readings, None) is None


@pytest.mark.parametrize(
    ("left", "cap", "retires"),
    [
        (0, None, False),
        (-5, CAP, False),
        (LEFT_BYTES, None, False),
        (LEFT_BYTES + 1, None, True),
        (20 * MIB, CAP, False),
        (21 * MIB, CAP, True),
        (400 * MIB, 24 * 1024 * MIB, False),  # 2 % of a large card: the libraries' workspaces
    ],
)
def test_a_process_is_given_up_for_no_less_than_a_share_of_the_cap(left: int, cap: int | None, retires: bool) -> None:
    own = 50 * MIB
    assert (left_behind(own, own + left, cap) is not None) is retires
