"""Constants of CUDA's libraries that a prediction would otherwise guess, as they were measured on a card.

`python -m benchmarks.gpu_check memory` writes them, one file for each device and torch, into the folder of the cache
(`folder`). A prediction takes those of the installed torch and of its card's compute capability; without any it guesses
(`tracing.workspaces`, `tracing.recurrent`).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from trainables.files import cache_dir, write_whole

CONSTANTS: Mapping[str, str] = {
    "context_bytes": "what a process takes of the card beside torch's allocator",
    "cublas_bytes": "workspace of a cuBLAS handle, of which forward and backward have one each",
    "lstm_reserve": "numbers that cuDNN keeps of an LSTM for each step, sample, layer, direction and unit",
    "gru_reserve": "the same of a GRU",
    "rnn_reserve": "the same of a plain RNN",
    "convolution_frac": "bytes a convolution takes and gives back, over those of its result",
    "convolution_backward_frac": "the same of its backward pass, over those of the gradients",
}
"""Every constant there is, and what it says."""


@dataclass(frozen=True)
class Calibration:
    """What was measured on `device` under `torch`; `constants` are of `CONSTANTS`, without those not measured.

    Raises ValueError for a constant that is not one, negative or not finite.
    """

    device: str
    torch: str
    capability: tuple[int, int]
    constants: Mapping[str, float]
    when: str = ""

    def __post_init__(self) -> None:
        for name, value in self.constants.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if name not in CONSTANTS or not number or not math.isfinite(value) or value < 0:
                raise ValueError(f"expected numbers >= 0 named {', '.join(CONSTANTS)}, got {name}={value!r}")

    @property
    def note(self) -> str:
        """Returns in a sentence whose constants a prediction stands on."""
        return f"workspaces as measured on {self.device} with torch {self.torch}"


def folder() -> Path | None:
    """Returns the user's folder of calibrations; None where there is no home."""
    try:
        return cache_dir() / "calibrations"
    except OSError:
        return None


def write(found: Calibration, where: Path) -> Path:
    """Writes the file of a device and torch whole, in the place of an earlier one, and returns its path."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{found.device} torch {found.torch}").strip("-")
    where.mkdir(parents=True, exist_ok=True)
    return write_whole(where / f"{name}.json", json.dumps(asdict(found), indent=1).encode())


def known(where: Path | None) -> Iterator[Calibration]:
    """Yields what the folder holds, oldest first; a file that cannot be read or says something else is passed over."""
    found: list[Calibration] = []
    for path in sorted(where.glob("*.json")) if where is not None and where.is_dir() else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            raw = json.loads(path.read_text(encoding="utf-8"))
            found.append(Calibration(**{**raw, "capability": (int(raw["capability"][0]), int(raw["capability"][1]))}))
    yield from sorted(found, key=lambda c: c.when)


def of_card(capability: tuple[int, int], torch: str | None = None) -> Calibration | None:
    """Returns what holds for a card of this compute capability, the latest of several; None where nothing was measured.

    `torch` is the version, by default the installed one.
    """
    version = importlib.metadata.version("torch") if torch is None else torch
    own = (c for c in known(folder()) if c.capability == capability and c.torch == version)
    return next(reversed([*own]), None)


def context_bytes(device: str) -> int:
    """Returns what a process takes of the device of that name beside torch's allocator, 0 where it was not measured."""
    own = [c.constants.get("context_bytes", 0) for c in known(folder()) if c.device == device]
    return int(own[-1]) if own else 0
