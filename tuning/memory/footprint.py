"""What a training step needs, as a line in the micro-batch size. Plain arithmetic: no torch, no device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Footprint:
    """Bytes of one memory coupling (dtype, checkpointing, adapter): what is there once, and what each sample adds.

    `fixed_bytes` is what the other three do not explain. It may be negative: at the peak not all of them need be alive.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    fixed_bytes: int
    bytes_per_sample: int

    @classmethod
    def from_measured(
        cls, parameter_bytes: int, gradient_bytes: int, optimizer_bytes: int, measured: Sequence[tuple[int, int]]
    ) -> Footprint:
        """Returns the footprint through measured (micro-batch, peak bytes) pairs.

        Least squares for the slope, never negative; the line is then raised until no measurement lies above it.
        One micro-batch size gives no slope: all that the sizes leave unexplained then counts as the samples', which is
        too much for larger micro-batches rather than too little.
        """
        if not measured or any(m < 1 or b < 0 for m, b in measured):
            raise ValueError(
                f"expected pairs of micro-batch >= 1 and peak bytes >= 0, at least one, got {list(measured)}"
            )
        static = parameter_bytes + gradient_bytes + optimizer_bytes
        sizes = np.array([m for m, _ in measured], dtype=np.float64)
        peaks = np.array([b for _, b in measured], dtype=np.float64)
        centred = sizes - sizes.mean()
        if centred.any():
            slope = round(float((centred @ peaks) / (centred @ centred)))
        else:
            slope = -(-max(0, max(b for _, b in measured) - static) // measured[0][0])
        slope = max(0, slope)
        fixed = max(b - slope * m for m, b in measured) - static
        return cls(parameter_bytes, gradient_bytes, optimizer_bytes, fixed, slope)

    def peak_bytes(self, micro_batch: int) -> int:
        """Returns the predicted peak of a step of `micro_batch` samples; never below 0."""
        return max(0, self._static_bytes + self.bytes_per_sample * micro_batch)

    @property
    def _static_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.fixed_bytes
