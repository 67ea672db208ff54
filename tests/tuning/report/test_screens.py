"""What a run says at its end, as a person sees it: a text file for each history, and what must hold of any."""

import dataclasses
import io
from pathlib import Path

import pytest

from tests.tuning import answered, hostile
from tests.tuning.answered import changed, each, until
from tests.tuning.snapshots import check, text_of
from tuning.cli.terminal import Terminal
from tuning.config.choices import PLAIN
from tuning.journal.records import Record
from tuning.journal.run import History
from tuning.report import report, sentences, summary, tables
from tuning.stats.uncertainty import Gain

FOLDER = Path("runs/nli/20261121-103412-3f2a")


def held_back(records):
    """Returns the records with what a step waited for, and how a card was doing."""
    card = {"gpu_sm_frac": 0.7, "power_w": 120.0, "temperature_c": 60.0, "throttled": ["power cap"]}
    spans = {"data_wait_s": 2.5, "transfer_s": 0.0, "forward_backward_s": 6.0, "optimizer_s": 1.0, "wall_s": 10.0}
    told = each(records, "confirmed", spans={**spans, "collate_s": 1.5}, telemetry=card)
    note = {
        "text": "the time was enough for 3 trials beside the reference only",
        "warns": "few",
    }
    return [*told[:-1], Record(900, records[-1].t, "note", note), told[-1]]


def cut_short(records):
    search = {"trials": 40, "max_time": 240.0}
    return each(answered.run(records), "study", config={**records[0]["config"], "search": search})


def of_a_script(records):
    """Returns the records of a file of the user's own, of which `before` is what is trained today."""
    config = {**records[0]["config"], "workload": {"ref": "mine.py", "name": "mine", "options": {}}}
    return each(answered.run(records), "study", workload="mine.py", config=config)


HISTORIES = {
    "one_seed": lambda records: records,
    "three_answers": answered.run,
    "of_a_script": of_a_script,
    "keeps_today": lambda records: answered.run(records, best="", kind="reference"),
    "keeps_today_for_quality": lambda records: each(
        answered.run(records, best="", kind="reference", best_at_speed="", most_accurate=""),
        "study",
        config={**records[0]["config"], "pick": {"goal": "quality"}},
    ),
    "system_knobs": lambda records: answered.run(records, best="", kind="system", best_at_speed="", most_accurate=""),
    "unconfirmed": lambda records: until(answered.run(records), "confirm"),
    "probes_alone": lambda records: until(records, "search"),
    "nothing": lambda records: records[:3],
    "held_back": held_back,
    "cut_short": cut_short,
    "no_better_than_a_rule": lambda records: each(records, "study", baselines={"copying": {"accuracy": 0.95}}),
    "learns_nothing": lambda records: [changed(r, values={"accuracy": 0.5}) if r.get("values") else r for r in records],
    "hostile": hostile.run,
}


def printed(records, columns=80, *, trials=False):
    """Returns the result, and the trials if they are asked for, as `show` prints them into a pipe."""
    out, found = io.StringIO(), summary.of_run(History(records))
    terminal = Terminal(out=out, err=io.StringIO(), env={"COLUMNS": str(columns)})
    terminal.summary(found, FOLDER)
    if trials:
        terminal.trials(found, {})
    return out.getvalue()


@pytest.mark.parametrize("history", HISTORIES)
def test_each_history_has_its_screen(records, history):
    screen = printed(HISTORIES[history](records))
    check(f"summary_{history}", screen)
    assert not {"\x1b", "\x07"} & set(screen)


@pytest.mark.parametrize("columns", [60, 79, 100, 200])
def test_no_screen_is_wider_than_its_terminal(records, columns):
    for history in HISTORIES.values():
        lines = printed(history(records), columns, trials=True).splitlines()
        assert max(len(line) for line in lines if "python -m" not in line) <= columns, "but commands are not broken"


@pytest.mark.parametrize("columns", [80, 200])
def test_the_result_with_its_trials_has_a_screen(records, columns):
    check(f"show_{columns}_columns", printed(answered.run(records), columns, trials=True))


def test_a_page_says_what_the_screen_says(records):
    for history in ("three_answers", "held_back"):
        found = summary.of_run(History(HISTORIES[history](records)))
        check(f"page_{history}", text_of(report.render(found)))


def test_two_runs_side_by_side_have_a_screen(records):
    grid = tables.compared([summary.of_run(History(own)) for own in (records, answered.run(records))])
    check("compared", "\n".join(" | ".join(row) for row in (grid.head, *grid.rows)))


def test_gains_have_their_words():
    gains = [
        Gain("best", "before", 1.84, 1.79, 1.89, 5),
        Gain("best", PLAIN, 0.5, 0.4, 0.625, 5),
        Gain("best", "after", 1.01, 0.97, 1.05, 5),
        Gain("best", "after", 1.5, None, None, 0, "probes"),
        Gain("best", "after", 1.5, None, None, 1),
        Gain("best", "before", 2.58, 0.61, 10.89, 2),
        Gain("best", "before", 2.02, 1.73, 2.36, 2),
        Gain("best", "before", 0.5, 0.4, 0.625, 2),
    ]
    check("gains", "\n".join(map(sentences.gain_sentence, gains)))


@pytest.mark.parametrize(
    ("mode", "baseline", "beaten"), [("max", 0.5, True), ("max", 0.95, False), ("min", 0.95, True), ("min", 0.9, False)]
)
def test_a_best_no_better_than_a_baseline_is_warned_of(found, mode, baseline, beaten):
    worse = {"max": 0.4, "min": 0.99}[mode]
    baselines = {"majority": {"accuracy": worse}, "copying": {"accuracy": baseline}}
    own = dataclasses.replace(found, objectives={"accuracy": mode}, baselines=baselines)
    assert sentences.answer(own).startswith("Not of use yet") != beaten
    assert sentences.baseline_sentence(dataclasses.replace(own, baselines={})) == ""
    assert sentences.baseline_sentence(dataclasses.replace(own, named={})) == ""


def test_one_that_lags_does_not_hide_that_all_learned(records):
    constant = HISTORIES["learns_nothing"](records)
    lags = next(r for r in constant if r.event == "rung")
    solved = [changed(r, values={"accuracy": 0.4}) if r is lags else r for r in constant]
    for own, warned in ((constant, True), (records, False), (solved, False)):
        said = sentences.cautions(summary.of_run(History(own)))
        assert any("nothing may be learned" in one for one in said) == warned


@pytest.mark.parametrize(("shares", "said"), [([None, 0.02, 0.0], ""), ([0.4, 0.3, 0.0, None], "35 %")])
def test_other_programs_that_disturb_probes_are_told(records, shares, said):
    probe = next(r for r in records if r.event == "probe")
    crashed = changed(probe, others_cpu_frac=0.9, samples_per_s=None)  # it has no speed that looks slower
    probes = [crashed, *(changed(probe, others_cpu_frac=share) for share in shares)]
    found = sentences.disturbed(History(probes).probes)
    assert found == said == "" or (said in found and "during 2 of 4 probes" in found)


def test_a_run_that_goes_on_says_so(records):
    before_its_export = [
        r for r in cut_short(records) if r.event not in ("stage", "stop") or r.get("stage") != "export"
    ]
    begun = [r for r in before_its_export if r.event != "stop"]
    assert "11 of 40 trials have ended so far" in sentences.unfinished_sentence(summary.of_run(History(begun)))
    assert sentences.unfinished_sentence(summary.of_run(History(records))) == ""


@pytest.mark.parametrize(("today", "said"), [(None, ""), (0.5, ""), (30.0, " --epochs 30")])
def test_the_pick_is_trained_as_long_as_its_file_says(records, today, said):
    config = {**records[0]["config"], "workload": {**records[0]["config"]["workload"], "epochs": today}}
    found = summary.of_run(History(each(records, "study", config=config)))
    commands = [c for c in sentences.next_commands(found, FOLDER) if " train " in c]
    assert commands == [f"python -m tuning train --from {FOLDER}/best.yaml{said}"]
