"""What fits, judged before it runs: predictions, corrected by what fitted and bounded by what ran out of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainables.knobs import Scalar
from tuning.memory.footprint import Footprint

Coupling = tuple[tuple[str, Scalar], ...]
"""The knobs that change what a sample or a parameter needs, as (name, value) pairs; see `stages.estimate.key_of`."""

MARGIN = 1.05
"""Refused is what is predicted within 5 % of the cap: fragmentation, workspaces and longer samples come on top."""

_GIB = 2**30


@dataclass(frozen=True)
class Verdict:
    """Whether a configuration is expected to fit; `predicted_bytes`, without margin, is None where nothing is known."""

    fits: bool
    predicted_bytes: int | None
    reason: str


class Frontier:
    """What is known of memory, by coupling. Knowing more never turns what was observed to fit into a refusal.

    `cap_bytes` is what tensors may take, None where there is no limit to judge by; then only observed OOMs refuse.
    """

    def __init__(self, cap_bytes: int | None, footprints: Mapping[Coupling, Footprint]) -> None:
        self.cap_bytes = cap_bytes
        self._footprints = dict(footprints)
        self._fitted: dict[Coupling, int] = {}
        self._failed: dict[Coupling, int] = {}
        self._correction: dict[Coupling, float] = {}

    def observe_fit(self, coupling: Coupling, micro_batch: int, peak_bytes: int) -> None:
        """Learns that a micro-batch fitted, and what it took.

        A peak above its prediction raises all predictions of the coupling by the same factor. One below does not lower
        them: footprints are of the longest samples, which the batches of a short trial may not have held.
        """
        self._fitted[coupling] = max(micro_batch, self._fitted.get(coupling, 0))
        footprint = self._footprints.get(coupling)
        if footprint is not None and (predicted := footprint.peak_bytes(micro_batch)) > 0:
            self._correction[coupling] = max(self._correction.get(coupling, 1.0), peak_bytes / predicted)

    def observe_oom(self, coupling: Coupling, micro_batch: int) -> None:
        """Learns that a micro-batch ran out of memory."""
        self._failed[coupling] = min(micro_batch, self._failed.get(coupling, micro_batch))

    def judge(self, coupling: Coupling, micro_batch: int) -> Verdict:
        """Returns whether a micro-batch is expected to fit. What fits, fits at every smaller micro-batch too.

        In this order: fits up to the largest that was observed to; does not from the smallest that ran out of memory;
        else the prediction with its margin against the cap.
        """
        predicted = self._predicted(coupling, micro_batch)
        fitted, failed = self._fitted.get(coupling, 0), self._failed.get(coupling)
        if micro_batch <= fitted:
            return Verdict(True, predicted, f"micro-batch {fitted} fitted before")
        if failed is not None and micro_batch >= failed:
            return Verdict(False, predicted, f"micro-batch {failed} ran out of memory before")
        if predicted is None:
            return Verdict(True, None, "nothing is known of this coupling")
        if self.cap_bytes is None:
            return Verdict(True, predicted, "there is no cap")
        if predicted * MARGIN > self.cap_bytes:
            reason = (
                f"predicted peak {predicted / _GIB:.2f} GiB + 5 % is over the cap of {self.cap_bytes / _GIB:.2f} GiB"
            )
            return Verdict(False, predicted, reason)
        return Verdict(True, predicted, f"predicted peak {predicted / _GIB:.2f} GiB + 5 % is under the cap")

    def overshoot_bytes(self, verdict: Verdict) -> int:
        """Returns by how much a refused configuration is over the cap, margin included, at least 1; 0 where it fits."""
        if verdict.fits:
            return 0
        wanted = (verdict.predicted_bytes or 0) * MARGIN
        return 1 if self.cap_bytes is None else max(1, round(wanted - self.cap_bytes))

    def _predicted(self, coupling: Coupling, micro_batch: int) -> int | None:
        footprint = self._footprints.get(coupling)
        if footprint is None:
            return None
        return round(footprint.peak_bytes(micro_batch) * self._correction.get(coupling, 1.0))
