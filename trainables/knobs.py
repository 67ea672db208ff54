"""Every optimisation as one row: its kind and values, what it needs, moves and shortens, and how it is read back.

A knob travels: `search_spaces/*.yaml` or the command line -> `tuning.config` (checked against the `Domain` here) ->
`Knobs` -> the modules of `trainables` that act on it (`acts_in`). A new knob is its row here, the line that acts on it,
and its test: card rules, memory groups, probes, remedies, the runtime check, other names and docs/knobs.md are read
from the row. `trainables.knob_columns` says what the columns mean.

Torch is not imported here, so that a configuration can be checked before torch is.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from trainables import knob_readers as read
from trainables.knob_columns import (
    FLAG,
    Domain,
    Kind,
    Knob,
    Memory,
    Requires,
    Scalar,
    Span,
    capability,
    card_types,
    cpu_flags,
    cuda,
    package,
    turn,
)

__all__ = ["NAMES", "TABLE", "Knobs", "Scalar", "domain_of", "is_active", "kind_of", "with_memory", "with_span"]

_VOLTA, _AMPERE = (7, 0), (8, 0)  # the first with Triton's code, and the first with bfloat16 and TensorFloat-32
_DTYPES = ("fp32", "bf16", "fp16")
_WORKERS = Requires("num_workers", above=0)


def _row(row: Knob) -> Any:
    return field(default=row.default, metadata={"row": row})


@dataclass(frozen=True)
class Knobs:
    """The knobs of one trial. Defaults are the plain PyTorch way, so every gain has something to be measured against.

    Kinds (docs/design.md section 3): *system* knobs change speed and memory only, *learning* knobs change what is
    learned, *both* change both. `tests/trainables/test_loop.py` holds the system ones to their word.
    """

    # fmt: off
    batch_size: int = _row(Knob(
        32, "learning", Domain(int, low=1, high=65_536), "Samples of one optimiser step.",
        acts_in=("batches", "loop"), memory="step", span="optimizer", claimed="A B C D E",
        seen=read.equal("batch_size", "batches of {}"), short="batch", also=("bs", "batch"),
        remedies={"optimizer": lambda own, _: 2 * own.batch_size},  # fewer steps for the same samples
    ))
    micro_batch_size: int = _row(Knob(
        8, "system", Domain(int, low=1, high=65_536),
        "Most samples of one forward and backward pass; gradients of a batch's micro-batches are summed before the "
        "optimiser step, so it sets memory and speed, not the meaning of the batch.",
        acts_in=("batches", "loop"), memory="step", span="compute", claimed="A B D, as accumulation",
        seen=read.micro_batch_size, short="micro", also=("micro_batch",),
        remedies={"launch": lambda own, _: min(own.batch_size, 2 * own.micro_batch_size)},
    ))
    length_bucketing: bool = _row(Knob(
        False, "system", FLAG,
        "Sort the samples of one batch by length before cutting it into micro-batches: less padding, and every "
        "optimiser step sees the same samples as without.",
        acts_in=("batches",), memory="none", span="compute", claimed="C, for later",
        seen=read.flag("sorted_by_length", "samples sorted by length", "samples unsorted"),
    ))
    ram_cache: bool = _row(Knob(
        False, "system", FLAG, "Prepare every sample once (decode, tokenise) and keep it in RAM.",
        acts_in=("batches",), memory="none", span="loader", claimed="B; E, for augmented samples",
        seen=read.flag("samples_in_ram", "samples kept in RAM", "samples read anew"), remedies={"loader": turn(True)},
    ))
    num_workers: int = _row(Knob(
        0, "system", Domain(int, low=0, high=256), "DataLoader processes; 0 loads in the training process.",
        acts_in=("batches",), memory="none", span="loader", claimed="A B C D E",
        seen=read.equal("workers", "with {} live workers"), also=("workers",),
        # More workers need cores to work on.
        remedies={"loader": lambda own, step: (2 * own.num_workers or 2) if step.cpu_frac < 0.9 else None},
    ))
    prefetch_factor: int = _row(Knob(
        2, "system", Domain(int, low=1, high=64), "Micro-batches each worker keeps ready.",
        acts_in=("batches",), memory="none", span="loader", claimed="A B C E", requires=_WORKERS,
        seen=read.equal("prefetch_factor", "with a prefetch of {}"), also=("prefetch",),
        remedies={"loader": lambda own, _: max(4, own.prefetch_factor)},
    ))
    persistent_workers: bool = _row(Knob(
        False, "system", FLAG, "Keep workers alive from epoch to epoch.",
        acts_in=("batches",), memory="none", span="loader", claimed="A B C D E", requires=_WORKERS,
        seen=read.flag("persistent_workers", "workers that last", "workers of one epoch"),
        remedies={"loader": turn(True)},
    ))
    pin_memory: bool = _row(Knob(
        False, "system", FLAG, "Page-locked host batches, for faster copies to a CUDA device.",
        acts_in=("batches",), memory="none", span="transfer", claimed="A B C D",
        seen=read.flag("pinned", "page-locked batches", "no page-locked batch"),
        rules=(cuda("page-locked memory speeds copies to a CUDA device"),), remedies={"transfer": turn(True)},
    ))
    non_blocking: bool = _row(Knob(
        False, "system", FLAG, "Copy to the device without waiting; of use with pinned memory on CUDA.",
        acts_in=("batches",), memory="none", span="transfer", claimed="B D E", seen=read.non_blocking,
        rules=(cuda("there is no copy to a device to wait for"),), remedies={"transfer": turn(True)},
    ))
    device_prefetch: bool = _row(Knob(
        False, "system", FLAG,
        "Copy the next micro-batch on a stream of its own while the device still computes; CUDA.",
        acts_in=("batches",), memory="none", span="transfer", claimed="-", requires=Requires("pin_memory", equals=True),
        seen=read.flag("side_stream", "copies on a stream of their own", "no copy on a stream of its own"),
        rules=(cuda("a stream of its own is a thing of CUDA devices"),), remedies={"transfer": turn(True)},
    ))
    device_augmentation: bool = _row(Knob(
        False, "system", FLAG, "Augment on the device after the transfer, not in the loader's processes.",
        acts_in=("batches", "loop"), memory="minor", span="augment", claimed="E", seen=read.device_augmentation,
        remedies={"loader": lambda _, step: True if step.cuda else None},
    ))
    inplace_augmentation: bool = _row(Knob(
        False, "system", FLAG, "Augmentations write into the batch instead of making new tensors.",
        acts_in=("workload",), memory="minor", span="augment", claimed="E", seen=read.inplace_augmentation,
        remedies={"loader": lambda _, step: True if step.augment_frac >= 0.02 and not step.cuda else None},
    ))
    amp_dtype: str = _row(Knob(
        "fp32", "both", Domain(str, values=_DTYPES), "Type of autocast; fp32 is no autocast, fp16 adds a GradScaler.",
        acts_in=("precision",), memory="group", span="compute", claimed="A B D E: fp16; C: bf16",
        seen=read.amp_dtype, short="type", also=("amp", "dtype", "precision"),
        rules=(
            card_types(*_DTYPES),
            capability(_AMPERE, "bf16", "bf16"),
            # oneDNN, which runs torch's LSTM on a CPU, has no bf16 kernel for it below AVX-512, and raises.
            cpu_flags("bf16 is no arithmetic of this processor, which lacks AVX-512", ("avx512bw",), "bf16"),
            # A pointer network's step took 20 s in fp16 and 0.9 s in fp32 on two cores: 3 against 70 samples/s.
            cuda("fp16 is hardly arithmetic of a CPU, where a step takes many times that of fp32", "fp16"),
        ),
        remedies={
            "memory": lambda own, step: "bf16" if own.amp_dtype == "fp32" else None,
            "compute": lambda own, step: "bf16" if own.amp_dtype == "fp32" and step.cuda else None,
        },
    ))
    tf32: bool = _row(Knob(
        False, "both", FLAG,
        "TensorFloat-32 products of matrices on Ampere and later CUDA devices; torch allows it to convolutions anyway.",
        acts_in=("precision",), memory="none", span="compute", claimed="B C",
        seen=read.flag("tf32", "TensorFloat-32 allowed", "no TensorFloat-32"),
        rules=(cuda("TensorFloat-32 is arithmetic of CUDA devices"), capability(_AMPERE, "tf32", True)),
    ))
    cudnn_benchmark: bool = _row(Knob(
        False, "system", FLAG, "Let cuDNN time its convolutions for each shape and keep the fastest; CUDA.",
        acts_in=("precision",), memory="none", span="compute", claimed="D E", seen=read.cudnn_benchmark,
        rules=(cuda("cuDNN computes on CUDA devices only"),),
    ))
    channels_last: bool = _row(Knob(
        False, "system", FLAG, "Weights of two-dimensional convolutions in NHWC order.",
        acts_in=("precision",), memory="minor", span="compute", claimed="B", seen=read.channels_last,
    ))
    sdpa_backend: str = _row(Knob(
        "auto", "system", Domain(str, values=("auto", "flash", "efficient", "math")),
        "Kernel of scaled_dot_product_attention; auto leaves the choice to torch.",
        acts_in=("precision",), memory="group", span="compute", claimed="C", seen=read.sdpa_backend,
        rules=(capability(_AMPERE, "flash attention", "flash"),),
    ))
    compile: str = _row(Knob(
        "off", "system", Domain(str, values=("off", "default", "reduce-overhead")),
        "torch.compile mode of the model.",
        acts_in=("precision",), memory="minor", span="compute", claimed="A B C E", seen=read.compiled,
        rules=(
            capability(_VOLTA, "torch.compile", "default", "reduce-overhead"),
            cuda("it is CUDA graphs that reduce the overhead", "reduce-overhead"),
        ),
        remedies={"launch": lambda own, step: "reduce-overhead" if step.cuda and own.compile == "off" else None},
    ))
    activation_checkpointing: bool = _row(Knob(
        False, "system", FLAG, "Recompute each block's activations in the backward pass instead of keeping them.",
        acts_in=("precision",), memory="group", span="compute", claimed="C D", seen=read.activation_checkpointing,
        remedies={"memory": turn(True), "compute": turn(False)}, also=("checkpointing",),
    ))
    empty_cache: bool = _row(Knob(
        False, "system", FLAG, "Hand the allocator's cached memory back before a run begins; CUDA.",
        acts_in=("loop",), memory="none", span="none", claimed="D", seen=None,
        rules=(cuda("only the allocator of a CUDA device keeps memory back"),),
    ))
    optimizer: str = _row(Knob(
        "adamw", "both", Domain(str, values=("adamw", "adamw8bit")),
        "AdamW with moments of 32 bits, or of 8 bits in blocks (Dettmers et al., arXiv 2110.02861) for tensors of "
        "4,096 numbers and more.",
        acts_in=("optim",), memory="group", span="optimizer", claimed="C, for later", seen=read.optimizer,
        rules=(package("bitsandbytes", "quant", "adamw8bit"),), remedies={"memory": turn("adamw8bit")},
    ))
    fused_optimizer: bool = _row(Knob(
        False, "system", FLAG, "One kernel for the whole AdamW step.",
        acts_in=("optim",), memory="minor", span="optimizer", claimed="C", seen=read.fused_optimizer,
        requires=Requires("optimizer", equals="adamw"), remedies={"launch": turn(True), "optimizer": turn(True)},
        also=("fused",),
    ))
    set_to_none: bool = _row(Knob(
        True, "system", FLAG,
        "Drop gradients after a step instead of filling them with zeros; not where CUDA graphs accumulate into them.",
        acts_in=("loop", "precision"), memory="step", span="compute", claimed="B C E", seen=read.set_to_none,
    ))
    sync_every_step: bool = _row(Knob(
        False, "system", FLAG,
        "Read the loss on the host after every micro-batch, as many loops do for their progress bar.",
        acts_in=("loop",), memory="none", span="compute", claimed="C, against it",
        seen=read.flag("loss_reads", "the loss read on the host", "no reading of the loss"),
        remedies={"launch": turn(False)},
    ))
    learning_rate: float = _row(Knob(
        5e-4, "learning", Domain(float, low=0.0, high=10.0, low_excluded=True), "Peak of the schedule.",
        acts_in=("optim",), memory="none", span="none", claimed="E, with the batch", seen=None, short="rate",
        also=("lr",),
    ))
    weight_decay: float = _row(Knob(
        0.01, "learning", Domain(float, low=0.0, high=1.0), "AdamW's decoupled weight decay.",
        acts_in=("optim",), memory="none", span="none", claimed="-", also=("wd",),
        seen=read.listed("weight_decays", "weight decay"),
    ))
    warmup_frac: float = _row(Knob(
        0.1, "learning", Domain(float, low=0.0, high=1.0),
        "Share of the steps over which the rate rises from 0; it then falls linearly to 0.",
        acts_in=("optim",), memory="none", span="none", claimed="-", seen=None, also=("warmup",),
    ))
    architecture: str = _row(Knob(
        "lstm", "both", Domain(str, values=("lstm", "transformer", "mlp")),
        "Kind of network, where the workload has several.", shapes_model=True,
        acts_in=("workload",), memory="group", span="compute", claimed="D", seen=read.architecture,
    ))
    hidden_size: int = _row(Knob(
        128, "both", Domain(int, low=4, high=16_384), "Width of the network's hidden layers.", shapes_model=True,
        acts_in=("workload",), memory="group", span="compute", claimed="A D", seen=read.hidden_size,
    ))
    sequence_packing: bool = _row(Knob(
        False, "both", FLAG, "Compute on packed sequences, without their padding.", shapes_model=True,
        acts_in=("workload",), memory="group", span="compute", claimed="C, for later; E",
        seen=read.first_phase(read.flag("packed", "packed sequences", "no packed sequence")),
    ))
    encoder_frac: float = _row(Knob(
        0.0, "both", Domain(float, low=0.0, high=0.9),
        "Share of the training samples spent on the encoder alone, before the classifier.",
        acts_in=("workload", "loop"), memory="group", span="compute", claimed="E", seen=read.encoder_frac,
    ))
    augmentation: float = _row(Knob(
        1.0, "learning", Domain(float, low=0.0, high=2.0),
        "Strength of the augmentation, as a multiple of the workload's own; 0 is none.",
        acts_in=("workload",), memory="minor", span="augment", claimed="B E", seen=read.augmentation,
    ))
    dropout: float = _row(Knob(
        0.1, "learning", Domain(float, low=0.0, high=0.9), "Dropout of the layers the workload adds.",
        acts_in=("workload",), memory="minor", span="none", claimed="A", seen=read.first_phase(read.dropout),
        shapes_model=True,
    ))
    adapter: str = _row(Knob(
        "dora", "both", Domain(str, values=("none", "lora", "dora")),
        "Adapters trained in place of the full weights; none trains all weights.", shapes_model=True,
        acts_in=("workload",), memory="group", span="compute", claimed="C", seen=read.equal("adapter", "adapter {}"),
    ))
    adapter_rank: int = _row(Knob(
        16, "both", Domain(int, low=1, high=1024), "Rank of the adapters.", shapes_model=True,
        acts_in=("workload",), memory="group", span="compute", claimed="-", also=("rank",),
        seen=read.listed("adapter_ranks", "adapters of rank"),
    ))
    # fmt: on

    def __post_init__(self) -> None:
        for name, row in TABLE.items():
            value = getattr(self, name)
            if value is row.default:  # most are: a search makes knobs thousands of times, and checking all took 0.3 ms
                continue
            try:
                object.__setattr__(self, name, row.domain.check(value))
            except ValueError as error:
                raise ValueError(f"knob {name}: {error}") from None

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Knobs:
        """Returns the knobs in `values`, the others at their defaults; raises ValueError for a name that is no knob."""
        for name in values:
            if name not in NAMES:
                near = difflib.get_close_matches(name, NAMES, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; knobs are {', '.join(NAMES)}"
                raise ValueError(f"{name} is not a knob{hint}")
        return cls(**cast(dict[str, Any], dict(values)))

    def as_dict(self) -> dict[str, Scalar]:
        """Returns every knob by name."""
        return {name: getattr(self, name) for name in NAMES}  # dataclasses.asdict copies deeply, 45 us for these 3

    def with_(self, **changes: Scalar) -> Knobs:
        """Returns a copy with some knobs changed."""
        return Knobs.of({**self.as_dict(), **changes})


PHASE_KNOB = "encoder_frac"
"""The share of a training that trains the encoder alone: a phase of its own speed, memory and learning curve."""
TABLE: Mapping[str, Knob] = {f.name: f.metadata["row"] for f in dataclasses.fields(Knobs)}
"""Every row by the name of its knob."""
NAMES: tuple[str, ...] = tuple(TABLE)
ALSO_CALLED: Mapping[str, str] = {other: name for name, row in TABLE.items() for other in row.also}
"""What people write -> the knob, where the distance between the words does not lead there."""


def kind_of(name: str) -> Kind:
    """Returns how the knob may be searched: "system", "learning" or "both"."""
    return TABLE[name].kind


def domain_of(name: str) -> Domain:
    """Returns the values the knob may take."""
    return TABLE[name].domain


def with_memory(*moves: Memory) -> tuple[str, ...]:
    """Returns the knobs that move a step's peak memory in one of these ways."""
    return tuple(name for name, row in TABLE.items() if row.memory in moves)


def with_span(*spans: Span) -> tuple[str, ...]:
    """Returns the knobs that can shorten one of these parts of a step."""
    return tuple(name for name, row in TABLE.items() if row.span in spans)


def is_active(name: str, values: Mapping[str, object]) -> bool:
    """Returns False for a knob whose requirement `values` do not meet, such as a prefetch without workers.

    True for a name that is no knob, as records of another version may hold.
    """
    requires = TABLE[name].requires if name in TABLE else None
    return requires is None or requires.met(values.get(requires.knob, TABLE[requires.knob].default))
