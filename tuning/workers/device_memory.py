"""The memory that this process holds of its device, and its limits."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from trainables.live_bytes import LiveBytes
from tuning.memory.oom import requested_bytes
from tuning.workers import machine

ROOM_BYTES = 256 * 2**20
"""A process may always grow by this: with 20 MiB of room, Ray could not start a thread."""
LEFT_FRAC, LEFT_BYTES = 0.02, 16 * 2**20
"""A trial may leave behind that share of its limit, or those bytes where that is more: kernels' tables."""


class DeviceMemory:
    """Reads and limits the memory of the device a session trains on."""

    def __init__(self, device: str, meter: LiveBytes) -> None:
        self._cuda = device == "cuda"
        self._meter = meter

    def limit(self, cap_bytes: int | None) -> None:
        """Holds a CUDA process to so many bytes of tensors and cache; its context comes on top, and is not counted.

        Under WSL no process has more than what is free: once the card is full, the driver of Windows lends the
        machine's RAM, and in place of an error everything is many times slower. On a CPU the cap is the meter's
        (`LiveBytes.begin`), with `backstop` behind it.
        """
        if self._cuda:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.empty_cache()  # the limit is on what is reserved, which an earlier trial may have left
            with contextlib.suppress(AttributeError):  # no public name, and none in a build without CUDA
                torch._C._host_emptyCache()  # page-locked memory of batches of another size
            most_bytes = total if cap_bytes is None else cap_bytes
            if machine.is_wsl():
                most_bytes = min(most_bytes, torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())
            fraction = min(1.0, most_bytes / total)
            torch.cuda.set_per_process_memory_fraction(fraction)

    def held_bytes(self) -> int:
        """Returns the bytes of live tensors; those of a CPU are known as far as they were counted."""
        return torch.cuda.memory_allocated() if self._cuda else self._meter.live_bytes

    def in_use(self) -> list[tuple[int, int]]:
        """Returns the bytes of tensors and those reserved for them; nothing on a CPU, where they are not counted."""
        return [(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())] if self._cuda else []

    def reserved_bytes(self) -> int:
        """Returns what other processes cannot have: on CUDA with the cache, once it is emptied.

        cuBLAS keeps a workspace for each thread that multiplied matrices, 8 MiB each and 32 MiB on Hopper: they belong
        to the process and not to the trial, and are cleared first. The next multiplication makes them again.
        """
        if not self._cuda:
            return self._meter.live_bytes
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def limit_bytes(self, cap_bytes: int | None) -> int:
        """Returns what a trial may hold: its cap, else all of the card; 0 on a CPU without a cap."""
        if cap_bytes is not None:
            return cap_bytes
        return torch.cuda.get_device_properties(0).total_memory if self._cuda else 0

    def wanted_bytes(self, message: str) -> int | None:
        """Returns the least that the step which has just failed would have needed, or None where it is not known.

        To be asked before its tensors are freed. Later requests of the step are not in it.
        """
        if not self._cuda:
            return self._meter.wanted_bytes or None
        asked = requested_bytes(message)
        return None if asked is None else torch.cuda.memory_reserved() + asked  # which is what the limit counts

    @contextlib.contextmanager
    def backstop(self, cap_bytes: int | None) -> Iterator[None]:
        """Keeps a capped CPU process inside the block from taking more than the machine has free.

        The meter holds tensors to the cap; this is for what it does not see. An allocation beyond it fails
        (RuntimeError or MemoryError), in this process or a loader's, in place of the machine's OOM killer. It is not
        drawn closer to the cap: oneDNN's scratch and cache of compiled kernels grow with every shape it meets, and
        where an allocation of its own fails it crashes the process (six of nine runs, at twice the cap and 512 MiB).
        RLIMIT_DATA, since RLIMIT_AS would count Ray's whole object store. Only the soft limit is set, so that it can be
        lifted.
        """
        if self._cuda or cap_bytes is None:
            yield
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = data_bytes() + max(machine.available_bytes(), ROOM_BYTES)
        lowest = min(limit for limit in (wanted, soft, hard) if limit != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_DATA, (lowest, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def left_behind(before_bytes: int, after_bytes: int, limit_bytes: int) -> str:
    """Returns why a process should run no other trial, or "": what its trials left is no small share of the limit.

    `before_bytes` is what belongs to the process (its model), `after_bytes` what it holds when a trial is over.
    """
    left, allowed = after_bytes - before_bytes, max(LEFT_BYTES, round(limit_bytes * LEFT_FRAC))
    if left <= allowed:
        return ""
    return f"{left / 2**20:.1f} MiB were still held after a training, {allowed / 2**20:.1f} MiB are allowed"


def data_bytes() -> int:
    """Returns what RLIMIT_DATA counts of this process."""
    with Path("/proc/self/status").open(encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
