"""Records real speeds, memory and trainings of a workload for the simulator: a design over its whole space.

    python -m benchmarks.record_table signals --samples 4800 --out benchmarks/tables/signals.jsonl

What comes out is a journal as a study writes it (`tuning.records`): `footprint` events of every memory coupling, then
in turns `probe`s of system and "both" knobs, and `trial`s with their `rung`s of learning and "both" knobs. No trial is
stopped, nothing is searched: each knob's values are used equally often, in an order that the seed decides. Trials run
without loader processes and with micro-batches of at most 32, which do not change what is learned. An interrupted
recording goes on where it was. With --reduce a run's own trials.jsonl becomes such a table.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.document import provenance
from trainables.knobs import Scalar
from trainables.plan import Plan
from tuning.config.load import load
from tuning.config.space import Space
from tuning.journal.records import Journal, last, read
from tuning.memory.measure import MemoryStage
from tuning.search.probe import reference_batch_size
from tuning.workers.session import Session
from tuning.workers.worker_config import WorkerConfig

LEFT_OUT = ("t", "crc")
SHARES = (4, 2, 1)
"""Trials are evaluated after a quarter, half and all of their samples."""
KEPT: Mapping[str, tuple[str, ...]] = {
    "footprint": (
        *("coupling", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "points", "source", "measured"),
        *("fixed_bytes", "bytes_per_sample"),  # of older records
    ),
    "probe": ("config", "outcome", "samples_per_s", "micro_step_s", "optimizer_step_s", "peak_allocated_bytes"),
    "rung": ("trial", "samples", "values"),
    "trial": ("trial", "config", "outcome", "samples", "values", "evaluate_s", "peak_allocated_bytes"),
}
"""What the simulator reads of each event; of a configuration a table holds only what the space searches."""


def design(space: Space, count: int, seed: int) -> list[dict[str, Scalar]]:
    """Returns so many configurations: every range or list is divided evenly, independently of the others."""
    draw = np.random.default_rng(seed)
    columns: dict[str, list[Scalar]] = {}
    for name, parameter in space.parameters.items():
        at = (draw.permutation(count) + draw.random(count)) / count
        columns[name] = [parameter.at(float(u)) for u in at]
    return [space.complete({n: column[i] for n, column in columns.items()}) for i in range(count)]


def rounded(value: Any) -> Any:
    """Returns the value with every float cut to five digits: no measurement here is better than that."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {n: rounded(v) for n, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value


def kept(event: str, fields: Mapping[str, Any], space: Space) -> dict[str, Any]:
    """Returns what a table holds of an event."""
    found = {n: rounded(fields[n]) for n in KEPT[event] if fields.get(n) is not None}
    if "config" in found:
        found["config"] = {n: v for n, v in found["config"].items() if n in space.parameters}
    return found


def opening(workload: str, space: Space, facts: Mapping[str, Any], samples: int, command: str) -> dict[str, Any]:
    """Returns the fields of the `study` event of a table: of what, where and how it was recorded."""
    own = provenance("record_table")
    names = ("objectives", "train_samples")
    return {
        "workload": workload,
        "space": space.as_raw(),
        "horizon_samples": samples,
        "command": command,
        **{n: own[n] for n in ("device", "machine", "commit", "versions")},
        **{n: facts[n] for n in names},
    }


class Recorder:
    """One warm process and the journal it fills."""

    def __init__(self, name: str, samples: int, seed: int, path: Path) -> None:
        self.config = load([f"workload={name}", "card=cpu"])
        self.space, self.samples, self.seed = self.config.space, samples, seed
        self.journal = Journal.open(path, create=True)
        self.session = Session(WorkerConfig(name, dict(self.config.workload.options), threads=1, seed=seed))
        if last(self.journal.records, "study") is None:
            command = f"python -m benchmarks.record_table {name} --samples {samples} --seed {seed}"
            facts = self.session.describe()
            self.journal.append("study", **opening(name, self.space, facts, samples, command), seed=seed)
            found = _Kept(self.journal, self.space)
            MemoryStage(self.session, self.space, found, None).run(limit_s=30.0)  # type: ignore[arg-type]

    def probe(self, knobs: dict[str, Scalar]) -> None:
        """Measures a speed, once more where its windows disagree."""
        asked = {**knobs, "batch_size": reference_batch_size(self.space)}
        found = self.session.probe(asked, 1.2, 0.04)
        if (found.get("spread_frac") or 0.0) > 0.15:
            found = min(found, self.session.probe(asked, 2.0, 0.04), key=lambda f: f.get("spread_frac") or 1.0)
        self.journal.append("probe", **kept("probe", {**found, "config": asked}, self.space))

    def train(self, number: int, knobs: dict[str, Scalar]) -> None:
        """Trains a configuration to its end."""
        name, milestones = f"t{number:03d}", tuple(self.samples // n for n in SHARES)
        quick: dict[str, Scalar] = {"num_workers": 0, "micro_batch_size": min(int(knobs.get("batch_size", 32)), 32)}
        trial = self.session.trial({**knobs, **quick}, Plan(self.samples, milestones), self.seed)
        while not (found := trial.advance())["done"]:
            rung = {"trial": name, "samples": found["samples"], "values": found["values"]}
            self.journal.append("rung", **kept("rung", rung, self.space))
        self.journal.append("trial", **kept("trial", {**found, "trial": name, "config": knobs}, self.space))


class _Kept:
    """A journal that keeps of each event what a table holds."""

    def __init__(self, journal: Journal, space: Space) -> None:
        self._journal, self._space = journal, space

    @property
    def records(self) -> Any:
        """Those of the journal."""
        return self._journal.records

    def append(self, event: str, /, **fields: Any) -> Any:
        """Writes the event, cut."""
        return self._journal.append(event, **(kept(event, fields, self._space) if event in KEPT else fields))


def reduce(run: Path, out: Path) -> None:
    """Makes a table of a run's trials.jsonl."""
    records, _ = read(run)
    study = last(records, "study")
    if study is None:
        raise SystemExit(f"{run} has no study record")
    space = Space.of(study["config"]["knobs"])
    names = ("workload", "horizon_samples", "command", "objectives", "train_samples", "device", "versions", "seed")
    with Journal.open(out, create=True) as journal:
        journal.append("study", space=space.as_raw(), **{n: study[n] for n in names})
        for record in records:
            if record.event in KEPT and not (record.event == "probe" and record.get("name")):
                journal.append(record.event, **kept(record.event, record.fields, space))


def main() -> None:
    """Records for as long as it is allowed to."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("workload", help="a workload's name; with --reduce a run's trials.jsonl")
    asked.add_argument("--samples", type=int, default=1024, help="of training, a trial")
    asked.add_argument("--trials", type=int, default=28)
    asked.add_argument("--probes", type=int, default=56)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--seconds", type=float, default=500.0, help="stop after that long; the same command goes on")
    asked.add_argument("--reduce", action="store_true")
    asked.add_argument("--out", type=Path, required=True)
    arguments = asked.parse_args()
    if arguments.reduce:
        reduce(Path(arguments.workload), arguments.out)
        return
    begun = time.monotonic()
    recorder = Recorder(arguments.workload, arguments.samples, arguments.seed, arguments.out)
    space = recorder.space
    probes = design(space.subset({"system", "both"}), arguments.probes, arguments.seed)
    trainings = design(space.subset({"learning", "both"}), arguments.trials, arguments.seed + 1)
    events = [r.event for r in recorder.journal.records]
    done, trained = events.count("probe"), events.count("trial")
    while (done < len(probes) or trained < len(trainings)) and time.monotonic() - begun < arguments.seconds:
        if done * len(trainings) <= trained * len(probes) and done < len(probes):
            recorder.probe(probes[done])
            done += 1
        else:
            recorder.train(trained, trainings[trained])
            trained += 1
    print(f"{arguments.workload}: {done} of {len(probes)} probes, {trained} of {len(trainings)} trials", os.getpid())


if __name__ == "__main__":
    main()
