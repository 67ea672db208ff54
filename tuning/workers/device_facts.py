"""Facts of the device that this process trains on."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from tuning.journal.events import Facts
from tuning.workers import machine


def device_facts(device: str) -> Facts:
    """Returns name, type, cores, torch threads and memory of the device this process trains on."""
    facts = {"type": device, "cores": machine.cores(), "threads": torch.get_num_threads()}
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        return facts | {"name": card.name, "memory_bytes": card.total_memory, "capability": [card.major, card.minor]}
    return facts | {"name": _cpu_name(), "memory_bytes": machine.memory_bytes()}


def _cpu_name() -> str:
    lines = machine.text_in(Path("/proc/cpuinfo")).splitlines()
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())  # ARM has no such line
