"""transformers' own Trainer under `run`: counted, timed, reported and ended; the real package, no stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainables.integrations.transformers import training_arguments
from trainables.plan import Plan, steps_to
from trainables.workload import WorkloadError
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

LOOP = Path(__file__).parents[1] / "data" / "trainer_loop.py"
KNOBS = {"learning_rate": 1e-2, "batch_size": 16, "micro_batch_size": 8}


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.chdir(tmp_path)
    return Session(WorkerConfig(str(LOOP), {}))


def test_it_tells_what_it_asks_for(session: Session) -> None:
    facts = session.describe(KNOBS)
    assert (facts["train_samples"], facts["objectives"]) == (256, {"accuracy": "max"})
    assert facts["seen"] == {"batch_size": 16, "micro_batch_size": 8}
    assert {"learning_rate", "batch_size", "micro_batch_size", "num_workers", "amp_dtype", "compile"} <= set(
        facts["asked"]
    )
    assert facts["parameters"]["total"] > 1000


def test_rungs_and_horizon_are_those_of_the_plan(session: Session) -> None:
    trial = session.trial(KNOBS, Plan(512, (128, 512)), 0)
    first, second = trial.advance(), trial.advance()
    assert (first["samples"], first["done"], first["outcome"]) == (128, False, "ok"), first["message"]
    assert (second["samples"], second["done"], second["outcome"]) == (512, True, "ok"), second["message"]
    assert second["values"]["accuracy"] > 0.9
    assert second["spans"]["micro_steps"] == 2 * second["spans"]["steps"]
    assert second["active"]["optimizer"] == "AdamW"


def test_a_probe_and_an_early_end(session: Session) -> None:
    found = session.probe({**KNOBS, "amp_dtype": "bf16"}, time_s=0.5)
    assert (found["outcome"], found["end"]) == ("ok", "time"), found["message"]
    assert "bfloat16" in found["active"]["matmul_dtypes"]
    trial = session.trial(KNOBS, Plan(512, (128, 512)), 0)
    trial.advance()
    assert trial.end()["retire"] == ""


def test_the_micro_batch_is_halved_where_it_does_not_fit(session: Session) -> None:
    small, large = (
        session.train({**KNOBS, "micro_batch_size": m}, Plan(64, (64,)), 0)["peak_allocated_bytes"] for m in (8, 16)
    )
    assert small < large
    found = session.train({**KNOBS, "micro_batch_size": 16}, Plan(64, (64,), cap_bytes=(small + large) // 2), 0)
    assert (found["outcome"], found["knobs"]["batch_size"]) == ("ok", 16), found["message"]
    assert found["knobs"]["micro_batch_size"] < 16


@pytest.mark.parametrize(
    ("samples", "a_pass", "micro", "accumulation", "steps"),
    [(256, 256, 8, 2, 16), (512, 256, 8, 2, 32), (100, 96, 8, 4, 4), (60, 256, 8, 2, 4), (200, 100, 8, 4, 8)],
)
def test_the_steps_reach_the_samples(samples: int, a_pass: int, micro: int, accumulation: int, steps: int) -> None:
    assert steps_to(samples, a_pass, micro, accumulation) == steps


def test_what_run_sets_is_not_set_twice(session: Session) -> None:
    from types import SimpleNamespace

    run: Any = SimpleNamespace(
        loader=lambda: {"batch_size": 8, "num_workers": 0, "pin_memory": False},
        accumulation=2,
        samples=64,
        seed=0,
        device=SimpleNamespace(type="cpu"),
    )

    class Asked(type(run)):  # type: ignore[misc]
        def __getitem__(self, name: str) -> Any:
            return {"amp_dtype": "fp32", "compile": "off"}.get(name, False)

    with pytest.raises(WorkloadError, match="per_device_train_batch_size=4\\): run sets it"):
        training_arguments(Asked(**vars(run)), [0] * 64, output_dir="out", per_device_train_batch_size=4)
