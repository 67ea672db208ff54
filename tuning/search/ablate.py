"""Stage 5: what every optimisation bought here, measured in pairs, alone on the machine."""

from __future__ import annotations

from collections.abc import Sequence

from tuning.journal.records import Journal
from tuning.search.ablation import AblationPair
from tuning.search.protocols import Told, Windows


def measure(
    profiler: Windows, journal: Journal, pairs: Sequence[AblationPair], rounds: int, window_s: float, told: Told
) -> None:
    """Measures each pair `rounds` times, both sides one after the other on the same batches.

    Rounds are outermost, so that a slow minute of the machine falls on every pair alike, and which side goes first
    changes from round to round. What the journal holds already is not measured again.
    """
    have = {(r["base"], r["knobs"], r["round"]) for r in journal.records if r.event == "receipt"}
    for number in range(rounds):
        for pair in pairs:
            if (pair.base, pair.label, number) in have:
                continue
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
