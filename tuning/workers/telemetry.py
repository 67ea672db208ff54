"""The machine's load while a window was measured: the card through NVML, processor and memory through psutil.

A `TelemetryReader` is asked when a window closes, so nothing runs beside the training: no thread, no timer. Counters
(processor seconds) are exact over the window; gauges (utilisation, power, temperature, clock) are what NVML
holds at its end, means over its own last sixth of a second to a second.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tuning.journal.events import Facts
from tuning.workers import machine
from tuning.workers.nvml import NvmlCard

MEANS = ("gpu_sm_frac", "power_w", "sm_clock_mhz")
"""Gauges summed up as means over time."""

OF_LOADERS = ("loaders_s", "loaders_cpu_s", "loaders_queued_s", "loaders_read_bytes")
# Of each loader process: seconds, those on a core, those in the queue for one, and bytes from a disk. Linux counts what
# it waited for a disk under kernel.task_delayacct=1 alone, which is not its default.


class TelemetryReader:
    """Reads the machine at the end of each window; what cannot be read is None and never an error."""

    def __init__(
        self,
        device: str,
        uuid: str = "",
        counters: Mapping[str, Callable[[], float]] | None = None,
        nvml: Any = None,
        root: Path = machine.ROOT,
    ) -> None:
        """`uuid` is the card's as torch has it, "" for the first card; `nvml` stands in for the module `pynvml`.

        `counters`, which only grow, are counted beside our own, by name. `root` is as in `machine`.
        """
        self._more, self._root = dict(counters or {}), root
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
        for (name, *process), value in counters.items():
            before = self._counters.get((name, *process), value)  # a new process begins here
            self._counted[name] = self._counted.get(name, 0.0) + max(0.0, value - before)
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
        all of the given counters, each reason in `throttled`. Names of the card are there on CUDA alone; with loader
        processes what they waited, of the time that they did not queue for a core (`loaders_wait_frac`), and read.
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
        lived_s, cpu_s, queued_s, read_bytes = (self._counted.get(name, 0.0) for name in OF_LOADERS)
        if lived_s > queued_s:
            found["loaders_wait_frac"] = max(0.0, 1.0 - cpu_s / (lived_s - queued_s))
            found["loaders_read_bytes_per_s"] = read_bytes / self._wall_s
        return found | {name: self._counted[name] for name in self._more}

    def _count(self) -> dict[tuple[str, ...], float]:
        """Returns the counters by name, those of a loader process by its number, too."""
        counts = {**machine.processor()._asdict(), **{name: count() for name, count in self._more.items()}}
        found: dict[tuple[str, ...], float] = {(name,): value for name, value in counts.items()}
        children = (machine.text_in(path) for path in self._root.glob("proc/self/task/*/children"))
        for pid in " ".join(children).split():
            files = [self._root / "proc" / pid / name for name in ("comm", "schedstat", "io")]
            called, times, io = map(machine.text_in, files)
            if times and called == "pt_data_worker":  # as torch names them
                cpu_s, queued_s = (int(nanoseconds) / 1e9 for nanoseconds in times.split()[:2])
                read_bytes = float(io.partition("\nread_bytes: ")[2].partition("\n")[0] or 0)
                values = time.perf_counter(), cpu_s, queued_s, read_bytes
                found |= {(name, pid): value for name, value in zip(OF_LOADERS, values, strict=True)}
        return found
