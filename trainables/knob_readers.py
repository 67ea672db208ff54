"""Readers of knobs: (value of the knob, facts of a first step) -> what was seen, and whether it agrees with the value.

The words contain no measured figure, so that equal facts give the same sentence. A reader may raise for damaged facts
or those of another version: the caller (`tuning.search.runtime_check`) leaves such a knob out.
"""

from __future__ import annotations

from typing import Any

from trainables.knob_columns import Found, Reader, Seen

AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
"""Types of autocast: the knob's value -> torch's name."""


def flag(key: str, on: str, off: str) -> Reader:
    """Returns a reader for a fact that is true if the knob is; if the fact is missing, only True disagrees."""

    def read(asked: Any, seen: Seen) -> Found:
        if key not in seen:
            return (off, False) if asked is True else None
        if seen[key] is None:  # that part of the step was not watched
            return None
        return (on if seen[key] else off), bool(seen[key]) == asked

    return read


def equal(key: str, words: str) -> Reader:
    """Returns a reader for a fact that equals the knob; `words` has a {} for the fact."""
    return lambda asked, seen: (words.format(seen[key]), seen[key] == asked) if seen.get(key) is not None else None


def listed(key: str, words: str) -> Reader:
    """Returns a reader for a list of numbers that should contain the knob's; an empty list is no finding."""

    def read(asked: Any, seen: Seen) -> Found:
        numbers = [float(v) for v in seen.get(key, ())]
        shown = f"{words} {', '.join(f'{v:g}' for v in numbers)}"
        return (shown, any(abs(v - asked) < 1e-6 for v in numbers)) if numbers else None

    return read
