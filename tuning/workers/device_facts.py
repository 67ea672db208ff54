"""What the device is that this process trains on."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from tuning.workers import machine


def device_facts(device: str) -> dict[str, Any]:
    """Returns name, type, cores, torch threads and memory of the device this process trains on."""
    facts: dict[str, Any] = {
        "type": device,
        "cores": machine.cores(),
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        capability = [properties.major, properties.minor]
        return facts | {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "capability": capability,
        }
    return facts | {"name": _cpu_name(), "memory_bytes": machine.memory_bytes()}


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
