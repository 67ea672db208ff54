"""The machine's load while a window was measured: the card through NVML, processor and memory through psutil.

A `TelemetryReader` is asked when a window closes, so nothing runs beside the training: no thread, no timer. Counters
(processor seconds) are exact over the window; gauges (utilisation, power, temperature, clock) are what NVML
holds at its end, means over its own last sixth of a second to a second.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from tuning.journal.events import Facts
from tuning.workers import machine
from tuning.workers.nvml import NvmlCard

MEANS = ("gpu_sm_frac", "power_w", "sm_clock_mhz")
"""Gauges summed up as means over time."""


class TelemetryReader:
    """Reads the machine at the end of each window; what cannot be read is None and never an error."""

    def __init__(
        self,
        device: str,
        uuid: str = "",
        counters: Mapping[str, Callable[[], float]] | None = None,
        nvml: Any = None,
    ) -> None:
        """`uuid` is the card's as torch has it, "" for the first card; `nvml` stands in for the module `pynvml`.

        `counters`, which only grow, are counted beside our own, by name.
        """
        self._more = dict(counters or {})
        self._card = NvmlCard(nvml, uuid) if device == "cuda" else None
        self.begin()

    def begin(self) -> None:
        """Forgets all readings and starts an interval."""
        self._readings, self._wall_s = 0, 0.0
        self._counted: dict[str, float] = {}
        self._gauged = defaultdict[str, list[tuple[float, float]]](list)
        self._throttled: set[str] = set()
        self.skip()

    def skip(self) -> None:
        """Starts an interval here; the time since the last reading counts for no interval."""
        self._opened, self._counters = time.perf_counter(), self._count()

    def read(self) -> None:
        """Adds what happened since the last reading, and starts the next interval."""
        now, counters = time.perf_counter(), self._count()
        wall_s = max(now - self._opened, 1e-9)
        for name, value in counters.items():
            self._counted[name] = self._counted.get(name, 0.0) + max(0.0, value - self._counters[name])
        if self._card is not None:
            for name, gauge in self._card.gauges().items():
                if gauge is not None:
                    self._gauged[name].append((gauge, wall_s))
            self._throttled |= self._card.throttled()
        self._readings, self._wall_s = self._readings + 1, self._wall_s + wall_s
        self._opened, self._counters = now, counters

    def summary(self) -> Facts:
        """Returns the readings since `begin` by name, nothing without any.

        Their number and `wall_s`; of the processor seconds of all cores the share that was busy (`machine_cpu_frac`),
        and what other virtual machines took (`steal_frac`); means over time of `MEANS`, the highest `temperature_c`,
        all of the given counters, each reason in `throttled`. Names of the card are there on CUDA alone.
        """
        if not self._readings:
            return {}
        found: dict[str, object] = {"readings": self._readings, "wall_s": self._wall_s}
        whole_s = self._counted["whole_s"]
        for name, part in (("machine_cpu_frac", "busy_s"), ("steal_frac", "steal_s")):
            found[name] = self._counted[part] / whole_s if whole_s else None
        if self._card is not None:
            for name in MEANS:
                pairs = self._gauged[name]
                found[name] = sum(v * s for v, s in pairs) / sum(s for _, s in pairs) if pairs else None
            found["temperature_c"] = max((v for v, _ in self._gauged["temperature_c"]), default=None)
            found["throttled"] = sorted(self._throttled)
        return found | {name: self._counted[name] for name in self._more}

    def _count(self) -> dict[str, float]:
        """Returns the counters."""
        return {**machine.processor()._asdict(), **{name: count() for name, count in self._more.items()}}
