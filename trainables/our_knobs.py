"""The knobs that only some of our workloads have, as rows of the table; a workload declares its own by `our_knobs`.

A workload of one's own declares its rows in its file. Ours are here, as several share one, and a command line is
checked before the modules are imported, which takes seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from trainables import knob_readers as read
from trainables.knob_columns import FLAG, Domain, Knob, capability, cpu_flags, cuda, package
from trainables.knobs import AMPERE, KnobTable

# fmt: off
ROWS: Mapping[str, Knob] = {
    "inplace_augmentation": Knob(
        False, "system", FLAG, "Augmentations write into the batch instead of making new tensors.",
        memory="minor", span="augment", claimed="E", seen=read.inplace_augmentation,
        remedies={"loader": lambda _, step: True if step.augment_frac >= 0.02 and not step.cuda else None},
    ),
    "architecture": Knob(
        "lstm", "both", Domain(str, values=("lstm", "transformer", "mlp")),
        "Kind of network, where the workload has several.", shapes_model=True,
        memory="group", span="compute", claimed="D", seen=read.architecture,
    ),
    "hidden_size": Knob(
        128, "both", Domain(int, low=4, high=16_384), "Width of the network's hidden layers.", shapes_model=True,
        memory="group", span="compute", claimed="A D", seen=read.hidden_size,
    ),
    "sequence_packing": Knob(
        False, "both", FLAG, "Compute on packed sequences, without their padding.", shapes_model=True,
        memory="group", span="compute", claimed="C, for later; E",
        seen=read.first_phase(read.flag("packed", "packed sequences", "no packed sequence")),
    ),
    "encoder_frac": Knob(
        0.0, "both", Domain(float, low=0.0, high=0.9),
        "Share of the training samples spent on the encoder alone, before the classifier.",
        acts_in=("workload", "loop"), memory="switch", span="compute", claimed="E", seen=read.encoder_frac,
    ),
    "augmentation": Knob(
        1.0, "learning", Domain(float, low=0.0, high=2.0),
        "Strength of the augmentation, as a multiple of the workload's own; 0 is none.",
        memory="minor", span="augment", claimed="B E", seen=read.augmentation,
    ),
    "dropout": Knob(
        0.1, "learning", Domain(float, low=0.0, high=0.9), "Dropout of the layers the workload adds.",
        memory="minor", span="none", claimed="A", seen=read.first_phase(read.dropout),
        shapes_model=True,
    ),
    "adapter": Knob(
        "dora", "both", Domain(str, values=("none", "lora", "dora")),
        "Adapters trained in place of the full weights; none trains all weights.", shapes_model=True,
        memory="group", span="compute", claimed="C", seen=read.equal("adapter", "adapter {}"),
    ),
    "base_dtype": Knob(
        "fp32", "both", Domain(str, values=("fp32", "bf16", "fp16", "int8", "nf4")),
        "Type that frozen weights beside adapters are held in; without adapters nothing is frozen, and all is fp32. "
        "int8 and nf4 (QLoRA, arXiv 2305.14314) hold linear layers in eight and four bits, the rest in bf16.",
        shapes_model=True, memory="group", span="compute", claimed="-", seen=read.base_dtype, also=("base",),
        rules=(
            capability(AMPERE, "bf16", "bf16", "int8", "nf4"),
            cpu_flags("bf16 is no arithmetic of this processor, without AVX-512", ("avx512bw",), "bf16", "int8", "nf4"),
            package("bitsandbytes", "quant", "nf4"),
            cuda("fp16 is hardly arithmetic of a CPU, where a step takes many times that of fp32", "fp16"),
        ),
        remedies={"memory": lambda own, step: "bf16" if own.base_dtype == "fp32" else None},
        auto=("fp32", "bf16", "fp16", "int8", "nf4"),
    ),
    "adapter_rank": Knob(
        16, "both", Domain(int, low=1, high=1024), "Rank of the adapters.", shapes_model=True,
        memory="group", span="compute", claimed="-", also=("rank",),
        seen=read.listed("adapter_ranks", "adapters of rank"),
    ),
}
# fmt: on
"""Every such row by the name of its knob."""


def our_knobs(*names: str) -> Mapping[str, Knob]:
    """Returns the rows of these names, as a workload of ours declares its own knobs.

    A command line is checked without importing the workload, so that names are read from the text of its module: the
    call has to be all that `knobs = ` is given, and the names literals in double quotes, without comments between them.
    """
    return {name: ROWS[name] for name in names}


_CALL = re.compile(r'^    knobs\b[^=\n]*= our_knobs\(\s*((?:"\w+",?\s*)*)\)[ \t]*(?:#.*)?$', re.MULTILINE)


def _declared(folder: Path) -> dict[str, tuple[str, ...]]:
    """Returns the names of the knobs that each workload in the modules of a folder declares by `our_knobs`."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\nWORKLOAD = " not in text:
            continue
        call = _CALL.search(text)
        found[path.stem] = tuple(re.findall(r'"(\w+)"', call[1])) if call else ()
        is_unread = call is None and re.search(r"\b(?:our_knobs\(|OURS\[)", text) is not None
        if is_unread or not ROWS.keys() >= set(found[path.stem]):
            form = 'knobs = our_knobs("dropout"), with names of our_knobs.ROWS and nothing else'
            raise TypeError(f"{path.name}: expected {form}")
    return found


OURS: Mapping[str, KnobTable] = {
    ref: KnobTable(our_knobs(*names)) for ref, names in _declared(Path(__file__).parent).items()
}
"""The table of each of our workloads, by its name: the modules beside this one that hold a `WORKLOAD`."""
BUILT_IN = tuple(OURS)
EVERY = KnobTable(ROWS)
"""With all of them, as records and exports of earlier versions have, whatever their workload."""
