"""Proposals: nothing slower than the pick of now, and first of all steps in speed from the reference."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.knobs import Scalar
from trainables.our_knobs import EVERY
from tuning.config.choices import Goal
from tuning.config.space import Choice, Range, Space
from tuning.search.proposals import ALIKE_FRAC, FASTER, STEP, STEPS, Candidate, Known, Proposals, Seen
from tuning.search.rule import Rule

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


@pytest.mark.parametrize("seen", [[], [Seen({"batch_size": 16}, 0.0, None)] * STEPS])
def test_reference_without_a_speed_leaves_something_to_try(seen: list[Seen]) -> None:
    known = Known({"batch_size": 16}, 0.0, seen, Rule("accuracy", "max"))
    candidates = [Candidate({"batch_size": size}, float(size)) for size in (16, 32, 64)]
    chosen = Proposals(SPACES["one knob"]).choose(candidates, known)
    assert chosen is not None
    assert chosen[0].samples_per_s > 16, "the slowest is the speed to begin from"


def is_near(space: Space, one: Candidate, known: Known) -> bool:
    """Returns whether all values are those of a training, numbers of a range nearly."""

    def near(name: str, other: Scalar) -> bool:
        parameter = space.parameters[name]
        if isinstance(parameter, Range):
            return abs(parameter.place(float(one.values[name])) - parameter.place(float(other))) <= ALIKE_FRAC
        return one.values[name] == other

    return any(all(near(name, seen.values[name]) for name in space.parameters) for seen in known.seen)


@settings(max_examples=60)
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
    found, floor = proposals.choose(candidates, known), proposals.pick(known).samples_per_s
    assert found == again.choose(candidates, known), "the same arguments give the same answer"
    least_per_s = floor * FASTER if goal == "speed" else 10.0 / FASTER
    if found is None:
        assert all(one.samples_per_s < least_per_s or is_near(space, one, known) for one in candidates)
        return
    assert count < STEPS or not is_near(space, found[0], known)
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
        values = found[0].values
        assert found[0].samples_per_s == 10.0 * STEP
        assert values["learning_rate"] == pytest.approx(1e-3 * rate * math.sqrt(int(values["batch_size"]) / 16))
        assert values["warmup_frac"] == 0.5
