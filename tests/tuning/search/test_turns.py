"""Who takes turns where nothing is trained, and which of them is the pick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainables.knobs import Scalar
from trainables.our_knobs import EVERY
from tuning.config.space import Space
from tuning.journal.records import Record
from tuning.journal.run import History
from tuning.memory.guard import MemoryGuard
from tuning.search.turns import alike, last_candidates, least_changed

SPACE = Space.parse(
    {"num_workers": [0, 1, 2], "ram_cache": [False, True], "micro_batch_size": 16, "batch_size": 16}, EVERY
)
TODAY: dict[str, Scalar] = {"batch_size": 16, "micro_batch_size": 16, "num_workers": 0, "ram_cache": False}
TURNS = {"best": {**TODAY, "num_workers": 2, "ram_cache": True}, "best 2": {**TODAY, "num_workers": 2}, "before": TODAY}


def rounds(rates: Mapping[str, Sequence[float]]) -> History:
    """Returns windows of these samples a second, round by round."""
    found = [(n, number, rate) for n, own in rates.items() for number, rate in enumerate(own)]
    whole = [{"name": n, "round": number, "config": TURNS[n], "samples_per_s": rate} for n, number, rate in found]
    return History(Record(seq, "", "window", fields) for seq, fields in enumerate(whole))


@pytest.mark.parametrize(
    ("rates", "picked", "times"),
    [
        ({"best": [200, 210, 190], "best 2": [150, 157, 142], "before": [100, 105, 95]}, "best", 1.0),
        ({"best": [200, 210, 190], "best 2": [196, 214, 188], "before": [100, 105, 95]}, "best 2", 0.99),  # noise
        ({"best": [100, 105, 95], "best 2": [150, 157, 142], "before": [102, 104, 97]}, "best 2", 1.5),  # luck
        ({"best": [100, 105, 95], "best 2": [97, 107, 93], "before": [99, 106, 94]}, "before", 0.99),
        ({"best": [200, 100, 300], "best 2": [190, 90, 290], "before": [100, 200, 150]}, "best", 1.0),  # noisy rounds
        ({"best 2": [150, 157, 142], "before": [100, 105, 95]}, "best 2", 1.0),  # the fastest probe failed
        ({"best": [200], "best 2": [199], "before": [150]}, "best", 1.0),  # one round tells nothing
        ({}, "best", 1.0),
    ],
)
def test_fastest_in_turns_is_picked_or_the_least_changed(
    rates: Mapping[str, Sequence[float]], picked: str, times: float
) -> None:
    found = least_changed(rounds(rates), TURNS, TURNS, TODAY)
    assert found[0] == picked
    assert found[1] == pytest.approx(times, abs=0.01)


@given(st.dictionaries(st.sampled_from(sorted(TURNS)), st.lists(st.floats(1.0, 9.0), min_size=5, max_size=5)))
def test_nothing_is_picked_that_is_slower_in_every_round(rates: Mapping[str, Sequence[float]]) -> None:
    picked, _ = least_changed(rounds(rates), TURNS, TURNS, TODAY)
    if "before" in rates and picked in rates:
        assert any(own >= other for own, other in zip(rates[picked], rates["before"], strict=True))


def test_next_best_probes_take_turns_while_the_time_lasts() -> None:
    seconds = {(2, True): 0.010, (1, True): 0.011, (2, False): 0.012, (0, True): 0.0125, (0, False): 0.02}
    steps = {"outcome": "ok", "optimizer_step_s": 0.0, "samples_per_s": 1.0}
    configs = {key: {**TODAY, "num_workers": key[0], "ram_cache": key[1]} for key in seconds}
    probes = [{**steps, "config": configs[key], "micro_step_s": step_s} for key, step_s in seconds.items()]
    run = History(Record(0, "", "probe", fields) for fields in probes)
    guard, named = MemoryGuard(None, {}, EVERY), {"before": TODAY, "other": {**TODAY, "learning_rate": 0.5}}
    best = configs[2, True]
    found = last_candidates(run, SPACE, guard, best, named, 6)
    assert list(found) == ["best", "before", "other", "best 2", "best 3", "best 4"], "the rest is far behind"
    assert [found[f"best {n}"]["num_workers"] for n in (2, 3, 4)] == [1, 2, 0]
    assert list(last_candidates(run, SPACE, guard, best, named, 1)) == ["best", "before", "other", "best 2"]
    assert alike(SPACE, best, {**named, "outside": {**TODAY, "num_workers": 3}}) == ["before"]
    assert len(last_candidates(run, SPACE, guard, best, {"before": configs[1, True]}, 6)) == 4, "it has its turn"
    elsewhere: dict[str, Scalar] = {**configs[1, True], "learning_rate": 0.5}
    assert len(last_candidates(run, SPACE, guard, best, {"before": elsewhere}, 6)) == 5, "what it learns is not ours"
