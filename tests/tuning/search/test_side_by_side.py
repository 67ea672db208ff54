"""How many times as fast, by trainings on the same seeds and windows in turns: each counts by its seconds."""

from __future__ import annotations

import math

import pytest

from tuning.journal.records import Record
from tuning.journal.run import History
from tuning.search.side_by_side import gain

OURS, THEIRS = {"batch_size": 64, "micro_batch_size": 64}, {"batch_size": 32, "micro_batch_size": 32}


def measured(*of: tuple[str, dict[str, int], int, float, float, float]) -> History:
    """Returns a run of records: event, configuration, seed or round, samples/s, seconds, and when it ended."""
    records = []
    for seq, (event, config, key, per_s, took_s, at_s) in enumerate(of):
        own = {"seed": key, "train_s": took_s} if event == "confirmed" else {"round": key, "spans": {"wall_s": took_s}}
        fields = {"name": "x", "config": config, "outcome": "ok", "samples_per_s": per_s, **own}
        records.append(Record(seq, "2026-11-30T03:00:00.000Z", event, fields, at_s))
    return History(records)


def pair(event: str, key: int, times: float, took_s: float, at_s: float, apart_s: float = 0.0) -> list[tuple]:
    """Returns a measurement of each, the first so many times as fast."""
    return [
        (event, OURS, key, 10.0 * times, took_s, at_s),
        (event, THEIRS, key, 10.0, took_s, at_s + apart_s),
    ]


def ratio(*pairs: list[tuple]) -> float:
    """Returns the gain of these pairs."""
    found = gain(measured(*[one for both in pairs for one in both]), "a", "b", OURS, THEIRS)
    return found.ratio


def test_a_pair_counts_by_its_seconds():
    long_ones = [pair("confirmed", seed, 1.2, 15.0, 100.0 + seed) for seed in (1, 2, 3)]
    short_ones = [pair("window", number, 0.9, 1.0, 200.0 + number) for number in range(3)]
    assert 1.17 < ratio(*long_ones, *short_ones) < 1.2
    assert ratio(*long_ones) == pytest.approx(1.2)
    alike = ratio(pair("confirmed", 1, 1.2, 3.0, 50.0), pair("window", 0, 1.0, 3.0, 90.0))
    assert alike == pytest.approx(math.sqrt(1.2))


def test_a_pair_that_is_far_apart_in_time_counts_less():
    beside = pair("confirmed", 1, 2.0, 30.0, 2000.0)
    found = [ratio(beside, pair("confirmed", 2, 1.0, 30.0, 100.0, apart_s)) for apart_s in (0.0, 60.0, 1800.0)]
    assert found[0] == pytest.approx(math.sqrt(2.0))
    assert found == sorted(found)
    assert found[-1] > 1.9


def test_only_the_same_seed_and_configuration_are_a_pair():
    other = {**THEIRS, "num_workers": 1}
    run = measured(
        ("confirmed", OURS, 1, 10.0, 5.0, 10.0),
        ("confirmed", THEIRS, 2, 10.0, 5.0, 20.0),
        ("confirmed", other, 1, 10.0, 5.0, 30.0),
    )
    assert gain(run, "a", "b", OURS, THEIRS) is None
