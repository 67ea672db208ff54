"""The bytes that a memory group needs by micro-batch, and the probability that they exceed a cap.

A need is read off a memory profile, corrected by the peaks that runs had. How far it can be off depends on how the
profile was made (`MARGINS`); a distribution makes P(OOM) of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from tuning.memory.profile import EXTRAPOLATED, MEASURED, MemoryProfile, interpolated

_Number = TypeVar("_Number", int, float)


class Margin(NamedTuple):
    """How far the need is from a profile: `more_frac` is expected on top of the bytes that grow with the micro-batch.

    `spread_frac` is one standard deviation of the logarithm of the whole, so that P(OOM) is 0.5 where what is expected
    is just the cap, and 0.05 where the cap is 1.64 spreads more. If `is_heavy`, a few are many spreads away: Cauchy's
    distribution takes the place of the normal one, and P(OOM) is 0.05 at 6.3 spreads.
    """

    more_frac: float
    spread_frac: float
    is_heavy: bool = False

    def share_below(self, spreads: float) -> float:
        """Returns the probability to be less than so many spreads above what is expected."""
        if self.is_heavy:
            return 0.5 + math.atan(spreads) / math.pi
        return 0.5 * math.erfc(-spreads / math.sqrt(2))  # scipy's takes 0.3 s to import


MARGINS: Mapping[str, Margin] = {
    MEASURED: Margin(0.0, 0.01),  # peaks of the same configuration repeat to the byte on a CPU
    # The peak is the largest of several lines, so beyond the last point it can only be steeper: nli from 8 samples to
    # 32 by 3 to 9 %.
    EXTRAPOLATED: Margin(0.06, 0.05),
    "learned": Margin(0.0, 0.02),  # a prediction, up to the largest size whose peak a run has told
    "traced": Margin(0.01, 0.02),  # every kernel visible: 0.42 % mean, 2.8 % at most in 22 cases
    "workspaces modelled": Margin(0.02, 0.009, is_heavy=True),  # convolutions: 47 models of timm, measured on an A100
    "workspaces unseen": Margin(0.20, 0.12),  # recurrent kernels: 6 to 50 % too low
    "fallback": Margin(0.15, 0.25),  # kernels of another device: -30 to +86 %
    # No less than its own need: with checkpointing what is needed without, of a width what a neighbour needs.
    "bound": Margin(0.0, 0.04),
    "none": Margin(-0.1, 0.10),  # nothing predicted: a line through zero and the peaks that trials reported
}
"""By the `source` of a profile; figures from predictions compared with profiled steps."""


@dataclass
class Observed:
    """Results of the runs of one group, by micro-batch: `exact` needs, and bounds that the need is not below."""

    exact: dict[int, int] = field(default_factory=dict)
    least: dict[int, int] = field(default_factory=dict)  # peaks of short runs
    over: dict[int, int] = field(default_factory=dict)  # caps that were not enough


class Need(NamedTuple):
    """The corrected profile of a group; up to micro-batch `known_to` runs or measurements have told its needs."""

    profile: MemoryProfile
    known_to: int
    least_spread: float = 0.0

    def expected(self, micro_batch: int) -> float:
        """Returns the bytes a card is expected to need; never falls with the micro-batch."""
        whole, known = self.profile.capacity(micro_batch), self._known_bytes()
        if micro_batch <= self.known_to:
            return max(whole, self.profile.floor_bytes)
        return max(known, known + (1 + self._margin(micro_batch).more_frac) * (whole - known))

    def p_over(self, micro_batch: int, cap_bytes: int) -> float:
        """Returns the probability that it needs more than the cap; never falls with the micro-batch."""
        if self.profile.floor_bytes > cap_bytes or cap_bytes <= 0:
            return 1.0
        sizes = {micro_batch, self.known_to} if 0 < self.known_to < micro_batch else {micro_batch}
        return max(self._p_over(m, cap_bytes) for m in sizes)

    def limit_bytes(self, cap_bytes: int) -> float:
        """Returns the most bytes of the profile, beyond `known_to`, that are not expected to be over the cap."""
        known = self._known_bytes()
        return known + (cap_bytes - known) / (1 + self._margin(self.known_to + 1).more_frac)

    def _p_over(self, micro_batch: int, cap_bytes: int) -> float:
        expected = self.expected(micro_batch)
        if expected <= 0:
            return 0.0
        margin = self._margin(micro_batch)
        return margin.share_below(math.log(expected / cap_bytes) / margin.spread_frac)

    def _known_bytes(self) -> float:
        floor = self.profile.floor_bytes
        return max(floor, self.profile.capacity(self.known_to)) if self.known_to else floor

    def _margin(self, micro_batch: int) -> Margin:
        measured = self.profile.source == MEASURED
        if micro_batch <= self.known_to:
            found = MARGINS[MEASURED if measured else "learned"]
        else:
            found = MARGINS[EXTRAPOLATED if measured else self.profile.source]
        return found._replace(spread_frac=max(found.spread_frac, self.least_spread))


def corrected(need: Need, told: Observed, *, own: bool = False) -> Need:
    """Returns the need with its profile raised or lowered to what runs of the group told.

    Between two sizes that are known the correction goes from one to the other, beyond them it is that of the nearest.
    Measured points of an `own` profile stay.
    """
    profile = need.profile
    ratios = {p.micro_batch: 1.0 for p in profile.points if own and p.micro_batch <= need.known_to}
    ratios |= {m: size / profile.peak(m) for m, size in told.exact.items() if profile.peak(m) > 0}
    bounds = [(m, size / profile.peak(m)) for m, size in told.least.items() if profile.peak(m) > 0]
    bounds += [(m, size / profile.capacity(m)) for m, size in told.over.items() if profile.capacity(m) > 0]
    plain = dict(ratios)
    for m, least in bounds:
        if least > interpolated(plain, m):
            raise_to(ratios, m, least)
    if not ratios:
        return need
    known_to = max(told.exact, default=0) if not own else max([need.known_to, *told.exact])
    least_spread = 0.0 if told.exact else need.least_spread
    return Need(profile.scaled(ratios), known_to if told.exact else need.known_to, least_spread)


def raise_to(known: dict[int, _Number], micro_batch: int, value: _Number) -> None:
    """Keeps the larger of a value and the one that is known of the micro-batch."""
    known[micro_batch] = max(value, known.get(micro_batch, value))
