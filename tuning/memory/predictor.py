"""Stands in until the predictor's process is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainables.knobs import Scalar
from tuning.memory.prediction import Prediction


@dataclass(frozen=True)
class Request:
    workload: str
    options: Mapping[str, Any]
    knobs: Mapping[str, Scalar]
    kernels: Literal["cuda", "cpu"]
    capability: tuple[int, int] = (8, 6)


def default_cache() -> Path | None:
    return None


def predict(request: Request, *, timeout_s: float = 120.0, cache: Path | None = None) -> Prediction:
    return Prediction("none", ("there is no predictor here",), (), 0.0)
