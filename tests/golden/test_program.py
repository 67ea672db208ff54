"""A study of a command that nobody edits, from the command line: its file, its trainings, what is typed afterwards."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from tests.commands import run
from tests.golden.outputs import journal, of

pytestmark = [pytest.mark.workload, pytest.mark.timeout(300)]
SCRIPT = """
import argparse, torch
from torch.utils.data import DataLoader, TensorDataset
parser = argparse.ArgumentParser()
for name, kind in (("lr", float), ("size", int), ("epochs", int), ("seed", int)):
    parser.add_argument(f"--{name}", type=kind, required=True)
asked = parser.parse_args()
torch.manual_seed(asked.seed)
x = torch.randn(256, 8)
net, loader = torch.nn.Linear(8, 1), DataLoader(TensorDataset(x, x.sum(1)), batch_size=asked.size, shuffle=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=asked.lr)
for epoch in range(asked.epochs):
    for a, b in loader:
        optimizer.zero_grad()
        (net(a).squeeze(1) - b).square().mean().backward()
        optimizer.step()
    print("error", (net(x).squeeze(1) - x.sum(1)).square().mean().item())
"""
PYTHON = shlex.quote(sys.executable)
COMMAND = f"{PYTHON} train.py" + " --lr {learning_rate} --size {batch_size} --epochs {epochs} --seed {seed}"
SPACE = "learning_rate: {low: 1e-3, high: 1e-1, log: true}\nbatch_size: [16, 64]\nbefore: {learning_rate: 1e-2}\n"


def test_a_command_is_searched_and_told_as_it_is_typed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "space.yaml").write_text(SPACE)
    beside = ["metric=error ([-+.e0-9]+)", "epochs=40", "space=space.yaml"]
    assert run("tuning.run", [f"workload={COMMAND}", *beside, "mode=up"], tmp_path) == 2
    assert not (tmp_path / "runs").exists(), "nothing is written for what is wrong"
    few = [
        "search.trials=1",
        "budget.train_epochs=2",
        "budget.confirm.seeds=1",
        "budget.probe.max_time_s=6",
        "name=one",
    ]
    assert run("tuning.run", [f"workload={COMMAND}", *beside, "mode=min", *few], tmp_path) == 0, (
        tmp_path / "err"
    ).read_text()
    (made,) = (tmp_path / "runs").glob("*_train/one")
    records = journal(made)
    assert {t["samples"] for t in of(records, "trial")} == {512}, "of two epochs, as the command is told"
    assert all(t["outcome"] == "ok" and t["values"]["error"] > 0 for t in of(records, "trial"))
    assert {r["seed"] for r in of(records, "confirmed")} == {1}
    assert not of(records, "window"), "a start costs more than a window tells"
    assert f"Or by hand:\n#   {PYTHON} train.py --lr " in (made / "best.yaml").read_text()
