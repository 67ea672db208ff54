"""Every optimisation as one typed, documented field, with the kind that says how it may be searched.

A knob travels: `search_spaces/*.yaml` or the command line -> `tuning.config` (checked against the `Domain` here) ->
`Knobs` -> the module of `trainables` that acts on it (named at the end of each description).

Torch is not imported here, so that a configuration can be checked before torch is.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

Scalar = bool | int | float | str
Kind = Literal["system", "learning", "both"]


@dataclass(frozen=True)
class Domain:
    """What values a knob may take: a closed list of `values`, or numbers from `low` to `high` (both allowed).

    `low_excluded` makes the lower end open, for quantities that must be positive.
    """

    type: type[bool] | type[int] | type[float] | type[str]
    values: tuple[Scalar, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    low_excluded: bool = False

    def describe(self) -> str:
        """Returns the allowed values in words, for error messages and documentation."""
        if self.values:
            return "one of " + ", ".join(str(v).lower() if isinstance(v, bool) else str(v) for v in self.values)
        name = "a whole number" if self.type is int else "a number"
        lower = f"{'> ' if self.low_excluded else '>= '}{self.low:g}" if self.low > -math.inf else ""
        upper = f"<= {self.high:g}" if self.high < math.inf else ""
        return " ".join(part for part in (name, lower, "and" if lower and upper else "", upper) if part)

    def check(self, value: object) -> Scalar:
        """Returns `value` as the knob's own type, or raises ValueError with what is allowed.

        A whole number is taken where a number is asked; nothing else is converted ("yes" is not True).
        """
        if self.values:
            for allowed in self.values:
                if type(value) is type(allowed) and value == allowed:
                    return allowed
            raise ValueError(f"expected {self.describe()}, got {value!r}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"expected {self.describe()}, got {value!r}")
        outside = value < self.low or value > self.high or (self.type is int and int(value) != value)
        if outside or (self.low_excluded and value <= self.low):
            raise ValueError(f"expected {self.describe()}, got {value!r}")
        return int(value) if self.type is int else float(value)


_FLAG = Domain(bool, values=(False, True))


def _knob(default: Scalar, kind: Kind, domain: Domain, doc: str, *, model: bool = False) -> Any:
    return field(default=default, metadata={"kind": kind, "domain": domain, "doc": doc, "model": model})


@dataclass(frozen=True)
class Knobs:
    """The knobs of one trial. Defaults are the plain PyTorch way, so every gain has something to be measured against.

    Kinds (docs/design.md section 3): *system* knobs change speed and memory only, *learning* knobs change what is
    learned, *both* change both. `tests/trainables/test_loop.py` holds the system ones to their word.
    """

    # -- batches.py ------------------------------------------------------------------------------------------------
    batch_size: int = _knob(
        32, "learning", Domain(int, low=1, high=65_536), "Samples of one optimiser step. [batches, loop]"
    )
    micro_batch_size: int = _knob(
        8,
        "system",
        Domain(int, low=1, high=65_536),
        "Most samples of one forward and backward pass; gradients of a batch's micro-batches are summed before the "
        "optimiser step, so it sets memory and speed, not the meaning of the batch. [batches, loop]",
    )
    length_bucketing: bool = _knob(
        False,
        "system",
        _FLAG,
        "Sort the samples of one batch by length before cutting it into micro-batches: less padding, and every "
        "optimiser step sees the same samples as without. [batches]",
    )
    ram_cache: bool = _knob(
        False, "system", _FLAG, "Prepare every sample once (decode, tokenise) and keep it in RAM. [batches]"
    )
    num_workers: int = _knob(
        0, "system", Domain(int, low=0, high=256), "DataLoader processes; 0 loads in the training process. [batches]"
    )
    prefetch_factor: int = _knob(
        2, "system", Domain(int, low=1, high=64), "Micro-batches each worker keeps ready; needs workers. [batches]"
    )
    persistent_workers: bool = _knob(
        False, "system", _FLAG, "Keep workers alive from epoch to epoch; needs workers. [batches]"
    )
    pin_memory: bool = _knob(
        False, "system", _FLAG, "Page-locked host batches, for faster copies to a CUDA device. [batches]"
    )
    non_blocking: bool = _knob(
        False, "system", _FLAG, "Copy to the device without waiting; of use with pinned memory on CUDA. [batches]"
    )
    device_prefetch: bool = _knob(
        False,
        "system",
        _FLAG,
        "Copy the next micro-batch on a stream of its own while the device still computes; CUDA, needs pinned memory. "
        "[batches]",
    )
    device_augmentation: bool = _knob(
        False,
        "system",
        _FLAG,
        "Augment on the device after the transfer, not in the loader's processes. [batches, loop]",
    )
    inplace_augmentation: bool = _knob(
        False, "system", _FLAG, "Augmentations write into the batch instead of making new tensors. [workload]"
    )
    # -- precision.py ----------------------------------------------------------------------------------------------
    amp_dtype: str = _knob(
        "fp32",
        "both",
        Domain(str, values=("fp32", "bf16", "fp16")),
        "Type of autocast; fp32 is no autocast, fp16 adds a GradScaler. [precision]",
    )
    tf32: bool = _knob(False, "both", _FLAG, "TensorFloat-32 products on Ampere and later CUDA devices. [precision]")
    cudnn_benchmark: bool = _knob(
        False, "system", _FLAG, "Let cuDNN time its convolutions for each shape and keep the fastest; CUDA. [precision]"
    )
    channels_last: bool = _knob(
        False, "system", _FLAG, "Weights of two-dimensional convolutions in NHWC order. [precision]"
    )
    sdpa_backend: str = _knob(
        "auto",
        "system",
        Domain(str, values=("auto", "flash", "efficient", "math")),
        "Kernel of scaled_dot_product_attention; auto leaves the choice to torch. [precision]",
    )
    compile: str = _knob(
        "off",
        "system",
        Domain(str, values=("off", "default", "reduce-overhead")),
        "torch.compile mode of the model. [precision]",
    )
    activation_checkpointing: bool = _knob(
        False,
        "system",
        _FLAG,
        "Recompute each block's activations in the backward pass instead of keeping them. [precision]",
    )
    empty_cache: bool = _knob(
        False, "system", _FLAG, "Hand the allocator's cached memory back before a run begins; CUDA. [loop]"
    )
    # -- optim.py, loop.py -----------------------------------------------------------------------------------------
    optimizer: str = _knob(
        "adamw",
        "both",
        Domain(str, values=("adamw", "adamw8bit")),
        "AdamW with moments of 32 bits, or of 8 bits in blocks (Dettmers et al., arXiv 2110.02861) for tensors of "
        "4,096 numbers and more; the second needs the package bitsandbytes. [optim]",
    )
    fused_optimizer: bool = _knob(
        False, "system", _FLAG, "One kernel for the whole AdamW step; needs optimizer=adamw. [optim]"
    )
    set_to_none: bool = _knob(
        True, "system", _FLAG, "Drop gradients after a step instead of filling them with zeros. [loop]"
    )
    sync_every_step: bool = _knob(
        False,
        "system",
        _FLAG,
        "Read the loss on the host after every micro-batch, as many loops do for their progress bar. [loop]",
    )
    learning_rate: float = _knob(
        5e-4, "learning", Domain(float, low=0.0, high=10.0, low_excluded=True), "Peak of the schedule. [optim]"
    )
    weight_decay: float = _knob(
        0.01, "learning", Domain(float, low=0.0, high=1.0), "AdamW's decoupled weight decay. [optim]"
    )
    warmup_frac: float = _knob(
        0.1,
        "learning",
        Domain(float, low=0.0, high=1.0),
        "Share of the steps over which the rate rises from 0; it then falls linearly to 0. [optim]",
    )
    # -- the workload's model and data -----------------------------------------------------------------------------
    architecture: str = _knob(
        "lstm",
        "both",
        Domain(str, values=("lstm", "transformer", "mlp")),
        "Kind of network, where the workload has several. [workload]",
        model=True,
    )
    hidden_size: int = _knob(
        128, "both", Domain(int, low=4, high=16_384), "Width of the network's hidden layers. [workload]", model=True
    )
    sequence_packing: bool = _knob(
        False,
        "both",
        _FLAG,
        "Compute on packed sequences, without their padding. [workload]",
        model=True,
    )
    encoder_frac: float = _knob(
        0.0,
        "learning",
        Domain(float, low=0.0, high=0.9),
        "Share of the training samples spent on the encoder alone, before the classifier. [workload, loop]",
    )
    augmentation: float = _knob(
        1.0,
        "learning",
        Domain(float, low=0.0, high=2.0),
        "Strength of the augmentation, as a multiple of the workload's own; 0 is none. [workload]",
    )
    dropout: float = _knob(
        0.1,
        "learning",
        Domain(float, low=0.0, high=0.9),
        "Dropout of the layers the workload adds. [workload]",
        model=True,
    )
    adapter: str = _knob(
        "dora",
        "both",
        Domain(str, values=("none", "lora", "dora")),
        "Adapters trained in place of the full weights; none trains all weights. [workload]",
        model=True,
    )
    adapter_rank: int = _knob(16, "both", Domain(int, low=1, high=1024), "Rank of the adapters. [workload]", model=True)

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value is default:  # most are: a search makes knobs thousands of times, and checking all took 0.3 ms
                continue
            try:
                object.__setattr__(self, name, domain_of(name).check(value))
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
NAMES: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Knobs))
_DEFAULTS: dict[str, Scalar] = {f.name: cast(Scalar, f.default) for f in dataclasses.fields(Knobs)}
_META: dict[str, Mapping[str, Any]] = {f.name: f.metadata for f in dataclasses.fields(Knobs)}


def kind_of(name: str) -> Kind:
    """Returns how the knob may be searched: "system", "learning" or "both"."""
    return cast(Kind, _META[name]["kind"])


def domain_of(name: str) -> Domain:
    """Returns the values the knob may take."""
    return cast(Domain, _META[name]["domain"])


def doc_of(name: str) -> str:
    """Returns one or two sentences on what the knob does, and the module that acts on it in brackets."""
    return cast(str, _META[name]["doc"])


def shapes_model(name: str) -> bool:
    """Returns whether a workload's `model()` may read the knob, so that a change of it needs a new model."""
    return cast(bool, _META[name]["model"])


# Knobs that mean something only when another has some value: name -> (the other, test of its value).
REQUIRES: dict[str, tuple[str, str]] = {
    "prefetch_factor": ("num_workers", "> 0"),
    "persistent_workers": ("num_workers", "> 0"),
    "device_prefetch": ("pin_memory", "true"),
    "fused_optimizer": ("optimizer", "adamw"),
}


def is_active(name: str, values: Mapping[str, object]) -> bool:
    """Returns False for a knob whose precondition in `REQUIRES` does not hold, such as prefetch without workers."""
    if name not in REQUIRES:
        return True
    other = REQUIRES[name][0]
    return meets(name, values.get(other, _DEFAULTS[other]))


def meets(name: str, value: object) -> bool:
    """Returns whether `value`, of the knob that `name` requires, is one under which `name` has an effect."""
    test = REQUIRES[name][1]
    if test == "> 0":
        return isinstance(value, int) and value > 0
    return value is True if test == "true" else value == test
