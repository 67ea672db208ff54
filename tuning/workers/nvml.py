"""The cards of this machine as their driver has them: which there are, and what one of them does.

NVML counts cards by their place on the bus, and so does CUDA under CUDA_DEVICE_ORDER=PCI_BUS_ID, which `tuning.workers`
sets: CUDA's own order begins with the fastest.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from tuning.config.errors import ConfigError

_Answer = TypeVar("_Answer")
VISIBLE = "CUDA_VISIBLE_DEVICES"
_visible_before: list[str | None] = []
"""Its value before any card was chosen."""

_REASONS = {  # nvml.h, NVML_CLOCKS_EVENT_REASON_*; an idle card and clocks somebody chose are not among them
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat, in hardware",
    0x80: "power brake",
}


@dataclass(frozen=True)
class Gpu:
    """A CUDA device as the driver reports it: `memory_bytes` are what processes may take of it, all together,
    `held_bytes` what they hold at this moment.

    `capability` is its compute capability, None where the driver does not say; `uuid` is "" then.
    """

    name: str
    memory_bytes: int
    held_bytes: int = 0
    capability: tuple[int, int] | None = None
    uuid: str = ""


@dataclass(frozen=True)
class Driver:
    """The driver: its version, the newest CUDA it can run, and how many cards of it are visible.

    `capability` is the least of the cards, None where none says its own.
    """

    version: str
    cuda: str
    cards: int
    capability: tuple[int, int] | None = None


def driver() -> Driver | None:
    """Returns what the driver says of itself; None where there is none, or it does not say."""
    return _asked(_driver, None)


def gpus() -> list[Gpu]:
    """Returns the visible CUDA devices by NVML; an empty list where there is no driver or none is visible."""
    return _asked(_gpus, [])


def answers(question: str) -> list[tuple[str, Any]]:
    """Returns the name of each visible card with its answer to a function of NVML; without those that do not answer."""

    def ask(nvml: Any) -> Iterator[tuple[str, Any]]:
        for handle in _visible(nvml):
            with contextlib.suppress(AttributeError, nvml.NVMLError):
                yield str(nvml.nvmlDeviceGetName(handle)), getattr(nvml, question)(handle)

    return _asked(lambda nvml: list(ask(nvml)), [])


def fault() -> str:
    """Returns why the driver does not tell its cards, as after an update without a restart; "" where there is none."""
    found = list[str]()
    _asked(_gpus, list[Gpu](), found.append)
    return "".join(found)


def choose(asked: str) -> None:
    """Makes visible, to this process and all it starts, the cards asked for: "all", or as `StudyConfig.devices` has it.

    They are among the cards that were visible before the first call; the number of a card in MIG mode is its first
    slice. From here on they are named by UUID, which no order of cards can change. Raises ConfigError for one that is
    not there.
    """
    if asked == "all" and not _visible_before:
        return
    if not _visible_before:
        _visible_before.append(os.environ.get(VISIBLE))
    if _visible_before[0] is None:
        os.environ.pop(VISIBLE, None)
    else:
        os.environ[VISIBLE] = _visible_before[0]
    if asked == "all":
        return
    here = _asked(lambda nvml: [(n, _gpu(nvml, handle)) for n, handle, _ in _devices(nvml)], list[tuple[int, Gpu]]())
    chosen = list[Gpu]()
    for one in asked.split(","):
        found = [gpu for n, gpu in here if (n == int(one) if one.isdigit() else gpu.uuid.startswith(one))]
        found = found[:1] if one.isdigit() else found
        if len(found) != 1 or found[0] in chosen:
            fault = "is no card here" if not found else "is more than one card" if len(found) > 1 else "is named twice"
            raise ConfigError(
                f"devices={asked}: {one} {fault}",
                allowed=", ".join(f"{n} ({gpu.name}, {gpu.uuid})" for n, gpu in here) or "none: no card here",
                remedy="devices=all" if here else "leave it out",
            )
        chosen += found
    os.environ[VISIBLE] = ",".join(gpu.uuid for gpu in chosen)


def _asked(
    ask: Callable[[Any], _Answer], otherwise: _Answer, told: Callable[[str], None] = lambda why: None
) -> _Answer:
    """Returns what is asked of NVML, loaded for it alone; `otherwise` where there is no driver, or it does not say.

    `told` hears why a driver that is there does not say it.
    """
    try:
        nvml = importlib.import_module("pynvml")  # of nvidia-ml-py; needed here only
    except (ImportError, OSError):
        return otherwise
    absent = [getattr(nvml, name, OSError) for name in ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded")]
    try:
        nvml.nvmlInit()
        try:
            return ask(nvml)
        finally:
            nvml.nvmlShutdown()
    except (OSError, *absent):
        return otherwise
    except (AttributeError, nvml.NVMLError) as error:
        told(str(error))
        return otherwise


def _driver(nvml: Any) -> Driver | None:
    cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
    handles = _visible(nvml)
    version = str(nvml.nvmlSystemGetDriverVersion())
    capability = min((c for c in (_capability(nvml, h) for h in handles) if c is not None), default=None)
    return Driver(version, f"{cuda // 1000}.{cuda % 1000 // 10}", len(handles), capability)


def _gpus(nvml: Any) -> list[Gpu]:
    return [_gpu(nvml, handle) for handle in _visible(nvml)]


def _visible(nvml: Any) -> list[Any]:
    """Returns what CUDA enumerates: of slices that nobody has named the first alone, and no card beside it."""
    found = _devices(nvml)
    slices = [handle for _, handle, is_slice in found if is_slice]
    return slices[:1] if slices and VISIBLE not in os.environ else [handle for _, handle, _ in found]


def _devices(nvml: Any) -> list[tuple[int, Any, bool]]:
    """Returns what CUDA_VISIBLE_DEVICES leaves visible, in its order, with its number and whether it is a slice.

    If the variable is not set, these are all cards and slices, each slice with the number of its card. Raises
    NVMLError.
    """
    visible = os.environ.get(VISIBLE)
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    count = nvml.nvmlDeviceGetCount()
    if visible is None:
        return [(n, *part) for n in range(count) for part in _parts(nvml, nvml.nvmlDeviceGetHandleByIndex(n))]
    found = [part for one in visible.split(",") for part in _named(nvml, one.strip(), count)]
    return [(number, *part) for number, part in enumerate(found)]


def _parts(nvml: Any, handle: Any) -> list[tuple[Any, bool]]:
    """Returns the slices of a card in MIG mode, of any other the card itself, and which of both they are."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != 1:
            return [(handle, False)]
    except (AttributeError, nvml.NVMLError):  # most cards have no such mode
        return [(handle, False)]
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):
            found.append((nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index), True))
    return found


def _named(nvml: Any, asked: str, count: int) -> list[tuple[Any, bool]]:
    """Returns a card or slice by its number or UUID, of which CUDA takes the beginning, too; raises NVMLError.

    For a card in MIG mode it is the first slice.
    """
    if asked.isdigit():
        return _parts(nvml, nvml.nvmlDeviceGetHandleByIndex(int(asked)))[:1] if int(asked) < count else []
    own: list[tuple[Any, bool]] = []
    for number in range(count):
        with contextlib.suppress(nvml.NVMLError):  # one that is lost is not the one that is asked for
            parts = _parts(nvml, nvml.nvmlDeviceGetHandleByIndex(number))
            own += [part for part in parts if str(nvml.nvmlDeviceGetUUID(part[0])).startswith(asked)]
    return (own or _parts(nvml, nvml.nvmlDeviceGetHandleByUUID(asked)))[:1]


def _gpu(nvml: Any, handle: Any) -> Gpu:
    try:  # what the driver keeps for itself is counted apart: CUDA has the rest
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        memory_bytes, held_bytes = int(memory.total - memory.reserved), int(memory.used)
    except (nvml.NVMLError, AttributeError, TypeError):  # the older call counts it as used
        memory_bytes, held_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total), 0
    uuid = ""
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        uuid = str(nvml.nvmlDeviceGetUUID(handle))
    return Gpu(str(nvml.nvmlDeviceGetName(handle)), memory_bytes, held_bytes, _capability(nvml, handle), uuid)


def _capability(nvml: Any, handle: Any) -> tuple[int, int] | None:
    with contextlib.suppress(AttributeError, TypeError, ValueError, nvml.NVMLError):
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return int(major), int(minor)
    return None


class NvmlCard:
    """A card in NVML. A call that fails once is not made again: it costs as much as a call that answers."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml, self._handle = nvml, None
        self._failed: set[str] = set()
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
        except (ImportError, OSError):
            return
        with contextlib.suppress(OSError, self._nvml.NVMLError):
            self._nvml.nvmlInit()
            self._handle = self._found(uuid)

    def gauges(self) -> dict[str, float | None]:
        """Returns utilisation as shares of time, power in watts, temperature in Celsius, clock in MHz."""
        used = self._ask("nvmlDeviceGetUtilizationRates")
        milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        return {
            "gpu_sm_frac": None if used is None else used.gpu / 100,
            "power_w": None if milliwatts is None else milliwatts / 1000,
            "temperature_c": _float(self._ask("nvmlDeviceGetTemperature", 0)),  # NVML_TEMPERATURE_GPU
            "sm_clock_mhz": _float(self._ask("nvmlDeviceGetClockInfo", 1)),  # NVML_CLOCK_SM
        }

    def throttled(self) -> frozenset[str]:
        """Returns why the clock is held down now."""
        bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        return frozenset(reason for bit, reason in _REASONS.items() if bits & bit)

    def _ask(self, name: str, *arguments: int) -> Any:
        if self._handle is None or name in self._failed:
            return None
        try:
            return getattr(self._nvml, name)(self._handle, *arguments)
        except (AttributeError, self._nvml.NVMLError):
            self._failed.add(name)
            return None

    def _found(self, uuid: str) -> Any:
        if not uuid:
            return self._nvml.nvmlDeviceGetHandleByIndex(0)
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except self._nvml.NVMLError:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")  # a slice of a card: most figures are N/A


def _float(value: Any) -> float | None:
    return None if value is None else float(value)
