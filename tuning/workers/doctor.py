"""Preflight: can this machine run the study? Each check is OK, WARN or FAIL, with a remedy; no torch, no Ray."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tuning.config import atomic
from tuning.config.cards import CONTEXT_BYTES
from tuning.config.errors import ConfigError, PreflightError
from tuning.config.schema import StudyConfig
from tuning.workers import machine, nvml
from tuning.workers.nvml import Driver, Gpu
from tuning.workers.slots import over_cards

CheckState = Literal["OK", "WARN", "FAIL"]
SAME_CARD_FRAC = 0.9
"""A driver reports a little less than the box says: 8188 MiB of 8 GiB, 15 GiB of a T4's 16, with its own."""
DIRTY_BYTES, MIN_CARD_BYTES = 256 * 2**20, 2**30
"""A desktop's display holds some 100 MiB; with less than a gibibyte left, a context and a small model are all."""
TURING, CUDA_OF_TURING = (7, 5), 13
"""The oldest cards that CUDA 13 has code for; a P100 or V100 needs a build of torch for CUDA 12."""
MIN_DISK_BYTES, MIN_SHM_BYTES, MIN_RAM_BYTES = 200 * 2**20, 256 * 2**20, 2 * 2**30


@dataclass(frozen=True)
class Check:
    """A finding; `remedy` is empty if nothing is to be done."""

    name: str
    state: CheckState
    detail: str
    remedy: str = ""


def free_bytes(gpu: Gpu) -> int:
    """Returns what tensors of one more process may take of a card, beside what others hold and its own context."""
    return max(0, gpu.memory_bytes - gpu.held_bytes - CONTEXT_BYTES)


def preflight(config: StudyConfig, device: str) -> list[Check]:
    """Returns every check for this study on this machine."""
    return list(_checks(config, device))


def choose_devices(config: StudyConfig) -> None:
    """Makes visible the cards that the study is to use; raises ConfigError where it uses none, or has no such card."""
    if config.devices != "all" and (config.cluster or config.card.device == "cpu"):
        what = f"devices={config.devices} beside "
        if config.card.device == "cpu":
            raise ConfigError(f"{what}card={config.card.name}, which uses none", remedy="leave one of them out")
        remedy = "leave it out; CUDA_VISIBLE_DEVICES=0,1 ray start ... on each node"
        raise ConfigError(f"{what}cluster={config.cluster}: Ray gives away the cards of its nodes", remedy=remedy)
    nvml.choose(config.devices)


def torch_check(here: Driver | None) -> Check:
    """Returns whether the installed torch can use the driver's cards, by its files alone: it is not loaded."""
    built = built_for()
    if built is None:
        return Check("torch", "FAIL", "not installed", "pip install torch")
    version, cuda = built
    said = f"{version}, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}"
    if here is None or not here.cards:
        return Check("torch", "OK", said)
    if not cuda:
        cards = f"{here.cards} card{'s' * (here.cards > 1)}"
        remedy = "install a build of torch with CUDA, or card=cpu"
        return Check("torch", "FAIL", f"{said}, and the driver has {cards}", remedy)
    own = int(cuda.split(".")[0])
    if own > int(here.cuda.split(".")[0]):
        remedy = f"a newer driver, or a build of torch for CUDA {here.cuda.split('.')[0]}"
        return Check("torch", "FAIL", f"{said}, and the driver can run CUDA {here.cuda} at most", remedy)
    if own >= CUDA_OF_TURING and here.capability is not None and here.capability < TURING:
        old = f"{said}, which has no code below compute capability 7.5, and a card has "
        remedy = "a build of torch for CUDA 12 whose torch.cuda.get_arch_list() has the card, or card=cpu"
        return Check("torch", "FAIL", f"{old}{'.'.join(map(str, here.capability))}", remedy)
    return Check("torch", "OK", said)


def built_for() -> tuple[str, str | None] | None:
    """Returns version and CUDA version of the installed torch as its files have them; None where there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8", errors="replace")
    values = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= '([^']*)'", text, re.MULTILINE))
    return values.get("__version__", "of unknown version"), values.get("cuda")


def require(checks: list[Check]) -> None:
    """Raises PreflightError for the first check that failed."""
    for check in checks:
        if check.state == "FAIL":
            raise PreflightError(f"{check.name}: {check.detail}", remedy=check.remedy)


def _checks(config: StudyConfig, device: str) -> Iterator[Check]:
    found, card = nvml.gpus(), config.card
    # Trials are spread over all cards, so that the least of them is what counts.
    smallest = min(found, key=lambda gpu: gpu.memory_bytes, default=None) if device == "cuda" else None
    if device == "cuda" and smallest is None:
        yield Check("card", "FAIL", f"card={card.name} needs a CUDA device and there is none", "card=cpu, or card=auto")
    elif smallest and card.memory_bytes and smallest.memory_bytes < SAME_CARD_FRAC * card.memory_bytes:
        less = f"card={card.name} has {card.memory_bytes / 2**30:.0f} GiB and {smallest.name} less"
        other = ", or devices=N, a larger one" if len(found) > 1 else ""
        yield Check("card", "FAIL", less, f"card=auto without card.memory_gib, or the card that is there{other}")
    elif card.emulated_on(smallest.memory_bytes if smallest else None):
        where = smallest.name if smallest else "the CPU"
        yield Check("card", "WARN", f"{card.name} is emulated on {where}: memory is the card's, speed is not")
    else:
        yield Check("card", "OK", ", ".join(gpu.name for gpu in found) if smallest else "the CPU")
    if device == "cpu" and card.name != "cpu" and (why := nvml.fault()):
        yield Check("driver", "WARN", f"it does not tell its cards: {why}", "nvidia-smi has to list them, or card=cpu")
    if smallest:
        yield torch_check(nvml.driver())
        fullest = max(found, key=lambda gpu: gpu.held_bytes)
        if fullest.held_bytes > DIRTY_BYTES:
            yield _dirty(fullest, card.cap_bytes)
    asked, cards = config.concurrency, len(found) if smallest else 1
    if isinstance(asked, int) and not config.cluster and over_cards(asked, cards) > machine.cores():
        yield Check(
            "concurrency",
            "FAIL",
            f"concurrency={config.concurrency} and {machine.cores()} cores; the trials would wait for ever",
            f"concurrency={machine.cores()}",
        )
    yield _disk(Path(config.runs_dir))
    yield _shared_memory()
    available = machine.available_bytes()
    yield Check(
        "memory",
        "OK" if available > MIN_RAM_BYTES else "WARN",
        f"{available / 2**30:.1f} GiB of RAM free",
        "" if available > MIN_RAM_BYTES else "close other programs: two trials and Ray take about 2 GiB",
    )


def _dirty(gpu: Gpu, cap_bytes: int | None) -> Check:
    """Returns what it means that other processes hold memory of the card; `cap_bytes` is what the study is to have."""
    free, held = free_bytes(gpu), f"other processes hold {gpu.held_bytes / 2**30:.1f} GiB of {gpu.name}"
    remedy = "end them (nvidia-smi lists them), or go on: speed is then that of a shared card"
    if free < MIN_CARD_BYTES:
        return Check("card memory", "FAIL", f"{held}, and {free / 2**30:.1f} GiB are left", "end them")
    less = cap_bytes is not None and free < cap_bytes
    left = f", so that {free / 2**30:.1f} GiB are left" + (f" of {(cap_bytes or 0) / 2**30:.1f} asked for" * less)
    return Check("card memory", "WARN", held + left, remedy)


def _disk(folder: Path) -> Check:
    reason = atomic.unwritable(folder)
    if reason:
        return Check("disk", "FAIL", f"{folder} cannot be written: {reason}", "runs_dir=PATH, a folder of yours")
    there = next(p for p in [folder.resolve(), *folder.resolve().parents] if p.exists())
    free = shutil.disk_usage(there).free
    enough = free > MIN_DISK_BYTES
    detail = f"{free / 2**30:.1f} GiB free for {folder}"
    return Check("disk", "OK" if enough else "FAIL", detail, "" if enough else "free 200 MB, or runs_dir=PATH")


def _shared_memory() -> Check:
    shm = Path("/dev/shm")  # noqa: S108  (loader workers hand batches over through it)
    if not shm.is_dir():
        return Check("shared memory", "OK", "not used on this system")
    free = shutil.disk_usage(shm).free
    enough = free > MIN_SHM_BYTES
    remedy = "" if enough else "start the container with --shm-size=1g, or knobs.num_workers=0"
    return Check("shared memory", "OK" if enough else "WARN", f"{free / 2**20:.0f} MiB free in /dev/shm", remedy)
