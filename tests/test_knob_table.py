"""The knob table: every row has every column, docs/knobs.md is made from it, and it needs no torch."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainables import batches, knob_columns, knob_page, optim, precision
from trainables.knob_columns import AskedBy, Bound, Domain, Kind, Measured, Memory, Requires, Span, refusal
from trainables.knobs import OF_THE_LOOP, Knobs, asked_by
from trainables.our_knobs import EVERY
from trainables.own_run import Run
from tuning.config.cards import Card

ROOT = Path(__file__).parents[1]
names = pytest.mark.parametrize("name", sorted(EVERY))


@names
def test_every_row_has_every_column(name: str) -> None:
    row = EVERY[name]
    assert re.fullmatch(r"(?s)\S.{15,}[.]", row.doc)
    assert set(row.acts_in) <= {path.stem for path in (ROOT / "trainables").glob("*.py")}
    assert row.acts_in
    assert (row.acts_in[0] == "workload") == (name in EVERY.own)
    assert row.kind in get_args(Kind)
    assert row.memory in get_args(Memory)
    assert row.span in get_args(Span)
    assert row.asked_by in get_args(AskedBy)
    assert row.asked_by == "name" or name in OF_THE_LOOP
    assert set(row.remedies) <= set(get_args(Bound))
    assert row.domain.check(row.default) == EVERY.defaults[name]
    unseen = name in EVERY.own or name in ("learning_rate", "schedule", "warmup_frac", "empty_cache")
    assert (row.seen is None) == unseen


@pytest.mark.parametrize("module", ["loop_knobs", "our_knobs"])
def test_no_row_of_ours_leaves_a_column_to_its_default(module: str) -> None:
    calls = (n for n in ast.walk(ast.parse((ROOT / f"trainables/{module}.py").read_text(encoding="utf-8"))))
    rows = [n for n in calls if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "Knob"]
    columns = {"memory", "span", *(["asked_by", "by_hand"] if module == "loop_knobs" else [])}
    assert rows
    for row in rows:
        lacking = columns - {k.arg for k in row.keywords}
        assert not lacking, f"the row at {module}.py:{row.lineno} lacks {', '.join(sorted(lacking))}"


@names
def test_values_of_other_columns_are_values_of_the_knobs(name: str) -> None:
    row = EVERY[name]
    for rule in row.rules:
        assert rule.values == tuple(map(row.domain.check, rule.values))
        assert row.default not in rule.values or name == "amp_dtype", "a default is honoured everywhere"
    if row.requires:
        assert row.requires.knob in row.requires.example
    for measured in (Measured(True), Measured(False, cpu_frac=1.0, augment_frac=0.5)):
        advised = [remedy(Knobs.of({}, EVERY), measured) for remedy in row.remedies.values()]
        assert all(value is None or row.domain.check(value) == value for value in advised)


@pytest.mark.parametrize(
    ("call", "functions", "elsewhere"),
    [
        ("around", [precision.kernels], {"empty_cache"}),
        ("autocast", [precision.autocast], set()),
        ("loader", [batches.loading], {"micro_batch_size"}),
        ("prepare", [Run.prepare, precision.set_memory_format], set()),
        ("batches", [batches.Transfer], set()),
        ("backward", [Run.__dict__["_step_settings"].func], set()),
        ("clip", [optim.hold_gradients], set()),
    ],
)
def test_what_serves_an_own_loop_reads_the_knobs_whose_rows_say_so(
    call: AskedBy, functions: list[Any], elsewhere: set[str]
) -> None:
    read = {name for one in functions for name in re.findall(r"\bknobs\.(\w+)", inspect.getsource(one))}
    assert read | elsewhere == set(asked_by(call))


def test_the_page_is_that_of_the_table() -> None:
    page = (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8")
    assert page == knob_page.renewed(page), "make it anew: python -m trainables.knob_page docs/knobs.md"


def test_other_names_belong_to_one_knob_each() -> None:
    own = [text for name, row in EVERY.items() for text in (name, *row.also)]
    assert len(own) == len(set(own))


def test_the_table_needs_no_torch() -> None:
    code = "import sys; from trainables import knobs, knob_page; assert not {'torch', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@given(st.integers(-5, 5) | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=3) | st.none())
def test_a_requirement_never_raises_and_takes_no_number_for_a_flag(value: Any) -> None:
    assert Requires("a", above=0).met(value) == (isinstance(value, int | float) and value > 0)
    assert Requires("a", equals=True).met(value) == (value is True)
    assert Requires("a", equals="x").met(value) == (value == "x")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"avx2", "fma"}, "it lacks AVX-512"),
        ({"avx2", "avx512bw"}, None),
        ({"avx512bw", "avx512_bf16", "amx_bf16"}, None),
        (set(), None),  # not Linux, or no x86: not known
    ],
)
def test_bf16_on_a_cpu_depends_on_its_instruction_sets(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], reason: str | None
) -> None:
    monkeypatch.setattr(knob_columns, "flags_of_cpu", lambda: frozenset(flags))
    found = refusal(EVERY["amp_dtype"], "bf16", Card("cpu", device="cpu"))
    assert reason in found if reason and found else found is reason
    assert refusal(EVERY["amp_dtype"], "fp32", Card("cpu", device="cpu")) is None
    for elsewhere in (Card("auto"), Card("h200", capability=(9, 0), device="cuda")):
        assert refusal(EVERY["amp_dtype"], "bf16", elsewhere) is None


def test_flags_are_read_from_the_machine() -> None:
    flags = knob_columns.flags_of_cpu()
    assert not flags or all(re.fullmatch(r"\w+", flag) for flag in flags)


def test_a_rule_of_one_kind_of_device_says_which_another_is() -> None:
    cpu, card, unknown = Card("cpu", device="cpu"), Card("h200", device="cuda"), Card("auto")
    for device, other, words in (("cuda", cpu, "this runs on the cpu"), ("cpu", card, "this runs on a CUDA device")):
        rule = knob_columns.only_on(device, "it is arithmetic")
        assert [rule.why_not(on, True) for on in (card, cpu, unknown) if on is not other] == [None, None]
        assert rule.why_not(other, True) == f"it is arithmetic, and {words}"


def test_a_rule_is_of_its_values_alone() -> None:
    assert refusal(EVERY["pin_memory"], 1, Card("cpu", device="cpu")) is None  # 1 is not True
    assert Domain(int, low=0).describe() == "a whole number >= 0"
    assert Knobs(learning_rate=20).learning_rate == 20  # SGD on a clipped LSTM, as in PyTorch's word_language_model
