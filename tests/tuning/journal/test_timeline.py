"""Where the wall clock went: every second once, whatever the clock says."""

import dataclasses
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.journal import timeline
from tuning.journal.records import Record
from tuning.journal.run import History

EPOCH = 1_800_000_000.0
STAGES = ("estimate", "probe", "search", "confirm", "export")


def at(second, event, **fields):
    stamp = datetime.fromtimestamp(EPOCH + second, UTC).isoformat(timespec="milliseconds")
    return Record(int(second * 1000), stamp, event, fields)


def stage(second, name, state="start"):
    return at(second, "stage", stage=name, state=state)


def times(records):
    return timeline.times(History(records).events)


@pytest.mark.parametrize(
    ("records", "wall_s", "stages"),
    [
        ([], 0, {}),
        ([at(0, "study", startup_s=8.0), stage(1, "probe"), at(3, "probe")], 11, {"start-up": 9, "probe": 2}),
        (
            [stage(2, "probe"), stage(5, "probe", "end"), stage(6, "search"), at(9, "trial")],
            9,
            {"probe": 4, "search": 3},
        ),
        (  # time between sessions does not count, and a stage that is begun again goes on
            [
                stage(0, "search"),
                at(5, "trial"),
                at(1005, "resume", startup_s=2.0),
                stage(1006, "search"),
                at(1010, "trial"),
            ],
            12,
            {"search": 9, "start-up": 3},
        ),
    ],
)
def test_each_second_has_its_stage(records, wall_s, stages):
    first = [] if not records or records[0].event == "study" else [at(0, "study")]
    found = times([*first, *records])
    assert found.wall_s == pytest.approx(wall_s)
    assert {"start-up": 0, **found.stages} == pytest.approx({"start-up": 2 * (wall_s == 9), **stages})


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 90), st.sampled_from(STAGES)), max_size=8), st.booleans())
def test_the_stages_add_up_to_the_whole(begun, resumed):
    records = [*(stage(second, name) for second, name in begun), *[at(50, "resume", startup_s=9.0)] * resumed]
    found = times([at(0, "study"), *sorted(records, key=lambda r: r.seq), stage(100, "export", "end")])
    assert sum(found.stages.values()) == pytest.approx(found.wall_s)


def as_recorded(records, slips):
    """Returns records of one session with `mono`, each stamped by a clock that is wrong by so many seconds."""
    moments = [r.seq / 1000 for r in records]
    slipped = [at(s + slip, r.event, **r.fields) for r, s, slip in zip(records, moments, slips, strict=True)]
    return [dataclasses.replace(r, mono=s) for r, s in zip(slipped, moments, strict=True)]


@given(st.lists(st.sampled_from([-3600.0, -1.0, 0.0, 3600.0]), min_size=6, max_size=6))
def test_a_clock_that_is_set_changes_no_time(slips):
    first = [at(0, "study", startup_s=2.0), stage(3, "probe"), stage(5, "search")]
    second = [at(0, "resume", startup_s=1.0), stage(1, "search"), at(5, "trial", trial="b")]
    found = times([*as_recorded(first, slips[:3]), *as_recorded(second, slips[3:])])
    assert found.stages == pytest.approx({"start-up": 7, "probe": 2, "search": 4})
    assert found.wall_s == pytest.approx(13)


def test_a_damaged_resume_line_still_begins_a_session():
    records = [*as_recorded([at(0, "study"), at(9, "probe", wall_s=9.0)], [0, 0])]
    records += as_recorded([at(3, "probe", wall_s=3.0)], [50_000])
    assert times(records).wall_s == pytest.approx(9)
    assert times([*records, *as_recorded([at(5, "probe", wall_s=2.0)], [50_000])]).wall_s == pytest.approx(11)


def test_the_sample_run_adds_up(records):
    assert times(records).wall_s == pytest.approx(194, abs=1)
