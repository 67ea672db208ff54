"""A case for each knob: where it has something to do, with it and without it. Neither Ray nor Optuna is needed."""

from __future__ import annotations

from collections.abc import Mapping

from trainables.knobs import Scalar
from tuning.search.ablation import Pair, settled

Knobs = Mapping[str, Scalar]
BASES: Mapping[str, Knobs] = {
    "nli": {"batch_size": 32, "micro_batch_size": 16, "adapter": "dora", "adapter_rank": 16},
    "headpose": {"batch_size": 64, "micro_batch_size": 64},
    "signals": {"batch_size": 64, "micro_batch_size": 64, "hidden_size": 64},
    "temporal": {"batch_size": 64, "micro_batch_size": 64, "hidden_size": 64},
}
LOADING: Knobs = {"num_workers": 2}
CASES: Mapping[str, list[tuple[str, Scalar, Scalar, Knobs]]] = {
    # knob, with, without, what it needs beside it
    "nli": [
        ("micro_batch_size", 16, 4, {}),
        ("batch_size", 64, 16, {}),
        ("length_bucketing", True, False, {}),
        ("sequence_packing", True, False, {}),
        ("amp_dtype", "bf16", "fp32", {}),
        ("sdpa_backend", "auto", "math", {}),
        ("activation_checkpointing", True, False, {}),
        ("fused_optimizer", True, False, {}),
        ("optimizer", "adamw8bit", "adamw", {}),
        ("set_to_none", True, False, {}),
        ("sync_every_step", False, True, {}),
        ("adapter", "lora", "dora", {}),
        ("adapter_rank", 4, 16, {}),
    ],
    "headpose": [
        ("channels_last", True, False, {}),
        ("ram_cache", True, False, {}),
        ("num_workers", 2, 0, {}),
        ("prefetch_factor", 4, 2, LOADING),
        ("persistent_workers", True, False, LOADING),
        ("device_augmentation", True, False, {"ram_cache": True}),
        ("inplace_augmentation", True, False, {"ram_cache": True}),
        ("augmentation", 0.0, 1.0, {"ram_cache": True}),
        ("fused_optimizer", True, False, {"ram_cache": True}),
    ],
    "signals": [
        ("hidden_size", 64, 128, {"ram_cache": True}),
        ("sequence_packing", True, False, {"ram_cache": True}),
        ("encoder_frac", 0.0, 0.5, {"ram_cache": True}),
    ],
    "temporal": [
        ("architecture", "lstm", "transformer", {"ram_cache": True}),
        ("compile", "default", "off", {"ram_cache": True, "architecture": "mlp"}),
    ],
}
ON_CUDA: Mapping[str, list[tuple[str, Scalar, Scalar, Knobs]]] = {
    "headpose": [
        ("pin_memory", True, False, {"ram_cache": True}),
        ("non_blocking", True, False, {"ram_cache": True, "pin_memory": True}),
        ("device_prefetch", True, False, {"ram_cache": True, "pin_memory": True}),
        ("cudnn_benchmark", True, False, {"ram_cache": True}),
        ("tf32", True, False, {"ram_cache": True}),
    ],
}


def pairs(workload: str, *, cuda: bool) -> list[Pair]:
    """Returns a workload's pairs."""
    cases = [*CASES.get(workload, []), *(ON_CUDA.get(workload, []) if cuda else [])]
    made = []
    for knob, on, off, beside in cases:
        common = {**BASES[workload], **beside}
        made.append(Pair("best", (knob,), settled({**common, knob: on}), settled({**common, knob: off})))
    return made
