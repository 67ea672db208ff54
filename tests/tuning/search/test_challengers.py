"""Rivals of the pick: who is trained again, and who has the place in the end."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.search import challengers
from tuning.search.challengers import CHANCE, FASTER, Selection, Standing
from tuning.search.rule import Baseline, Rule

SEEDS = (1, 2, 3)


def standing(name: str, rate: float, searched: float, *fresh: float) -> Standing:
    """A trial with its cost in the search, and that of its fresh seeds as far as there are any."""
    return Standing(name, rate, searched, dict(zip(SEEDS, fresh, strict=False)), rate if fresh else None)


def rule(tolerance: float, untrained: float | None = None) -> Rule:
    """The rule over accuracies, `untrained` being a baseline's."""
    return Rule("accuracy", "max", tolerance, None if untrained is None else Baseline("majority class", untrained))


def ruled(*of: Standing, first: str = "a", tolerance: float = 0.01) -> Selection:
    """The selection, which there has to be."""
    found = challengers.settle(of, first, SEEDS, rule(tolerance))
    assert found is not None
    return found


def named(*of: Standing, tolerance: float = 0.01) -> list[str]:
    """Who could take the pick's place, in order."""
    found = challengers.rivals(of, ruled(*of, tolerance=tolerance), SEEDS, rule(tolerance), {one.id: 1.0 for one in of})
    return [rival.id for rival in found]


LUCKY = standing("a", 1600.0, -0.808, -0.784, -0.790, -0.788)
"""A transformer on `temporal`: the best of twelve with the search's seed, and 0.787 with three others."""


def test_a_faster_one_that_one_lucky_seed_shut_out_is_confirmed_and_takes_the_place() -> None:
    lstm = standing("b", 11400.0, -0.779)
    assert named(LUCKY, lstm) == ["b"]
    confirmed = standing("b", 11400.0, -0.779, -0.780, -0.778, -0.781)
    found = ruled(LUCKY, confirmed)
    assert (found.best, found.most_accurate, found.bar_of) == ("b", "a", "a")
    assert found.difference == pytest.approx(0.7873 - 0.7797, abs=1e-3)
    assert found.half_width is not None
    said = found.sentence("a", rule(0.01), 3)
    assert said.startswith("of 2 confirmed on 3 fresh seeds the fastest whose mean accuracy is within 0.01 of the best")
    assert "0.7797 against 0.7873 (a difference of 0.0077 ± 0.0" in said
    assert said.endswith("at 1.14e+04 samples/s; by one seed it was a, which confirmed has 0.7873")


def test_a_rival_that_does_no_better_when_confirmed_leaves_the_pick_where_it_is() -> None:
    found = ruled(LUCKY, standing("b", 11400.0, -0.779, -0.772, -0.770, -0.775))
    assert found.best == "a"
    assert found.difference == 0.0


def test_who_is_slower_or_hopeless_or_done_is_no_rival() -> None:
    slower = standing("b", 1600.0 * (FASTER - 0.01), -0.805)
    hopeless = standing("c", 99_000.0, -0.700)
    done = standing("d", 5000.0, -0.779, -0.76, -0.76, -0.76)
    failed = Standing("e", 99_000.0, -0.80, {1: -0.80}, 99_000.0, failed=True)
    assert named(LUCKY, slower, hopeless, done, failed) == []


def test_a_rival_is_given_up_once_its_seeds_have_spoken() -> None:
    one = standing("b", 11400.0, -0.779, -0.74)
    assert named(LUCKY, standing("b", 11400.0, -0.779)) == ["b"]
    assert named(LUCKY, one) == []


def test_the_largest_gain_a_second_goes_first() -> None:
    likely, quick = standing("b", 1800.0, -0.785), standing("c", 16000.0, -0.779)
    assert named(LUCKY, likely, quick) == ["c", "b"]
    of = (LUCKY, likely, quick)
    slow = challengers.rivals(of, ruled(*of), SEEDS, rule(0.01), {"a": 1.0, "b": 1.0, "c": 100.0})
    assert [rival.id for rival in slow] == ["b", "c"]
    assert slow[0].seconds == 3.0


def test_what_was_not_confirmed_still_holds_the_bar_less_what_the_pick_lost() -> None:
    first = standing("a", 100.0, -0.90, -0.88, -0.88, -0.88)  # it lost 0.02
    slow = standing("b", 10.0, -0.908)
    taken = standing("c", 200.0, -0.86, -0.875, -0.875, -0.875)
    found = ruled(first, slow, taken)
    assert (found.best, found.bar_of, found.most_accurate) == ("a", "b", "b")
    assert found.bar == pytest.approx(-0.888)
    assert ruled(first, taken).best == "c"
    assert "b's one value made worse by the 0.02 that the pick lost" in found.sentence("a", rule(0.01), 3)


def test_a_pick_that_failed_when_trained_again_is_none() -> None:
    assert challengers.settle([Standing("a", 1.0, 0.0, {1: 0.0}, 1.0, failed=True)], "a", SEEDS, rule(0.1)) is None
    assert challengers.settle([standing("a", 1.0, 0.0, 0.0)], "a", SEEDS, rule(0.1)) is None, "one seed of three"


def test_without_noise_and_tolerance_only_what_is_as_good_is_a_rival() -> None:
    first = standing("a", 1.0, 0.5, 0.5, 0.5, 0.5)
    assert named(first, standing("b", 2.0, 0.5), standing("c", 3.0, 0.500001), tolerance=0.0) == ["b"]


Rows = st.lists(
    st.tuples(st.floats(1, 1000), st.floats(0, 1), st.lists(st.floats(0, 1), min_size=3, max_size=3) | st.none()),
    min_size=0,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(Rows, st.floats(0, 0.3))
def test_the_ruling_is_confirmed_and_nothing_confirmed_is_faster_within_the_tolerance(
    rows: list[tuple[float, float, list[float] | None]], tolerance: float
) -> None:
    first = standing("a", 10.0, 0.4, 0.5, 0.45, 0.55)
    others = [standing(f"t{n}", rate, one, *(fresh or ())) for n, (rate, one, fresh) in enumerate(rows)]
    found = ruled(first, *others, tolerance=tolerance)
    done = {one.id: one for one in (first, *others) if one.confirmed(SEEDS)}
    assert set(found.means) == set(done)
    faster = [one for one in done.values() if one.samples_per_s > done[found.best].samples_per_s]
    assert all(one.mean - found.bar > tolerance for one in faster)
    assert found.bar <= min(one.mean for one in done.values())
    every = [first, *others]
    for number, rival in enumerate(
        challengers.rivals(every, found, SEEDS, rule(tolerance), {one.id: 1.0 for one in every})
    ):
        one = next(o for o in others if o.id == rival.id)
        least = min(o.searched for o in others if not o.by_seed)
        assert one.samples_per_s > FASTER * done[found.best].samples_per_s or (
            number == 0 and one.searched < least + 1e-9
        )
        assert not one.by_seed
        assert rival.chance >= CHANCE


def test_over_many_searches_the_rule_put_again_errs_less_than_the_rule_by_one_seed() -> None:
    """Twelve trials of which the true qualities are known: how often is the pick outside the tolerance, how fast is it?

    By one seed the pick is the fastest within the tolerance of the luckiest; put again, it is nearer to what it would
    be if every trial were trained for ever.
    """
    draw, tolerance, noise = random.Random(0), 0.01, 0.008
    before, after = [], []
    for _ in range(300):
        true = {f"t{n}": (draw.gauss(0.2, 0.01), math.exp(draw.gauss(0, 1))) for n in range(12)}
        best = min(cost for cost, _ in true.values())
        right = max(rate for cost, rate in true.values() if cost <= best + tolerance)
        of = {n: Standing(n, rate, cost + draw.gauss(0, noise)) for n, (cost, rate) in true.items()}
        least = min(one.searched for one in of.values())
        first = max((o for o in of.values() if o.searched <= least + tolerance), key=lambda o: o.samples_per_s).id
        _confirm(of, first, true, draw, noise)
        while True:
            found = ruled(*of.values(), first=first, tolerance=tolerance)
            open_ = challengers.rivals(list(of.values()), found, SEEDS, rule(tolerance), dict.fromkeys(of, 1.0))
            if not open_:
                break
            _confirm(of, open_[0].id, true, draw, noise)
        for picks, one in ((before, first), (after, found.best)):
            picks.append(abs(math.log(true[one][1] / right)) + max(0.0, true[one][0] - best - tolerance) / tolerance)
    assert statistics.fmean(after) < 0.9 * statistics.fmean(before)


def _confirm(
    of: dict[str, Standing], one: str, true: dict[str, tuple[float, float]], draw: random.Random, noise: float
) -> None:
    """Gives a trial the values of its fresh seeds."""
    cost, rate = true[one]
    by_seed = {seed: cost + draw.gauss(0, noise) for seed in SEEDS}
    of[one] = Standing(one, rate, of[one].searched, by_seed, rate)


def test_who_may_set_a_bar_that_the_pick_is_not_within_the_tolerance_of_is_trained_first() -> None:
    first = standing("a", 100.0, -0.900, -0.897, -0.899, -0.898)
    accurate, quick = standing("b", 10.0, -0.9095), standing("c", 300.0, -0.893)
    assert named(first, accurate, quick) == ["b", "c"]
    right = standing("b", 10.0, -0.9095, -0.912, -0.911, -0.913)
    found = ruled(first, right, quick)
    assert (found.best, found.bar_of) == ("b", "b")
    flattered = standing("b", 10.0, -0.9095, -0.899, -0.898, -0.900)
    found = ruled(first, flattered, quick)
    assert (found.best, found.bar_of) == ("a", "b")


TEMPORAL = (
    Standing("slow", 1886.8, -0.8077, dict(zip(SEEDS, (-0.784, -0.790, -0.788), strict=True)), 1686.4),
    Standing("lstm", 10914.5, -0.7788, dict(zip(SEEDS, (-0.790, -0.783, -0.779), strict=True)), 11757.0),
    Standing("mlp", 143423.2, -0.7692, dict(zip(SEEDS, (-0.763, -0.763, -0.767), strict=True)), 153345.5),
    Standing("other mlp", 106582.0, -0.7731),
)
"""A search of `temporal`, where the last known label has 0.7754."""


def test_what_learned_no_more_than_a_baseline_does_not_take_the_place_for_its_speed() -> None:
    free, held = rule(0.03), rule(0.03, 0.7754)
    of = TEMPORAL[:3]
    by_tolerance = challengers.settle(of, "lstm", SEEDS, free)
    found = challengers.settle(of, "lstm", SEEDS, held)
    assert by_tolerance is not None
    assert found is not None
    assert (by_tolerance.best, found.best) == ("mlp", "lstm")
    assert "within 0.03 of the best and better than majority class (0.7754): 0.784 against 0.7873" in found.sentence(
        "lstm", held, 3
    )
    assert "better than" not in found.sentence("lstm", free, 3)


def test_one_as_fast_that_may_be_better_than_the_baseline_is_a_rival() -> None:
    held = rule(0.03, 0.7754)
    found = challengers.settle(TEMPORAL, "lstm", SEEDS, held)
    assert found is not None
    (one,) = challengers.rivals(TEMPORAL, found, SEEDS, held, dict.fromkeys([o.id for o in TEMPORAL], 1.0))
    assert one.id == "other mlp"
    assert CHANCE < one.chance < 0.5, "it has 0.7731, and would need 0.7754"


def test_a_pick_that_learned_nothing_when_confirmed_is_held_to_who_may_have() -> None:
    first, better = standing("a", 900.0, -0.780, -0.764, -0.763, -0.765), standing("b", 10.0, -0.800)
    chances = []
    for asked in (rule(0.05), rule(0.05, 0.775)):
        found = challengers.settle([first, better], "a", SEEDS, asked)
        assert found is not None
        assert found.best == "a", "the only one confirmed"
        (rival,) = challengers.rivals([first, better], found, SEEDS, asked, {"a": 1.0, "b": 1.0})
        chances.append(rival.chance)
    assert chances[0] < 0.2
    assert chances[1] > 0.5, "0.784 is to be expected of it"


def test_where_only_one_not_confirmed_may_beat_the_baseline_the_tolerance_decides_alone() -> None:
    of = (standing("a", 900.0, -0.770, -0.770, -0.770, -0.770), standing("b", 9e4, -0.768, -0.768, -0.768, -0.768))
    hoped, asked = standing("c", 10.0, -0.776), rule(0.03, 0.775)
    found = challengers.settle([*of, hoped], "a", SEEDS, asked)
    assert found is not None
    assert (found.best, found.bar_of) == ("b", "c")
    said = found.sentence("a", asked, 3)
    assert "within 0.03 of the best: 0.768 against 0.776 (a difference of 0.002 ± 0), which is c's one value" in said
    assert [one.id for one in challengers.rivals([*of, hoped], found, SEEDS, asked, dict.fromkeys("abc", 1.0))] == ["c"]
