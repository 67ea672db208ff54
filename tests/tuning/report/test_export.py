"""best.yaml: written, read back, and every way of spoiling it; front.csv."""

import csv
import dataclasses
import re
import shlex
import statistics
import subprocess

import pytest
import yaml

from tests.tuning import hostile
from trainables import Knob
from trainables.knobs import KnobTable
from trainables.our_knobs import EVERY
from tuning.config import best_file
from tuning.config.errors import ConfigError, NoUsableTrial
from tuning.config.shareable import shareable
from tuning.journal.run import History
from tuning.report import export, summary
from tuning.stats import uncertainty


@pytest.fixture
def best(found, tmp_path):
    return export.write_best(found, tmp_path / "best.yaml")


def written(found, folder, name="best"):
    """Returns what stands in the file of a configuration."""
    return yaml.safe_load(export.write_best(found, folder / f"{name}.yaml", name=name).read_text(encoding="utf-8"))


def with_study(records, **fields):
    study = dataclasses.replace(records[0], fields={**records[0].fields, **fields})
    return summary.of_run(History([study, *records[1:]]))


def test_what_is_written_is_read_back(best):
    read_back = best_file.read(best)
    assert (read_back.ref, read_back.options, read_back.samples, read_back.seed) == (
        "nli",
        {"model": None, "layers": 3},
        1200,
        0,
    )
    assert (read_back.knobs["learning_rate"], read_back.knobs["micro_batch_size"]) == (6.1e-4, 8)
    assert set(read_back.knobs) == set(EVERY)
    measured = read_back.measured
    assert measured.samples_per_s.status == "confirmed"
    assert (measured.device, measured.card, measured.virtual) == ("Example CPU", "rtx3090", True)
    assert "not of card rtx3090" in measured.says
    assert read_back.warnings == ()


def test_where_nothing_was_trained_a_training_has_one_pass(records, tmp_path):
    path = export.write_best(with_study(records, horizon_samples=None, train_samples=77), tmp_path / "best.yaml")
    assert best_file.read(path).samples == 77


def test_the_median_of_the_file_is_the_median(found, tmp_path):
    for rates, is_spread in (([10.0, 10.0, 40.0], True), ([10.0, 40.0], False)):  # of two ± is 12.7 standard errors
        own = dataclasses.replace(found.named["best"], trained=uncertainty.throughput(rates))
        speed = written(dataclasses.replace(found, named={"best": own}), tmp_path)["measured"]["samples_per_s"]
        assert speed["median"] == statistics.median(rates)
        assert (speed["spread"] is not None) == is_spread


def test_a_file_says_whether_it_was_trained_again(found, tmp_path):
    untrained = dataclasses.replace(found.named["best"], quality={})
    assert written(dataclasses.replace(found, named={"best": untrained}), tmp_path)["status"] == "probed"
    once = {n: dataclasses.replace(q, confirmed=False) for n, q in found.named["before"].quality.items()}
    named = {**found.named, "before": dataclasses.replace(found.named["before"], quality=once)}
    assert written(dataclasses.replace(found, named=named), tmp_path, "before")["status"] == "trained"
    assert best_file.read(tmp_path / "before.yaml").warnings == (), "nothing is to be done about it"


def test_each_other_answer_has_a_file_as_long_as_it_is_one(found, answers, tmp_path):
    paths = {p.name: p for p in export.write_others(answers, tmp_path)}
    assert [name.partition(".")[0] for name in paths] == [name for name in answers.answers if name != "best"] != []
    assert best_file.read(paths["most_accurate.yaml"]).provenance.trial == "t009"
    assert [p.name for p in export.write_others(found, tmp_path)] == ["most_accurate.yaml"]
    measured = best_file.read(paths["most_accurate.yaml"]).measured
    assert (measured.samples_per_s.status, measured.quality["accuracy"].status) == ("probed", "from the search")
    only_best = dataclasses.replace(found, answers={}, named={"best": found.named["best"]})
    assert [p.name for p in export.write_all(only_best, tmp_path)] == ["best.yaml", "front.csv"]
    assert not (tmp_path / "most_accurate.yaml").exists()


def test_a_file_says_how_good_and_how_soon_it_is_beside_today(answers, tmp_path):
    beside = written(answers, tmp_path)["measured"]["beside_today"]
    quality, time = answers.answers["best"].quality, answers.answers["best"].time
    assert (beside["reference"], beside["quality"]["seeds"], beside["quality"]["verdict"]) == ("before", 3, "better")
    assert beside["quality"]["difference"] == pytest.approx(quality.difference, rel=1e-5)
    assert beside["seconds_to_it"]["median"] == pytest.approx(time.own.median_s, rel=1e-5)
    assert beside["seconds_to_it"]["reference"] > beside["seconds_to_it"]["median"]
    assert written(answers, tmp_path, "before")["measured"]["beside_today"] is None


def test_a_symbolic_link_is_not_written_through(found, tmp_path):
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "best.yaml").symlink_to(target)
    with pytest.raises(ConfigError, match="symbolic link"):
        export.write_best(found, tmp_path / "best.yaml")
    assert target.read_text() == "mine"


def test_a_run_without_a_pick_has_no_best(records, tmp_path):
    early = next(n for n, r in enumerate(records) if r.event == "probe")
    with pytest.raises(NoUsableTrial, match="has no best configuration: nothing was measured"):
        export.write_best(summary.of_run(History(records[:early])), tmp_path / "best.yaml")


def test_a_run_that_ended_early_is_marked_as_unconfirmed(records, tmp_path):
    probed = next(n for n, r in enumerate(records) if (r.event, r.get("stage")) == ("stage", "search"))
    picked = next(n for n, r in enumerate(records) if r.event == "pick")
    for end, quality in ((probed, set()), (picked, {"accuracy"})):
        own = summary.of_run(History(records[:end]))
        assert own.provisional
        best, *_, front = export.write_all(own, tmp_path)
        read = best_file.read(best)
        assert set(read.measured.quality) == quality
        assert any("was not trained again on fresh seeds" in said for said in read.warnings)
        assert front.name == "front.csv"
    whole = export.write_best(summary.of_run(History(records)), tmp_path / "best.yaml")
    assert best_file.read(whole).warnings == ()


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
    read_back = best_file.read(path)
    assert (read_back.ref, read_back.options["data"]) == (f"{home}/mine.py", f"{home}/nli")
    assert (read_back.options["tokenizer"], read_back.options["max_tokens"]) == ("wordpiece", 64)
    assert read_back.warnings == ("best.yaml does not hold the secrets hf_token: write them in its workload.options",)


@pytest.mark.parametrize(
    "path", ["/ann/w.py", "/ann", "/mnt/ann/w.py", "/data/a:/ann/b", "/ann/a:/ann/b", "/ann dir/x", "/anne"]
)
def test_a_home_folder_in_ref_options_and_knobs_is_read_back(records, tmp_path, monkeypatch, path):
    monkeypatch.setenv("HOME", "/ann")
    run = with_study(records, config={"workload": {"ref": path, "options": {"data": path}}})
    best = dataclasses.replace(run.named["best"], config={"weights": path})
    rows = KnobTable({"weights": Knob(path, "both", values=(path, "none"))})
    run = dataclasses.replace(run, table=rows, named={"best": best})
    read_back = best_file.read(export.write_best(run, tmp_path / "best.yaml"))
    assert (read_back.ref, read_back.options["data"], read_back.knobs["weights"]) == (path, path, path)


def test_in_other_text_the_home_folder_is_shortened(monkeypatch):
    monkeypatch.setenv("HOME", "/ann")
    text = "data=/ann/a:/ann/b 'more=/ann/c d' file:///ann/e /ann"
    assert shareable(text) == "data=~/a:~/b 'more=~/c d' file://~/e ~"
    for other in ("/mnt/ann/w.py", "./ann/w.py", "/a-/ann", "/anne"):
        assert shareable(other) == other


def test_git_of_a_workload_of_ones_own_is_that_of_its_folder(tmp_path):
    assert export._git(str(tmp_path / "mine.py")) is None
    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    said = export._git(str(tmp_path / "mine.py"))
    assert said is not None
    assert re.fullmatch("[0-9a-f]{40}", said)


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
    path = export.write_front(summary.of_run(History(hostile.run(records))), tmp_path / "front.csv")
    with path.open(newline="", encoding="utf-8") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert any(cell.startswith("'=[/foo]") for cell in cells)
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@")) or not cell.isprintable()]


@pytest.mark.parametrize(
    ("runs_dir", "shown"), [("runs", "runs"), ("my runs", "my runs"), ("/ann/r", "~/r"), ("/ann/my r", "~/my r")]
)
def test_the_head_of_each_file_has_the_command_that_trains_it(records, tmp_path, monkeypatch, runs_dir, shown):
    monkeypatch.setenv("HOME", "/ann")
    workload = {"ref": "my.moons", "name": "moons", "options": {}}
    found = with_study(records, workload="my.moons", config={"workload": workload, "runs_dir": runs_dir})
    folder = f"{shown}/moons/{found.id}"
    for name, more in (("best", []), ("before", ["--out", f"{folder}/train-before"])):
        path = export.write_best(found, tmp_path / f"{name}.yaml", name=name)
        said = path.read_text().splitlines()[1].removeprefix("#   ")
        assert "'~" not in said, "a shell takes it for a name there"
        assert shlex.split(said) == ["python", "-m", "tuning", "train", "--from", f"{folder}/{name}.yaml", *more]
