"""A search whose workers only pretend: scheduler, dispatcher, sampler, pruner, journal as shipped, trials by formula.

decisions(1000, seed=0)     # see `benchmarks.many_workers`
"""

from __future__ import annotations

import contextlib
import cProfile
import math
import os
import random
import tempfile
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainables.knobs import Knobs, Scalar
from tuning.config.load import load
from tuning.journal.records import Journal
from tuning.memory.groups import guard
from tuning.memory.measure import MemoryStage
from tuning.search.probe import ProbeStage
from tuning.search.protocols import TrialPlan
from tuning.search.scheduler import SearchTerms, TrialScheduler
from tuning.workers.dispatch import Dispatcher, Placed

PLAN = TrialPlan(800, (100, 200, 400, 800), shrink=True, concurrency=100, threads=1)


class Formulas:
    """A profiler, and trainings, whose speed, memory and quality are formulas of the knobs."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> dict[str, Any]:
        """Returns 100 MB and 10 MB a sample."""
        sizes = {"parameter_bytes": 60_000_000, "gradient_bytes": 10_000_000, "optimizer_bytes": 20_000_000}
        return {**sizes, "measured": [(m, 100_000_000 + 10_000_000 * m) for m in micro_batches], "message": ""}

    def probe(self, knobs: Mapping[str, Scalar], time_s: float, best_samples_per_s: float) -> dict[str, Any]:
        """Returns a speed from 10 ms a micro-step and 1 ms a sample, less with bf16 and loader processes."""
        own = Knobs.of(knobs)
        micro = min(own.micro_batch_size, own.batch_size)
        step_s = (0.010 + 0.001 * micro) * (2 / 3 if own.amp_dtype == "bf16" else 1.0) - 0.002 * min(own.num_workers, 2)
        rate = own.batch_size / (math.ceil(own.batch_size / micro) * step_s + 0.001)
        return {
            **{"outcome": "ok", "message": "", "samples_per_s": rate, "windows": [rate] * 3},
            **{"micro_step_s": step_s, "optimizer_step_s": 0.001, "wall_s": 0.0},
            "peak_allocated_bytes": 100_000_000 + 10_000_000 * micro,
        }

    def state(self, knobs: Mapping[str, Scalar], samples: int) -> dict[str, Any]:
        """Returns a trial's state: a noisy quality that is best at a learning rate of 1e-3, and grows with samples."""
        distance = abs(math.log10(Knobs.of(knobs).learning_rate / 1e-3))
        quality = (0.9 - 0.1 * distance) * (1.0 - 0.3 * math.exp(-samples / 300)) + self._draw.gauss(0.0, 0.01)
        rate = self.probe(knobs, 0.0, 0.0)["samples_per_s"]
        return {
            **{"outcome": "ok", "message": "", "values": {"accuracy": quality}, "samples": samples, "ooms": []},
            **{"knobs": dict(knobs), "done": samples == PLAN.samples, "measured_samples_per_s": rate},
            **{"train_s": samples / rate, "evaluate_s": 0.1, "peak_allocated_bytes": 1},
        }


def decisions(trials: int, seed: int, profile: cProfile.Profile | None = None) -> dict[str, Any]:
    """Returns how fast a search of so many trials decides with 100 slots, and what it decided."""
    config, machine = load(["workload=nli", "card=cpu"]), Formulas(seed)
    with tempfile.TemporaryDirectory() as folder, Journal.open(Path(folder) / "trials.jsonl", create=True) as journal:
        MemoryStage(machine, config.space, journal, None, clock=_no_time).run()
        learned = guard(journal.records, None)
        probing = config.budget.probe.model_copy(update={"max_time_s": 60.0})
        ProbeStage(machine, config.space, journal, learned, probing, clock=_no_time).run({}, lambda r: None)
        terms = SearchTerms("staged", trials, None, seed, 2, {"accuracy": "max"})
        scheduler = TrialScheduler(journal, config.space, learned, terms, PLAN, lambda r: None)
        known, begun, begun_cpu = len(journal.records), time.perf_counter(), time.process_time()
        if profile is not None:
            profile.enable()
        counts, most_s, full = _work(Dispatcher(scheduler, PLAN, None), machine)
        if profile is not None:
            profile.disable()
        wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - begun_cpu
        ends = Counter(r["outcome"] for r in journal.records if r.event == "trial")
        written = len(journal.records) - known
    return {
        **{"trials": trials, "slots_filled": full, "decisions": dict(counts), "outcomes": dict(ends)},
        **{"records": written, "wall_s": wall_s, "cpu_s": cpu_s, "per_s": counts.total() / wall_s},
        "most_ms": 1e3 * most_s,
        "driver_mib": peak_kib(os.getpid()) / 1024,
    }


def _work(dispatcher: Dispatcher, machine: Formulas) -> tuple[Counter[str], float, int]:
    """Returns how many decisions of each kind there were, the seconds of the longest, and the most slots in use."""
    counts, most_s, full = Counter[str](), 0.0, 0
    running = deque[tuple[Placed, int]]()
    while True:
        begun = time.perf_counter()
        if (taken := dispatcher.take()) is not None:
            running.append((taken, 0))
            counts["proposals"] += 1
        elif running:
            placed, rung = running.popleft()
            found = machine.state(placed.request.knobs, PLAN.milestones[rung])
            counts["rungs"] += not found["done"]
            if dispatcher.goes_on(placed, found):
                running.append((placed, rung + 1))
            else:
                dispatcher.ended(placed, found)
                counts["ends"] += 1
        else:
            return counts, most_s, full
        most_s, full = max(most_s, time.perf_counter() - begun), max(full, len(running))


def peak_kib(pid: int) -> int:
    """Returns the peak resident memory of a process, 0 where it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1])
    return 0


def _no_time() -> float:
    return 0.0
