"""Asked and seen: a knob that was not honoured is named, one that was is not, and what cannot be told is neither."""

from __future__ import annotations

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
WORKERS = {"workers": 2, "prefetch_factor": 4, "persistent_workers": False}
SGD = {"optimizer": "SGD", "optimizer_state_dtypes": [], "momenta": [0.9], "nesterov": True}
NO_ROW = "no row"

CASES: list[tuple[dict[str, Any], dict[str, Any], bool | str | None]] = [
    # facts beside those of CPU; what is asked; whether the last knob of it is as it was seen
    ({}, {"batch_size": 16}, True),
    ({}, {"batch_size": 32}, False),
    ({}, {"micro_batch_size": 8}, True),
    ({}, {"micro_batch_size": 4}, False),
    ({"micro_batch_size": 16}, {"micro_batch_size": 64}, True),  # it is never larger than its batch
    ({"batch_size": 9, "micro_batch_size": 5}, {"micro_batch_size": 8}, True),  # cut more evenly than asked
    ({"batch_size": 9, "micro_batch_size": 5}, {"micro_batch_size": 4}, False),
    ({"batch_size": 9, "micro_batch_size": 5}, {"micro_batch_size": 9}, False),
    ({}, {"amp_dtype": "bf16"}, True),
    ({}, {"amp_dtype": "fp32"}, False),
    ({}, {"amp_dtype": "fp16"}, False),
    ({"frozen_dtypes": ["bfloat16", "float32"]}, {"amp_dtype": "fp32"}, None),  # their products are no autocast
    ({"frozen_dtypes": ["bfloat16", "float32"]}, {"amp_dtype": "bf16"}, True),
    ({}, {"sdpa_backend": "math"}, True),
    ({}, {"sdpa_backend": "auto"}, True),
    ({}, {"sdpa_backend": "flash"}, False),
    ({}, {"activation_checkpointing": False}, True),
    ({}, {"activation_checkpointing": True}, False),
    ({"compiled_graphs": 2}, {"compile": "default"}, True),
    ({"compiled_graphs": 0}, {"compile": "default"}, False),
    ({}, {"compile": "default"}, NO_ROW),  # it takes a second step to know
    ({}, {"fused_optimizer": True}, True),
    ({}, {"fused_optimizer": False}, False),
    ({"optimizer_ops": None}, {"fused_optimizer": True}, NO_ROW),  # the step was skipped
    ({}, {"optimizer": "adamw"}, True),
    ({}, {"optimizer": "adamw8bit"}, False),
    (SGD, {"optimizer": "sgd"}, True),
    (SGD, {"optimizer": "sgd", "momentum": 0.5}, False),
    (SGD, {"optimizer": "sgd", "nesterov": True}, True),
    ({"gradient_norms": ["aten._foreach_norm"]}, {"max_grad_norm": 1.0}, True),
    ({"gradient_norms": []}, {"max_grad_norm": 1.0}, False),
    ({"averaged": True}, {"ema_decay": 0.9}, True),
    ({"averaged": True}, {"ema_decay": 0.0}, False),
    ({"averaged": False}, {"ema_decay": 0.9}, False),
    ({"averaged": None}, {"ema_decay": 0.9}, NO_ROW),  # a custom loop averages unseen
    ({}, {"set_to_none": True}, True),
    ({}, {"set_to_none": False}, False),
    ({}, {"length_bucketing": True}, False),
    ({}, {"ram_cache": False}, True),
    ({}, {"num_workers": 0}, True),
    ({}, {"num_workers": 2}, False),
    (WORKERS, {"num_workers": 2, "prefetch_factor": 4}, True),
    (WORKERS, {"num_workers": 2, "persistent_workers": True}, False),
    ({"prefetch_factor": 2}, {"num_workers": 0, "prefetch_factor": 4}, NO_ROW),  # it is idle
    ({}, {"channels_last": True}, False),
    ({"conv_weights": ["not an image", "channels_last"]}, {"channels_last": True}, True),
    ({"conv_weights": ["not an image", "channels_last"]}, {"channels_last": False}, False),
    ({"conv_weights": ["not an image"]}, {"channels_last": True}, False),  # convolutions over time
    ({}, {"cudnn_benchmark": True}, False),
    ({}, {"pin_memory": True}, False),
    ({}, {"pin_memory": False}, NO_ROW),
    (CARD, {"pin_memory": True}, True),
    (CARD, {"pin_memory": False}, False),
    ({**CARD, "side_stream": True}, {"pin_memory": True, "device_prefetch": True}, True),
    (CARD, {"pin_memory": True, "device_prefetch": True}, False),
    ({}, {"non_blocking": True}, False),
    (CARD, {"non_blocking": True}, True),
    (CARD, {"non_blocking": False}, True),  # copies beside the step never wait
    ({}, {"tf32": True}, False),
    ({}, {"tf32": False}, NO_ROW),
    (CARD, {"tf32": True}, True),
    ({}, {"sync_every_step": False}, True),
    ({}, {"weight_decay": 0.01}, True),
    ({}, {"weight_decay": 0.5}, False),
    ({}, {"device_augmentation": True}, False),
    ({"augmented_on": "cpu"}, {"device_augmentation": True}, True),
    ({"augmented_on": "loader"}, {"device_augmentation": True}, False),
]


@pytest.mark.parametrize(("facts", "asked", "as_asked"), CASES, ids=str)
def test_knob_is_held_against_what_was_seen(
    facts: dict[str, Any], asked: dict[str, Any], as_asked: bool | str | None
) -> None:
    seen = {name: fact for name, fact in {**CPU, **facts}.items() if fact is not None or name not in facts}
    found = {row.knob: row.agrees for row in compare(asked, seen, EVERY)}
    assert found.get(list(asked)[-1], NO_ROW) is as_asked


def test_each_reader_has_a_case() -> None:
    cases = {name for _, asked, _ in CASES for name in asked}
    assert {name for name, row in OF_THE_LOOP.items() if row.seen is not None} <= cases


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_default_is_not_denied_if_its_fact_is_missing(device: str) -> None:
    defaults = {name: row.default for name, row in OF_THE_LOOP.items()}
    assert disagreements(defaults, {"device": device, "batch_size": 32, "micro_batch_size": 8}, EVERY) == []
    assert compare(defaults, {}, EVERY) == [], "without a step nothing is told"


def test_sentence_names_knob_value_and_what_ran() -> None:
    (said,) = disagreements({"sdpa_backend": "flash", "num_workers": 0}, CPU, EVERY)
    assert said == "sdpa_backend=flash was set, but the first step showed attention by math"


@pytest.mark.parametrize("junk", [None, "nonsense", [], {"fp32": 1}, 2.5, True], ids=str)
def test_damaged_record_is_no_error(junk: Any) -> None:
    everything = knobs.Knobs(num_workers=2, pin_memory=True).as_dict()
    damaged = (everything, dict.fromkeys(CARD, junk)), (dict.fromkeys(everything, junk), CARD)
    for rows in (compare(*pair, EVERY) for pair in damaged):
        assert {row.knob for row in rows} <= set(everything)
