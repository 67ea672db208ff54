"""Which configuration a study ends with, by its trials, by probes alone, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tuning.study.formulas import SMALL, Learning, opened
from trainables import knob_columns
from trainables.knobs import Scalar
from trainables.our_knobs import EVERY
from tuning.config import best_file
from tuning.config.errors import NoUsableTrial
from tuning.journal.events import EVENTS, OomRecord, StartRecord, Timed, TrialRecord
from tuning.memory import groups
from tuning.memory.measure import Footprint
from tuning.report import export, summary
from tuning.search.protocols import TrialState
from tuning.search.selection import rule_of
from tuning.study import picking

ENDLESS = (*SMALL, "search.max_time=null", "search.trials=8")
PICKS: Mapping[str, tuple[Learning, list[str], str, int]] = {
    "faster": (Learning(), [], "faster", 64),
    "system": (Learning(spoils=1.0), [], "system", 32),
    "reference": (Learning(spoils=1.0, drifts=False), [], "reference", 32),
    "faster by a tolerance": (Learning(spoils=0.5), ["pick.tolerance=0.6"], "faster", 64),
    "faster by a quality": (Learning(spoils=0.5), ["pick.at_least=0.9"], "faster", 64),
    "better": (Learning(), ["pick.goal=quality"], "faster", 64),
    "beside before": (Learning(), ["named.before.batch_size=16", "named.before.learning_rate=0.001"], "faster", 64),
}


@pytest.mark.parametrize("case", PICKS)
def test_study_ends_with_the_right_kind_of_pick(tmp_path: Path, case: str) -> None:
    profiler, typed, kind, size = PICKS[case]
    made = opened(tmp_path, *ENDLESS, *typed, profiler=profiler).search().confirm()
    (pick,), run = made.run.picks, made.run
    assert (pick.kind, pick.config["batch_size"]) == (kind, size)
    assert pick.reference == ("before" if "before" in case else "plain defaults")
    assert (pick.best != "") == (kind == "faster")
    rates = [
        [window.samples_per_s or 0.0 for window in run.all_windows if window.config == config]
        for config in (pick.config, run.reference.config)
    ]
    assert len(rates[0]) >= 5
    assert min(rates[0]) >= max(rates[1]), "in turns it is no slower"
    if kind == "faster":
        gains = next(r["gains"] for r in made.journal.records if r.event == "pick")[pick.best]
        rule = rule_of(run)
        assert len(gains) >= 3
        assert rule.admits(sum(gains) / len(gains))
    if kind == "system":
        made.study.publish()
        assert best_file.read(tmp_path / "best.yaml").knobs["batch_size"] == size
        assert (tmp_path / "report.html").exists()
        assert made.run.is_finished


class Flattering(Learning):
    """A machine on which two loader processes save a fifth, and a first probe of 32 or any of 64 comes out too fast."""

    def micro_step_s(self, knobs: Mapping[str, Scalar]) -> float:
        """Returns a little less a sample for larger micro-batches."""
        size = min(int(knobs["micro_batch_size"]), int(knobs["batch_size"]))
        return (size / 32) ** 1.1 * (0.8 if knobs.get("num_workers") == 2 else 1.0)

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
        """Returns the formula's speed."""
        found = super().probe(knobs, time_s, best_samples_per_s)
        is_off = knobs["micro_batch_size"] == 64 or (knobs["batch_size"], len(self.probed)) == (32, 1)
        return replace(found, micro_step_s=found.micro_step_s / (1.5 if is_off else 1.0))


HELD = ("knobs.batch_size=32", "knobs.micro_batch_size=32", "knobs.amp_dtype=fp32", "search.max_time=1h")


@pytest.mark.parametrize("typed", [HELD, ENDLESS], ids=["of the reference", "of a trial"])
def test_a_probe_that_was_too_fast_decides_nothing(tmp_path: Path, typed: tuple[str, ...]) -> None:
    run = opened(tmp_path, *typed, profiler=Flattering()).search().confirm().run
    assert [(pick.kind, pick.config["num_workers"]) for pick in run.picks] == [("system", 2)]


class OutOfTime(Learning):
    """A machine whose time for probes ends in that of eight workers."""

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> Timed:
        """Returns the formula's speed."""
        late = knobs.get("num_workers") == 8
        return Timed(outcome="cut") if late else super().probe(knobs, time_s, best_samples_per_s)


def test_a_named_configuration_without_a_probe_is_said(tmp_path: Path) -> None:
    typed = ("search.trials=0", "named.before.batch_size=16", "named.fixes.num_workers=8")
    made = opened(tmp_path, *typed, profiler=OutOfTime()).measure()
    assert "no time was left to measure fixes: a larger search.max_time does" in [note.text for note in made.run.notes]


class OneSeed(Learning):
    """A training that sets its own seed."""

    def train(self, *asked: Any, **named: Any) -> TrialState:
        """Returns the result with that seed."""
        return replace(super().train(*asked, **named), active={"seed": 7})


def test_seeds_that_a_training_sets_are_not_called_fresh(tmp_path: Path) -> None:
    made = opened(tmp_path, *ENDLESS, profiler=OneSeed()).search().confirm()
    assert "train(run) sets its seed itself" in made.run.picks[0].rule


def test_another_tolerance_makes_the_pick_anew(tmp_path: Path) -> None:
    made = opened(tmp_path, *ENDLESS, profiler=Learning(spoils=0.5)).search().confirm()
    assert [r.kind for r in made.run.picks] == ["system"]
    trained = len(made.run.ended)
    for _ in range(2):  # broken off before it has confirmed
        made.journal.close()
        made = opened(tmp_path, *ENDLESS, "pick.tolerance=0.6", profiler=Learning(spoils=0.5))
    assert made.run.is_done("search")
    assert not made.run.is_done("confirm")
    made.confirm()
    picks = [(r["kind"], r["tolerance"]) for r in made.journal.records if r.event == "pick"]
    assert picks == [("system", 0.0), ("faster", 0.6)]
    assert len(made.run.ended) == trained


UNSAID = "named.before.set_to_none=false"
TODAY = ("named.before.learning_rate=0.00123", "named.before.num_workers=0", "named.before.weight_decay=0.5")


@pytest.mark.parametrize(
    ("typed", "own", "rule"),
    [
        (["search.trials=0", *TODAY], {}, "as in your settings"),
        (["search.trials=4", *TODAY], {}, "as in your settings"),  # time left none of the four
        (
            ["search.trials=0", "knobs.learning_rate=0.01", *TODAY],
            {"learning_rate": 0.01},
            "learning_rate=0.01 as typed",
        ),
        (["search.trials=0", "knobs.amp_dtype=[fp32,bf16]"], {}, "at its default: nothing was trained"),
        (["search.trials=0", UNSAID], {"learning_rate": 5e-4}, "as in your settings"),  # the reference has its default
        (["search.trials=4", UNSAID], {"learning_rate": 5e-4}, "as in your settings"),
    ],
)
def test_without_trials_system_knobs_alone_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], own: dict[str, Any], rule: str
) -> None:
    monkeypatch.setattr(knob_columns, "flags_of_cpu", lambda: frozenset({"avx512bw"}))
    made = opened(tmp_path, *typed).measure().confirm()
    best, before = made.run.picks[0].config, made.config.named["before"] if "before" in "".join(typed) else {}
    today = {**groups.defaults(made.config.space), **before, **own}
    learned = [name for name in best if EVERY[name].kind != "system"]
    assert {name: best[name] for name in learned} == {name: today[name] for name in learned}
    assert best["num_workers"] == 2
    if "search.trials=0" in typed:
        assert {probe.config["amp_dtype"] for probe in made.run.probes if not probe.name} == {today["amp_dtype"]}
    assert rule in made.run.picks[0].rule
    if UNSAID in typed:  # which no file searches: what is measured is what is picked
        assert not any(probe.config["set_to_none"] for probe in made.run.probes)
        assert not best["set_to_none"]
    assert not made.run.begun
    assert not made.run.confirmed
    (best_yaml, *_) = export.write_all(summary.of_run(made.run), tmp_path)
    assert best_file.read(best_yaml).knobs["num_workers"] == 2
    gains = {(gain.of, gain.over) for gain in summary.of_run(made.run).gains}
    assert ("best", made.study._limits.reference()[0]) in gains


def ended(trial: str, outcome: str, config: Mapping[str, Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    """Returns the record of a trial that ended so."""
    values = {"error": 0.2} if outcome == "ok" else {}
    rate = 9.0 if outcome == "ok" else None
    own = {"values": values, "samples_per_s": rate, "message": "", "seed": 0, **fields}
    return "trial", {"trial": trial, "config": dict(config), "outcome": outcome, **own}


@pytest.mark.parametrize("outcome", ["cut", "crash"])
def test_reference_that_alone_ended_has_a_pick(tmp_path: Path, outcome: str) -> None:
    made = opened(tmp_path, "search.max_time=null").measure()
    today = groups.uncut(made.config.space, made.run, groups.guard(made.run, None))
    made.journal.append(StartRecord, trial="t000", config=today, named="plain defaults", beside=True)
    for trial, own in (("t000", "ok"), ("t001", outcome)):
        made.journal.append(TrialRecord, **ended(trial, own, today)[1])
    (pick,) = made.confirm().run.picks
    assert (pick.best, pick.kind, pick.config["num_workers"]) == ("", "system", 2)


def test_pick_of_probes_never_ran_out_of_memory(tmp_path: Path) -> None:
    own = ("batch_size=32", "micro_batch_size=32", "num_workers=0", "sync_every_step=false", "set_to_none=true")
    typed = ["search.max_time=null", *SMALL, *(f"named.before.{one}" for one in own)]
    made = opened(tmp_path, *typed, profiler=Learning(drifts=False)).measure()
    today = dict(made.config.named["before"])
    made.journal.append(StartRecord, trial="t000", config=today, named="before", beside=True)
    made.journal.append(OomRecord, trial="t000", config=today, outcome="oom", message="full")
    made.journal.append(TrialRecord, **ended("t000", "cut", {**today, "micro_batch_size": 16})[1])
    (pick,) = made.confirm().run.picks
    assert pick.config["micro_batch_size"] == 16


def test_reference_is_confirmed_as_it_fitted(tmp_path: Path) -> None:
    typed = ["search.max_time=null", "named.before.batch_size=32", "named.before.micro_batch_size=32"]
    made = opened(tmp_path, *typed).measure()
    today = {**made.config.space.whole(made.config.named["before"]), "micro_batch_size": 16}
    made.journal.append(StartRecord, trial="t000", config=today, named="before", beside=True)
    made.journal.append(TrialRecord, **ended("t000", "ok", today)[1])
    run = made.confirm().run
    again = [r.config for r in (*run.confirmed, *run.all_windows) if r.name == "before"]
    assert again
    assert all(config == today for config in again)


REFUSED = ("refused", {"stage": "search", "config": {}, "reason": "predicted peak 3 GiB at a cap of 1 GiB"})
CRASHED = {"name": None, "config": {}, "outcome": "crash", "message": "it broke", "samples_per_s": None, "wall_s": 0.0}
PROBED = {**CRASHED, "config": {"batch_size": 8}, "outcome": "ok", "message": "", "samples_per_s": 9.0}
PROBED |= {"micro_step_s": 1.0, "optimizer_step_s": 0.0}
BEGUN = ("trial_start", {"trial": "t000", "config": {}, "named": "plain defaults", "beside": True})
LOST = [ended(trial, "crash", {}, message="it is gone") for trial in ("t000", "t001")]


@pytest.mark.parametrize(
    ("records", "typed", "says", "remedy"),
    [
        ([REFUSED] * 2, [], "; 2 of the proposals: refused: predicted peak 3 GiB", picking.SMALLER),
        ([("probe", CRASHED)] * 2, [], "; 2 of the probes: crash: it broke", "mend what it names"),
        ([("probe", {**CRASHED, "outcome": "oom"})] * 2, [], "; 2 of the probes: oom: it broke", picking.SMALLER),
        ([("probe", {**CRASHED, "outcome": "cut"})], [], "", "search.max_time=10m"),
        (
            [REFUSED, ended("t000", "cut", {}, message="search.max_time was over")],
            *([], "", "search.max_time=10m"),
        ),
        ([("probe", PROBED), BEGUN, *LOST], [], "; 2 of them: crash: it is gone", "mend what it names, and go on"),
    ],
)
def test_study_without_a_pick_says_why_and_what_helps(
    tmp_path: Path, records: list[Any], typed: list[str], says: str, remedy: str
) -> None:
    made = opened(tmp_path, *typed)
    for event, fields in records:
        made.journal.append(EVENTS[event], **fields)
    with pytest.raises(NoUsableTrial) as raised:
        made.confirm()
    assert raised.value.what.startswith(f"no trial of the search reached its end in {tmp_path}{says}")
    assert raised.value.remedy.startswith(remedy)


@pytest.mark.parametrize("event", ["probe", "trial", "resume"])
def test_trainings_that_depend_on_each_other_give_no_answer(tmp_path: Path, event: str) -> None:
    made, message = opened(tmp_path), "NotIndependent: it begins with other weights"
    kind, trial = ended("t000", "crash", {}, message=message)
    kind, fields = (kind, trial) if event == "trial" else ("probe", {**CRASHED, "message": message})
    made.journal.append(EVENTS[kind], **fields)
    if event == "resume":  # the file was mended since
        made.journal.append(EVENTS["resume"])
        picking.require_independent(made.run)
        return
    with pytest.raises(NoUsableTrial, match=r"no result counts: it begins with other weights") as raised:
        picking.require_independent(made.run)
    assert raised.value.remedy == "mend what it names, and search anew"


@pytest.mark.parametrize(("last", "is_told"), [("LoopError: so", True), ("OutOfMemoryError: so", False)])
def test_loop_of_which_no_probe_is_right_is_not_searched(tmp_path: Path, last: str, is_told: bool) -> None:
    made = opened(tmp_path)
    for message in ("LoopError: so", last):
        made.journal.append(EVENTS["probe"], **CRASHED | {"message": message})
    with pytest.raises(NoUsableTrial, match="a mistake in the loop: so") if is_told else nullcontext():
        picking.require_sound(made.run)


class Late(Learning):
    """A device after search.max_time: whatever is asked of it is cut."""

    def footprint(self, *asked: Any) -> Footprint:
        """Returns nothing measured."""
        return Footprint(outcome="cut")

    def probe(self, *asked: Any) -> Timed:
        """Returns no speed."""
        return Timed(outcome="cut")


def test_study_that_loads_longer_than_its_time_says_so(tmp_path: Path) -> None:
    made = opened(tmp_path, "search.max_time=30s", profiler=Late(), passed_s=40).search()
    assert not any(r.event in ("footprint", "refused", "trial_start") for r in made.journal.records)
    with pytest.raises(NoUsableTrial, match=r"search\.max_time=30s was over before anything was measured: 4\ds"):
        made.confirm()
    made.journal.close()
    more = opened(tmp_path, "search.max_time=4m").measure()
    assert all(more.run.is_done(stage) for stage in ("estimate", "probe")), "what was left out is measured now"
    assert {probe.outcome for probe in more.run.probes} == {"cut", "ok"}
