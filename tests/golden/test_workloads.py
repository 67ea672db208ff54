"""Workloads that come along, at the smallest settings that still go through every stage.

That all five keep the contract and are traced, tests/trainables and tests/tuning/memory have: one that is minimised and
one of phases go through a study beside the default.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import share_library
from tests.golden.outputs import answer, of, study

pytestmark = [pytest.mark.workload, pytest.mark.timeout(300)]
SMALL = {
    "nli": ["max_train_samples=64", "max_val_samples=16", "layers=1", "max_length=16"],
    "headpose": ["heads=40", "image_size=32", "max_train_samples=64"],
    "signals": ["data=japanese_vowels", "max_train_samples=64", "max_val_samples=32"],  # a fifth of the digits' files
}
# Of a study with few trials most of the time goes into windows of these: six each, else with up to 8 loader processes.
NAMED = ["num_workers=0", "batch_size=16", "micro_batch_size=16"]
SEARCHED = ["learning_rate=[1e-3,3e-3]", "batch_size=[16,32]", "micro_batch_size=[8,16]", "amp_dtype=fp32"]


@pytest.mark.parametrize("name", SMALL)
def test_a_study_of_a_built_in_workload(name: str, tmp_path: Path) -> None:
    small = [] if name == "nli" else ["hidden_size=16"]
    records = study(
        tmp_path,
        "concurrency=1",
        "search.trials=2",
        "budget.confirm.seeds=1",
        "budget.confirm.top=1",
        *(f"workload.{option}" for option in SMALL[name]),
        *(f"knobs.{knob}" for knob in [*SEARCHED, *small]),
        *(f"named.{side}.{knob}" for side in ("before", "after") for knob in [*NAMED, *small]),
        workload=name,
    )
    assert of(records, "probe")
    beside = {r["trial"] for r in of(records, "trial_start") if r.get("beside")}  # `before`, where the space lacks it
    assert len({r["trial"] for r in of(records, "trial")} - beside) == 2
    assert {r["name"] for r in of(records, "window")} >= {"before", "after"}


def test_an_estimate_for_a_card_that_is_not_here(tmp_path: Path) -> None:
    share_library(tmp_path)
    found = answer(
        tmp_path,
        "estimate",
        "workload=nli",
        "card=rtx4060",
        *(f"workload.{option}" for option in SMALL["nli"]),
        *(f"knobs.{knob}" for knob in SEARCHED),
    )
    assert {"workload", "card", "kernels", "knobs", "rows", "notes", "seconds"} <= found.keys()
    assert found["card"]["name"] == "rtx4060"
    assert 0 < found["card"]["usable_bytes"] < found["card"]["memory_bytes"]
    assert found["rows"]
    assert all({"knobs", "confidence", "cells", "largest"} <= row.keys() for row in found["rows"])
