"""Stage 5: what every optimisation bought here, measured in pairs, alone on the machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tuning.journal.records import Journal, Record
from tuning.search.ablation import AblationPair, receipts
from tuning.search.protocols import Told, Windows


def measure(
    profiler: Windows, journal: Journal, pairs: Sequence[AblationPair], rounds: int, window_s: float, told: Told
) -> None:
    """Measures each pair `rounds` times, both sides one after the other on the same batches.

    Rounds are outermost, so that a slow minute of the machine falls on every pair alike, and which side goes first
    changes from round to round. What the journal holds of this ablation already is not measured again.
    """
    for number, pair in list(lacking(journal.records, pairs, rounds)):
        sides = {"with": pair.with_, "without": pair.without}
        order = ("with", "without") if number % 2 == 0 else ("without", "with")
        found = {side: profiler.window(sides[side], window_s, seed=number) for side in order}
        on, off = pair.values()
        told(
            journal.append(
                "receipt",
                base=pair.base,
                knobs=pair.label,
                round=number,
                value=on,
                instead_of=off,
                **{f"{side}_samples_per_s": found[side]["samples_per_s"] for side in sides},
                **{f"{side}_outcome": found[side]["outcome"] for side in sides},
                **{f"{side}_peak_bytes": found[side].get("peak_allocated_bytes") for side in sides},
            )
        )


def lacking(
    records: Sequence[Record], pairs: Sequence[AblationPair], rounds: int
) -> Iterator[tuple[int, AblationPair]]:
    """Yields what is still to be measured: rounds, and the pairs of each."""
    have = {(r["base"], r["knobs"], r["round"]) for r in receipts(records)[1]}
    yield from ((n, pair) for n in range(rounds) for pair in pairs if (pair.base, pair.label, n) not in have)
