"""Asked and seen: a knob that was not honoured is named, one that was is not, and what cannot be told is neither."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from trainables import knobs
from trainables.knobs import OF_THE_LOOP
from trainables.our_knobs import EVERY
from tuning.search.runtime_check import compare, disagreements

CPU: dict[str, Any] = {
    "device": "cpu",
    "batch_size": 16,
    "micro_batch_size": 8,
    "matmul_dtypes": ["bfloat16", "float32"],
    "attention": {"math": 4},
    "recomputed_frac": 0.0,
    "loss_reads": 0,
    "loss_scale": None,
    "frozen_dtypes": [],
    "grads_after_step": "none",
    "optimizer": "AdamW",
    "optimizer_state_dtypes": ["float32"],
    "optimizer_ops": ["aten._fused_adamw_"],
    "weight_decays": [0.0, 0.01],
    "samples_in_ram": False,
    "workers": 0,
    "sorted_by_length": False,
    "phases": {"": 1.0},
}
CARD = {**CPU, "device": "cuda", "pinned": True, "non_blocking": True, "side_stream": False, "tf32": True}


def agrees(active: dict[str, Any], **asked: Any) -> bool | None:
    """Returns whether the one knob that was asked for is as it was seen; fails where it has no row."""
    (name,) = asked
    (row,) = [row for row in compare(asked, active, EVERY) if row.knob == name]
    return row.agrees


@pytest.mark.parametrize(
    ("asked", "as_asked"),
    [
        ({"batch_size": 16}, True),
        ({"batch_size": 32}, False),
        ({"micro_batch_size": 8}, True),
        ({"micro_batch_size": 4}, False),
        ({"amp_dtype": "bf16"}, True),
        ({"amp_dtype": "fp32"}, False),
        ({"amp_dtype": "fp16"}, False),
        ({"sdpa_backend": "math"}, True),
        ({"sdpa_backend": "auto"}, True),
        ({"sdpa_backend": "flash"}, False),
        ({"activation_checkpointing": False}, True),
        ({"activation_checkpointing": True}, False),
        ({"fused_optimizer": True}, True),
        ({"fused_optimizer": False}, False),
        ({"optimizer": "adamw"}, True),
        ({"optimizer": "adamw8bit"}, False),
        ({"set_to_none": True}, True),
        ({"set_to_none": False}, False),
        ({"length_bucketing": True}, False),
        ({"ram_cache": False}, True),
        ({"num_workers": 0}, True),
        ({"num_workers": 2}, False),
        ({"channels_last": True}, False),
        ({"cudnn_benchmark": True}, False),
        ({"pin_memory": True}, False),
        ({"non_blocking": True}, False),
        ({"tf32": True}, False),
        ({"sync_every_step": False}, True),
        ({"weight_decay": 0.01}, True),
        ({"weight_decay": 0.5}, False),
        ({"device_augmentation": True}, False),
    ],
    ids=str,
)
def test_each_knob_is_held_against_what_was_seen(asked: dict[str, Any], as_asked: bool | None) -> None:
    assert agrees(CPU, **asked) is as_asked


def test_a_knob_that_requires_another_is_read_where_that_is_set() -> None:
    loading = {**CPU, "workers": 2, "prefetch_factor": 4, "persistent_workers": False}
    rows = compare({"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}, loading, EVERY)
    assert [row.agrees for row in rows] == [True, True, False]
    for seen, as_asked in ((True, True), (False, False)):
        rows = compare({"pin_memory": True, "device_prefetch": True}, {**CARD, "side_stream": seen}, EVERY)
        assert [row.agrees for row in rows] == [True, as_asked]
    sgd = {**CPU, "optimizer": "SGD", "optimizer_state_dtypes": [], "momenta": [0.9], "nesterov": True}
    rows = compare({"optimizer": "sgd", "momentum": 0.5, "nesterov": True}, sgd, EVERY)
    assert [row.agrees for row in rows] == [True, False, True]
    assert agrees({**CPU, "gradient_norms": ["aten._foreach_norm"]}, max_grad_norm=1.0) is True
    assert agrees({**CPU, "gradient_norms": []}, max_grad_norm=1.0) is False


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_default_is_not_denied_where_its_fact_is_missing(device: str) -> None:
    defaults = {name: row.default for name, row in OF_THE_LOOP.items()}
    assert disagreements(defaults, {"device": device, "batch_size": 32, "micro_batch_size": 8}, EVERY) == []


def test_each_reader_has_a_case_here() -> None:
    cases = set[str]()
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            cases |= {str(one.arg) for one in node.keywords if node.func.id == "agrees"}
        asked = node.args[0] if isinstance(node, ast.Call) and node.args else None
        asked = node.elts[0] if isinstance(node, ast.Tuple) and len(node.elts) == 2 else asked
        if isinstance(asked, ast.Dict):
            cases |= {str(key.value) for key in asked.keys if isinstance(key, ast.Constant)}
    assert {name for name, row in OF_THE_LOOP.items() if row.seen is not None} <= cases


def test_the_sentence_names_knob_value_and_what_ran() -> None:
    assert disagreements({"sdpa_backend": "flash", "num_workers": 0}, CPU, EVERY) == [
        "knobs.sdpa_backend=flash was asked; the first step showed attention by math"
    ]
    assert disagreements({"set_to_none": False}, CPU, EVERY) == [
        "knobs.set_to_none=false was asked; the first step showed gradients set to none"
    ]


def test_a_card_shows_what_a_cpu_does_not_have() -> None:
    assert agrees(CARD, pin_memory=True) is agrees(CARD, non_blocking=True) is agrees(CARD, tf32=True) is True
    assert agrees(CARD, pin_memory=False) is False
    assert agrees(CARD, non_blocking=False) is True  # copies beside the step never wait
    assert not compare({"tf32": False, "pin_memory": False}, CPU, EVERY)


def test_a_micro_batch_is_never_larger_than_its_batch() -> None:
    assert agrees({**CPU, "micro_batch_size": 16}, micro_batch_size=64) is True


def test_a_batch_may_be_cut_more_evenly_than_asked() -> None:
    nine = {**CPU, "batch_size": 9, "micro_batch_size": 5}
    assert agrees(nine, micro_batch_size=8) is True
    assert agrees(nine, micro_batch_size=4) is agrees(nine, micro_batch_size=9) is False


def test_compiled_is_told_by_graphs_after_a_second_step() -> None:
    assert agrees({**CPU, "compiled_graphs": 2}, compile="default") is True
    assert agrees({**CPU, "compiled_graphs": 0}, compile="default") is False
    assert not compare({"compile": "default"}, CPU, EVERY)


def test_a_step_that_was_skipped_says_nothing_of_the_optimiser() -> None:
    skipped = {k: v for k, v in CPU.items() if k != "optimizer_ops"}
    assert not compare({"fused_optimizer": True}, skipped, EVERY)


def test_an_augmentation_is_read_by_where_it_ran() -> None:
    assert agrees({**CPU, "augmented_on": "cpu"}, device_augmentation=True) is True
    assert agrees({**CPU, "augmented_on": "loader"}, device_augmentation=True) is False


def test_idle_knob_and_run_without_a_step_have_no_row() -> None:
    assert not compare({"num_workers": 0, "prefetch_factor": 4}, {**CPU, "prefetch_factor": 2}, EVERY)[1:]
    assert compare({"num_workers": 2}, {}, EVERY) == []


def test_convolutions_over_time_are_no_images() -> None:
    mixed = {**CPU, "conv_weights": ["not an image", "channels_last"]}
    assert agrees(mixed, channels_last=True) is True
    assert agrees(mixed, channels_last=False) is False
    assert agrees({**CPU, "conv_weights": ["not an image"]}, channels_last=True) is False


@pytest.mark.parametrize("junk", [None, "nonsense", [], {"fp32": 1}, 2.5, True], ids=str)
def test_a_damaged_record_is_no_error(junk: Any) -> None:
    everything = knobs.Knobs(num_workers=2, pin_memory=True).as_dict()
    damaged = (everything, dict.fromkeys(CARD, junk)), (dict.fromkeys(everything, junk), CARD)
    for rows in (compare(*pair, EVERY) for pair in damaged):
        assert {row.knob for row in rows} <= set(everything)


def test_products_of_frozen_weights_are_no_autocast() -> None:
    half = {**CPU, "frozen_dtypes": ["bfloat16", "float32"]}
    assert agrees(half, amp_dtype="fp32") is None
    assert agrees(half, amp_dtype="bf16") is True
