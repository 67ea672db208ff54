"""Accelerate's own Accelerator under `run`: it sets number types and accumulation; the real package, no stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainables import own_loop
from trainables.knobs import Knobs
from trainables.plan import Plan
from trainables.workload import Config, OwnLoop, WorkloadError, load, table_of
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

pytest.importorskip("accelerate")
LOOP = Path(__file__).parents[1] / "data" / "accelerate_loop.py"
KNOBS = {"learning_rate": 1e-2, "batch_size": 32, "micro_batch_size": 16}


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def write(*changes: tuple[str, str]) -> Session:
        text = LOOP.read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / f"changed_{abs(hash(changes))}.py"
        path.write_text(text)
        return Session(WorkerConfig(str(path), {}))

    return write


def test_it_tells_what_it_asks_for(changed: Any) -> None:
    facts = changed().describe(KNOBS)
    assert (facts["train_samples"], facts["objectives"]) == (1024, {"accuracy": "max"})
    assert facts["seen"] == {"batch_size": 32, "micro_batch_size": 16}
    assert {"learning_rate", "batch_size", "num_workers", "amp_dtype", "compile", "non_blocking"} <= set(facts["asked"])


def test_rungs_and_horizon_are_those_of_the_plan(changed: Any) -> None:
    session = changed()
    trial = session.trial(KNOBS, Plan(3072, (1024, 3072)), 0)
    first, second = trial.advance(), trial.advance()
    assert (first["samples"], first["done"], first["outcome"]) == (1024, False, "ok"), first["message"]
    assert (second["samples"], second["done"], second["outcome"]) == (3072, True, "ok"), second["message"]
    assert second["values"]["accuracy"] > 0.9
    assert second["spans"]["micro_steps"] == 2 * second["spans"]["steps"]
    assert second["active"]["optimizer"] == "AdamW"


def test_number_types_change_from_trial_to_trial_and_workers_are_not_denied(changed: Any) -> None:
    session = changed()
    for amp, seen in (("bf16", "bfloat16"), ("fp32", "float32"), ("bf16", "bfloat16")):
        found = session.probe({**KNOBS, "amp_dtype": amp, "num_workers": 1}, time_s=0.3)
        assert (found["outcome"], found["end"]) == ("ok", "time"), found["message"]
        assert seen in found["active"]["matmul_dtypes"]
        assert "workers" not in found["active"]
    trial = session.trial(KNOBS, Plan(2048, (1024, 2048)), 0)
    trial.advance()
    assert trial.end()["retire"] == ""


def test_the_micro_batch_leaves_what_is_learned_alone() -> None:
    workload = load(str(LOOP))
    assert isinstance(workload, OwnLoop)
    found = []
    for micro in (8, 32):
        knobs = Knobs.of({**KNOBS, "micro_batch_size": micro}, table_of(workload))
        resident = own_loop.OwnResident(workload)
        state = own_loop.prepare(resident, Config(knobs, {}), Plan(1024, (1024,)))
        list(own_loop.train(state))
        assert (state.samples, state.steps) == (1024, 32)
        assert state.model is not None
        found.append(torch.cat([p.detach().flatten() for p in state.model.parameters()]))
    assert torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-5)


def test_the_micro_batch_is_halved_where_it_does_not_fit(changed: Any) -> None:
    session = changed(("moons(256, 2)", "moons(16, 2)"))  # else evaluating needs most
    small, large = (
        session.train({**KNOBS, "micro_batch_size": m}, Plan(64, (64,)), 0)["peak_allocated_bytes"] for m in (8, 32)
    )
    assert small < large
    found = session.train({**KNOBS, "micro_batch_size": 32}, Plan(64, (64,), cap_bytes=(small + large) // 2), 0)
    assert (found["outcome"], found["knobs"]["batch_size"]) == ("ok", 32), found["message"]
    assert found["knobs"]["micro_batch_size"] < 32


@pytest.mark.parametrize("samples", [1024, 100])
def test_a_schedule_ends_with_the_run(changed: Any, samples: int) -> None:
    made = "    schedule = accelerator.prepare(CosineAnnealingLR(optimizer, run.steps))\n"
    session = changed(
        ("moons(1024, 1)", f"moons({samples}, 1)"),
        ("from torch.utils.data", "from torch.optim.lr_scheduler import CosineAnnealingLR\nfrom torch.utils.data"),
        ("    for _ in run.epochs", made + "    for _ in run.epochs"),
        ("                optimizer.step()\n", "                optimizer.step()\n                schedule.step()\n"),
    )
    resident = session.resident
    assert isinstance(resident, own_loop.OwnResident)
    state = own_loop.prepare(resident, session.config(KNOBS), Plan(2 * samples, (2 * samples,)))
    list(own_loop.train(state))
    assert state.optimizer is not None
    assert state.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_a_horizon_within_a_batch_steps_where_it_ends(changed: Any) -> None:
    one = ("        run.report(acc", "            if run.evaluate_now:\n                run.report(acc")
    session = changed(("moons(1024, 1)", "moons(100, 1)"), one)
    found = session.train(KNOBS, Plan(248, (248,)), 0)
    assert (found["outcome"], found["samples"]) == ("ok", 248), found["message"]
    assert found["spans"]["steps"] == 9  # behind the first, of passes of four


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ((("accelerator(run)", "accelerator(run, mixed_precision='fp16')"),), r"mixed_precision='fp16'\): run sets it"),
        ((("accelerator(run)", "accelerator(run, gradient_accumulation_steps=4)"),), "run sets it"),
        ((("                optimizer.step()\n", ""),), "without an optimiser step"),
    ],
)
def test_what_a_loop_gets_wrong_is_said(changed: Any, changes: Any, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        changed(*changes).describe(KNOBS)
