"""The space of each workload on each card: the card can do all of it, and what was tuned by hand lies inside."""

from typing import Any

import pytest

from trainables import knob_columns
from trainables.knob_columns import refusal
from trainables.knobs import Scalar
from trainables.our_knobs import BUILT_IN
from tuning import run
from tuning.config.load import load
from tuning.config.schema import StudyConfig
from tuning.config.space import Choice, Range, Space, values_of
from tuning.study import setup
from tuning.workers import machine, nvml

GIB = 2**30
CARDS: dict[str, nvml.Gpu | None] = {
    "rtx3090": nvml.Gpu("NVIDIA GeForce RTX 3090", 24 * GIB, 0, (8, 6)),
    "rtx4060": nvml.Gpu("NVIDIA GeForce RTX 4060", 8 * GIB, 0, (8, 9)),
    "t4": nvml.Gpu("Tesla T4", 15 * GIB, 0, (7, 5)),
    "h200": nvml.Gpu("NVIDIA H200", 141 * GIB, 0, (9, 0)),
    "cpu": None,
}
TYPES = {"t4": {"fp32", "fp16"}, "cpu": {"fp32"}}
"""Of the cards that do not have all three; of a processor without AVX-512."""

everywhere = pytest.mark.parametrize(
    ("workload", "card", "cores"), [(w, c, n) for w in BUILT_IN for c, n in [*((c, 16) for c in CARDS), ("rtx3090", 2)]]
)


@pytest.fixture(autouse=True)
def an_old_processor(monkeypatch):
    """A processor without arithmetic for bf16, whatever the tests run on."""
    monkeypatch.setattr(knob_columns, "flags_of_cpu", lambda: frozenset({"avx2"}))


def on(monkeypatch: pytest.MonkeyPatch, card: str, cores: int, *typed: str) -> StudyConfig:
    """Returns the configuration of a machine with that card, or none, and so many cores."""
    gpu = CARDS[card]
    monkeypatch.setattr(nvml, "gpus", lambda: [] if gpu is None else [gpu])
    monkeypatch.setattr(machine, "cores", lambda: cores)
    return setup.prepare_config(load([f"card={card}", *typed]))[1]


def holds(space: Space, config: dict[str, Scalar]) -> dict[str, Any]:
    """Returns the knobs of a configuration that no point of the space has, with what it has instead."""
    whole = space.table.whole(config)
    lacking: dict[str, Any] = {}
    for name, value in config.items():
        given = space.given(name)
        inside = value in given if isinstance(given, Range) else value in values_of(given)
        if name == "micro_batch_size":  # a larger one is cut to the batch
            inside = inside or any(size >= whole["batch_size"] for size in values_of(given))
        if space.table.is_active(name, whole) and not inside:
            lacking[name] = given
    return lacking


@everywhere
def test_the_device_can_do_all_that_is_searched(monkeypatch, workload, card, cores):
    config = on(monkeypatch, card, cores, f"workload={workload}", "budget=full")
    assert config.card.device == ("cpu" if card == "cpu" else "cuda")
    for name in (*config.space.parameters, *config.space.fixed):
        given = config.space.given(name)
        for value in () if isinstance(given, Range) else values_of(given):
            assert refusal(config.space.table[name], value, config.card) is None
    assert not any(isinstance(p, Choice) and p.auto for p in config.space.parameters.values())
    assert max(values_of(config.space.given("num_workers"))) == cores
    types = set(values_of(config.space.given("amp_dtype")))
    assert types <= TYPES.get(card, {"fp32", "bf16", "fp16"})
    assert len(types) == 1 if card == "cpu" else len(types) >= 2, "a card is not searched in fp32 alone"
    batches = config.space.given("batch_size")
    assert max(values_of(config.space.given("micro_batch_size"))) <= max(values_of(batches))
    assert ("compile" in config.space.parameters) == (card != "cpu" and workload in ("nli", "pointer", "headpose"))


@pytest.mark.parametrize(("network", "batch"), [("lstm", 256), ("transformer", 256), ("mlp", 512)])
def test_a_notebooks_t4_of_two_cores_searches_what_its_guide_sets(monkeypatch, network, batch):
    config = on(monkeypatch, "t4", 2, "workload=temporal", f"knobs.architecture={network}")
    sizes = {"hidden_size": 128, "batch_size": batch, "micro_batch_size": batch, "amp_dtype": "fp16", "num_workers": 2}
    flags = ("pin_memory", "persistent_workers", "non_blocking", "cudnn_benchmark")
    assert not holds(config.space, {**sizes, **dict.fromkeys(flags, True)})


@pytest.mark.parametrize("card", ["rtx3090", "cpu"])
@pytest.mark.parametrize("workload", BUILT_IN)
def test_validate_prints_the_space(monkeypatch, capsys, workload, card):
    config = on(monkeypatch, card, 16, f"workload={workload}")
    assert run.main([f"card={card}", f"workload={workload}", "--validate"]) == 0
    out = capsys.readouterr().out.replace("'", "").splitlines()
    assert [line.partition("=")[0] for line in out] == [f"knobs.{name}" for name in config.space.as_raw()]
    assert not any("=auto" in line for line in out if "sdpa_backend" not in line)


def test_a_study_of_minutes_compiles_nothing_of_its_own_accord(monkeypatch):
    short = on(monkeypatch, "rtx3090", 16, "workload=nli")
    assert "compile" not in short.space.as_raw()
    assert any(text.startswith("knobs.compile is not searched: it takes a minute") for text in short.dropped)
    asked = on(monkeypatch, "rtx3090", 16, "workload=nli", "knobs.compile=[off,default]")
    assert asked.space.parameters["compile"] == Choice(("off", "default"))
    hasty = on(monkeypatch, "rtx3090", 16, "workload=nli", "search.max_time=15m")
    assert "compile" not in hasty.space.as_raw(), "all probes together have less time than one model takes to compile"
    longer = on(monkeypatch, "rtx3090", 16, "workload=nli", "search.max_time=15m", "budget=full")
    assert longer.space.parameters["compile"] == Choice(("off", "default"))


@pytest.mark.parametrize("card", ["rtx3090", "cpu"])
def test_micro_batches_that_are_typed_as_auto_are_those_of_the_cards_batches(monkeypatch, card):
    own, typed = (
        on(monkeypatch, card, 4, "workload=temporal", *more) for more in ((), ("knobs.micro_batch_size=auto",))
    )
    largest = max(values_of(typed.space.given("batch_size")))
    assert typed.space.given("batch_size") == own.space.given("batch_size")
    assert max(values_of(typed.space.given("micro_batch_size"))) == largest
    if card != "cpu":
        assert typed.space.given("micro_batch_size") == own.space.given("micro_batch_size")


def test_what_is_typed_stays_on_a_card(monkeypatch):
    config = on(monkeypatch, "rtx3090", 16, "workload=nli", "knobs.batch_size=[4,6]", "knobs.num_workers=0")
    assert config.space.parameters["batch_size"] == Choice((4, 6))
    assert config.space.parameters["micro_batch_size"] == Choice((1, 2, 4, 6))
    assert "prefetch_factor" not in config.space.as_raw()


def test_auto_is_what_the_device_honours_without_a_word(monkeypatch):
    typed = ("workload=signals", "knobs.amp_dtype=auto", "knobs.compile=auto", "knobs.optimizer=auto")
    for card, types, modes in (
        ("rtx4060", ("fp32", "bf16", "fp16"), ("off", "default", "reduce-overhead")),
        ("t4", ("fp32", "fp16"), ("off", "default", "reduce-overhead")),
        ("cpu", ("fp32",), ("off", "default")),
    ):
        config = on(monkeypatch, card, 4, *typed)
        assert tuple(values_of(config.space.given("amp_dtype"))) == types
        assert tuple(values_of(config.space.given("compile"))) == modes
        assert not any(text.startswith(("knobs.amp_dtype", "knobs.compile")) for text in config.dropped)
