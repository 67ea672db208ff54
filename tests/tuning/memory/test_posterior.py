"""The posterior: a probability that is monotone, learns what is true, and is right as often as it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.memory.posterior import PRIORS, Posterior, Predicted, Prior

MB = 10**6
GROUPS = ("a", "b")
sizes = st.integers(1, 10**10)
predictions = st.builds(Predicted, sizes, st.integers(0, 10**10))
events = st.lists(
    st.tuples(st.sampled_from(["peak", "above", "below"]), st.sampled_from(GROUPS), predictions, sizes), max_size=6
)
priors = st.sampled_from(sorted(PRIORS))


def learned(source: str, history: list[tuple[str, str, Predicted, int]]) -> Posterior:
    posterior = Posterior(PRIORS[source])
    for kind, group, predicted, size in history:
        getattr(posterior, f"observe_{kind}")(group, predicted, size)
    return posterior


@settings(max_examples=25, deadline=None)
@given(priors, events, predictions, sizes, st.floats(1.0, 4.0), st.floats(1.0, 4.0))
def test_p_oom_never_falls_with_the_prediction_and_never_rises_with_the_cap(
    source: str, history: list[tuple[str, str, Predicted, int]], one: Predicted, cap: int, more: float, larger: float
) -> None:
    posterior = learned(source, history)
    p = posterior.p_oom("a", one, cap)
    assert 0.0 <= p <= 1.0
    assert posterior.p_oom("a", Predicted(one.base_bytes * more, one.batch_bytes), cap) >= p - 1e-9
    assert posterior.p_oom("a", Predicted(one.base_bytes, one.batch_bytes * more), cap) >= p - 1e-9
    assert posterior.p_oom("a", one, cap * larger) <= p + 1e-9


@settings(max_examples=30, deadline=None)
@given(priors, events)
def test_the_order_of_observations_does_not_matter(source: str, history: list[tuple[str, str, Predicted, int]]) -> None:
    one = Predicted(50 * MB, 50 * MB)
    there, back = learned(source, history), learned(source, history[::-1])
    assert there.p_oom("a", one, 100 * MB) == pytest.approx(back.p_oom("a", one, 100 * MB), abs=1e-6)


@pytest.mark.parametrize("source", sorted(PRIORS))
def test_an_oom_raises_and_a_fit_lowers_the_probability(source: str) -> None:
    one = Predicted(50 * MB, 50 * MB)
    p = Posterior(PRIORS[source]).p_oom("a", one, 100 * MB)
    assert learned(source, [("above", "a", one, 100 * MB)]).p_oom("a", one, 100 * MB) > p
    assert learned(source, [("below", "a", one, 100 * MB)]).p_oom("a", one, 100 * MB) < p


@settings(max_examples=25, deadline=None)
@given(priors, st.floats(-0.25, 0.4))
def test_one_exact_peak_says_what_the_same_configuration_needs(source: str, off: float) -> None:
    one, peak = Predicted(60 * MB, 40 * MB), 100 * MB * math.exp(off)
    posterior = learned(source, [("peak", "a", one, round(peak))] * 2)
    assert posterior.expected_bytes("a", one) == pytest.approx(peak, rel=0.01 + 0.1 * abs(off))


def test_a_bound_that_is_seen_again_says_nothing_new() -> None:
    one = Predicted(50 * MB, 50 * MB)
    once, often = (learned("measured", [("above", "a", one, 100 * MB)] * n) for n in (1, 10))
    for posterior in (once, often):
        posterior.observe_above("a", one, 90 * MB)
    assert often.p_oom("a", one, 101 * MB) == once.p_oom("a", one, 101 * MB)
    rising = learned("measured", [("above", "a", one, size * MB) for size in (80, 95, 100)])
    assert rising.p_oom("a", one, 101 * MB) == pytest.approx(once.p_oom("a", one, 101 * MB))


@pytest.mark.parametrize(("base_off", "batch_off"), [(1.0, 2.0), (1.05, 1.4), (0.9, 0.95)])
def test_two_peaks_at_two_sizes_extrapolate_to_four_times_the_larger(base_off: float, batch_off: float) -> None:
    def need(batch_bytes: int) -> float:
        return base_off * 50 * MB + batch_off * batch_bytes

    posterior = Posterior(PRIORS["workspaces unseen"])
    for batch_bytes in (10 * MB, 80 * MB):
        posterior.observe_peak("lstm", Predicted(50 * MB, batch_bytes), need(batch_bytes))
    far = Predicted(50 * MB, 320 * MB)
    assert posterior.expected_bytes("lstm", far) == pytest.approx(need(320 * MB), rel=0.06)
    assert posterior.p_oom("lstm", far, 0.8 * need(320 * MB)) > 0.9
    assert posterior.p_oom("lstm", far, 1.2 * need(320 * MB)) < 0.1


def test_what_many_groups_are_off_by_a_new_one_is_believed_to_be_too() -> None:
    one = Predicted(50 * MB, 50 * MB)
    posterior = learned("measured", [("peak", str(n), one, 92 * MB) for n in range(8)])
    alone = Posterior(PRIORS["measured"])
    assert posterior.p_oom("new", one, 96 * MB) < 0.2 < alone.p_oom("new", one, 96 * MB)
    assert posterior.p_oom("0", one, 93.5 * MB) < posterior.p_oom("new", one, 93.5 * MB)


def drawn(prior: Prior, random: np.random.Generator, cap: float) -> tuple[list[float], list[bool]]:
    """Returns probabilities and what came true of one group whose errors are drawn from the prior."""
    mu = prior.mu + prior.mu_scale * np.clip(random.standard_t(3), -20, 20)
    kappa = max(-0.9, prior.kappa + prior.kappa_scale * np.clip(random.standard_t(3), -10, 10))
    sigma = prior.sigma * math.exp(0.7 * random.standard_normal())
    posterior, said, true = Posterior(prior), list[float](), list[bool]()
    for _ in range(8):
        predicted = Predicted(30 * MB, cap * random.uniform(0.3, 1.0))
        grown = predicted.base_bytes + (1 + kappa) * predicted.batch_bytes
        need = math.exp(mu + sigma * random.standard_normal()) * grown
        said.append(posterior.p_oom("a", predicted, cap))
        true.append(need > cap)
        if need > cap:
            posterior.observe_above("a", predicted, cap)
        else:
            posterior.observe_peak("a", predicted, need)
    return said, true


@pytest.mark.parametrize("source", ["traced", "workspaces unseen"])
def test_it_is_right_as_often_as_it_says(source: str) -> None:
    random = np.random.default_rng(7)
    pairs = [drawn(PRIORS[source], random, 100 * MB) for _ in range(50)]
    said = np.array([p for one, _ in pairs for p in one])
    true = np.array([t for _, one in pairs for t in one], dtype=float)
    assert abs(said.mean() - true.mean()) < 0.03
    for low, high in ((0.0, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 1.0)):
        inside = (said >= low) & (said <= high)
        if inside.sum() >= 15:
            error = 3 * math.sqrt(0.25 / inside.sum()) if low else 0.05
            assert abs(said[inside].mean() - true[inside].mean()) < error
    base_rate = true.mean()
    assert np.mean((said - true) ** 2) < 0.6 * base_rate * (1 - base_rate)
