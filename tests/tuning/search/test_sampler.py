"""The sampler: no configuration twice, every ending told, the same after a resume."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from trainables.knobs import Scalar
from tuning.config.space import Choice, Range, Space
from tuning.search.history import MODELLED, RUNNING
from tuning.search.sampler import Observation, Proposal, Sampler
from tuning.stats.pareto import Mode

BOTH: dict[str, Mode] = {"samples_per_s": "max", "accuracy": "max"}
ONE: dict[str, Mode] = {"samples_per_s": "max"}
GIB = 2**30
MICRO = (1, 2, 4, 8, 16, 32, 64, 128)
CARD = Space(
    {"micro_batch_size": Choice(MICRO), "learning_rate": Range(1e-5, 1e-1, log=True), "num_workers": Choice((0, 2, 4))},
    {"batch_size": 128},
)
SMALL = Space(
    {
        "prefetch_factor": Choice((2, 4)),
        "num_workers": Choice((0, 2)),
        "micro_batch_size": Choice((4, 8, 16)),
        "batch_size": Choice((4, 8)),
    }
)


def proposed(sampler: Sampler) -> Proposal:
    proposal = sampler.suggest()
    assert proposal is not None
    return proposal


def measured(values: Mapping[str, Scalar]) -> Observation:
    """A card on which a micro-batch of more than 24 does not fit, and speed grows with the micro-batch."""
    micro, rate = float(values["micro_batch_size"]), float(values.get("learning_rate", 1e-3))
    if micro > 24:
        return Observation("oom", {}, overshoot_bytes=round((micro - 24) * GIB))
    accuracy = 0.9 - 0.05 * abs(math.log10(rate / 1e-3))
    return Observation("ok", {"samples_per_s": 100 * micro / (micro + 8), "accuracy": accuracy})


def facts(sampler: Sampler) -> list[tuple[Any, ...]]:
    return [(t.state, t.values, t.params, t.distributions, t.constraints) for t in sampler.trials]


@pytest.mark.parametrize("objectives", [BOTH, ONE], ids=["two", "one"])
def test_the_region_that_does_not_fit_is_entered_less_than_by_chance(objectives: dict[str, Mode]) -> None:
    entered = by_chance = 0
    for seed in range(3):
        sampler, draw = Sampler(CARD, objectives, seed), np.random.default_rng(seed)
        for _ in range(60):
            proposal = proposed(sampler)
            seen = measured(proposal.values)
            entered += seen.outcome == "oom"
            by_chance += bool(draw.choice(MICRO) > 24)
            sampler.observe(proposal.number, seen)
    assert entered < 0.8 * by_chance


def test_a_finite_space_is_proposed_whole_and_nothing_twice() -> None:
    sampler = Sampler(SMALL, ONE, 0)
    seen = []
    while (proposal := sampler.suggest()) is not None:
        seen.append(tuple(sorted(SMALL.complete(proposal.values).items())))
        sampler.observe(proposal.number, Observation("ok", {"samples_per_s": 1.0}))
    # 3 of workers and prefetch, times (4, 4), (8, 4), (8, 8) of batch and micro-batch: larger ones are cut
    assert len(seen) == len(set(seen)) == 9
    assert sampler.suggest() is None


def test_nothing_twice_while_trials_are_under_way() -> None:
    sampler = Sampler(SMALL, BOTH, 1)
    first = [proposed(sampler) for _ in range(9)]
    assert [p.number for p in first] == list(range(9))
    assert len({tuple(sorted(p.values.items())) for p in first}) == 9
    assert sampler.suggest() is None
    assert sampler.trials == ()


def test_a_large_finite_space_does_not_repeat_either() -> None:
    space = Space({"batch_size": Range(1, 30_000, integer=True)})
    sampler = Sampler(space, ONE, 0)
    for _ in range(30):
        proposal = proposed(sampler)
        sampler.observe(proposal.number, Observation("ok", {"samples_per_s": float(proposal.values["batch_size"])}))
    assert len({t.params["batch_size"] for t in sampler.trials}) == 30


def test_a_space_without_parameters_has_one_configuration() -> None:
    sampler = Sampler(Space({}, {"batch_size": 8}), ONE, 0)
    assert proposed(sampler).values == {}
    assert sampler.suggest() is None


def test_proposals_hold_what_will_run() -> None:
    sampler = Sampler(SMALL, ONE, 3)
    for _ in range(9):
        values = proposed(sampler).values
        assert ("prefetch_factor" in values) is (values["num_workers"] != 0)
        assert values["micro_batch_size"] <= values["batch_size"]  # type: ignore[operator]
        assert SMALL.complete(values) == {**SMALL.fixed, **values}


OK = {"samples_per_s": 5.0, "accuracy": 0.5}
ENDINGS = [
    (Observation("ok", {**OK, "other": 9.0}), TrialState.COMPLETE, [5.0, 0.5], -1.0, -1.0),
    (Observation("ok", {**OK, "accuracy": math.nan}), TrialState.PRUNED, None, -1.0, 1.0),
    (Observation("ok", {**OK, "accuracy": math.inf}), TrialState.PRUNED, None, -1.0, 1.0),
    (Observation("ok", {**OK, "accuracy": None}), TrialState.PRUNED, None, -1.0, 1.0),
    (Observation("ok", {"samples_per_s": 5.0}), TrialState.PRUNED, None, -1.0, 1.0),
    (Observation("stopped", OK), TrialState.PRUNED, None, -1.0, -1.0),
    (Observation("oom", {}, 3 * GIB), TrialState.PRUNED, None, 3.0, -1.0),
    (Observation("host_oom", {}, 0), TrialState.PRUNED, None, 1 / GIB, -1.0),
    (Observation("refused", {}, GIB // 2), TrialState.PRUNED, None, 0.5, -1.0),
    *[
        (Observation(outcome, OK), TrialState.PRUNED, None, -1.0, 1.0)
        for outcome in ("diverged", "no_result", "crash", "killed", "data", "shm", "timeout")
    ],
]


@pytest.mark.parametrize(("seen", "state", "values", "memory", "failed"), ENDINGS)
def test_every_ending_is_told(
    seen: Observation, state: TrialState, values: list[float] | None, memory: float, failed: float
) -> None:
    sampler = Sampler(CARD, BOTH, 0)
    sampler.observe(proposed(sampler).number, seen)
    [told] = sampler.trials
    assert (told.state, told.values) == (state, values)
    assert told.constraints == {"memory": memory, "failed": failed}


def test_the_first_observation_stands() -> None:
    sampler = Sampler(CARD, BOTH, 0)
    first, second = proposed(sampler), proposed(sampler)
    sampler.observe(second.number, Observation("ok", OK))
    sampler.observe(second.number, Observation("oom", {}, GIB))
    assert [t.state for t in sampler.trials] == [TrialState.COMPLETE]
    sampler.observe(first.number, Observation("crash"))
    sampler.observe(first.number, Observation("ok", OK))
    assert [t.state for t in sampler.trials] == [TrialState.COMPLETE, TrialState.PRUNED]
    with pytest.raises(KeyError, match="proposal 2 was never made; there are 2"):
        sampler.observe(2, Observation("ok", OK))


@pytest.mark.parametrize("space", [CARD, SMALL], ids=["card", "small"])
def test_a_search_rebuilt_from_the_records_goes_on_as_the_first(space: Space) -> None:
    first, rebuilt = Sampler(space, BOTH, 7), Sampler(space, BOTH, 7)
    for _ in range(9 if space is CARD else 7):
        proposal = proposed(first)
        seen = measured(proposal.values)
        first.observe(proposal.number, seen)
        recorded = space.complete(proposal.values)
        rebuilt.replay({n: v for n, v in recorded.items() if n in space.parameters}, seen)
    assert facts(rebuilt) == facts(first)
    for _ in range(2):
        assert rebuilt.suggest() == first.suggest()


def test_what_was_replayed_is_not_proposed() -> None:
    sampler = Sampler(Space({"num_workers": Choice((0, 2, 4))}), ONE, 0, initial=[{"num_workers": 2}])
    sampler.replay({"num_workers": 2}, Observation("ok", {"samples_per_s": 1.0}))
    assert {proposed(sampler).values["num_workers"] for _ in range(2)} == {0, 4}


def test_a_replayed_value_that_the_space_lacks_is_left_out() -> None:
    sampler = Sampler(CARD, ONE, 0)
    sampler.replay({"num_workers": 8, "learning_rate": 1e-3}, Observation("ok", {"samples_per_s": 1.0}))
    assert [t.params for t in sampler.trials] == [{"learning_rate": 1e-3}]
    assert proposed(sampler).number == 1


def test_initial_proposals_come_first_and_are_filled_up() -> None:
    start: list[dict[str, Scalar]] = [{"num_workers": 2, "micro_batch_size": 4}, {"learning_rate": 1e-3}]
    sampler = Sampler(CARD, BOTH, 0, initial=start)
    first, second = proposed(sampler).values, proposed(sampler).values
    assert (first["num_workers"], first["micro_batch_size"], second["learning_rate"]) == (2, 4, 1e-3)
    assert set(first) == set(second) == set(CARD.parameters)


@pytest.mark.parametrize(
    ("initial", "message"),
    [
        ({"num_workers": 3}, r"initial num_workers=3: not in Choice"),
        ({"learning_rate": 1.0}, r"initial learning_rate=1\.0: not in Range"),
        ({"batch_size": 128}, "initial batch_size=128: not searched; searched are micro_batch_size, learning_rate"),
    ],
)
def test_initial_values_outside_the_space_are_refused(initial: dict[str, Scalar], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(CARD, BOTH, 0, initial=[initial])


def test_optuna_stays_as_it_was_and_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    optuna.logging.set_verbosity(optuna.logging.DEBUG)
    try:
        proposed(Sampler(CARD, BOTH, 0))
        assert optuna.logging.get_verbosity() == optuna.logging.DEBUG
    finally:
        optuna.logging.set_verbosity(optuna.logging.INFO)
    assert capfd.readouterr() == ("", "")


def test_the_seed_decides() -> None:
    a, b, c = (proposed(Sampler(CARD, BOTH, seed)) for seed in (4, 4, 5))
    assert a == b
    assert a != c


def _told(count: int, seed: int = 0) -> tuple[Sampler, list[float]]:
    """Returns a sampler that heard of so many trials, every third stopped, and the qualities of the others."""
    space = Space.of({"learning_rate": {"low": 1e-4, "high": 1.0, "log": True}})
    sampler = Sampler(space, {"loss": "min"}, seed)
    draw, losses = np.random.default_rng(seed), []
    for number in range(count):
        outcome, loss = ("stopped", None) if number % 3 == 0 else ("ok", float(draw.random()))
        losses += [] if loss is None else [loss]
        sampler.replay({"learning_rate": float(10 ** draw.uniform(-4, 0))}, Observation(outcome, {"loss": loss}))
    return sampler, losses


def _modelled(sampler: Sampler) -> list[FrozenTrial]:
    return sampler._history.modelled(sampler._finished, list(sampler._live.values()))


@pytest.mark.parametrize("count", [0, 1, 100, MODELLED])
def test_up_to_the_limit_the_model_is_told_of_every_trial(count: int) -> None:
    sampler, _ = _told(count)
    assert _modelled(sampler) == list(sampler.trials)


@pytest.mark.parametrize("count", [MODELLED + 1, 1500])
def test_beyond_the_limit_it_is_told_of_the_best_the_newest_and_some_of_all(count: int) -> None:
    sampler, losses = _told(count)
    told = _modelled(sampler)
    numbers = [sampler.trials.index(trial) for trial in told]
    assert len(told) == MODELLED
    assert numbers == sorted(set(numbers))
    assert set(sorted(losses)[:40]) <= {trial.value for trial in told if trial.values}
    assert set(range(count - 30, count)) <= set(numbers)
    if count > 1000:  # the sample is of all of the search, not of its end
        assert len([n for n in numbers if n < count // 2]) >= 40


def test_trials_under_way_have_a_part_of_the_model_that_does_not_grow() -> None:
    sampler, _ = _told(400)
    for number in range(300):
        sampler.adopt({"learning_rate": 10 ** -(1 + number / 100)})
    told = _modelled(sampler)
    assert len(told) <= MODELLED
    assert [t.state.name for t in told[-RUNNING:]] == ["RUNNING"] * RUNNING
    assert sampler.suggest() is not None


def test_a_searcher_that_is_told_again_proposes_the_same_after_thousands_of_trials() -> None:
    first, second = _told(1200)[0].suggest(), _told(1200)[0].suggest()
    assert first == second


def test_a_chooser_is_shown_the_models_proposal_first_and_only_what_nobody_proposed() -> None:
    shown: list[list[Mapping[str, Scalar]]] = []

    def last(candidates: Sequence[Mapping[str, Scalar]]) -> int:
        shown.append(list(candidates))
        return len(candidates) - 1

    sampler, plain = Sampler(CARD, BOTH, 3), Sampler(CARD, BOTH, 3)
    seen: list[Mapping[str, Scalar]] = []
    for _ in range(20):
        expected = plain.suggest()
        proposal = sampler.suggest(last)
        assert proposal is not None
        assert expected is not None
        if shown and shown[-1][-1] == proposal.values:
            assert shown[-1][0] == expected.values
        assert proposal.values not in seen
        seen.append(proposal.values)
        sampler.observe(proposal.number, measured(proposal.values))
        plain.observe(expected.number, Observation("refused", {}, 1))
        plain = Sampler(CARD, BOTH, 3)
        for values in seen:
            plain.replay(values, measured(values))
    assert shown, "asked once the model proposes"
    assert all(v not in seen[: len(seen) - len(shown) + n] for n, some in enumerate(shown) for v in some)
    for candidates in shown:
        for values in candidates:
            assert CARD.complete(values)["learning_rate"] in CARD.parameters["learning_rate"]  # type: ignore[operator]
            assert values["micro_batch_size"] in MICRO


def test_what_never_fitted_draws_no_proposals_to_its_place_while_trials_run() -> None:
    space = Space({"learning_rate": Range(1e-5, 1e-1, log=True)})
    sampler = Sampler(space, {"loss": "min"}, seed=0)
    sampler.adopt({"learning_rate": 1e-2})
    for n in range(20):
        sampler.replay({"learning_rate": 2e-5 + n * 1e-7}, Observation("refused", overshoot_bytes=2**30))
    found = [sampler.suggest() for _ in range(20)]
    rates = [float(one.values["learning_rate"]) for one in found if one is not None]
    assert sum(rate > 1e-3 for rate in rates) >= 5  # drawn evenly in the logarithm: 10 to expect
