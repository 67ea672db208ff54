"""The windows of one measurement and what the machine did in them, summed up as plain values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainables import loop
from trainables.stopwatch import LOADING, SPANS, Window
from tuning.telemetry import Sampler


def read_windows(state: loop.State, sampler: Sampler, dropped: int = 1) -> Iterator[Window]:
    """Yields the windows of a run without milestones, the first `dropped` left out; each is read as it closes."""
    events = (event for event in loop.train(state) if isinstance(event, Window))
    for _ in range(dropped):
        next(events, None)
    sampler.begin()
    for window in events:
        sampler.read()
        yield window


def speed(windows: Sequence[Window]) -> dict[str, Any]:
    """Returns samples a second over all windows, what a micro-step and an optimiser step take, and the spans."""
    rates = [w.samples_per_s for w in windows]
    spans = spans_of(windows)
    micro_steps, steps, wall_s, optimizer_s = (spans[n] for n in ("micro_steps", "steps", "wall_s", "optimizer_s"))
    return {
        "windows": rates,
        # All samples over all seconds, not the median of windows: batches differ in length, and their mix is the point.
        "samples_per_s": sum(w.samples for w in windows) / wall_s if wall_s else None,
        "spread_frac": spread(rates),
        "optimizer_step_s": optimizer_s / steps if steps else 0.0,
        "micro_step_s": (wall_s - optimizer_s) / micro_steps if micro_steps else 0.0,
        "data_wait_frac": spans["data_wait_s"] / wall_s if wall_s else 0.0,
        "spans": spans,
    }


def spans_of(windows: Sequence[Window]) -> dict[str, float]:
    """Returns the sums over the windows: seconds of each span and of all, micro-steps and optimiser steps."""
    names = (*(f"{span}_s" for span in (*SPANS, *LOADING)), "wall_s", "micro_steps", "steps")
    return {name: sum(getattr(w, name) for w in windows) for name in names}


def spread(rates: Sequence[float]) -> float:
    """Returns the half-width of a 95 % interval of the mean over the mean (normal, 1.96 standard errors); 1 below 3."""
    if len(rates) < 3:
        return 1.0
    standard_error = statistics.stdev(rates) / math.sqrt(len(rates))
    return 1.96 * standard_error / statistics.fmean(rates)


def sampler_of(device: str) -> Sampler:
    """Returns what reads the device this process trains on; NVML counts cards otherwise than torch, so by its UUID."""
    if device != "cuda":
        return Sampler(device)
    uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", ""))
    return Sampler(device, uuid, counters={"allocator_retries": _allocator_retries})


def _allocator_retries() -> float:
    """Returns how often cached memory was freed because an allocation failed, since the process began."""
    return float(torch.cuda.memory_stats().get("num_alloc_retries", 0))
