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
