"""Part `memory`: predicted against real bytes of a training step, for kinds of model x type x checkpointing x size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_check import calibrate, foretell
from benchmarks.gpu_check.cards import free_bytes
from benchmarks.gpu_check.foretell import Coupling
from benchmarks.gpu_check.gauge import CAPACITY_TOLERANCE_FRAC, CPU_STEP_BYTES, Gauge
from benchmarks.gpu_check.kinds import GEMMA, GEMMA_SAMPLES, SMALL_GEMMA
from benchmarks.gpu_check.place import Kept, OutOfTime, Place
from benchmarks.memory_models import KINDS
from trainables.knobs import LOOP
from tuning.memory.allocator import STEP_BYTES
from tuning.memory.fitting import TIGHT
from tuning.memory.guard import MemoryGuard
from tuning.memory.profile import MemoryProfile, Point

ROW_S = 5.0
"""About what a row takes on a card; the model of 1 B parameters takes longer, and comes last."""


@dataclass(frozen=True)
class Extent:
    """Which kinds, types and micro-batches; the large kind has micro-batches of its own."""

    kinds: tuple[str, ...]
    dtypes: tuple[str, ...]
    micro_batches: tuple[int, ...]
    large: str
    large_micro_batches: tuple[int, ...]


CARD = Extent(tuple(KINDS), ("fp32", "bf16", "fp16"), (32, 256), GEMMA, (1, 2))
SMALL = Extent(("residual CNN",), ("fp32",), (16,), SMALL_GEMMA, (16,))  # a CPU may have to emulate bf16


def run(place: Place) -> dict[str, Any]:
    """Returns the rows, and the guess and the measured value of each constant."""
    extent = SMALL if place.small else CARD
    kept = Kept(place, "memory")
    constants = {} if place.small else kept.row("constants", calibrate.constants)
    found: dict[str, Any] = {"constants": constants, "finished": True}
    executor = foretell.pool(place)
    groups = _groups(extent)
    capability = capability_of(place)
    futures = [foretell.submit(executor, place, c, m, capability) for c, m in _alone(groups, extent.large)]
    try:
        for couplings, micro_batches in groups:
            _measure(place, kept, couplings, micro_batches)
    except OutOfTime:
        found["finished"] = False
    _, late = wait(futures, timeout=max(0.0, place.left_s))
    executor.shutdown(wait=False, cancel_futures=True)  # what is under way is kept on disk, for the next run
    found["finished"] = found["finished"] and not late
    done = [future for future in futures if future.done() and not future.cancelled()]
    said = foretell.answers(done)
    real = {key: row for key, row in kept if key != "constants"}
    found["rows"] = [joined(row, said.get(row["coupling"]), place.small) for row in real.values()]
    found["failed_predictions"] = [str(f.exception())[:300] for f in done if f.exception() is not None]
    return found


def capability_of(place: Place) -> tuple[int, int]:
    """Returns the card's compute capability; on a CPU one that is not used."""
    return (8, 6) if place.small else torch.cuda.get_device_capability(0)


Group = tuple[list[Coupling], tuple[int, ...]]


def _groups(extent: Extent) -> list[Group]:
    """Returns each kind's couplings and micro-batches; the large kind is the last."""
    most = max(extent.micro_batches)

    def couplings(kind: str, samples: int) -> list[Coupling]:
        return [Coupling(kind, dtype, on, samples) for dtype in extent.dtypes for on in (False, True)]

    small: list[Group] = [(couplings(kind, most), extent.micro_batches) for kind in extent.kinds]
    return [*small, (couplings(extent.large, GEMMA_SAMPLES), extent.large_micro_batches)]


def _alone(groups: Sequence[Group], large: str) -> list[Group]:
    """Returns what is predicted in one process each: a kind; of the large one each coupling, which takes a minute."""
    found: list[Group] = []
    if large == SMALL_GEMMA:  # few couplings: one process for all
        return [([c for couplings, _ in groups for c in couplings], groups[0][1])]
    for couplings, micro_batches in groups:
        alone = couplings[0].kind == large
        found += [([c], micro_batches) for c in couplings] if alone else [(couplings, micro_batches)]
    return found


def _measure(place: Place, kept: Kept, couplings: Sequence[Coupling], micro_batches: Sequence[int]) -> None:
    gauge: Gauge | None = None

    def row(coupling: Coupling, micro_batch: int) -> dict[str, Any]:
        nonlocal gauge
        gauge = gauge or Gauge(place.device, coupling.kind, coupling.samples)
        free = gauge.step(coupling.knobs, micro_batch)
        made = {"kind": coupling.kind, "coupling": coupling.label, "micro_batch": micro_batch}
        if not free.fits:
            return {**made, "failed": free.message, "free_bytes": free_bytes(place)}
        return {
            **made,
            "allocated_bytes": free.allocated_bytes,
            "reserved_bytes": free.reserved_bytes,
            "capacity_bytes": gauge.capacity_bytes(coupling.knobs, micro_batch, free),
        }

    try:
        for coupling in couplings:
            for micro_batch in micro_batches:

                def measured(c: Coupling = coupling, m: int = micro_batch) -> dict[str, Any]:
                    return row(c, m)

                kept.row(f"{coupling.label} {micro_batch}", measured, ROW_S)
    finally:
        if gauge is not None:
            gauge.close()


def joined(real: Mapping[str, Any], said: Mapping[str, Any] | None, small: bool) -> dict[str, Any]:
    """Returns a measured row with what was predicted, and `wrong`: whether it was said to fit where it just does not.

    Of one that ran out of memory `foretold`: whether it was said to need more than was free.

    That is asked of a card one step of the bisection smaller than the smallest that was enough.
    """
    row = dict(real)
    peak = said["peaks"].get(str(real["micro_batch"])) if said is not None else None
    if said is not None:
        row |= {"confidence": said["confidence"], "notes": said["notes"]}
    if peak is not None and "failed" in real:
        row["foretold"] = peak["capacity_bytes"] > int(real.get("free_bytes") or 0) > 0
    if peak is None or "failed" in real:
        return row
    row |= {f"predicted_{name}": value for name, value in peak.items()}
    step = max(CPU_STEP_BYTES if small else STEP_BYTES, int(CAPACITY_TOLERANCE_FRAC * real["capacity_bytes"]))
    point = Point(real["micro_batch"], peak["capacity_bytes"], peak["capacity_bytes"])
    profile = MemoryProfile(0, (point,), row["confidence"])
    p_oom = MemoryGuard(real["capacity_bytes"] - step, {(): profile}, LOOP).p_oom((), point.micro_batch) or 0.0
    row["wrong"] = p_oom <= TIGHT
    return row
