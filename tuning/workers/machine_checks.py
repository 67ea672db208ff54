"""Faults of a machine that make trainings slow or fail silently: torch beside the driver, limits, threads, packages.

For `doctor` alone, which may take its time: no study waits for these. A setting that cannot be read is left out.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from tuning.config.choices import available
from tuning.config.errors import ConfigError
from tuning.memory.predictor import compiler
from tuning.workers import doctor, machine, own_workload
from tuning.workers.doctor import Check
from tuning.workers.nvml import Driver, answers, driver

TORCH_S = 60.0
"""The most that asking torch for its cards may take: an import beside other work."""
_GOVERNORS = "sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"
_ASK = "import torch; print(torch.cuda.is_available(), torch.cuda.device_count())"


def found(env: Mapping[str, str] = os.environ, root: Path = machine.ROOT) -> list[Check]:
    """Returns every check of the machine that can be made on it; `root` is where its file system begins."""
    return [*_torch(driver()), *_settings(root), *_limits(root), *_threads(env), *_compiler(env)]


def packages(workload: str | None) -> Iterator[Check]:
    """Yields which packages a built-in workload lacks here, or all of them lack if None is asked for.

    A missing package is a failure if the workload cannot be imported without it, else a warning: some packages only
    hold its default data or weights.
    """
    try:
        extras = importlib.metadata.requires("cardtune") or []
    except importlib.metadata.PackageNotFoundError:  # run from its folder, without being installed
        return
    asked = [name for name in available("workload") if workload in (None, name)]
    missing = {name: own for name in asked if (own := _lacking(extras, name))}
    said = "; ".join(f"{name} needs {' and '.join(own)}" for name, own in missing.items())
    remedy = f"pip install '.[{','.join(missing)}]' in cardtune's folder" + ", for those you use" * (workload is None)
    if missing:
        yield Check("packages", "WARN" if workload is None or _loads(workload) else "FAIL", said, remedy)
    elif asked:
        yield Check("packages", "OK", f"those of {', '.join(asked)} are here")


def _loads(workload: str) -> bool:
    try:
        own_workload.declared(workload)
    except ConfigError:
        return False
    return True


def _lacking(extras: list[str], workload: str) -> list[str]:
    """Returns what is not installed of the extra of that name, from requirements as a wheel's metadata has them."""
    named = re.compile(rf"""([\w.-]+).*;.*extra == ['"]{re.escape(workload)}['"]""")
    names = [found[1] for found in map(named.match, extras) if found]
    return [name for name in names if not any(importlib.metadata.distributions(name=name))]


def _torch(here: Driver | None) -> Iterator[Check]:
    """Yields what torch was built for, what the driver can run, and whether torch sees the driver's cards."""
    fits = doctor.torch_check(here)
    if here is None or not here.cards:
        yield fits
        return
    cards = f"{here.cards} card{'s' * (here.cards > 1)}"
    yield Check("driver", "OK", f"{here.version}, CUDA up to {here.cuda}, {cards}")
    if fits.state != "OK":
        yield fits
        return
    yield _asked(fits.detail, here.cards)


def _asked(said: str, cards: int) -> Check:
    """Returns whether torch, in a process of its own, sees as many cards as the driver shows."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=TORCH_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("torch", "WARN", f"{said}; it did not answer: {error}"[:200])
    seen = done.stdout.split()
    if done.returncode or len(seen) != 2:
        last = done.stderr.strip().rpartition("\n")[2]
        return Check("torch", "FAIL", f"{said}; it cannot be loaded: {last}"[:300], "install torch anew")
    if seen != ["True", str(cards)]:
        remedy = "CUDA_VISIBLE_DEVICES, the container's --gpus, or a driver and a torch that fit each other"
        return Check("torch", "FAIL", f"{said}; it sees {seen[1]} of {cards} cards", remedy)
    return Check("torch", "OK", f"{said}; it sees {cards} card{'s' * (cards > 1)}")


def _limits(root: Path) -> Iterator[Check]:
    """Yields what of cores and RAM a container or an affinity leaves to this process."""
    own, cores = machine.cores(root), os.cpu_count() or 1
    remedy = "" if own > 1 else "give the container more cores: loader workers take the time of training"
    yield Check("cores", "OK" if own > 1 else "WARN", f"{own} of {cores}", remedy)
    limit, total = machine.memory_bytes(root), psutil.virtual_memory().total
    of = "" if limit == total else f" of {total / 2**30:.1f} GiB, by the limit of a cgroup"
    yield Check("RAM", "OK", f"{limit / 2**30:.1f} GiB{of}")


def _settings(root: Path) -> Iterator[Check]:
    """Yields the settings of an administrator that slow trainings, and what would change them; nothing is changed."""
    if governors := {machine.text_in(path) for path in root.glob(_GOVERNORS)} - {"", "performance"}:
        remedy = f"echo performance | sudo tee /{_GOVERNORS}, for cores that keep a high clock"
        yield Check("CPU governor", "WARN", ", ".join(sorted(governors)), remedy)
    if off := [name for name, is_on in answers("nvmlDeviceGetPersistenceMode") if not is_on]:
        remedy = "sudo nvidia-smi -pm 1, for a driver that stays loaded between programs"
        yield Check("persistence mode", "WARN", f"off on {', '.join(off)}", remedy)
    if held := [name for name, reasons in answers("nvmlDeviceGetCurrentClocksThrottleReasons") if reasons & 0x02]:
        remedy = "sudo nvidia-smi -rgc, or -rac, for a card that may boost"
        yield Check("clocks", "WARN", f"a setting holds down those of {', '.join(held)}", remedy)
    if drawn := [name for name, programs in answers("nvmlDeviceGetGraphicsRunningProcesses") if programs]:
        remedy = "train from a text console, or on another card, for all of its memory and time"
        yield Check("desktop", "WARN", f"programs draw on {', '.join(drawn)}", remedy)


def _threads(env: Mapping[str, str]) -> Iterator[Check]:
    """Yields what the environment says of threads: a training computes with as many, at most the cores."""
    cores = machine.cores()
    asked = {name: env[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if env.get(name)}
    said = ", ".join(f"{name}={value}" for name, value in asked.items())
    counts = {name: value.partition(",")[0].strip() for name, value in asked.items()}  # inner threads may follow
    odd = [name for name, count in counts.items() if not (count.isdigit() and 1 <= int(count) <= cores)]
    if odd:
        yield Check("threads", "WARN", f"{said} on {cores} cores", f"unset {' '.join(odd)}")
    else:
        computes = f"a training alone computes with {machine.threads()}"
        yield Check("threads", "OK", f"{said or 'OMP_NUM_THREADS is not set'}; {computes}")


def _compiler(env: Mapping[str, str]) -> Iterator[Check]:
    """Yields the C++ compiler that memory is predicted with where there is no card."""
    there = compiler(env)
    said = there[0] if there else "none of $CXX, g++, c++ and clang++: memory without a card is predicted roughly"
    yield Check("C++ compiler", "OK" if there else "WARN", said, "" if there else "apt-get install g++")
