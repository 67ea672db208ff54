"""What a run found, from its records, whole or cut off."""

import dataclasses
from types import SimpleNamespace

import pytest
from rich.console import Console

from tuning.config import best_file
from tuning.journal.records import Record
from tuning.journal.run import History
from tuning.report import export, sentences, summary, tables, text
from tuning.report.named import gains


def changed(record, **fields):
    return dataclasses.replace(record, fields={**record.fields, **fields})


def test_the_best_has_its_windows_and_its_seeds(records):
    best = summary.of_run(History(records)).best
    assert best is not None
    assert (best.trial, best.config["batch_size"]) == ("t007", 32)
    assert best.throughput is not None
    assert len(best.throughput.windows) == 5
    assert best.samples_per_s == best.throughput.mean == pytest.approx(61.27, abs=0.01)
    assert best.trained is not None
    assert best.trained.mean == pytest.approx(1.036 * 61.2, abs=0.01)
    assert dict(best.quality["accuracy"].by_seed) == {11: 0.905, 12: 0.909, 13: 0.904}
    assert best.quality["accuracy"].confirmed


def test_gains_come_from_the_rounds(records):
    found = summary.of_run(History(records))
    over = {(g.of, g.over): g for g in found.gains}
    assert over["best", "before"].ratio == pytest.approx(1.85, abs=0.01)
    assert over["best", "after"].rounds == 5
    assert over["best", "before"].ratio == pytest.approx(
        over["best", "after"].ratio * over["after", "before"].ratio, rel=1e-9
    )


def test_without_rounds_the_gain_is_of_trainings_on_the_same_seeds_and_else_of_probes(records):
    gain = summary.of_run(History([r for r in records if r.event != "window"])).gain("best", "before")
    assert gain is not None
    assert (gain.rounds, gain.low) == (1, None)
    assert gain.ratio == pytest.approx(63.04 / 34.2, abs=0.01)
    probed = [r for r in records if r.event not in ("window", "confirmed")]
    gain = summary.of_run(History(probed)).gain("best", "before")
    assert (gain.rounds, gain.low) == (0, None)
    assert gain.ratio == pytest.approx(61.0 / 33.06, abs=0.01)


def test_the_time_of_a_run_is_the_same_in_the_page_that_its_end_writes_and_behind_it(records):
    last = records[-1]
    assert (last["stage"], last["state"]) == ("export", "end")
    page = summary.of_run(History(records[:-1]))
    stop = Record(last.seq + 1, last.t, "stop", {"reason": "finished"}, last.mono)
    assert summary.of_run(History([*records, stop])).times == page.times
    assert page.times.wall_s > 0


def test_every_trial_is_counted_once(records):
    found = summary.of_run(History(records))
    assert found.trial_counts == {"ok": 5, "stopped": 4, "oom": 1, "refused": 1, "diverged": 1, "lost": 0}
    assert found.probe_counts["refused"] == 1
    assert sum(found.trial_counts.values()) == 12


def test_why_a_trial_was_stopped_is_told_as_a_failure_is(records):
    why = "the search's share of search.max_time is spent"
    own = [changed(r, reason=why) if r.event == "trial" and r["outcome"] == "stopped" else r for r in records]
    told = {(t.outcome, t.message) for t in summary.of_run(History(own)).trials if t.message}
    assert told == {("stopped", why), ("oom", "tried to allocate 2.10 GiB of 23.20 GiB")} | {
        ("diverged", "loss is nan after 190 samples")
    }
    assert sentences.failed(summary.of_run(History(own)).trials) == ["1 diverged: loss is nan after 190 samples"]


def test_a_trial_that_the_time_stopped_between_rungs_has_what_its_last_rung_had(records):
    stopped = next(r for r in records if r.event == "trial" and r["outcome"] == "stopped")
    seen = [r for r in records if r.event == "rung" and r["trial"] == stopped["trial"]][-1]
    late = changed(stopped, stopped_at=stopped["stopped_at"] + 1, values={})
    found = summary.of_run(History([late if r is stopped else r for r in records]))
    own = next(t for t in found.trials if t.trial == stopped["trial"])
    assert own.values == seen["values"] != {}
    assert found.curves[own.trial][-1] == (seen["samples"], seen["values"]["accuracy"]), "and not where it was stopped"


def test_a_trial_without_an_end_is_lost_once_the_run_is_over(records):
    left = [r for r in records if not (r.event == "trial" and r["trial"] == "t001")]
    assert summary.of_run(History(left)).trial_counts["lost"] == 1
    assert summary.of_run(History([r for r in left if r.event != "pick"])).trial_counts["lost"] == 0


def test_the_most_accurate_is_spoken_of_where_it_is_another_one(records):
    assert "most_accurate" in summary.of_run(History(records)).answers
    assert summary.of_run(History(records)).named["most_accurate"].trial == "t009"
    pick = next(r for r in records if r.event == "pick")
    same = [changed(r, most_accurate="t007") if r is pick else r for r in records]
    assert list(summary.of_run(History(same)).answers) == ["best"]


def test_a_run_sums_up_wherever_it_is_cut_off(records):
    for end in range(len(records) + 1):
        found = summary.of_run(History(records[:end]))
        picked = any(r.event == "pick" for r in records[:end])
        measured = any(r.event == "probe" and not r["name"] and r["outcome"] == "ok" for r in records[:end])
        assert (found.best is not None) == measured
        assert found.provisional == (measured and not picked)


@pytest.mark.parametrize("junk", [None, "nonsense", [], {"accuracy": "high"}, float("nan"), True])
def test_a_damaged_record_still_sums_up(records, junk):
    keys = ("values", "samples_per_s", "config", "seed", "peak_allocated_bytes", "wall_s", "first_step_at")
    damaged = [changed(r, **{k: junk for k in keys if k in r.fields}) for r in records]
    found = summary.of_run(History(damaged))
    assert found.best is not None
    assert found.best.quality == {}
    assert found.gains == ()


def test_what_is_not_there_is_not_made_up():
    found = summary.of_run(History([Record(0, "2026-11-21T10:00:00.000Z", "study", {"id": "x"})]))
    assert (found.id, found.best, found.objective, found.gains) == ("x", None, "", ())
    assert found.place.device == "unknown device"


def test_the_verdict_is_that_of_the_last_training_else_of_what_was_measured(records):
    def spans(wait_s):
        return {
            "data_wait_s": wait_s,
            "transfer_s": 0.0,
            "forward_backward_s": 9.0 - wait_s,
            "optimizer_s": 1.0,
            "wall_s": 10.0,
        }

    probes = [changed(r, spans=spans(4.0)) if r.event == "probe" else r for r in records]
    assert summary.of_run(History(records)).best.verdict is None
    found = summary.of_run(History(probes)).named
    assert (found["before"].verdict.bound, found["before"].verdict.band) == ("loader", "OK")
    assert found["before"].verdict.share == pytest.approx(0.4)
    remedies = [r.partition("=")[0] for r in (*found["before"].verdict.remedies, *found["before"].verdict.tried)]
    assert len(remedies) > 1
    asks = [changed(r, asked=remedies[:1]) if r.event == "study" else r for r in probes]  # of a loop of one's own
    verdict = summary.of_run(History(asks)).named["before"].verdict
    assert [r.partition("=")[0] for r in (*verdict.remedies, *verdict.tried)] == remedies[:1]
    whole = [changed(r, spans=spans(0.1)) if r.event == "confirmed" else r for r in probes]
    best = summary.of_run(History(whole)).best
    assert (
        best.verdict.sentence
        == "compute-bound: 89 % in forward and backward, 10 % in the optimiser, data-wait 1.0 % (good)"
    )


@pytest.mark.parametrize(("shares", "said"), [([None, 0.02, 0.0], ""), ([0.4, 0.3, 0.0, None], "35 %")])
def test_other_programs_that_disturb_probes_are_told(records, shares, said):
    probe = next(r for r in records if r.event == "probe")
    crashed = changed(probe, others_cpu_frac=0.9, samples_per_s=None)  # it has no speed that looks slower
    probes = [crashed, *(changed(probe, others_cpu_frac=share) for share in shares)]
    found = sentences.disturbed(History(probes).probes)
    assert found == said == "" or (said in found and "while 2 of 4 probes were timed" in found)


def test_how_the_card_was_doing_stands_beside_what_holds_it_back(records):
    told = {"gpu_sm_frac": 0.9, "power_w": 120.0, "temperature_c": 60.0, "throttled": ["power cap"]}
    told |= {"energy_j": 1200.0, "wall_s": 10.0}
    more = {"spans": {"wall_s": 10.0, "forward_backward_s": 9.0}, "telemetry": told}
    found = summary.of_run(History([changed(r, **more) if r.event == "window" else r for r in records]))
    assert found.best.card.startswith("90 % busy, 120 W, 60 C, ")
    assert found.best.card.endswith(" J a sample; throttled: power cap")
    console = Console(width=200)
    with console.capture() as captured:
        for part in text.summary(found):
            console.print(part)
    assert f"card      {found.best.card}" in captured.get()
    assert any("60 C" in row[-1] for row in tables.answers(found).rows)


def test_trainings_under_the_trials_own_name_are_those_of_whatever_it_is_called(records):
    own = [changed(r, name="t007") if r.event == "confirmed" and r["name"] == "best" else r for r in records]
    assert summary.of_run(History(own)).best == summary.of_run(History(records)).best
    config = next(r for r in records if is_end(r, "t009"))["config"]
    as_third = {"name": "t009", "config": config}
    third = [changed(r, **as_third) if r.event == "confirmed" and r["name"] == "best" else r for r in records]
    found = summary.of_run(History(third)).named["most_accurate"]
    assert found.trained is not None
    assert found.quality["accuracy"].confirmed


def test_a_peak_is_the_largest_of_trial_and_trainings_of_that_configuration(records, tmp_path):
    best = summary.of_run(History(records)).best
    trained = [r for r in records if r.event == "confirmed" and r["name"] == "best"]
    spans = {"wall_s": 1.0, "data_wait_s": 0.0, "transfer_s": 0.0, "forward_backward_s": 0.2, "optimizer_s": 0.1}
    larger = changed(trained[0], peak_allocated_bytes=3 * 2**30, spans=spans)
    other = changed(trained[1], peak_allocated_bytes=9 * 2**30, config={**best.config, "ram_cache": False})
    study = [changed(r, card={**r["card"], "cap_bytes": 3 * 2**30}) if r.event == "study" else r for r in records]
    found = summary.of_run(History([{trained[0].seq: larger, trained[1].seq: other}.get(r.seq, r) for r in study]))
    assert (best.peak_allocated_bytes, found.best.peak_allocated_bytes) == (1288490188, 3 * 2**30)
    assert found.best.verdict.bound == "memory"
    export.write_best(found, tmp_path / "best.yaml")
    assert best_file.read(tmp_path / "best.yaml").measured["peak_allocated_bytes"] == 3 * 2**30
    smaller = changed(trained[0], peak_allocated_bytes=2**20)
    again = summary.of_run(History([smaller if r is trained[0] else r for r in records]))
    assert again.best.peak_allocated_bytes == best.peak_allocated_bytes


def test_windows_of_another_configuration_are_not_those_of_the_best(records):
    best = summary.of_run(History(records)).best
    assert best is not None
    own = [r for r in records if r.event == "window" and r["name"] == "best"]
    earlier = [changed(r, config={**best.config, "batch_size": 7}, samples_per_s=1e9) for r in own]
    found = summary.of_run(History([*records, *earlier]))
    assert (found.best, found.gains) == (best, summary.of_run(History(records)).gains)


def test_a_gain_is_of_the_windows_of_one_session_after_one_that_took_none(records):
    start = next(n for n, r in enumerate(records) if r.event == "window")
    earlier = [changed(r, samples_per_s=1.0) for r in records if r.event == "window" and r["name"] == "before"]
    more = Record(seq=900, t=records[-1].t, event="resume", fields={"pick": {"tolerance": 0.1}})
    again = [*records[:start], *earlier, more, *records[start:], more]
    again = [dataclasses.replace(r, seq=n) for n, r in enumerate(again)]
    assert summary.of_run(History(again)).gains == summary.of_run(History(records)).gains


def test_a_trial_that_another_overtook_has_its_knobs_and_speed_and_no_figure_of_what_ran(records):
    own = next(r for r in records if r.event == "trial" and r["outcome"] == "ok")
    fields = {"trial": own["trial"], "config": {**own["config"], "num_workers": 3}, "samples_per_s": 999.0}
    rated = dataclasses.replace(own, seq=own.seq, event="rated", fields=fields)
    found = {t.trial: t for t in summary.of_run(History([*records, rated])).trials}[own["trial"]]
    assert (found.config["num_workers"], found.samples_per_s) == (3, 999.0)
    assert found.values == {name: own["values"][name] for name in found.values}
    assert (found.peak_allocated_bytes, found.measured_samples_per_s) == (None, None)
    again = {t.trial: t for t in summary.of_run(History([*records, rated, own])).trials}[own["trial"]]
    assert again.config == own["config"], "it ran once more since"


def test_a_before_that_was_trained_has_its_quality_and_the_answer_says_both(records):
    best = summary.of_run(History(records)).best
    records = [r for r in records if r.event != "confirmed" or r["name"] != "before"]
    begun = next(r for r in records if r.event == "trial_start" and r["trial"] == "t000")
    own = [changed(r, named="before") if r is begun else r for r in records]
    found = summary.of_run(History(own))
    trial = next(t for t in found.trials if t.trial == "t000")
    assert found.named["before"].quality["accuracy"].mean == trial.values["accuracy"]
    assert not found.named["before"].quality["accuracy"].confirmed
    assert found.named["before"].samples_per_s == summary.of_run(History(records)).named["before"].samples_per_s
    mine, theirs = best.quality["accuracy"].mean, trial.values["accuracy"]
    assert f"with accuracy {mine:.3f} (before {theirs:.3f}, by other seeds)" in sentences.answer(found)


def test_a_training_that_was_cut_has_no_speed_of_the_pick(records):
    whole = summary.of_run(History(records)).best.trained
    cut = [
        changed(r, outcome="cut", samples_per_s=1e6) if r.event == "confirmed" and r["seed"] == 13 else r
        for r in records
    ]
    assert len(summary.of_run(History(cut)).best.trained.windows) == len(whole.windows) - 1


def test_what_differs_in_nothing_that_speed_depends_on_is_called_alike(records):
    found = summary.of_run(History(records))
    best = found.best.config

    def told(**knobs):
        before = dataclasses.replace(found.named["before"], config={**best, **knobs})
        untold = [dataclasses.replace(g, low=0.5) if g.over == "before" else g for g in found.gains]
        named = {**found.named, "before": before}
        return sentences.answer(with_gains(dataclasses.replace(found, named=named), untold))

    assert "trains as fast as before (only learning_rate differs)" in told(learning_rate=0.5)
    assert told().startswith("Keep before: ")
    for knobs in ({"batch_size": 4}, {"amp_dtype": "fp16"}, {"num_workers": 7}):
        assert "not clearly faster or slower than before" in told(**knobs)
    rate = {**best, "learning_rate": 0.5}
    measured = {**found.named, "before": dataclasses.replace(found.best, name="before", config=rate)}
    said = sentences.answer(dataclasses.replace(found, named=measured))
    assert "1.85 times as fast as before (1.83 to 1.86)" in said, "whatever a knob was taken for"


def test_where_the_rate_alone_differs_rounds_that_differ_are_no_gain(records):
    best = summary.of_run(History(records)).best.config
    for knobs, ratio in (({"learning_rate": 0.5, "schedule": "constant"}, 1.0), ({"dropout": 0.5}, 1.85)):
        before = {"config": {**best, **knobs}}
        own = [changed(r, **before) if r.event in ("probe", "window") and r["name"] == "before" else r for r in records]
        gain = summary.of_run(History(own)).gain("best", "before")
        assert gain.ratio == pytest.approx(ratio, abs=0.01)
        assert gain.is_told == (ratio != 1.0)


def test_the_pick_over_itself_gains_nothing_and_there_is_nothing_to_ablate(records, tmp_path):
    found = summary.of_run(History(records))
    same = {name: dataclasses.replace(found.best, name=name) for name in found.named}
    rounds = SimpleNamespace(by_round=lambda one: {0: len(one.name), 1: len(one.name)}, run=History(records))
    own = gains(rounds, same, "before")
    assert {(g.ratio, g.low, g.rounds) for g in own} == {(1.0, 1.0, 2)}
    alone = dataclasses.replace(found, named=same, gains=own, ablation=())
    assert not any(row[0].startswith("best") for row in tables.answers(alone).rows)
    assert not any("ablate" in command for command in sentences.next_commands(alone, tmp_path))


@pytest.mark.parametrize(("today", "said"), [(None, ""), (0.5, ""), (30.0, " --epochs 30")])
def test_the_pick_is_trained_next_for_as_long_as_its_file_says_where_trials_were_shorter(
    records, tmp_path, today, said
):
    study = next(r for r in records if r.event == "study")
    config = {**study["config"], "workload": {**study["config"]["workload"], "epochs": today}}
    own = [changed(r, config=config) if r.event == "study" else r for r in records]
    found = summary.of_run(History(own))
    commands = [c for c in sentences.next_commands(found, tmp_path) if " train " in c]
    assert commands == [f"python -m tuning train --from {tmp_path}/best.yaml{said}"]


def is_end(record, trial):
    return record.event == "trial" and record["trial"] == trial


@pytest.mark.parametrize(("name", "ends"), [("val_acc", True), ("mIoU", True), ("accuracy", True), ("gap", False)])
def test_an_interval_of_a_share_ends_at_its_bound(records, name, ends):
    values = iter((0.95, 0.99, 0.998))
    own = [
        changed(r, values={name: next(values)}) if r.event == "confirmed" and r["name"] == "best" else r
        for r in (changed(r, objectives={name: "max"}) if r.event == "study" else r for r in records)
    ]
    high = summary.of_run(History(own)).best.quality[name].high
    assert high == 1.0 if ends else high > 1.0


def with_gains(found, gains):
    """Returns the summary with other gains, in the answers too."""
    over = {g.of: g for g in gains if g.over == "before"}
    own = {name: dataclasses.replace(answer, gain=over.get(name)) for name, answer in found.answers.items()}
    return dataclasses.replace(found, gains=tuple(gains), answers=own)


def test_trainings_that_all_come_to_one_quality_are_said_to_be_suspicious(records):
    constant = [changed(r, values={"accuracy": 0.516}) if r.get("values") else r for r in records]
    assert "trainings came to accuracy 0.516: is anything learned?" in cautions(constant)
    assert "is anything learned" not in cautions(records)
    lags = next(r for r in constant if r.event == "rung")
    solved = [changed(r, values={"accuracy": 0.4}) if r is lags else r for r in constant]
    assert "is anything learned" not in cautions(solved)


def cautions(records):
    return "; ".join(sentences.cautions(summary.of_run(History(records))))


def test_without_rounds_a_training_is_not_compared_with_a_probe(records):
    own = [r for r in records if (r.event != "window" and r.get("name") != "before") or r.event == "probe"]
    fast = [changed(r, samples_per_s=1000.0) if r.event == "confirmed" and r["name"] == "best" else r for r in own]
    assert summary.of_run(History(fast)).gain("best", "before") == summary.of_run(History(own)).gain("best", "before")


def test_a_run_interrupted_before_it_confirms_says_what_its_speeds_are_of(records, tmp_path):
    end = next(n for n, r in enumerate(records) if r.event == "stage" and r["stage"] == "confirm")
    cut = [changed(r, named="before") if is_begin(r, "t000") else r for r in records[:end]]
    assert "(from short probes, not side by side: no interval)" in sentences.answer(summary.of_run(History(cut)))
    elsewhere = [(is_unnamed(r) and changed(r, config={**r["config"], "micro_batch_size": 1})) or r for r in cut]
    found = summary.of_run(History(elsewhere))
    assert found.best.probed_samples_per_s is None
    assert found.best.trained.windows == (found.best.samples_per_s,)
    assert "(from a training over a short probe, not side by side: no interval)" in sentences.answer(found)
    theirs, mine = tables.answers(found).rows[:2]
    assert mine[1].endswith(" (trained)")
    assert mine[2].endswith("x (a training over a short probe)")
    assert theirs[1].endswith(" (probed)")
    best = best_file.read(export.write_best(found, tmp_path / "best.yaml"))
    assert best.measured["samples_per_s"]["status"] == "from the search"


def is_begin(record, trial):
    return record.event == "trial_start" and record["trial"] == trial


def is_unnamed(record):
    return record.event == "probe" and not record["name"]


@pytest.mark.parametrize(
    ("measured", "ended", "after"),
    [
        ({"samples": 400}, True, " after 400 samples"),  # as early stopping ended them
        ({"samples": 500}, True, ""),
        ({}, False, " after 900 samples"),
    ],
)
def test_a_training_is_compared_with_what_was_measured_after_so_many_samples(measured, ended, after):
    known = {"samples_per_s": {"median": 10.0}, "quality": {"f1": {"mean": 0.6, "interval": None}}, **measured}
    result = {"samples_per_s": 11.0, "samples": 500, "values": {"f1": 0.7}, "ended_early": ended}
    said = list(text.trained(result, known, 900, "before.yaml"))
    assert said[0] == "11.0 samples/s  (before.yaml: 10.0, +10.0%)"
    assert said[-1] == f"f1 0.7000  (before.yaml{after}: 0.6000)"


def test_the_command_is_that_of_each_session_and_a_length_that_of_what_ended_by_itself(records):
    again = Record(len(records), records[-1].t, "resume", {"command": "python -m tuning.run resume=one"})
    found = summary.of_run(History([*records, again]))
    first = next(r for r in records if r.event == "study")["command"]
    assert found.study.command == f"{first} && python -m tuning.run resume=one"
    assert found.best.samples is None
    early = [changed(r, has_ended=True, samples=320) if r.event == "confirmed" else r for r in records]
    assert summary.of_run(History(early)).best.samples == 320


@pytest.mark.parametrize(("resumed_by", "is_told"), [("search", False), ("pick", True)])
def test_that_trials_were_few_is_told_until_the_search_has_more_time(records, resumed_by, is_told):
    few = Record(seq=900, t=records[-1].t, event="note", fields={"text": "2 trials are few", "warns": "few"})
    more = Record(seq=901, t=records[-1].t, event="resume", fields={resumed_by: {"changed": 1}})
    assert "2 trials are few" in summary.of_run(History([records[0], few, *records[1:]])).warnings
    assert ("2 trials are few" in summary.of_run(History([records[0], few, *records[1:], more])).warnings) == is_told


def test_a_search_that_was_cut_short_says_so_first(records):
    asked = {**records[0]["config"], "search": {"trials": 40, "max_time": 240.0}}
    own = [changed(records[0], config=asked), *records[1:]]
    cut = sentences.cut_sentence(summary.of_run(History(own)))
    assert cut == (
        "The search was cut short: 12 of 40 trials ended; "
        "python -m tuning.run resume=20261121-103412-3f2a search.max_time=8m has more of them"
    )
    tried = {"text": "the search ended: every configuration of the space was tried"}
    whole = [*own, dataclasses.replace(records[1], fields=tried)]
    assert sentences.cut_sentence(summary.of_run(History(whole))) == ""
    assert sentences.cut_sentence(summary.of_run(History(records))) == ""


def test_a_command_in_a_sentence_names_the_folder_of_runs_where_it_is_another(records):
    asked = {**records[0]["config"], "search": {"trials": 40}, "runs_dir": "my runs"}
    found = summary.of_run(History([changed(records[0], config=asked), *records[1:]]))
    assert "resume=20261121-103412-3f2a 'runs_dir=my runs' has more" in sentences.cut_sentence(found)
