"""A run in experiment trackers: each trial once, while the run goes on and after it; the trackers' own packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tuning import answered
from tuning.config.errors import ConfigError, PreflightError
from tuning.journal.run import History
from tuning.report import summary, trackers
from tuning.report.trackers import TrackedRun


class Kept(trackers.Tracker):
    """A tracker in memory, which refuses the trial `broken`."""

    place = ""

    def __init__(self, broken: str = "") -> None:
        self.trials: list[TrackedRun] = []
        self.broken = broken

    def has(self, name: str) -> bool:
        return name in [one.name for one in self.trials]

    def trial(self, one: TrackedRun) -> None:
        if one.name == self.broken:
            raise OSError("no server")
        self.trials.append(one)

    def end(self, search: TrackedRun) -> None:
        self.search = search


def test_each_trial_is_written_once_as_it_ends(records: Any) -> None:
    run, kept = History(records), Kept()
    parts = [run.before(run.ended[3].seq), run, run]
    assert [trackers.write(kept, part, summary.of_run(part)) for part in parts] == [3, len(run.ended) - 3, 0]
    by_name = {one.name: one for one in kept.trials}
    for end in run.ended:
        one = by_name[end.trial]
        assert one.config == end.config
        assert one.tags["outcome"] == end.outcome
        assert {value for _, value in one.curve} >= {v for n, v in end.values.items() if n == one.objective and v}
        assert all(isinstance(value, float) for value in one.metrics.values())


def test_the_search_has_the_pick_and_the_answer(records: Any) -> None:
    found = summary.of_run(History(answered.run(records)))
    search = trackers.whole(found)
    assert search.config == found.best.config
    assert search.tags["pick"] == found.best.trial
    assert search.metrics["speed over the reference"] == found.gain("best", found.reference.name).ratio


def test_a_tracker_that_fails_is_one_error_and_goes_on_later(records: Any) -> None:
    run, kept = History(records), Kept()
    found = summary.of_run(run)
    kept.broken = found.trials[2].trial
    with pytest.raises(ConfigError, match=r"Kept took not every trial: OSError: no server"):
        trackers.write(kept, run, found)
    kept.broken = ""
    assert trackers.write(kept, run, found) == len(found.trials) - 2


@pytest.mark.parametrize("name", trackers.TRACKERS)
@pytest.mark.filterwarnings("ignore")
def test_a_trackers_own_package_takes_a_run(name: str, records: Any, tmp_path: Path) -> None:
    pytest.importorskip(name)
    run = History(answered.run(records))
    found = summary.of_run(run)
    for written in (len(found.trials), 0):
        tracker = trackers.TRACKERS[name]("20261121-103412-3f2a", tmp_path, None)
        assert trackers.write(tracker, run, found) == written
        tracker.end(trackers.whole(found))


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(PreflightError) as raised:
        trackers.MLflow("run", tmp_path, None)
    assert raised.value.remedy == "pip install mlflow"
