"""Trials over several processes: they learn what one learns, and a failure of any of them is an outcome."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.commands import ROOT
from trainables.knobs import Scalar
from trainables.plan import Plan
from tuning.workers.peers import cards_of
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

pytestmark = [pytest.mark.workload, pytest.mark.timeout(120)]
RANKED = str(ROOT / "tests/data/ranked.py")
# Of a micro-batch of 5 one rank has more than the other, the last of a batch has 4, and a pass ends in a batch of 16.
KNOBS: Mapping[str, Scalar] = {"learning_rate": 0.01, "batch_size": 24, "micro_batch_size": 5, "amp_dtype": "fp32"}
PLAN = Plan(1280, (264, 1280))


LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1))
SPACE = {"learning_rate": [0.1, 0.01], "batch_size": [8, 24], "micro_batch_size": [2, 5], "clip": [0.0, 0.5]}
OBJECTIVES = {"error": "min"}

def train(run):
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), run["learning_rate"])
    run.prepare(net, optimizer)
    for x, y in run.batches(DataLoader(DATA, shuffle=True, **run.loader())):
        loss = (net(x).squeeze(1) - y).square().mean()
        if OWN_STEPS:
            loss.backward()
            optimizer.step()
            run.step()
        else:
            run.backward(loss, optimizer, max_norm=run["clip"])
        if run.evaluate_now:
            weights = torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
            run.report(error=loss.item(), **{f"w{n}": w for n, w in enumerate(weights)})
"""


def session(ranks: int, how: str = "raise", cap_bytes: int | None = None, workload: str = RANKED) -> Session:
    """Returns a session of so many processes, in which a rank is to fail as `how` says."""
    options = {"how": how} if workload == RANKED else {}
    setting = WorkerConfig(workload, options, threads=1, cap_bytes=cap_bytes, ranks=ranks, folder=str(ROOT))
    made = Session(setting)
    _made.append(made)
    made.warm({})
    return made


_made: list[Session] = []


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    while _made:
        _made.pop().peers.end()
    assert set(psutil.Process().children(recursive=True)) == before


def trained(ranks: int, **changes: Scalar) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Returns the result of a training of so many processes, and the weights it ends with."""
    own = session(ranks)
    trial = own.trial({**KNOBS, **changes}, PLAN, 0)
    while not (found := trial.advance())["done"] and found["samples"] < PLAN.samples:
        pass
    weights = [p.detach().clone() for p in own.contract._model.parameters()]  # type: ignore[union-attr]
    return found, weights


@pytest.mark.parametrize("changes", [{}, {"batch_size": 2, "micro_batch_size": 1, "max_grad_norm": 0.1}], ids=str)
def test_two_processes_learn_what_one_learns(changes: dict[str, Scalar]) -> None:
    (alone, first), (both, second) = trained(1, **changes), trained(2, **changes)
    assert both["outcome"] == alone["outcome"] == "ok"
    assert both["values"] == pytest.approx(alone["values"], abs=1e-3)
    assert both["samples"] == alone["samples"]
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("batch", "micro", "clip"), [(24, 5, 0.5), (2, 1, 0.0)], ids=str)
def test_two_processes_of_a_loop_of_its_own_learn_what_one_learns(
    tmp_path: Path, batch: int, micro: int, clip: float
) -> None:
    path = tmp_path / "loop.py"
    path.write_text("OWN_STEPS = False\n" + LOOP)
    knobs = {"learning_rate": 0.01, "batch_size": batch, "micro_batch_size": micro, "clip": clip}
    found = []
    for ranks in (1, 2):
        own = session(ranks, workload=str(path))
        trial = own.trial(knobs, Plan(600, (216, 600)), 0)
        half = trial.advance()
        assert half["samples"] == math.ceil(216 / (25 if batch == 24 else 2)) * (25 if batch == 24 else 2)
        found.append(trial.advance())
        assert found[-1]["done"]
        assert own.probe(knobs, 0.5)["samples_per_s"] > 0
    alone, both = found
    assert (both["outcome"], both["message"], both["samples"]) == ("ok", "", alone["samples"])
    del both["values"]["error"], alone["values"]["error"]  # of a part
    assert both["values"] == pytest.approx(alone["values"], abs=1e-4)


def test_a_loop_that_steps_by_itself_is_not_trained_by_several(tmp_path: Path) -> None:
    path = tmp_path / "loop.py"
    path.write_text("OWN_STEPS = True\n" + LOOP)
    own = session(2, workload=str(path))
    found = own.train({"learning_rate": 0.01, "clip": 0.0}, Plan(64, (64,)), 0)
    assert found["outcome"] == "crash"
    assert "gradients are averaged by run.backward" in found["message"]
    assert not own.describe({})["averages"]


@pytest.mark.parametrize(
    ("how", "ranks", "outcome"),
    [("oom", (0, 1), "oom"), ("raise", (1,), "crash"), ("kill", (1,), "killed")],  # `Worker` sees to rank 0's process
    ids=["oom", "raise", "kill"],
)
def test_a_failure_of_one_rank_ends_the_trial_and_the_next_one_runs(
    how: str, ranks: Sequence[int], outcome: str
) -> None:
    own = session(2, how, 16 * 2**20 if how == "oom" else None)
    plan = Plan(1024, (1024,), cap_bytes=own.setting.cap_bytes)
    for rank in ranks:
        found = own.trial({**KNOBS, "rank": float(rank)}, plan, 0, shrink="").advance()
        assert (found["outcome"], found["done"]) == (outcome, True), found["message"]
        assert found["message"].startswith("rank 1: ") == (rank == 1)
        assert how != "raise" or "so it goes" in found["message"]
        assert own.train(KNOBS, PLAN, 0)["outcome"] == "ok"


def test_a_trial_that_runs_out_of_memory_in_one_rank_begins_again_with_half_the_micro_batch() -> None:
    own = session(2, "oom", 16 * 2**20)
    found = own.train({**KNOBS, "rank": 1.0}, Plan(512, (512,), cap_bytes=16 * 2**20), 0)
    assert [one["knobs"]["micro_batch_size"] for one in found["ooms"]] == [5, 2]
    assert found["outcome"] == "oom", "it fails at every size"


def test_a_trial_is_ended_between_two_batches_and_speeds_are_measured() -> None:
    own = session(2)
    trial = own.trial(KNOBS, PLAN, 0)
    assert trial.advance()["samples"] == PLAN.milestones[0]
    trial.end()
    assert own.probe(KNOBS, 0.5)["samples_per_s"] > 0
    assert own.window(KNOBS, 0.2, 1)["samples_per_s"] > 0
    assert own.train(KNOBS, PLAN, 0)["outcome"] == "ok"


@pytest.mark.parametrize(
    ("visible", "cards"),
    [(None, ["0", "1"]), ("", ["0", "1"]), ("GPU-a,GPU-b,GPU-c", ["GPU-a", "GPU-b"]), ("2,3", ["2", "3"])],
)
def test_each_rank_sees_a_card_of_its_own(visible: str | None, cards: list[str]) -> None:
    assert cards_of(2, visible) == cards
