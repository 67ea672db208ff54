"""The bottleneck of a configuration, from its measured spans and from how busy the card was; and what cannot help it.

On a CPU the spans add up to the wall time. On CUDA waiting for data is host time and the other spans are device time,
in which the device may stand still because the host is late with its next kernel: only NVML's share of time in which a
kernel ran tells that. Telemetry that holds `gpu_sm_frac`, be it None, is that of a CUDA device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainables.knob_columns import Bound, Measured, word
from trainables.knobs import LOOP, Knobs, KnobTable
from tuning.journal.events import Config, Facts

GOOD_FRAC = 0.80
"""The utilisation from which "GPU Training Optimization Guide" calls it good."""
PART_FRAC = 1 / 3
"""The share from which the optimiser, or on a CPU what is waited for, is the bound, though other steps take more."""
NEAR_CAP_FRAC = 0.95
"""The share of the memory from which a larger micro-batch would not fit: memory keeps the launches small."""
NOTED_FRAC = 0.05
"""The share of the time from which waiting, copying, an optimiser or a processor taken by other machines is named."""
LOADING_WORDS = {"read": "reading", "collate": "collating", "augment": "augmentation"}
"""Parts of the waiting that spans tell of where no workers load, in words."""


@dataclass(frozen=True)
class Verdict:
    """The bound of a configuration: the `share` of its time that it takes, and words.

    `remedies` are settings as name=value that were not measured, those most likely to help first. `held` is whether
    anything but computing takes enough of the time to look for them.
    """

    bound: Bound
    share: float
    sentence: str
    remedies: tuple[str, ...] = ()
    held: bool = False


@dataclass(frozen=True)
class Shares:
    """Shares of the wall time, each from 0 to 1. `busy` is the device's utilisation; the losses fill up the rest.

    `waited` is all of the waiting for data; of it, `loader` is what the device had to wait as well.
    """

    busy: float
    optimizer: float
    waited: float
    loader: float
    transfer: float
    launch: float
    cuda: bool
    seen: bool
    """Whether NVML told `busy`, rather than the spans."""

    @property
    def compute(self) -> float:
        """Returns the share of forward and backward passes."""
        return self.busy - self.optimizer


def shares(spans: Mapping[str, float], telemetry: Facts | None = None) -> Shares | None:
    """Returns where the time went, or None for spans that do not say (no window at all)."""
    if not spans.get("wall_s"):
        return None
    waited, moved, passes, stepped = (
        min(1.0, _share(spans, name)) for name in ("data_wait", "transfer", "forward_backward", "optimizer")
    )
    told = (telemetry or {}).get("gpu_sm_frac")
    busy = min(1.0, passes + stepped if told is None else _number(told))
    loader = min(waited, 1.0 - busy)
    transfer = min(moved, 1.0 - busy - loader)
    optimizer = busy * (stepped / (passes + stepped)) if passes + stepped else 0.0
    launch = 1.0 - busy - loader - transfer
    return Shares(
        busy, optimizer, waited, loader, transfer, launch, "gpu_sm_frac" in (telemetry or {}), told is not None
    )


def judge(
    spans: Mapping[str, float],
    telemetry: Facts | None = None,
    knobs: Config | None = None,
    table: KnobTable = LOOP,
    *,
    memory_frac: float | None = None,
    tried: Collection[str] = (),
    asked: Collection[str] | None = None,
) -> Verdict | None:
    """Returns the verdict, or None where the spans say nothing; `memory_frac` is the peak over the cap.

    Left out are remedies that the knobs hold already, those `tried` (as name=value), and those of knobs that are not
    `asked` for (None: all are). Raises ValueError for knobs that `table` lacks.
    """
    found = shares(spans, telemetry)
    if found is None:
        return None
    facts = {name: _number(value) for name, value in (telemetry or {}).items()}
    retries = int(facts.get("allocator_retries", 0))
    bound, share = _bound(found, retries, memory_frac)
    waits = found.waited >= NOTED_FRAC
    parts = ((words, _share(spans, name)) for name, words in LOADING_WORDS.items())
    loading = ", ".join(f"{words} {percent(frac)}" for words, frac in parts if frac >= 0.005) if waits else ""
    said = [_busy(found), f"{percent(found.waited)} waiting for data" + (f" ({loading})" if loading else "")]
    if bound == "transfer" or found.transfer >= NOTED_FRAC:
        said.append(f"{percent(found.transfer)} copying to the device")
    if bound == "memory":
        said.append(f"{retries} allocator retries" if retries else f"{percent(memory_frac or 0.0)} of the memory taken")
    sentence = f"{'compute, much of it the optimiser' if bound == 'optimizer' else bound}: {', '.join(said)}"
    if (stolen := facts.get("steal_frac", 0.0)) >= NOTED_FRAC:
        sentence += f"; disturbed: {percent(stolen)} of the processor went to other machines"
    wait_frac = facts.get("loaders_wait_frac") if bound == "loader" else None
    if wait_frac is not None:
        sentence += f"; loader processes {_loaders(wait_frac, facts['loaders_read_bytes_per_s'])}"
    own, is_waiting = Knobs.of(knobs or {}, table), (wait_frac or 0.0) >= PART_FRAC
    measured = Measured(found.cuda, facts.get("machine_cpu_frac", 0.0), _share(spans, "augment"), is_waiting)
    bounds: list[Bound] = ["loader", bound] if waits else [bound]
    remedies = list(dict.fromkeys(remedy for each in bounds for remedy in _remedies(each, own, measured)))
    if asked is not None:
        remedies = [remedy for remedy in remedies if remedy.partition("=")[0] in asked]
    left = tuple(remedy for remedy in remedies if remedy not in tried and not _is_passed(remedy, own, tried))
    return Verdict(bound, share, sentence, left, found.busy < GOOD_FRAC or waits)


def card_words(telemetry: Facts) -> str:
    """Returns how the card was doing, as "93 % busy, 287 W, 71 C, 1,395 MHz"; "" without a card.

    Each reason of a lower clock that NVML named at any reading is told.
    """
    units = {"power_w": "{:.0f} W", "temperature_c": "{:.0f} C", "sm_clock_mhz": "{:,.0f} MHz"}
    busy = telemetry.get("gpu_sm_frac")
    said = [f"{percent(_number(busy))} busy"] if busy is not None else []
    said += [form.format(v) for name, form in units.items() if (v := _number(telemetry.get(name)))]
    throttled = telemetry.get("throttled")
    slowed = ", ".join(map(str, throttled)) if isinstance(throttled, list) else ""
    return ", ".join(said) + (f"; throttled: {slowed}" if slowed and said else "")


def percent(frac: float) -> str:
    """Returns whole percent, with one decimal below 10 %."""
    return f"{100 * frac:.1f} %" if 0 < frac < 0.0995 else f"{100 * frac:.0f} %"


def _bound(found: Shares, retries: int, memory_frac: float | None) -> tuple[Bound, float]:
    """Returns the largest share; a GPU that is busy for less than `GOOD_FRAC` is bound by what it waits for."""
    losses: dict[Bound, float] = {"loader": found.loader, "transfer": found.transfer, "launch": found.launch}
    bound = max(losses, key=lambda name: losses[name])
    if found.busy >= GOOD_FRAC or (not found.cuda and losses[bound] < PART_FRAC):
        optimizer = found.optimizer >= PART_FRAC * found.busy
        return ("optimizer", found.optimizer) if optimizer else ("compute", found.compute)
    near_cap = memory_frac is not None and memory_frac >= NEAR_CAP_FRAC
    if bound == "launch" and (retries or near_cap):
        return "memory", found.launch
    return bound, losses[bound]


def _busy(found: Shares) -> str:
    if found.seen:
        return f"GPU {percent(found.busy)} busy"
    stepping = f", {percent(found.optimizer)} in the optimiser" if found.optimizer >= NOTED_FRAC else ""
    return f"{percent(found.compute)} in forward and backward{stepping}"


def _loaders(wait_frac: float, read_bytes_per_s: float) -> str:
    """Returns in words what loader processes do, of the time that they do not queue for a core."""
    if wait_frac < PART_FRAC:
        return f"compute {percent(1.0 - wait_frac)} of their time"
    # A hard disk that seeks for each page of 4 KiB reads 0.4 MB/s.
    of = f"a disk ({read_bytes_per_s / 1e6:.1f} MB/s; an SSD is faster)" if read_bytes_per_s > 2**18 else "no disk here"
    return f"wait {percent(wait_frac)} of their time, for {of}"


def _remedies(bound: Bound, own: Knobs, measured: Measured) -> Iterator[str]:
    """Yields what the knob table advises and is not done already; taking a setting back first, and system knobs.

    A system knob that was measured to change what this workload learns is not advised.
    """
    found = []
    for name, row in own.table.items():
        if name in own.table.kinds:
            continue
        value = row.remedies[bound](own, measured) if bound in row.remedies else None
        if value is not None and value != getattr(own, name) and own.table.is_active(name, own.as_dict()):
            found.append((value != row.default, row.kind != "system", f"{name}={word(value)}"))
    return (text for *_, text in sorted(found, key=lambda one: one[:2]))


def _is_passed(remedy: str, own: Knobs, tried: Collection[str]) -> bool:
    """Returns whether a value between a knob's own and a remedy's was tried: the own one was no slower than that."""
    name, _, value = remedy.partition("=")
    other = [text.partition("=")[2] for text in tried if text.startswith(f"{name}=")]
    try:
        now, then = float(getattr(own, name)), float(value)
        return any(min(now, then) < float(one) < max(now, then) for one in other)
    except ValueError:  # its values are names
        return False


def _share(spans: Mapping[str, float], name: str) -> float:
    """Returns the share of the wall time that a span takes; 0 where it is not told."""
    return spans.get(f"{name}_s", 0.0) / spans["wall_s"]


def _number(value: Any) -> float:
    """Returns the number, 0 for what is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
