"""How far a study is: a value of its records and the clock, and the view that is drawn of it."""

import dataclasses
from collections import Counter

import pytest
from rich.console import Console

from tests.tuning import answered, hostile
from tuning.cli import live
from tuning.cli.progress import counted, progress, standing
from tuning.config import load
from tuning.journal.records import Record
from tuning.journal.run import History
from tuning.report import summary
from tuning.search.race import SYSTEM
from tuning.search.selection import leader
from tuning.workers.worker import Asked

SIZES = [(40, 12), (80, 24), (100, 30), (200, 50)]


@pytest.fixture(scope="module")
def study():
    return load.load(["workload=nli", "search.trials=12"])


@pytest.fixture(scope="module")
def moments(records):
    return [event.at_s for event in History(records).events]


def drawn(found, width, height):
    """Returns the lines of the view, as a terminal of that size has them."""
    console = Console(width=width, height=height, color_system=None)
    with console.capture() as captured:
        console.print(live.study(found, width, height))
    return captured.get().splitlines()


def test_wherever_a_run_is_its_view_fits_the_terminal(records, study, moments):
    card = {"gpu_sm_frac": 0.93, "power_w": 287.0, "sm_clock_mhz": 1395.0, "throttled": ["power cap", "too hot"]}
    measured = [
        dataclasses.replace(r, fields={**r.fields, "telemetry": card}) if r.event in ("probe", "trial", "window") else r
        for r in records
    ]
    for end in [*range(0, len(records), 3), len(records)]:
        used_s = moments[end - 1] if end else 0.0
        for asked in (Asked(), Asked("probe", {"batch_size": 4}), Asked("load")):
            found = progress(History(measured[:end]), study, used_s, asked)
            for width, height in SIZES:
                lines = drawn(found, width, height)
                assert max(map(len, lines)) <= width
                assert len(lines) < height
    assert any(line.startswith("card 93 % busy, 287 W, 1,395 MHz; throttled: power cap") for line in lines)


@pytest.mark.parametrize(("width", "height"), SIZES[1:])
def test_the_knobs_of_what_runs_are_shown_whole_from_80_columns_on(records, study, width, height):
    end = max(n for n, r in enumerate(records) if r.event == "trial_start") + 1
    own = [
        dataclasses.replace(r, fields={**r.fields, "config": knobs_of(r)}) if "trial" in r.fields else r
        for r in records
    ]
    found = progress(History(own[:end]), study, 90.0)
    lines = drawn(found, width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) < height
    runs = next(row for row in found.rows if row.since_s is not None)
    shown = " ".join(" ".join(lines).split())
    assert all(f"{name}={value}" in shown for name, value in runs.config.items() if name != "learning_rate")
    assert f" {runs.name} " in shown
    assert any(f"{found.best.value:.3f}" in line for line in drawn(found, *SIZES[0])), "knobs alone are cut there"


def knobs_of(record):
    """Returns knobs of a script's own, unlike those of any other trial."""
    number = int(record["trial"][1:])
    names = ("batch_size", "micro_batch_size", "width", "depth", "kernel_size", "heads")
    return {"learning_rate": 0.001 * (1 + number), **dict.fromkeys(names, 10 + number)}


def test_the_view_holds_hostile_text_as_text(records, study):
    for end in (20, 45, len(records)):
        text = "\n".join(drawn(progress(History(hostile.run(records)[:end]), study, 50.0), 200, 50))
        assert "\x1b" not in text
        assert "\x07" not in text


def test_stages_and_counts_never_go_back(records, study, moments):
    before = progress(History(), study, 0.0)
    assert (before.number, before.stages, before.ends_at_s) == (0, 5, 240.0)
    for end in range(1, len(records) + 1):
        found = progress(History(records[:end]), study, moments[end - 1])
        assert found.number >= before.number
        assert found.done >= before.done or found.stage != before.stage
        assert found.planned is None or found.done <= found.planned
        before = found
    assert (before.stage, before.number) == ("export", 5)


def test_every_trial_has_one_row_from_its_start_on_and_those_without_an_end_run(records, study):
    end = next(n for n, r in enumerate(records) if r.event == "trial" and r["trial"] == "t003")
    begun = {r["trial"] for r in records[:end] if r.event == "trial_start"}
    ended = {r["trial"] for r in records[:end] if r.event == "trial"}
    rows = progress(History(records[:end]), study, 60.0).rows
    assert sorted(row.name for row in rows) == sorted(begun)
    assert {row.name for row in rows if row.since_s is not None} == begun - ended
    assert all(row.samples_per_s is None for row in rows if row.state == "oom")


def test_the_best_is_the_one_that_would_be_picked_and_stands_first(records, study):
    own = answered.run(records)
    end = next(n for n, r in enumerate(own) if r.event == "stage" and r["stage"] == "confirm")
    leads = leader(History(own[:end])).trial
    found = progress(History(own[:end]), study, 80.0)
    assert found.best is not None
    assert found.best.name == leads
    assert live.shown(found.rows, 3)[0].name == leads
    assert [row.is_best for row in found.rows].count(True) == 1
    assert next(line for line in drawn(found, 100, 30) if line.startswith("* ")).startswith(f"* {leads} ")
    assert "x before" in live.header(found)


@pytest.mark.parametrize("end", [3, 8, 12, None])
def test_in_confirming_everyone_who_is_trained_again_has_a_row_with_its_seeds(records, study, end):
    own = answered.run(records)
    begins = next(n for n, r in enumerate(own) if (r.event, r.get("stage")) == ("stage", "confirm")) + 1
    shown = own[: begins + end] if end else own
    rows = {row.name: row for row in progress(History(shown), study, 80.0).rows}
    trained = Counter(r["name"] for r in shown if r.event == "confirmed")
    assert all(f"{count} seed" in rows[name].state for name, count in trained.items())
    assert all(rows[name].value is not None for name in trained)


def test_who_trains_on_a_first_fresh_seed_is_shown_at_once(records, study):
    own = answered.run(records)
    begins = next(n for n, r in enumerate(own) if (r.event, r.get("stage")) == ("stage", "confirm")) + 1
    configs = {r["name"]: r["config"] for r in own if r.event == "confirmed"}
    for name, config in configs.items():
        rows = progress(History(own[:begins]), study, 80.0, Asked("advance", config)).rows
        assert [row.name for row in rows if row.since_s is not None] == [name]


@pytest.mark.parametrize(("kind", "name"), [("system", SYSTEM), ("reference", "before"), ("faster", "t007")])
def test_the_pick_that_is_no_trial_is_the_best_too(records, study, kind, name):
    own = answered.run(records, kind=kind, best="t007" if kind == "faster" else "")
    assert progress(History(own), study, 99.0).best.name == name
    assert ("x before" in live.header(progress(History(own), study, 99.0))) == (kind != "reference")


def test_a_best_that_is_before_itself_is_not_compared_with_it(records, study):
    end = next(n for n, r in enumerate(records) if r.event == "stage" and r["stage"] == "search")
    found = progress(History(records[:end]), study, 80.0)
    assert found.best is not None
    assert "x before" in live.header(found)
    named = next(r for r in records[:end] if r.event == "probe" and r["name"] == "before")
    same = Record(end, named.t, "probe", {**named.fields, "config": found.best.config})
    assert "x before" not in live.header(progress(History([*records[:end], same]), study, 80.0))


def test_once_both_took_turns_the_best_is_as_many_times_faster_as_the_summary_says(records, study):
    first = next(r for r in records if r.event == "window" and r["name"] == "best")
    fast = dataclasses.replace(first, fields={**first.fields, "samples_per_s": 20 * first["samples_per_s"]})
    told = [fast if r is first else r for r in records]
    gain = summary.of_run(History(told)).gain("best", "before")
    assert gain.ratio > 3, "of medians it would be 1.85"
    assert f"best {gain.ratio:.2f}x before" in live.header(progress(History(told), study, 99.0))


def test_a_line_of_the_log_knows_the_best_and_the_count_that_the_table_shows(records, study):
    for end in range(len(records) + 1):
        found, table = standing(History(records[:end]), study), progress(History(records[:end]), study, 60.0)
        assert (found.stage, found.done, found.planned) == (table.stage, table.done, table.planned)
        assert found.best == (table.best.config if table.best is not None else None)


def test_what_runs_is_shown_even_where_there_is_room_for_little(records, study):
    end = max(n for n, r in enumerate(records) if r.event == "trial_start") + 1
    found = progress(History(records[:end]), study, 90.0)
    runs = [row.name for row in found.rows if row.since_s is not None]
    assert runs
    assert set(runs) < {row.name for row in live.shown(found.rows, len(runs) + 1)}


def test_it_says_why_nothing_runs(records, study):
    search = next(n for n, r in enumerate(records) if r.event == "stage" and r["stage"] == "search") + 1
    assert progress(History(), study, 1.0, doing="reading the configuration").doing == "reading the configuration"
    assert progress(History(records[:4]), study, 5.0, Asked("load")).doing == "a process loads torch, data and model"
    assert progress(History(records[:2]), study, 5.0, Asked("kinds")).doing.startswith("comparing a step")
    assert progress(History(records[:search]), study, 40.0).doing == "starting Ray and 2 workers"
    assert progress(History(records[: search + 2]), study, 42.0).doing == ""


def test_a_probe_that_runs_is_a_row_with_its_knobs(records, study):
    begun = next(n for n, r in enumerate(records) if r.event == "stage" and r["stage"] == "probe") + 1
    (row,) = progress(History(records[:begun]), study, 9.0, Asked("probe", {"batch_size": 4})).rows
    assert (row.state, dict(row.config)) == ("runs", {"batch_size": 4})


def even(records, study, trials=12, each_s=10.0):
    """Returns the records of a search whose trials take turns, each as long as the others; one slot."""
    fields = {**records[0].fields, "concurrency": 1, "horizon_samples": 100}
    found = [dataclasses.replace(records[0], fields=fields, mono=0.0)]
    found.append(Record(1, records[0].t, "stage", {"stage": "search", "state": "start"}, 0.0))
    for number in range(trials):
        own = {"trial": f"t{number:03d}", "config": {}}
        begun, ended = number * each_s, (number + 1) * each_s
        found.append(Record(2 + 2 * number, records[0].t, "trial_start", own, begun))
        result = {"outcome": "ok", "values": {"accuracy": 0.5}, "samples_per_s": 10.0, "train_s": each_s}
        found.append(Record(3 + 2 * number, records[0].t, "trial", {**own, **result}, ended))
    return found


def test_the_end_is_foreseen_from_what_trials_take(records, study):
    whole = even(records, study)
    free = study.model_copy(update={"search": study.search.model_copy(update={"max_time_s": None})})
    ends = [progress(History(whole[: 2 + 2 * n]), free, 10.0 * n).ends_at_s for n in range(1, 13)]
    assert max(ends) - min(ends) < 1e-6
    assert ends[0] > 120.0  # confirming comes after the last trial
    assert progress(History(whole[:2]), free, 0.0).ends_at_s is None


def test_more_trials_than_there_is_time_for_take_all_of_it(records, study):
    auto = study.model_copy(update={"search": study.search.model_copy(update={"trials": "auto"})})
    end = next(n for n, r in enumerate(records) if r.event == "trial") + 1
    found = progress(History(records[:end]), auto, 30.0)
    assert (found.done, found.planned, found.ends_at_s) == (1, 50, 240.0)


def test_the_end_is_never_after_the_time_allowed(records, study):
    short = study.model_copy(update={"search": study.search.model_copy(update={"max_time_s": 60.0})})
    found = progress(History(even(records, study)[:8]), short, 30.0)
    assert (found.allowed_s, found.ends_at_s) == (60.0, 60.0)
    assert live.clock(found) == "30s of 1m, ends in about 30s"


def test_what_is_trained_beside_the_search_is_none_of_its_trials(records, study):
    found = [r for r in records if r.event in ("trial", "trial_start")]
    others = [dataclasses.replace(r, fields={**r.fields, "beside": r["trial"] == "t000"}) for r in found]
    assert counted(History(others), study, "search")[0] == counted(History(found), study, "search")[0] - 1
    assert summary.of_run(History(others)).trials_done == summary.of_run(History(found)).trials_done - 1


def test_a_study_that_was_given_more_time_counts_what_is_confirmed_since(records, study):
    end = max(n for n, r in enumerate(records) if r.event == "window") + 1
    trained = sum(r.event == "confirmed" for r in records[:end])
    assert counted(History(records[:end]), study, "confirm")[0] > trained
    more = Record(900, records[0].t, "resume", {"search": {"max_time": 480.0}}, 0.0)
    again = Record(901, records[0].t, "stage", {"stage": "confirm", "state": "start"}, 1.0)
    assert counted(History([*records[:end], more]), study, "confirm")[0] == trained
    done, planned = counted(History([*records[:end], more, again]), study, "confirm")
    assert done == trained < planned, "windows are taken anew"
