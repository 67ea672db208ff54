"""How far a study is: a value of its records and the clock, and the view that is drawn of it."""

import dataclasses

import pytest
from rich.console import Console

from tests.tuning import answered, hostile
from tests.tuning.answered import changed, each, until
from tests.tuning.snapshots import check
from tuning.cli import live
from tuning.cli.progress import counted, progress
from tuning.journal.records import Record
from tuning.journal.run import History
from tuning.report import summary
from tuning.search.race import SYSTEM
from tuning.workers.worker import Asked

CARD = {"gpu_sm_frac": 0.93, "power_w": 287.0, "sm_clock_mhz": 1395.0, "throttled": ["power cap", "too hot"]}


@pytest.fixture(scope="module")
def moments(records):
    return [event.at_s for event in History(records).events]


def drawn(found, width):
    """Returns the lines of the view, as a terminal so wide has them."""
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(live.study(found))
    return captured.get().splitlines()


def test_each_stage_has_its_view(records, study):
    own = each(each(answered.run(records), "trial", telemetry=CARD), "window", telemetry=CARD)
    at_s, screens = [event.at_s for event in History(own).events], []
    runs = {4: Asked(), 14: Asked("probe", {"batch_size": 4}), 45: Asked(), 60: Asked(), len(own): Asked()}
    for end, asked in runs.items():
        found = progress(History(own[:end]), study, at_s[end - 1] + 3, asked)
        screens += [*drawn(found, 80), "-" * 80]
    check("live", "\n".join(screens))


def test_the_view_holds_hostile_text_as_text(records, study):
    for end in (20, 45, len(records)):
        text = "\n".join(drawn(progress(History(hostile.run(records)[:end]), study, 50.0), 200))
        assert not {"\x1b", "\x07"} & set(text)


def test_stages_and_counts_never_go_back(records, study, moments):
    before = progress(History(), study, 0.0)
    assert (before.number, before.stages, before.ends_at_s) == (0, 5, 240.0)
    for end in range(1, len(records) + 1):
        found = progress(History(records[:end]), study, moments[end - 1])
        assert found.number >= before.number
        assert found.done >= before.done or found.stage != before.stage
        assert found.planned is None or found.done <= found.planned
        assert found.ends_at_s <= 240.0
        before = found
    assert (before.stage, before.number) == ("export", 5)


@pytest.mark.parametrize(("kind", "name"), [("system", SYSTEM), ("reference", "before"), ("faster", "t007")])
def test_the_pick_that_is_no_trial_is_the_best_too(records, study, kind, name):
    found = progress(History(answered.run(records, kind=kind, best="t007" if kind == "faster" else "")), study, 99.0)
    assert (found.best.name, kind == "reference") == (name, found.faster is None)
    assert ("x your settings" in live.header(found)) == (kind != "reference")


def test_a_best_that_is_before_itself_is_not_compared_with_it(records, study):
    own = until(records, "search")
    found = progress(History(own), study, 80.0)
    assert "x your settings" in live.header(found)
    named = next(r for r in own if r.event == "probe" and r["name"] == "before")
    same = Record(len(own), named.t, "probe", {**named.fields, "config": found.best.config})
    assert "x your settings" not in live.header(progress(History([*own, same]), study, 80.0))


def test_in_the_end_the_best_is_as_fast_as_the_summary_says(records, study):
    first = next(r for r in records if r.event == "window" and r["name"] == "best")
    told = [changed(r, samples_per_s=20 * r["samples_per_s"]) if r is first else r for r in records]
    gain = summary.of_run(History(told)).gain("best", "before")
    assert gain.ratio > 2, "of medians it would be 1.85"
    assert f"best {gain.ratio:.2f}x your settings" in live.header(progress(History(told), study, 99.0))


def test_it_says_why_nothing_runs(records, study):
    search = len(until(records, "search")) + 1
    assert progress(History(), study, 1.0, doing="reading the configuration").doing == "reading the configuration"
    assert progress(History(records[:4]), study, 5.0, Asked("load")).doing == "a process loads torch, data and model"
    assert progress(History(records[:2]), study, 5.0, Asked("kinds")).doing.startswith("comparing a step")
    assert progress(History(records[:search]), study, 40.0).doing == "starting Ray and 2 workers"
    assert progress(History(records[: search + 2]), study, 42.0).doing.startswith("training t000 for ")


def even(records, trials=12, each_s=10.0):
    """Returns the records of a search whose trials take turns, each as long as the others; one slot."""
    found = [dataclasses.replace(changed(records[0], concurrency=1, horizon_samples=100), mono=0.0)]
    found.append(Record(1, records[0].t, "stage", {"stage": "search", "state": "start"}, 0.0))
    for number in range(trials):
        own = {"trial": f"t{number:03d}", "config": {}}
        begun, ended = number * each_s, (number + 1) * each_s
        found.append(Record(2 + 2 * number, records[0].t, "trial_start", own, begun))
        result = {"outcome": "ok", "values": {"accuracy": 0.5}, "samples_per_s": 10.0, "train_s": each_s}
        found.append(Record(3 + 2 * number, records[0].t, "trial", {**own, **result}, ended))
    return found


def limited(study, **search):
    return study.model_copy(update={"search": study.search.model_copy(update=search)})


def test_the_end_is_foreseen_from_what_trials_take(records, study):
    whole, free = even(records), limited(study, max_time_s=None)
    ends = [progress(History(whole[: 2 + 2 * n]), free, 10.0 * n).ends_at_s for n in range(1, 13)]
    assert max(ends) - min(ends) < 1e-6
    assert ends[0] > 120.0, "confirming comes after the last trial"
    assert progress(History(whole[:2]), free, 0.0).ends_at_s is None


def test_the_end_is_never_after_the_time_allowed(records, study):
    end = next(n for n, r in enumerate(records) if r.event == "trial") + 1
    many = progress(History(records[:end]), limited(study, trials="auto"), 30.0)
    assert (many.done, many.planned, many.ends_at_s) == (1, 50, 240.0)
    short = progress(History(even(records)[:8]), limited(study, max_time_s=60.0), 30.0)
    assert (short.allowed_s, short.ends_at_s) == (60.0, 60.0)
    assert live.clock(short) == "30s of 1m, run ends in about 30s"


def test_what_is_trained_beside_the_search_is_none_of_its_trials(records, study):
    others = [changed(r, beside=True) if r.get("trial") == "t000" else r for r in records]
    whole, less = History(records), History(others)
    end = next(n for n, r in enumerate(records) if (r.get("stage"), r.get("state")) == ("search", "end"))
    during = [counted(History(own[:end]), study)[0] for own in (records, others)]
    assert during[1] == during[0] - 1
    assert summary.of_run(less).trials_done == summary.of_run(whole).trials_done - 1
