"""Which trial runs next, in how much of a card, and whether it runs again: the same for every executor."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tuning.memory.oom import PROCESS_LOST, Fault, Outcome
from tuning.search.packing import PATIENCE, Ledger
from tuning.search.protocols import Scheduler, TrialPlan, TrialRequest

BEAT_S = 5.0
"""So often a trial that runs asks whether it is to go on; the time that takes is inside no window."""


@dataclass(frozen=True)
class Placed:
    """A trial of the scheduler as a executor runs it: in so many slots, for the so-manieth time."""

    request: TrialRequest
    width: int
    attempt: int = 1


@dataclass(frozen=True)
class Share:
    """What a placed trial may take: bytes of tensors (None: what the device has), torch's threads, and how it retreats.

    `shrink` is what it may change to begin again by itself: "" nothing, "loader" its loader's processes, "all".
    """

    cap_bytes: int | None
    threads: int
    shrink: Literal["", "loader", "all"]


class Placing:
    """Asks a scheduler for trials as one device has room for them, and has those run again whose share was too small.

    `cap_bytes` is what a trial may take that has the device to itself.
    """

    def __init__(self, scheduler: Scheduler, orders: TrialPlan, cap_bytes: int | None) -> None:
        self._scheduler, self._orders, self._cap_bytes = scheduler, orders, cap_bytes
        self._ledger = Ledger(orders.slots)
        self._next: list[Placed] = []
        """What is to run before anything new is asked for: it waits for room, or begins again in another process."""
        self._draining = False

    @property
    def waiting(self) -> bool:
        """Returns whether a trial waits for room, or to begin again."""
        return bool(self._next)

    def take(self) -> Placed | None:
        """Returns what runs now, its slots taken; None where nothing can.

        Nothing is asked for while no slot is free: the longer a proposal waits, the less it was made from.
        """
        while self._ledger.room(1):
            place = self._ledger.start([placed.width for placed in self._next], self._draining)
            if place is not None:
                placed = self._next.pop(place)
                self._draining = self._draining and bool(self._next)
                if not self._still_wanted(placed):
                    continue
                self._ledger.enter(placed.request.trial, placed.width)
                return placed
            if self._draining:
                return None
            request = self._scheduler.next_trial() if len(self._next) < PATIENCE else None
            if request is not None:
                self._next.append(Placed(request, self._ledger.width(request.need_bytes)))
            elif self._next:
                self._draining = True
            else:
                return None
        return None

    def _still_wanted(self, placed: Placed) -> bool:
        """Returns whether a trial that may have waited is still judged to fit; where it is not, its end is told."""
        trial = placed.request.trial
        if self._scheduler.goes_on(trial, {}):
            return True
        self._scheduler.ended(trial, {"outcome": str(Outcome.REFUSED), "values": {}, "message": ""})
        return False

    def share(self, placed: Placed) -> Share:
        """Returns what a trial may take; one whose share is too small is widened before it changes anything itself."""
        orders, slots = self._orders, self._ledger.slots
        whole = slots.slot_bytes is None or placed.width >= slots.count
        cap_bytes = self._cap_bytes if slots.slot_bytes is None else slots.cap_bytes(placed.width)
        return Share(
            cap_bytes, orders.threads * placed.width, "" if not orders.shrink else "all" if whole else "loader"
        )

    def leave(self, placed: Placed) -> None:
        """Takes the trial's slots back."""
        self._ledger.leave(placed.request.trial)

    def widened(self, placed: Placed, found: Mapping[str, Any] | None) -> bool:
        """Returns whether a trial that ended is to run again in more slots, and keeps it: its share was at fault."""
        slots = self._ledger.slots
        short = found is not None and found.get("outcome") in (Outcome.OOM, Outcome.HOST_OOM)
        if not short or slots.slot_bytes is None or placed.width >= slots.count:
            return False
        self._ledger.too_narrow(placed.request.need_bytes, placed.width)
        width = slots.wider(placed.width)
        share = slots.share_bytes(placed.width) / 2**20
        reason = f"it needs more than its share of {share:.0f} MiB, and begins again in {width} of {slots.count} slots"
        self._scheduler.decided("widened", placed.request.trial, reason)
        self._next.append(dataclasses.replace(placed, width=width, attempt=placed.attempt + 1))
        return True

    def again(self, placed: Placed) -> None:
        """Keeps a trial that did not begin, to run in another process."""
        self._next.append(dataclasses.replace(placed, attempt=placed.attempt + 1))


def given_up(fault: Fault, said: str) -> dict[str, Any]:
    """Returns the result of a trial that ended with its process; the last line of `said` is what is known of why."""
    last = said.strip().rpartition("\n")[2]
    begin = "the process was lost" if fault is PROCESS_LOST else fault.name
    message = f"{begin}: {last}" if begin and last else begin or last
    return {"outcome": str(fault.outcome), "fault": fault.name, "values": {}, "message": message[:500]}
