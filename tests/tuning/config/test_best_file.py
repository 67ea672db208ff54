"""best.yaml: every way of spoiling it ends in one error."""

import os
from pathlib import Path

import pytest
import yaml

from trainables import Knob
from trainables.knobs import KnobTable
from trainables.our_knobs import EVERY
from tuning.config import best_file, yaml_files
from tuning.config.errors import ConfigError

MINE = Path(__file__).parents[2] / "data" / "mine_best.yaml"


@pytest.fixture
def best(tmp_path):
    path = tmp_path / "best.yaml"
    body = yaml_files.read(MINE.read_text(encoding="utf-8"), "best.yaml")  # its ref is none that was exported
    path.write_text(best_file.text_of(best_file.BestFile.model_validate(body)), encoding="utf-8")
    return path


def edited(path, change):
    body = yaml.safe_load(path.read_text(encoding="utf-8"))
    change(body)
    path.write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.update(schema=2), r"schema=2 is not allowed\n  allowed: 1\n  try: undo the edit, or export"),
        (lambda b: b.pop("schema"), "schema is missing"),
        (lambda b: b.update(extra=7), r"there is no key extra \(its value is 7\)"),
        (lambda b: b["train"].update(epochs=3), r"there is no key train.epochs"),
        (
            lambda b: b["train"].update(seed="x"),
            "train.seed='x' is not allowed\n  allowed: a whole number\n  try: undo",
        ),
        (lambda b: b["train"].update(samples=0), "train.samples=0 is not allowed"),
        (lambda b: b["measured"].pop("device"), "measured.device is missing"),
        (lambda b: b["measured"].update(virtual="no"), "measured.virtual='no' is not allowed"),
        (lambda b: b["measured"]["samples_per_s"].update(median=float("nan")), "median=nan is not allowed"),
        (lambda b: b["knobs"].update(learning_rate="fast"), "knob learning_rate: expected a number .*'fast'"),
        (lambda b: b["knobs"].update(lerning_rate=1e-3), "did you mean learning_rate"),
        (lambda b: b["knobs"].update(batch_size=[1]), "knobs.batch_size"),
        (lambda b: b.update(knobs=None), "knobs=None is not allowed"),
    ],
)
def test_a_spoilt_file_is_refused_with_key_and_value(best, change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        best_file.completed(best_file.read(edited(best, change)), EVERY)
    assert len(str(caught.value).splitlines()) <= 8


def test_a_changed_value_is_taken_and_said(best):
    def change(body):
        body["knobs"]["learning_rate"] = 1e-3

    read_back = best_file.completed(best_file.read(edited(best, change)), EVERY)
    assert read_back.knobs["learning_rate"] == 1e-3
    assert read_back.warnings == ("best.yaml was edited by hand since it was exported: its sha256 does not match",)


def test_layout_and_comments_are_no_edit(best):
    best.write_text("# mine\n" + yaml.safe_dump(yaml.safe_load(best.read_text()), sort_keys=True), encoding="utf-8")
    assert best_file.read(best).warnings == ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"- 1\n", "expected a mapping"),
        (b"x" * (yaml_files.MAX_BYTES + 1), "at most 65536"),
    ],
)
def test_a_file_that_is_no_best_yaml(tmp_path, data, message):
    path = tmp_path / "best.yaml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        best_file.read(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path, make):
    make(path := tmp_path / "best.yaml")
    with pytest.raises(ConfigError, match="is not a regular file"):
        best_file.read(path)


def test_what_is_written_keeps_keys_and_order(best):
    before, after = (yaml_files.read(path.read_text(encoding="utf-8"), "") for path in (MINE, best))
    optional = [after["measured"].pop(name) for name in ("samples", "beside_today")]
    assert optional == [None, None]  # the file lacks them, as no training ended by itself
    assert after["measured"]["samples_per_s"].pop("shown") is None  # it is of an earlier version
    assert after["compared"]["before"].pop("trainings") == 0
    assert list(before) == list(after)
    assert {**after, "sha256": before["sha256"]} == before
    assert best_file.read(best).warnings == ()


def test_knobs_of_ours_that_the_workload_lacks_are_left_out(best):
    def change(body):
        body["knobs"] = {"learning_rate": 1e-3, "architecture": "lstm", "adapter": "dora"}

    table = KnobTable({"channels": Knob(32, "both", values=(16, 32))})
    found = best_file.completed(best_file.read(edited(best, change)), table)
    assert set(found.knobs) == set(table)
    assert (found.knobs["channels"], found.knobs["learning_rate"]) == (32, 1e-3)
    assert found.warnings[1:] == ("best.yaml sets architecture, adapter, which the workload does not have: left out",)
