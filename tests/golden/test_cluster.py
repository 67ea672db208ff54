"""A study on a Ray cluster of the user's: nodes of this machine that share nothing with the driver but the token."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.commands import MINE, start, wait_for
from tests.golden.outputs import BESIDE, check_files, journal, of, tiny
from tests.nodes import Nodes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
TOKEN = "0123456789abcdef" * 2
WHERE = """
import os
from pathlib import Path
from beside import NAME

if "SEEN" in os.environ:  # on the nodes alone
    with Path(os.environ["SEEN"]).open("a") as seen:
        seen.write(f"{NAME} {Path(__file__).parent.name} {os.environ['GOMP_SPINCOUNT']}\\n")
"""


def begin(folder: Path, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, *typed: str) -> subprocess.Popen[str]:
    """Returns a study that runs in `folder` with a workload of its own, by the environment of the nodes' user."""
    (folder / "mine.py").write_text(MINE.read_text() + WHERE)
    (folder / "beside.py").write_text("NAME = 'beside'")
    for name, value in nodes.env.items():
        monkeypatch.setenv(name, value)
    return start("tuning.run", [f"cluster={nodes.address}", *typed], folder)


def so_far(folder: Path, event: str) -> list[dict[str, Any]]:
    """Returns the records of an event in a run that goes on."""
    path = folder / "runs/mine/one/trials.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last may be half written yet
    return [r for line in lines if f'"{event}"' in line for r in [json.loads(line)] if r["event"] == event]


def test_a_lost_node_costs_what_ran_on_it_once_and_a_node_that_joins_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Trials of 3 s: Ray hears of a lost node after some 5 s, and the others must not be done by then.
    slow = ["budget.train_epochs=80", "search.trials=5", "search.pruner=none", "search.max_time=30m"]
    asked = tiny("workload=mine.py", "concurrency=1", *slow, "budget.confirm.seeds=1", "budget.confirm.top=1")
    err = tmp_path / "err"
    with Nodes(TOKEN) as nodes:
        nodes.ask(add={"cpus": 0})  # the driver's own
        token = nodes.env["RAY_AUTH_TOKEN"]
        nodes.env["RAY_AUTH_TOKEN"] = token[::-1]
        assert begin(tmp_path, nodes, monkeypatch, *asked).wait(120) == 2
        assert "does not take the token that is here" in err.read_text()
        assert not (tmp_path / "runs").exists()
        nodes.env["RAY_AUTH_TOKEN"] = token
        seen = {"env": {"SEEN": str(tmp_path / "seen")}, "cwd": "/"}
        for _ in range(2):
            nodes.ask(add={"cpus": 1, **seen})
        run = begin(tmp_path, nodes, monkeypatch, *asked)
        assert wait_for(lambda: len({r["node"] for r in so_far(tmp_path, "trial")}) == 2, run, 300), err.read_text()
        nodes.ask(kill=2)
        assert wait_for(lambda: bool(so_far(tmp_path, "lost")), run), err.read_text()[-2000:]
        ended = len(so_far(tmp_path, "trial"))
        assert wait_for(lambda: len(so_far(tmp_path, "trial")) > ended, run), err.read_text()[-2000:]
        nodes.ask(kill=1)
        assert wait_for(lambda: len(so_far(tmp_path, "lost")) == 2, run), err.read_text()[-2000:]
        nodes.ask(add={"cpus": 1, **seen})
        assert run.wait(280) == 0, err.read_text()[-2000:]
        check_files(tmp_path / "runs/mine/one")
        again = begin(tmp_path, nodes, monkeypatch, "resume=one", "search.trials=6")
        assert again.wait(280) == 0, err.read_text()[-2000:]
        alive = nodes.ask()["alive"]
    records = journal(tmp_path / "runs/mine/one")
    assert Counter(r["trial"] for r in of(records, "trial")) == {f"t{n:03d}": 1 for n in range(6 + BESIDE)}
    assert {r["outcome"] for r in of(records, "trial")} == {"ok"}
    assert len({r["node"] for r in of(records, "trial")}) == 3
    assert len(of(records, "lost")) == 2, "one a node; it may be the same trial"
    assert all("was lost; it is run once more on another" in r["reason"] for r in of(records, "lost"))
    assert [r["why"] for r in of(records, "node")] == [""] * 4, (
        "two at first, the new one, and it in the second session"
    )
    said = set((tmp_path / "seen").read_text().splitlines())
    assert said == {"beside shipped_workload 5000"}, "code and settings have travelled"
    assert alive == 2, "the user's nodes live on, but the two that were killed; one has come"
