"""A run is folded once: cut anywhere it says what the records so far say, whoever wrote them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.tuning import answered, hostile
from tuning.journal.events import EVENTS, Event, read_event
from tuning.journal.records import Record, read
from tuning.journal.run import QUEUED, REFUSED, RUNNING, History

SAMPLE = read(Path(__file__).parents[2] / "data" / "sample_run" / "trials.jsonl")[0]
JUNK: list[Any] = [None, "nonsense", [], {"accuracy": "high"}, float("nan"), True, [[None]]]


def made(*events: tuple[str, dict[str, Any]]) -> History:
    return History(Record(n, "", event, fields) for n, (event, fields) in enumerate(events))


def start(trial: str, size: int = 8, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "trial_start", {"trial": trial, "config": {"batch_size": size}, "attempt": 1, **fields}


def ended(trial: str, outcome: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "trial", {"trial": trial, "config": {"batch_size": 8}, "outcome": outcome, **fields}


def contents(run: History) -> dict[str, Any]:
    """Returns all that a run knows, in plain values that can be compared."""
    kept = {name: value for name, value in vars(run).items() if not name.startswith("_")}
    return {**kept, "unfinished": run.unfinished, "ended": run.ended, "since": run.since(), "reference": run.reference}


@pytest.mark.parametrize("records", [SAMPLE, answered.run(SAMPLE)], ids=["earlier", "today"])
def test_run_cut_anywhere_is_the_one_followed_so_far(records):
    followed, whole = History(), History(records)
    for number, record in enumerate(records):
        followed.add(record)
        assert contents(followed) == contents(History(records[: number + 1]))
        assert contents(followed) == contents(whole.before(record.seq + 1))
    assert contents(followed) == contents(whole)
    assert (whole.is_finished, len(whole.ended), whole.unfinished) == (True, 11, [])


@pytest.mark.parametrize("name", EVENTS)
def test_event_is_read_from_a_line_of_nothing_or_junk(name):
    names = [field.name for field in dataclasses.fields(EVENTS[name])]
    for junk in JUNK:
        event = read_event(Record(3, "2027-01-01T00:00:00Z", name, dict.fromkeys(names, junk)), 1.5)
        assert (type(event), event.seq, event.at_s) == (EVENTS[name], 3, 1.5)
    assert read_event(Record(0, "", name, {}), 0.0).event == name


def test_event_of_another_version_has_its_place_alone():
    assert made(("sneeze", {"loud": True})).events == [Event(0, "", 0.0)]


def test_strangers_text_changes_no_count():
    run, odd = History(SAMPLE), History(hostile.run(SAMPLE))
    assert [t.outcome for t in run.ended] == [t.outcome for t in odd.ended]


def test_a_trial_counts_once_with_its_latest_ending():
    rate = {"samples_per_s": 3.0}
    run = made(ended("t0", "killed", **rate), ended("t1", "ok", **rate), ended("t0", "oom", message=None))
    assert [(t.trial, t.outcome, t.samples_per_s, t.message) for t in run.ended] == [
        ("t0", "oom", None, ""),
        ("t1", "ok", 3.0, ""),
    ]


MORE = ("resume", {"search": {"max_time": 480.0}})
CUT, LATE = ended("t0", "cut"), ended("t0", "stopped", stopped_at=0)  # no time was left to begin again
GONE = ("refused", {"trial": "t0", "stage": "search", "config": {}})


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([start("t0")], RUNNING),
        ([start("t0"), CUT], "cut"),
        ([start("t0"), CUT, ("resume", {})], "cut"),
        ([start("t0"), CUT, MORE], QUEUED),
        ([start("t0"), CUT, MORE, start("t0")], RUNNING),
        ([start("t0"), CUT, MORE, start("t0"), MORE], RUNNING),
        ([start("t0"), CUT, MORE, start("t0"), CUT], "cut"),
        ([start("t0"), CUT, MORE, start("t0"), ended("t0", "ok"), MORE], "ok"),
        ([start("t0"), ("resume", {}), LATE], "stopped"),
        ([start("t0"), ("resume", {}), LATE, MORE], QUEUED),
        ([start("t0"), CUT, MORE, GONE], REFUSED),
        ([start("t0"), CUT, MORE, GONE, MORE], REFUSED),
    ],
)
def test_state_of_a_trial(events, state):
    run = made(*events)
    assert run.trials["t0"].state == state
    assert [trial.id for trial in run.unfinished] == ["t0"] * (state in (QUEUED, RUNNING))


def test_unfinished_are_in_order_and_once():
    run = made(start("t2", 1), start("t0", 2), start("t1", 3), ended("t0", "ok"), start("t2", 1))
    assert [(t.id, t.config) for t in run.unfinished] == [("t2", {"batch_size": 1}), ("t1", {"batch_size": 3})]


def test_study_given_more_is_not_finished_and_has_its_probes():
    stages = ("probe", "search", "confirm", "export")
    ends = [("stage", {"stage": stage, "state": "end"}) for stage in stages]
    window = ("window", {"name": "best", "round": 0, "samples_per_s": 1.0})
    stop = ("stop", {"reason": "finished", "resumable": False})
    first = [*ends, window, stop]
    assert made(*first).is_finished
    assert made(*first, ("resume", {})).is_finished
    again = made(*first, ("resume", {"search": {"trials": 20}}), ("resume", {}))
    assert not again.is_finished
    assert [again.is_done(stage) for stage in stages] == [True, *[False] * 3]
    assert len(again.windows) == 1
    more = [*first, ("resume", {"search": {"trials": 20}}), window, window, *ends]
    assert made(*more).is_finished
    assert len(made(*more).windows) == 2
    assert len(made(*more, ("resume", {"pick": {"tolerance": 0.1}})).windows) == 2, "no other session's"
