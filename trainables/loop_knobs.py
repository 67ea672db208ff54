"""Every optimisation of the loop as one row, with the reader that tells whether it took effect.

A knob travels: `search_spaces/*.yaml` or the command line -> `tuning.config` (checked against the `Domain` here) ->
`Knobs` -> the modules of `trainables` that act on it (`acts_in`). A new knob needs its row here, the line that acts on
it, and a test. Card rules, memory groups, probes, remedies, the runtime check, other names and docs/knobs.md all read
the row. `trainables.knob_columns` explains the columns. Torch is not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainables import knob_readers as read
from trainables.knob_columns import (
    AMPERE,
    FLAG,
    VOLTA,
    Domain,
    Found,
    Knob,
    Requires,
    Seen,
    capability,
    card_types,
    cpu_flags,
    only_on,
    package,
    turn,
)

_DTYPES = ("fp32", *read.AUTOCAST)
_WORKERS = Requires("num_workers", above=0)
_SGD = Requires("optimizer", equals="sgd")


def _row(row: Knob) -> Any:
    """Returns the row; typed Any, so that the attribute can have the type of the knob's values."""
    return row


def _micro_batch_size(asked: Any, seen: Seen) -> Found:
    """Reads the largest micro-batch. It may be smaller than the knob, if a batch is cut evenly into as many parts."""
    largest, batch = seen.get("micro_batch_size"), seen["batch_size"]
    if not largest:
        return None
    return f"micro-batches of {largest}", largest <= asked and -(-batch // largest) == -(-batch // asked)


def _non_blocking(asked: Any, seen: Seen) -> Found:
    """Reads whether copies to the device waited; copies on a separate stream never do, whatever the knob says."""
    if seen.get("non_blocking", False) is None:
        return None
    if "non_blocking" not in seen:
        return ("no copy to a device", False) if asked else None
    return ("copies without waiting" if seen["non_blocking"] else "copies that wait"), seen["non_blocking"] or not asked


def _device_augmentation(asked: Any, seen: Seen) -> Found:
    """Reads where the augmentation ran."""
    place = seen.get("augmented_on")
    if place is None:
        return ("no augmentation", False) if asked else None
    return f"augmentation on the {place}", (place != "loader") == asked


def _amp_dtype(asked: Any, seen: Seen) -> Found:
    """Reads the types of products and convolutions."""
    types = dict.fromkeys([*seen.get("matmul_dtypes", ()), *seen.get("conv_dtypes", ())])
    if not types:
        return None
    # Autocast leaves some products in fp32; without it there is no other type.
    as_asked: bool | None = read.AUTOCAST.get(asked, "") in types
    if asked not in read.AUTOCAST:
        as_asked = types.keys().isdisjoint(read.AUTOCAST.values())
        if not as_asked and not set(read.AUTOCAST.values()).isdisjoint(seen.get("frozen_dtypes", ())):
            as_asked = None  # frozen weights of such a type give products in it without autocast
    return f"products of {', '.join(types)}", as_asked


def _cudnn_benchmark(asked: Any, seen: Seen) -> Found:
    """Reads cuDNN's flag; without a convolution the knob has no effect."""
    if asked and "conv_dtypes" not in seen:
        return "no convolution", False
    return read.flag("cudnn_benchmark", "cuDNN's own timing", "cuDNN's usual choice")(asked, seen)


def _channels_last(asked: Any, seen: Seen) -> Found:
    """Reads the order of the weights of two-dimensional convolutions."""
    weights = [layout for layout in seen.get("conv_weights", ()) if layout != "not an image"]
    if not weights:
        return ("no convolution of images", False) if asked else None
    against = "contiguous" if asked else "channels_last"
    return f"convolutions with weights {', '.join(weights)}", against not in weights


def _sdpa_backend(asked: Any, seen: Seen) -> Found:
    """Reads the kernels of attention."""
    kernels = sorted(seen.get("attention", {}))
    if not kernels:
        return None if asked == "auto" else ("no scaled_dot_product_attention", False)
    return f"attention by {' and '.join(kernels)}", asked == "auto" or kernels == [asked]


def _compiled(asked: Any, seen: Seen) -> Found:
    """Reads whether graphs were compiled; only the second step shows it."""
    if "compiled_graphs" not in seen:
        return None
    return ("compiled graphs" if seen["compiled_graphs"] else "no compiled graph"), seen["compiled_graphs"] > 0


def _activation_checkpointing(asked: Any, seen: Seen) -> Found:
    """Reads whether operators of the forward pass ran in the backward pass."""
    again = seen.get("recomputed_frac", 0.0) > 0
    return ("some operators twice" if again else "every operator once"), again == asked


def _optimizer(asked: Any, seen: Seen) -> Found:
    """Reads the types of the optimiser's moments."""
    types, name = seen.get("optimizer_state_dtypes"), seen.get("optimizer", "")
    if not types and name != "SGD":  # the GradScaler skipped the step
        return None
    chosen = "sgd" if name == "SGD" else "adamw8bit" if types and "uint8" in types else "adamw"
    return f"{name} with moments of {', '.join(types)}" if types else f"{name} without moments", chosen == asked


def _nesterov(asked: Any, seen: Seen) -> Found:
    """Reads Nesterov's flag of SGD, which has no effect without momentum."""
    if "nesterov" not in seen or not any(seen.get("momenta", ())):
        return ("no momentum", False) if asked else None
    return ("Nesterov's momentum" if seen["nesterov"] else "no Nesterov's momentum"), seen["nesterov"] == asked


def _max_grad_norm(asked: Any, seen: Seen) -> Found:
    """Reads whether the gradients' norm was taken before the optimiser's step."""
    if "gradient_norms" not in seen:
        return None
    taken = bool(seen["gradient_norms"])
    return ("gradients held to a norm" if taken else "no norm of the gradients"), taken == (asked > 0)


def _fused_optimizer(asked: Any, seen: Seen) -> Found:
    """Reads the optimiser's kernels; a step that the GradScaler skipped had none."""
    kernels = seen.get("optimizer_ops")
    return (", ".join(kernels), any("_fused_" in kernel for kernel in kernels) == asked) if kernels else None


def _set_to_none(asked: Any, seen: Seen) -> Found:
    """Reads what became of the gradients."""
    left = seen.get("grads_after_step")
    return None if left is None else (f"gradients set to {left}", (left == "none") == asked)


class LoopKnobs:
    """The knobs that every workload has, each with its row.

    Defaults are those of plain PyTorch, as the baseline of every gain. The exception is `micro_batch_size`: plain is
    the whole batch (`tuning.memory.groups.plain_defaults`), the default is a size that fits.

    Kinds (docs/design.md section 3): *system* knobs change speed and memory only, *learning* knobs change what is
    learned, *both* change both. `tests/trainables/test_loop.py` verifies this for system knobs.
    """

    # fmt: off
    batch_size: int = _row(Knob(
        32, "learning", Domain(int, low=1, high=65_536), "Samples of one optimiser step.",
        acts_in=("batches", "loop"), asked_by="batch", memory="step", span="optimizer",
        seen=read.equal("batch_size", "batches of {}"), also=("bs", "batch"),
        remedies={"optimizer": lambda own, _: 2 * own.batch_size},  # fewer steps for the same samples
        by_hand="batch_size of the training loader, times the micro-batches that are accumulated",
    ))
    micro_batch_size: int = _row(Knob(
        8, "system", Domain(int, low=1, high=65_536),
        "The most samples of one forward and backward pass; gradients of a batch's micro-batches are summed before the "
        "optimiser step, so it sets memory and speed, not the meaning of the batch. With devices_per_trial it counts "
        "the samples of all devices together.",
        acts_in=("batches", "loop"), asked_by="loader", memory="step", span="compute",
        seen=_micro_batch_size, auto=tuple(2**n for n in range(17)),
        also=("micro_batch", "gradient_accumulation_steps", "accumulate_grad_batches"),
        remedies={"launch": lambda own, _: min(own.batch_size, 2 * own.micro_batch_size)},
        by_hand="batch_size of the training loader",
    ))
    length_bucketing: bool = _row(Knob(
        False, "system", FLAG,
        "Sort the samples of one batch by length before it is cut into micro-batches: less padding; every optimiser "
        "step still sees the same samples.",
        acts_in=("batches",), asked_by="name", memory="none", span="compute",
        seen=read.flag("sorted_by_length", "samples sorted by length", "samples unsorted"),
        by_hand="sort the samples of a batch by length before it is cut into micro-batches",
    ))
    ram_cache: bool = _row(Knob(
        False, "system", FLAG, "Prepare every sample once (decode, tokenise) and keep it in RAM.",
        acts_in=("resident", "ram_cache"), asked_by="name", memory="none",
        span="loader",
        seen=read.flag("samples_in_ram", "samples kept in RAM", "samples read anew"), remedies={"loader": turn(True)},
        by_hand="a data set that keeps its prepared samples",
    ))
    num_workers: int = _row(Knob(
        0, "system", Domain(int, low=0, high=256), "DataLoader processes; 0 loads in the training process.",
        acts_in=("batches",), asked_by="loader", memory="none", span="loader",
        seen=read.equal("workers", "with {} live workers"), also=("workers",), auto=(0, 1, 2, 4, 8, 16),
        # More workers need cores to work on.
        remedies={"loader": lambda own, step: (2 * own.num_workers or 2) if step.cpu_frac < 0.9 else None},
        by_hand="the argument of DataLoader",
    ))
    prefetch_factor: int = _row(Knob(
        2, "system", Domain(int, low=1, high=64), "Micro-batches each worker keeps ready.",
        acts_in=("batches",), asked_by="loader", memory="none", span="loader", requires=_WORKERS,
        seen=read.equal("prefetch_factor", "with a prefetch of {}"), also=("prefetch",),
        remedies={"loader": lambda own, _: max(4, own.prefetch_factor)},
        by_hand="the argument of DataLoader",
    ))
    persistent_workers: bool = _row(Knob(
        False, "system", FLAG, "Keep workers alive from epoch to epoch.",
        acts_in=("batches",), asked_by="loader", memory="none", span="loader", requires=_WORKERS,
        seen=read.flag("persistent_workers", "workers that last", "workers of one epoch"),
        remedies={"loader": turn(True)},
        by_hand="the argument of DataLoader",
    ))
    pin_memory: bool = _row(Knob(
        False, "system", FLAG, "Page-locked host batches, for faster copies to a CUDA device.",
        acts_in=("batches",), asked_by="loader", memory="none", span="transfer",
        seen=read.flag("pinned", "page-locked batches", "no page-locked batch"),
        rules=(only_on("cuda", "page-locked memory speeds copies to a CUDA device"),),
        remedies={"transfer": turn(True)}, by_hand="the argument of DataLoader",
    ))
    non_blocking: bool = _row(Knob(
        False, "system", FLAG, "Copy to the device without waiting; of use with pinned memory on CUDA.",
        acts_in=("batches",), asked_by="batches", memory="none", span="transfer",
        seen=_non_blocking,
        rules=(only_on("cuda", "there is no copy to a device to wait for"),), remedies={"transfer": turn(True)},
        by_hand="non_blocking=True when a batch is moved to the device",
    ))
    device_prefetch: bool = _row(Knob(
        False, "system", FLAG,
        "Copy the next micro-batch on a separate CUDA stream while the device still computes.",
        acts_in=("batches",), asked_by="batches", memory="none", span="transfer",
        requires=Requires("pin_memory", equals=True),
        seen=read.flag("side_stream", "copies on a separate stream", "no copy on a separate stream"),
        rules=(only_on("cuda", "only CUDA devices have separate streams"),), remedies={"transfer": turn(True)},
        by_hand="copy the next batch on a separate CUDA stream",
    ))
    device_augmentation: bool = _row(Knob(
        False, "system", FLAG, "Augment on the device after the transfer, not in the loader's processes.",
        acts_in=("batches", "loop"), asked_by="name", memory="minor", span="augment",
        seen=_device_augmentation,
        remedies={"loader": lambda _, step: True if step.cuda and not step.loaders_wait else None},
        by_hand="augment after the copy to the device",
    ))
    amp_dtype: str = _row(Knob(
        "fp32", "both", Domain(str, values=_DTYPES), "Type of autocast: fp32 is none, fp16 adds a GradScaler.",
        acts_in=("precision",), asked_by="autocast", memory="group", span="compute",
        seen=_amp_dtype, also=("amp", "dtype", "precision"), auto=_DTYPES,
        rules=(
            card_types(*_DTYPES),
            capability(AMPERE, "bf16", "bf16"),
            # oneDNN, which runs torch's LSTM on a CPU, has no bf16 kernel for it below AVX-512, and raises.
            cpu_flags("this processor has no bf16 arithmetic, as it lacks AVX-512", ("avx512bw",), "bf16"),
            # A pointer network's step took 20 s in fp16 and 0.9 s in fp32 on two cores: 3 against 70 samples/s.
            only_on("cuda", "on a CPU a step in fp16 takes many times as long as in fp32", "fp16"),
        ),
        remedies={
            "memory": lambda own, step: "bf16" if own.amp_dtype == "fp32" else None,
            "compute": lambda own, step: "bf16" if own.amp_dtype == "fp32" and step.cuda else None,
        },
        by_hand="torch.autocast around the forward pass",
    ))
    tf32: bool = _row(Knob(
        False, "both", FLAG,
        "TensorFloat-32 in matrix products, on Ampere and later CUDA devices; for convolutions torch allows it anyway.",
        acts_in=("precision",), asked_by="around", memory="none", span="compute",
        seen=read.flag("tf32", "TensorFloat-32 allowed", "no TensorFloat-32"),
        rules=(only_on("cuda", "only CUDA devices have TensorFloat-32"), capability(AMPERE, "tf32", True)),
        by_hand="torch.backends.cuda.matmul.allow_tf32 = True",
    ))
    cudnn_benchmark: bool = _row(Knob(
        False, "system", FLAG, "Let cuDNN time its convolutions for each shape and keep the fastest; CUDA.",
        acts_in=("precision",), asked_by="around", memory="minor", span="compute",
        seen=_cudnn_benchmark,
        rules=(only_on("cuda", "cuDNN computes on CUDA devices only"),),
        by_hand="torch.backends.cudnn.benchmark = True",
    ))
    channels_last: bool = _row(Knob(
        False, "system", FLAG, "Weights of two-dimensional convolutions in NHWC order.",
        acts_in=("precision",), asked_by="prepare", memory="minor", span="compute",
        seen=_channels_last,
        by_hand="model.to(memory_format=torch.channels_last)",
    ))
    sdpa_backend: str = _row(Knob(
        "auto", "system", Domain(str, values=("auto", "flash", "efficient", "math")),
        "Kernel of scaled_dot_product_attention; auto leaves the choice to torch.",
        acts_in=("precision",), asked_by="around", memory="group", span="compute", seen=_sdpa_backend,
        rules=(capability(AMPERE, "flash attention", "flash"),),
        by_hand="torch.nn.attention.sdpa_kernel around the training",
    ))
    compile: str = _row(Knob(
        "off", "system", Domain(str, values=("off", "default", "reduce-overhead")),
        "torch.compile mode of the model.",
        acts_in=("precision",), asked_by="prepare", memory="minor", span="compute",
        seen=_compiled,
        auto=("off", "default", "reduce-overhead"),
        rules=(
            capability(VOLTA, "torch.compile", "default", "reduce-overhead"),
            only_on("cuda", "reduce-overhead works by CUDA graphs", "reduce-overhead"),
        ),
        remedies={"launch": lambda own, step: "reduce-overhead" if step.cuda and own.compile == "off" else None},
        by_hand="model.compile, with this mode",
    ))
    activation_checkpointing: bool = _row(Knob(
        False, "system", FLAG, "Recompute each block's activations in the backward pass instead of keeping them.",
        acts_in=("precision",), asked_by="prepare", memory="group", span="compute",
        seen=_activation_checkpointing,
        remedies={"memory": turn(True), "compute": turn(False)}, also=("checkpointing",),
        by_hand="torch.utils.checkpoint around each block of the model",
    ))
    empty_cache: bool = _row(Knob(
        False, "system", FLAG, "Free the CUDA allocator's cached memory before a run begins.",
        acts_in=("state", "own_loop"), asked_by="around", memory="none", span="none", seen=None,
        rules=(only_on("cuda", "only the allocator of a CUDA device caches memory"),),
        by_hand="torch.cuda.empty_cache() before the training",
    ))
    optimizer: str = _row(Knob(
        "adamw", "both", Domain(str, values=("adamw", "adamw8bit", "sgd")),
        "AdamW with moments of 32 bits, or of 8 bits in blocks (Dettmers et al., arXiv 2110.02861) for tensors of at "
        "least 4,096 numbers; or SGD, which needs larger learning rates.",
        acts_in=("optim",), asked_by="name", memory="group", span="optimizer",
        seen=_optimizer,
        replaced_by="optimizer", rules=(package("bitsandbytes", "quant", "adamw8bit"),), auto=("adamw", "adamw8bit"),
        remedies={"memory": lambda own, _: "adamw8bit" if own.optimizer == "adamw" else None},
        by_hand="the optimiser that you create",
    ))
    fused_optimizer: bool = _row(Knob(
        False, "system", FLAG, "One kernel for the whole AdamW step.",
        acts_in=("optim",), asked_by="name", memory="minor", span="optimizer", seen=_fused_optimizer,
        requires=Requires("optimizer", equals="adamw"), remedies={"launch": turn(True), "optimizer": turn(True)},
        also=("fused",), replaced_by="optimizer",
        by_hand="fused=True of torch.optim.AdamW",
    ))
    momentum: float = _row(Knob(
        0.9, "learning", Domain(float, low=0.0, high=0.999), "SGD's momentum; 0 keeps no state.",
        acts_in=("optim",), asked_by="name", memory="switch", span="none",
        requires=_SGD, replaced_by="optimizer",
        seen=read.listed("momenta", "momentum"),
        by_hand="the argument of torch.optim.SGD",
    ))
    nesterov: bool = _row(Knob(
        False, "learning", FLAG, "SGD with Nesterov's momentum, if the momentum is above 0.",
        acts_in=("optim",), asked_by="name", memory="minor", span="none",
        requires=_SGD, replaced_by="optimizer",
        seen=_nesterov,
        by_hand="the argument of torch.optim.SGD",
    ))
    max_grad_norm: float = _row(Knob(
        0.0, "learning", Domain(float, low=0.0, high=1e9),
        "Largest norm of all gradients together; larger ones are scaled down to it before the step. 0 clips nothing.",
        acts_in=("loop",), asked_by="clip", memory="none", span="none", seen=_max_grad_norm,
        also=("clip", "grad_clip", "gradient_clip_val"),
        by_hand="torch.nn.utils.clip_grad_norm_ before each step",
    ))
    ema_decay: float = _row(Knob(
        0.0, "learning", Domain(float, low=0.0, high=0.999999),
        "Decay of a running mean of the trained weights, which each step updates: the mean is evaluated and written. "
        "0 averages nothing.",
        acts_in=("optim", "loop", "evaluation"), asked_by="name", memory="switch", span="none",
        seen=lambda asked, seen: None if (found := seen.get("averaged")) is None else
            ("averaged weights" if found else "weights as they are", found == (asked > 0)),
        also=("ema", "weight_ema", "model_ema_decay"),
        by_hand="torch.optim.swa_utils.AveragedModel, updated after each step",
    ))
    set_to_none: bool = _row(Knob(
        True, "system", FLAG,
        "Drop gradients after a step instead of filling them with zeros; ignored if CUDA graphs add to the same ones.",
        acts_in=("loop", "precision"), asked_by="backward", memory="step", span="compute",
        seen=_set_to_none,
        by_hand="set_to_none of optimizer.zero_grad",
    ))
    sync_every_step: bool = _row(Knob(
        False, "system", FLAG,
        "Read the loss on the host after every micro-batch, as many loops do for their progress bar.",
        acts_in=("loop",), asked_by="backward", memory="none", span="compute",
        seen=read.flag("loss_reads", "the loss read on the host", "no reading of the loss"),
        remedies={"launch": turn(False)},
        by_hand="loss.item() after each micro-batch",
    ))
    learning_rate: float = _row(Knob(
        5e-4, "learning", Domain(float, low=0.0, high=1000.0, low_excluded=True),
        "Learning rate at the peak of the schedule.",
        acts_in=("optim",), asked_by="name", memory="none", span="none", seen=None,
        also=("lr",),
        by_hand="lr of your optimiser",
    ))
    weight_decay: float = _row(Knob(
        0.01, "learning", Domain(float, low=0.0, high=1.0), "Weight decay: AdamW's decoupled one, or SGD's.",
        acts_in=("optim",), asked_by="name", memory="none", span="none", also=("wd",),
        seen=read.listed("weight_decays", "weight decay"),
        by_hand="the argument of your optimiser",
    ))
    schedule: str = _row(Knob(
        "linear", "learning", Domain(str, values=("linear", "cosine", "constant")),
        "How the learning rate falls to 0 after the warm-up: linearly, by a half cosine, or not at all.",
        acts_in=("optim",), asked_by="name", memory="none", span="none", seen=None, replaced_by="schedule",
        also=("scheduler", "lr_scheduler"),
        by_hand="your own schedule over the steps of the whole training",
    ))
    warmup_frac: float = _row(Knob(
        0.1, "learning", Domain(float, low=0.0, high=1.0), "Share of the steps over which the rate rises from 0.",
        acts_in=("optim",), asked_by="name", memory="none", span="none", seen=None, also=("warmup",),
        replaced_by="schedule",
        by_hand="your own warm-up over this share of the steps",
    ))
    # fmt: on


OF_THE_LOOP: Mapping[str, Knob] = {name: row for name, row in vars(LoopKnobs).items() if isinstance(row, Knob)}
"""The rows that every workload has, by the name of the knob."""
for _name in OF_THE_LOOP:
    delattr(LoopKnobs, _name)  # otherwise a knob that a workload's table lacks would be read as its row
