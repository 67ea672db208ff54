"""Asked and seen: the knobs of a configuration beside what its first optimiser step was seen to run.

Pure: it reads the `active` of a record (`trainables.witness.Witness.facts`), and nothing of torch. A knob that leaves
no trace there (learning rate, warm-up) has no row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainables.knobs import is_active

Seen = Mapping[str, Any]
Found = tuple[str, bool | None] | None
"""What was seen, in words that hold no measured figure, and whether it is what was asked; None where nothing was."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Row:
    """A knob as asked and as seen; `agrees` is None where the step could not show it either way."""

    knob: str
    asked: str
    seen: str
    agrees: bool | None


def compare(config: Mapping[str, Any], active: Seen) -> list[Row]:
    """Returns a row for each knob of the configuration that can be read back; none for a run without a first step."""
    rows = []
    for name, asked in config.items() if active else ():
        reader = _READERS.get(name)
        if reader is None or not is_active(name, config):
            continue
        try:
            found = reader(asked, active)
        except (KeyError, TypeError, ValueError, AttributeError):  # a record of another version, or a damaged one
            continue
        if found is not None:
            rows.append(Row(name, str(asked).lower() if isinstance(asked, bool) else str(asked), *found))
    return rows


def disagreements(config: Mapping[str, Any], active: Seen) -> list[str]:
    """Returns a sentence for each knob that was not honoured; the same one whenever the same is seen."""
    return [
        f"knobs.{row.knob}={row.asked} was asked; the first step showed {row.seen}"
        for row in compare(config, active)
        if row.agrees is False
    ]


# -- readers: (what was asked, what was seen) -> Found -----------------------------------------------------------------


def _flag(key: str, on: str, off: str) -> Callable[[Any, Seen], Found]:
    """A fact that is as true as the knob; where the step could not show it, only True is an open claim."""

    def read(asked: Any, seen: Seen) -> Found:
        if key not in seen:
            return (off, False) if asked is True else None
        return (on if seen[key] else off), bool(seen[key]) == asked

    return read


def _equal(key: str, words: str) -> Callable[[Any, Seen], Found]:
    return lambda asked, seen: (f"{words} {seen[key]}", seen[key] == asked) if key in seen else None


def _micro_batch_size(asked: Any, seen: Seen) -> Found:
    largest = seen.get("micro_batch_size")
    return (f"micro-batches of {largest}", largest == min(asked, seen["batch_size"])) if largest else None


def _num_workers(asked: Any, seen: Seen) -> Found:
    alive = seen.get("workers")
    return None if alive is None else (f"with {alive} live workers", alive == asked)


def _non_blocking(asked: Any, seen: Seen) -> Found:
    if "non_blocking" not in seen:
        return ("no copy to a device", False) if asked else None
    # Copies on a stream of their own wait for nothing either, whatever this knob says.
    return ("copies without waiting" if seen["non_blocking"] else "copies that wait"), seen["non_blocking"] or not asked


def _device_augmentation(asked: Any, seen: Seen) -> Found:
    place = seen.get("augmented_on")
    if place is None:
        return ("no augmentation", False) if asked else None
    return f"augmentation on the {place}", (place != "loader") == asked


def _inplace_augmentation(asked: Any, seen: Seen) -> Found:
    if "augmented_on" not in seen:
        return ("no augmentation", False) if asked else None
    if "augmented_in_place" not in seen:  # a worker's own process
        return "augmentation out of sight, in the loader's workers", None
    wrote = seen["augmented_in_place"]
    # Of several phases one may have to make new tensors (signals joins two views of a sample), and be the one seen.
    agrees = wrote == asked or (None if len(seen.get("phases", ())) > 1 else False)
    return f"augmentation {'in place' if wrote else 'into new tensors'}", agrees


def _amp_dtype(asked: Any, seen: Seen) -> Found:
    types = dict.fromkeys([*seen.get("matmul_dtypes", ()), *seen.get("conv_dtypes", ())])
    if not types:
        return None
    # Autocast leaves some products in fp32; without it there is no other type.
    as_asked = _DTYPES[asked] in types if asked in _DTYPES else types.keys().isdisjoint(_DTYPES.values())
    return f"products of {', '.join(types)}", as_asked


def _cudnn_benchmark(asked: Any, seen: Seen) -> Found:
    if asked and "conv_dtypes" not in seen:
        return "no convolution", False
    return _flag("cudnn_benchmark", "cuDNN's own timing", "cuDNN's usual choice")(asked, seen)


def _channels_last(asked: Any, seen: Seen) -> Found:
    weights = [layout for layout in seen.get("conv_weights", ()) if layout != "not an image"]
    if not weights:
        return ("no convolution of images", False) if asked else None
    against = "contiguous" if asked else "channels_last"
    return f"convolutions with weights {', '.join(weights)}", against not in weights


def _sdpa_backend(asked: Any, seen: Seen) -> Found:
    kernels = sorted(seen.get("attention", {}))
    if not kernels:
        return None if asked == "auto" else ("no scaled_dot_product_attention", False)
    return f"attention by {' and '.join(kernels)}", asked == "auto" or kernels == [asked]


def _compile(asked: Any, seen: Seen) -> Found:
    if "compiled_graphs" not in seen:
        return None  # asked for off, or over before its second step
    return ("compiled graphs" if seen["compiled_graphs"] else "no compiled graph"), seen["compiled_graphs"] > 0


def _activation_checkpointing(asked: Any, seen: Seen) -> Found:
    again = seen.get("recomputed_frac", 0.0) > 0
    return ("some operators twice" if again else "every operator once"), again == asked


def _optimizer(asked: Any, seen: Seen) -> Found:
    types = seen.get("optimizer_state_dtypes")
    if not types:
        return None
    return f"{seen['optimizer']} with moments of {', '.join(types)}", ("uint8" in types) == (asked == "adamw8bit")


def _fused_optimizer(asked: Any, seen: Seen) -> Found:
    kernels = seen.get("optimizer_ops")
    if not kernels:  # a step that the GradScaler skipped
        return None
    return ", ".join(kernels), any("_fused_" in kernel for kernel in kernels) == asked


def _set_to_none(asked: Any, seen: Seen) -> Found:
    left = seen.get("grads_after_step")
    return None if left is None else (f"gradients set to {left}", (left == "none") == asked)


def _architecture(asked: Any, seen: Seen) -> Found:
    ran = "lstm" if seen.get("recurrent") else "transformer" if seen.get("attention") else "mlp"
    return f"a network like {ran}", ran == asked


def _hidden_size(asked: Any, seen: Seen) -> Found:
    there = asked in seen.get("widths", ())
    return f"{'a' if there else 'no'} layer of that width", there


def _of_first_phase(found: Found, seen: Seen) -> Found:
    """What was not seen may come in a later phase, which is not watched."""
    return (found[0], None) if found and found[1] is False and len(seen.get("phases", ())) > 1 else found


def _sequence_packing(asked: Any, seen: Seen) -> Found:
    return _of_first_phase(_flag("packed", "packed sequences", "no packed sequence")(asked, seen), seen)


def _dropout(asked: Any, seen: Seen) -> Found:
    rates = [float(r) for r in seen.get("dropouts", ())]
    words = f"dropout of {', '.join(f'{r:g}' for r in rates)}" if rates else "no dropout"
    if asked == 0:  # another layer's own does not speak against it
        return words, None if rates else True
    return _of_first_phase((words, any(abs(r - asked) < 1e-6 for r in rates)), seen)


def _encoder_frac(asked: Any, seen: Seen) -> Found:
    shares = list(seen.get("phases", {}).values())
    first = shares[0] if len(shares) > 1 else 0.0
    return f"a first phase of {first:g}", abs(first - asked) < 1e-6


def _augmentation(asked: Any, seen: Seen) -> Found:
    if asked == 0:
        return None
    return ("an augmentation", None) if "augmented_on" in seen else ("no augmentation", False)


def _adapter_rank(asked: Any, seen: Seen) -> Found:
    ranks = seen.get("adapter_ranks")
    return (f"adapters of rank {', '.join(map(str, ranks))}", asked in ranks) if ranks else None


_READERS: Mapping[str, Callable[[Any, Seen], Found]] = {
    "batch_size": _equal("batch_size", "batches of"),
    "micro_batch_size": _micro_batch_size,
    "length_bucketing": _flag("sorted_by_length", "samples sorted by length", "samples unsorted"),
    "ram_cache": _flag("samples_in_ram", "samples kept in RAM", "samples read anew"),
    "num_workers": _num_workers,
    "prefetch_factor": _equal("prefetch_factor", "with a prefetch of"),
    "persistent_workers": _flag("persistent_workers", "workers that last", "workers of one epoch"),
    "pin_memory": _flag("pinned", "page-locked batches", "no page-locked batch"),
    "non_blocking": _non_blocking,
    "device_prefetch": _flag("side_stream", "copies on a stream of their own", "no copy on a stream of its own"),
    "device_augmentation": _device_augmentation,
    "inplace_augmentation": _inplace_augmentation,
    "amp_dtype": _amp_dtype,
    "tf32": _flag("tf32", "TensorFloat-32 allowed", "no TensorFloat-32"),
    "cudnn_benchmark": _cudnn_benchmark,
    "channels_last": _channels_last,
    "sdpa_backend": _sdpa_backend,
    "compile": _compile,
    "activation_checkpointing": _activation_checkpointing,
    "optimizer": _optimizer,
    "fused_optimizer": _fused_optimizer,
    "set_to_none": _set_to_none,
    "sync_every_step": lambda asked, seen: (
        ("the loss read on the host" if seen["loss_reads"] else "no reading of the loss"),
        (seen["loss_reads"] > 0) == asked,
    ),
    "weight_decay": lambda asked, seen: (
        f"weight decay {', '.join(f'{w:g}' for w in seen['weight_decays'])}",
        any(abs(w - asked) < 1e-9 for w in seen["weight_decays"]),
    ),
    "architecture": _architecture,
    "hidden_size": _hidden_size,
    "sequence_packing": _sequence_packing,
    "encoder_frac": _encoder_frac,
    "augmentation": _augmentation,
    "dropout": _dropout,
    "adapter": _equal("adapter", "adapter"),
    "adapter_rank": _adapter_rank,
}
