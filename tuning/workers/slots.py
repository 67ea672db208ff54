"""How many search trials run at once, and what each may take of its card: arithmetic on bytes, cores and busy time."""

from __future__ import annotations

from collections.abc import Sequence

from tuning.config.cards import CONTEXT_BYTES

MAX_SLOTS = 4
"""More processes than this on one device are not worth their context: each takes half a gigabyte of a card."""
MARGIN = 1.05
"""A need within 5 % of a slot is taken for more than it: what runs out of memory has run for nothing."""
MAX_BUSY_FRAC = 1.2
"""The most that processes may ask of a card's time together. Kernels of two processes take turns, and a card that is
idle for a third of the time is not for two that are busy for two thirds each."""


def over_cards(asked: int, cards: int) -> int:
    """Returns how many of the slots asked for are taken: fewer, as many on each, where a card would be left idle.

    Slots are equal, and Ray fills one card with them before the next: five on four cards would be 2, 2 and 1.
    """
    return asked if asked <= cards or asked > -(-asked // cards) * (cards - 1) else asked // cards * cards


def on_card(card_bytes: int, needs_bytes: Sequence[int], busy_frac: float | None, cores: int, workers: int) -> int:
    """Returns how many trials share a CUDA card: 4 or 2 where that is expected to help, else 1.

    It helps where one trial leaves the card idle (`busy_frac`, of time, None where it was not measured), the card's
    share of the cores holds a training process and its loader's `workers` for each, and half of the needs fit a slot.
    """
    if busy_frac is None or not needs_bytes:
        return 1
    typical = sorted(needs_bytes)[len(needs_bytes) // 2]
    for count in (MAX_SLOTS, MAX_SLOTS // 2):
        fits = typical * MARGIN <= share_bytes(card_bytes, count)
        if fits and count * busy_frac <= MAX_BUSY_FRAC and count * (1 + workers) <= cores:
            return count
    return 1


def share_bytes(card_bytes: int, count: int) -> int:
    """Returns the bytes of tensors in one of `count` equal slots; the card's own reserve holds the first context."""
    return max(0, card_bytes - (count - 1) * CONTEXT_BYTES) // count


def alone_bytes(card_bytes: int, count: int, model_bytes: int) -> int:
    """Returns what a trial may hold that runs alone, beside `count` - 1 processes that keep context and model."""
    return max(0, card_bytes - (count - 1) * (CONTEXT_BYTES + model_bytes))
