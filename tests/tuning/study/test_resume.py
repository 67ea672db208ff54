"""A study that is broken off anywhere goes on to what the unbroken one did: nothing lost, nothing done twice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.tuning.study.formulas import SMALL, Learning, Made, opened
from trainables.knobs import Scalar
from tuning.journal.format import line_of
from tuning.journal.records import Record, read
from tuning.journal.run import History
from tuning.search.protocols import TrialState


class Full(Learning):
    """A device on which a trial of more than 32 samples at once runs out of memory, though a probe did not."""

    ooms_above = 32


class Phased(Learning):
    """A training of two phases, the second of which begins late: its first rung judges nobody."""

    def train(self, knobs: Mapping[str, Scalar], *order: Any) -> TrialState:
        """Returns the result with its phases."""
        phases = {"encoder": 0.6, "classifier": 0.4}
        return replace(super().train(knobs, *order), active={"phases": phases})


@dataclass(frozen=True)
class Case:
    """What is typed beside `SMALL`, on which device, under which cap.

    It is cut after so many records of the search each, and before its end; if it is `whole`, of all stages.
    """

    typed: Sequence[str]
    device: type[Learning] = Learning
    cap_bytes: int | None = None
    every: int = 3
    whole: bool = False


BEFORE = ("named.before.batch_size=16", "named.before.learning_rate=0.001")
RANDOM, TPE = "search.sampler=random", "search.sampler=tpe"
CASES = {
    "known": Case(["search.max_time=10h", "search.trials=6", *BEFORE], every=4, whole=True),
    "of probes alone": Case(["search.trials=0"], every=7, whole=True),
    "plain defaults": Case(["search.trials=5"]),
    "two phases": Case(["search.trials=6", RANDOM], Phased),
    "two at once": Case(["search.trials=6", "concurrency=2", "search.pruner=none", RANDOM]),
    "by tpe": Case(["search.trials=14", TPE], every=9),
    "after an oom": Case(["search.trials=6", RANDOM], Full),
    "under a cap by tpe": Case(["search.trials=14", TPE], cap_bytes=300_000_000, every=8),
}
KEPT: Mapping[str, Sequence[str]] = {
    "footprint": ("coupling", "points", "measured"),
    "probe": ("name", "config", "outcome", "samples_per_s"),
    "refused": ("config", "p_oom", "stage"),
    "trial_start": ("trial", "config", "named", "decision", "p_oom", "expected_per_s", "pick_per_s"),
    "trial": ("trial", "config", "outcome", "stopped_at", "values", "samples_per_s"),
    "window": ("name", "round", "config", "samples_per_s"),
    "pick": ("best", "config", "kind", "reference", "most_accurate", "best_at_speed"),
}


def done(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Returns what was decided, measured and trained, by event and in order; a trial that began again counts once."""
    found: dict[str, list[Any]] = {event: [] for event in KEPT}
    for record in records:
        if record.event in KEPT and record.get("attempt", 1) == 1:
            found[record.event].append({name: record.get(name) for name in KEPT[record.event]})
    for start in found["trial_start"]:
        start["p_oom"] = start["p_oom"] and round(start["p_oom"], 9)  # the order of a sum may be another
    found["pick"] = found["pick"][-1:]  # it is made again if the stage had no end
    found["window"].sort(key=lambda own: (own["round"], own["name"]))  # a round that was broken off has another order
    return found


def study_of(folder: Path, name: str) -> Made:
    """Returns the study of a case, opened or gone on with in a folder."""
    case = CASES[name]
    typed = [] if any("max_time" in item for item in case.typed) else ["search.max_time=null"]
    typed += [f"card.memory_gib={case.cap_bytes / 2**30}"] if case.cap_bytes else []
    profiler = case.device(cap_bytes=case.cap_bytes)
    return opened(folder, *SMALL, "budget.probe.max_time_s=1000", *typed, *case.typed, profiler=profiler)


def gone_on(made: Made, stage: str) -> list[Record]:
    """Returns the records once the study has ended the stage; it ran none after it."""
    made.study.measure_kinds(made.profiler)
    stages = {"probe": made.measure, "search": made.search, "confirm": lambda: made.search().confirm()}
    stages[stage]()
    made.journal.close()
    return made.journal.records


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Record]]:
    """Returns the records of a case, run once."""

    @functools.cache
    def records(name: str) -> list[Record]:
        folder = tmp_path_factory.mktemp("unbroken")
        return gone_on(study_of(folder, name), "confirm" if CASES[name].whole else "search")

    return records


@pytest.mark.parametrize("name", CASES)
def test_study_cut_anywhere_ends_as_the_unbroken_one(
    tmp_path: Path, unbroken: Callable[[str], list[Record]], name: str
) -> None:
    records, case = unbroken(name), CASES[name]
    lines = [line_of(record) for record in records]
    ends = {r["stage"]: r.seq for r in records if r.event == "stage" and r["state"] == "end"}
    stages = [(ends[stage], stage) for stage in ("probe", "search", "confirm") if stage in ends]
    first = 1 if case.whole else ends.get("probe", ends["estimate"]) + 1
    for kept in sorted({*range(first, stages[-1][0], case.every), *(seq for seq, _ in stages if seq > first)}):
        # What follows a stage depends on its records alone, and these are found to be the same.
        end, stage = next((seq, stage) for seq, stage in stages if seq >= kept)
        folder = tmp_path / str(kept)
        folder.mkdir()
        torn = lines[kept][: len(lines[kept]) // 2] if kept % 4 < 2 else b""
        (folder / "trials.jsonl").write_bytes(b"".join(lines[:kept]) + torn)
        rest = gone_on(study_of(folder, name), stage)
        assert done(rest) == done(records[: end + 1]), f"cut after {kept} records, in {stage}"
        begun = {r["trial"] for r in rest[kept:] if r.event == "trial_start"}
        assert not begun & {r["trial"] for r in records[:kept] if r.event == "trial"}, "what has ended runs again"
        seeds = [(r["name"], r["seed"]) for r in rest if r.event == "confirmed"]
        assert len(seeds) == len(set(seeds)), "what was trained is trained again"


@pytest.mark.parametrize("lost", [["trial_start"], ["rung"], ["trial"], ["trial_start", "rung", "trial"]])
def test_no_number_is_given_twice_if_lines_are_lost(
    tmp_path: Path, unbroken: Callable[[str], list[Record]], lost: list[str]
) -> None:
    records = unbroken("two phases")
    fifth = [n for n, r in enumerate(records) if r.event == "trial_start"][4]
    lines = {r.seq: line_of(r) for r in records[: fifth + 1]}
    gone = [r.seq for r in records[:fifth] if r.event in lost and r["trial"] == "t002"]
    lines |= {seq: lines[seq].replace(b'"seq"', b'"sec"') for seq in gone}
    (tmp_path / "trials.jsonl").write_bytes(b"".join(lines.values()))
    rest = gone_on(study_of(tmp_path, "two phases"), "search")
    ended = {r["trial"] for r in records[:fifth] if r.event == "trial" and r.seq not in gone}
    assert not ended & {r["trial"] for r in rest if r.event == "trial_start" and r.seq > fifth}
    ends = [r["trial"] for r in rest if r.event == "trial"]
    assert len(ends) == len(set(ends))
    starts = [(r["trial"], r["config"]) for r in rest if r.event == "trial_start"]
    assert all(config == dict(starts)[trial] for trial, config in starts)


def test_study_whose_first_line_is_broken_is_known(tmp_path: Path, unbroken: Callable[[str], list[Record]]) -> None:
    records = unbroken("known")
    lines = [line_of(record) for record in records]
    assert records[0].event == "study"
    broken = bytes([lines[0][40] ^ 1]).join([lines[0][:40], lines[0][41:]])
    (tmp_path / "trials.jsonl").write_bytes(b"".join([broken, *lines[1:]]))
    left, warnings = read(tmp_path / "trials.jsonl")
    assert (len(left), len(warnings)) == (len(records) - 1, 1)
    assert History(left).study is not None
