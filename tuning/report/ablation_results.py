"""What each optimisation bought, from the records of the ablation: one receipt for each pair of configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tuning.journal.records import Record
from tuning.stats import uncertainty
from tuning.stats.uncertainty import Gain


@dataclass(frozen=True)
class Receipt:
    """What `knobs` bought at `base`: speed with `value` over speed with `instead_of`, and the same of peak memory.

    `gain` is None where one side did not run; `why` then says how it ended. `claim` is what a document says it buys.
    """

    base: str
    knobs: str
    value: str
    instead_of: str
    gain: Gain | None
    memory_ratio: float | None
    why: str
    claim: str

    @property
    def verdict(self) -> str:
        """Returns in words whether it bought speed here."""
        if self.gain is None:
            return self.why
        if not self.gain.is_told:
            return "nothing that the rounds can tell"
        return "faster" if self.gain.ratio > 1 else "slower"


def receipts(records: Sequence[Record], claims: Mapping[str, str]) -> tuple[Receipt, ...]:
    """Returns a receipt for each pair that was measured, those at the best first, by what they bought."""
    by_pair: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.event == "receipt":
            by_pair.setdefault((str(record["base"]), str(record["knobs"])), []).append(record)
    found = [_receipt(base, knobs, rounds, claims.get(knobs, "")) for (base, knobs), rounds in by_pair.items()]
    return tuple(sorted(found, key=lambda r: (r.base != "best", -(r.gain.ratio if r.gain else 0.0), r.knobs)))


def _receipt(base: str, knobs: str, rounds: Sequence[Record], claim: str) -> Receipt:
    rates = [
        (float(r["with_samples_per_s"]), float(r["without_samples_per_s"]))
        for r in rounds
        if r.get("with_samples_per_s") and r.get("without_samples_per_s")
    ]
    failed = [r.get(f"{side}_outcome") for r in rounds for side in ("with", "without")]
    ends = sorted({str(outcome) for outcome in failed if outcome != "ok"})
    peaks = [
        r["with_peak_bytes"] / r["without_peak_bytes"]
        for r in rounds
        if r.get("with_peak_bytes") and r.get("without_peak_bytes")
    ]
    return Receipt(
        base=base,
        knobs=knobs,
        value=str(rounds[-1].get("value", "")),
        instead_of=str(rounds[-1].get("instead_of", "")),
        gain=uncertainty.gain("with", "without", rates),
        memory_ratio=max(peaks) if peaks else None,
        why=", ".join(ends) or "not measured",
        claim=claim,
    )
