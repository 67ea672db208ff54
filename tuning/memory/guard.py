"""Whether a configuration fits, judged before it runs: one rule for the search and for `python -m tuning estimate`.

P(OOM) comes from the need of a memory group (`memory.need`) and a cap. A configuration that ran to its end is admitted
again, one that ran out of memory is not, whatever a profile says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainables.knobs import KnobTable, Scalar
from tuning.config.cards import GIB_BYTES
from tuning.memory.need import Need, Observed, corrected, raise_to
from tuning.memory.profile import MEASURED, MemoryProfile, Point

MemoryGroup = tuple[tuple[str, Scalar], ...]
"""The knobs that change what a sample or a parameter needs, as (name, value) pairs; see `memory.groups.key_of`."""
Action = Literal["launch", "halve", "refuse"]

GRADIENTS_HELD = "gradients_held"
"""The pair of a group that says whether gradients of earlier micro-steps are alive while a micro-step runs.

Without it, or where it is true, they are. A batch of one micro-step holds none, and needs no more.
"""
BORROWED_SPREAD_FRAC = 0.05
"""At least this is the spread of a group that has the profile of one with other minor knobs, such as `compile`."""


MOST_P_OOM = 0.5
"""Up to this P(OOM) a trial is launched. An OOM costs no more than its trial, a refusal no less: fewest mistakes."""
MOST_P_OOM_PROBE = 0.8
"""Up to this a probe is: whether the fastest fits is what it is for, and an OOM comes with its first steps.

In pointer four trainings ran out of memory after 0.2 to 0.3 s, where probes take 0.6 to 3.
"""


@dataclass(frozen=True)
class FitVerdict:
    """The decision on a configuration: launch it as it is, with the smaller `micro_batch`, or not at all.

    `predicted_bytes` and `p_oom` are of what is launched, or of what was asked where it is refused; None where nothing
    is known.
    """

    action: Action
    micro_batch: int
    predicted_bytes: int | None
    p_oom: float | None
    reason: str

    @property
    def fits(self) -> bool:
        """Returns whether it is expected to fit, if need be after halving."""
        return self.action != "refuse"

    def applied(self, knobs: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """Returns the knobs at the micro-batch that was judged."""
        return {**knobs, "micro_batch_size": self.micro_batch}


class MemoryGuard:
    """The known memory needs, by group. Knowing more never refuses what has run to its end on a card or under a cap.

    `cap_bytes` is what tensors may take, None where there is no limit to judge by; then only observed OOMs refuse.
    To be told the same peak again changes nothing: of each group and micro-batch the largest counts, once. `table` has
    the knobs that the groups name.
    """

    def __init__(self, cap_bytes: int | None, profiles: Mapping[MemoryGroup, MemoryProfile], table: KnobTable) -> None:
        self.cap_bytes, self.table = cap_bytes, table
        self._profiles = dict(profiles)
        self._plain = {self._without_minor(group): group for group in self._profiles}
        self._told: dict[MemoryGroup, Observed] = {}
        self._fitted: dict[MemoryGroup, int] = {}
        self._failed: dict[MemoryGroup, int] = {}
        self._needs: dict[MemoryGroup, Need | None] = {}  # since something was told
        self._fitting: dict[tuple[MemoryGroup, int], int] = {}  # what was asked since then

    def observe_fit(self, group: MemoryGroup, micro_batch: int, peak_bytes: int, *, whole: bool = False) -> None:
        """Learns that a micro-batch fitted, and the most that was alive; 0 where nobody measured it.

        The peak of a `whole` training is its need. A shorter run may not have met the longest samples: its
        peak says that the need is no less, and not that a training fits. A peak above this cap fitted a larger one.
        """
        if whole and (self.cap_bytes is None or peak_bytes <= self.cap_bytes):
            self._fitted[group] = max(micro_batch, self._fitted.get(group, 0))
        if peak_bytes > 0:
            told = self._hears(group)
            raise_to(told.exact if whole else told.least, micro_batch, peak_bytes)
        self._forget()

    def observe_peak(self, group: MemoryGroup, micro_batch: int, peak_bytes: int) -> None:
        """Learns the exact need of a micro-batch, whether or not the cap would hold it."""
        if peak_bytes > 0:
            raise_to(self._hears(group).exact, micro_batch, peak_bytes)
            self._forget()

    def observe_oom(self, group: MemoryGroup, micro_batch: int, cap_bytes: int | None = None) -> None:
        """Learns that a micro-batch ran out of memory, under `cap_bytes` where that was not this cap.

        Under a smaller one, such as a shared card's, it says that the need is more, and not that it does not fit here.
        """
        cap_bytes = self.cap_bytes if cap_bytes is None else cap_bytes
        if self.cap_bytes is None or cap_bytes is None or cap_bytes >= self.cap_bytes:
            self._failed[group] = min(micro_batch, self._failed.get(group, micro_batch))
        if cap_bytes:
            raise_to(self._hears(group).over, micro_batch, cap_bytes)
        self._forget()

    def judge(
        self, group: MemoryGroup, micro_batch: int, *, shrink: bool = False, threshold: float = MOST_P_OOM
    ) -> FitVerdict:
        """Returns what to do with a micro-batch; `shrink` allows half of it, a quarter and so on.

        If a micro-batch fits, so does every smaller one; less than a whole batch holds gradients. In this order: it
        fits up to the largest whose training ended; does not from the smallest that ran out of memory; else P(OOM)
        against the threshold.
        """
        asked = verdict = self._judged(group, micro_batch, threshold)
        while shrink and not verdict.fits and verdict.micro_batch > 1:
            verdict = self._judged(_held(group), verdict.micro_batch // 2, threshold)
        if not verdict.fits or verdict.micro_batch == micro_batch:
            return asked
        reason = f"micro-batch {verdict.micro_batch} in the place of {micro_batch}, for which {asked.reason}"
        return dataclasses.replace(verdict, action="halve", reason=reason)

    def fitting(self, group: MemoryGroup, micro_batch: int) -> int:
        """Returns the micro-batch at which `judge` with `shrink` lets it begin, 0 where it refuses.

        Says no more than that, and keeps it until something is observed: a search asks it of every trial it may choose,
        with all system knobs that it knows.
        """
        asked = group, micro_batch
        if asked not in self._fitting:
            verdict = self.judge(group, micro_batch, shrink=True)
            self._fitting[asked] = verdict.micro_batch if verdict.fits else 0
        return self._fitting[asked]

    def overshoot_bytes(self, verdict: FitVerdict) -> int:
        """Returns by how much a refused configuration is expected to be over the cap, at least 1; 0 where it fits."""
        if verdict.fits:
            return 0
        return 1 if self.cap_bytes is None else max(1, (verdict.predicted_bytes or 0) - self.cap_bytes)

    def p_oom(self, group: MemoryGroup, micro_batch: int) -> float | None:
        """Returns the probability that a training of this micro-batch runs out of memory, None where nothing is known.

        1 where parameters and the optimiser's state alone are over the cap. Never falls with the micro-batch.
        """
        need = self._need(group)
        if need is None:
            return None
        return 0.0 if self.cap_bytes is None else need.p_over(micro_batch, self.cap_bytes)

    def predicted_bytes(self, group: MemoryGroup, micro_batch: int) -> int | None:
        """Returns the need that is expected, never below parameters and optimiser state; None: nothing is known."""
        need = self._need(group)
        return None if need is None else round(need.expected(micro_batch))

    def limit_bytes(self, group: MemoryGroup) -> int | None:
        """Returns the most that a profile may say for `judge` to launch it; None without a profile or a cap."""
        need = self._need(group)
        return None if need is None or self.cap_bytes is None else int(need.limit_bytes(self.cap_bytes))

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _judged(self, group: MemoryGroup, micro_batch: int, threshold: float) -> FitVerdict:
        predicted, p_oom = self.predicted_bytes(group, micro_batch), self.p_oom(group, micro_batch)
        fitted, failed = self._seen(group)
        if micro_batch <= fitted:
            return FitVerdict("launch", micro_batch, predicted, p_oom, f"micro-batch {fitted} fitted before")
        if failed is not None and micro_batch >= failed:
            return FitVerdict("refuse", micro_batch, predicted, 1.0, f"micro-batch {failed} ran out of memory before")
        if predicted is None or p_oom is None:
            return FitVerdict("launch", micro_batch, None, None, "nothing is known of this memory group")
        if self.cap_bytes is None:
            return FitVerdict("launch", micro_batch, predicted, p_oom, "there is no cap")
        over = p_oom > threshold
        reason = (
            f"predicted peak {predicted / GIB_BYTES:.3g} GiB, P(OOM) {p_oom:.2f} {'>' if over else '<='} "
            f"{threshold:.2f} at a cap of {self.cap_bytes / GIB_BYTES:.3g} GiB"
        )
        return FitVerdict("refuse" if over else "launch", micro_batch, predicted, p_oom, reason)

    def _seen(self, group: MemoryGroup) -> tuple[int, int | None]:
        """Returns the largest micro-batch that fitted, 0 for none, and the smallest that did not.

        If it fits with gradients held, it fits without; if it does not fit without them, it does not with them.
        """
        held, bare = _held(group), _held(group, False)
        failed = [m for c in (bare, group) if (m := self._failed.get(c)) is not None]
        return max(self._fitted.get(held, 0), self._fitted.get(group, 0)), min(failed, default=None)

    def _hears(self, group: MemoryGroup) -> Observed:
        return self._told.setdefault(group, Observed())

    def _forget(self) -> None:
        self._needs.clear()
        self._fitting.clear()

    def _need(self, group: MemoryGroup) -> Need | None:
        if group not in self._needs:
            self._needs[group] = self._found(group)
        return self._needs[group]

    def _found(self, group: MemoryGroup) -> Need | None:
        """Returns the group's own profile, corrected, else that of the group that is most like it, else its peaks.

        Most like it is, in this order: holding gradients, where it holds none; one of other minor knobs; of two that it
        lies between, and that differ in one scaled knob alone, the larger.
        """
        told = self._told.get(group, Observed())
        own = self._profiles.get(group)
        if own is not None:
            last = own.points[-1].micro_batch if own.source == MEASURED else 0
            return corrected(Need(own, last), told, own=True)
        if group != (held := _held(group)) and (need := self._need(held)) is not None:
            return corrected(need, told)
        plain = self._without_minor(group)
        alike = self._plain.get(plain)
        if alike is not None and (need := self._need(alike)) is not None:
            return corrected(need._replace(least_spread=BORROWED_SPREAD_FRAC), told)
        beside = (self._between(plain, name) for name, _ in group if name in self.table.scaled)
        profile = next((found for found in beside if found is not None), None)
        if profile is not None:
            return corrected(Need(profile, 0), told)
        others = (self._told.get(other) for other in (group, held, _held(group, False)))
        peaks = next(({**o.least, **o.exact} for o in others if o is not None and (o.least or o.exact)), {})
        if not peaks:
            return None
        points = tuple(Point(m, size, size) for m, size in peaks.items())
        return corrected(Need(MemoryProfile(0, points, source="none"), 0), told)

    def _without_minor(self, group: MemoryGroup) -> MemoryGroup:
        return tuple(pair for pair in group if pair[0] not in self.table.by_memory["minor"])

    def _between(self, plain: MemoryGroup, name: str) -> MemoryProfile | None:
        """Returns the profile at the next smaller or larger value of this knob, all others equal, whichever needs more.

        A wider layer needs more, a larger stride less. None for a value outside of those that are known.
        """
        own = dict(plain)
        value = float(own[name])
        alike = {
            float(dict(other)[name]): self._profiles[group]
            for other, group in self._plain.items()
            if {**dict(other), name: own[name]} == own
        }
        smaller, larger = [other for other in alike if other < value], [other for other in alike if other > value]
        if not smaller or not larger:
            return None
        neighbours = (alike[max(smaller)], alike[min(larger)])
        size = min(one.points[-1].micro_batch for one in neighbours)
        return dataclasses.replace(max(neighbours, key=lambda one: one.capacity(size)), source="bound")


def _held(group: MemoryGroup, held: bool = True) -> MemoryGroup:
    """Returns the group with gradients held, or not; one that does not say is taken to hold them."""
    return tuple((name, held if name == GRADIENTS_HELD else value) for name, value in group)
