"""What part of a gain is a smaller model: never made up, told by the ablation first, else by the probes."""

import dataclasses

import pytest

from tests.tuning.report.test_summary import changed
from trainables.knobs import Knob, KnobTable, using
from tuning.journal.records import Record
from tuning.report import sentences, summary
from tuning.report.ablation_results import AblationResult
from tuning.report.parts import Parts, parts
from tuning.search.ablation import AblationPair
from tuning.stats.uncertainty import Gain

BEFORE = {"hidden_size": 128, "batch_size": 32, "micro_batch_size": 32, "num_workers": 0}
BEST = {"hidden_size": 64, "batch_size": 32, "micro_batch_size": 32, "num_workers": 2}


def probe(samples_per_s, name=None, **config):
    """Returns a probe of one micro-step a batch."""
    step_s = config["batch_size"] / samples_per_s
    fields = {"name": name, "config": config, "outcome": "ok", "samples_per_s": samples_per_s}
    return Record(0, "2026-11-21T10:34:40.000Z", "probe", {**fields, "micro_step_s": step_s, "optimizer_step_s": 0.0})


PROBES = [
    probe(100.0, "before", **BEFORE),
    probe(100.0, **BEFORE),
    probe(150.0, **{**BEFORE, "num_workers": 2}),
    probe(300.0, **BEST),
]


def ablated(knobs, value, instead_of, ratio):
    """Returns the result of an ablation at the best."""
    gain = Gain("with", "without", ratio, ratio - 0.1, ratio + 0.1, 5)
    return AblationResult("best", knobs, value, instead_of, gain, None, "", "")


def test_probes_tell_the_model_and_the_system_knobs_apart():
    found = parts("before", BEST, BEFORE, PROBES, [])
    assert (found.model, found.is_smaller, found.ground) == (("hidden_size=64 for 128",), True, "probes")
    assert found.model_ratio == pytest.approx(2.0)
    assert found.system_ratio == pytest.approx(1.5)
    assert found.others == ()


def test_the_ablation_goes_before_the_probes_where_it_took_the_knob_back_to_the_same_value():
    own = ablated("hidden_size", "64", "128", 1.8)
    assert parts("before", BEST, BEFORE, PROBES, [own]).model_ratio == pytest.approx(1.8)
    assert parts("before", BEST, BEFORE, PROBES, [own]).ground == "ablation"
    other = ablated("hidden_size", "64", "256", 1.8)
    assert parts("before", BEST, BEFORE, PROBES, [other]).ground == "probes"


def test_the_ablation_of_a_fraction_that_shapes_the_model_is_found():
    with using(KnobTable({"stretch": Knob(1.0, "both", values=(0.0005, 1.0), shapes_model=True)})):
        new, old = {"batch_size": 32, "stretch": 1.0}, {"batch_size": 32, "stretch": 0.0005}
        own = ablated("stretch", *AblationPair("best", ("stretch",), new, old).values(), 1.8)
        assert parts("before", new, old, [], [own]).ground == "ablation"


def test_what_was_not_measured_is_not_known():
    unprobed = {**BEFORE, "hidden_size": 512}
    found = parts("before", BEST, unprobed, PROBES[1:], [])
    assert (found.model_ratio, found.system_ratio, found.ground) == (None, None, "")
    lone = parts("before", BEST, BEFORE, [PROBES[0], PROBES[3]], [])
    assert (lone.model_ratio, lone.system_ratio) == (None, None)  # a configuration given is no search of its group


def test_two_probes_of_one_configuration_are_no_gain_of_system_knobs():
    found = parts("before", {**BEFORE, "hidden_size": 64}, BEFORE, [probe(12.0, "before", **BEFORE), PROBES[1]], [])
    assert found.system_ratio == 1.0


def test_the_same_model_has_no_part_in_a_gain():
    found = parts("before", {**BEFORE, "batch_size": 64, "num_workers": 2}, BEFORE, [], [])
    assert (found.model, found.model_ratio, found.others) == ((), 1.0, ("batch_size",))


def with_probes(records, *probes):
    """Returns the sample run with another hidden size in its best than in `before`, and probes of these."""
    own = [r for r in records if r.event != "probe" or r["name"]]
    is_best = [r.event == "trial" or r.get("name") == "best" for r in own]
    own = [changed(r, config={**r["config"], "hidden_size": 64}) if b else r for r, b in zip(own, is_best, strict=True)]
    return [*own[:8], *probes, *own[8:]]


def test_a_summary_says_what_part_is_a_smaller_model_or_how_it_is_told(records):
    found = summary.from_records(with_probes(records))
    said = sentences.parts_sentence(found)
    assert said.startswith("How much of the gain over before is a smaller model (hidden_size=64 for 128) is not known")
    assert said.endswith(f"python -m tuning ablate {found.id} tells")
    best = found.best.config
    told = [probe(60.0, **best), probe(40.0, **{**best, "hidden_size": 128})]
    again = summary.from_records(with_probes(records, *told))
    assert again.parts["before"].model_ratio == pytest.approx(1.5)
    said = sentences.parts_sentence(again)
    assert said.startswith("Of 1.85 times over before, a smaller model (hidden_size=64 for 128) makes 1.50 times, by ")
    assert "and all else 1.23 times" in said


def test_what_is_no_gain_has_no_parts(records):
    found = summary.from_records(records)
    assert sentences.parts_sentence(found).startswith("None of the gain over before comes from a smaller model")
    open_ended = [dataclasses.replace(g, low=0.9) for g in found.gains]
    assert sentences.parts_sentence(dataclasses.replace(found, gains=tuple(open_ended))) == ""
    few = [dataclasses.replace(g, low=None, high=None, rounds=1) for g in found.gains]
    alike = {**found.named, "before": dataclasses.replace(found.best, name="before")}
    assert sentences.parts_sentence(dataclasses.replace(found, gains=tuple(few))) != ""
    assert sentences.parts_sentence(dataclasses.replace(found, gains=tuple(few), named=alike)) == ""


def test_a_search_that_was_cut_short_says_so_first(records):
    asked = {**records[0]["config"], "search": {"trials": 40, "max_time": 240.0}}
    own = [changed(records[0], config=asked), *records[1:]]
    cut = sentences.cut_sentence(summary.from_records(own))
    assert cut == (
        "The search was cut short: 12 of 40 trials ended; "
        "python -m tuning.run resume=20261121-103412-3f2a search.max_time=8m has more of them"
    )
    whole = [*own, dataclasses.replace(records[1], fields={"text": "the search ended: " + TRIED})]
    assert sentences.cut_sentence(summary.from_records(whole)) == ""
    assert sentences.cut_sentence(summary.from_records(records)) == ""


def test_commands_in_sentences_name_the_folder_of_runs_where_it_is_another(records):
    asked = {**records[0]["config"], "search": {"trials": 40}, "runs_dir": "my runs"}
    own = [changed(records[0], config=asked), *records[1:]]
    assert "resume=20261121-103412-3f2a 'runs_dir=my runs' has more" in sentences.cut_sentence(
        summary.from_records(own)
    )
    command = sentences.ablate_command(summary.from_records(own))
    assert command == "python -m tuning ablate 20261121-103412-3f2a '--runs-dir=my runs'"


def test_that_system_knobs_change_nothing_learned_is_said_where_it_was_measured(records):
    own = Parts("before", (), False, 1.0, 1.4, (), "")
    kinds = dataclasses.replace(records[1], event="kinds", fields={"changed": {}, "message": ""})
    unmeasured = dataclasses.replace(kinds, fields={"changed": {}, "message": "it does not show its model"})
    for measured, is_said in (([*records, kinds], True), ([*records, unmeasured], False), (records, False)):
        found = dataclasses.replace(summary.from_records(measured), parts={"before": own})
        said = sentences.parts_sentence(found)
        assert ("which cannot change what is learned" in said) == is_said
        assert "make 1.40 by the probes" in said


TRIED = "every configuration of the space was tried"
