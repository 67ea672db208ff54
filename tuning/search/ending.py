"""When a search ends, and why in words: its trials or its time are spent, or its front stays as it is."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping

from tuning.search.patience import Patience

LITTLE = 0.01
"""A search whose front stays as it is goes on while as many trials again may add so much of the area under its front.

Simulated, one slot: after 20 idle trials alone the five tables kept 0.975 to 1.000 of the hypervolume that the whole
search found in a fixed time (16 seeds, least 0.859), 0.959 to 1.000 of that of 300 trials (4 seeds, least 0.860), both
least in headpose. With this rule 0.993 to 1.000 (0.961, in temporal) in up to 0.09 more of the time, and 0.999 to 1.000
(0.998); of 300 trials temporal, pointer and nli end after 0.66, 0.49 and 0.40 of the time, headpose and signals not.
"""


class Ending:
    """Watches a search of `slots` trials at once; once it is over it stays so.

    `deadline` is a moment in seconds, None for none. `patience` is how many trials in a row may leave the front as it
    was, None for any number.
    """

    def __init__(self, trials: int, deadline: float | None, slots: int, front: Patience, patience: int | None) -> None:
        self._trials, self._deadline, self._slots = trials, deadline, slots
        self._front, self._patience = front, patience
        self._full_trial_s: list[float] = []  # sorted
        self.reason = ""
        """Why the search is over, "" while it goes on."""

    def ended(self, values: Mapping[str, float | None], *, whole: bool) -> None:
        """Takes the values of a trial that trained, to its end if `whole`."""
        self._front.take(values, whole=whole)

    def took(self, seconds: float) -> None:
        """Takes how long a trial took to its end."""
        insort(self._full_trial_s, seconds)

    def is_spent(self, begun: int, refused: int, now: float) -> bool:
        """Returns whether no other trial may be proposed after so many."""
        # A trial begun now would end after the deadline more often than not: most are stopped half way.
        typical_s = self._full_trial_s[len(self._full_trial_s) // 2] if self._full_trial_s else 0.0
        if self.reason:
            return True
        if begun + refused >= self._trials:
            self.reason = f"all {self._trials} trials were proposed"
        elif self._deadline is not None and begun >= self._slots and now + typical_s / 2 > self._deadline:
            proposed = f"{begun + refused} of {self._trials} trials"
            self.reason = f"its share of search.max_time was spent after {proposed}; confirming takes the rest"
        return bool(self.reason)

    def idle(self, expected: tuple[float, float] | None, proposed: int, now: float) -> str:
        """Returns why the search may end because its front has stayed as it is, "" where it goes on.

        `expected` is what a next trial was expected to add at most, and at most a second, as shares of the area under
        the front; None where that is not known, and the patience alone decides. Looked ahead is as far as back: as many
        trials as were idle may add, fewer where no more are left, and no more than the seconds left give.
        """
        idle = self._front.idle
        if self._patience is None or idle < self._patience:
            return ""
        said = f"the last {idle} trials left the front as it was (search.patience={self._patience})"
        if expected is None:
            return said
        gain_frac, gain_frac_per_s = expected
        ahead = min(self._patience, self._trials - proposed)
        added, what = ahead * gain_frac, f"the next {ahead} are"
        if self._deadline is not None:
            in_time = self._slots * max(0.0, self._deadline - now) * gain_frac_per_s
            added, what = (in_time, "what the time left allows is") if in_time < added else (added, what)
        if added >= LITTLE:
            return ""
        return f"{said}, and {what} expected to add less than {LITTLE:.0%} of the area under it"
