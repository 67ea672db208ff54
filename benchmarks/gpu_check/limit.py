"""Part `limit`: how near the loop is to what the device can do, and to itself when nothing has to be loaded.

For nli and headpose: achieved FLOP/s and bytes/s beside measured ceilings, the share of a step that arithmetic and
memory alone would take, the loop fed from batches on the device in pairs with the loop as it is, and what the profiler
says of a step: how long the device computed, how often it was launched and waited for.
"""

from __future__ import annotations

import statistics
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.fed import pairs
from benchmarks.gpu_check import ceilings
from benchmarks.gpu_check.cards import described, this
from benchmarks.gpu_check.place import Kept, OutOfTime, Place
from benchmarks.gpu_check.workloads import best_of, lacking, options_of
from benchmarks.telemetry_cost import median_interval
from trainables import loop
from trainables.knobs import Scalar
from trainables.plan import Plan
from trainables.stopwatch import Window
from tuning.search.ablation import settled
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

WORKLOADS = {"cuda": ("nli", "headpose"), "cpu": ("headpose",)}
ROUNDS, SECONDS = {"cuda": 9, "cpu": 1}, {"cuda": 3.0, "cpu": 0.2}
PROFILED_S = {"cuda": 0.5, "cpu": 0.2}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
CLOSING_WAITS = 2
"""Of a window's end: its loss is read, and the device waited for."""
SHOWN = 10


def run(place: Place) -> dict[str, Any]:
    """Returns the ceilings, and a row for each workload."""
    kept = Kept(place, "limit")
    found: dict[str, Any] = {"ceilings": kept.row("ceilings", lambda: ceilings.ceilings(place.device)), "rows": []}
    found["finished"] = True
    best = dict(best_of(place))
    for name in WORKLOADS[place.device]:
        try:
            found["rows"].append(
                kept.row(name, partial(measured, place, name, best.get(name), found["ceilings"]), 60.0)
            )
        except OutOfTime:
            found["finished"] = False
    return found


def measured(place: Place, name: str, best: dict[str, Scalar] | None, limits: dict[str, float]) -> dict[str, Any]:
    """Returns what the loop reaches with `best`, else with the `after` of the workload's file."""
    if why := lacking(name):
        return {"workload": name, "why": why}
    about = described(name, this(place))
    knobs = best or settled(about.after)
    session = Session(WorkerConfig(name, options_of(place, name, about), place.device, place.cores, None, place.seed))
    session.warm(knobs)
    speed = session.window(knobs, SECONDS[place.device], place.seed)
    if speed["outcome"] != "ok":
        return {"workload": name, "why": f"{speed['outcome']}: {speed['message']}"[:300]}
    rate = float(speed["samples_per_s"])
    asked = per_sample(session, knobs, limits)
    samples = max(4 * int(knobs["batch_size"]), round(rate * SECONDS[place.device]))
    device = None if place.small else torch.device("cuda")
    found = list(pairs(session, knobs, samples, ROUNDS[place.device], device))
    ratios = [p["loader"] / p["memory"] for p in found]
    low, high = median_interval(ratios)
    return {
        "workload": name,
        "base": "best" if best else "after",
        "knobs": knobs,
        "samples_per_s": rate,
        "data_wait_frac": speed["data_wait_frac"],
        "resident": {"ratio": statistics.median(ratios), "low": low, "high": high, "pairs": found},
        **asked,
        "achieved_flops_per_s": asked["flops_per_sample"] * rate,
        "achieved_bytes_per_s": asked["bytes_per_sample"] * rate,
        "roofline_frac": asked["bound_s_per_sample"] * rate,
        "profile": profiled(session, knobs, place.device),
    }


def per_sample(session: Session, knobs: dict[str, Scalar], limits: dict[str, float]) -> dict[str, Any]:
    """Returns what a sample's share of the first optimiser step asks of the device, forward, backward and optimiser."""
    state = loop.prepare(session.resident, session.config(knobs), Plan(samples=1_000_000))
    batch = int(knobs["batch_size"])
    with ceilings.Asked(session.setting.device, limits) as seen:
        for event in loop.train(state):
            if isinstance(event, Window):
                break
    slowest = Counter(seen.by_operator).most_common(SHOWN)
    return {
        "flops_per_sample": seen.flops / batch,
        "bytes_per_sample": seen.bytes / batch,
        "bound_s_per_sample": seen.bound_s / batch,
        "operators_per_step": seen.operators,
        "bound_s_by_operator": dict(slowest),
    }


def profiled(session: Session, knobs: dict[str, Scalar], device: str) -> dict[str, Any]:
    """Returns what torch's profiler saw of a window: time the device computed, launches, waits, what took longest."""
    state = loop.prepare(
        session.resident, session.config(knobs), Plan(samples=1_000_000_000, window_s=PROFILED_S[device])
    )
    events = (e for e in loop.train(state) if isinstance(e, Window))
    next(events)
    next(events)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with profile(activities=activities) as seen:
        window = next(events)
    events.close()
    averages = seen.key_averages()
    calls = Counter({e.key: e.count for e in averages})
    took = Counter({e.key: _self_us(e, device) for e in averages})
    return {
        "steps": window.steps,
        "wall_s": window.wall_s,
        "busy_frac": sum(took.values()) / 1e6 / window.wall_s,
        "launches_per_step": sum(n for key, n in calls.items() if "LaunchKernel" in key) / window.steps,
        "waits_per_step": max(0, sum(calls[key] for key in WAITS) - CLOSING_WAITS) / window.steps,
        "longest_us_per_step": {key: us / window.steps for key, us in took.most_common(SHOWN)},
    }


def _self_us(event: Any, device: str) -> float:
    if event.device_type.name.lower() != device:  # an operator of the host is also told the time of its kernels
        return 0.0
    name = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    return float(getattr(event, name, 0.0))
