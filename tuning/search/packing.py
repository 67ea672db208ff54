"""How many search trials share a card, and how much of it each may take: arithmetic on bytes, cores and busy time.

    slots = Slots(count=2, threads=1, slot_bytes=4 * 2**30)
    ledger = Ledger(slots)
    width = ledger.width(predicted)            # of 1, 2, 4 ... slots; all where nothing is predicted
    if ledger.room(width):
        ledger.enter("t003", width)            # runs under slots.cap_bytes(width)

The caps of what runs at once never sum to more than the card. Every process is alike and any trial can run in any of
them, so that a change of width costs no new process: what a trial may take is said to it, not to Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST = 4
"""More processes than this are not worth their context: each takes half a gigabyte of a card."""
MARGIN = 1.05
"""A prediction within 5 % of a share is taken for more than it: what runs out of memory has run for nothing."""
CONTEXT_BYTES = 600 * 2**20
"""What a process takes of a CUDA device beside its tensors: context, kernels, library handles."""
PATIENCE = 3
"""So many wide trials are gathered before the narrow ones make room: Ray ends a process that waits beside another, and
its successor takes 2 to 10 seconds to load torch and the data."""
BUSY_FRAC = 1.2
"""The most that processes may ask of a card's time together. Kernels of two processes take turns, and a card that is
idle for a third of the time is not for two that are busy for two thirds each."""


@dataclass(frozen=True)
class Slots:
    """Equal parts of a card and of the cores; a trial takes one of them or more.

    `slot_bytes` is None where nothing is known of the card. `idle_bytes` is what a process keeps on the device while
    its slot is lent to a wider trial. `enforced` says whether trials are held to their share, or only placed by it.
    """

    count: int
    threads: int = 1
    slot_bytes: int | None = None
    idle_bytes: int = 0
    enforced: bool = True

    def width(self, need_bytes: int | None) -> int:
        """Returns how many slots a trial of that need takes: 1, 2, 4 ... or all.

        Where the need is not known it is all, unless nobody is held to a share.
        """
        if self.slot_bytes is None or (need_bytes is None and not self.enforced):
            return 1
        if need_bytes is not None:
            for width in self._widths():
                if need_bytes * MARGIN <= self.share_bytes(width):
                    return width
        return self.count

    def wider(self, width: int) -> int:
        """Returns the next width, or the same where it is all."""
        return next((w for w in self._widths() if w > width), self.count)

    def cap_bytes(self, width: int) -> int | None:
        """Returns the bytes of tensors that a trial of that width may hold, None where it is not held to any."""
        return self.share_bytes(width) if self.slot_bytes is not None and self.enforced else None

    def _widths(self) -> list[int]:
        return [2**n for n in range(self.count.bit_length()) if 2**n < self.count] + [self.count]

    def share_bytes(self, width: int) -> int:
        """Returns the bytes of so many slots, less what the processes keep whose slots are lent; 0 where not known."""
        return max(0, width * (self.slot_bytes or 0) - (width - 1) * self.idle_bytes)


class Ledger:
    """Who holds how many slots now, and which needs have shown to be larger than was predicted."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._held: dict[str, int] = {}
        self._too_narrow: list[tuple[int, int]] = []

    def width(self, need_bytes: int | None) -> int:
        """Returns `Slots.width`, wider where a need no larger has run out of memory in such a share."""
        width = self.slots.width(need_bytes)
        for need, failed in self._too_narrow:
            if need_bytes is not None and need_bytes >= need and width <= failed:
                width = self.slots.wider(failed)
        return width

    def room(self, width: int) -> bool:
        """Returns whether so many slots are free."""
        return sum(self._held.values()) + width <= self.slots.count

    def enter(self, trial: str, width: int) -> None:
        """Gives slots to a trial; ValueError where they are not free."""
        if not self.room(width):
            raise ValueError(f"{trial} asks for {width} slots; of {self.slots.count}, {self._held} are taken")
        self._held[trial] = width

    def leave(self, trial: str) -> int:
        """Takes a trial's slots back and returns how many they were; 0 where it holds none."""
        return self._held.pop(trial, 0)

    def start(self, waiting: Sequence[int], draining: bool) -> int | None:
        """Returns which of the trials that wait, given by their widths, starts now; None where none does yet.

        The first that there is room for, so that a wide one is overtaken and no slot stands empty for it. Once it is
        time to drain, the first alone: all that wait then run in turn.
        """
        for place, width in enumerate(waiting):
            if self.room(width):
                return place
            if draining:
                return None
        return None

    def too_narrow(self, need_bytes: int | None, width: int) -> None:
        """Learns that a trial of that predicted need ran out of memory in so many slots."""
        if need_bytes is not None:
            self._too_narrow.append((need_bytes, width))


def on_cpu(cores: int, asked: int | None = None) -> int:
    """Returns how many trials run at once where there is no card: as asked, else one a core up to four."""
    return asked if asked is not None else max(1, min(cores, MOST))


def on_card(
    card_bytes: int,
    needs_bytes: Sequence[int],
    busy_frac: float | None,
    cores: int,
    workers: int,
    asked: int | None = None,
) -> int:
    """Returns how many trials share a CUDA card: as asked, else 4 or 2 where that is expected to help, else 1.

    It helps where one trial leaves the card idle (`busy_frac`, of time, None where it was not measured), the cores hold
    a training process and its loader's `workers` for each, and half of the needs fit one share.
    """
    if asked is not None:
        return asked
    if busy_frac is None or not needs_bytes:
        return 1
    typical = sorted(needs_bytes)[len(needs_bytes) // 2]
    for count in (MOST, MOST // 2):
        fits = typical * MARGIN <= share_bytes(card_bytes, count)
        if fits and count * busy_frac <= BUSY_FRAC and count * (1 + workers) <= cores:
            return count
    return 1


def share_bytes(card_bytes: int, count: int, context_bytes: int = CONTEXT_BYTES) -> int:
    """Returns the bytes of tensors in one of `count` equal shares; the card's own reserve holds the first context."""
    return max(0, card_bytes - (count - 1) * context_bytes) // count
