"""From command line to configuration and back."""

import json
from pathlib import Path

import pytest
import yaml

from tests.commands import MINE
from trainables import Knob, knob_columns
from trainables.knobs import KnobTable
from trainables.our_knobs import EVERY
from tuning.config.cards import GIB_BYTES
from tuning.config.complete import Declared, Machine, complete, with_declared
from tuning.config.errors import ConfigError
from tuning.config.load import load
from tuning.config.resolve import from_resolved, option_fault, resolved, write_resolved
from tuning.config.space import Choice, Range

EXAMPLE = [
    *("workload=nli", "workload.model=/m", "card=rtx3090", "budget=full", "runs_dir=out", "dashboard=true"),
    *("search.trials=40", "search.seed=1", "concurrency=2", "pick.tolerance=0.05"),
    *("pick.at_least=0.9", "pick.goal=quality"),
    *("knobs.num_workers=[0,2,4]", "knobs.learning_rate=3e-4", "knobs.batch_size={low: 8, high: 64, log: true}"),
]


@pytest.fixture
def own(tmp_path):
    """A workload file of one's own; nothing here imports it."""
    path = tmp_path / "my workload.py"
    path.write_text("raise SystemExit('imported')\n")
    return path


def declaring(config, space, options=(), before=None):
    """The configuration of a workload whose file declares a space, options and BEFORE."""
    return with_declared(config, Declared(EVERY, space, dict(options), before))


def test_no_argument_gives_the_packaged_study():
    config = load([])
    assert (config.workload.ref, config.workload.name, config.card.name) == ("nli", "nli", "auto")
    assert (config.search.trials, config.search.max_time_s) == ("auto", 240.0)
    assert (config.budget.name, config.budget.rungs.eta, config.budget.confirm.windows) == ("quick", 2, 5)
    assert config.concurrency == "auto"
    assert config.dropped == []


def test_the_command_line_wins_over_every_file():
    config = load(EXAMPLE)
    assert (config.search.trials, config.search.seed) == (40, 1)
    assert (config.budget.name, config.search.max_time_s, config.budget.confirm.seeds) == ("full", None, 5)
    assert config.space.parameters["num_workers"] == Choice((0, 2, 4))
    assert config.space.parameters["batch_size"] == Range(8, 64, log=True, integer=True)
    assert config.space.fixed["learning_rate"] == 3e-4
    assert (config.card.cap_bytes, config.card.capability) == (24 * GIB_BYTES - round(0.8 * GIB_BYTES), (8, 6))
    assert (config.workload.options["model"], config.workload.options["layers"]) == ("/m", 2)
    assert (config.concurrency, config.dashboard, config.runs_dir) == (2, True, "out")
    assert (config.pick.tolerance, config.pick.at_least, config.pick.goal) == (0.05, 0.9, "quality")
    assert config.overrides == tuple(EXAMPLE)


def test_origins_name_the_command_line_or_the_file():
    origins = load([*EXAMPLE, "named.before.batch_size=2"]).origins
    assert origins["knobs.learning_rate"] == origins["workload.model"] == origins["workload.ref"] == "command line"
    assert origins["named.before.batch_size"] == "command line"
    assert origins["knobs.dropout"] == "search_spaces/workload/nli.yaml"
    assert origins["card.memory_gib"] == "search_spaces/card/rtx3090.yaml"
    assert origins["search.max_time"] == origins["budget.rungs.eta"] == "search_spaces/budget/full.yaml"
    assert origins["resume"] == "search_spaces/config.yaml"


def test_a_mapping_replaces_a_mapping_and_a_part_changes_a_part():
    whole = load(["knobs.learning_rate={low: 0.1, high: 0.2}"])
    assert whole.space.parameters["learning_rate"] == Range(0.1, 0.2)
    part = load(["knobs.learning_rate.high=1e-2"])
    assert part.space.parameters["learning_rate"] == Range(1e-3, 1e-2, log=True)
    assert part.origins["knobs.learning_rate"] == "command line"


def test_durations_and_tolerances_have_units():
    for text, seconds in {"90s": 90, "4m": 240, "1h30m": 5400, "240": 240, "1.5s": 1.5, "null": None}.items():
        assert load([f"search.max_time={text}"]).search.max_time_s == seconds
    for text, tolerance in {"0.5": 0.5, "250": 250.0, "2%": "2%", "'0.50 %'": "0.5%", "0%": 0.0}.items():
        config = load([f"pick.tolerance={text}"])
        assert config.pick.tolerance == tolerance
        assert from_resolved(json.loads(json.dumps(resolved(config))), EVERY) == config


@pytest.mark.parametrize("text", ["/d/x (1),y.jsonl", "~/x.jsonl", "/d/a=b", "été.jsonl", "a b", "'quoted'", "1_6"])
def test_options_without_a_default_take_any_text(text):
    assert load([f"workload.data={text}"]).workload.options["data"] == text.strip("'")


def test_an_option_in_quotes_is_text():
    texts = ["1.10", "true", "[CLS]", "null", ""]
    assert [load([f'workload.data="{text}"']).workload.options["data"] for text in texts] == texts
    assert load(["workload.data=1.10"]).workload.options["data"] == 1.1
    assert load(["resume=one", "workload.hf_token='12'"]).secrets == {"hf_token": "12"}


def test_numbers_are_of_the_type_that_is_wanted():
    config = load(["search.trials=1e2", "workload.max_length=1e2", "knobs.batch_size=[1e1,3e1]", "workload.val_frac=0"])
    options = config.workload.options
    assert (config.search.trials, options["max_length"], options["val_frac"]) == (100, 100, 0)
    assert config.space.parameters["batch_size"] == Choice((10, 30))


@pytest.mark.parametrize("data", ["/data/snli_1.0", "null"])
def test_epochs_that_a_workload_asks_for_are_those_of_the_data_that_come_with_it(data):
    found = load(["workload=nli", f"workload.data={data}"]).budget.train_epochs
    assert found == (0.7 if data == "null" else "auto")
    assert load(["workload=nli", f"workload.data={data}", "budget.train_epochs=2"]).budget.train_epochs == 2


def test_no_workers_leaves_out_what_needs_workers():
    config = load(["knobs.num_workers=0"])
    assert not {"prefetch_factor", "persistent_workers"} & {*config.space.parameters, *config.space.fixed}
    assert (
        config.dropped[0]
        == "knobs.prefetch_factor=[2,4] is left out: it needs num_workers > 0, which can only be 0 here"
    )


def test_cpu_card_drops_what_a_cpu_cannot_honour_and_says_so(monkeypatch):
    monkeypatch.setattr(knob_columns, "flags_of_cpu", lambda: frozenset({"avx512bw"}))
    typed = [f"named.mine.{knob}" for knob in ("num_workers=8", "tf32=true", "pin_memory=true", "non_blocking=true")]
    config = complete(load(["card=cpu", *typed]), Machine(cores=4))
    assert config.space.fixed["pin_memory"] is False
    assert config.space.parameters["amp_dtype"] == Choice(("fp32", "bf16"))
    assert config.named["mine"] == {"num_workers": 8}
    assert {d.partition("=")[0] for d in config.dropped} == {
        f"{section}.{knob}" for section in ("knobs", "named.mine") for knob in ("tf32", "pin_memory", "non_blocking")
    }


def test_a_detected_card_is_one_that_was_named():
    detected, named, emulated = (complete(load(typed), Machine(4)) for typed in ([], ["card=cpu"], ["card=rtx3090"]))
    assert (detected.space, detected.named, detected.dropped) == (named.space, named.named, named.dropped)
    assert emulated.space == named.space
    assert detected.origins["card.device"] == "found on this machine"
    assert complete(detected, Machine(cores=4)) == detected


@pytest.mark.parametrize(
    ("argv", "cards", "allowed"),
    [
        (["knobs.pin_memory=[false,true]"], 0, "false"),
        (["card=cpu", "knobs.pin_memory=true"], 1, "false"),
        (["card=t4", "knobs.amp_dtype=[fp16,bf16]"], 1, "fp16, fp32"),
    ],
)
def test_a_typed_value_that_the_card_lacks_is_refused(argv, cards, allowed):
    with pytest.raises(ConfigError, match="cannot be had with card=") as raised:
        complete(load(argv), Machine(4, cards, (8, 6)))
    assert raised.value.allowed == allowed
    assert raised.value.remedy == f"leave out {argv[-1].partition('=')[0]}, or name another card"


@pytest.mark.parametrize("name", ["best", "most_accurate", "config"])
def test_a_configuration_may_not_have_the_name_of_a_file_of_the_run(name):
    with pytest.raises(ConfigError, match=f"named.{name}: that is the name of something else in a run") as raised:
        load([f"named.{name}.batch_size=8"])
    assert raised.value.remedy == f"named.mine in place of named.{name}"


def test_own_workload_is_not_imported_and_takes_any_option(own):
    config = load([f"workload={own}", "workload.depth=3", "knobs.num_workers=0", "knobs.prefetch_factor=4"])
    assert (config.workload.ref, config.workload.name) == (str(own), "my-workload")
    assert config.workload.options == {"depth": 3}
    assert config.named == {}
    assert config.space.fixed == {"num_workers": 0, "prefetch_factor": 4}


@pytest.mark.parametrize(("file", "name"), [("t1/loop.py", "t1"), ("t1/main.py", "t1"), ("t1/nets.py", "nets")])
def test_file_with_a_common_name_is_called_after_its_folder(tmp_path, file, name):
    path = tmp_path / file
    path.parent.mkdir()
    path.touch()
    assert load([f"workload={path}"]).workload.name == name


def test_own_workload_is_completed_by_what_its_module_declares(own):
    config = load([f"workload={own}", "workload.depth=3", "knobs.batch_size=[2,4]", "knobs.num_workers=0", "card=cpu"])
    space = {"batch_size": 8, "num_workers": [0, 2], "prefetch_factor": [2, 4], "tf32": [False, True]}
    done = complete(config, Machine(cores=4), Declared(EVERY, space, {"depth": 1, "width": 64}))
    assert done.workload.options == {"depth": 3, "width": 64}
    assert done.space.parameters == {"batch_size": Choice((2, 4))}
    assert done.space.fixed == {"num_workers": 0, "tf32": False, "micro_batch_size": 4}
    assert (done.origins["knobs.tf32"], done.origins["knobs.batch_size"]) == (str(own), "command line")
    assert len(done.dropped) == 2


@pytest.mark.parametrize("value", [[64, 64], ("a",), Path("data"), {"a": 1}])
def test_an_option_that_no_command_line_can_give_is_refused_by_name(own, value):
    config = load([f"workload={own}", "card=cpu"])
    with pytest.raises(ConfigError, match=r"the option widths=.* is a (list|tuple|\w*Path|dict)") as raised:
        declaring(config, {"batch_size": [4, 8]}, {"widths": value})
    assert "one text" in raised.value.remedy


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("workload.dpeth=3", "did you mean workload.depth"),
        ("workload.depth=deep", "workload.depth=deep is not allowed\n  allowed: a whole number\n"),
        ("knobs.persistent_workers=true", "has no effect"),
        ("knobs.batch_size=4", "nothing to search"),
    ],
)
def test_own_workload_refuses_what_its_module_does_not_declare(own, argument, message):
    config = load([f"workload={own}", argument])
    with pytest.raises(ConfigError, match=message):
        declaring(config, {"batch_size": [4, 8]}, {"depth": 1})


def test_gains_are_over_what_the_file_or_the_command_line_says_of_before(own):
    space, before = {"batch_size": [2, 4]}, {"batch_size": 2, "num_workers": 2}
    typed = load([f"workload={own}", "named.before.batch_size=8", "named.small.batch_size=1"])
    assert declaring(load([f"workload={own}"]), space, {}, before).named == {
        "before": {**before, "micro_batch_size": 2}
    }, "a plain loop takes its batch in one pass"
    both = declaring(typed, space, {}, before).named
    assert both == {"before": {"batch_size": 8, "num_workers": 2, "micro_batch_size": 8}, "small": {"batch_size": 1}}
    assert next(iter(both)) == "before"
    nothing = declaring(load([f"workload={own}"]), space, {})
    assert nothing.named == {"plain defaults": EVERY.whole({"micro_batch_size": 32})}
    no_size = declaring(load([f"workload={own}"]), {"learning_rate": [0.1, 0.2]}, {})
    assert no_size.named == nothing.named
    assert no_size.space.fixed["micro_batch_size"] == 32, "the default batch, in one pass too"
    with pytest.raises(ConfigError, match=r"BEFORE.lr=0.1: lr is not a knob"):
        declaring(load([f"workload={own}"]), space, {}, {"lr": 0.1})
    with pytest.raises(ConfigError, match="BEFORE=3 is not a configuration"):
        declaring(load([f"workload={own}"]), space, {}, 3)


@pytest.mark.parametrize(
    ("space", "before", "micro", "of_before"),
    [
        ({"batch_size": [16, 128]}, {"batch_size": 32}, 128, 32),
        ({"batch_size": {"low": 8, "high": 64}}, {"learning_rate": 0.1}, 64, 32),
        ({"learning_rate": [0.1, 0.2]}, {"batch_size": 64}, 64, 64),
        ({"batch_size": [16, 128], "micro_batch_size": [4, 8]}, {"batch_size": 16, "micro_batch_size": 8}, None, 8),
    ],
)
def test_a_batch_is_one_pass_unless_micro_batches_are_named(own, space, before, micro, of_before):
    done = declaring(load([f"workload={own}"]), space, {}, before)
    assert done.space.fixed.get("micro_batch_size") == micro
    assert done.named["before"]["micro_batch_size"] == of_before


def test_bad_space_of_own_workload_names_its_file(own):
    with pytest.raises(ConfigError, match=r"knobs.lr=0.1: lr is not a knob of this workload \(.*my workload.py\)"):
        declaring(load([f"workload={own}"]), {"lr": 0.1}, {})


@pytest.mark.parametrize("argv", [[], EXAMPLE, ["card=t4", "knobs.num_workers=0"], ["workload=json.decoder"]])
def test_resolved_survives_json_and_comes_back_equal(argv):
    config = load(argv)
    assert from_resolved(json.loads(json.dumps(resolved(config))), EVERY) == config


def test_recorded_configuration_is_checked_again():
    config = load([])
    tree, gone = resolved(config), {"strategy": "staged", "sampler": "gp", "pruner": "rungs"}
    earlier = from_resolved(
        {**tree, "search": {**tree["search"], **gone}, "pick": {"tolerance": 0.01}, "named": {"source": ""}}, EVERY
    )
    assert (earlier.search, earlier.pick.tolerance, earlier.pick.goal) == (config.search, 0.01, "speed")
    with pytest.raises(ConfigError, match=r"search\.trials=-1 is not allowed"):
        from_resolved({**tree, "search": {**tree["search"], "trials": -1}}, EVERY)
    with pytest.raises(ConfigError, match="speling=1: there is no setting speling"):
        from_resolved({**tree, "speling": 1}, EVERY)
    with pytest.raises(ConfigError, match="card=None in a recorded configuration"):
        from_resolved({}, EVERY)


def test_written_configuration_names_origins_and_loads_back(tmp_path):
    config = load([*EXAMPLE, "knobs.compile=[off,default]", "name=2026"])
    path = tmp_path / "config.yaml"
    write_resolved(config, path)
    text = path.read_text()
    assert "  learning_rate: 0.0003  # command line\n" in text
    assert "  dropout: 0.1  # search_spaces/workload/nli.yaml\n" in text
    assert "    model: /m  # command line\n" in text
    read = yaml.safe_load(text)
    assert read == {k: v for k, v in resolved(config).items() if k != "origins"}
    assert from_resolved(read, EVERY).model_copy(update={"origins": config.origins}) == config
    assert list(tmp_path.iterdir()) == [path]


def test_a_knob_of_ones_own_is_typed_like_any_other(own):
    def own_table(ref):
        assert ref == str(own)
        return KnobTable({"channels": Knob(32, "both", values=(16, 32, 64))})

    config = load([f"workload={own}", "knobs.channels=[16,64]", "named.before.channels=16"], own_table)
    assert config.space.parameters["channels"] == Choice((16, 64))
    assert config.named["before"] == {"channels": 16}
    with pytest.raises(ConfigError, match=r"knobs.channels: 48 .*\n  allowed: one of 16, 32, 64"):
        load([f"workload={own}", "knobs.channels=48"], own_table)
    with pytest.raises(ConfigError, match=r"did you mean knobs\.channels"):
        load([f"workload={own}", "knobs.chanels=16"], own_table)
    with pytest.raises(
        ConfigError, match=r"named\.before\.lr=3: .*\n  try: did you mean named\.before\.learning_rate\?"
    ):
        load([f"workload={own}", "named.before.lr=3"], own_table)
    load(["workload=signals"])
    with pytest.raises(ConfigError, match="channels is not a knob of this workload"):
        load(["workload=signals", "knobs.channels=16"])


def test_secrets_are_written_nowhere_and_are_given_again_to_a_resumed_run(own, tmp_path):
    argv = [f"workload={own}", "workload.hub_token=hunter2", "workload.max_tokens=8"]
    config = load(argv)
    assert config.workload.options == {"hub_token": "hunter2", "max_tokens": 8}
    write_resolved(config, tmp_path / "config.yaml")
    for text in (json.dumps(resolved(config)), (tmp_path / "config.yaml").read_text()):
        assert "hunter2" not in text
        assert "max_tokens" in text
    again = load(["resume=one", "workload.hub_token=hunter2"])
    assert again.secrets == {"hub_token": "hunter2"}
    assert "hunter2" not in json.dumps(resolved(again))


def test_what_a_workload_of_ones_own_does_not_search_stays_as_it_is_trained_today():
    own = load([f"workload={MINE}", "named.before.weight_decay=0.3"])
    made = declaring(own, {"batch_size": [16, 32]}, {}, {"learning_rate": 0.02, "batch_size": 16})
    assert made.space.parameters["batch_size"] == Choice((16, 32))
    assert (made.space.fixed["learning_rate"], made.space.fixed["weight_decay"]) == (0.02, 0.3)


def test_a_package_that_a_workload_lacks_is_a_fault_of_the_machine_and_no_option():
    fault = option_fault("workload nli needs: pip install 'cardtune[nli]' (No module named 'peft')", {"a": "nli"})
    assert (fault.exit_code, fault.remedy) == (3, "pip install 'cardtune[nli]'")
    assert "No module named 'peft'" in fault.what


def test_what_data_say_has_the_remedy_that_the_message_brings():
    said = "a.xyz: found suffix '.xyz'; allowed: .csv; try: docs/data.md shows how"
    fault = option_fault(said, {"data": "a.xyz"})
    assert (fault.exit_code, fault.allowed, fault.remedy) == (2, ".csv", "docs/data.md shows how")
    assert fault.what == "workload.data=a.xyz: a.xyz: found suffix '.xyz'"
    assert option_fault(said.split("; try")[0], {"data": "a.xyz"}).remedy == "another workload.data, or leave it out"
