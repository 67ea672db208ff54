"""What the machine did while a window was measured: the card through NVML, processor and memory through psutil.

A `TelemetryReader` is asked when a window closes, so nothing runs beside the training: no thread, no timer. Counters
(processor seconds, energy) are exact over the window; gauges (utilisation, power, temperature, clock) are what NVML
holds at its end, means over its own last sixth of a second to a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuning.workers import machine
from tuning.workers.nvml import NvmlCard

MEANS = ("gpu_sm_frac", "power_w", "sm_clock_mhz")
"""Gauges summed up as means over time."""
RATES = ("machine_cpu_frac", "steal_frac")
"""Shares of the processor seconds of all cores: what was busy, and what other virtual machines took."""
Counter = Callable[[], float]
"""Returns something that only grows."""


@dataclass(frozen=True)
class Reading:
    """One interval: its seconds, each figure by name (None where it is not told), why the card was slowed."""

    wall_s: float
    figures: Mapping[str, float | None]
    throttled: frozenset[str] = frozenset()


class TelemetryReader:
    """Reads the machine at the end of each window; what cannot be read is None and never an error."""

    def __init__(
        self,
        device: str,
        uuid: str = "",
        counters: Mapping[str, Counter] | None = None,
        nvml: Any = None,
        *,
        is_alone: bool = True,
    ) -> None:
        """`uuid` is the card's as torch has it, "" for the first card; `nvml` stands in for the module `pynvml`.

        `counters` are counted beside our own, by name. The card's energy is told where the process `is_alone` on it.
        """
        self._is_alone = is_alone
        self._more = dict(counters or {})
        self._card = NvmlCard(nvml, uuid) if device == "cuda" else None
        self.begin()

    def begin(self) -> None:
        """Forgets all readings and starts an interval."""
        self._readings: list[Reading] = []
        self.skip()

    def skip(self) -> None:
        """Starts an interval here: what happened since the last reading is nobody's."""
        self._opened, self._counters = time.perf_counter(), self._count()

    def read(self) -> Reading:
        """Returns what happened since the last reading, and starts the next interval."""
        now = time.perf_counter()
        counters, wall_s = self._count(), max(now - self._opened, 1e-9)
        passed = {name: _less(value, self._counters[name]) for name, value in counters.items()}
        figures: dict[str, float | None] = {
            "machine_cpu_frac": _over(passed["busy_s"], passed["whole_s"]),
            "steal_frac": _over(passed["steal_s"], passed["whole_s"]),
        }
        throttled: frozenset[str] = frozenset()
        if self._card is not None:
            figures |= {**self._card.gauges(), "energy_j": passed["energy_j"]}
            throttled = self._card.throttled()
        figures |= {name: passed[name] for name in self._more}
        reading = Reading(wall_s, figures, throttled)
        self._readings.append(reading)
        self._opened, self._counters = now, counters
        return reading

    def summary(self) -> dict[str, Any]:
        """Returns the readings since `begin` as one plain dict, empty without any.

        Their number and `wall_s`, means over time of `MEANS` and `RATES`, the highest `temperature_c`, all of
        `energy_j` and of the given counters, each reason in `throttled`. Names of the card are there on CUDA alone.
        """
        readings = self._readings
        if not readings:
            return {}
        found: dict[str, Any] = {"readings": len(readings), "wall_s": sum(r.wall_s for r in readings)}
        for name in readings[-1].figures:
            pairs = [(v, r.wall_s) for r in readings if (v := r.figures.get(name)) is not None]
            found[name] = self._summed(name, pairs) if pairs else None
        if self._card is not None:
            found["throttled"] = sorted(frozenset().union(*(r.throttled for r in readings)))
        return found

    def _count(self) -> dict[str, float | None]:
        """Returns the counters, all in seconds but the energy."""
        return {
            **machine.processor()._asdict(),
            "energy_j": self._card.energy_j() if self._card is not None and self._is_alone else None,
            **{name: count() for name, count in self._more.items()},
        }

    def _summed(self, name: str, pairs: list[tuple[float, float]]) -> float:
        """Returns one figure for (value, seconds) of several readings."""
        if name in MEANS or name in RATES:
            return sum(v * s for v, s in pairs) / sum(s for _, s in pairs)
        values = [v for v, _ in pairs]
        if name == "energy_j" or name in self._more:
            return sum(values)
        return max(values)


def _less(now: float | None, before: float | None) -> float | None:
    return None if now is None or before is None else max(0.0, now - before)


def _over(value: float | None, whole: float | None) -> float | None:
    return value / whole if value is not None and whole else None
