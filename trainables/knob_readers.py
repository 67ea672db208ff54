"""How a knob is read back from the facts of a first step: (value asked, facts seen) -> what was seen, and whether it is
what was asked.

Words hold no measured figure, so that the same sentence comes whenever the same is seen. A reader may raise for facts
of another version or damaged ones: who asks (`tuning.search.runtime_check`) leaves such a knob out.
"""

from __future__ import annotations

from typing import Any

from trainables.knob_columns import Found, Reader, Seen

AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
"""Types of autocast as a knob and as torch call them."""


def flag(key: str, on: str, off: str) -> Reader:
    """Returns the reader of a fact that is as true as the knob; without that fact only True is an open claim."""

    def read(asked: Any, seen: Seen) -> Found:
        if key not in seen:
            return (off, False) if asked is True else None
        if seen[key] is None:  # where it would show was not watched
            return None
        return (on if seen[key] else off), bool(seen[key]) == asked

    return read


def equal(key: str, words: str) -> Reader:
    """Returns the reader of a fact that equals the knob; `words` hold a {} for it."""
    return lambda asked, seen: (words.format(seen[key]), seen[key] == asked) if seen.get(key) is not None else None


def listed(key: str, words: str) -> Reader:
    """Returns the reader of a list of numbers, one of which should be the knob's; none for an empty one."""

    def read(asked: Any, seen: Seen) -> Found:
        numbers = [float(v) for v in seen.get(key, ())]
        shown = f"{words} {', '.join(f'{v:g}' for v in numbers)}"
        return (shown, any(abs(v - asked) < 1e-6 for v in numbers)) if numbers else None

    return read


def first_phase(read: Reader) -> Reader:
    """Returns a reader that denies nothing where there are several phases: only the first was watched."""

    def of_first(asked: Any, seen: Seen) -> Found:
        found = read(asked, seen)
        return (found[0], None) if found and found[1] is False and len(seen.get("phases", ())) > 1 else found

    return of_first


def micro_batch_size(asked: Any, seen: Seen) -> Found:
    """Reads the largest micro-batch, which is never larger than its batch."""
    largest = seen.get("micro_batch_size")
    return (f"micro-batches of {largest}", largest == min(asked, seen["batch_size"])) if largest else None


def non_blocking(asked: Any, seen: Seen) -> Found:
    """Reads whether copies to the device waited; those on a stream of their own never do, whatever was asked."""
    if seen.get("non_blocking", False) is None:
        return None
    if "non_blocking" not in seen:
        return ("no copy to a device", False) if asked else None
    return ("copies without waiting" if seen["non_blocking"] else "copies that wait"), seen["non_blocking"] or not asked


def base_dtype(asked: Any, seen: Seen) -> Found:
    """Reads the type of most frozen weights; where none are frozen there is nothing to hold in fewer bits."""
    found = seen.get("frozen_dtypes")
    if not found:
        return None
    held = {"int8": "int8", "uint8": "nf4"}
    for dtype, name in held.items():
        if dtype in found:
            return f"frozen weights of {'eight' if name == 'int8' else 'four'} bits", asked == name
    return f"frozen weights of {found[0]}", found[0] == AUTOCAST.get(asked, "float32") and asked not in held.values()


def device_augmentation(asked: Any, seen: Seen) -> Found:
    """Reads where the augmentation ran."""
    place = seen.get("augmented_on")
    if place is None:
        return ("no augmentation", False) if asked else None
    return f"augmentation on the {place}", (place != "loader") == asked


def inplace_augmentation(asked: Any, seen: Seen) -> Found:
    """Reads whether the augmentation wrote into its batch."""
    if "augmented_on" not in seen:
        return ("no augmentation", False) if asked else None
    if "augmented_in_place" not in seen:  # a worker's own process
        return "augmentation out of sight, in the loader's workers", None
    wrote = seen["augmented_in_place"]
    # Of several phases one may have to make new tensors (signals joins two views of a sample), and be the one seen.
    agrees = wrote == asked or (None if len(seen.get("phases", ())) > 1 else False)
    return f"augmentation {'in place' if wrote else 'into new tensors'}", agrees


def amp_dtype(asked: Any, seen: Seen) -> Found:
    """Reads the types of products and convolutions."""
    types = dict.fromkeys([*seen.get("matmul_dtypes", ()), *seen.get("conv_dtypes", ())])
    if not types:
        return None
    # Autocast leaves some products in fp32; without it there is no other type.
    as_asked: bool | None = AUTOCAST.get(asked, "") in types
    if asked not in AUTOCAST:
        as_asked = types.keys().isdisjoint(AUTOCAST.values())
        if not as_asked and not set(AUTOCAST.values()).isdisjoint(seen.get("frozen_dtypes", ())):
            as_asked = None  # frozen weights held in such a type are multiplied in it
    return f"products of {', '.join(types)}", as_asked


def cudnn_benchmark(asked: Any, seen: Seen) -> Found:
    """Reads cuDNN's flag; without a convolution it has nothing to time."""
    if asked and "conv_dtypes" not in seen:
        return "no convolution", False
    return flag("cudnn_benchmark", "cuDNN's own timing", "cuDNN's usual choice")(asked, seen)


def channels_last(asked: Any, seen: Seen) -> Found:
    """Reads the order of the weights of two-dimensional convolutions."""
    weights = [layout for layout in seen.get("conv_weights", ()) if layout != "not an image"]
    if not weights:
        return ("no convolution of images", False) if asked else None
    against = "contiguous" if asked else "channels_last"
    return f"convolutions with weights {', '.join(weights)}", against not in weights


def sdpa_backend(asked: Any, seen: Seen) -> Found:
    """Reads the kernels of attention."""
    kernels = sorted(seen.get("attention", {}))
    if not kernels:
        return None if asked == "auto" else ("no scaled_dot_product_attention", False)
    return f"attention by {' and '.join(kernels)}", asked == "auto" or kernels == [asked]


def compiled(asked: Any, seen: Seen) -> Found:
    """Reads whether graphs were compiled, which only a second step shows."""
    if "compiled_graphs" not in seen:
        return None
    return ("compiled graphs" if seen["compiled_graphs"] else "no compiled graph"), seen["compiled_graphs"] > 0


def activation_checkpointing(asked: Any, seen: Seen) -> Found:
    """Reads whether operators of the forward pass ran in the backward pass."""
    again = seen.get("recomputed_frac", 0.0) > 0
    return ("some operators twice" if again else "every operator once"), again == asked


def optimizer(asked: Any, seen: Seen) -> Found:
    """Reads the types of the optimiser's moments."""
    types, name = seen.get("optimizer_state_dtypes"), seen.get("optimizer", "")
    if not types and name != "SGD":  # the GradScaler skipped the step
        return None
    found = "sgd" if name == "SGD" else "adamw8bit" if types and "uint8" in types else "adamw"
    return f"{name} with moments of {', '.join(types)}" if types else f"{name} without moments", found == asked


def nesterov(asked: Any, seen: Seen) -> Found:
    """Reads Nesterov's flag of SGD, which has no effect without momentum."""
    if "nesterov" not in seen or not any(seen.get("momenta", ())):
        return ("no momentum", False) if asked else None
    return ("Nesterov's momentum" if seen["nesterov"] else "no Nesterov's momentum"), seen["nesterov"] == asked


def max_grad_norm(asked: Any, seen: Seen) -> Found:
    """Reads whether the gradients' norm was taken before the optimiser's step."""
    if "gradient_norms" not in seen:
        return None
    taken = bool(seen["gradient_norms"])
    return ("gradients held to a norm" if taken else "no norm of the gradients"), taken == (asked > 0)


def fused_optimizer(asked: Any, seen: Seen) -> Found:
    """Reads the optimiser's kernels; a step that the GradScaler skipped had none."""
    kernels = seen.get("optimizer_ops")
    return (", ".join(kernels), any("_fused_" in kernel for kernel in kernels) == asked) if kernels else None


def set_to_none(asked: Any, seen: Seen) -> Found:
    """Reads what became of the gradients."""
    left = seen.get("grads_after_step")
    return None if left is None else (f"gradients set to {left}", (left == "none") == asked)


def architecture(asked: Any, seen: Seen) -> Found:
    """Reads what kind of layers ran."""
    ran = "lstm" if seen.get("recurrent") else "transformer" if seen.get("attention") else "mlp"
    return f"a network like {ran}", ran == asked


def hidden_size(asked: Any, seen: Seen) -> Found:
    """Reads the sizes of the trained weights."""
    there = asked in seen.get("widths", ())
    return f"{'a' if there else 'no'} layer of that width", there


def dropout(asked: Any, seen: Seen) -> Found:
    """Reads the rates of the dropouts that ran; other layers may have their own."""
    found = listed("dropouts", "dropout of")(asked, seen)
    if asked == 0:
        return (found[0], None) if found else ("no dropout", True)
    return found or ("no dropout", False)


def encoder_frac(asked: Any, seen: Seen) -> Found:
    """Reads the share of the first of several phases."""
    shares = list(seen.get("phases", {}).values())
    first = shares[0] if len(shares) > 1 else 0.0
    return f"a first phase of {first:g}", abs(first - asked) < 1e-6


def augmentation(asked: Any, seen: Seen) -> Found:
    """Reads whether there was an augmentation; how strong it was cannot be told."""
    if asked == 0:
        return None
    return ("an augmentation", None) if "augmented_on" in seen else ("no augmentation", False)
