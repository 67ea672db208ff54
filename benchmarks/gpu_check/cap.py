"""Part `cap`: virtual cards of 8 and 24 GB. What fits and what fails against prediction; failing in each phase."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu_check import foretell
from benchmarks.gpu_check.cards import caps, free_bytes
from benchmarks.gpu_check.foretell import Coupling
from benchmarks.gpu_check.gauge import Gauge
from benchmarks.gpu_check.kinds import GEMMA, GEMMA_SAMPLES, SMALL_GEMMA
from benchmarks.gpu_check.memory import capability_of
from benchmarks.gpu_check.place import ROOT, Kept, OutOfTime, Place
from trainables.knobs import Scalar
from trainables.plan import Plan
from trainables.workload_files import load
from tuning.memory.fitting import Kernels
from tuning.search.protocols import TrialState
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

GREEDY = ROOT / "tests" / "data" / "greedy.py"
PLACES = ("forward", "backward", "optimizer", "evaluation", "loader")
TIMES = 128
"""On CUDA all that is greedy is so many times larger than on a CPU: a cap of 448 MiB, beside which cuBLAS is small."""
ROUNDS = {"cuda": 10, "cpu": 2}


def run(place: Place) -> dict[str, Any]:
    """Returns what was said of each configuration and what came of it, and how each phase recovered."""
    kept = Kept(place, "cap")
    found: dict[str, Any] = {"caps": caps(place, free_bytes(place)), "fits": [], "phases": [], "finished": True}
    try:
        # First, since the process that recovers is to be one like a trial's.
        found["phases"] = kept.row("phases", lambda: list(recovered(place)))
        for coupling in _couplings(place):
            for card, cap_bytes in found["caps"].items():
                found["fits"] += _held_to(place, kept, coupling, card, cap_bytes)
    except OutOfTime:
        found["finished"] = False
    return found


def _couplings(place: Place) -> list[Coupling]:
    """Returns what is held to the cards: a large decoder with adapters, and one of torch's own layers."""
    if place.small:
        return [Coupling(SMALL_GEMMA, "fp32", True, GEMMA_SAMPLES)]  # which part `memory` has traced already
    dora = [
        Coupling(GEMMA, dtype, on, GEMMA_SAMPLES) for dtype, on in (("bf16", False), ("bf16", True), ("fp32", True))
    ]
    return [*dora, Coupling("decoder LM", "bf16", False, 30_000)]


def _held_to(place: Place, kept: Kept, coupling: Coupling, card: str, cap_bytes: int) -> list[dict[str, Any]]:
    """Returns a row for each micro-batch around the largest that is said to fit."""
    kernels: Kernels = "cpu" if place.small else "cuda"
    cache = place.out / "predictions" / place.revision

    def measured() -> list[dict[str, Any]]:
        said = foretell.ladder(coupling, kernels, capability_of(place), cap_bytes, cache)
        gauge = Gauge(place.device, coupling.kind, coupling.samples)
        rows = []
        for one in said:
            if one["micro_batch"] > coupling.samples:
                continue
            reached = gauge.step(coupling.knobs, one["micro_batch"], cap_bytes)
            came = "fits" if reached.fits else "OOM"
            row = {"card": card, "cap_bytes": cap_bytes, "coupling": coupling.label, **one}
            rows.append({**row, "came": came, "allocated_bytes": reached.allocated_bytes, "message": reached.message})
        gauge.close()
        return rows

    rows: list[dict[str, Any]] = kept.row(f"{coupling.label} on {card}", measured, 40.0 if not place.small else 0.0)
    return rows


def recovered(place: Place) -> Iterator[dict[str, Any]]:
    """Yields a row for each trial that failed where it was told to, and the one after it, in one process.

    `next_s` goes from the failure to the first step of the next trial; `left_bytes` is what the process held beside its
    model in between.
    """
    where: Mapping[str, float] = vars(inspect.getmodule(type(load(str(GREEDY)))))["WHERE"]
    times = 1 if place.small else TIMES
    cap_bytes = times * 7 * 2**19
    session = Session(WorkerConfig(str(GREEDY), {"times": times}, place.device, threads=1, cap_bytes=cap_bytes))
    plan = Plan(64, (64,), cap_bytes=cap_bytes)

    def train(place_name: str) -> TrialState:
        knobs: dict[str, Scalar] = {"learning_rate": 0.01, "batch_size": 16, "micro_batch_size": 8}
        knobs |= {"augmentation": where[place_name], "num_workers": int(place_name == "loader")}
        return session.train(knobs, plan, place.seed, shrink="")

    session.warm({})
    train("nowhere")
    for number in range(ROUNDS[place.device] + 1):
        for phase in PLACES:
            failed = train(phase)
            then = train("nowhere")
            if number:  # the first failure of a process imports what only failures need
                yield {
                    "phase": phase,
                    "outcome": failed.outcome,
                    "then": then.outcome,
                    "retired": failed.retire,
                    "next_s": then.first_step_at - (failed.failed_at or time.time()),
                    "left_bytes": None if failed.held_bytes is None else failed.held_bytes - failed.own_bytes,
                }
