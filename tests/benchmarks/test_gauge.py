"""The smallest cap and the cards of the check; on a CPU."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu_check.cards import caps
from benchmarks.gpu_check.gauge import Gauge, smallest
from benchmarks.gpu_check.memory import joined
from benchmarks.gpu_check.place import Place


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 1000))
def test_the_smallest_cap_fits_and_is_near_the_true_one(need: int, high: int, resolution: int) -> None:
    if need > 64 * high:
        with pytest.raises(ValueError, match="fits under no cap up to"):
            smallest(lambda cap: cap >= need, 0, high, resolution)
        return
    found = smallest(lambda cap: cap >= need, 0, high, resolution)
    assert need <= found < need + max(1, resolution) + 1


def test_a_step_fits_its_own_peak_and_no_less() -> None:
    gauge = Gauge("cpu", "small MLP", 16)
    free = gauge.step({}, 8)
    assert free.fits
    assert free.reserved_bytes is None
    assert gauge.step({}, 8, free.allocated_bytes).fits
    short = gauge.step({}, 8, free.allocated_bytes - 1)
    assert not short.fits
    assert "out of memory" in short.message
    assert gauge.capacity_bytes({}, 8, free) == pytest.approx(free.allocated_bytes, rel=0.01)


def test_a_row_is_wrong_where_a_card_just_too_small_is_said_to_be_enough() -> None:
    real = {"kind": "k", "coupling": "k", "micro_batch": 2, "capacity_bytes": 10**9, "allocated_bytes": 10**9}

    def said(capacity: int) -> dict[str, object]:
        peak = {"allocated_bytes": capacity, "reserved_bytes": None, "capacity_bytes": capacity, "phase": "backward"}
        return {"confidence": "traced", "notes": [], "peaks": {"2": peak}}

    assert joined(real, said(9 * 10**8), small=False)["wrong"], "10 % too low is past the margin of 5 %"
    assert not joined(real, said(98 * 10**7), small=False)["wrong"]
    assert "wrong" not in joined(real, None, small=False)


def test_virtual_cards_are_those_of_the_files_less_their_reserve() -> None:
    assert list(caps(Place("cuda", Path(), "abc"), 8 * 2**30)) == ["rtx4060"], "not what this card cannot be held to"
    found = caps(Place("cuda", Path(), "abc"), 2**40)
    assert {name: round(size / 2**30, 1) for name, size in found.items()} == {"rtx4060": 7.3, "rtx3090": 23.2}
