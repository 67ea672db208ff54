"""The knobs of our workloads, as rows of the table, and which workload has which.

They are not in the workloads' modules: a command line is checked before these are imported, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

from trainables.knob_columns import AMPERE, FLAG, Domain, Knob, Requires, capability, cpu_flags, only_on, package
from trainables.knobs import KnobTable

# fmt: off
ROWS: Mapping[str, Knob] = {
    "inplace_augmentation": Knob(
        False, "system", FLAG, "Augmentations write into the batch instead of making new tensors.",
        memory="minor", span="augment",
        remedies={"loader": lambda _, step: True if step.augment_frac >= 0.02 and not step.cuda else None},
    ),
    "hidden_size": Knob(
        128, "both", Domain(int, low=4, high=16_384), "Width of the network's hidden layers.", shapes_model=True,
        memory="group", span="compute",
    ),
    "network": Knob(
        "transformer", "both", Domain(str, values=("transformer", "lstm")),
        "Pointer network: a Transformer that encodes the nodes again at each step, or LSTMs that read each node once.",
        shapes_model=True, memory="group", span="compute",
    ),
    "sequence_packing": Knob(
        False, "both", FLAG, "Compute on packed sequences, without their padding.", shapes_model=True,
        memory="group", span="compute",
    ),
    "augmentation": Knob(
        1.0, "learning", Domain(float, low=0.0, high=2.0),
        "Strength of the augmentation, as a multiple of the workload's own; 0 is none.",
        memory="minor", span="augment",
    ),
    "dropout": Knob(
        0.1, "learning", Domain(float, low=0.0, high=0.9), "Dropout of the layers the workload adds.",
        memory="minor", span="none", shapes_model=True,
    ),
    "adapter": Knob(
        "dora", "both", Domain(str, values=("none", "lora", "dora")),
        "Adapters trained in place of the full weights; none trains all weights.", shapes_model=True,
        memory="group", span="compute",
    ),
    "adapter_rank": Knob(
        16, "both", Domain(int, low=1, high=1024), "Rank of the adapters.", shapes_model=True,
        memory="group", span="compute", also=("rank",),
    ),
    "base_dtype": Knob(
        "fp32", "both", Domain(str, values=("fp32", "bf16", "fp16", "int8", "nf4")),
        "Type of the frozen weights beside adapters; without adapters nothing is frozen, and everything is fp32. int8 "
        "and nf4 (QLoRA, arXiv 2305.14314) store linear layers in eight and four bits, all other weights in bf16.",
        shapes_model=True, memory="group", span="compute", also=("base",),
        rules=(
            capability(AMPERE, "bf16", "bf16", "int8", "nf4"),
            cpu_flags(
                "this processor has no bf16 arithmetic, as it lacks AVX-512", ("avx512bw",), "bf16", "int8", "nf4"
            ),
            package("bitsandbytes", "quant", "nf4"),
            only_on("cuda", "on a CPU a step in fp16 takes many times as long as in fp32", "fp16"),
        ),
        remedies={"memory": lambda own, step: "bf16" if own.base_dtype == "fp32" else None},
        auto=("fp32", "bf16", "fp16", "int8", "nf4"),
    ),
    "encoder_frac": Knob(
        0.0, "both", Domain(float, low=0.0, high=0.9),
        "Share of the training samples spent on the encoder alone, before the classifier; in each round.",
        acts_in=("workload", "loop"), memory="switch", span="compute",
    ),
    "phase_rounds": Knob(
        1, "learning", Domain(int, low=1, high=1000),
        "Rounds of a training, equally long: each trains the encoder alone, then the classifier.",
        acts_in=("workload", "loop"), memory="none", span="none", requires=Requires("encoder_frac", above=0),
    ),
    "architecture": Knob(
        "lstm", "both", Domain(str, values=("lstm", "transformer", "mlp")),
        "Type of network, if the workload has several.", shapes_model=True,
        memory="group", span="compute",
    ),
}
# fmt: on
"""The rows by the name of the knob."""

_KNOBS_OF: Mapping[str, tuple[str, ...]] = {
    "headpose": ("hidden_size", "dropout", "augmentation", "inplace_augmentation"),
    "nli": ("adapter", "adapter_rank", "base_dtype", "dropout", "sequence_packing"),
    "pointer": ("network", "hidden_size", "dropout", "augmentation", "inplace_augmentation"),
    "signals": (
        *("encoder_frac", "phase_rounds", "hidden_size", "sequence_packing", "dropout", "augmentation"),
        "inplace_augmentation",
    ),
    "temporal": ("architecture", "hidden_size", "dropout"),
}
_HOOKS = {"nli": ("parameter_groups",)}
"""The methods of a workload's class that replace or accompany knobs (`KnobTable`)."""

OURS: Mapping[str, KnobTable] = {
    ref: KnobTable({name: ROWS[name] for name in names}, hooks=_HOOKS.get(ref, ())) for ref, names in _KNOBS_OF.items()
}
"""The table of each of our workloads, by its name."""
BUILT_IN = tuple(OURS)

FINE_TUNED: Mapping[str, Knob] = {name: ROWS[name] for name in ("adapter", "adapter_rank", "base_dtype")}
HF_OPTIONS = ("max_length", "targets", "attention")
"""The knobs of a model that is known by its configuration alone (`workloads.described`), and its options."""
EVERY = KnobTable(ROWS)
"""A table with the knobs of all our workloads."""
