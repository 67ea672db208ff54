"""What fits, judged before it runs: predictions, what they were found to be off by, and what fitted or did not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainables.knobs import Scalar
from tuning.memory.posterior import PRIORS, Posterior
from tuning.memory.profile import MemoryProfile, Point, Sizes, between

Coupling = tuple[tuple[str, Scalar], ...]
"""The knobs that change what a sample or a parameter needs, as (name, value) pairs; see `memory.groups.key_of`."""
Action = Literal["launch", "halve", "refuse"]

SCALED = ("hidden_size", "adapter_rank")
"""Knobs between whose measured values a footprint may be read off: bytes are about a power of them."""
GRADIENTS_HELD = "gradients_held"
"""The pair of a coupling that says whether gradients of earlier micro-steps are alive while a micro-step runs.

Without it, or where it is true, they are. A batch of one micro-step holds none, and needs no more.
"""
_GIB = 2**30


@dataclass(frozen=True)
class Costs:
    """What a mistake loses, in any one unit: `trial` by refusing one that fits, `oom` by launching one that does not.

    Refuse where P(OOM) * oom > (1 - P(OOM)) * trial. An OOM costs no more than its trial would have taken: it mostly
    comes in the first steps, and at the latest with the longest batch of the first epoch. A refusal costs no less than
    what is learned from the trial. Equal costs, hence a threshold of 0.5, which also makes the fewest mistakes.
    A probe ends with its first step where it does not fit (`PROBE_COSTS`).
    """

    trial: float = 1.0
    oom: float = 1.0

    @property
    def threshold(self) -> float:
        """Returns the P(OOM) up to which a trial is launched: V / (V + C)."""
        return self.trial / (self.trial + self.oom)


PROBE_COSTS = Costs(trial=4.0, oom=1.0)
"""Of a probe: whether the fastest fits is what it is for, and an OOM comes with its first steps.

In pointer four trainings ran out of memory after 0.2 to 0.3 s, where probes take 0.6 to 3.
"""


@dataclass(frozen=True)
class Verdict:
    """What to do with a configuration: launch it as it is, with the smaller `micro_batch`, or not at all.

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
    """What is known of memory, by coupling. Knowing more never turns what was observed to fit into a refusal.

    `cap_bytes` is what tensors may take, None where there is no limit to judge by; then only observed OOMs refuse.
    """

    def __init__(
        self, cap_bytes: int | None, footprints: Mapping[Coupling, MemoryProfile], costs: Costs | None = None
    ) -> None:
        self.cap_bytes, self.costs = cap_bytes, costs or Costs()
        self._footprints = dict(footprints)
        self._posteriors: dict[str, Posterior] = {}
        self._fitted: dict[Coupling, int] = {}
        self._failed: dict[Coupling, int] = {}
        self._fitting: dict[tuple[Coupling, int], int] = {}  # what was asked since something was observed

    def observe_fit(self, coupling: Coupling, micro_batch: int, peak_bytes: int, *, whole: bool = False) -> None:
        """Learns that a micro-batch fitted, and the most that was alive; 0 where nobody measured it.

        The peak of a `whole` training is its need. That of a shorter run, which may not have met the longest samples,
        says that the need is no less. What took more than this cap fitted a larger one, and is not known to fit here.
        """
        self._fitting.clear()
        if self.cap_bytes is None or peak_bytes <= self.cap_bytes:
            self._fitted[coupling] = max(micro_batch, self._fitted.get(coupling, 0))
        footprint = self._footprint(coupling)
        if peak_bytes > 0 and footprint is None:
            point = Point(micro_batch, peak_bytes, peak_bytes)
            self._footprints[_held(coupling)] = MemoryProfile(Sizes(0, 0, 0), (point,), source="none")
        elif peak_bytes > 0 and whole:
            self.observe_peak(coupling, micro_batch, peak_bytes)
        elif peak_bytes > 0 and footprint is not None:
            posterior = self._posterior(footprint, micro_batch)
            posterior.observe_above(coupling, footprint.peak(micro_batch), peak_bytes)
        elif footprint is not None and self.cap_bytes is not None:
            posterior = self._posterior(footprint, micro_batch)
            posterior.observe_below(coupling, footprint.capacity(micro_batch), self.cap_bytes)

    def observe_peak(self, coupling: Coupling, micro_batch: int, peak_bytes: int) -> None:
        """Learns the exact need of a micro-batch, whether or not the cap would hold it."""
        self._fitting.clear()
        footprint = self._footprint(coupling)
        if footprint is not None:
            self._posterior(footprint, micro_batch).observe_peak(coupling, footprint.peak(micro_batch), peak_bytes)

    def observe_oom(self, coupling: Coupling, micro_batch: int, cap_bytes: int | None = None) -> None:
        """Learns that a micro-batch ran out of memory, under `cap_bytes` where that was not this cap.

        Under a smaller one, such as a shared card's, it says that the need is more, and not that it does not fit here.
        """
        self._fitting.clear()
        cap_bytes = self.cap_bytes if cap_bytes is None else cap_bytes
        if self.cap_bytes is None or cap_bytes is None or cap_bytes >= self.cap_bytes:
            self._failed[coupling] = min(micro_batch, self._failed.get(coupling, micro_batch))
        footprint = self._footprint(coupling)
        if footprint is not None and cap_bytes is not None:
            posterior = self._posterior(footprint, micro_batch)
            posterior.observe_above(coupling, footprint.capacity(micro_batch), cap_bytes)

    def judge(
        self, coupling: Coupling, micro_batch: int, *, shrink: bool = False, costs: Costs | None = None
    ) -> Verdict:
        """Returns what to do with a micro-batch; `shrink` allows half of it, a quarter and so on.

        What fits, fits at every smaller micro-batch too, and less than a whole batch holds gradients. In this order:
        fits up to the largest that was observed to; does not from the smallest that ran out of memory; else P(OOM)
        against the threshold of the `costs`, by default the guard's own.
        """
        threshold = (costs or self.costs).threshold
        asked = verdict = self._judged(coupling, micro_batch, threshold)
        while shrink and not verdict.fits and verdict.micro_batch > 1:
            verdict = self._judged(_held(coupling), verdict.micro_batch // 2, threshold)
        if not verdict.fits:
            return asked
        if verdict.micro_batch == micro_batch:
            return asked
        reason = f"micro-batch {verdict.micro_batch} in the place of {micro_batch}, for which {asked.reason}"
        return dataclasses.replace(verdict, action="halve", reason=reason)

    def fitting(self, coupling: Coupling, micro_batch: int) -> int:
        """Returns the micro-batch at which `judge` with `shrink` lets it begin, 0 where it refuses.

        Says no more than that, and keeps it until something is observed: a search asks it of every trial it may choose,
        with all system knobs that it knows.
        """
        asked = coupling, micro_batch
        if asked not in self._fitting:
            while micro_batch and not self._launches(coupling, micro_batch):
                coupling, micro_batch = _held(coupling), micro_batch // 2
            self._fitting[asked] = micro_batch
        return self._fitting[asked]

    def overshoot_bytes(self, verdict: Verdict) -> int:
        """Returns by how much a refused configuration is expected to be over the cap, at least 1; 0 where it fits."""
        if verdict.fits:
            return 0
        return 1 if self.cap_bytes is None else max(1, (verdict.predicted_bytes or 0) - self.cap_bytes)

    def p_oom(self, coupling: Coupling, micro_batch: int) -> float | None:
        """Returns the probability that a training of this micro-batch runs out of memory, None where nothing is known.

        1 where parameters and the optimiser's state alone are over the cap. Never falls with the micro-batch.
        """
        footprint = self._footprint(coupling)
        if footprint is None or self.cap_bytes is None:
            return None if footprint is None else 0.0
        if footprint.floor_bytes > self.cap_bytes:
            return 1.0
        last = footprint.points[-1].micro_batch
        # Beyond the last measured point another prior holds; it may not know the prediction better than the first.
        sizes = {micro_batch, last} if micro_batch > last else {micro_batch}
        return max(self._posterior(footprint, m).p_oom(coupling, footprint.capacity(m), self.cap_bytes) for m in sizes)

    def predicted_bytes(self, coupling: Coupling, micro_batch: int) -> int | None:
        """Returns the need in the middle of what is thought possible, never below parameters and optimiser state."""
        footprint = self._footprint(coupling)
        if footprint is None:
            return None
        expected = self._posterior(footprint, micro_batch).expected_bytes(coupling, footprint.capacity(micro_batch))
        return max(footprint.floor_bytes, round(expected))

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _judged(self, coupling: Coupling, micro_batch: int, threshold: float) -> Verdict:
        predicted, p_oom = self.predicted_bytes(coupling, micro_batch), self.p_oom(coupling, micro_batch)
        fitted, failed = self._seen(coupling)
        if micro_batch <= fitted:
            return Verdict("launch", micro_batch, predicted, p_oom, f"micro-batch {fitted} fitted before")
        if failed is not None and micro_batch >= failed:
            return Verdict("refuse", micro_batch, predicted, 1.0, f"micro-batch {failed} ran out of memory before")
        if predicted is None or p_oom is None:
            return Verdict("launch", micro_batch, None, None, "nothing is known of this coupling")
        if self.cap_bytes is None:
            return Verdict("launch", micro_batch, predicted, p_oom, "there is no cap")
        over = p_oom > threshold
        reason = (
            f"predicted peak {predicted / _GIB:.3g} GiB, P(OOM) {p_oom:.2f} {'>' if over else '<='} "
            f"{threshold:.2f} at a cap of {self.cap_bytes / _GIB:.3g} GiB"
        )
        return Verdict("refuse" if over else "launch", micro_batch, predicted, p_oom, reason)

    def _launches(self, coupling: Coupling, micro_batch: int) -> bool:
        """Returns whether `_judged` says "launch"."""
        fitted, failed = self._seen(coupling)
        if micro_batch <= fitted:
            return True
        if failed is not None and micro_batch >= failed:
            return False
        p_oom = self.p_oom(coupling, micro_batch)
        return p_oom is None or p_oom <= self.costs.threshold

    def _seen(self, coupling: Coupling) -> tuple[int, int | None]:
        """Returns the largest micro-batch that fitted, 0 for none, and the smallest that did not.

        What fits with gradients held fits without, and what does not fit without them does not with them.
        """
        held, bare = _held(coupling), _held(coupling, False)
        fitted = self._fitted.get(held, 0)
        failed = [m for c in (bare, coupling) if (m := self._failed.get(c)) is not None]
        return max(fitted, self._fitted.get(coupling, 0)), min(failed, default=None)

    def _posterior(self, footprint: MemoryProfile, micro_batch: int) -> Posterior:
        source = footprint.prior_of(micro_batch)
        if source not in self._posteriors:  # a new one takes 0.1 ms, and this is asked at every judgement
            self._posteriors[source] = Posterior(PRIORS[source])
        return self._posteriors[source]

    def _footprint(self, coupling: Coupling) -> MemoryProfile | None:
        """Returns the coupling's own footprint, else one between two others that differ in one scaled knob alone.

        Where no gradients are held, and nothing is known of that, it is that of holding them.
        """
        own = self._footprints.get(coupling)
        if own is not None:
            return own
        if coupling != (held := _held(coupling)):
            return self._footprint(held)
        around = (self._around(coupling, name) for name, _ in coupling if name in SCALED)
        return next((footprint for footprint in around if footprint is not None), None)

    def _around(self, coupling: Coupling, name: str) -> MemoryProfile | None:
        """Returns the footprint read off between the nearest ones below and above in this knob, all others equal."""
        own = dict(coupling)
        value = float(own[name])
        alike = [
            (float(dict(other)[name]), footprint)
            for other, footprint in self._footprints.items()
            if footprint.source != "none" and {**dict(other), name: own[name]} == own
        ]
        low = max((pair for pair in alike if pair[0] < value), key=lambda pair: pair[0], default=None)
        high = min((pair for pair in alike if pair[0] > value), key=lambda pair: pair[0], default=None)
        return None if low is None or high is None else between(low, high, value)


def _held(coupling: Coupling, held: bool = True) -> Coupling:
    """Returns the coupling with gradients held, or not; one that does not say is taken to hold them."""
    return tuple((name, held if name == GRADIENTS_HELD else value) for name, value in coupling)
