"""What each optimisation buys: pairs of configurations, the best minus one and `before` plus one, in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainables.knobs import Knobs, Scalar, is_active, kind_of, table
from tuning.journal.records import Journal, Record
from tuning.memory.groups import micro_batch_of
from tuning.search.protocols import Profiler, Told

BATCHES = ("batch_size", "micro_batch_size")
"""Two knobs that documents speak of as one; they are also changed together."""


@dataclass(frozen=True)
class AblationPair:
    """Two configurations that differ in `knobs` only: `with_` has what the best has, `without` what `before` has.

    `base` names the configuration that the other was made from: best, or what it is compared with.
    """

    base: str
    knobs: tuple[str, ...]
    with_: Mapping[str, Scalar]
    without: Mapping[str, Scalar]

    @property
    def label(self) -> str:
        """Returns the knobs' names, joined by " + "."""
        return " + ".join(self.knobs)

    def values(self) -> tuple[str, str]:
        """Returns what the knobs are with and without the optimisation, in words."""
        with_, without = Knobs.of(self.with_).as_dict(), Knobs.of(self.without).as_dict()
        return "/".join(word(with_[n]) for n in self.knobs), "/".join(word(without[n]) for n in self.knobs)


def pairs(
    best: Mapping[str, Scalar], before: Mapping[str, Scalar], name: str = "before"
) -> tuple[list[AblationPair], dict[str, str]]:
    """Returns the pairs to measure, and for each knob of which one side cannot be measured, the reason in words.

    `name` is what `before` is called.
    Knobs that change what is learned and not how fast are left out; the batch size changes both.
    """
    full_best, full_before = Knobs.of(best).as_dict(), Knobs.of(before).as_dict()
    differing = [n for n in table() if full_best[n] != full_before[n] and (kind_of(n) != "learning" or n in BATCHES)]
    groups: list[tuple[str, ...]] = [(n,) for n in differing]
    if all(n in differing for n in BATCHES):
        groups.append(BATCHES)
    found, idle = list[AblationPair](), dict[str, str]()
    for names in groups:
        less = settled({**full_best, **{n: full_before[n] for n in names}})
        more = settled({**full_before, **{n: full_best[n] for n in names}})
        for pair in (
            AblationPair("best", names, settled(full_best), less),
            AblationPair(name, names, more, settled(full_before)),
        ):
            if pair.with_ == pair.without:
                idle[f"{pair.base}: {pair.label}"] = "changes nothing there, beside its other knobs"
            else:
                found.append(pair)
    return found, idle


def receipts(records: Sequence[Record]) -> tuple[Mapping[str, Any], list[Record]]:
    """Returns what was ablated last, and the `receipt` records of it, whenever they were made.

    What was ablated is the best and what it is compared with, the device, and the length of a window; empty where the
    records do not say.
    """
    of, found = dict[str, Any](), list[tuple[Mapping[str, Any], Record]]()
    for record in records:
        if record.event == "ablation":
            of = record.get("of") or {}
        elif record.event == "receipt":
            found.append((of, record))
    return of, [record for own, record in found if own == of]


def measure(
    profiler: Profiler, journal: Journal, pairs: Sequence[AblationPair], rounds: int, window_s: float, told: Told
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


def settled(knobs: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Returns the knobs as a run takes them: none without effect, the micro-batch no larger than the batch."""
    full = {**Knobs.of(knobs).as_dict(), "micro_batch_size": micro_batch_of(knobs)}
    return {name: value for name, value in full.items() if is_active(name, full)}


def word(value: Scalar) -> str:
    """Returns a value as records of an ablation have it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
