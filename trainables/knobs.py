"""Every optimisation as one row: its kind and values, what it needs, moves and shortens, and how it is read back.

A knob travels: `search_spaces/*.yaml` or the command line -> `tuning.config` (checked against the `Domain` here) ->
`Knobs` -> the modules of `trainables` that act on it (`acts_in`). A new knob is its row here, the line that acts on it,
and its test: card rules, memory groups, probes, remedies, the runtime check, other names and docs/knobs.md are read
from the row. `trainables.knob_columns` says what the columns mean.

A `KnobTable` is the rows of one workload: those here, and the ones that its file declares. One is in use in a process
at a time. Torch is not imported here, so that a configuration can be checked before torch is.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, cast, get_args

from trainables import knob_readers as read
from trainables.knob_columns import (
    AMPERE,
    FLAG,
    VOLTA,
    AskedBy,
    Domain,
    Kind,
    Knob,
    Memory,
    Requires,
    Scalar,
    capability,
    card_types,
    cpu_flags,
    only_on,
    package,
    turn,
)

__all__ = [
    "OF_THE_LOOP",
    "KnobTable",
    "Knobs",
    "ReadKnobs",
    "Scalar",
    "asked_by",
    "domain_of",
    "is_active",
    "kind_of",
    "table",
    "use",
    "using",
]

_DTYPES = ("fp32", *read.AUTOCAST)
_WORKERS = Requires("num_workers", above=0)
_SGD = Requires("optimizer", equals="sgd")


def _row(row: Knob) -> Any:
    """Returns the row, as the type that its values have."""
    return row


class Knobs:
    """The knobs of one trial, not to be changed: those below and, as further attributes, the workload's own.

    Defaults are the plain PyTorch way, so every gain has something to be measured against; of `micro_batch_size` the
    plain way is the whole batch (`tuning.memory.groups.plain_defaults`), and the default one that fits.

    Kinds (docs/design.md section 3): *system* knobs change speed and memory only, *learning* knobs change what is
    learned, *both* change both. `tests/trainables/test_loop.py` holds the system ones to their word.
    """

    # fmt: off
    batch_size: int = _row(Knob(
        32, "learning", Domain(int, low=1, high=65_536), "Samples of one optimiser step.",
        acts_in=("batches", "loop"), asked_by="batch", memory="step", span="optimizer", claimed="A B C D E",
        seen=read.equal("batch_size", "batches of {}"), also=("bs", "batch"),
        remedies={"optimizer": lambda own, _: 2 * own.batch_size},  # fewer steps for the same samples
        by_hand="batch_size of the training loader, times the micro-batches that are accumulated",
    ))
    micro_batch_size: int = _row(Knob(
        8, "system", Domain(int, low=1, high=65_536),
        "Most samples of one forward and backward pass; gradients of a batch's micro-batches are summed before the "
        "optimiser step, so it sets memory and speed, not the meaning of the batch. With devices_per_trial it is "
        "that of all devices together.",
        acts_in=("batches", "loop"), asked_by="loader", memory="step", span="compute", claimed="A B D, as accumulation",
        seen=read.micro_batch_size, auto=tuple(2**n for n in range(17)),
        also=("micro_batch", "gradient_accumulation_steps", "accumulate_grad_batches"),
        remedies={"launch": lambda own, _: min(own.batch_size, 2 * own.micro_batch_size)},
        by_hand="batch_size of the training loader",
    ))
    length_bucketing: bool = _row(Knob(
        False, "system", FLAG,
        "Sort the samples of one batch by length before cutting it into micro-batches: less padding, and every "
        "optimiser step sees the same samples as without.",
        acts_in=("batches",), asked_by="name", memory="none", span="compute", claimed="C, for later",
        seen=read.flag("sorted_by_length", "samples sorted by length", "samples unsorted"),
        by_hand="sort the samples of a batch by length before it is cut into micro-batches",
    ))
    ram_cache: bool = _row(Knob(
        False, "system", FLAG, "Prepare every sample once (decode, tokenise) and keep it in RAM.",
        acts_in=("resident", "ram_cache"), asked_by="name", memory="none",
        span="loader", claimed="B; E, for augmented samples",
        seen=read.flag("samples_in_ram", "samples kept in RAM", "samples read anew"), remedies={"loader": turn(True)},
        by_hand="a data set that keeps its prepared samples",
    ))
    num_workers: int = _row(Knob(
        0, "system", Domain(int, low=0, high=256), "DataLoader processes; 0 loads in the training process.",
        acts_in=("batches",), asked_by="loader", memory="none", span="loader", claimed="A B C D E",
        seen=read.equal("workers", "with {} live workers"), also=("workers",), auto=(0, 1, 2, 4, 8, 16),
        # More workers need cores to work on.
        remedies={"loader": lambda own, step: (2 * own.num_workers or 2) if step.cpu_frac < 0.9 else None},
        by_hand="the argument of DataLoader",
    ))
    prefetch_factor: int = _row(Knob(
        2, "system", Domain(int, low=1, high=64), "Micro-batches each worker keeps ready.",
        acts_in=("batches",), asked_by="loader", memory="none", span="loader", claimed="A B C E", requires=_WORKERS,
        seen=read.equal("prefetch_factor", "with a prefetch of {}"), also=("prefetch",),
        remedies={"loader": lambda own, _: max(4, own.prefetch_factor)},
        by_hand="the argument of DataLoader",
    ))
    persistent_workers: bool = _row(Knob(
        False, "system", FLAG, "Keep workers alive from epoch to epoch.",
        acts_in=("batches",), asked_by="loader", memory="none", span="loader", claimed="A B C D E", requires=_WORKERS,
        seen=read.flag("persistent_workers", "workers that last", "workers of one epoch"),
        remedies={"loader": turn(True)},
        by_hand="the argument of DataLoader",
    ))
    pin_memory: bool = _row(Knob(
        False, "system", FLAG, "Page-locked host batches, for faster copies to a CUDA device.",
        acts_in=("batches",), asked_by="loader", memory="none", span="transfer", claimed="A B C D",
        seen=read.flag("pinned", "page-locked batches", "no page-locked batch"),
        rules=(only_on("cuda", "page-locked memory speeds copies to a CUDA device"),),
        remedies={"transfer": turn(True)}, by_hand="the argument of DataLoader",
    ))
    non_blocking: bool = _row(Knob(
        False, "system", FLAG, "Copy to the device without waiting; of use with pinned memory on CUDA.",
        acts_in=("batches",), asked_by="batches", memory="none", span="transfer", claimed="B D E",
        seen=read.non_blocking,
        rules=(only_on("cuda", "there is no copy to a device to wait for"),), remedies={"transfer": turn(True)},
        by_hand="non_blocking=True where a batch is moved to the device",
    ))
    device_prefetch: bool = _row(Knob(
        False, "system", FLAG,
        "Copy the next micro-batch on a stream of its own while the device still computes; CUDA.",
        acts_in=("batches",), asked_by="batches", memory="none", span="transfer", claimed="-",
        requires=Requires("pin_memory", equals=True),
        seen=read.flag("side_stream", "copies on a stream of their own", "no copy on a stream of its own"),
        rules=(only_on("cuda", "a stream of its own is a thing of CUDA devices"),), remedies={"transfer": turn(True)},
        by_hand="copy the next batch on a CUDA stream of its own",
    ))
    device_augmentation: bool = _row(Knob(
        False, "system", FLAG, "Augment on the device after the transfer, not in the loader's processes.",
        acts_in=("batches", "loop"), asked_by="name", memory="minor", span="augment", claimed="E",
        seen=read.device_augmentation,
        remedies={"loader": lambda _, step: True if step.cuda else None},
        by_hand="augment behind the copy to the device",
    ))
    amp_dtype: str = _row(Knob(
        "fp32", "both", Domain(str, values=_DTYPES), "Type of autocast; fp32 is no autocast, fp16 adds a GradScaler.",
        acts_in=("precision",), asked_by="autocast", memory="group", span="compute", claimed="A B D E: fp16; C: bf16",
        seen=read.amp_dtype, also=("amp", "dtype", "precision"), auto=_DTYPES,
        rules=(
            card_types(*_DTYPES),
            capability(AMPERE, "bf16", "bf16"),
            # oneDNN, which runs torch's LSTM on a CPU, has no bf16 kernel for it below AVX-512, and raises.
            cpu_flags("bf16 is no arithmetic of this processor, which lacks AVX-512", ("avx512bw",), "bf16"),
            # A pointer network's step took 20 s in fp16 and 0.9 s in fp32 on two cores: 3 against 70 samples/s.
            only_on("cuda", "fp16 is hardly arithmetic of a CPU, where a step takes many times that of fp32", "fp16"),
        ),
        remedies={
            "memory": lambda own, step: "bf16" if own.amp_dtype == "fp32" else None,
            "compute": lambda own, step: "bf16" if own.amp_dtype == "fp32" and step.cuda else None,
        },
        by_hand="torch.autocast around the forward pass",
    ))
    tf32: bool = _row(Knob(
        False, "both", FLAG,
        "TensorFloat-32 products of matrices on Ampere and later CUDA devices; torch allows it to convolutions anyway.",
        acts_in=("precision",), asked_by="around", memory="none", span="compute", claimed="B C",
        seen=read.flag("tf32", "TensorFloat-32 allowed", "no TensorFloat-32"),
        rules=(only_on("cuda", "TensorFloat-32 is arithmetic of CUDA devices"), capability(AMPERE, "tf32", True)),
        by_hand="torch.backends.cuda.matmul.allow_tf32 = True",
    ))
    cudnn_benchmark: bool = _row(Knob(
        False, "system", FLAG, "Let cuDNN time its convolutions for each shape and keep the fastest; CUDA.",
        acts_in=("precision",), asked_by="around", memory="minor", span="compute", claimed="D E",
        seen=read.cudnn_benchmark,
        rules=(only_on("cuda", "cuDNN computes on CUDA devices only"),),
        by_hand="torch.backends.cudnn.benchmark = True",
    ))
    channels_last: bool = _row(Knob(
        False, "system", FLAG, "Weights of two-dimensional convolutions in NHWC order.",
        acts_in=("precision",), asked_by="prepare", memory="minor", span="compute", claimed="B",
        seen=read.channels_last,
        by_hand="model.to(memory_format=torch.channels_last)",
    ))
    sdpa_backend: str = _row(Knob(
        "auto", "system", Domain(str, values=("auto", "flash", "efficient", "math")),
        "Kernel of scaled_dot_product_attention; auto leaves the choice to torch.",
        acts_in=("precision",), asked_by="around", memory="group", span="compute", claimed="C", seen=read.sdpa_backend,
        rules=(capability(AMPERE, "flash attention", "flash"),),
        by_hand="torch.nn.attention.sdpa_kernel around the training",
    ))
    compile: str = _row(Knob(
        "off", "system", Domain(str, values=("off", "default", "reduce-overhead")),
        "torch.compile mode of the model.",
        acts_in=("precision",), asked_by="prepare", memory="minor", span="compute", claimed="A B C E",
        seen=read.compiled,
        auto=("off", "default", "reduce-overhead"),
        rules=(
            capability(VOLTA, "torch.compile", "default", "reduce-overhead"),
            only_on("cuda", "it is CUDA graphs that reduce the overhead", "reduce-overhead"),
        ),
        remedies={"launch": lambda own, step: "reduce-overhead" if step.cuda and own.compile == "off" else None},
        by_hand="model.compile, with this mode",
    ))
    activation_checkpointing: bool = _row(Knob(
        False, "system", FLAG, "Recompute each block's activations in the backward pass instead of keeping them.",
        acts_in=("precision",), asked_by="prepare", memory="group", span="compute", claimed="C D",
        seen=read.activation_checkpointing,
        remedies={"memory": turn(True), "compute": turn(False)}, also=("checkpointing",),
        by_hand="torch.utils.checkpoint around each block of the model",
    ))
    empty_cache: bool = _row(Knob(
        False, "system", FLAG, "Hand the allocator's cached memory back before a run begins; CUDA.",
        acts_in=("state", "own_loop"), asked_by="around", memory="none", span="none", claimed="D", seen=None,
        rules=(only_on("cuda", "only the allocator of a CUDA device keeps memory back"),),
        by_hand="torch.cuda.empty_cache() before the training",
    ))
    optimizer: str = _row(Knob(
        "adamw", "both", Domain(str, values=("adamw", "adamw8bit", "sgd")),
        "AdamW with moments of 32 bits, or of 8 bits in blocks (Dettmers et al., arXiv 2110.02861) for tensors of "
        "4,096 numbers and more; or SGD, whose learning rates are larger.",
        acts_in=("optim",), asked_by="name", memory="group", span="optimizer", claimed="C, for later",
        seen=read.optimizer,
        replaced_by="optimizer", rules=(package("bitsandbytes", "quant", "adamw8bit"),), auto=("adamw", "adamw8bit"),
        remedies={"memory": lambda own, _: "adamw8bit" if own.optimizer == "adamw" else None},
        by_hand="the optimiser that you make",
    ))
    fused_optimizer: bool = _row(Knob(
        False, "system", FLAG, "One kernel for the whole AdamW step.",
        acts_in=("optim",), asked_by="name", memory="minor", span="optimizer", claimed="C", seen=read.fused_optimizer,
        requires=Requires("optimizer", equals="adamw"), remedies={"launch": turn(True), "optimizer": turn(True)},
        also=("fused",), replaced_by="optimizer",
        by_hand="fused=True of torch.optim.AdamW",
    ))
    momentum: float = _row(Knob(
        0.9, "learning", Domain(float, low=0.0, high=0.999), "SGD's momentum; 0 keeps no state.",
        acts_in=("optim",), asked_by="name", memory="switch", span="none", claimed="-",
        requires=_SGD, replaced_by="optimizer",
        seen=read.listed("momenta", "momentum"),
        by_hand="the argument of torch.optim.SGD",
    ))
    nesterov: bool = _row(Knob(
        False, "learning", FLAG, "SGD with Nesterov's momentum, where the momentum is above 0.",
        acts_in=("optim",), asked_by="name", memory="minor", span="none", claimed="-",
        requires=_SGD, replaced_by="optimizer",
        seen=read.nesterov,
        by_hand="the argument of torch.optim.SGD",
    ))
    max_grad_norm: float = _row(Knob(
        0.0, "learning", Domain(float, low=0.0, high=1e9),
        "Largest norm of all gradients of a batch together; they are scaled down to it. 0 clips nothing.",
        acts_in=("loop",), asked_by="clip", memory="none", span="none", claimed="-", seen=read.max_grad_norm,
        also=("clip", "grad_clip", "gradient_clip_val"),
        by_hand="torch.nn.utils.clip_grad_norm_ before each step",
    ))
    set_to_none: bool = _row(Knob(
        True, "system", FLAG,
        "Drop gradients after a step instead of filling them with zeros; not where CUDA graphs accumulate into them.",
        acts_in=("loop", "precision"), asked_by="backward", memory="step", span="compute", claimed="B C E",
        seen=read.set_to_none,
        by_hand="set_to_none of optimizer.zero_grad",
    ))
    sync_every_step: bool = _row(Knob(
        False, "system", FLAG,
        "Read the loss on the host after every micro-batch, as many loops do for their progress bar.",
        acts_in=("loop",), asked_by="backward", memory="none", span="compute", claimed="C, against it",
        seen=read.flag("loss_reads", "the loss read on the host", "no reading of the loss"),
        remedies={"launch": turn(False)},
        by_hand="loss.item() behind each micro-batch",
    ))
    learning_rate: float = _row(Knob(
        5e-4, "learning", Domain(float, low=0.0, high=1000.0, low_excluded=True), "Peak of the schedule.",
        acts_in=("optim",), asked_by="name", memory="none", span="none", claimed="E, with the batch", seen=None,
        also=("lr",),
        by_hand="lr of your optimiser",
    ))
    weight_decay: float = _row(Knob(
        0.01, "learning", Domain(float, low=0.0, high=1.0), "Weight decay: AdamW's decoupled one, or SGD's.",
        acts_in=("optim",), asked_by="name", memory="none", span="none", claimed="-", also=("wd",),
        seen=read.listed("weight_decays", "weight decay"),
        by_hand="the argument of your optimiser",
    ))
    schedule: str = _row(Knob(
        "linear", "learning", Domain(str, values=("linear", "cosine", "constant")),
        "How the rate goes from its peak after the warm-up: to 0 in a line or a half cosine, or not at all.",
        acts_in=("optim",), asked_by="name", memory="none", span="none", claimed="-", seen=None, replaced_by="schedule",
        also=("scheduler", "lr_scheduler"),
        by_hand="a schedule of yours over the steps of the whole training",
    ))
    warmup_frac: float = _row(Knob(
        0.1, "learning", Domain(float, low=0.0, high=1.0), "Share of the steps over which the rate rises from 0.",
        acts_in=("optim",), asked_by="name", memory="none", span="none", claimed="-", seen=None, also=("warmup",),
        replaced_by="schedule",
        by_hand="a warm-up of yours, over this share of the steps",
    ))
    # fmt: on

    def __init__(self, **values: Scalar) -> None:
        self._fill(table(), values)

    def _fill(self, rows: KnobTable, values: Mapping[str, object]) -> None:
        own = self.__dict__
        own["_table"] = rows
        own.update(rows.defaults)
        for name, value in values.items():
            if name not in rows:
                near = difflib.get_close_matches(name, rows, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; knobs are {', '.join(rows)}"
                raise ValueError(f"{name} is not a knob of this workload{hint}")
            if value is own[name]:  # most are: a search makes knobs thousands of times, and checking all took 0.3 ms
                continue
            try:
                own[name] = rows[name].domain.check(value)
            except ValueError as error:
                raise ValueError(f"knob {name}: {error}") from None

    @classmethod
    def of(cls, values: Mapping[str, object], rows: KnobTable | None = None) -> Knobs:
        """Returns the knobs in `values`, the others at their defaults, by the table in use or by `rows`.

        Raises ValueError for a name that is no knob there, and for a value that its knob may not take.
        """
        made = cls.__new__(cls)
        made._fill(table() if rows is None else rows, values)
        return made

    @property
    def table(self) -> KnobTable:
        """Returns the rows these are values of; in a loader's process, which changes none, those in use there."""
        return cast(KnobTable, self.__dict__.get("_table") or table())

    def as_dict(self) -> dict[str, Scalar]:
        """Returns every knob by name."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def with_(self, **changes: Scalar) -> Knobs:
        """Returns a copy with some knobs changed."""
        return Knobs.of({**self.as_dict(), **changes}, self.table)

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError: the values are there, so this is no knob; the type is that of a workload's own."""
        raise AttributeError(f"{name} is not a knob of this workload; its file declares its own in `knobs`")

    def __setattr__(self, name: str, value: object) -> None:
        """Raises AttributeError: `with_` makes others."""
        raise AttributeError(f"knobs are not changed; with_({name}=...) makes others")

    def __getstate__(self) -> dict[str, Scalar]:
        """Returns the values alone, for another process: rows hold functions."""
        return self.as_dict()

    def __setstate__(self, values: Mapping[str, Scalar]) -> None:
        """Takes the values back."""
        self.__dict__.update(values)

    def __eq__(self, other: object) -> bool:
        """Returns whether the other are knobs of the same values."""
        return isinstance(other, Knobs) and self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        """Returns the hash of the values."""
        return hash(tuple(self.as_dict().items()))

    def __repr__(self) -> str:
        """Returns the knobs as a call."""
        return f"Knobs({', '.join(f'{name}={value!r}' for name, value in self.as_dict().items())})"


class ReadKnobs(Knobs):
    """Knobs that note in `read` which of them are read, by name or all of a workload's own, until they are `closed`."""

    def __init__(self, knobs: Knobs, read: set[str]) -> None:
        self.__dict__.update(knobs.__dict__, _read=read)

    def __getattribute__(self, name: str) -> Any:
        """Returns what it has; the name of a knob is noted."""
        own = object.__getattribute__(self, "__dict__")
        if name in own and not name.startswith("_"):
            own.get("_read", set()).add(name)  # a copy has none
        return object.__getattribute__(self, name)

    def as_dict(self) -> dict[str, Scalar]:
        """Returns every knob by name, as `with_` does, and notes the workload's own."""
        self.__dict__.get("_read", set()).update(self.table.own)
        return super().as_dict()

    def closed(self) -> None:
        """Makes them knobs like any other, which note nothing."""
        del self.__dict__["_read"]
        object.__setattr__(self, "__class__", Knobs)


OF_THE_LOOP: Mapping[str, Knob] = {name: row for name, row in vars(Knobs).items() if isinstance(row, Knob)}
"""The rows that every workload has, by the name of the knob."""


def asked_by(call: AskedBy) -> tuple[str, ...]:
    """Returns the knobs that this applies in a loop of one's own."""
    return tuple(name for name, row in OF_THE_LOOP.items() if row.asked_by == call)


for _name in OF_THE_LOOP:
    delattr(Knobs, _name)  # else one that a workload's table lacks would be read as its row


class KnobTable(Mapping[str, Knob]):
    """The rows of one workload by the name of the knob: those of the loop, then its own.

    `kinds` are those that were measured on it, where they differ from what the row says; `hooks` are the methods that
    it has in the place of knobs. A workload with an optimiser of its own may have a `momentum` of its own. Raises
    ValueError for an own knob with the name of another of the loop's, or with one that Python has no attribute for.
    """

    def __init__(
        self,
        own: Mapping[str, Knob] | None = None,
        kinds: Mapping[str, Kind] | None = None,
        hooks: Collection[str] = (),
    ) -> None:
        self.own, self.hooks = dict(own or {}), tuple(sorted(hooks))
        of_the_loop = {name: row for name, row in OF_THE_LOOP.items() if row.replaced_by not in self.hooks}
        for name, row in self.own.items():
            if not isinstance(row, Knob):
                raise ValueError(f"knobs: {name}: {row!r} is no knob; such as Knob(32, 'both', values=(16, 32, 64))")
            if name in of_the_loop:
                raise ValueError(f"knobs: {name} is a knob that every workload has; give yours another name")
            if not str(name).isidentifier() or hasattr(Knobs, name) or str(name).startswith("_"):
                raise ValueError(f"knobs: {name!r} cannot be read as config.knobs.{name}; give it another name")
        self.kinds = dict(kinds or {})
        rows = {**of_the_loop, **self.own}
        self._rows = {n: replace(row, kind=self.kinds[n]) if n in self.kinds else row for n, row in rows.items()}
        self.defaults: Mapping[str, Scalar] = {name: row.default for name, row in self._rows.items()}

    def __getitem__(self, name: str) -> Knob:
        """Returns the row of a knob."""
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the knobs."""
        return iter(self._rows)

    def __len__(self) -> int:
        """Returns how many knobs there are."""
        return len(self._rows)

    def __contains__(self, name: object) -> bool:
        """Returns whether it is the name of a knob."""
        return name in self._rows

    @cached_property
    def also_called(self) -> Mapping[str, str]:
        """What people write -> the knob, where the distance between the words does not lead there."""
        return {other: name for name, row in self.items() for other in row.also}

    @cached_property
    def requiring(self) -> Mapping[str, Requires]:
        """What knobs need of another, by their name; those that need nothing are left out."""
        return {name: row.requires for name, row in self.items() if row.requires is not None}

    @cached_property
    def system(self) -> tuple[str, ...]:
        """The knobs that change speed and memory only."""
        return tuple(name for name, row in self.items() if row.kind == "system")

    @cached_property
    def both(self) -> tuple[str, ...]:
        """The knobs that change speed and learning; their values are the speed group."""
        return tuple(name for name, row in self.items() if row.kind == "both")

    @cached_property
    def by_memory(self) -> Mapping[Memory | None, tuple[str, ...]]:
        """The knobs by how they move a step's peak memory."""
        moves: tuple[Memory, ...] = get_args(Memory)
        return {move: tuple(name for name, row in self.items() if row.memory == move) for move in moves}

    @cached_property
    def scaled(self) -> tuple[str, ...]:
        """Knobs between whose measured values a memory profile may be read off: bytes are about a power of them."""
        return tuple(name for name in self.by_memory["group"] if self[name].domain.type in (int, float))

    def as_raw(self) -> dict[str, Any]:
        """Returns the own rows as a record keeps them; `of_raw` reads them back."""
        return {name: row.as_raw() for name, row in self.own.items()}


_in_use = KnobTable()


def table() -> KnobTable:
    """Returns the rows of the workload that this process works on; without one, those of the loop alone."""
    return _in_use


def use(rows: KnobTable) -> KnobTable:
    """Makes these the rows of the workload that this process works on; returns those before."""
    global _in_use
    before, _in_use = _in_use, rows
    return before


@contextmanager
def using(rows: KnobTable) -> Iterator[None]:
    """Makes these the rows that are in use inside the block, as where a study is read that was of another workload."""
    before = use(rows)
    try:
        yield
    finally:
        use(before)


def kind_of(name: str) -> Kind:
    """Returns how the knob may be searched: "system", "learning" or "both"."""
    return table()[name].kind


def domain_of(name: str) -> Domain:
    """Returns the values the knob may take."""
    return table()[name].domain


def is_active(name: str, values: Mapping[str, object]) -> bool:
    """Returns False for a knob whose requirement `values` do not meet, such as a prefetch without workers.

    True for a name that is no knob, as records of another version may hold.
    """
    requires = table().requiring.get(name)
    return requires is None or requires.met(values.get(requires.knob, table().defaults[requires.knob]))
