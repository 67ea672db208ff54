"""Trials that try system knobs: what they may change, when they stop, and how what they measured counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from trainables.knobs import Knobs, Scalar, kind_of
from tuning.config.space import Space
from tuning.search.throughput import Probed, Rates, coupling_of
from tuning.search.tries import IDLE, PLAIN, SETTLED, Tries

SPACE = Space.of(
    {
        "learning_rate": {"low": 1e-4, "high": 1e-1, "log": True},
        "amp_dtype": ["fp32", "bf16"],
        "batch_size": 64,
        "micro_batch_size": [16, 32, 64],
        "num_workers": [0, 1, 2],
        "ram_cache": [False, True],
        "fused_optimizer": [False, True],
    }
)
BASE: dict[str, Scalar] = {"micro_batch_size": 16, "num_workers": 0, "ram_cache": False, "fused_optimizer": False}


def micro_step_s(knobs: Mapping[str, Scalar]) -> float:
    """A micro-step costs 4 ms and a tenth of one a sample; a worker saves 0.5 ms, the cache 1 ms."""
    own = Knobs.of(knobs)
    seconds = 0.004 + 0.0001 * own.micro_batch_size - 0.0005 * own.num_workers - 0.001 * own.ram_cache
    return seconds * (1.5 if own.amp_dtype == "bf16" else 1.0)


def true_rate(knobs: Mapping[str, Scalar]) -> float:
    """Samples a second at batches of 64."""
    return Probed(knobs, micro_step_s(knobs), 0.001, 0.0).at_batch_size(64) or 0.0


def whole(**knobs: Scalar) -> dict[str, Scalar]:
    """A configuration of the space."""
    return SPACE.complete({"learning_rate": 0.01, "amp_dtype": "fp32", **BASE, **knobs})


class Search:
    """Rates and tries over two probes a coupling, and trials that measure `ratios` times less than probes say."""

    def __init__(
        self,
        frac: float = 1.0,
        ratios: Sequence[float] = (1.0,) * PLAIN,
        held: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        knobs = [whole(amp_dtype=dtype, num_workers=n) for dtype in ("fp32", "bf16") for n in (0, 1)]
        self.rates = Rates([Probed(k, micro_step_s(k), 0.001, true_rate(k)) for k in knobs], SPACE)
        by_coupling = {coupling_of(whole(amp_dtype=dtype)): names for dtype, names in (held or {}).items()}
        self.tries = Tries(SPACE, self.rates, frac, 0, by_coupling, [])
        self.made: list[dict[str, Scalar]] = []
        for number, ratio in enumerate(ratios):
            self.run(whole(), ratio, trial=f"p{number}")

    def run(self, knobs: Mapping[str, Scalar], slower: float = 1.0, *, tries: bool = False, trial: str = "") -> bool:
        """Trains, and returns whether others would be faster with its knobs."""
        self.tries.begun(trial or f"t{len(self.made)}", knobs, tries=tries)
        if self.tries.is_try(knobs):
            return self.tries.learn(knobs, true_rate(knobs) / slower)
        self.rates.learn(knobs, true_rate(knobs) / slower)
        return False

    def best(self, **coupling: Scalar) -> dict[str, Scalar]:
        """The configuration with the fastest knobs known."""
        found = next(self.rates.ranked(whole(**coupling)), None)
        assert found is not None
        return {**whole(**coupling), **found.system}

    def next(self, **coupling: Scalar) -> dict[str, Scalar] | None:
        """What the next trial tries."""
        found = self.tries.vary(self.best(**coupling), lambda knobs: Knobs.of(knobs).micro_batch_size < 64)
        self.made += [found] if found else []
        return found


def work(search: Search, **coupling: Scalar) -> None:
    """Trains until nothing is worth a try."""
    for _ in range(60):
        tried = search.next(**coupling)
        if tried is None:
            return
        search.run(tried, tries=True)


def test_a_try_changes_system_knobs_alone_to_what_nobody_measured_and_what_fits() -> None:
    search = Search()
    work(search, amp_dtype="bf16")
    assert search.made
    for tried in search.made:
        changed = {n for n, v in tried.items() if v != whole(amp_dtype="bf16").get(n)}
        assert changed
        assert {kind_of(n) for n in changed} == {"system"}
        assert tried["micro_batch_size"] != 64
    assert len({tuple(sorted(t.items())) for t in search.made}) == len(search.made)


def test_tries_find_faster_knobs_than_the_probes_did_and_end() -> None:
    search = Search()
    before = true_rate(search.best())
    work(search)
    assert search.next() is None
    assert true_rate(search.best()) > 1.5 * before
    assert (search.best()["micro_batch_size"], search.best()["ram_cache"]) == (32, True)
    assert search.best(amp_dtype="bf16")["ram_cache"] is False  # of the other coupling nothing was tried


def test_before_tries_end_every_single_change_that_may_be_as_fast_was_tried() -> None:
    search = Search()
    work(search)
    best = search.best()
    for name in ("num_workers", "ram_cache", "fused_optimizer"):
        for value in (0, 1, 2) if name == "num_workers" else (False, True):
            assert search.rates.of({**best, name: value}) is not None, (name, value)


def test_what_one_change_did_beside_others_is_expected_of_it_here() -> None:
    """In fp32 the cache and the workers were found to be fast; in bf16 the first tries are these."""
    search = Search()
    work(search)
    before = len(search.made)
    for _ in range(2):
        tried = search.next(amp_dtype="bf16")
        assert tried is not None
        search.run(tried, tries=True)
    assert search.best(amp_dtype="bf16")["ram_cache"] is True
    assert len(search.made) == before + 2


def test_what_does_not_fit_is_tried_once_it_does() -> None:
    search = Search()
    work(search)
    assert search.next() is None
    tried = search.tries.vary(search.best(), lambda knobs: True)
    assert tried is not None
    assert tried["micro_batch_size"] == 64


def test_a_batch_size_without_a_try_leaves_the_others_theirs() -> None:
    search = Search()
    smaller = {**search.best(), "batch_size": 32}
    while (tried := search.tries.vary(smaller, lambda knobs: True)) is not None:
        search.tries.begun(f"t{len(search.made)}", tried, tries=True)  # and ends without a speed
    found = search.tries.vary(search.best(), lambda knobs: True)
    assert found is not None
    assert found["micro_batch_size"] == 64


@pytest.mark.parametrize("frac", [0.0, 0.25])
def test_no_more_than_their_share_of_the_trials_are_tries(frac: float) -> None:
    search = Search(frac)
    for number in range(40):
        tried = search.next()
        search.run(tried or search.best(), tries=tried is not None, trial=f"t{number}")
    assert len(search.made) <= frac * (40 + PLAIN) + 1
    assert bool(search.made) == (frac > 0)


def test_before_trials_of_probed_knobs_have_ended_there_is_nothing_to_compare_with() -> None:
    assert Search(ratios=(1.0,) * (PLAIN - 1)).next() is None


def test_what_neighbours_and_evaluations_cost_every_trial_is_taken_out() -> None:
    search = Search(ratios=(2.0,) * PLAIN)
    tried = search.next()
    assert tried is not None
    search.tries.begun("t0", tried, tries=True)
    assert search.tries.rate_of(tried, true_rate(tried) / 2.0) == pytest.approx(true_rate(tried))


def test_luck_within_what_trials_deviate_by_makes_nothing_the_fastest() -> None:
    search = Search(ratios=(0.8, 1.0, 1.25))
    tried = {**whole(), "fused_optimizer": True}  # as fast as the best but one
    search.tries.begun("t0", tried, tries=True)
    lucky = 1.2 * true_rate(search.best())
    assert not search.tries.learn(tried, lucky)
    assert search.best()["fused_optimizer"] is False
    for _ in range(15):  # what is seen again and again is no luck
        search.tries.learn(tried, lucky)
    assert search.best()["fused_optimizer"] is True


def test_a_coupling_in_which_nothing_is_faster_is_let_be() -> None:
    search = Search()
    for _ in range(3 * IDLE):
        tried = search.next()
        if tried is None:
            break
        search.tries.begun(f"t{len(search.made)}", tried, tries=True)
        search.tries.learn(tried, true_rate(tried) / 50)
    assert len(search.made) <= IDLE


def test_knobs_that_a_verdict_held_are_not_tried() -> None:
    search = Search(held={"fp32": ["ram_cache", "fused_optimizer"]})
    work(search)
    assert search.made
    assert all(t["ram_cache"] is False and t["fused_optimizer"] is False for t in search.made)


def test_after_a_few_trials_a_place_counts_as_probed_and_tells_the_pace_of_the_machine() -> None:
    search = Search(ratios=(1.5,) * PLAIN)  # a busy neighbour, which leaves
    tried = search.next()
    assert tried is not None
    for number in range(SETTLED):
        search.tries.begun(f"t{number}", tried, tries=number == 0)
        assert search.tries.is_open(tried)
        search.tries.learn(tried, true_rate(tried) / 1.5)
    assert not search.tries.is_open(tried)
    before = len(search.rates.plain)
    search.rates.learn(tried, true_rate(tried))
    assert len(search.rates.plain) == before + 1
    assert search.rates.plain[-1] == pytest.approx(1.0, rel=0.02)


def test_a_trial_with_a_phase_tries_nothing_and_tells_nothing_of_what_was_tried() -> None:
    search = Search()
    assert search.tries.vary({**whole(), "encoder_frac": 0.5}, lambda knobs: True) is None
    tried = search.next()
    assert tried is not None
    search.tries.begun("t0", tried, tries=True)
    assert search.tries.is_open(tried)
    assert not search.tries.is_open({**tried, "encoder_frac": 0.5})


def test_tries_that_fail_end_them_in_their_coupling() -> None:
    search = Search()
    tried = search.next()
    assert tried is not None
    search.tries.begun("t0", tried, tries=True)
    for _ in range(IDLE - 1):
        search.tries.failed(tried)
    assert search.next() is not None
    search.tries.failed(tried)
    assert search.next() is None
