"""What there is to choose from: each with its own trainings and windows, beside today's on the same seeds."""

import dataclasses

import pytest

from tests.tuning import answered
from tuning.journal.run import History
from tuning.report import sentences, summary
from tuning.report.answers import beside
from tuning.search.confirm import OLD_SYSTEM
from tuning.search.race import SYSTEM
from tuning.stats import uncertainty
from tuning.stats.uncertainty import Spread


def of(records, **pick):
    return summary.of_run(History(answered.run(records, **pick)))


def test_an_answer_is_compared_with_today_on_the_same_seeds(answers):
    assert list(answers.answers) == ["best", "best_at_speed", "most_accurate"]
    for name, answer in answers.answers.items():
        one, trial = answers.named[name], answers.named[name].trial
        assert tuple(one.quality["accuracy"].by_seed.values()) == answered.QUALITY[trial]
        assert answer.gain.ratio == pytest.approx(answered.PER_S[trial] / answered.PER_S["before"])
        assert answer.quality.own - answer.quality.reference == answer.quality.difference
        assert (answer.quality.seeds, answer.quality.is_fresh) == (3, True)
        assert len(answer.time.own.by_seed) == 3


@pytest.mark.parametrize(
    ("pick", "kept"),
    [
        ({"best_at_speed": "t007", "most_accurate": "t007"}, ["best"]),
        ({"best_at_speed": "t009"}, ["best", "best_at_speed"]),
        ({"best_at_speed": "", "most_accurate": ""}, ["best"]),
    ],
)
def test_an_answer_that_is_an_earlier_one_is_left_out(records, pick, kept):
    assert list(of(records, **pick).answers) == kept


def test_an_answer_that_is_worse_than_today_is_left_out(records):
    own = answered.run(records)
    worse = answered.each(own, "confirmed", "t009", values={"accuracy": 0.5})
    assert list(summary.of_run(History(worse)).answers) == ["best", "best_at_speed"]


def test_what_was_trained_as_the_reference_is_compared_with(records):
    own = answered.run(records, reference="plain defaults")
    plain = [
        answered.changed(r, name="plain defaults")
        for r in own
        if r.event in ("confirmed", "window") and r["name"] == "before"
    ]
    at = next(n for n, r in enumerate(own) if r.event == "pick")
    found = summary.of_run(History([*own[:at], *plain, *own[at:]]))
    assert (found.reference.name, found.answers["best"].gain.over) == ("plain defaults", "plain defaults")


@pytest.mark.parametrize(("kind", "name"), [("system", SYSTEM), ("reference", "before")])
def test_a_pick_that_is_no_trial_has_its_own_quality(records, kind, name):
    found = of(records, best="", kind=kind)
    assert tuple(found.best.quality["accuracy"].by_seed.values()) == answered.QUALITY[name]
    assert found.best.samples_per_s == pytest.approx(answered.PER_S[name])
    assert "not trained" not in sentences.found_by(found, found.best)
    untrained = [
        r for r in answered.run(records, best="", kind="system") if r.get("name") != SYSTEM or r.event != "confirmed"
    ]
    best = summary.of_run(History(untrained)).best
    assert (best.quality, best.curves) == ({}, {})


def test_a_pick_with_todays_system_knobs_has_its_own_speed(records):
    own = answered.run(records)
    config = {**next(r["config"] for r in own if r.event == "confirmed" and r["name"] == "t007"), "num_workers": 3}
    like = next(r for r in own if r.event == "window" and r["name"] == "t007")
    faster = answered.changed(like, name="t007" + OLD_SYSTEM, config=config, samples_per_s=99.0)
    pick = next(n for n, r in enumerate(own) if r.event == "pick")
    own[pick] = answered.changed(own[pick], config=config)
    found = summary.of_run(History([*own[:pick], faster, *own[pick:]]))
    assert (found.best.trial, found.best.config["num_workers"]) == ("t007", 3)
    assert found.best.samples_per_s == pytest.approx(99.0)
    assert tuple(found.best.quality["accuracy"].by_seed.values()) == answered.QUALITY["t007"]
    own = found.answers["best"].time
    assert own is not None, "what was trained with other system knobs, at the speed of its own windows"
    assert max(own.own.known_s) < min(own.reference.known_s)
    assert {one.name for one in found.given()} == {"before", "after"}


def quality(*values, confirmed=True):
    return {"q": uncertainty.quality(dict(enumerate(values)), confirmed=confirmed)}


@pytest.mark.parametrize(
    ("mine", "theirs", "spread", "verdict"),
    [
        ((0.90, 0.91, 0.90), (0.90, 0.90, 0.91), None, "same"),
        ((0.95, 0.96, 0.95), (0.90, 0.91, 0.90), None, "better"),
        ((0.95, 0.96, 0.95), (0.90, 0.91, 0.90), Spread(0.1, 4), "same"),
        ((0.95,), (0.90,), None, "unknown"),
        ((0.95,), (0.90,), Spread(0.01, 4), "better"),
        ((0.80, 0.95), (0.70, 0.70), Spread(0.01, 9), "better"),
        ((0.91, 0.92), (0.90, 0.91), None, "unknown"),  # the two agree by chance
        ((0.91, 0.92), (0.90, 0.91), Spread(0.0, 1), "unknown"),
        ((0.90,), (0.90,), None, "same"),
    ],
)
def test_better_is_what_differs_by_more_than_seeds_do(found, mine, theirs, spread, verdict):
    one, other = (dataclasses.replace(found.best, quality=quality(*values)) for values in (mine, theirs))
    flipped = {"better": "worse", "worse": "better"}
    assert beside(one, other, ("q", "max"), spread).verdict == verdict
    assert beside(one, other, ("q", "min"), spread).verdict == flipped.get(verdict, verdict)
    assert beside(other, one, ("q", "max"), spread).verdict == flipped.get(verdict, verdict)


def test_fresh_seeds_are_not_paired_with_that_of_the_search(found):
    one = dataclasses.replace(found.best, quality=quality(0.9, 0.8))
    other = dataclasses.replace(found.best, quality=quality(0.7, confirmed=False))
    assert beside(one, other, ("q", "max"), Spread(0.01, 4)).seeds == 0
    assert beside(one, other, ("q", "max"), 0.01).verdict == "unknown"
    assert beside(one, dataclasses.replace(found.best, quality={}), ("q", "max"), None) is None
