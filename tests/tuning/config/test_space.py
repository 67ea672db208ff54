"""The search space: what is refused, and the algebra of what is not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainables.knob_columns import Knob
from trainables.knobs import KnobTable
from trainables.our_knobs import EVERY
from tuning.config.errors import ConfigError
from tuning.config.resolve import parse_space
from tuning.config.space import Choice, Range, Space, parse_parameter, values_of
from tuning.journal.events import ProbeRecord
from tuning.journal.records import Journal
from tuning.journal.run import History
from tuning.memory.groups import guard, plain_defaults, uncut

SYSTEM = {
    "batch_size": [4, 12, 32],
    "micro_batch_size": [4, 8, 16],
    "num_workers": [0, 1, 2],
    "prefetch_factor": [2, 4],
    "persistent_workers": [False, True],
    "adapter": "dora",
}


def test_scalar_list_and_mapping_become_fixed_choice_and_range():
    space = Space.parse(
        {"adapter": "lora", "batch_size": [8, 16], "learning_rate": {"low": 1e-4, "high": 1, "log": True}}, EVERY
    )
    assert space.fixed == {"adapter": "lora"}
    assert space.parameters == {"batch_size": Choice((8, 16)), "learning_rate": Range(1e-4, 1.0, log=True)}


def test_int_knob_makes_its_range_whole_and_float_knob_takes_whole_numbers():
    assert parse_parameter("batch_size", {"low": 8, "high": 64.0}, EVERY) == Range(8, 64, integer=True)
    assert parse_parameter("dropout", [0, 0.5], EVERY) == Choice((0.0, 0.5))
    one = [parse_parameter("batch_size", raw, EVERY) for raw in ([16], {"low": 16, "high": 16}, 16, 16.0)]
    assert [(type(value), value) for value in one] == [(int, 16)] * 4


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [  # what can be typed is refused in tests/tuning/cli/test_bad_input.py
        ("learning_rate", {"low": 0.1}, "high is missing"),
        ("learning_rate", {"low": 0.1, "hihg": 1}, "did you mean high"),
        ("learning_rate", {"low": 0.1, "high": 1, "log": 1}, "log is 1"),
        ("adapter", {"low": 1, "high": 2}, "a range of str"),
        ("batch_size", [1, [2]], r"\[2\] in \[1,\[2\]\] is not allowed"),
        ("batch_size", list(range(1, 10_002)), "lists 10001 values"),
        ("batch_size", "8", "8 is not allowed"),
        ("learnin_rate", 1e-3, "did you mean knobs.learning_rate"),
        ("zzz", 1, "knobs are batch_size, "),
    ],
)
def test_bad_parameter_is_refused_by_name_with_a_remedy(name, raw, message):
    with pytest.raises(ConfigError, match=message) as raised:
        parse_parameter(name, raw, EVERY)
    assert f"knobs.{name}" in raised.value.what
    assert raised.value.remedy


def test_subset_keeps_fixed_and_drops_the_parameters_of_other_kinds():
    space = Space.parse({**SYSTEM, "amp_dtype": ["fp32", "bf16"], "learning_rate": [1e-3, 1e-4]}, EVERY)
    learning = space.subset({"learning"})
    assert set(learning.parameters) == {"batch_size", "learning_rate"}
    assert learning.fixed == {"adapter": "dora"}


def test_complete_drops_idle_knobs_and_cuts_the_micro_batch():
    space = Space.parse(SYSTEM, EVERY)
    whole = space.complete({"batch_size": 4, "micro_batch_size": 16, "num_workers": 0, "prefetch_factor": 4})
    assert whole == {"adapter": "dora", "batch_size": 4, "micro_batch_size": 4, "num_workers": 0}
    with pytest.raises(ValueError, match="expected a whole number"):
        space.complete({"batch_size": 0.5})


@given(st.data())
@settings(max_examples=60)
def test_completing_a_completed_point_changes_nothing(data):
    space = Space.parse({**SYSTEM, "learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}}, EVERY)
    point = {n: data.draw(st.sampled_from(p.values)) for n, p in space.parameters.items() if isinstance(p, Choice)}
    point["learning_rate"] = data.draw(st.floats(1e-4, 1e-2))
    whole = space.complete(point)
    assert space.complete(whole) == whole
    assert all(EVERY[n].domain.check(v) == v for n, v in whole.items())


def test_raw_form_reads_back_as_the_same_space():
    raw = {**SYSTEM, "weight_decay": {"low": 0, "high": 1}, "learning_rate": {"low": 1e-4, "high": 1}}
    space = Space.parse(raw, EVERY)
    assert Space.parse(space.as_raw(), EVERY) == space


def test_auto_is_settled_by_cores_and_batches_and_stays_auto_until_then():
    space = Space.parse({"num_workers": "auto", "micro_batch_size": "auto", "batch_size": [16, 64]}, EVERY)
    assert space.as_raw()["num_workers"] == "auto"
    assert Space.parse(space.as_raw(), EVERY) == space
    for cores, workers in ((1, (0, 1)), (2, (0, 1, 2)), (16, (0, 1, 2, 4, 8, 16)), (64, (0, 1, 2, 4, 8, 16))):
        settled = space.settled(cores)
        assert settled.parameters["num_workers"] == Choice(workers)
        assert settled.parameters["micro_batch_size"] == Choice((4, 8, 16, 32, 64))
        assert settled.settled(1) == settled
    assert space.settled(None) == space
    with pytest.raises(ConfigError, match="auto is not allowed"):
        Space.parse({"learning_rate": "auto"}, EVERY)


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (24, (2, 4, 8, 16, 24)),
        ([48, 96], (8, 16, 32, 64, 96)),
        ([24, 48, 96], (8, 16, 32, 64, 96)),
        ({"low": 8, "high": 40}, (4, 8, 16, 32, 40)),
        (1, (1,)),
        (64, (4, 8, 16, 32, 64)),
    ],
)
def test_the_largest_batch_can_be_one_micro_batch(batch, sizes):
    settled = Space.parse({"micro_batch_size": "auto", "batch_size": batch}, EVERY).settled(4)
    assert values_of(settled.given("micro_batch_size")) == sizes
    if not isinstance(batch, dict):
        smallest = batch if isinstance(batch, int) else min(batch)
        assert settled.complete({"batch_size": smallest, "micro_batch_size": sizes[-1]})["micro_batch_size"] == smallest
    if not isinstance(batch, dict):
        assert plain_defaults(settled).get("micro_batch_size") == smallest
        allowed = uncut(settled, History(), guard(History(), None))["micro_batch_size"]
        assert allowed == min(size for size in sizes if size >= smallest), "which is cut to the batch"


def test_a_batch_in_one_piece_for_which_memory_was_short_is_cut_though_its_size_in_the_space_is_larger(tmp_path):
    settled = Space.parse({"micro_batch_size": "auto", "batch_size": [24, 48, 96]}, EVERY).settled(4)
    with Journal.open(tmp_path / "trials.jsonl", create=True) as journal:
        assert uncut(settled, journal.run, guard(History(), None))["micro_batch_size"] == 32
        journal.append(ProbeRecord, outcome="killed", config={"batch_size": 96, "micro_batch_size": 32})
        assert uncut(settled, journal.run, guard(History(), None))["micro_batch_size"] == 32, "24 is not 32"
        journal.append(ProbeRecord, outcome="killed", config={"batch_size": 24, "micro_batch_size": 32})
        assert uncut(settled, journal.run, guard(History(), None))["micro_batch_size"] == 16


def test_a_range_of_a_knob_with_a_list_of_values_is_refused():
    own = KnobTable({"mix": Knob(0.1, "learning", values=(0.0, 0.1, 0.3))})
    with pytest.raises(ConfigError, match="a range of a knob that has a list of values") as raised:
        parse_parameter("mix", {"low": 0.0, "high": 0.3}, own)
    assert raised.value.remedy == "knobs.mix=[0.0,0.1,0.3]"


def test_plain_defaults_take_each_batch_in_one_pass():
    for micro, batch, wanted in (
        ([8, 16], [32, 64], 16),  # as far as the space has it
        ([8, 16, 64], [32, 64], 32),  # the 64 are cut to the batch
        ([8, 16, 32], [32, 64], 32),
        ({"low": 1, "high": 100}, [32], 32),
        ([64], [32], 64),  # which is cut to the batch
    ):
        space = parse_space({"batch_size": batch, "micro_batch_size": micro, "learning_rate": [1e-3, 1e-2]}, {}, EVERY)
        assert plain_defaults(space).get("micro_batch_size", 64) == wanted, micro


def test_of_a_knob_that_a_hook_replaces_the_hook_is_named():
    with pytest.raises(ConfigError, match="not a knob of this") as raised:
        parse_parameter("fused_optimizer", [False, True], KnobTable(hooks=["optimizer"]))
    assert raised.value.remedy == "leave it out: this workload has its own optimizer, which sets it"
