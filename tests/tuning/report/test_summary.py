"""What a run found, from its records, whole or cut off."""

import dataclasses

import pytest

from tests.tuning.answered import changed, each, until
from tuning.config import best_file
from tuning.journal.records import Record
from tuning.journal.run import History
from tuning.report import export, sentences, summary, tables
from tuning.report.named import Confirming, gains


def of(records):
    return summary.of_run(History(records))


def later(records, event, seq=900, **fields):
    return Record(seq, records[-1].t, event, fields, records[-1].mono)


def test_the_best_has_its_windows_and_its_seeds(found):
    best = found.best
    assert (best.trial, best.config["batch_size"]) == ("t007", 32)
    assert len(best.throughput.windows) == 5
    assert best.throughput.mean == pytest.approx(61.27, abs=0.01)
    assert best.trained.mean == pytest.approx(1.036 * 61.2, abs=0.01)
    assert dict(best.quality["accuracy"].by_seed) == {11: 0.905, 12: 0.909, 13: 0.904}
    assert best.quality["accuracy"].confirmed


def test_speeds_that_stand_below_each_other_have_the_ratio_that_is_told(found):
    today = found.reference.samples_per_s
    for gain in found.gains:
        if gain.over == found.reference.name and gain.rounds:
            assert found.named[gain.of].samples_per_s == pytest.approx(today * gain.ratio)


@pytest.mark.parametrize(
    ("without", "trainings", "rounds", "ratio"),
    [
        ({}, 1, 5, 1.85),
        ({"window"}, 1, 0, 63.04 / 34.2),
        ({"confirmed"}, 0, 5, 1.85),
        ({"window", "confirmed"}, 0, 0, 61.0 / 33.06),
    ],
)
def test_gains_come_from_trainings_and_rounds_else_from_probes(records, without, trainings, rounds, ratio):
    gain = of([r for r in records if r.event not in without]).gain("best", "before")
    assert (gain.trainings, gain.rounds, gain.low is not None) == (trainings, rounds, rounds > 0)
    assert gain.ratio == pytest.approx(ratio, abs=0.01)


def test_without_rounds_no_training_is_compared_with_a_probe(records):
    own = [r for r in records if (r.event != "window" and r.get("name") != "before") or r.event == "probe"]
    fast = each(own, "confirmed", "best", samples_per_s=1000.0)
    assert of(fast).gain("best", "before") == of(own).gain("best", "before")


def test_where_the_rate_alone_differs_there_is_no_gain(records, found):
    for knobs, ratio in (({"learning_rate": 0.5, "schedule": "constant"}, 1.0), ({"dropout": 0.5}, 1.85)):
        own = records
        for event in ("probe", "window"):
            own = each(own, event, "before", config={**found.best.config, **knobs})
        gain = of(own).gain("best", "before")
        assert gain.ratio == pytest.approx(ratio, abs=0.01)
        assert gain.is_told == (ratio != 1.0)


def test_the_pick_over_itself_gains_nothing(records, found, tmp_path):
    same = {name: dataclasses.replace(found.best, name=name) for name in found.named}
    own = gains(Confirming(History(records), found.objectives, None), same, "before")
    assert {(g.ratio, g.low) for g in own} == {(1.0, 1.0)}
    alone = dataclasses.replace(found, named=same, gains=own, ablation=())
    assert not any(row[0].startswith("best") for row in tables.answers(alone).rows)
    assert not any("ablate" in command for command in sentences.next_commands(alone, tmp_path))


def test_windows_of_another_configuration_are_not_the_bests(records, found):
    own = [r for r in records if r.event == "window" and r["name"] == "best"]
    earlier = [changed(r, config={**found.best.config, "batch_size": 7}, samples_per_s=1e9) for r in own]
    again = of([*records, *earlier])
    assert (again.best, again.gains) == (found.best, found.gains)


def test_the_time_is_the_same_before_and_after_the_page(records):
    assert (records[-1]["stage"], records[-1]["state"]) == ("export", "end")
    page = of(records[:-1])
    assert of([*records, later(records, "stop", reason="finished")]).times == page.times
    assert page.times.wall_s > 0


def test_every_trial_is_counted_once(records, found):
    assert found.trial_counts == {"ok": 5, "stopped": 4, "oom": 1, "refused": 1, "diverged": 1, "lost": 0}
    assert found.probe_counts["refused"] == 1
    assert sum(found.trial_counts.values()) == 12
    left = [r for r in records if not (r.event == "trial" and r["trial"] == "t001")]
    assert of(left).trial_counts["lost"] == 1
    assert of([r for r in left if r.event != "pick"]).trial_counts["lost"] == 0, "it may still end"


def test_only_failures_are_told_as_such(records):
    why = "the search's share of search.max_time is spent"
    own = [changed(r, reason=why) if r.event == "trial" and r["outcome"] == "stopped" else r for r in records]
    told = {t.outcome: t.message for t in of(own).trials if t.message}
    assert told["stopped"] == why
    assert told.keys() == {"stopped", "oom", "diverged"}
    assert sentences.failed(of(own).trials) == ["1 diverged: loss is nan after 190 samples"]


def test_a_trial_stopped_between_rungs_has_its_last_rungs_value(records):
    stopped = next(r for r in records if r.event == "trial" and r["outcome"] == "stopped")
    seen = [r for r in records if r.event == "rung" and r["trial"] == stopped["trial"]][-1]
    late = changed(stopped, stopped_at=stopped["stopped_at"] + 1, values={})
    found = of([late if r is stopped else r for r in records])
    own = next(t for t in found.trials if t.trial == stopped["trial"])
    assert own.values == seen["values"] != {}
    assert found.curves[own.trial][-1] == (seen["samples"], seen["values"]["accuracy"]), "and not where it was stopped"


def test_a_run_sums_up_wherever_it_is_cut_off(records):
    for end in range(len(records) + 1):
        found = of(records[:end])
        picked = any(r.event == "pick" for r in records[:end])
        measured = any(r.event == "probe" and not r["name"] and r["outcome"] == "ok" for r in records[:end])
        assert (found.best is not None) == measured
        assert found.provisional == (measured and not picked)
        assert ("No configuration was picked" in sentences.answer(found)) == (not measured)


@pytest.mark.parametrize("junk", [None, "nonsense", [], {"accuracy": "high"}, float("nan"), True])
def test_a_damaged_record_still_sums_up(records, junk):
    keys = ("values", "samples_per_s", "config", "seed", "peak_allocated_bytes", "wall_s", "train_s")
    found = of([changed(r, **{k: junk for k in keys if k in r.fields}) for r in records])
    assert (found.best.quality, found.gains) == ({}, ())


def test_what_is_not_there_is_not_made_up():
    found = of([Record(0, "2026-11-21T10:00:00.000Z", "study", {"id": "x"})])
    assert (found.id, found.best, found.objective, found.gains) == ("x", None, "", ())
    assert found.place.device == "unknown device"


def test_the_verdict_is_of_the_last_training_else_of_a_probe(records, found):
    def spans(wait_s):
        parts = {"data_wait_s": wait_s, "transfer_s": 0.0, "forward_backward_s": 9.0 - wait_s}
        return {**parts, "optimizer_s": 1.0, "wall_s": 10.0}

    assert found.best.verdict is None
    probes = each(records, "probe", spans=spans(4.0))
    verdict = of(probes).named["before"].verdict
    assert (verdict.bound, verdict.share) == ("loader", pytest.approx(0.4))
    remedies = [r.partition("=")[0] for r in verdict.remedies]
    assert remedies
    assert not of(each(probes, "study", asked=["hidden"])).named["before"].verdict.remedies  # of a custom loop
    verdict = of(each(probes, "study", asked=remedies[:1])).named["before"].verdict
    assert [r.partition("=")[0] for r in verdict.remedies] == remedies[:1]
    assert of(each(probes, "confirmed", spans=spans(0.1))).best.verdict.bound == "compute"


def test_trainings_count_under_the_trials_own_name_too(records, found):
    assert of(each(records, "confirmed", "best", name="t007")).best == found.best
    config = next(r for r in records if r.event == "trial" and r["trial"] == "t009")["config"]
    third = of(each(records, "confirmed", "best", name="t009", config=config)).named["most_accurate"]
    assert third.trained is not None
    assert third.quality["accuracy"].confirmed


def test_a_peak_is_the_largest_of_that_configuration(records, found, tmp_path):
    trained = [r for r in records if r.event == "confirmed" and r["name"] == "best"]
    spans = {"wall_s": 1.0, "data_wait_s": 0.0, "transfer_s": 0.0, "forward_backward_s": 0.2, "optimizer_s": 0.1}
    larger = changed(trained[0], peak_allocated_bytes=3 * 2**30, spans=spans)
    other = changed(trained[1], peak_allocated_bytes=9 * 2**30, config={**found.best.config, "ram_cache": False})
    study = each(records, "study", card={**records[0]["card"], "cap_bytes": 3 * 2**30})
    own = of([{trained[0].seq: larger, trained[1].seq: other}.get(r.seq, r) for r in study])
    assert (found.best.peak_allocated_bytes, own.best.peak_allocated_bytes) == (1288490188, 3 * 2**30)
    assert own.best.verdict.bound == "memory"
    export.write_best(own, tmp_path / "best.yaml")
    assert best_file.read(tmp_path / "best.yaml").measured.peak_allocated_bytes == 3 * 2**30
    smaller = changed(trained[0], peak_allocated_bytes=2**20)
    again = of([smaller if r is trained[0] else r for r in records])
    assert again.best.peak_allocated_bytes == found.best.peak_allocated_bytes


def test_a_before_that_the_search_trained_has_its_quality(records, found):
    kept = [r for r in records if r.event != "confirmed" or r["name"] != "before"]
    own = of([changed(r, named="before") if is_begin(r, "t000") else r for r in kept])
    quality, trial = own.named["before"].quality["accuracy"], next(t for t in own.trials if t.trial == "t000")
    assert (quality.mean, quality.confirmed) == (trial.values["accuracy"], False)
    assert own.named["before"].samples_per_s == found.named["before"].samples_per_s
    assert "on different seeds" in sentences.answer(own)


def test_a_training_that_was_cut_has_no_speed_of_the_pick(records, found):
    last = next(r for r in records if r.event == "confirmed" and r["seed"] == 13)
    cut = [changed(r, outcome="cut", samples_per_s=1e6) if r is last else r for r in records]
    assert len(of(cut).best.trained.windows) == len(found.best.trained.windows) - 1


@pytest.mark.parametrize(("name", "ends"), [("val_acc", True), ("mIoU", True), ("accuracy", True), ("gap", False)])
def test_an_interval_of_a_share_ends_at_its_bound(records, name, ends):
    values = iter((0.95, 0.99, 0.998))
    own = [
        changed(r, values={name: next(values)}) if r.event == "confirmed" and r["name"] == "best" else r
        for r in each(records, "study", objectives={name: "max"})
    ]
    high = of(own).best.quality[name].high
    assert high == 1.0 if ends else high > 1.0


def test_before_confirming_a_speed_says_what_it_is_of(records, tmp_path):
    cut = [changed(r, named="before") if is_begin(r, "t000") else r for r in until(records, "confirm")]
    assert "as fast as your settings (by short timings)" in sentences.answer(of(cut))
    elsewhere = [
        changed(r, config={**r["config"], "micro_batch_size": 1}) if r.event == "probe" and not r["name"] else r
        for r in cut
    ]
    found = of(elsewhere)
    assert found.best.probed_samples_per_s is None
    assert found.best.trained.windows == (found.best.samples_per_s,)
    theirs, mine = tables.answers(found).rows[:2]
    assert (mine[1].endswith(" (trained)"), theirs[1].endswith(" (probed)")) == (True, True)
    assert mine[2].endswith("x (a training over a short timing)")
    best = best_file.read(export.write_best(found, tmp_path / "best.yaml"))
    assert best.measured.samples_per_s.status == "from the search"


def is_begin(record, trial):
    return record.event == "trial_start" and record["trial"] == trial


def test_the_command_is_that_of_each_session(records, found):
    again = of([*records, later(records, "resume", command="python -m tuning.run resume=one")])
    assert again.study.command == f"{records[0]['command']} && python -m tuning.run resume=one"
    early = each(records, "confirmed", has_ended=True, samples=320)
    assert (found.best.samples, of(early).best.samples) == (None, 320)


@pytest.mark.parametrize(("resumed_by", "is_told"), [("search", False), ("pick", True)])
def test_few_trials_are_told_until_the_search_has_more_time(records, resumed_by, is_told):
    few = later(records, "note", text="2 trials are few", warns="few")
    more = later(records, "resume", 901, **{resumed_by: {"changed": 1}})
    assert "2 trials are few" in of([records[0], few, *records[1:]]).warnings
    assert ("2 trials are few" in of([records[0], few, *records[1:], more]).warnings) == is_told


@pytest.mark.parametrize(("after_per_s", "is_told"), [(15.0, True), (90.0, False)])
def test_trainings_that_slow_down_have_their_own_speed(records, found, after_per_s, is_told):
    def timed(record):
        if record.event == "rung":
            return changed(record, measured_samples_per_s=100.0)
        samples = 900 if record.event == "trial" else 0
        whole_s = 3.0 + (samples - 300) / after_per_s
        return changed(record, samples=samples, measured_samples_per_s=samples / whole_s) if samples else record

    own = of([timed(r) for r in records])
    assert (own.slowing is not None) == is_told
    assert ("slow down" in " ".join(sentences.cautions(own))) == is_told
    assert (own.best.throughput is None) == is_told
    assert found.slowing is None
