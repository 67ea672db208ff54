"""The comparison of ways of searching, with a runner whose answers are known; nothing is searched or trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.sampler_scores import PEER, Row, scores, table
from benchmarks.samplers import FIRST_FRESH, WAYS, Experiment, Rows, best_file
from tuning.config.best_file import read as read_best
from tuning.config.load import load

QUALITY = {"fast": 0.90, "good": 0.92, "bad": 0.80, "plain": 0.91}
SPEED = {"fast": 300.0, "good": 200.0, "bad": 900.0, "plain": 100.0}
PICKS = {"flat, tpe": "bad", "probes, tpe": "good", "probes, known": "fast", PEER: "good"}
PLAIN = {"knobs": {"who": "plain"}, "tolerance": 0.05}


class Known:
    """Searches that find what `PICKS` says, trainings at the speed of their machine's hour."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def search(self, workload: str, seed: int, way: str) -> dict[str, Any]:
        """Returns the pick of a way."""
        self.asked.append((workload, seed, way))
        shared = {"ref": workload, "options": {}, "samples": 64, "mode": "max", "baselines": [0.5]}
        return {**shared, "pick": {"who": PICKS[way]}}

    def train(self, found: Row, way: str, knobs: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """Returns a speed that drifts alike for all from turn to turn."""
        self.asked.append((found["ref"], way, seed))
        return {"samples_per_s": SPEED[knobs["who"]] * (seed - FIRST_FRESH + 1), "quality": QUALITY[knobs["who"]]}

    def plain(self, workload: str) -> dict[str, Any]:
        """Returns the plain default."""
        return dict(PLAIN)


def experiment() -> Experiment:
    return Experiment(["signals"], list(PICKS), range(2), 240.0, fresh=2)


def test_each_cell_is_done_once_and_a_session_ends_between_two(tmp_path: Path) -> None:
    path, whole = tmp_path / "out.jsonl", Known()
    countdown = iter([True] * 7 + [False])
    assert not experiment().run(whole, Rows(path), lambda: next(countdown))
    assert len(whole.asked) == 7
    again = Known()
    assert experiment().run(again, Rows(path), lambda: True)
    assert len(again.asked) == 2 * (4 + 2 * 5) - 7, "four searches a seed, five trainings a turn"
    assert not set(again.asked[:4]) & {("signals", 0, way) for way in PICKS}
    idle = Known()
    assert experiment().run(idle, Rows(path), lambda: True)
    assert idle.asked == []
    assert all(seed >= FIRST_FRESH for _, _, seed in (a for a in whole.asked if isinstance(a[2], int)))


def test_the_rule_comes_before_speed_and_drift_of_the_machine_cancels(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "out.jsonl")
    experiment().run(Known(), rows, lambda: True)
    found = scores(rows.all, {"signals": PLAIN})[("signals", 0)]
    assert found["probes, known"].speed == pytest.approx(math.log(3))
    assert found["flat, tpe"].speed == pytest.approx(math.log(9))
    assert not found["flat, tpe"].meets, "0.80 is more than 0.05 below 0.92"
    assert (found["flat, tpe"].worth, found["probes, known"].worth) == (0.0, found["probes, known"].speed)


def test_the_table_names_the_simplest_way_that_is_not_worse_by_two_errors(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "out.jsonl")
    experiment().run(Known(), rows, lambda: True)
    lines = table(scores(rows.all, {"signals": PLAIN}), list(PICKS))
    assert any(x.startswith("| signals | probes, known | 2 | 3.00 (0.00) | 2/2 | 0.9000 |") for x in lines)
    assert lines[-1].endswith("best (probes, known) over 2 blocks: probes, known")
    even = {
        ("w", n): {way: s for way, s in b.items() if way != "probes, known"}
        for n, b in enumerate(scores(rows.all, {"signals": PLAIN}).values())
    }
    assert table(even, ["probes, tpe", PEER])[-1].endswith("probes, tpe"), "the peer is none of ours"


def test_a_pick_is_trained_from_a_file_that_train_takes(tmp_path: Path) -> None:
    found = {"ref": "signals", "options": {"data": None}, "samples": 64}
    (tmp_path / "best.yaml").write_text(yaml.safe_dump(best_file(found, {"batch_size": 16})))
    best = read_best(tmp_path / "best.yaml")
    assert (best.ref, best.samples, best.knobs["batch_size"]) == ("signals", 64, 16)


def test_every_way_is_settings_that_a_study_knows() -> None:
    made = {way: load(["workload=signals", "card=cpu", *overrides]).search for way, overrides in WAYS.items()}
    assert made["shipped"] == made["probes, known"]
