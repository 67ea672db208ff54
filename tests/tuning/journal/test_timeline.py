"""Where the wall clock went: every second once, whatever overlaps."""

import dataclasses
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.journal import timeline
from tuning.journal.records import Record
from tuning.journal.run import History

EPOCH = 1_800_000_000.0


def at(second, event, **fields):
    stamp = datetime.fromtimestamp(EPOCH + second, UTC).isoformat(timespec="milliseconds")
    return Record(int(second * 1000), stamp, event, fields)


def times(records):
    return timeline.times(History(records).events)


def trial(name, first, last, **fields):
    return at(last, "trial", trial=name, **{"train_s": float(last - first), **fields})


@pytest.mark.parametrize(
    ("records", "wanted"),
    [
        ([], {"wall_s": 0}),
        ([trial("a", 2, 10), trial("b", 4, 12)], {"training_s": 10, "waiting_s": 2}),  # side by side they count once
        ([trial("a", 0, 10, train_s=7.5, evaluate_s=2.5)], {"training_s": 7.5, "evaluating_s": 2.5}),
        ([trial("a", 3, 10, setup_s=2.0), trial("b", 8, 12, setup_s=4.0)], {"startup_s": 2}),  # `a` trains meanwhile
        (
            [at(6, "probe", wall_s=5.0), at(10, "window", wall_s=3.0), at(15, "confirmed", train_s=4.0)],
            {"probing_s": 5, "confirming_s": 7, "waiting_s": 3},
        ),
        (  # time between sessions does not count
            [at(5, "probe", wall_s=5.0), at(1005, "resume"), at(1010, "probe", wall_s=5.0)],
            {"wall_s": 10, "probing_s": 10, "waiting_s": 0},
        ),
        ([at(0, "study", startup_s=8.0), at(2, "probe", wall_s=2.0)], {"wall_s": 10, "startup_s": 8}),
    ],
)
def test_each_second_has_its_activity(records, wanted):
    first = [] if not records or records[0].event == "study" else [at(0, "study")]
    found = dataclasses.asdict(times([*first, *records]))
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)


spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=6)


@settings(max_examples=40)
@given(spans, spans)
def test_the_parts_add_up_to_the_whole(trials, probes):
    records = [at(0, "study"), at(80, "stage", stage="export", state="end")]
    records += [trial(f"t{n}", a, a + b) for n, (a, b) in enumerate(trials)]
    records += [at(a + b, "probe", wall_s=float(b)) for a, b in probes]
    found = times([records[0], *sorted(records[1:], key=lambda r: r.seq)])
    parts = found.startup_s + found.probing_s + found.training_s + found.evaluating_s + found.confirming_s
    assert parts + found.waiting_s == pytest.approx(found.wall_s)


def as_recorded(records, slips):
    """Returns records of one session with `mono`, each stamped by a clock that is wrong by so many seconds."""
    moments = [r.seq / 1000 for r in records]
    slipped = [at(s + slip, r.event, **r.fields) for r, s, slip in zip(records, moments, slips, strict=True)]
    return [dataclasses.replace(r, mono=s) for r, s in zip(slipped, moments, strict=True)]


@given(st.lists(st.sampled_from([-3600.0, -1.0, 0.0, 3600.0]), min_size=8, max_size=8))
def test_a_clock_that_is_set_changes_no_time(slips):
    first = [at(0, "study", startup_s=2.0), at(4, "probe", wall_s=4.0), at(5, "trial_start", trial="a")]
    first += [trial("a", 6, 10, train_s=3.0, evaluate_s=1.0)]
    second = [at(0, "resume", startup_s=1.0), at(1, "trial_start", trial="b"), trial("b", 2, 5)]
    second += [at(7, "window", wall_s=2.0)]
    right = times([*as_recorded(first, [0.0] * 4), *as_recorded(second, [0.0] * 4)])
    assert (right.wall_s, right.startup_s, right.training_s) == (pytest.approx(20), pytest.approx(3), pytest.approx(6))
    found = times([*as_recorded(first, slips[:4]), *as_recorded(second, slips[4:])])
    assert found == right


def test_a_damaged_resume_line_still_begins_a_session():
    records = [*as_recorded([at(0, "study"), at(9, "probe", wall_s=9.0)], [0, 0])]
    records += as_recorded([at(3, "probe", wall_s=3.0)], [50_000])
    assert times(records).wall_s == pytest.approx(9)
    assert times([*records, *as_recorded([at(5, "probe", wall_s=2.0)], [50_000])]).wall_s == pytest.approx(11)


def test_the_sample_run_adds_up(records):
    found = times(records)
    assert found.wall_s == pytest.approx(194, abs=1)
    assert found.startup_s + found.waiting_s == pytest.approx(13, abs=1)
