"""What the predictor says of many configurations, several processes at a time; neither torch nor a card is needed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.place import Place
from trainables.knobs import LOOP, Scalar
from tuning.memory.fitting import Kernels, fit, needed_bytes
from tuning.memory.prediction import Prediction
from tuning.memory.predictor import Request, predict_all

REF = "benchmarks.gpu_check.kinds"
MOST_PROCESSES = 8
TIMEOUT_S = 400.0


@dataclass(frozen=True)
class Coupling:
    """A kind of model and the knobs that its memory depends on beside the micro-batch; `samples` of its data set."""

    kind: str
    amp_dtype: str
    checkpointing: bool
    samples: int

    @property
    def knobs(self) -> dict[str, Scalar]:
        """Returns the knobs."""
        return {"amp_dtype": self.amp_dtype, "activation_checkpointing": self.checkpointing}

    @property
    def label(self) -> str:
        """Returns it in words."""
        return f"{self.kind} {self.amp_dtype}{' checkpointed' if self.checkpointing else ''}"

    def request(self, kernels: Kernels, capability: tuple[int, int]) -> Request:
        """Returns what to ask of the predictor."""
        return Request(REF, {"kind": self.kind, "samples": self.samples}, self.knobs, kernels, capability)


def pool(place: Place) -> ProcessPoolExecutor:
    """Returns processes to predict in, as many as the cores beside the measuring one carry."""
    count = 1 if place.small else max(1, min(MOST_PROCESSES, place.cores - 2))
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def submit(
    executor: ProcessPoolExecutor,
    place: Place,
    couplings: Sequence[Coupling],
    micro_batches: Sequence[int],
    capability: tuple[int, int],
) -> Future[dict[str, dict[str, Any]]]:
    """Returns the answers to be: label -> `foretold`, of couplings whose traces share a process."""
    kernels: Kernels = "cpu" if place.small else "cuda"
    cache = place.out / "predictions" / place.revision
    return executor.submit(foretold, list(couplings), tuple(micro_batches), kernels, capability, cache)


def foretold(
    couplings: Sequence[Coupling],
    micro_batches: Sequence[int],
    kernels: Kernels,
    capability: tuple[int, int],
    cache: Path,
) -> dict[str, dict[str, Any]]:
    """Returns confidence, notes and by micro-batch the peak's bytes of each coupling, by its label."""
    requests = [c.request(kernels, capability) for c in couplings]
    answers = predict_all(requests, LOOP, timeout_s=TIMEOUT_S, cache=cache)
    return {
        coupling.label: {
            "confidence": answer.confidence,
            "notes": list(answer.notes),
            "peaks": {str(m): found for m in micro_batches if (found := _peak(answer, m, kernels)) is not None},
        }
        for coupling, answer in zip(couplings, answers, strict=True)
    }


def _peak(prediction: Prediction, micro_batch: int, kernels: Kernels) -> dict[str, Any] | None:
    peak = prediction.peak(micro_batch) if prediction.traces else None
    if peak is None:
        return None
    return {
        "allocated_bytes": peak.live_bytes if kernels == "cpu" else peak.allocated_bytes,
        "reserved_bytes": None if kernels == "cpu" else peak.reserved_bytes,
        "capacity_bytes": needed_bytes(peak, kernels),
        "phase": peak.phase,
    }


def ladder(
    coupling: Coupling, kernels: Kernels, capability: tuple[int, int], cap_bytes: int, cache: Path
) -> list[dict[str, Any]]:
    """Returns what is said of micro-batches around the largest that fits a card: half of it, it, and 1.3 and 2 times.

    Each is {"micro_batch", "needed_bytes", "said"}; where not one fits, sizes 1 and 2. Empty without a prediction.
    """
    prediction = predict_all([coupling.request(kernels, capability)], LOOP, timeout_s=TIMEOUT_S, cache=cache)[0]
    if not prediction.traces:
        return []
    largest = fit({}, prediction, (1, 2), cap_bytes, kernels).largest or 0
    sizes = sorted({max(1, largest // 2), max(1, largest), largest + max(1, largest * 3 // 10), max(2, 2 * largest)})
    cells = fit({}, prediction, sizes, cap_bytes, kernels).cells
    return [{"micro_batch": c.micro_batch, "needed_bytes": c.needed_bytes, "said": c.verdict} for c in cells]


def answers(futures: Sequence[Future[dict[str, dict[str, Any]]]]) -> Mapping[str, dict[str, Any]]:
    """Returns all answers by label, once they are there; a process that failed leaves its couplings out."""
    found: dict[str, dict[str, Any]] = {}
    for future in futures:
        if future.exception() is None:
            found |= future.result()
    return found
