"""Recorded trials as a world: what was measured where it was, and between it a guess that says that it is one.

    table = Table(read(Path("benchmarks/tables/signals.jsonl"))[0])
    table.step_s(knobs), table.values(knobs, samples, seed), table.answers

A table is made of the `footprint`, `probe`, `rung` and `trial` records of any run. A configuration that was recorded is
answered with its record. Between records the rule is: coordinates are 0 to 1 along each searched knob (logarithmic
where its range is; the place in the list for numbers; equal or not for words and switches). What is likely to weigh
most counts `HEAVY` times: of speed the micro-batch, the workers and the "both" knobs; of quality the learning rate and
the "both" knobs. The `NEAREST` recorded neighbours are averaged with weights 1 / distance^2: of step times the
logarithm of the seconds a sample, of qualities the value itself. Speed knows nothing of learning knobs and quality
nothing of system knobs, which is how they are defined. A value between two recorded rungs lies on the line over the
logarithm of the samples.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.knobs import Knobs, Scalar, kind_of
from tuning.config.space import Space
from tuning.journal.records import Record, last
from tuning.memory.groups import key_of
from tuning.memory.guard import GRADIENTS_HELD
from tuning.memory.profile import MemoryProfile, Sizes
from tuning.search.coordinates import Coordinates, Floats

NEAREST, HEAVY = 3, 3.0


class _Neighbours:
    """Recorded rows by their coordinates, and the rule by which they answer."""

    def __init__(
        self, space: Space, kinds: Sequence[str], heavy: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> None:
        names = [n for n in space.parameters if kind_of(n) in kinds or n in heavy]
        self._coordinates = Coordinates(space, names)
        weights = [HEAVY if n in heavy or kind_of(n) == "both" else 1.0 for n in names]
        self._weights = np.repeat(weights, self._coordinates.widths)
        self._points = np.array([self._coordinates.at(row) for row in rows]).reshape(len(rows), -1)

    def around(self, knobs: Mapping[str, Scalar]) -> tuple[NDArray[np.intp], Floats, bool]:
        """Returns the rows that answer, their weights, which sum to 1, and whether that is a guess.

        The very configuration answers alone.
        """
        distances = np.sqrt((((self._points - self._coordinates.at(knobs)) * self._weights) ** 2).sum(axis=1))
        order = np.argsort(distances, kind="stable")
        if distances[order[0]] < 1e-9:
            same = order[: int((distances < 1e-9).sum())]
            return same, np.full(len(same), 1.0 / len(same)), False
        chosen = order[:NEAREST]
        weights = 1.0 / distances[chosen] ** 2
        return chosen, weights / weights.sum(), True


class _Step(NamedTuple):
    log_sample_s: float
    log_optimizer_s: float


class Table:
    """A world (`rks.sim.simulator.World`) of recorded trials. `answers` counts what was recorded and what is guessed.

    Raises ValueError where the records hold no probe that succeeded, no trial with values, or no footprint.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        study = last(records, "study")
        if study is None:
            raise ValueError("the records have no study record, which names space and objectives")
        self.space = Space.of(study.get("space") or study["config"]["knobs"])
        self.objectives: dict[str, Any] = dict(study["objectives"])
        self.horizon = int(study["horizon_samples"])
        self.train_samples = int(study["train_samples"])
        self.answers: Counter[str] = Counter()
        self._steps: list[_Step] = []
        self._curves: list[dict[int, dict[str, float]]] = []
        # A configuration named beside the search need not be in the space, where these coordinates are.
        probes = [r for r in records if r.event == "probe" and r["outcome"] == "ok" and not r.get("name")]
        self._steps = [self._step(r) for r in probes]
        trials = self._trials(records)
        self._prints = {
            key_of({**self._whole(r["coupling"]), GRADIENTS_HELD: True}): MemoryProfile.of(r.fields)
            for r in records
            if r.event == "footprint"
        }
        for found, what in (
            (probes, "probe that succeeded"),
            (trials, "trial with values"),
            (self._prints, "footprint"),
        ):
            if not found:
                raise ValueError(
                    f"the records of {study.get('workload')} hold no {what}: there is nothing to answer from"
                )
        self._speed = _Neighbours(
            self.space, ("system", "both"), ("micro_batch_size", "num_workers"), [r["config"] for r in probes]
        )
        self._quality = _Neighbours(self.space, ("learning", "both"), ("learning_rate",), [r["config"] for r in trials])
        self._evaluate_s = statistics.median(
            float(r.get("evaluate_s") or 0.0) / max(1, len(curve))
            for r, curve in zip(trials, self._curves, strict=True)
        )

    def step_s(self, knobs: Mapping[str, Scalar]) -> tuple[float, float]:
        """Returns the seconds of a micro-step, at the knobs' own micro-batch, and of an optimiser step."""
        rows, weights, guessed = self._speed.around(knobs)
        self._count("speed", guessed=guessed)
        log_sample_s, log_optimizer_s = weights @ np.array([self._steps[i] for i in rows])
        own = Knobs.of(knobs)
        micro = min(own.micro_batch_size, own.batch_size)
        return math.exp(log_sample_s) * micro, math.exp(log_optimizer_s)

    def peak_bytes(self, knobs: Mapping[str, Scalar], micro_batch: int) -> int:
        """Returns what the footprint of the memory coupling says, that of the most alike where it was not recorded."""
        return round(self._print(knobs).peak(micro_batch).total_bytes)

    def sizes(self, knobs: Mapping[str, Scalar]) -> Sizes:
        """Returns the bytes of parameters, gradients and the optimiser's state."""
        return self._print(knobs).sizes

    def values(self, knobs: Mapping[str, Scalar], samples: int, seed: int) -> dict[str, float]:
        """Returns the objectives after so many training samples; NaN where a recorded neighbour diverged."""
        rows, weights, guessed = self._quality.around(knobs)
        self._count("quality", guessed=guessed)
        curves = [self._curves[i] for i in rows]
        return {
            name: float(sum(w * self._on(curve, name, samples) for curve, w in zip(curves, weights, strict=True)))
            for name in self.objectives
        }

    def evaluate_s(self, knobs: Mapping[str, Scalar]) -> float:
        """Returns the median seconds of one recorded evaluation."""
        return self._evaluate_s

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _whole(self, knobs: Mapping[str, Scalar]) -> dict[str, Scalar]:
        return {**self.space.fixed, **knobs}

    def _count(self, what: str, *, guessed: bool) -> None:
        self.answers[f"{what}, {'interpolated' if guessed else 'recorded'}"] += 1

    def _step(self, probe: Record) -> _Step:
        own = Knobs.of(self._whole(probe["config"]))
        micro = min(own.micro_batch_size, own.batch_size)
        # An optimiser step that was too short to be seen has the length of a microsecond.
        return _Step(math.log(max(probe["micro_step_s"], 1e-9) / micro), math.log(max(probe["optimizer_step_s"], 1e-6)))

    def _trials(self, records: Sequence[Record]) -> list[Record]:
        """Returns the trials with values at a rung or at the end, and keeps the curve of each."""
        rungs: dict[str, dict[int, dict[str, float]]] = defaultdict(dict)
        for record in records:
            if record.event == "rung":
                rungs[record["trial"]][int(record["samples"])] = self._finite(record)
        found = []
        for record in records:
            if record.event != "trial":
                continue
            curve = dict(rungs.get(record["trial"], {}))
            if record["outcome"] == "ok":
                curve[int(record["samples"])] = self._finite(record)
            if curve:
                self._curves.append(dict(sorted(curve.items())))
                found.append(record)
        return found

    def _finite(self, record: Record) -> dict[str, float]:
        values = record["values"]
        return {n: math.nan if values.get(n) is None else float(values[n]) for n in self.objectives}

    def _on(self, curve: Mapping[int, Mapping[str, float]], name: str, samples: int) -> float:
        at = [math.log(s) for s in curve]
        return float(np.interp(math.log(samples), at, [values[name] for values in curve.values()]))

    def _print(self, knobs: Mapping[str, Scalar]) -> MemoryProfile:
        key = key_of({**self._whole(knobs), GRADIENTS_HELD: True})  # tables do not tell batches of one micro-step apart
        if key not in self._prints:
            wanted = set(key)
            key = max(self._prints, key=lambda other: len(wanted & set(other)))
        return self._prints[key]
