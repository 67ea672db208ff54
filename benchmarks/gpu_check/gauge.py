"""What a training step takes of a device: the peaks torch reports, and the smallest cap under which it does not fail.

On CUDA the cap is the per-process fraction, on a CPU the count of live tensor bytes: `tuning.workers.device_memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from benchmarks.gpu_check.kinds import REF
from trainables import loop
from trainables.knobs import Scalar
from trainables.plan import Plan
from tuning.memory import oom
from tuning.memory.allocator import STEP_BYTES
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

CPU_STEP_BYTES = 4096
CAPACITY_TOLERANCE_FRAC = 0.005


@dataclass(frozen=True)
class Reached:
    """A step's peaks in bytes; `reserved_bytes` is None on a CPU. `fits` is False where it ran out of memory."""

    fits: bool
    allocated_bytes: int
    reserved_bytes: int | None
    message: str = ""


class Gauge:
    """One kind of model on a device, and what its step takes for any knobs."""

    def __init__(self, device: str, kind: str, samples: int) -> None:
        self._session = Session(WorkerConfig(REF, {"kind": kind, "samples": samples}, device, torch.get_num_threads()))
        self._cuda = device == "cuda"

    def step(self, knobs: Mapping[str, Scalar], micro_batch: int, cap_bytes: int | None = None) -> Reached:
        """Returns what the loop's own step reaches (`loop.rehearse`) beside the model, which stays loaded.

        Raises what is no lack of memory.
        """
        session = self._session
        if self._cuda:
            torch._C._cuda_clearCublasWorkspaces()  # each step makes its own, as the first of a process does
        session.settled(cap_bytes)
        session.memory.limit(cap_bytes)
        config = session.config({**knobs, "batch_size": micro_batch, "micro_batch_size": micro_batch})
        plan = Plan(samples=1_000_000, cap_bytes=cap_bytes)
        state: loop.State | None = None
        try:
            state = loop.prepare(session.contract, config, plan)
            loop.rehearse(state, micro_batch)
            return Reached(True, state.peak_allocated_bytes, self._reserved())
        except (RuntimeError, MemoryError) as error:
            if oom.classify(error) not in (oom.Outcome.OOM, oom.Outcome.HOST_OOM):
                raise
            peak = state.peak_allocated_bytes if state is not None else 0
            state = None
            session.recover(error)
            return Reached(False, peak, self._reserved(), str(error).splitlines()[0][:200])
        finally:
            session.memory.limit(None)

    def capacity_bytes(self, knobs: Mapping[str, Scalar], micro_batch: int, free: Reached) -> int:
        """Returns the smallest cap under which the step is done; `free` is what it reached without one."""
        step = STEP_BYTES if self._cuda else CPU_STEP_BYTES
        high = max(free.allocated_bytes, free.reserved_bytes or 0)
        resolution = max(step, int(CAPACITY_TOLERANCE_FRAC * high))
        return smallest(
            lambda cap: self.step(knobs, micro_batch, cap).fits, free.allocated_bytes - step, high, resolution
        )

    def close(self) -> None:
        """Lets go of the model, so that the next kind has the device."""
        self._session.contract.drop_model()
        self._session.settled(None)

    def _reserved(self) -> int | None:
        return torch.cuda.max_memory_reserved() if self._cuda else None


def smallest(fits: Callable[[int], bool], low: int, high: int, resolution: int) -> int:
    """Returns the smallest cap that fits, to `resolution` bytes and never below it, by bisection.

    `low` is taken not to fit. `high` is tried first, and doubled until it fits; ValueError past 64 times it.
    """
    low, most = max(0, low), 64 * max(1, high)
    while not fits(high):
        low, high = high, 2 * high
        if high > most:
            raise ValueError(f"the step fits under no cap up to {most} bytes")
    while high - low > resolution:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
