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


def own_momentum(asked: Any, seen: Seen) -> Found:
    """Reads the `momentum` of a file with an optimiser of its own, if that was made with it; else the name may mean
    another, as of averaged weights, and nothing is denied.
    """
    found, made = listed("momenta", "momentum")(asked, seen), seen.get("momentum_made")
    if found is None or made is None or found[1]:
        return found
    if abs(made - asked) >= 1e-6:
        return found[0], None
    text = "another, set since the optimiser was made (OneCycleLR and CyclicLR do that"
    return f"{text}; cycle_momentum=False keeps the knob's)", False


def first_phase(read: Reader) -> Reader:
    """Returns a reader that denies nothing where there are several phases: only the first was watched."""

    def of_first(asked: Any, seen: Seen) -> Found:
        found = read(asked, seen)
        return (found[0], None) if found and found[1] is False and len(seen.get("phases", ())) > 1 else found

    return of_first


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
