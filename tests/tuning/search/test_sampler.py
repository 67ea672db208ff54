"""The sampler: no configuration twice, every ending told, whichever way it proposes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import optuna
import pytest

from trainables.knobs import Scalar
from trainables.our_knobs import EVERY
from tuning.config.space import Choice, Range, Space
from tuning.search.sampler import NEIGHBOURS, Mode, Observation, Proposal, Sampler, SamplerName

BOTH: dict[str, Mode] = {"samples_per_s": "max", "accuracy": "max"}
ONE: dict[str, Mode] = {"accuracy": "max"}
GIB = 2**30
MICRO = (1, 2, 4, 8, 16, 32, 64, 128)
CARD = Space(
    {"micro_batch_size": Choice(MICRO), "learning_rate": Range(1e-5, 1e-1, log=True), "num_workers": Choice((0, 2, 4))},
    {"batch_size": 128},
    EVERY,
)
SMALL = Space(
    {
        "prefetch_factor": Choice((2, 4)),
        "num_workers": Choice((0, 2)),
        "micro_batch_size": Choice((4, 8, 16)),
        "batch_size": Choice((4, 8)),
    },
    {},
    EVERY,
)
NAMES: tuple[SamplerName, ...] = ("known", "tpe", "random")


def proposed(sampler: Sampler) -> Proposal:
    proposal = sampler.propose()
    assert proposal is not None
    return proposal


def measured(values: Mapping[str, Scalar]) -> Observation:
    """A card on which a micro-batch of more than 24 does not fit, and speed grows with the micro-batch."""
    micro, rate = float(values["micro_batch_size"]), float(values.get("learning_rate", 1e-3))
    if micro > 24:
        return Observation(overshoot_bytes=round((micro - 24) * GIB))
    accuracy = 0.9 - 0.05 * abs(math.log10(rate / 1e-3))
    return Observation({"samples_per_s": 100 * micro / (micro + 8), "accuracy": accuracy})


def test_region_that_does_not_fit_is_entered_less_than_by_chance() -> None:
    entered = by_chance = 0
    for seed in range(2):
        sampler, draw = Sampler(CARD, BOTH, seed, name="tpe"), np.random.default_rng(seed)
        for _ in range(30):
            proposal = proposed(sampler)
            seen = measured(proposal.values)
            entered += seen.overshoot_bytes > 0
            by_chance += bool(draw.choice(MICRO) > 24)
            sampler.observe(proposal.number, seen)
    assert entered < 0.9 * by_chance


@pytest.mark.parametrize("name", NAMES)
def test_a_finite_space_is_proposed_whole_and_nothing_twice(name: SamplerName) -> None:
    sampler = Sampler(SMALL, ONE, 0, name=name)
    seen = []
    while (proposal := sampler.propose()) is not None:
        values = proposal.values
        assert ("prefetch_factor" in values) is (values["num_workers"] != 0)
        assert SMALL.complete(values) == {**SMALL.fixed, **values}, "it holds what will run"
        seen.append(tuple(sorted(values.items())))
        if len(seen) % 2:  # every other one stays under way
            sampler.observe(proposal.number, Observation({"accuracy": 1.0}))
    # 3 of workers and prefetch, times (4, 4), (8, 4), (8, 8) of batch and micro-batch: larger ones are cut
    assert len(seen) == len(set(seen)) == 9


def test_a_space_without_parameters_has_one_configuration() -> None:
    sampler = Sampler(Space({}, {"batch_size": 8}, EVERY), ONE, 0)
    assert proposed(sampler).values == {}
    assert sampler.propose() is None


OK = {"samples_per_s": 5.0, "accuracy": 0.5}


@pytest.mark.parametrize(
    "seen",
    [
        Observation(OK),
        Observation({**OK, "accuracy": math.nan}),
        Observation({**OK, "accuracy": None}),
        Observation({"samples_per_s": 5.0}),
        Observation(),
        Observation(overshoot_bytes=3 * GIB),
        Observation(failed=True),
    ],
)
def test_every_ending_is_taken_first_and_later(seen: Observation) -> None:
    sampler = Sampler(CARD, BOTH, 0)
    for _ in range(2):
        number = proposed(sampler).number
        sampler.observe(number, seen)
        sampler.observe(proposed(sampler).number, Observation(OK))
    with pytest.raises(KeyError):
        sampler.observe(number, Observation(OK))
    assert proposed(sampler).number == 4


def test_candidates_are_new_of_the_space_and_some_near_the_given() -> None:
    sampler, again = Sampler(CARD, ONE, 3), Sampler(CARD, ONE, 3)
    taken = proposed(sampler).values
    again.adopt(taken)
    near: dict[str, Scalar] = {"micro_batch_size": 8, "learning_rate": 1e-4, "num_workers": 2}
    found = sampler.candidates([near])
    assert found == again.candidates([near]), "the same records have the same"
    assert taken not in found
    assert len({tuple(sorted(values.items())) for values in found}) == len(found)
    assert all(values[n] in parameter for values in found for n, parameter in CARD.parameters.items())
    close = [v for v in found if abs(math.log10(float(v["learning_rate"]) / 1e-4)) < 0.8 and v["num_workers"] == 2]
    assert len(close) > 0.4 * NEIGHBOURS
    assert len(Sampler(SMALL, ONE, 0).candidates([])) == 9, "of a small space each once"


def test_a_replayed_value_that_the_space_lacks_is_left_out() -> None:
    sampler = Sampler(CARD, ONE, 0)
    sampler.replay({"num_workers": 8, "learning_rate": 1e-3}, Observation({"accuracy": 1.0}))
    assert proposed(sampler).number == 1


def test_the_initial_design_comes_first_and_is_filled_up() -> None:
    start: list[dict[str, Scalar]] = [{"num_workers": 2, "micro_batch_size": 4}, {"learning_rate": 1e-3}]
    sampler = Sampler(CARD, BOTH, 0, initial=start)
    first, second = proposed(sampler).values, proposed(sampler).values
    assert (first["num_workers"], first["micro_batch_size"], second["learning_rate"]) == (2, 4, 1e-3)
    assert set(first) == set(second) == set(CARD.parameters)


def test_optuna_stays_as_it_was_and_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    optuna.logging.set_verbosity(optuna.logging.DEBUG)
    try:
        proposed(Sampler(CARD, BOTH, 0))
        assert optuna.logging.get_verbosity() == optuna.logging.DEBUG
    finally:
        optuna.logging.set_verbosity(optuna.logging.INFO)
    assert capfd.readouterr() == ("", "")
