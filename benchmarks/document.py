"""What every result says of where it comes from, and how it is written."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pynvml

from tuning.journal.runs import versions
from tuning.workers.device_facts import device_facts


def provenance(benchmark: str, device: str = "cpu") -> dict[str, Any]:
    """Returns the benchmark's name, the device and machine it ran on, its driver, the commit and the versions."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)  # noqa: S607
    return {
        "benchmark": benchmark,
        "device": device_facts(device),
        "driver": driver() if device == "cuda" else None,
        "machine": platform.platform(),
        "commit": commit.stdout.strip(),
        "versions": versions(),
    }


def driver() -> str | None:
    """Returns the version of the NVIDIA driver, None where there is none."""
    try:
        pynvml.nvmlInit()
        found: str = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None
    return found


def publish(document: Mapping[str, Any], out: Path | None, *, append: bool = False) -> None:
    """Prints the document as one line of JSON and, where a file is named, writes it there or adds it at its end."""
    line = json.dumps(document)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a" if append else "w", encoding="utf-8") as file:
            file.write(line + "\n")
    print(line)
