"""How the exported settings of the three examples are timed in their frameworks, and what is said of the pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.frameworks import EXAMPLES, Found, compared, speed
from tuning.config.best_file import Best
from tuning.report.summary import Place

PACKAGES = {"trainer": "transformers", "lightning": "pytorch_lightning", "accelerate": "accelerate"}
KNOBS = {"batch_size": 64, "micro_batch_size": 32, "learning_rate": 0.01, "amp_dtype": "bf16", "pin_memory": False}


def test_the_bound_is_on_the_pairs_and_drift_stands_beside_it() -> None:
    rows = [{"there": 98.0, "trained": 100.0}, {"there": 51.0, "trained": 50.0}, {"there": 99.0, "trained": 100.0}]
    found = compared(200.0, rows)
    assert found["within_bound"]
    assert found["over_trained"] == {"median": 0.99, "least": 0.98, "largest": 1.02}
    assert found["over_said"] == pytest.approx(0.49)
    assert not compared(100.0, [{"there": 90.0, "trained": 100.0}] * 2)["within_bound"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_each_example_trains_in_its_framework(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(PACKAGES[example])
    monkeypatch.chdir(tmp_path)
    best = Best(Path("best.yaml"), "mine", {}, KNOBS, None, 0, {}, {}, ())
    assert speed(example, Found(best, Place(type="cpu")), passes=1) > 0
    assert not list(tmp_path.iterdir())
