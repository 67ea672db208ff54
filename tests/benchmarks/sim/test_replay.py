"""A real search, run by Ray on two slots, is decided again in the simulator: the same decisions, the same pick."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.sim.replay import Strayed, decisions, replayed
from benchmarks.sim.simulator import VirtualClock, VirtualJournal
from tuning.journal.records import Record, read
from tuning.search.confirm import choose
from tuning.search.rule import Rule

RECORDED = Path(__file__).parents[2] / "data" / "recorded_search" / "trials.jsonl"


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """The recorded search."""
    whole, warnings = read(RECORDED)
    assert not warnings
    return whole


def test_ray_and_the_simulator_decide_the_same(records: list[Record]) -> None:
    rule = Rule("accuracy", "max", 0.01)
    again = replayed(records)
    assert decisions(again) == decisions(records)
    assert len([d for d in decisions(again) if d[0] == "launched"]) == 12
    assert [d for d in decisions(again) if d[0] == "trial" and d[2] == "stopped"]
    assert choose(again, rule) == choose(records, rule)


def test_another_seed_proposes_what_was_not_run(records: list[Record]) -> None:
    config = dict(records[0]["config"])
    other = {**records[0].fields, "config": {**config, "search": {**config["search"], "seed": 5}}}
    with pytest.raises(Strayed, match=r"is proposed with .*; the record has"):
        replayed([dataclasses.replace(records[0], fields=other), *records[1:]])


def test_a_search_that_lost_patience_is_replayed_to_where_it_ended(records: list[Record]) -> None:
    config = dict(records[0]["config"])
    impatient = {**records[0].fields, "config": {**config, "search": {**config["search"], "patience": 1}}}
    again = replayed([dataclasses.replace(records[0], fields=impatient), *records[1:]])
    assert decisions(again) == decisions(records)


def test_other_values_at_a_rung_are_judged_otherwise(records: list[Record]) -> None:
    stopped = next(r["trial"] for r in records if r.event == "trial" and r["outcome"] == "stopped")
    changed = [
        dataclasses.replace(r, fields={**r.fields, "values": {"accuracy": 1.0}})
        if r.event == "rung" and r["trial"] == stopped
        else r
        for r in records
    ]
    with pytest.raises(Strayed, match=f"{stopped} goes on where the recorded trial was stopped"):
        replayed(changed)


def test_without_a_search_there_is_nothing_to_replay() -> None:
    journal = VirtualJournal(VirtualClock())
    with pytest.raises(ValueError, match="hold no search"):
        replayed(journal.records)
