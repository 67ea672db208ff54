"""Workloads unlike `mine`, at the smallest settings that still go through every stage.

That all of ours keep the contract and are traced, tests/trainables and tests/tuning/memory have. The default goes
through a study, with the two configurations that it has by hand, and one of phases whose objective is minimised.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.outputs import of, study

pytestmark = [pytest.mark.workload, pytest.mark.timeout(300)]
FEW = ["concurrency=1", "search.trials=2", "budget.confirm.seeds=1", "budget.confirm.top=1"]
SMALL = [f"workload.{option}" for option in ("max_train_samples=32", "max_val_samples=16", "layers=1", "max_length=16")]
# Of a study with few trials most of the time goes into windows of these: six each, else with up to 8 loader processes.
NAMED = ["num_workers=0", "batch_size=8", "micro_batch_size=8"]
SEARCHED = [f"knobs.{knob}" for knob in ("batch_size=8", "micro_batch_size=8", "amp_dtype=fp32")]


def test_a_study_of_the_default_with_both_configurations_that_it_has_by_hand(tmp_path: Path) -> None:
    named = [f"named.{side}.{knob}" for side in ("before", "after") for knob in NAMED]
    records = study(tmp_path, *FEW, *SMALL, *SEARCHED, *named, workload="nli")
    assert of(records, "probe")
    beside = {r["trial"] for r in of(records, "trial_start") if r.get("beside")}  # `before`, which the space lacks
    assert len({r["trial"] for r in of(records, "trial")} - beside) == 2
    assert {r["name"] for r in of(records, "window")} >= {"before", "after"}


def test_a_study_of_phases_that_is_minimised(tmp_path: Path) -> None:
    today = 'BEFORE = {"learning_rate": 0.001, "batch_size": 8, "encoder_frac": 0.5}'
    (tmp_path / "noisy.py").write_text(f"from tests.fakes import Noisy\n\nWORKLOAD = Noisy()\n{today}\n")
    own = ["knobs.encoder_frac=0.5", "budget.train_epochs=4"]  # two learning rates are left to try
    records = study(tmp_path, *FEW, *SEARCHED, *own, workload="noisy.py")
    errors = {r["trial"]: r["values"]["error"] for r in of(records, "trial") if r["outcome"] == "ok"}
    (pick,) = of(records, "pick")
    assert 0 < errors.get(pick["best"], errors["t000"]) <= max(errors.values())
    assert len(errors) > 1
    assert all(r["active"]["phases"].keys() == {"first", "second"} for r in of(records, "confirmed"))
