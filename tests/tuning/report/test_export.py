"""best.yaml: written, read back, and every way of spoiling it; front.csv."""

import csv
import dataclasses
import subprocess
from datetime import UTC, datetime

import pytest
import yaml

from tests.tuning import hostile
from trainables.knobs import NAMES
from tuning.config import yaml_files
from tuning.config.errors import ConfigError, NoUsableTrial
from tuning.report import export, summary

WHEN = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture
def best(found, tmp_path):
    return export.write_best(found, tmp_path / "best.yaml", created=WHEN)


def with_study(records, **fields):
    study = dataclasses.replace(records[0], fields={**records[0].fields, **fields})
    return summary.from_records([study, *records[1:]])


def edited(path, change):
    body = yaml.safe_load(path.read_text(encoding="utf-8"))
    change(body)
    path.write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
    return path


def test_what_is_written_is_read_back(best):
    read_back = export.read_best(best)
    assert (read_back.ref, read_back.options, read_back.samples, read_back.seed) == (
        "nli",
        {"model": None, "layers": 3},
        1200,
        0,
    )
    assert (read_back.knobs["learning_rate"], read_back.knobs["micro_batch_size"]) == (6.1e-4, 8)
    assert set(read_back.knobs) == set(NAMES)
    assert read_back.measured["samples_per_s"]["status"] == "confirmed"
    assert read_back.warnings == ()


def test_the_same_run_gives_the_same_bytes(best, found, tmp_path):
    again = export.write_best(found, tmp_path / "again.yaml", created=WHEN)
    assert again.read_text().replace("again.yaml", "best.yaml") == best.read_text()


def test_the_file_says_whose_throughput_it_is(best):
    measured = yaml.safe_load(best.read_text())["measured"]
    assert (measured["device"], measured["card"], measured["virtual"]) == ("Example CPU", "rtx3090", True)
    assert "not of card rtx3090" in measured["says"]


def test_alternatives_say_that_they_were_only_probed(found, tmp_path):
    paths = export.write_alternatives(found, tmp_path)
    assert [p.name for p in paths] == ["knee.yaml", "most_accurate.yaml"]
    measured = export.read_best(paths[0]).measured
    assert measured["samples_per_s"]["status"] == "probed"
    assert measured["quality"]["accuracy"]["status"] == "from the search"


def test_an_alternative_of_an_earlier_export_is_removed(found, tmp_path):
    (tmp_path / "knee.yaml").write_text("old")
    only_best = dataclasses.replace(found, named={"best": found.named["best"]})
    assert [p.name for p in export.write_all(only_best, tmp_path)] == ["best.yaml", "front.csv"]
    assert not (tmp_path / "knee.yaml").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.update(schema=2), r"schema=2 is not read here\n  allowed: schema: 1\n  try: export"),
        (lambda b: b.update(schema="1"), "schema='1' is not read here"),
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
        (lambda b: b["knobs"].update(learning_rate=-1.0), "knob learning_rate: .*got -1.0"),
        (lambda b: b["knobs"].update(lerning_rate=1e-3), "did you mean learning_rate"),
        (lambda b: b["knobs"].update(batch_size=[1]), "knobs.batch_size"),
        (lambda b: b.update(knobs=None), "knobs=None is not allowed"),
        (lambda b: b["workload"].update(ref="${oc.env:HOME}"), "interpolation is refused"),
        (lambda b: b["workload"]["options"].update(_target_="os.system"), "_target_ is refused"),
    ],
)
def test_a_spoilt_file_is_refused_with_key_and_value(best, change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        export.read_best(edited(best, change))
    assert len(str(caught.value).splitlines()) <= 8


def test_a_changed_value_is_taken_and_said(best):
    def change(body):
        body["knobs"]["learning_rate"] = 1e-3

    read_back = export.read_best(edited(best, change))
    assert read_back.knobs["learning_rate"] == 1e-3
    assert read_back.warnings == ("best.yaml was edited by hand since it was exported: its sha256 does not match",)


def test_layout_and_comments_are_no_edit(best):
    best.write_text("# mine\n" + yaml.safe_dump(yaml.safe_load(best.read_text()), sort_keys=True), encoding="utf-8")
    assert export.read_best(best).warnings == ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"- 1\n", "expected a mapping"),
        (b"a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        (b"x" * (yaml_files.MAX_BYTES + 1), "at most 65536"),
    ],
)
def test_a_file_that_is_no_best_yaml(tmp_path, data, message):
    path = tmp_path / "best.yaml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        export.read_best(path)


def test_a_symbolic_link_is_not_written_through(found, tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "best.yaml").symlink_to(target)
    with pytest.raises(ConfigError, match="symbolic link"):
        export.write_best(found, tmp_path / "best.yaml")
    assert target.read_text() == "mine"


def test_places_that_cannot_be_written(found, best, tmp_path):
    with pytest.raises(ConfigError, match="is a folder"):
        export.write_best(found, tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        export.write_best(found, best, overwrite=False)
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        export.write_best(found, tmp_path / "nowhere" / "best.yaml")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best.yaml"]


def test_a_run_without_a_pick_has_no_best(records, tmp_path):
    with pytest.raises(NoUsableTrial, match="has no best configuration"):
        export.write_best(summary.from_records(records[:20]), tmp_path / "best.yaml")


def test_secrets_and_the_home_folder_stay_at_home(records, tmp_path, monkeypatch):
    home = str(tmp_path)
    monkeypatch.setenv("HOME", home)
    options = {"data": f"{home}/nli", "hf_token": "hunter2", "tokenizer": "wordpiece", "max_tokens": 64}
    command = f"python -m tuning.run workload.api_key=hunter2 workload.data={home}/nli url=https://ada:hunter2@x.org"
    run = with_study(records, command=command, config={"workload": {"ref": f"{home}/mine.py", "options": options}})
    path = export.write_best(run, tmp_path / "best.yaml")
    text = path.read_text(encoding="utf-8")
    assert "hunter2" not in text
    assert home not in text
    read_back = export.read_best(path)
    assert (read_back.ref, read_back.options["data"]) == (f"{home}/mine.py", f"{home}/nli")
    assert (read_back.options["tokenizer"], read_back.options["max_tokens"]) == ("wordpiece", 64)
    assert read_back.warnings == ("best.yaml does not hold the secrets hf_token: give them on the command line",)


def test_git_is_named_only_for_a_checkout_of_ours(best, found, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "__file__", str(tmp_path / "lib" / "tuning" / "report/export.py"))
    assert export._git() is None
    (tmp_path / "lib" / ".git").mkdir(parents=True)
    assert export._git() is None  # a folder of that name, and no repository

    def hangs(*_, **__):
        raise subprocess.TimeoutExpired("git", 5)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert export._git() is None


def test_front_csv_has_every_trial(found, tmp_path):
    with export.write_front(found, tmp_path / "front.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["trial"]: row for row in csv.DictReader(file)}
    assert len(rows) == 11
    assert [name for name, row in sorted(rows.items()) if row["on_front"] == "true"] == ["t003", "t007", "t009"]
    assert (rows["t007"]["pick"], rows["t007"]["accuracy"], rows["t007"]["learning_rate"]) == (
        "best",
        "0.908",
        "0.00061",
    )
    assert (rows["t006"]["outcome"], rows["t006"]["accuracy"]) == ("oom", "")


def test_front_csv_holds_no_formula_and_no_escape_code(records, tmp_path):
    path = export.write_front(summary.from_records(hostile.run(records)), tmp_path / "front.csv")
    with path.open(newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert any(cell.startswith("'=[/foo]") for cell in cells)
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@")) or not cell.isprintable()]
