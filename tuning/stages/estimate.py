"""Stage 1: what every coupling of memory knobs needs, and so what fits the card before anything is trained."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from trainables.knobs import Knobs, Scalar
from tuning.memory.footprint import Footprint
from tuning.memory.frontier import Frontier
from tuning.records import Journal, Record
from tuning.space import Choice, Space
from tuning.stages.bench import Bench

MEMORY_KNOBS = ("amp_dtype", "activation_checkpointing", "adapter", "adapter_rank")
"""Knobs that change what a sample or a parameter needs; the micro-batch size multiplies it."""
MICRO_BATCHES = (2, 8)
"""Two sizes give the line of peak over micro-batch; small ones, so that measuring never is what does not fit."""


def key_of(knobs: Mapping[str, Scalar]) -> tuple[tuple[str, Scalar], ...]:
    """Returns the memory coupling of a configuration, defaults filled in."""
    full = Knobs.of(knobs).as_dict()
    return tuple((name, full[name]) for name in MEMORY_KNOBS)


def micro_batch_of(knobs: Mapping[str, Scalar]) -> int:
    """Returns the samples of a configuration's micro-step: no more than its batch has."""
    full = Knobs.of(knobs)
    return min(full.micro_batch_size, full.batch_size)


def couplings(space: Space) -> list[dict[str, Scalar]]:
    """Returns every combination of memory knobs the space can ask for."""
    values = [p.values if isinstance(p := space.parameters.get(n), Choice) else (None,) for n in MEMORY_KNOBS]
    combined = []
    for combination in itertools.product(*values):
        asked = {n: v for n, v in zip(MEMORY_KNOBS, combination, strict=True) if v is not None}
        combined.append({**{n: space.fixed[n] for n in MEMORY_KNOBS if n in space.fixed}, **asked})
    return combined


def estimate(bench: Bench, space: Space, journal: Journal, cap_bytes: int | None) -> None:
    """Measures each coupling's footprint on its longest samples, and writes what it found."""
    known = {key_of(r["coupling"]) for r in journal.records if r.event == "footprint"}
    for coupling in couplings(space):
        if key_of(coupling) in known:
            continue
        found = bench.footprint(coupling, MICRO_BATCHES)
        sizes = {n: int(found[n]) for n in ("parameter_bytes", "gradient_bytes", "optimizer_bytes")}
        measured = [(int(m), int(b)) for m, b in found["measured"]]
        if not measured:  # not even the smallest fits: its need is at least the cap
            measured = [(MICRO_BATCHES[0], (cap_bytes or 0) + 1)]
        print_ = Footprint.from_measured(**sizes, measured=measured)
        journal.append(
            "footprint",
            coupling=coupling,
            **sizes,
            fixed_bytes=print_.fixed_bytes,
            bytes_per_sample=print_.bytes_per_sample,
            measured=measured,
            message=found["message"],
        )


def frontier(records: list[Record], cap_bytes: int | None) -> Frontier:
    """Returns the frontier as the records have it: footprints, what fitted, what ran out of memory."""
    footprints = {
        key_of(r["coupling"]): Footprint(
            parameter_bytes=r["parameter_bytes"],
            gradient_bytes=r["gradient_bytes"],
            optimizer_bytes=r["optimizer_bytes"],
            fixed_bytes=r["fixed_bytes"],
            bytes_per_sample=r["bytes_per_sample"],
        )
        for r in records
        if r.event == "footprint"
    }
    learned = Frontier(cap_bytes, footprints)
    for record in records:
        if record.event == "oom":
            learn(learned, record["config"], "oom", 0)
        elif record.event in ("probe", "trial"):
            learn(learned, record["config"], str(record["outcome"]), int(record.get("peak_allocated_bytes") or 0))
    return learned


def learn(learned: Frontier, knobs: Mapping[str, Scalar], outcome: str, peak_bytes: int) -> None:
    """Adds one observation to the frontier."""
    micro_batch = micro_batch_of(knobs)
    if outcome == "oom":
        learned.observe_oom(key_of(knobs), micro_batch)
    elif outcome in ("ok", "stopped") and peak_bytes > 0:
        learned.observe_fit(key_of(knobs), micro_batch, peak_bytes)
