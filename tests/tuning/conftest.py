"""The recorded run that tests of what a run says are about: its records and their summary, read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tuning import answered
from tuning.config import load
from tuning.config.schema import StudyConfig
from tuning.journal.records import Record, read
from tuning.journal.run import History
from tuning.report import summary
from tuning.report.summary import Summary


@pytest.fixture(scope="session")
def records() -> list[Record]:
    """Every record of tests/data/sample_run, which was made up and is undamaged."""
    whole, warnings = read(Path(__file__).parents[1] / "data" / "sample_run" / "trials.jsonl")
    assert not warnings
    return whole


@pytest.fixture(scope="session")
def study() -> StudyConfig:
    """The configuration that it was asked for, as far as screens show it."""
    return load.load(["workload=nli", "search.trials=12"])


@pytest.fixture(scope="session")
def found(records: list[Record]) -> Summary:
    """Its summary."""
    return summary.of_run(History(records))


@pytest.fixture(scope="session")
def answers(records: list[Record]) -> Summary:
    """The summary of the run as today's version writes it, with three answers."""
    return summary.of_run(History(answered.run(records)))
