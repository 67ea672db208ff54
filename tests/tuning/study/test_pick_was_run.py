"""The pick of studies of many kinds was run as it stands, never ran out of memory, and has a quality of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.tuning.study.formulas import SMALL, Learning, opened
from trainables.knobs import Scalar
from tuning.config import best_file
from tuning.journal.events import MeasuredRecord
from tuning.memory.oom import Outcome
from tuning.report import export, summary

TYPED = {
    "probes alone": ["search.trials=0"],
    "known": ["search.trials=6"],
    "random": ["search.trials=6", "search.sampler=random", "search.pruner=none"],
    "tpe": ["search.trials=8", "search.sampler=tpe"],
    "today": ["search.trials=6", "named.before.batch_size=16", "named.before.learning_rate=0.001"],
    "quality": ["search.trials=6", "pick.goal=quality"],
    "at least": ["search.trials=6", "pick.at_least=0.21"],
    "my batch": ["search.trials=0", "knobs.batch_size=64"],
}
DEVICES = {
    "roomy": Learning,
    "full above 32": type("FullAbove32", (Learning,), {"ooms_above": 32}),
    "full above 16": type("FullAbove16", (Learning,), {"ooms_above": 16}),
}
CAPPED = ("known", "tpe", "my batch")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("typed", TYPED)
def test_pick_was_run_as_it_stands(tmp_path: Path, typed: str, device: str) -> None:
    cap_bytes = 300_000_000 if typed in CAPPED else None
    cap = [f"card.memory_gib={cap_bytes / 2**30}"] if cap_bytes else []
    profiler = DEVICES[device](cap_bytes=cap_bytes)
    asked = [*SMALL[typed == "my batch" :], "search.max_time=10h", "budget.probe.max_time_s=1000", *cap, *TYPED[typed]]
    made = opened(tmp_path, *asked, profiler=profiler)
    made.study.measure_kinds(profiler)
    run = made.search().confirm().run
    export.write_all(summary.of_run(run), tmp_path)
    best = best_file.read(tmp_path / "best.yaml").knobs

    def is_best(config: Mapping[str, Scalar]) -> bool:
        return {**run.table.defaults, **config} == {**run.table.defaults, **best}

    outcomes = {one.outcome for one in run.events if isinstance(one, MeasuredRecord) and is_best(one.config)}
    assert Outcome.OK in outcomes
    assert not outcomes & {Outcome.OOM, Outcome.HOST_OOM}
    own = {one.seed: one.values["error"] for one in run.confirmed if is_best(one.config)}
    found = summary.of_run(run).best
    for quality in found.quality.values():
        assert {**quality.by_seed, **own} == quality.by_seed
