"""The Python API: the same study as by the command line, from whatever program; what it returns, what it leaves."""

from __future__ import annotations

import asyncio
import html
import os
import re
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import tuning
from tests.commands import MINE, ROOT
from tests.golden.outputs import BESIDE, check_files, journal, of
from tuning import Result, load_best, read_run, tune
from tuning.cli.terminal import Terminal
from tuning.config.errors import ConfigError
from tuning.workers.ray_cluster import RayCluster

FAST = {
    "search": {"trials": 3, "max_time": "3m"},
    "budget": {"train_epochs": 1.0, "probe": {"max_time_s": 1, "probe_time_s": 0.2}, "confirm": {"seeds": 1}},
    "budget.confirm.window_s": 0.01,
    "knobs": {"learning_rate": [0.01, 1e-5], "batch_size": 128, "micro_batch_size": [64, 128], "num_workers": 0},
    "knobs.amp_dtype": "fp32",
    "named.small.batch_size": 4,
}


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has a folder of its own, with a workload in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE.read_text())


def beside_an_event_loop(**settings: Any) -> Result:
    """Returns what a study in a thread found, which has an event loop, as a notebook has."""
    found = []

    async def program() -> None:
        found.append(tune("mine.py", FAST, concurrency=1, **settings))

    thread = threading.Thread(target=lambda: asyncio.run(program()))
    thread.start()
    thread.join()
    return found[0]


def check_search(records: list[dict[str, Any]]) -> None:
    """Checks what the default search trained, and that in turns its pick is no slower than today's."""
    first, *others = of(records, "trial_start")
    assert (first["named"], first["beside"]) == ("before", True)
    assert first["config"].items() >= {"learning_rate": 0.01, "batch_size": 32}.items()
    assert others
    assert all(r["expected_per_s"] > r["pick_per_s"] for r in others)
    (pick,) = of(records, "pick")
    assert pick["reference"] == "before"
    configs = (pick["config"], first["config"])
    rates = [[r["samples_per_s"] for r in of(records, "window") if r["config"] == own] for own in configs]
    assert statistics.median(rates[0]) >= statistics.median(rates[1])


def test_a_result_has_what_the_run_found_and_nothing_is_left_or_printed(capsys: pytest.CaptureFixture[str]) -> None:
    # Python tells two versions of a file that were written in one second apart by their length.
    Path("mine.py").write_text(MINE.read_text().replace("def loss", "def no_loss"))
    with pytest.raises(ConfigError, match=r"mine\.py: WORKLOAD lacks loss"):
        tune("mine.py", FAST, concurrency=1)
    assert not Path("runs").exists()
    Path("mine.py").write_text(MINE.read_text())  # a second study reads a file that was written anew
    before = set(psutil.Process().children(recursive=True))
    result = beside_an_event_loop(name="one")
    assert set(psutil.Process().children(recursive=True)) <= before
    assert capsys.readouterr().out == ""
    assert result.folder == Path("runs/mine/one")
    assert result.is_finished
    check_search(journal(result.folder))
    assert result.best.knobs["batch_size"] in (128, 32), "one of the space, or what is trained today"
    assert result.best.is_confirmed or str(result).startswith("run one: Keep today's settings")
    assert result.answers["best"].quality.is_fresh == result.best.is_confirmed  # type: ignore[union-attr]
    others = {"best_at_speed": result.best_at_speed, "most_accurate": result.most_accurate}
    assert {name for name, one in others.items() if one is not None} == set(result.answers) - {"best"}
    assert set(result.gains) == {"before", "small"}, "a file that says what is trained today has no plain defaults"
    assert result.named["small"].knobs["batch_size"] == 4
    assert [t["trial"] for t in result.trials] == ["t000", "t001", "t002"]
    assert result.trials[0]["batch_size"] == 32, "before comes first, though the space was given another batch size"
    assert {t["learning_rate"] for t in result.trials} == {0.01, 1e-5}
    assert result.front[0].samples_per_s == max(t["samples_per_s"] for t in result.trials if t["on_front"])
    speeds = {t.trial: t.samples_per_s for t in result.summary.trials}
    assert {t["trial"]: t["samples_per_s"] for t in result.trials} == speeds, "all of the search"
    assert result.best.samples_per_s == result.summary.best.samples_per_s
    assert {one.name: one.samples_per_s for one in result.front}.items() <= speeds.items()
    assert len(result.to_pandas()) == 3
    shown = result._repr_html_()
    assert "<table>" in shown
    assert str(result) in html.unescape(re.sub("<[^>]*>", "", shown))
    assert repr(result) == str(result), "a prompt shows the answer, not all fields"

    again = read_run("last")
    assert (again.id, again.best, again.trials) == (result.id, result.best, result.trials)
    assert read_run(result.folder).best == result.best
    assert load_best("last") == load_best("one") == load_best(result.folder)
    best = load_best(result.folder)
    assert best.knobs["learning_rate"] == result.best.knobs["learning_rate"]
    assert sum(p.numel() for p in best.workload.model(best.config()).parameters()) > 0


@pytest.mark.workload
def test_a_script_without_a_main_guard_runs_once_though_it_is_the_workload_itself() -> None:
    probes = {**FAST, "search": {"trials": 0, "max_time": "3m"}}
    call = f"\nfrom tuning import tune\nprint('RAN')\nprint(tune(__file__, {probes!r}, concurrency=1).is_finished)\n"
    Path("script.py").write_text(MINE.read_text() + call)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "script.py"], env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["RAN", "True"]  # as the script; the import by the worker is not shown
    assert len(list(Path("runs/script").iterdir())) == 1


def test_what_cannot_be_tuned_is_refused_before_anything_is_written() -> None:
    class Cell:
        """A workload as a notebook's cell would define it."""

    for workload in (Cell, Cell()):
        with pytest.raises(ConfigError, match="an object cannot be sent") as raised:
            tune(workload)  # type: ignore[arg-type]  # what is refused
        assert "%%writefile mine.py" in raised.value.remedy
    with pytest.raises(ConfigError, match="no workload was given"):
        tune()
    with pytest.raises(ConfigError, match=r"there is no setting search\.trails"):
        tune("mine.py", {"search.trails": 3})
    numbers = {"knobs.learning_rate": np.logspace(-4, -2, 3), "knobs.batch_size": [np.int64(8)]}
    with pytest.raises(ConfigError, match=r"there is no setting search\.trails"):
        tune("mine.py", {**numbers, "search.trails": 3})
    with pytest.raises(ConfigError, match=r"knobs\.learning_rate=.* is no plain value"):
        tune("mine.py", {"knobs.learning_rate": [object()]})
    for overrides in (7, [("search.trials", 1)], "search.trials=1"):
        with pytest.raises(ConfigError, match="settings beside the workload are a dict"):
            tune("mine.py", overrides)  # type: ignore[arg-type]  # what is refused
    for read in (read_run, load_best):
        with pytest.raises(ConfigError, match="=3 is no text and no path"):
            read(3)  # type: ignore[operator]  # what is refused
    with pytest.raises(ConfigError, match="no run of this id"):
        read_run("nope")
    assert not Path("runs").exists()


def test_a_run_without_a_pick_has_no_best_to_load_and_says_why() -> None:
    folder = Path("runs", "mine", "b1")
    folder.mkdir(parents=True)
    (folder / "trials.jsonl").touch()
    for run in ("b1", folder):
        with pytest.raises(ConfigError, match=r"run b1 has no best\.yaml: it ended before its pick") as raised:
            load_best(run)
        assert raised.value.remedy == "python -m tuning show b1 says how its trials ended"


def test_a_study_that_fails_leaves_no_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []
    monkeypatch.setattr(Terminal, "close", lambda terminal: closed.append(terminal))
    with pytest.raises(ConfigError):
        tune("mine.py", {"search.trails": 3}, quiet=False)
    assert closed


def test_its_names_are_those_of_the_package_and_others_are_none() -> None:
    assert "tune" in dir(tuning)
    with pytest.raises(AttributeError, match="has no attribute 'tuna'"):
        _ = tuning.tuna


@pytest.mark.workload
def test_the_page_of_the_api_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"SHORT": {n: v for n, v in FAST.items() if n.startswith("budget")}}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.DOTALL):
        exec(block.replace('"budget.train_epochs": 2,', "**SHORT,"), names)  # noqa: S102  (our own page)
    assert "times as fast as before" in capsys.readouterr().out
    assert names["rate"] == names["result"].best.knobs["learning_rate"]  # type: ignore[attr-defined]


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_study_of_two_slots_after_another_of_this_process_leaves_nothing_of_ray() -> None:
    before = set(psutil.Process().children(recursive=True))

    def is_left() -> list[psutil.Process]:
        return psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=10)[1]

    with RayCluster(cores=1, gpus=0, dashboard=False):  # that of the other
        assert set(psutil.Process().children(recursive=True)) - before
    assert not is_left()
    result = tune(
        "mine.py",
        {**FAST, "search": {"trials": 2, "max_time": "3m", "pruner": "none", "sampler": "random"}},
        concurrency=2,
    )
    assert result.is_finished
    assert not is_left()
    check_files(result.folder)
    records = journal(result.folder)
    assert of(records, "study")[0]["concurrency"] == 2
    assert of(records, "probe")
    assert len({r["trial"] for r in of(records, "trial")}) == 2 + BESIDE


def test_a_best_file_of_an_earlier_version_gives_a_configuration_without_knobs_of_other_workloads() -> None:
    best = load_best(ROOT / "benchmarks" / "results" / "best" / "signals.yaml")
    assert "architecture" in best.knobs, "every file had the knobs of every workload then"
    config = best.config()
    assert config.knobs.batch_size == best.knobs["batch_size"]
    assert not hasattr(config.knobs, "architecture")
