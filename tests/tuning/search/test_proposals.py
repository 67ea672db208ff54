"""Proposals: nothing slower than the pick of now, and in a dozen trials near the fastest that is as good as today."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.knobs import Scalar
from trainables.our_knobs import EVERY
from tuning.config.choices import Goal
from tuning.config.space import Choice, Range, Space
from tuning.search.proposals import FASTER, LEAST_WORTH, STEP, STEPS, Candidate, Known, Proposals, Seen
from tuning.search.rule import Rule
from tuning.search.sampler import Sampler

RATE = Range(1e-4, 1e-1, log=True)
PARAMETERS: dict[str, dict[str, Choice | Range]] = {
    "lists": {"hidden_size": Choice((32, 64, 128)), "optimizer": Choice(("adamw", "sgd"))},
    "ranges": {"learning_rate": RATE, "dropout": Range(0.0, 0.9)},
    "one knob": {"batch_size": Choice((16, 32, 64))},
    "texts and flags": {"architecture": Choice(("lstm", "mlp")), "sequence_packing": Choice((False, True))},
    "a rate listed": {"learning_rate": Choice((1e-3, 1e-2)), "batch_size": Choice((16, 64))},
    "batch and rate": {"batch_size": Choice((16, 64, 256)), "learning_rate": RATE, "warmup_frac": Range(0, 1)},
    "a list of one": {"hidden_size": Choice((32,)), "dropout": Range(0.0, 0.9)},
    "nothing": {},
}
SPACES = {name: Space(parameters, {}, EVERY) for name, parameters in PARAMETERS.items()}
OUTSIDE: dict[str, Scalar] = {"batch_size": 24, "learning_rate": 0.5, "hidden_size": 48, "dropout": 0.95}
"""A reference that no space has."""


def drawn(space: Space, luck: random.Random) -> dict[str, Scalar]:
    """Returns a configuration of a space."""
    return {name: parameter.at(luck.random()) for name, parameter in space.parameters.items()}


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(list(SPACES)),
    st.randoms(use_true_random=False),
    st.integers(0, 7),
    st.booleans(),
    st.sampled_from(["speed", "quality"]),
    st.none() | st.floats(-1, 1),
)
def test_nothing_slower_than_the_pick_of_now_is_chosen(
    name: str, luck: random.Random, count: int, is_outside: bool, goal: Goal, least: float | None
) -> None:
    space = SPACES[name]

    def seen() -> Seen:
        gain = luck.choice([None, 0.0, luck.uniform(-1, 1)])
        return Seen(drawn(space, luck), luck.uniform(5, 50), gain, is_running=luck.random() < 0.2)

    reference = {n: v for n, v in OUTSIDE.items() if n in space.parameters} if is_outside else drawn(space, luck)
    rule = Rule("accuracy", "max", at_least=least, goal=goal)
    known = Known(reference, 10.0, [seen() for _ in range(count)], rule, [0.0 if least is None else -least])
    candidates = [Candidate(drawn(space, luck), luck.uniform(1, 100)) for _ in range(30)]
    proposals, again = Proposals(space), Proposals(space)
    found, floor = proposals.choose(candidates, known), proposals.pick_per_s(known)
    assert found == again.choose(candidates, known), "the same arguments give the same answer"
    least_per_s = floor * FASTER if goal == "speed" else 10.0 / FASTER
    if found is None:
        assert all(one.samples_per_s < least_per_s for one in candidates)
        return
    assert found[0] in candidates
    assert found[0].samples_per_s >= least_per_s
    assert not math.isnan(found[1])
    assert found[1] >= 0
    good = [one for one in known.seen if one.gain is not None and not one.is_running]
    assert floor == 10.0 or floor in [one.samples_per_s for one in good]


def test_first_trials_are_steps_in_speed_from_the_reference() -> None:
    space = SPACES["batch and rate"]
    reference: dict[str, Scalar] = {"batch_size": 16, "learning_rate": 1e-3, "warmup_frac": 0.5}
    rates = [1e-3, 2e-3, 4e-3, 8e-3]
    pairs = itertools.product((16, 64), rates, (0.0, 0.5), (1.0, STEP, STEP**3))
    candidates = [
        Candidate({"batch_size": size, "learning_rate": rate, "warmup_frac": frac}, 10.0 * times)
        for size, rate, frac, times in pairs
        if size == 16 or times > 1
    ]
    for begun, rate in enumerate((2.0, 1.0, 4.0)):  # of the reference's, which suits a batch of 16
        seen = [Seen(reference, 10.0, -1.0)] * begun
        found = Proposals(space).choose(candidates, Known(reference, 10.0, seen, Rule("accuracy", "max")))
        assert found is not None
        values = found[0].values
        assert found[0].samples_per_s == 10.0 * STEP
        assert values["learning_rate"] == pytest.approx(1e-3 * rate * math.sqrt(int(values["batch_size"]) / 16))
        assert values["warmup_frac"] == 0.5


Surface = Callable[[Mapping[str, Scalar]], tuple[float, float]]
"""Speed and quality of a configuration."""
SEARCHED = Space(
    {
        "batch_size": Choice((16, 32, 64, 128, 256)),
        "hidden_size": Choice((32, 64, 128)),
        "learning_rate": RATE,
        "dropout": Range(0.0, 0.5),
    },
    {},
    EVERY,
)
TODAY: dict[str, Scalar] = {"batch_size": 32, "hidden_size": 128, "learning_rate": 5e-4, "dropout": 0.1}
"""Its learning rate is too small: what suits it is 2e-3."""


def smooth(values: Mapping[str, Scalar]) -> tuple[float, float]:
    """A larger batch is faster, and from 128 on learns a little worse; so is a smaller model, below 64."""
    size, width = float(values["batch_size"]), float(values["hidden_size"])
    per_s = size / (0.02 + size * width / 128 * 1e-3)
    suits = 2e-3 * math.sqrt(size / 32)
    quality = 0.90 - 0.05 * math.log10(float(values["learning_rate"]) / suits) ** 2
    quality -= 0.012 * max(0.0, math.log2(size / 64)) + 0.03 * (width == 32)
    return per_s, quality - 0.05 * (float(values["dropout"]) - 0.1) ** 2


def searched(surface: Surface, seed: int, trials: int, failing: Callable[[Mapping[str, Scalar]], bool]) -> list[Seen]:
    """Returns the trials of a search over a surface, each with the speed that probes know."""
    luck, rule = random.Random(seed), Rule("accuracy", "max", 0.002)
    sampler, proposals = Sampler(SEARCHED, {"accuracy": "max"}, seed), Proposals(SEARCHED)
    today_per_s, today = surface(TODAY)
    today += luck.gauss(0, 0.001)
    seen: list[Seen] = []
    while len(seen) < trials:
        known = Known(TODAY, today_per_s, seen, rule)
        good = [one.values for one in seen if one.gain is not None and rule.admits(one.gain)]
        found = [Candidate(values, surface(values)[0]) for values in sampler.candidates([TODAY, *good[-3:]])]
        chosen = proposals.choose(found, known)
        if chosen is None or chosen[1] < LEAST_WORTH:
            break
        values = chosen[0].values
        sampler.adopt(values)
        per_s, quality = surface(values)
        gain = None if failing(values) else quality + luck.gauss(0, 0.001) - today
        seen.append(Seen(values, per_s, gain))
    return seen


def fastest(surface: Surface, usable: Sequence[Mapping[str, Scalar]]) -> float:
    """Returns the largest speed of those that are truly as good as today."""
    floor = surface(TODAY)[1] - 0.002
    return max((per_s for per_s, quality in map(surface, usable) if quality >= floor), default=0.0)


def grid() -> list[dict[str, Scalar]]:
    """Returns configurations that are dense enough to hold nearly the best one."""
    rates, drops = [RATE.at(n / 30) for n in range(31)], [0.0, 0.1, 0.2]
    pairs: Any = itertools.product((16, 32, 64, 128, 256), (32, 64, 128), rates, drops)
    return [{"batch_size": a, "hidden_size": b, "learning_rate": c, "dropout": d} for a, b, c, d in pairs]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [1.0, 0.02])
def test_a_dozen_trials_come_near_the_fastest_that_is_as_good(seed: int, most: float) -> None:
    def diverges(values: Mapping[str, Scalar]) -> bool:
        return float(values["learning_rate"]) > most

    found = searched(smooth, seed, 12, diverges)
    best = fastest(smooth, [one.values for one in found if one.gain is not None])
    if any(one.gain is None for one in found):
        assert best >= 1.2 * smooth(TODAY)[0], "what diverges tells nothing of the rest"
    else:
        assert best >= fastest(smooth, grid()) / 1.25


def test_search_of_worse_ones_alone_ends_as_worth_nothing() -> None:
    def worse(values: Mapping[str, Scalar]) -> tuple[float, float]:
        """Whatever is faster than today is worse by far more than the noise."""
        per_s, _ = smooth(values)
        return per_s, 0.90 - 0.2 * max(0.0, math.log(per_s / smooth(TODAY)[0]))

    ended = searched(worse, 0, 40, lambda values: False)
    assert STEPS <= len(ended) < 40
