"""What a card can hold, and which values it refuses."""

import pytest

from trainables import knob_columns
from trainables.knob_columns import refusal
from trainables.our_knobs import EVERY
from tuning.config.cards import GIB_BYTES, HERE, Card, restrict
from tuning.config.choices import available
from tuning.config.load import load
from tuning.config.space import Choice, Space

CPU = Card("cpu", dtypes=("fp32", "bf16"), device="cpu")
T4 = Card("t4", 16 * GIB_BYTES, GIB_BYTES, (7, 5), ("fp32", "fp16"), "cuda")
TURING_WITH_ALL = Card("turing", capability=(7, 5), device="cuda")
RTX3090 = Card("rtx3090", 24 * GIB_BYTES, GIB_BYTES, (8, 6), device="cuda")
SPACE = Space.parse(
    {"amp_dtype": ["fp32", "bf16"], "pin_memory": [False, True], "tf32": True, "batch_size": [8, 16]}, EVERY
)


def test_cap_is_memory_less_reserve_and_none_without_memory():
    assert T4.cap_bytes == 15 * GIB_BYTES
    assert CPU.cap_bytes is None


def test_a_card_that_is_not_here_is_emulated_and_this_machines_own_never_is():
    small = Card("t4", 16 * GIB_BYTES)
    assert small.emulated_on(None)
    assert small.emulated_on(24 * GIB_BYTES)
    assert not small.emulated_on(15 * GIB_BYTES)
    assert not any(Card(name, 2 * GIB_BYTES).emulated_on(device) for name in HERE for device in (None, 24 * GIB_BYTES))
    assert Card("auto", 2 * GIB_BYTES).on("cpu").emulated_on(None)  # one that is not listed
    assert Card("cpu", 2 * GIB_BYTES).on("cpu").cap_bytes == 2 * GIB_BYTES
    assert not Card("t4").emulated_on(None)


@pytest.mark.parametrize(
    ("card", "values", "reason"),
    [
        (T4, {"amp_dtype": "bf16"}, "bf16 is not a type of card t4"),
        (TURING_WITH_ALL, {"amp_dtype": "bf16"}, "bf16 needs compute capability 8.0, and turing has 7.5"),
        (T4, {"tf32": True}, "tf32 needs compute capability 8.0, and t4 has 7.5"),
        (CPU, {"tf32": True}, "only CUDA devices have TensorFloat-32"),
        (CPU, {"pin_memory": True}, "page-locked memory"),
        (RTX3090.on("cpu"), {"pin_memory": True}, "page-locked memory"),
        (CPU, {"compile": "reduce-overhead"}, "CUDA graphs"),
        (Card("p100", capability=(6, 0), device="cuda"), {"compile": "default"}, "needs compute capability 7.0"),
    ],
)
def test_refuse_says_why(card, values, reason):
    assert reason in str([refusal(EVERY[name], value, card) for name, value in values.items()])


@pytest.mark.parametrize(
    ("card", "values"),
    [
        (RTX3090, {"amp_dtype": "bf16", "tf32": True, "pin_memory": True, "non_blocking": True}),
        (CPU, {"amp_dtype": "bf16", "tf32": False, "pin_memory": False, "persistent_workers": True}),
        (Card("auto"), {"amp_dtype": "fp16", "tf32": True, "pin_memory": True}),
        (RTX3090.on("cpu"), {"amp_dtype": "bf16"}),
    ],
)
def test_what_a_card_can_do_is_not_refused(card, values, monkeypatch):
    monkeypatch.setattr(knob_columns, "flags_of_cpu", lambda: frozenset({"avx512bw"}))
    assert [refusal(EVERY[name], value, card) for name, value in values.items()] == [None] * len(values)


def test_restrict_drops_values_and_says_so():
    space, dropped = restrict(SPACE, T4, set())
    assert space.fixed == {"amp_dtype": "fp32"}
    assert space.parameters == {"pin_memory": Choice((False, True)), "batch_size": Choice((8, 16))}
    assert [d.partition(" is left out: ")[0] for d in dropped] == ["knobs.amp_dtype=bf16", "knobs.tf32=true"]
    assert restrict(space, T4, set()) == (space, [])


def test_restrict_removes_a_knob_without_any_value_left():
    space, dropped = restrict(Space.parse({"amp_dtype": ["bf16", "fp16"]}, EVERY), Card("old", dtypes=("fp32",)), set())
    assert space == Space({}, {}, EVERY)
    assert len(dropped) == 2


@pytest.mark.parametrize("name", available("card"))
def test_every_packaged_card_loads_under_its_own_name(name):
    card = load([f"card={name}"]).card
    assert card.name == name
    assert "fp32" in card.dtypes
    if card.memory_bytes is not None and card.cap_bytes is not None:
        assert 8 * GIB_BYTES <= card.memory_bytes <= 141 * GIB_BYTES
        assert 0.9 * card.memory_bytes < card.cap_bytes < card.memory_bytes
