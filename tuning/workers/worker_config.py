"""What a process of a study is told before it does anything. No torch: the study that says it has no use for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Shrink = Literal["", "loader", "all"]
"""What a trial that ran out of memory may change to begin again: nothing, the loader's knobs, the micro-batch too."""


@dataclass(frozen=True)
class WorkerConfig:
    """What a process must know to do any work of a study.

    `cap_bytes` is what the card holds for tensors, None where the device itself is the limit; `threads` are torch's.
    """

    workload: str
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    threads: int = 1
    cap_bytes: int | None = None
    seed: int = 0
