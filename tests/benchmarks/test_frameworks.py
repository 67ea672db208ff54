"""What is said of an exported speed in a framework, from pairs whose answers are known; nothing is trained."""

from __future__ import annotations

import pytest

from benchmarks.frameworks import compared


def test_the_bound_of_a_framework_is_on_the_pairs_and_drift_stands_beside_it() -> None:
    rows = [{"there": 98.0, "trained": 100.0}, {"there": 51.0, "trained": 50.0}, {"there": 99.0, "trained": 100.0}]
    found = compared(200.0, rows)
    assert found["within_bound"]
    assert found["over_trained"] == {"median": 0.99, "least": 0.98, "largest": 1.02}
    assert found["over_said"] == pytest.approx(0.49)
    assert not compared(100.0, [{"there": 90.0, "trained": 100.0}] * 2)["within_bound"]
