"""A study on a cluster of two kinds of device: one is tuned for, the other left out; nodes see none of its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tests.commands import ROOT
from tests.golden.outputs import BESIDE, check_files, journal, of, tiny
from tests.golden.test_cluster import TOKEN, begin
from tests.nodes import Nodes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_the_target_is_tuned_for_and_a_node_of_another_kind_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    hidden = [home, *(ROOT / name for name in ("tuning", "trainables", "search_spaces"))] if os.getuid() == 0 else []
    apart = {"cwd": "/", "hide": [str(folder) for folder in hidden]}
    target, other = "kind_b", "kind_a"
    asked = ["search.trials=3", "search.pruner=none", "budget.confirm.seeds=1", "budget.confirm.top=1", "concurrency=1"]
    with Nodes(TOKEN) as nodes:
        nodes.ask(add={"cpus": 0})  # the driver's own, which leads alone
        nodes.ask(add={"cpus": 2, "resources": {other: 1}, **apart})
        nodes.ask(add={"cpus": 1, "resources": {target: 1}, "cores": 1, **apart})
        run = begin(home, nodes, monkeypatch, *tiny("workload=mine.py", f"target={target}", *asked))
        assert run.wait(280) == 0, (home / "err").read_text()[-3000:]
    made = home / "runs/mine/one"
    check_files(made)
    records = journal(made)
    why = {r["kind"]: r["why"] for r in of(records, "node")}
    assert why == {target: "", other: f"it is of another kind, {other}, than the target, {target}"}
    assert f"is left out: {why[other]}" in " ".join((home / "err").read_text().split())
    ended = of(records, "trial")
    assert {r["trial"] for r in ended} == {f"t{n:03d}" for n in range(3 + BESIDE)}
    assert {r["outcome"] for r in ended} == {"ok"}
    (name,) = {r["node"] for r in of(records, "node") if not r["why"]}
    assert {r["node"] for r in ended} == {name}
    assert of(records, "study")[-1]["target"] == target
    assert yaml.safe_load((made / "best.yaml").read_text())["measured"]["target"] == target
