"""A study on a cluster of two kinds of device, on nodes that see none of its files."""

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


def test_two_kinds_of_three_nodes_train_and_the_target_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    hidden = [home, *(ROOT / name for name in ("tuning", "trainables", "search_spaces"))] if os.getuid() == 0 else []
    kind = {"cwd": "/", "hide": [str(folder) for folder in hidden]}
    target, other = "kind_b", "kind_a"
    asked = ["search.trials=5", "search.pruner=none", "budget.confirm.seeds=1", "budget.confirm.top=1", "concurrency=1"]
    with Nodes(TOKEN) as nodes:
        nodes.ask(add={"cpus": 0})  # the driver's own, which leads alone
        nodes.ask(add={"cpus": 2, "resources": {"kind_a": 1}, **kind})
        nodes.ask(add={"cpus": 1, "resources": {"kind_b": 1}, "cores": 1, **kind})
        run = begin(home, nodes, monkeypatch, *tiny("workload=mine.py", f"target={target}", *asked))
        assert run.wait(280) == 0, (home / "err").read_text()[-3000:]
    made = home / "runs/mine/one"
    check_files(made)
    records = journal(made)
    ended = of(records, "trial")
    assert {r["trial"] for r in ended} == {f"t{n:03d}" for n in range(5 + BESIDE)}
    assert {r["outcome"] for r in ended} == {"ok"}
    assert len({r["node"] for r in ended}) == 2
    assert {r["kind"] for r in ended} == {target, other}
    elsewhere = [r for r in ended if r["kind"] != target]
    assert all(r["samples_per_s"] and "measured_samples_per_s" not in r for r in elsewhere), "its speed is the target's"
    assert all(r["ran"]["measured_samples_per_s"] and r["ran"]["config"] for r in elsewhere)
    for event in ("footprint", "probe"):
        assert {r["kind"] for r in of(records, event)} == {target}
        assert {r["kind"] for r in of(records, "elsewhere") if r["of"] == event} == {other}
    assert {r["kind"] for e in ("window", "confirmed") for r in of(records, e)} == {target}
    assert of(records, "study")[-1]["target"] == target
    assert yaml.safe_load((made / "best.yaml").read_text())["measured"]["target"] == target
