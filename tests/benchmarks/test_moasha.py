"""Syne Tune's MOASHA as our peers ask it, where it is installed."""

from __future__ import annotations

import pytest

from benchmarks.moasha import Halving

pytest.importorskip("syne_tune")


def test_what_is_dominated_at_a_rung_is_stopped_and_what_leads_in_either_goes_on() -> None:
    halving = Halving({"samples_per_s": "max", "error": "min"}, first=100, horizon=400, eta=2)
    assert halving.goes_on("a", 100, {"samples_per_s": 50.0, "error": 0.2})
    assert halving.goes_on("b", 100, {"samples_per_s": 90.0, "error": 0.1})
    assert not halving.goes_on("c", 100, {"samples_per_s": 40.0, "error": 0.4})
    assert halving.goes_on("d", 100, {"samples_per_s": 95.0, "error": 0.05})
    assert not halving.goes_on("e", 100, {"samples_per_s": 10.0, "error": None})
