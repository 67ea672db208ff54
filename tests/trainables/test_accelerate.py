"""Accelerate's own Accelerator under `run`: it sets number types and accumulation; the real package, no stand-in."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainables.test_framework_loops import knobs_of, session_of
from trainables import own_loop
from trainables.plan import Plan
from trainables.workload import WorkloadError

pytest.importorskip("accelerate")
KNOBS = knobs_of("accelerate")


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return functools.partial(session_of, "accelerate", tmp_path)


def test_number_types_change_from_trial_to_trial_and_workers_are_not_denied(changed: Any) -> None:
    session = changed(("pictures(1024, 1)", "pictures(64, 1)"))
    for amp, seen in (("bf16", "bfloat16"), ("fp32", "float32")):
        found = session.probe({**KNOBS, "amp_dtype": amp, "num_workers": 1}, time_s=0.3)
        assert (found["outcome"], found["end"]) == ("ok", "time"), found["message"]
        assert seen in found["active"]["matmul_dtypes"]
        assert "workers" not in found["active"]
    trial = session.trial(KNOBS, Plan(128, (64, 128)), 0)
    trial.advance()
    assert trial.end()["retire"] == ""


def test_the_micro_batch_leaves_what_is_learned_alone(changed: Any) -> None:
    session, found = changed(("optim.AdamW", "optim.SGD")), []  # Adam makes a step of what is left of rounding
    for micro in (8, 32):
        resident = own_loop.OwnResident(session.resident.workload)
        config = session.config({**KNOBS, "micro_batch_size": micro})
        state = own_loop.prepare(resident, config, Plan(128, (128,)))
        list(own_loop.train(state))
        assert (state.samples, state.steps) == (128, 4)
        assert state.model is not None
        found.append(torch.cat([p.detach().flatten() for p in state.model.parameters()]))
    assert torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-5)


def test_a_schedule_ends_with_the_run(changed: Any) -> None:
    made = "    schedule = accelerator.prepare(CosineAnnealingLR(optimizer, run.steps))\n"
    session = changed(
        ("pictures(1024, 1)", "pictures(100, 1)"),
        ("from torch.utils.data", "from torch.optim.lr_scheduler import CosineAnnealingLR\nfrom torch.utils.data"),
        ("    for _ in run.epochs", made + "    for _ in run.epochs"),
        ("                optimizer.step()\n", "                optimizer.step()\n                schedule.step()\n"),
    )
    resident = session.resident
    assert isinstance(resident, own_loop.OwnResident)
    state = own_loop.prepare(resident, session.config(KNOBS), Plan(200, (200,)))
    list(own_loop.train(state))
    assert state.optimizer is not None
    assert state.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_a_horizon_within_a_batch_steps_where_it_ends(changed: Any) -> None:
    one = ("        run.report(acc", "            if run.evaluate_now:\n                run.report(acc")
    session = changed(("pictures(1024, 1)", "pictures(100, 1)"), one)
    found = session.train(KNOBS, Plan(248, (248,)), 0)
    assert (found["outcome"], found["samples"]) == ("ok", 248), found["message"]
    assert found["spans"]["steps"] == 9  # behind the first, of passes of four


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ((("accelerator(run)", "accelerator(run, mixed_precision='fp16')"),), r"mixed_precision='fp16'\): run sets it"),
        ((("accelerator(run)", "accelerator(run, gradient_accumulation_steps=4)"),), "run sets it"),
    ],
)
def test_what_a_loop_gets_wrong_is_said(changed: Any, changes: Any, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        changed(*changes).describe(KNOBS)


def test_a_pass_over_a_sampler_of_ones_own_has_the_samples_that_it_draws(changed: Any) -> None:
    own = "DataLoader(TRAIN, sampler=torch.utils.data.SubsetRandomSampler(range(100)), **run.loader())"
    facts = changed(("DataLoader(TRAIN, shuffle=True, **run.loader())", own)).describe(KNOBS)
    assert facts["train_samples"] == 100
