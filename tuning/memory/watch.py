"""Memory of a process over time: when to stop a trial before it dies, and when to give up a process after one.

Pure: readings in, a reason or None out. What is read is in `workers/session.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tuning.memory.oom import GROWING, THRASHING, Fault

GROWING_WINDOWS = 4
"""So many windows in a row have to end with more live bytes than the one before: a loop that is sound ends each with
parameters, optimiser state and at most gradients, the same at every window."""
AHEAD_WINDOWS = 2
"""A trial is stopped when it would pass the cap within so many windows of the growth seen."""
GROWTH_FRAC = 0.001
"""Growth of less than this share of the cap over the windows looked at is none: a metric's running sums, a table."""
THRASHING_WINDOWS = 2
"""So many windows in a row in which the allocator had to give its cache back: each time waits for the device."""
LEFT_FRAC, LEFT_BYTES = 0.02, 16 * 2**20
"""A trial may leave behind that share of the cap, or those bytes where that is more: kernels' workspaces and tables."""

_MIB = 2**20


@dataclass(frozen=True)
class Reading:
    """Memory at the end of a window: live and peak bytes of tensors, what the allocator holds, its retries so far.

    `reserved_bytes` and `retries` are 0 on a CPU, whose allocator holds nothing back; `peak_bytes` is the run's so far.
    """

    live_bytes: int
    peak_bytes: int
    reserved_bytes: int = 0
    retries: int = 0


@dataclass(frozen=True)
class Alarm:
    """Why a trial is stopped, in a sentence and as a fault."""

    reason: str
    fault: Fault


def alarm(readings: Sequence[Reading], cap_bytes: int | None) -> Alarm | None:
    """Returns why a running trial should be stopped now, or None; `readings` are those of its windows, oldest first.

    Thrashing: the allocator emptied its cache and tried again in each of the last windows. Creeping: live bytes, or
    what the allocator holds, grew from window to window, and at that pace pass the cap within the next two.
    """
    if len(readings) > THRASHING_WINDOWS:
        counts = [r.retries for r in readings[-THRASHING_WINDOWS - 1 :]]
        if all(b > a for a, b in itertools.pairwise(counts)):
            text = f"the allocator emptied its cache {counts[-1] - counts[0]} times in {THRASHING_WINDOWS} windows"
            return Alarm(f"{text} to find room", THRASHING)
    if cap_bytes is None:
        return None
    live = _growth([r.live_bytes for r in readings], cap_bytes)
    if live and readings[-1].peak_bytes + AHEAD_WINDOWS * live > cap_bytes:
        return Alarm(_creep("live bytes grow", live, readings[-1].peak_bytes, cap_bytes), GROWING)
    held = _growth([r.reserved_bytes for r in readings], cap_bytes)
    if held and readings[-1].reserved_bytes + held > cap_bytes:
        return Alarm(_creep("reserved bytes grow", held, readings[-1].reserved_bytes, cap_bytes), THRASHING)
    return None


def left_behind(before_bytes: int, after_bytes: int, cap_bytes: int | None) -> str | None:
    """Returns why a process should not run another trial, or None: what its trials left is no small share of the cap.

    `before_bytes` is what belongs to the process (its model), `after_bytes` what it holds when a trial is over.
    """
    left = after_bytes - before_bytes
    allowed = max(LEFT_BYTES, round((cap_bytes or 0) * LEFT_FRAC))
    if left <= allowed:
        return None
    return f"{left / _MIB:.1f} MiB were still held after the trial, {allowed / _MIB:.1f} MiB are allowed"


def _growth(levels: Sequence[int], cap_bytes: int) -> int:
    """Returns the mean growth a window, or 0 where the last windows did not all grow, evenly, and by what counts.

    Even: none by less than a third of the mean. Batches of unlike length end windows at unlike levels, which may rise
    by chance.
    """
    last = levels[-GROWING_WINDOWS - 1 :]
    grown = last[-1] - last[0] if len(last) > GROWING_WINDOWS else 0
    least = min((b - a for a, b in itertools.pairwise(last)), default=0)
    if grown <= GROWTH_FRAC * cap_bytes or 3 * GROWING_WINDOWS * least < grown:
        return 0
    return -(-grown // GROWING_WINDOWS)


def _creep(what: str, growth: int, level: int, cap_bytes: int) -> str:
    return (
        f"{what} by {growth / _MIB:.2f} MiB a window, from {level / _MIB:.1f} to the cap of {cap_bytes / _MIB:.1f} MiB"
    )
