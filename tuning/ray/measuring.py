"""Memory and speed of a function trainable before its search, in one process that has a trial's resources."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainables.knobs import Scalar
from tuning.config.space import Choice
from tuning.journal import events
from tuning.journal.records import Journal
from tuning.memory.groups import guard, learn, need_of, refused
from tuning.memory.guard import MOST_P_OOM_PROBE, MemoryGuard
from tuning.memory.measure import Footprint, MemoryStage
from tuning.memory.oom import Outcome
from tuning.ray.spaces import MICRO_BATCH, TuneSpace
from tuning.ray.training import ProbeEnds, StepMeter, Train, free

MEMORY_FRAC = 0.5
"""The share of the time that memory may take; speeds have the rest."""
PROBE_S, LEAST_STEPS = 0.3, 5
"""A probe times steps for so long, and at least so many; its speed is their median."""


@dataclass
class FunctionProbes:
    """Runs the function for a few steps at a time; `Footprints` of the memory stage."""

    train: Train
    space: TuneSpace
    cap_bytes: int | None

    def footprint(self, knobs: Mapping[str, Scalar], micro_batches: Sequence[int]) -> Footprint:
        """Returns the peak bytes of two steps at each batch size, up to the first that did not fit."""
        pairs, floor_bytes, message = list[tuple[int, int]](), 0, ""
        for size in micro_batches:
            meter, failed = self._ran({**knobs, "batch_size": size}, lambda own: own.steps > 1)
            if failed:
                message = failed["message"]
                break
            pairs.append((size, meter.peak_bytes or 0))
            floor_bytes = meter.floor_bytes
        return Footprint(
            outcome=str(Outcome.OOM if message else Outcome.OK),
            message=message,
            measured=tuple(pairs),
            measured_alone=tuple(pairs),
            optimizer_bytes=floor_bytes,
        )

    def probe(self, knobs: Mapping[str, Scalar]) -> events.Timed:
        """Returns the speed of a configuration, the median of its steps."""
        meter, failed = self._ran(knobs, _is_timed)
        more: dict[str, Any] = {"peak_allocated_bytes": meter.peak_bytes, "cap_bytes": self.cap_bytes}
        if failed:
            found = {name: failed[name] for name in ("outcome", "message", "wanted_bytes")}
            return events.Timed(**found, **more)
        if not meter.between_s:
            said = "train(config) ended before two optimiser steps of torch.optim"
            return events.Timed(outcome=str(Outcome.NO_RESULT), message=said, **more)
        step_s = statistics.median(meter.between_s)
        more |= {"samples_per_s": int(knobs["batch_size"]) / step_s, "micro_step_s": step_s, "optimizer_step_s": 0.0}
        return events.Timed(outcome=str(Outcome.OK), **more)

    def _ran(
        self, knobs: Mapping[str, Scalar], is_over: Callable[[StepMeter], bool]
    ) -> tuple[StepMeter, dict[str, Any]]:
        """Returns what was seen of a run that ended when `is_over` said so, and how it ran out of memory, if it did."""
        failed: dict[str, Any] = {}
        torch.manual_seed(0)
        with StepMeter(self.cap_bytes, is_over=is_over) as meter:
            try:
                self.train(dict(self.space.config(knobs)))
            except ProbeEnds:
                pass
            except Exception as error:
                failed = meter.failure(error)
        free()
        return meter, failed


def _is_timed(meter: StepMeter) -> bool:
    return len(meter.between_s) >= LEAST_STEPS and sum(meter.between_s) >= PROBE_S


def measure(
    train: Train,
    cap_bytes: int | None,
    space: TuneSpace,
    study: Mapping[str, Any],
    reference: Mapping[str, Scalar],
    limit_s: float,
) -> bytes:
    """Returns the journal of what was measured in `limit_s`: memory first, then speeds, the reference's first.

    `study` are the fields of its first record. Sizes that are predicted not to fit are left out. Raises what the user's
    function raises, but for an OOM.
    """
    is_cuda, began = torch.cuda.is_available(), time.monotonic()
    if cap_bytes is None and is_cuda:
        cap_bytes = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    probes = FunctionProbes(train, space, cap_bytes)
    with tempfile.TemporaryDirectory() as folder, Journal.open(Path(folder) / "trials.jsonl", create=True) as journal:
        device = {"type": "cuda" if is_cuda else "cpu"}
        journal.append(events.StudyRecord, **study, card={"cap_bytes": cap_bytes}, device=device)
        journal.append(events.KindsRecord, changed={MICRO_BATCH: "a function trains each batch in one piece"})
        if cap_bytes is not None:
            stage = MemoryStage(probes, space.space, journal, cap_bytes, cuda=is_cuda)
            stage.run(limit_s=MEMORY_FRAC * limit_s)
        learned = guard(journal.run, cap_bytes)
        for knobs in _to_probe(space, reference):
            if journal.run.probes and time.monotonic() - began > limit_s:
                break
            _probe(probes, knobs, journal, learned)
        return journal.path.read_bytes()


def _probe(probes: FunctionProbes, knobs: Mapping[str, Scalar], journal: Journal, learned: MemoryGuard) -> None:
    """Writes the speed of a configuration, or that it is not expected to fit; teaches the guard."""
    verdict = learned.judge(*need_of(knobs, learned.table), threshold=MOST_P_OOM_PROBE)
    if verdict.fits:
        found = events.known_fields(probes.probe(knobs))
        record = journal.append(events.ProbeRecord, config=dict(knobs), p_oom=verdict.p_oom, **found)
        learn(learned, record)
    else:
        refused(journal, knobs, verdict, learned.cap_bytes, "probe")


def _to_probe(space: TuneSpace, reference: Mapping[str, Scalar]) -> Iterator[dict[str, Scalar]]:
    """Yields the configurations whose speeds may differ, each once: the fewer values differ from the reference's the
    sooner.
    """
    table, others = space.space.table, dict[str, list[Scalar]]()
    for name, parameter in space.space.parameters.items():
        if name == "batch_size" or table[name].kind != "learning":
            values = parameter.values if isinstance(parameter, Choice) else parameter.spread()
            others[name] = [value for value in values if value != reference.get(name)]
    for count in range(len(others) + 1):
        for names in itertools.combinations(others, count):
            for changed in itertools.product(*(others[name] for name in names)):
                knobs = {**reference, MICRO_BATCH: space.space.fixed[MICRO_BATCH]}
                yield space.space.complete({**knobs, **dict(zip(names, changed, strict=True))})
