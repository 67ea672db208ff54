"""Trials over several processes: they learn what one learns, and a failure of any of them is an outcome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.commands import ROOT
from tests.data.ranked import HOW
from tests.fakes import told
from trainables import checkpoint, loop
from trainables.knobs import Scalar
from trainables.plan import Plan
from trainables.reports import READY
from tuning.config.complete import fit_to_workload
from tuning.config.errors import ConfigError
from tuning.config.load import load
from tuning.search.protocols import TrialState
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


def made(ranks: int, workload: str = RANKED) -> Session:
    """Returns a session of so many processes."""
    setting = WorkerConfig(workload, threads=1, ranks=ranks, folder=str(ROOT))
    found = Session(setting)
    found.warm({})
    return found


@pytest.fixture(scope="module")
def pair() -> Iterator[Session]:
    """Two processes, one of which fails where it is told to; none is left once all tests are over."""
    before = set(psutil.Process().children(recursive=True))
    found = made(2)
    yield found
    found.peers.end()
    assert set(psutil.Process().children(recursive=True)) <= before


def trained(own: Session, plan: Plan, **changes: Scalar) -> tuple[TrialState, list[torch.Tensor]]:
    """Returns the result of a training, and the weights it ends with."""
    found = own.train({**KNOBS, **changes}, plan, 0)
    weights = [p.detach().clone() for p in own.contract._model.parameters()]  # type: ignore[union-attr]
    return found, weights


@pytest.mark.parametrize(
    ("plan", "changes"),
    [(PLAN, {}), (Plan(200, (64, 200)), {"batch_size": 2, "micro_batch_size": 1, "max_grad_norm": 0.1})],
    ids=["uneven", "clipped"],
)
def test_two_processes_learn_what_one_learns(pair: Session, plan: Plan, changes: dict[str, Scalar]) -> None:
    (alone, first), (both, second) = trained(made(1), plan, **changes), trained(pair, plan, **changes)
    assert both.outcome == alone.outcome == "ok"
    assert both.values == pytest.approx(alone.values, abs=1e-3)
    assert both.samples == alone.samples
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4)


def test_two_processes_of_a_loop_of_its_own_learn_what_one_learns(tmp_path: Path) -> None:
    path = tmp_path / "loop.py"
    path.write_text("OWN_STEPS = False\n" + LOOP)
    sessions = [made(ranks, str(path)) for ranks in (1, 2)]
    for batch, micro, clip, at in ((25, 5, 0.5, 225), (24, 5, 0.5, 224), (2, 1, 0.0, 216)):  # 200 samples an epoch
        knobs = {"learning_rate": 0.01, "batch_size": batch, "micro_batch_size": micro, "clip": clip}
        found: list[Any] = []
        for own in sessions:
            half, last = told(own, knobs, Plan(600, (216, 600)))
            assert half.samples == at
            found.append(last)
        alone, both = found
        assert (both.outcome, both.message, both.samples) == ("ok", "", alone.samples)
        one, other = ({n: v for n, v in end.values.items() if n != "error"} for end in found)  # which is of a part
        assert other == pytest.approx(one, abs=1e-4)
    assert sessions[1].probe(knobs, 0.5).samples_per_s > 0
    sessions[1].peers.end()


def test_a_loop_that_steps_by_itself_is_not_trained_by_several(tmp_path: Path) -> None:
    path = tmp_path / "loop.py"
    path.write_text("OWN_STEPS = True\n" + LOOP)
    facts = made(1, str(path)).describe({})
    config = load([f"workload={path}", "devices_per_trial=2"])
    with pytest.raises(ConfigError, match="each process would train a model of its own"):
        fit_to_workload(config, facts.train_samples, facts.asked, facts.seen, averages=facts.averages)


@pytest.mark.parametrize(
    ("how", "rank", "outcome"),
    [("raise", 0, "crash"), ("oom", 1, "oom"), ("kill", 1, "killed")],  # `Worker` sees to rank 0's process
    ids=["raise", "oom", "kill"],
)
def test_a_failure_of_one_rank_ends_the_trial_and_the_next_one_runs(
    pair: Session, how: str, rank: int, outcome: str
) -> None:
    knobs = {**KNOBS, "micro_batch_size": 2, "rank": float(rank), "how": float(HOW.index(how))}
    plan = Plan(1024, (1024,), cap_bytes=16 * 2**20 if how == "oom" else None)
    found = pair.train(knobs, plan, 0)
    assert (found.outcome, found.done) == (outcome, True), found.message
    assert found.message.startswith("rank 1: ") == (rank == 1)
    assert how != "raise" or "so it goes" in found.message
    halved = [2] if how == "oom" else []  # begun again with half the micro-batch, it fails at every size
    assert [one.knobs["micro_batch_size"] for one in found.retries] == halved
    assert pair.train(KNOBS, PLAN, 0).outcome == "ok"


def test_a_trial_is_ended_between_two_batches_and_speeds_are_measured(pair: Session) -> None:
    assert told(pair, KNOBS, PLAN, stops=True)[-1].samples == PLAN.milestones[0]
    assert pair.probe(KNOBS, 0.5).samples_per_s > 0
    assert pair.window(KNOBS, 0.2, 1).samples_per_s > 0
    assert pair.train(KNOBS, PLAN, 0).outcome == "ok"


@pytest.mark.parametrize(
    ("visible", "cards"),
    [(None, ["0", "1"]), ("", ["0", "1"]), ("GPU-a,GPU-b,GPU-c", ["GPU-a", "GPU-b"]), ("2,3", ["2", "3"])],
)
def test_each_rank_sees_a_card_of_its_own(visible: str | None, cards: list[str]) -> None:
    assert cards_of(2, visible) == cards


def test_every_process_of_a_training_that_goes_on_draws_as_in_an_unbroken_one(pair: Session, tmp_path: Path) -> None:
    config = pair.config({**KNOBS, "batch_size": 20, "dropout": 0.5}, 0)

    def begun() -> loop.State:
        return loop.prepare(pair.contract, config, Plan(200, (200,), window_s=0.0))

    def trained_to(samples: int, state: loop.State) -> loop.State:
        pair.run(state, lambda event: event != READY and state.samples >= samples)
        return state

    whole = [p.detach().clone() for p in trained_to(200, begun()).model.parameters()]
    checkpoint.save(trained_to(80, begun()), tmp_path, identity="a")
    resumed = begun()
    checkpoint.load(resumed, tmp_path, identity="a")
    assert resumed.samples == 80
    assert all(map(torch.equal, whole, trained_to(200, resumed).model.parameters()))
