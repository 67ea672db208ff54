"""Knobs that a workload declares: what they may be, that they travel as data, and that no two workloads mix."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.fakes import Sums
from trainables import Knob
from trainables.knobs import OF_THE_LOOP, Knobs, KnobTable, ReadKnobs
from trainables.our_knobs import OURS
from trainables.resident import Resident
from trainables.workload import Config, WorkloadError, table_of
from trainables.workload_files import load
from tuning.config import yaml_files
from tuning.config.choices import available

OWN = {
    "channels": Knob(32, "both", values=(16, 32, 64), shapes_model=True),
    "momentum_of_mine": Knob(0.9, "learning", low=0.0, high=0.99),
    "mirror": Knob(False, "system"),
    "mode": Knob("plain", "learning", values=("plain", "odd")),
}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Knob(32, "speed", values=(16, 32)), r"kind is 'speed'; allowed: system, learning, both"),
        (lambda: Knob(8, "both", values=(16, 32)), r"the default: expected one of 16, 32, got 8"),
        (lambda: Knob(2.0, "learning", low=0.0, high=1.0), r"the default: expected a number >= 0 and <= 1"),
        (lambda: Knob(0.5, "learning", low=1.0, high=0.0), r"low=1.0 is greater than high=0.0"),
        (lambda: Knob(1, "learning", values=(1, 2), high=8), r"values, low and high are given"),
        (lambda: Knob("a", "learning"), r"a text needs the texts it may be, as in values=\('a', ...\)"),
        (lambda: Knob(1, "learning", values=(1, "b")), r"must be numbers, or texts"),
        (lambda: Knob(None, "learning"), r"the default is no true or false, number or text"),  # type: ignore[arg-type]
        (lambda: Knob(32, "both", (16, 32)), r"name what it may be, as in values=\(16, 32\)"),  # type: ignore[arg-type]
    ],
)
def test_a_knob_that_cannot_be_is_refused_where_it_is_written(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("name", ["batch_size", "as_dict", "table", "not a name", "_hidden", "9lives"])
def test_a_name_that_is_taken_or_cannot_be_read_is_refused(name: str) -> None:
    class Own(Sums):
        knobs: ClassVar = {name: Knob(1, "learning")}

    with pytest.raises(WorkloadError, match=f"knobs: .*{name}.*another name"):
        table_of(Own())


def test_what_is_no_knob_is_refused() -> None:
    for wrong in ({"channels": 32}, [32]):
        with pytest.raises(WorkloadError, match="knobs"):
            table_of(type("Own", (Sums,), {"knobs": wrong})())


def test_each_of_ours_declares_what_the_command_line_knows_of_it() -> None:
    assert set(OURS) == set(available("workload"))
    for ref, rows in OURS.items():
        workload = load(ref)
        assert list(table_of(workload)) == list(rows)
        assert table_of(workload).hooks == rows.hooks
        assert [row.as_raw() for row in table_of(workload).own.values()] == [row.as_raw() for row in rows.own.values()]
        files = dict(yaml_files.of_groups({"workload": ref}))
        ours = files[f"search_spaces/workload/{ref}.yaml"]
        assert ours["workload"] == dict(workload.options)
        assert set(rows.own) <= set(ours["knobs"]), "a knob of its own that is never searched"


def test_what_a_workload_does_not_declare_is_no_knob_of_it() -> None:
    rows = KnobTable(OWN)
    assert Knobs.of({"channels": 64}, rows).channels == 64
    assert set(Knobs.of({}, rows).as_dict()) == {*OF_THE_LOOP, *OWN}
    for ours in ("hidden_size", "architecture", "adapter", "dropout"):
        with pytest.raises(ValueError, match=f"{ours} is not a knob of this workload"):
            Knobs.of({ours: 1}, rows)
        with pytest.raises(AttributeError, match=f"{ours} is not a knob of this workload"):
            getattr(Knobs.of({}, rows), ours)
    with pytest.raises(ValueError, match="knob channels: expected one of 16, 32, 64, got 48"):
        Knobs.of({"channels": 48}, rows)


def test_a_knob_that_the_model_reads_makes_another_model() -> None:
    class Own(Sums):
        knobs: ClassVar = {name: Knob(4, "both", values=(2, 4, 8)) for name in ("width", "steps")}

        def model(self, config: Config) -> nn.Module:
            return nn.Linear(1, config.knobs.width)

    resident, rows = Resident(Own()), table_of(Own())
    config = Config(Knobs.of({}, rows))
    first = resident.model(config)
    assert resident.model(config.with_knobs(steps=8, batch_size=4)) is first
    assert resident.model(config.with_knobs(width=8)).out_features == 8
    assert resident.model(config).out_features == 4


def test_what_a_model_reads_later_of_its_configuration_counts() -> None:
    class Kept(nn.Linear):
        def __init__(self, config: Config) -> None:
            super().__init__(1, 1)
            self.config = config

    class Own(Sums):
        knobs: ClassVar = {"steps": Knob(4, "both", values=(2, 4, 8))}

        def model(self, config: Config) -> nn.Module:
            return Kept(config)

    resident, config = Resident(Own()), Config(Knobs.of({}, table_of(Own())))
    first = resident.model(config)
    assert first.config.knobs.steps == 4
    assert resident.model(config) is first
    assert resident.model(config.with_knobs(steps=8)).config.knobs.steps == 8


def test_knobs_that_note_what_is_read_are_knobs_like_the_others() -> None:
    read: set[str] = set()
    plain = Knobs.of({"batch_size": 16}, KnobTable({"channels": OWN["channels"]}))
    knobs = ReadKnobs(plain, read)
    assert (knobs.batch_size, knobs.as_dict(), knobs) == (16, plain.as_dict(), plain)
    again = pickle.loads(pickle.dumps(ReadKnobs(Knobs(batch_size=16), set())))  # noqa: S301  # our own bytes
    assert again.with_(batch_size=8) == Knobs(batch_size=8)
    assert copy.deepcopy(knobs).batch_size == 16
    with pytest.raises(AttributeError, match="not a knob of this workload"):
        getattr(knobs, "widht")  # noqa: B009
    assert read == {"batch_size", "channels"}
    read.clear()
    knobs.closed()
    assert (type(knobs), knobs.batch_size, knobs, read) == (Knobs, 16, plain, set())


def test_two_workloads_in_one_process_keep_their_own() -> None:
    one, other = (
        KnobTable({"width": Knob(1, "both", low=1, high=8)}),
        KnobTable({"width": Knob("a", "both", values=("a", "b"))}),
    )
    first = Config(Knobs.of({"width": 4}, one))
    assert Knobs.of({}, other).width == "a"
    assert first.with_knobs(width=8).knobs.width == 8, "knobs keep their table"
    with pytest.raises(ValueError, match="knob width"):
        first.with_knobs(width="b")


def test_knobs_are_values() -> None:
    one = Knobs.of({"channels": 64, "mirror": True}, KnobTable(OWN))
    again = pickle.loads(pickle.dumps(one))  # noqa: S301  (a loader's process gets them so)
    assert (again, again.as_dict(), hash(again)) == (one, one.as_dict(), hash(one))
    assert one != Knobs.of({}, KnobTable(OWN))
    with pytest.raises(AttributeError, match="with_"):
        one.channels = 16
    assert repr(one).startswith("Knobs(batch_size=32, ")


def test_columns_that_a_knob_leaves_out_follow_from_its_kind() -> None:
    found = {name: (row.memory, row.span) for name, row in OWN.items()}
    assert found["channels"] == ("group", "compute"), "each value is measured and probed"
    assert found["momentum_of_mine"] == ("none", "none")
    assert found["mirror"] == ("group", "compute")
    rows = KnobTable(OWN)
    assert (rows.both[-1], rows.system[-1], rows.scaled) == ("channels", "mirror", ("channels",))
    assert rows.is_active("channels", {})


@given(
    st.sampled_from(["system", "learning", "both"]),
    st.booleans() | st.integers(-5, 5) | st.floats(-5, 5) | st.sampled_from(["a", "b"]),
    st.booleans(),
    st.text("aé'\"\\\n\u2028", max_size=9),
)
def test_a_record_has_all_of_a_knob(kind: Any, default: Any, shapes_model: bool, doc: str) -> None:
    given_values: dict[str, Any] = {"values": ("a", "b")} if isinstance(default, str) else {}
    if isinstance(default, float):
        given_values = {"low": -5.0, "high": 6.0}
    row = Knob(default, kind, doc=doc, shapes_model=shapes_model, **given_values)
    assert Knob.of_raw(json.loads(json.dumps(row.as_raw()))) == row
