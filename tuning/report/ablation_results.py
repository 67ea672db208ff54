"""What each optimisation bought, from the `receipt` records of an ablation: one result for each measured pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuning.journal.records import Record
from tuning.search.ablation import receipts
from tuning.stats import uncertainty
from tuning.stats.uncertainty import Gain


@dataclass(frozen=True)
class AblationResult:
    """What `knobs` bought at `base`: speed with `value` over speed with `instead_of`, and the same of peak memory.

    `gain` is None where one side did not run; `why` then says how it ended.
    """

    base: str
    knobs: str
    value: str
    instead_of: str
    gain: Gain | None
    memory_ratio: float | None
    why: str

    @property
    def verdict(self) -> str:
        """Returns in words whether it bought speed here."""
        if self.gain is None:
            return self.why
        if not self.gain.is_told:
            return "nothing that the rounds can tell"
        return "faster" if self.gain.ratio > 1 else "slower"


def ablation_results(records: Sequence[Record], best: Mapping[str, Any] | None = None) -> tuple[AblationResult, ...]:
    """Returns a result for each pair that was measured, those at the best first, by what they bought.

    There is none where another configuration than `best` was ablated, as before a study went on.
    """
    of, found = receipts(records)
    if best is not None and of.get("best", best) != best:
        return ()
    by_pair: dict[tuple[str, str], list[Record]] = {}
    for record in found:
        by_pair.setdefault((str(record["base"]), str(record["knobs"])), []).append(record)
    results = [_result(base, knobs, rounds) for (base, knobs), rounds in by_pair.items()]
    return tuple(sorted(results, key=lambda r: (r.base != "best", -(r.gain.ratio if r.gain else 0.0), r.knobs)))


def _result(base: str, knobs: str, rounds: Sequence[Record]) -> AblationResult:
    outcomes = {str(r.get(f"{side}_outcome")) for r in rounds for side in ("with", "without")}
    peaks = _pairs(rounds, "peak_bytes")
    return AblationResult(
        base=base,
        knobs=knobs,
        value=str(rounds[-1].get("value", "")),
        instead_of=str(rounds[-1].get("instead_of", "")),
        gain=uncertainty.gain("with", "without", _pairs(rounds, "samples_per_s")),
        memory_ratio=max((a / b for a, b in peaks), default=None),
        why=", ".join(sorted(outcomes - {"ok"})) or "not measured",
    )


def _pairs(rounds: Sequence[Record], key: str) -> list[tuple[float, float]]:
    """Returns (with, without) of the rounds in which both sides have that figure."""
    both = [(r.get(f"with_{key}"), r.get(f"without_{key}")) for r in rounds]
    return [(float(a), float(b)) for a, b in both if a and b]
