"""What trials may take of device and time, on a machine of four cores without a card."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.commands import MINE
from tests.fakes import study_of
from tests.own_files import Here
from tests.tuning.study.formulas import FACTS
from tuning.config import load
from tuning.config.schema import PLANNED_TRIALS
from tuning.journal.events import EVENTS
from tuning.journal.records import Journal
from tuning.memory import groups
from tuning.search.confirm import SHARE
from tuning.study import setup
from tuning.study.limits import FEWEST_STEPS, MOST_EPOCHS, REFERENCE_FRAC, Limits
from tuning.workers import machine, nvml
from tuning.workers.worker_config import Description

SAMPLES = FACTS.train_samples


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of four cores, no card and 1,000 free bytes."""
    monkeypatch.setattr(machine, "cores", lambda: 4)
    monkeypatch.setattr(machine, "available_bytes", lambda: 1000)
    monkeypatch.setattr(nvml, "gpus", lambda: [])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def limits(
    folder: Path, *typed: str, passed_s: float = 0.0, facts: Description = FACTS, records: Sequence[Any] = ()
) -> Limits:
    """Returns the limits of a study that has taken so long, after records of (event, fields)."""
    card = [] if any(item.startswith("card=") for item in typed) else ["card=cpu"]
    _, config = setup.prepare_config(load.load([*card, *typed]), Here())
    with Journal.open(folder / "trials.jsonl", create=True) as journal:
        for event, fields in records:
            journal.append(EVENTS[event], **fields)
        return Limits(config, study_of(facts), journal, time.monotonic() - passed_s)


def probe(per_s: float, size: int = 16, **config: Any) -> tuple[str, dict[str, Any]]:
    """Returns the record of a probe of a batch in one piece, at so many samples a second."""
    knobs = {"batch_size": size, "micro_batch_size": size, **config}
    steps = {"micro_step_s": size / per_s, "optimizer_step_s": 0.0, "samples_per_s": per_s}
    return "probe", {"name": None, "config": knobs, "outcome": "ok", **steps}


CAP = load.load(["card=rtx4060"]).card.cap_bytes or 0


@pytest.mark.parametrize(
    ("typed", "concurrency", "threads", "cap_bytes", "alone_bytes", "room_bytes"),
    [
        (["card=rtx4060", "concurrency=4"], 4, 1, CAP // 4, CAP, None),
        (["card=rtx4060", "concurrency=2"], 2, 2, CAP // 2, CAP, None),
        (["card=cpu", "concurrency=2"], 2, 2, None, None, 400),  # needs more than its part of the free RAM: runs alone
        (["card=cpu", "concurrency=1"], 1, 4, None, None, None),
    ],
)
def test_slots_share_what_the_machine_has(
    tmp_path: Path,
    typed: list[str],
    concurrency: int,
    threads: int,
    cap_bytes: int | None,
    alone_bytes: int | None,
    room_bytes: int | None,
) -> None:
    plan = limits(tmp_path, *typed).plan()
    assert (plan.concurrency, plan.threads) == (concurrency, threads)
    assert (plan.cap_bytes, plan.alone_bytes, plan.room_bytes) == (cap_bytes, alone_bytes, room_bytes)


def test_search_ends_before_trials_are_cut(tmp_path: Path) -> None:
    now = time.monotonic()
    timed = limits(tmp_path, "search.max_time=1000s")
    ends, cut = timed.terms().deadline, timed.plan().deadline
    assert ends is not None
    assert cut is not None
    assert now + 0.7 * 1000 - 5 <= ends <= cut < now + 1000
    endless = limits(tmp_path, "search.max_time=null")
    assert endless.terms().deadline is endless.plan().deadline is None


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        (["named.before.learning_rate=0.5"], "before"),
        ([], "plain defaults"),  # `before` of a packaged workload is nobody's
        ([f"workload={MINE}"], "before"),
        (["workload=free.py"], "plain defaults"),
    ],
)
def test_reference_is_what_is_trained_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "free.py").write_text(MINE.read_text().split("BEFORE")[0])
    found, config = limits(tmp_path, *typed), setup.prepare_config(load.load(["card=cpu", *typed]), Here())[1]
    assert (found.terms().reference_name, found.terms().reference) == found.reference()
    today = config.named.get(name) or groups.plain_defaults(config.space)
    assert found.reference()[0] == name
    assert found.reference()[1].items() >= {n: v for n, v in today.items() if n in found.reference()[1]}.items()
    assert (found.before() is None) == (name != "before")


@pytest.mark.parametrize(("per_s", "times"), [(1.0, 9), (20.0, 9), (60.0, 1), (1e4, 9)])
@pytest.mark.parametrize("asked", [["search.trials=10"], []])
def test_length_is_what_the_time_allows(tmp_path: Path, per_s: float, times: int, asked: list[str]) -> None:
    typed = ["search.max_time=1000s", "budget.train_epochs=auto", "knobs.batch_size=[16,32]", *asked]
    typed += ["named.before.batch_size=16"]
    found = limits(tmp_path, *typed, records=[probe(per_s), probe(times * per_s, 32)])
    space = setup.prepare_config(load.load(["card=cpu", *typed]), Here())[1].space
    least = FEWEST_STEPS * int(groups.defaults(space)["batch_size"])
    search_s, planned, horizon = 1000 * (1 - SHARE), 10 if asked else PLANNED_TRIALS, found.horizon()
    assert horizon <= max(least, REFERENCE_FRAC * search_s * found.reference_per_s())
    assert horizon <= max(least, times * per_s * search_s / planned)
    assert (horizon == least) == (per_s == 1.0)
    assert (horizon == MOST_EPOCHS * SAMPLES) == (per_s == 1e4)
    assert horizon == least or horizon % SAMPLES == 0
    assert found.plan().samples == found.plan().milestones[-1] == horizon


@pytest.mark.parametrize(
    ("epochs", "typed", "horizon"),
    [
        ("1.5", [], 150),
        ("1.5", ["search.max_time=null"], 150),
        ("0.01", [], 1),  # fewer steps than are chosen by time
        ("9000.0", [], 10_000),
        ("None", ["search.max_time=null"], 100),
        ("1.5", ["budget.train_epochs=3"], 300),
    ],
)
def test_trial_is_no_longer_than_training_is_today(tmp_path: Path, epochs: str, typed: list[str], horizon: int) -> None:
    (tmp_path / "timed.py").write_text(f"{MINE.read_text()}\nEPOCHS = {epochs}\n")
    found = limits(tmp_path, f"workload={tmp_path / 'timed.py'}", *typed, records=[probe(1000.0)])
    assert found.horizon() == horizon if horizon < 10_000 else SAMPLES * 100 < found.horizon() < 9000 * SAMPLES


STARTED = [("trial_start", {"trial": trial, "config": {}}) for trial in "abca"]  # one began again
BESIDE = ("trial_start", {"trial": "d", "config": {}, "beside": True})
LONG = replace(FACTS, train_samples=100_000)


@pytest.mark.parametrize(
    ("asks", "typed", "more", "says"),
    [
        ("few", [], {}, "3 trials beside the reference; search.max_time=16m is enough for about 12"),
        ("few", ["search.max_time=30s"], {}, "search.max_time=2m is enough for about 12"),
        ("few", ["search.trials=4"], {}, "search.max_time=6m is enough for about 4"),
        ("few", ["search.trials=3"], {}, ""),
        ("few", ["search.trials=30"], {}, "is enough for about 30"),
        ("few", ["search.max_time=null"], {}, ""),
        ("long", ["budget=full"], {"facts": LONG, "records": [probe(10.0)]}, "search.max_time=8h"),
        ("long", ["budget=full"], {"facts": LONG, "records": [probe(1e6)]}, ""),
        ("long", ["budget=full", "search.max_time=8h"], {"facts": LONG, "records": [probe(10.0)]}, ""),
        ("idle", ["search.trials=0"], {"records": []}, "search.trials=0: nothing is trained"),
        ("idle", ["search.max_time=null"], {"records": []}, ""),
        ("idle", ["budget.train_epochs=1000"], {"records": [probe(100.0)]}, "and budget.train_epochs=auto shorter"),
        ("idle", ["search.max_time=30s"], {"records": [], "passed_s": 40}, "was over before a speed was known"),
        ("idle", ["budget.train_epochs=1000"], {"records": [probe(1e6)]}, ""),
        ("idle", ["budget.train_epochs=1000"], {"records": [probe(100.0), STARTED[0]]}, ""),
    ],
)
def test_too_little_time_is_told_with_what_is_enough(
    tmp_path: Path, asks: str, typed: list[str], more: dict[str, Any], says: str
) -> None:
    found = limits(tmp_path, *typed, **{"records": [*STARTED, BESIDE], **more})
    said = getattr(found, asks)()
    assert says in said
    assert bool(said) == bool(says)
